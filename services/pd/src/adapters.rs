//! LoRA adapters of a worker's models, by name: those of the start, and those that come and go while it serves.
//!
//! A name is taken as long as requests may use it. The engine knows identities alone.

use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::time::SystemTime;
use triptych_core::{AdapterId, EncoderId, Fingerprint};
use triptych_models::lora::{StageAdapters, adapted_fingerprint};

/// An adapter that requests may use.
#[derive(Clone, Copy, Debug)]
pub struct ServedAdapter {
    /// Its identity.
    pub id: AdapterId,
    /// Identity of its part for the encoder; `None`: the encoder is that of the base model.
    pub encoder_part: Option<AdapterId>,
    /// Time of loading.
    pub created: SystemTime,
}

/// The adapters of a model, by name.
#[derive(Debug, Default)]
pub struct ServedAdapters(RwLock<BTreeMap<String, ServedAdapter>>);

impl ServedAdapter {
    /// An adapter that was loaded a moment ago.
    pub fn of(parts: &StageAdapters) -> Self {
        Self { id: parts.id(), encoder_part: parts.encoder_id(), created: SystemTime::now() }
    }

    /// Fingerprints of the encoders whose outputs it takes, from those of its base model.
    pub fn encoders(&self, base: &BTreeMap<EncoderId, Fingerprint>) -> BTreeMap<EncoderId, Fingerprint> {
        let of = |fingerprint: &Fingerprint| match self.encoder_part {
            Some(part) => adapted_fingerprint(fingerprint, part),
            None => *fingerprint,
        };
        base.iter().map(|(id, fingerprint)| (*id, of(fingerprint))).collect()
    }
}

impl ServedAdapters {
    /// The adapters that were loaded at the start.
    pub fn new(loaded: impl IntoIterator<Item = (String, ServedAdapter)>) -> Self {
        Self(RwLock::new(loaded.into_iter().collect()))
    }

    /// The adapter of a name.
    pub fn get(&self, name: &str) -> Option<ServedAdapter> {
        self.0.read().get(name).copied()
    }

    /// All of them.
    pub fn all(&self) -> BTreeMap<String, ServedAdapter> {
        self.0.read().clone()
    }

    /// Lets requests use an adapter.
    pub fn insert(&self, name: String, adapter: ServedAdapter) {
        self.0.write().insert(name, adapter);
    }

    /// Takes a name away; the identity if no other name has it.
    pub fn remove(&self, name: &str) -> Option<AdapterId> {
        let mut names = self.0.write();
        let removed = names.remove(name)?;
        (!names.values().any(|other| other.id == removed.id)).then_some(removed.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::Modality;

    #[test]
    fn an_identity_goes_with_its_last_name() {
        let [one, two] = [[1; 32], [2; 32]].map(AdapterId::from_bytes);
        let of = |id| ServedAdapter { id, encoder_part: None, created: SystemTime::UNIX_EPOCH };
        let names =
            ServedAdapters::new([("a".into(), of(one)), ("b".into(), of(one)), ("c".into(), of(two))]);
        assert_eq!(names.remove("a"), None);
        assert_eq!(names.remove("a"), None);
        assert_eq!(names.remove("b"), Some(one));
        assert_eq!(names.get("c").map(|c| c.id), Some(two));
    }

    #[test]
    fn only_a_part_for_the_encoder_makes_another_encoder() {
        let base = BTreeMap::from([(Modality::Image.into(), Fingerprint::from_bytes([7; 32]))]);
        let of = |encoder_part| {
            let id = AdapterId::from_bytes([1; 32]);
            ServedAdapter { id, encoder_part, created: SystemTime::UNIX_EPOCH }.encoders(&base)
        };
        assert_eq!(of(None), base);
        let [one, two] = [2, 3].map(|part| of(Some(AdapterId::from_bytes([part; 32]))));
        assert!(one != base && two != base && one != two);
    }
}
