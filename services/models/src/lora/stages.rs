//! An adapter as parts for the two stages of a model. An encoder that one is added to is another encoder, with a fingerprint of
//! its own; one that adapts the decoder alone leaves the encoder as it is.

use super::LoraAdapter;
use std::collections::BTreeSet;
use std::sync::Arc;
use triptych_core::{AdapterId, Fingerprint};

/// Names of the layers of a model's encoder that adapters can be added to. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct EncoderModules(Arc<BTreeSet<String>>);

/// The parts of an adapter.
#[derive(Debug)]
pub struct StageAdapters {
    /// For the encoder; `None`: the encoder stays as it is. Its identity is that of this part alone, so that adapters of other
    /// decoder layers share encoder outputs.
    pub encoder: Option<LoraAdapter>,
    /// For the decoder, with the identity of the whole.
    pub decoder: LoraAdapter,
}

impl StageAdapters {
    /// Identity of the whole.
    pub fn id(&self) -> AdapterId {
        self.decoder.id()
    }

    /// Identity of the encoder's part.
    pub fn encoder_id(&self) -> Option<AdapterId> {
        self.encoder.as_ref().map(LoraAdapter::id)
    }
}

impl FromIterator<String> for EncoderModules {
    fn from_iter<I: IntoIterator<Item = String>>(names: I) -> Self {
        Self(Arc::new(names.into_iter().collect()))
    }
}

impl EncoderModules {
    /// The parts of an adapter. What neither stage has stays in the decoder's part, which refuses it by name.
    pub fn split(&self, adapter: LoraAdapter) -> StageAdapters {
        let (encoder, decoder) = adapter.part(|module| self.0.contains(module));
        StageAdapters { encoder, decoder }
    }
}

/// Fingerprint of an encoder with a part of an adapter.
pub fn adapted_fingerprint(base: &Fingerprint, part: AdapterId) -> Fingerprint {
    Fingerprint::of([b"adapted".as_slice(), base.as_bytes(), part.as_bytes()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapted_encoder_has_a_fingerprint_of_its_own() {
        let [base, other] = [[1; 32], [2; 32]].map(Fingerprint::from_bytes);
        let [one, two] = [[3; 32], [4; 32]].map(AdapterId::from_bytes);
        let all = [
            base,
            adapted_fingerprint(&base, one),
            adapted_fingerprint(&base, two),
            adapted_fingerprint(&other, one),
        ];
        assert_eq!(BTreeSet::from(all).len(), all.len());
        assert_eq!(adapted_fingerprint(&base, one), all[1]);
    }
}
