//! The models that an encoder worker serves, by name, which change while it runs.

use crate::adapters::{ServedAdapter, ServedAdapters};
use crate::batcher::Batcher;
use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;
use triptych_core::{DType, Failure, FailureClass, Fingerprint, Modality};
use triptych_models::ModelSource;
use triptych_models::lora::{StageAdapters, adapted_fingerprint, refused_by_request};
use triptych_models::preprocess::Preprocess;

/// A model that this worker serves.
pub struct ServedEncoder {
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Preprocessor.
    pub preprocess: Arc<dyn Preprocess>,
    /// Its directory.
    pub source: ModelSource,
    /// Encoders by modality.
    pub encoders: BTreeMap<Modality, (Fingerprint, Batcher)>,
    /// Element type of its published rows.
    pub dtype: DType,
    /// Adapters of the encoder.
    pub adapters: ServedAdapters,
    /// Load time.
    pub created: SystemTime,
}

impl ServedEncoder {
    /// Loads an adapter's part for the encoder and lets jobs use it; `None` if it has none.
    ///
    /// # Errors
    /// [`Failure`] of an adapter that does not fit the encoder, or if its thread is gone.
    pub async fn load_adapter(&self, name: &str, parts: StageAdapters) -> Result<Option<()>, Failure> {
        let id = parts.id();
        let Some(part) = parts.encoder else { return Ok(None) };
        let of = |(modality, (base, _)): (&Modality, &(Fingerprint, _))| {
            (*modality, adapted_fingerprint(base, part.id()))
        };
        let encoders = self.encoders.iter().map(of).collect();
        let Some((_, batcher)) = self.encoders.values().next() else { return Ok(None) };
        let part = Arc::new(batcher.load_adapter(part).await?.map_err(|e| refused_by_request(&e))?);
        self.adapters.insert(name, ServedAdapter { id, encoders, part, created: SystemTime::now() });
        tracing::info!(adapter = %name, ?id, "adapter of the encoder loaded");
        Ok(Some(()))
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
