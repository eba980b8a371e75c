//! Adapters that requests load and unload while the worker serves.
//!
//! An adapter that is unloaded is refused at once; the engine drops it when the last running sequence has ended. Directories
//! that a request names must lie below one that the operator allows.

use crate::adapters::ServedAdapter;
use crate::served::{self, ServedDecoder};
use crate::state::PdWorkerState;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::task::spawn_blocking;
use triptych_core::{Failure, FailureClass};
use triptych_models::lora::{check_adapter_name, refused_by_request};
use triptych_proto::v1;
use triptych_runtime::status::from_join_error;

impl PdWorkerState {
    /// A model, or the base model of an adapter and that adapter.
    ///
    /// # Errors
    /// NotFound; Unavailable for a model that was unloaded.
    pub(crate) fn model(&self, name: &str) -> Result<(Arc<ServedDecoder>, Option<ServedAdapter>), Failure> {
        served::find(&self.models, name).ok_or_else(|| self.models.missing(name))
    }

    /// Loads an adapter and lets requests use it. One that has the name already and is the same stays.
    ///
    /// # Errors
    /// Invalid for a worker that allows no such requests, a name that is taken, a path outside the allowed directory, or an
    /// adapter that cannot be served; NotFound for an unknown model.
    pub(crate) async fn load_adapter(
        &self,
        request: v1::LoadAdapterRequest,
    ) -> Result<v1::LoadAdapterResponse, Failure> {
        self.lora.check_updates()?;
        let _one_at_a_time = self.adapter_updates.lock().await;
        let v1::LoadAdapterRequest { model, name, path } = request;
        check_adapter_name(&name, |name| self.models.get(name).is_some())?;
        let served = match self.models.get(&model) {
            Some(served) => served,
            None => {
                let message = format!("model {model:?} is not served by this worker");
                return Err(Failure::new(FailureClass::NotFound, message).with_param("base_model_name"));
            }
        };
        let (named, lora, modules) = (PathBuf::from(path), self.lora.clone(), served.encoder_modules.clone());
        let open = move || Ok::<_, Failure>(modules.split(lora.open(&named)?));
        let parts = spawn_blocking(open).await.map_err(|e| from_join_error("opening an adapter", &e))??;
        let adapter = ServedAdapter::of(&parts);
        let was_loaded = match served::find(&self.models, &name).and_then(|(_, known)| known) {
            None => false,
            Some(known) if known.id == adapter.id && served.adapters.get(&name).is_some() => true,
            Some(_) => {
                let message = format!("an adapter called {name:?} is loaded; unload it first");
                return Err(Failure::invalid(message).with_param("lora_name"));
            }
        };
        if !was_loaded {
            self.lora.check_room(served.adapters.all().len())?;
            let loaded = served.driver.load_adapter(&name, parts.decoder).await?;
            loaded.map_err(|e| refused_by_request(&e))?;
            served.adapters.insert(name.clone(), adapter);
            tracing::info!(%model, adapter = %name, id = ?adapter.id, "adapter loaded");
        }
        Ok(v1::LoadAdapterResponse {
            adapter: adapter.id.as_bytes().to_vec().into(),
            was_loaded,
            adapts_encoder: adapter.encoder_part.is_some(),
        })
    }

    /// Takes an adapter from requests; it goes when the last running one has ended.
    ///
    /// # Errors
    /// Invalid for a worker that allows no such requests, NotFound for an unknown name.
    pub(crate) async fn unload_adapter(&self, name: &str) -> Result<(), Failure> {
        self.lora.check_updates()?;
        let _one_at_a_time = self.adapter_updates.lock().await;
        let models = self.models.all();
        let Some((_, served)) = models.iter().find(|(_, model)| model.adapters.get(name).is_some()) else {
            let message = format!("no adapter is called {name:?}");
            return Err(Failure::new(FailureClass::NotFound, message).with_param("lora_name"));
        };
        if let Some(id) = served.adapters.remove(name) {
            served.driver.unload_adapter(id);
        }
        tracing::info!(adapter = %name, "adapter unloaded");
        Ok(())
    }
}
