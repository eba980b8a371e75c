//! Sizes of the machine's caches.

/// Size assumed where the system reports none: the smallest L2 cache of machines that have AVX-512.
const USUAL_L2: usize = 1 << 20;

/// Bytes of a core's L2 cache.
pub(super) fn l2_bytes() -> usize {
    reported().unwrap_or(USUAL_L2)
}

/// The size that Linux reports.
fn reported() -> Option<usize> {
    let text = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size").ok()?;
    bytes(text.trim()).filter(|n| *n > 0)
}

/// The bytes of a size like `512K`.
fn bytes(text: &str) -> Option<usize> {
    let (number, unit) = match text.as_bytes().last()? {
        b'K' => (&text[..text.len() - 1], 1 << 10),
        b'M' => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    number.parse::<usize>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_the_system_writes_them() {
        assert_eq!(["512K", "2M", "4096"].map(bytes), [Some(512 << 10), Some(2 << 20), Some(4096)]);
        assert_eq!(["", "K", "many", "99999999999999999999K"].map(bytes), [None; 4]);
        assert!(l2_bytes() > 0);
    }
}
