//! Numbers, sizes and times as people read and write them.

use std::time::Duration;

/// A number of a flag as sizes of the libraries are.
pub fn size(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// Bytes of so many MiB.
pub fn mib(n: u32) -> usize {
    size(n).saturating_mul(1 << 20)
}

/// `51 865`.
pub fn count(n: usize) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(' ');
        }
        out.push(c);
    }
    out
}

/// `3.84 MB`: decimal units, three digits.
pub fn bytes_text(n: usize) -> String {
    let mut value = n as f64;
    let mut unit = "B";
    for next in ["kB", "MB", "GB", "TB"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    let decimals = match (unit, value) {
        ("B", _) => 0,
        (_, v) if v < 10.0 => 2,
        (_, v) if v < 100.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {unit}")
}

/// Units of a time, the largest first.
const TIMES: [(&str, u64); 4] = [("d", 86_400), ("h", 3600), ("m", 60), ("s", 1)];

/// `3h`: the largest unit that fits, cut.
pub fn age_text(age: Duration) -> String {
    let seconds = age.as_secs();
    let fits = TIMES.iter().find(|(_, length)| seconds >= *length);
    fits.map_or_else(|| "0s".to_owned(), |(unit, length)| format!("{}{unit}", seconds / length))
}

/// Reads `90s`, `15m`, `12h`, `7d`.
///
/// # Errors
/// The allowed forms, for any other text.
pub fn parse_age(text: &str) -> Result<Duration, String> {
    let read = TIMES.iter().find_map(|(unit, length)| {
        let n: u64 = text.strip_suffix(unit)?.parse().ok()?;
        n.checked_mul(*length).map(Duration::from_secs)
    });
    read.ok_or_else(|| {
        "allowed are whole seconds, minutes, hours or days, as in 90s, 15m, 12h or 7d".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(
            [0, 999, 1000, 51_865, 1_543_490_560].map(count).join("|"),
            "0|999|1 000|51 865|1 543 490 560"
        );
        let sizes = [0, 999, 1000, 3_840_000, 245_760_000, 12_345_678_901];
        assert_eq!(sizes.map(bytes_text).join("|"), "0 B|999 B|1.00 kB|3.84 MB|246 MB|12.3 GB");
    }

    #[test]
    fn times_are_written_in_one_unit_and_read_back() {
        for (seconds, text) in [(0, "0s"), (59, "59s"), (60, "1m"), (7199, "1h"), (86_400 * 9 + 5, "9d")] {
            assert_eq!(age_text(Duration::from_secs(seconds)), text);
        }
        assert_eq!(parse_age("15m"), Ok(Duration::from_secs(900)));
        for wrong in ["", "d", "5", "5w", "-1s", "1.5h", "99999999999999999d"] {
            assert!(parse_age(wrong).unwrap_err().contains("7d"), "{wrong}");
        }
    }
}
