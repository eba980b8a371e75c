//! The identity of an encoder's tower apart from who computes it, so that an encoder of another engine is known by its rows.
//!
//! A [`crate::Fingerprint`] of ours covers precision and kernels' arithmetic too. Rows that vLLM computes with the same weights,
//! configuration and processor are other rows by roundings, so they have a fingerprint of their own, which follows from the tower.
//! `services/ec/python` makes the same digests from the same files (`tower.py` there).

use crate::{DType, Fingerprint, Modality};

/// Types of rows that vLLM's encoders give.
const VLLM_ROWS: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];

/// Digests of all that a tower computes from, beside the item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tower {
    /// Its part of `config.json`.
    pub configuration: Fingerprint,
    /// Settings of its processor.
    pub processor: Fingerprint,
    /// Names, types, shapes and bytes of its tensors.
    pub weights: Fingerprint,
}

impl Tower {
    /// The fingerprint of rows of a type that vLLM computes with it.
    pub fn rows_of_vllm(&self, modality: Modality, dtype: DType) -> Fingerprint {
        let Self { configuration, processor, weights } = self;
        Fingerprint::of([
            b"rows of vLLM".as_slice(),
            modality.as_str().as_bytes(),
            dtype.as_str().as_bytes(),
            configuration.as_bytes(),
            processor.as_bytes(),
            weights.as_bytes(),
        ])
    }

    /// True if a fingerprint is that of rows which vLLM computes with it, whatever their type.
    pub fn is_of_vllm(&self, modality: Modality, fingerprint: &Fingerprint) -> bool {
        VLLM_ROWS.iter().any(|dtype| self.rows_of_vllm(modality, *dtype) == *fingerprint)
    }

    /// The parts in which two towers differ, by name.
    pub fn differences(&self, other: &Self) -> Vec<&'static str> {
        let parts = [
            ("configuration", self.configuration == other.configuration),
            ("processor settings", self.processor == other.processor),
            ("weights", self.weights == other.weights),
        ];
        parts.into_iter().filter(|(_, same)| !same).map(|(name, _)| name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u8) -> Fingerprint {
        Fingerprint::from_bytes([n; 32])
    }

    fn tower(configuration: u8, processor: u8, weights: u8) -> Tower {
        Tower { configuration: digest(configuration), processor: digest(processor), weights: digest(weights) }
    }

    #[test]
    fn rows_have_a_fingerprint_of_their_own_by_kind_and_type() {
        let one = tower(1, 2, 3);
        let image = one.rows_of_vllm(Modality::Image, DType::Bf16);
        // `services/ec/python/tests/test_tower.py` has the same.
        assert_eq!(image.to_string(), "36bbc594e7ef14c62e5e42f9001079b56e6a2020832b2af56d4c1adad5b30de3");
        assert!(one.is_of_vllm(Modality::Image, &image));
        assert!(!one.is_of_vllm(Modality::Video, &image) && !one.is_of_vllm(Modality::Image, &digest(1)));
        assert!(!tower(2, 1, 3).is_of_vllm(Modality::Image, &image));
    }

    #[test]
    fn differences_are_named() {
        assert!(tower(1, 2, 3).differences(&tower(1, 2, 3)).is_empty());
        assert_eq!(tower(1, 2, 3).differences(&tower(1, 9, 8)), ["processor settings", "weights"]);
        assert_eq!(tower(1, 2, 3).differences(&tower(0, 2, 3)), ["configuration"]);
    }
}
