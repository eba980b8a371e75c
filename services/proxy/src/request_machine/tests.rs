//! Samples for the tests of the machines, and what holds for every order of events.

mod encode;
mod property;
mod query_of_death;
mod request;

use super::output::{Belief, Encoded, Wanted};
use std::time::Instant;
use triptych_core::lifetime::ItemSource;
use triptych_core::{ContentKey, DType, EncodedItem, Extent, Fingerprint, Modality, TowerIdx};

/// Description of an output under the key `[seed; 32]`.
pub(crate) fn item(seed: u8) -> EncodedItem {
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

/// The output that an encoder made.
pub(crate) fn made(seed: u8, at: Instant) -> Encoded {
    Encoded { source: ItemSource::Encoded, ..Encoded::found(item(seed), Belief::Made, at) }
}

/// The output as it is looked for.
pub(crate) fn wanted(seed: u8) -> Wanted {
    let EncodedItem { key, fingerprint, modality, .. } = item(seed);
    Wanted { key, fingerprint, modality, tower: TowerIdx(seed % 2) }
}
