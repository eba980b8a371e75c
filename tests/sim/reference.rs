//! The reference model: encoder and decoder are pure functions, so that clients can compute the expected answer.

use std::sync::Arc;
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};

/// The model that all simulated workers serve.
pub const MODEL: &str = "sim";
/// Width of a row.
const HIDDEN: u32 = 4;

/// Fingerprint of the encoder of all simulated workers.
pub fn fingerprint() -> Fingerprint {
    Fingerprint::of([b"the simulated encoder".as_slice()])
}

/// Number of rows of an item: its first byte, at least 1.
pub fn n_tokens(item: &[u8]) -> u32 {
    u32::from(item.first().copied().unwrap_or(1)).max(1)
}

/// The announcement of an item's output, without checksum.
pub fn announced(key: ContentKey, item: &[u8]) -> EncodedItem {
    EncodedItem {
        key,
        fingerprint: fingerprint(),
        modality: Modality::Image,
        n_tokens: n_tokens(item),
        hidden: HIDDEN,
        dtype: DType::F32,
        extent: Extent::Grid { t: 1, h: 1, w: n_tokens(item) },
        checksum: [0; 32],
    }
}

/// Encodes an item; the values depend on its bytes alone.
pub fn encode(key: ContentKey, item: &[u8]) -> EncoderOutput {
    let output = announced(key, item);
    let seed = blake3::hash(item);
    let n = output.n_tokens as usize * HIDDEN as usize;
    let values: Vec<f32> = (0..n).map(|i| f32::from(seed.as_bytes()[i % 32]) + i as f32).collect();
    EncoderOutput::seal(output, from_f32(&values, DType::F32)).expect("as many values as it says")
}

/// Digest of an item's rows; PD workers and clients both compute it.
pub fn digest(rows: &Arc<[u8]>) -> [u8; 32] {
    *blake3::hash(rows).as_bytes()
}

/// Token `idx` of the answer to a prompt over items of these digests.
pub fn token(prompt: &str, items: &[[u8; 32]], idx: usize) -> u32 {
    let mut hash = blake3::Hasher::new();
    hash.update(prompt.as_bytes());
    for item in items {
        hash.update(item);
    }
    hash.update(&(idx as u64).to_le_bytes());
    let bytes = hash.finalize();
    u32::from_le_bytes([bytes.as_bytes()[0], bytes.as_bytes()[1], 0, 0])
}

/// Text of a token.
pub fn text(token: u32) -> String {
    format!("{token} ")
}
