//! Adapters that the start and requests load, and requests unload while the worker serves.
//!
//! One that is unloaded is refused at once, and dropped by the encoder's thread when the last job has ended. Directories that a
//! request names must lie below one that the operator allows.

use crate::adapters::ServedAdapter;
use crate::job::EncoderWorkerState;
use crate::served::{ServedEncoder, ServedTower};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::task::spawn_blocking;
use triptych_core::{EncoderId, Failure, FailureClass};
use triptych_models::lora::{StageAdapters, adapted_fingerprint, check_adapter_name, refused_by_request};
use triptych_proto::v1;
use triptych_runtime::status::from_join_error;

impl ServedEncoder {
    /// Loads an adapter's part for the encoder and lets jobs use it; false if it has none.
    ///
    /// # Errors
    /// [`Failure`] of an adapter that does not fit the encoder, or if its thread is gone.
    pub async fn load_adapter(&self, name: &str, parts: StageAdapters) -> Result<bool, Failure> {
        let id = parts.id();
        let Some(part) = parts.encoder else { return Ok(false) };
        let of =
            |(id, base): (&EncoderId, &ServedTower)| (*id, adapted_fingerprint(&base.fingerprint, part.id()));
        let encoders = self.encoders.iter().map(of).collect();
        let Some(ServedTower { batcher, .. }) = self.encoders.values().next() else { return Ok(false) };
        let part = Arc::new(batcher.load_adapter(part).await?.map_err(|e| refused_by_request(&e))?);
        let served = Arc::new(ServedAdapter { id, encoders, part, created: SystemTime::now() });
        self.adapters.insert(name.to_owned(), served);
        tracing::info!(adapter = %name, ?id, "adapter of the encoder loaded");
        Ok(true)
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
        let parts = spawn_blocking(open).await.map_err(|e| from_join_error("opening an adapter", &e))??;
        let id = parts.id();
        let was_loaded = served.adapters.get(&name).is_some_and(|known| known.id == id);
        if !was_loaded && self.models.all().iter().any(|(_, model)| model.adapters.get(&name).is_some()) {
            let message = format!("an adapter called {name:?} is loaded; unload it first");
            return Err(Failure::invalid(message).with_param("lora_name"));
        }
        let mut adapts_encoder = was_loaded;
        if !was_loaded {
            self.lora.check_room(served.adapters.all().len())?;
            adapts_encoder = served.load_adapter(&name, parts).await?;
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
        if !self.models.all().iter().any(|(_, model)| model.adapters.remove(name)) {
            let message = format!("no adapter of an encoder is called {name:?}");
            return Err(Failure::new(FailureClass::NotFound, message).with_param("lora_name"));
        }
        tracing::info!(adapter = %name, "adapter of the encoder unloaded");
        Ok(())
    }
}
