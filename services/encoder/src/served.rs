//! The models that an encoder worker serves, by name, which change while it runs.

use crate::adapters::ServedAdapters;
use crate::batcher::Batcher;
use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;
use triptych_core::{DType, EncoderId, Failure, FailureClass, Fingerprint};
use triptych_models::ModelSource;
use triptych_models::preprocess::Preprocess;

/// A model that this worker serves.
pub struct ServedEncoder {
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Its directory.
    pub source: ModelSource,
    /// Its encoders that are here.
    pub encoders: BTreeMap<EncoderId, ServedTower>,
    /// Names of all towers that read an item, with those that are not here.
    pub tower_names: Vec<&'static str>,
    /// Element type of its published rows.
    pub dtype: DType,
    /// Adapters of the encoder.
    pub adapters: ServedAdapters,
    /// Load time.
    pub created: SystemTime,
}

/// An encoder, or one of the towers that read the same item.
#[derive(Clone)]
pub struct ServedTower {
    /// Its identity.
    pub fingerprint: Fingerprint,
    /// Its thread.
    pub batcher: Batcher,
    /// Preprocessor.
    pub preprocess: Arc<dyn Preprocess>,
}

impl ServedEncoder {
    /// True if several towers read an item, here or elsewhere.
    pub fn has_towers(&self) -> bool {
        self.tower_names.len() > 1
    }

    /// Name of a tower; empty: there are no others.
    pub fn tower_name(&self, id: EncoderId) -> &'static str {
        self.tower_names.get(usize::from(id.tower.0)).copied().unwrap_or_default()
    }
}

/// Models by served name.
#[derive(Default)]
pub struct ServedEncoders(RwLock<Names>);

#[derive(Default)]
struct Names {
    served: BTreeMap<String, Arc<ServedEncoder>>,
    /// Names of models that were served before: a job for one may be done elsewhere.
    before: BTreeSet<String>,
}

impl ServedEncoders {
    /// A model.
    pub fn get(&self, name: &str) -> Option<Arc<ServedEncoder>> {
        self.0.read().served.get(name).cloned()
    }

    /// All of them, in the order of their names.
    pub fn all(&self) -> Vec<(String, Arc<ServedEncoder>)> {
        self.0.read().served.iter().map(|(name, model)| (name.clone(), Arc::clone(model))).collect()
    }

    /// Serves a model.
    pub fn insert(&self, name: String, model: Arc<ServedEncoder>) {
        let mut names = self.0.write();
        names.before.remove(&name);
        names.served.insert(name, model);
    }

    /// Takes a model from jobs to come.
    pub fn remove(&self, name: &str) -> Option<Arc<ServedEncoder>> {
        let mut names = self.0.write();
        let removed = names.served.remove(name)?;
        names.before.insert(name.to_owned());
        Some(removed)
    }

    /// The failure of a job for a name that is not served. One that was is to be tried elsewhere.
    pub fn missing(&self, name: &str) -> Failure {
        if self.0.read().before.contains(name) {
            return Failure::unavailable(format!("model {name:?} was unloaded from this encoder"));
        }
        let message = format!("model {name:?} is not served by this encoder");
        Failure::new(FailureClass::NotFound, message).with_param("model")
    }
}
