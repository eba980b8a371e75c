//! Element of activations and caches.

use half::bf16;

/// Element of activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Element {
    F32,
    Bf16,
}

impl Element {
    /// Bytes.
    pub(super) fn size(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }

    /// Values as their bytes, rounded to nearest even.
    pub(super) fn encode(self, values: impl Iterator<Item = f32>, to: &mut Vec<u8>) {
        match self {
            Self::F32 => values.for_each(|value| to.extend(value.to_ne_bytes())),
            Self::Bf16 => values.for_each(|value| to.extend(bf16::from_f32(value).to_ne_bytes())),
        }
    }

    /// Appends the values of bytes.
    pub(super) fn decode(self, bytes: &[u8], to: &mut Vec<f32>) {
        match self {
            Self::F32 => to.extend(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b))),
            Self::Bf16 => {
                to.extend(bytes.as_chunks::<2>().0.iter().map(|b| bf16::from_ne_bytes(*b).to_f32()))
            }
        }
    }
}
