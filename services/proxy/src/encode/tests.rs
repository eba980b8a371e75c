//! Samples for the tests of the modules below.

use super::*;
use triptych_core::{DType, Extent, Fingerprint, Modality};

/// A READY output under the key `[seed; 32]`.
pub(super) fn encoded(seed: u8) -> Encoded {
    Encoded::cached(item(seed), Belief::Made)
}

pub(super) fn item(seed: u8) -> EncodedItem {
    EncodedItem {
        key: ContentKey::from_bytes([seed; 32]),
        fingerprint: Fingerprint::from_bytes([1; 32]),
        modality: Modality::Image,
        n_tokens: 4,
        hidden: 8,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [seed; 32],
    }
}
