//! LoRA adapters of a worker's encoders, by name: those of the start, and those that come and go while it serves.
//!
//! Jobs name an adapter by the fingerprint of the encoder that it makes. One that is unloaded is refused at once, and dropped by
//! the encoder's thread when the last job has ended. An adapter of the decoder alone has no place here.

use crate::batcher::LoadedPart;
use crate::job::{EncoderWorkerState, ServedEncoder};
use parking_lot::RwLock;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::task::spawn_blocking;
use triptych_core::{AdapterId, Failure, FailureClass, Fingerprint, Modality};
use triptych_models::lora::{
    EncoderModules, StageAdapters, adapted_fingerprint, check_adapter_name, refused_by_request,
};
use triptych_proto::v1;

/// An adapter that jobs may use.
pub struct ServedAdapter {
    /// Identity of the whole.
    pub id: AdapterId,
    /// Fingerprints of the encoders that it makes.
    pub encoders: BTreeMap<Modality, Fingerprint>,
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

    /// All of them.
    pub fn all(&self) -> BTreeMap<String, Arc<ServedAdapter>> {
        self.names.read().clone()
    }

    /// The part that makes an encoder of this fingerprint.
    pub fn of_fingerprint(&self, modality: Modality, wanted: &Fingerprint) -> Option<Arc<LoadedPart>> {
        let names = self.names.read();
        let found = names.values().find(|adapter| adapter.encoders.get(&modality) == Some(wanted))?;
        Some(Arc::clone(&found.part))
    }
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
        let served = Arc::new(ServedAdapter { id, encoders, part, created: SystemTime::now() });
        self.adapters.names.write().insert(name.to_owned(), served);
        tracing::info!(adapter = %name, ?id, "adapter of the encoder loaded");
        Ok(Some(()))
    }
}

impl EncoderWorkerState {
    /// Loads an adapter that a request names. One that has the name already and is the same stays; one without a part for the
    /// encoder leaves everything as it is.
    ///
    /// # Errors
    /// Invalid for a worker that allows no such requests, a name that is taken, a path outside the allowed directory, or an
    /// adapter that cannot be served; NotFound for an unknown model.
    pub async fn load_adapter(
        &self,
        request: v1::LoadAdapterRequest,
    ) -> Result<v1::LoadAdapterResponse, Failure> {
        self.lora.check_updates()?;
        let _one_at_a_time = self.adapter_updates.lock().await;
        let v1::LoadAdapterRequest { model, name, path } = request;
        check_adapter_name(&name, |name| self.models.get(name).is_some())?;
        let served = self.models.get(&model).ok_or_else(|| {
            let message = format!("model {model:?} is not served by this encoder");
            Failure::new(FailureClass::NotFound, message).with_param("base_model_name")
        })?;
        let (named, lora, modules) =
            (PathBuf::from(path), self.lora.clone(), served.adapters.modules.clone());
        let open = move || Ok::<_, Failure>(modules.split(lora.open(&named)?));
        let parts = spawn_blocking(open).await.map_err(Failure::internal)??;
        let id = parts.id();
        let models = self.models.all();
        let taken = models.iter().find_map(|(_, model)| model.adapters.all().remove(&name));
        let was_loaded = taken.as_ref().is_some_and(|known| known.id == id);
        if taken.is_some() && !was_loaded {
            let message = format!("an adapter called {name:?} is loaded; unload it first");
            return Err(Failure::invalid(message).with_param("lora_name"));
        }
        let mut adapts_encoder = was_loaded;
        if !was_loaded {
            self.lora.check_room(served.adapters.all().len())?;
            adapts_encoder = served.load_adapter(&name, parts).await?.is_some();
        }
        Ok(v1::LoadAdapterResponse { adapter: id.as_bytes().to_vec().into(), was_loaded, adapts_encoder })
    }

    /// Takes an adapter from jobs; it goes when the last running one has ended.
    ///
    /// # Errors
    /// Invalid for a worker that allows no such requests, NotFound for an unknown name.
    pub async fn unload_adapter(&self, name: &str) -> Result<(), Failure> {
        self.lora.check_updates()?;
        let _one_at_a_time = self.adapter_updates.lock().await;
        let models = self.models.all();
        if models.iter().all(|(_, model)| model.adapters.names.write().remove(name).is_none()) {
            let message = format!("no adapter of an encoder is called {name:?}");
            return Err(Failure::new(FailureClass::NotFound, message).with_param("lora_name"));
        }
        tracing::info!(adapter = %name, "adapter of the encoder unloaded");
        Ok(())
    }
}
