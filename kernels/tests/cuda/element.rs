//! Elements of activations as tests see them, and test data.

use cudarc::driver::DeviceRepr;

/// An element of an activation.
pub trait Element: DeviceRepr + Copy + PartialEq + std::fmt::Debug + 'static {
    /// End of a kernel's name.
    const NAME: &'static str;
    /// Error of one rounding, relative to one plus the value.
    const STEP: f32;

    fn from_f32(value: f32) -> Self;
    fn to_f32(self) -> f32;
    /// A value of which every use shows.
    fn poison() -> Self;
}

impl Element for f32 {
    const NAME: &'static str = "f32";
    const STEP: f32 = 1e-6;

    fn from_f32(value: f32) -> Self {
        value
    }

    fn to_f32(self) -> f32 {
        self
    }

    fn poison() -> Self {
        f32::NAN
    }
}

/// A bf16 by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Bf16(pub u16);

// SAFETY: two bytes, of which any value is one.
unsafe impl DeviceRepr for Bf16 {}
// SAFETY: as above.
unsafe impl cudarc::driver::ValidAsZeroBits for Bf16 {}

impl Element for Bf16 {
    const NAME: &'static str = "bf16";
    const STEP: f32 = 4e-3;

    fn from_f32(value: f32) -> Self {
        Self(half::bf16::from_f32(value).to_bits())
    }

    fn to_f32(self) -> f32 {
        half::bf16::from_bits(self.0).to_f32()
    }

    fn poison() -> Self {
        Self(0xffff)
    }
}

/// Values in −1 ..= 1 that depend on the seed alone.
pub fn values(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

/// Numbers below `bound` that depend on the seed alone.
pub fn indices(seed: u64, n: usize, bound: usize) -> Vec<u32> {
    values(seed, n).into_iter().map(|v| ((v + 1.0) / 2.0 * bound as f32) as u32 % bound as u32).collect()
}

/// The values as they are after storage, and their elements.
pub fn elements<T: Element>(seed: u64, n: usize) -> Vec<T> {
    values(seed, n).into_iter().map(T::from_f32).collect()
}

pub fn widened<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

/// An error unless `actual` is nearly `expect`.
#[track_caller]
pub fn close<T: Element>(what: &str, actual: &[T], expect: &[f32], tolerance: f32) {
    assert_eq!(actual.len(), expect.len(), "values of {what}");
    for (i, (a, &e)) in actual.iter().zip(expect).enumerate() {
        let a = a.to_f32();
        let near = a == e || (a - e).abs() <= tolerance * (1.0 + e.abs());
        assert!(near, "{what} {}: value {i} is {a}, not {e}", T::NAME);
    }
}
