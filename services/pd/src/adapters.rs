//! LoRA adapters of a worker's models, by name: those of the start, and those that come and go while it serves.
//!
//! A name is taken as long as requests may use it. The engine knows identities alone.

use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::SystemTime;
use triptych_core::AdapterId;

/// Adapters of a worker.
#[derive(Clone, Debug)]
pub struct LoraSettings {
    /// Adapters to load at the start.
    pub adapters: Vec<LoraSource>,
    /// Highest rank of an adapter. Default 16.
    pub max_rank: usize,
    /// Most adapters of a model that are loaded at once. Default 32. 0: none.
    pub max_loaded: usize,
    /// Directory below which requests may name adapters to load. Default `None`: requests load and unload none.
    pub updates: Option<PathBuf>,
}

impl Default for LoraSettings {
    fn default() -> Self {
        Self { adapters: Vec::new(), max_rank: 16, max_loaded: 32, updates: None }
    }
}

/// An adapter to load at the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoraSource {
    /// The name that clients use.
    pub name: String,
    /// Name of its base model; `None`: the only model of the worker.
    pub model: Option<String>,
    /// Directory that PEFT wrote.
    pub dir: PathBuf,
}

/// An adapter that requests may use.
#[derive(Clone, Copy, Debug)]
pub struct ServedAdapter {
    /// Its identity.
    pub id: AdapterId,
    /// Time of loading.
    pub created: SystemTime,
}

/// The adapters of a model, by name.
#[derive(Debug, Default)]
pub struct ServedAdapters(RwLock<BTreeMap<String, ServedAdapter>>);

impl ServedAdapters {
    /// The adapters that were loaded at the start.
    pub fn new(loaded: impl IntoIterator<Item = (String, AdapterId)>) -> Self {
        let created = SystemTime::now();
        let loaded = loaded.into_iter().map(|(name, id)| (name, ServedAdapter { id, created }));
        Self(RwLock::new(loaded.collect()))
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
    pub fn insert(&self, name: String, id: AdapterId) {
        self.0.write().insert(name, ServedAdapter { id, created: SystemTime::now() });
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

    #[test]
    fn an_identity_goes_with_its_last_name() {
        let [one, two] = [[1; 32], [2; 32]].map(AdapterId::from_bytes);
        let names = ServedAdapters::new([("a".into(), one), ("b".into(), one), ("c".into(), two)]);
        assert_eq!(names.remove("a"), None);
        assert_eq!(names.remove("a"), None);
        assert_eq!(names.remove("b"), Some(one));
        assert_eq!(names.get("c").map(|c| c.id), Some(two));
    }
}
