//! What the right answer is: the simulated models are functions, so that everyone can work them out.

use std::sync::Arc;
use triptych_core::item::from_f32;
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};

/// The model that all simulated workers serve.
pub const MODEL: &str = "sim";
/// Width of a row.
const HIDDEN: u32 = 4;

/// The encoder that they all have.
pub fn fingerprint() -> Fingerprint {
    Fingerprint::of([b"the simulated encoder".as_slice()])
}

/// Rows of an item: as many as its first byte says, values from its bytes alone.
pub fn n_tokens(item: &[u8]) -> u32 {
    u32::from(item.first().copied().unwrap_or(1)).max(1)
}

/// What an item's output will be; no checksum yet.
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

/// The encoder.
pub fn encode(key: ContentKey, item: &[u8]) -> EncoderOutput {
    let output = announced(key, item);
    let seed = blake3::hash(item);
    let n = output.n_tokens as usize * HIDDEN as usize;
    let values: Vec<f32> = (0..n).map(|i| f32::from(seed.as_bytes()[i % 32]) + i as f32).collect();
    EncoderOutput::seal(output, from_f32(&values, DType::F32)).expect("as many values as it says")
}

/// A digest of an item's rows, as a PD worker sees them and as a client can work out.
pub fn digest(rows: &Arc<[u8]>) -> [u8; 32] {
    *blake3::hash(rows).as_bytes()
}

/// Token `place` of the answer to a prompt over items of these digests.
pub fn token(prompt: &str, items: &[[u8; 32]], place: usize) -> u32 {
    let mut hash = blake3::Hasher::new();
    hash.update(prompt.as_bytes());
    for item in items {
        hash.update(item);
    }
    hash.update(&(place as u64).to_le_bytes());
    let bytes = hash.finalize();
    u32::from_le_bytes([bytes.as_bytes()[0], bytes.as_bytes()[1], 0, 0])
}

/// Text of a token.
pub fn text(token: u32) -> String {
    format!("{token} ")
}
