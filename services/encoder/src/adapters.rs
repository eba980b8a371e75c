//! LoRA adapters of a worker's encoders, by name: those of the start, and those that come and go while it serves.
//!
//! Jobs name an adapter by the fingerprint of the encoder that it makes. An adapter of the decoder alone has no place here.

use crate::batcher::LoadedPart;
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;
use triptych_core::{AdapterId, EncoderId, Fingerprint};
use triptych_models::lora::EncoderModules;

/// An adapter that jobs may use.
pub struct ServedAdapter {
    /// Identity of the whole.
    pub id: AdapterId,
    /// Fingerprints of the encoders that it makes.
    pub encoders: BTreeMap<EncoderId, Fingerprint>,
    /// Its part on the encoder's thread.
    pub part: Arc<LoadedPart>,
    /// Time of loading.
    pub created: SystemTime,
}

/// The adapters of an encoder, by name, and the layers that they may be of.
pub struct ServedAdapters {
    /// Layers that adapters may be of.
    pub modules: EncoderModules,
    names: RwLock<BTreeMap<String, Arc<ServedAdapter>>>,
}

impl ServedAdapters {
    /// No adapters.
    pub fn new(modules: EncoderModules) -> Self {
        Self { modules, names: RwLock::default() }
    }

    /// The adapter of a name.
    pub fn get(&self, name: &str) -> Option<Arc<ServedAdapter>> {
        self.names.read().get(name).cloned()
    }

    /// All of them.
    pub fn all(&self) -> BTreeMap<String, Arc<ServedAdapter>> {
        self.names.read().clone()
    }

    /// The part that makes an encoder of this fingerprint.
    pub fn of_fingerprint(&self, encoder: EncoderId, wanted: &Fingerprint) -> Option<Arc<LoadedPart>> {
        let names = self.names.read();
        let found = names.values().find(|adapter| adapter.encoders.get(&encoder) == Some(wanted))?;
        Some(Arc::clone(&found.part))
    }

    /// Lets jobs use an adapter.
    pub fn insert(&self, name: String, adapter: Arc<ServedAdapter>) {
        self.names.write().insert(name, adapter);
    }

    /// Takes a name from jobs; false if there is none. Running ones keep the part.
    pub fn remove(&self, name: &str) -> bool {
        self.names.write().remove(name).is_some()
    }
}
