//! Sample outputs and keys.

use crate::object::encode;
use crate::store::{EcStore, PutOutcome};
use triptych_core::{ContentKey, DType, EncodedItem, EncoderOutput, Extent, Fingerprint, Modality};

/// An output whose rows have `n_bytes` (rounded down to whole rows of 16) that depend on the key.
pub fn sample_output(key: ContentKey, n_bytes: usize) -> EncoderOutput {
    sample_variant(key, n_bytes, 0)
}

/// Like [`sample_output`], with other rows for each `variant`: what another encoder makes of the same item.
pub fn sample_variant(key: ContentKey, n_bytes: usize, variant: u64) -> EncoderOutput {
    let n_tokens = u32::try_from(n_bytes / 16).expect("samples are small");
    let item = EncodedItem {
        key,
        fingerprint: Fingerprint::of([b"sample".as_slice()]),
        modality: Modality::Image,
        n_tokens,
        hidden: 4,
        dtype: DType::F32,
        extent: Extent::Grid { t: 1, h: 1, w: n_tokens },
        checksum: [0; 32],
    };
    let mut rows = vec![0; n_tokens as usize * 16];
    let mut hash = blake3::Hasher::new();
    hash.update(key.as_bytes()).update(&variant.to_le_bytes()).finalize_xof().fill(&mut rows);
    EncoderOutput::seal(item, rows.into()).expect("the rows have the shape's length")
}

/// A key that no other call gives.
pub fn fresh_key() -> ContentKey {
    let mut bytes = [0; 32];
    bytes[..16].copy_from_slice(&crate::store::nonce().to_le_bytes());
    ContentKey::from_bytes(bytes)
}

pub(super) async fn put(store: &dyn EcStore, output: &EncoderOutput) -> PutOutcome {
    store.put_if_absent(&output.item().key, encode(output)).await.expect("a put in bounds takes place")
}
