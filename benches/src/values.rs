//! Random values that are the same in every run.

/// Values in −1 ..= 1: a device takes less time over equal ones.
pub fn values(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / (u32::MAX / 2) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}
