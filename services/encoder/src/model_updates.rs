//! Models of an encoder worker that operators load and unload while it serves.
//!
//! A model that is unloaded is refused at once. Jobs that run have the time of the order to end; if they do not, the model is
//! served again and the order fails. Its memory is free before another is loaded in its place; if that load fails, the model that
//! gave way is loaded again.

use crate::job::EncoderWorkerState;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep, timeout};
use triptych_core::{Failure, ModelName};
use triptych_models::{LoadFormat, Model, ModelSource};
use triptych_runtime::status::from_join_error;
use triptych_runtime::worker_admin::{LoadOrder, ModelHost, UnloadOrder, checked_name, dir_below};

/// Between two looks at the jobs of a model.
const LOOK: Duration = Duration::from_millis(10);
/// Limit on the end of an encoder's thread without jobs.
const END_TIMEOUT: Duration = Duration::from_secs(30);

impl ModelHost for EncoderWorkerState {
    fn load_model(self: Arc<Self>, order: LoadOrder) -> BoxFuture<'static, Result<bool, Failure>> {
        Box::pin(async move { self.load(order).await })
    }

    fn unload_model(self: Arc<Self>, order: UnloadOrder) -> BoxFuture<'static, Result<(), Failure>> {
        Box::pin(async move {
            let _one = self.updates.one_at_a_time.lock().await;
            self.take_out(&order.name, order.drain).await?;
            self.divide_among_rest().await
        })
    }

    fn load_encoder_weights(&self) -> usize {
        self.load_weights()
    }
}

impl EncoderWorkerState {
    async fn load(&self, order: LoadOrder) -> Result<bool, Failure> {
        let _one = self.updates.one_at_a_time.lock().await;
        let name = checked_name(&order.name)?.to_owned();
        let dir = dir_below(self.updates.allowed()?, &order.path)?;
        let has = |name: &str| self.models.get(name).is_some();
        if has(&name) && order.replaces.as_deref() != Some(name.as_str()) {
            let message = format!("{name:?} is served; unload it first, or name it in `replaces`");
            return Err(Failure::invalid(message).with_param("model"));
        }
        let source = ModelSource {
            dir,
            name: Some(ModelName::new(name)),
            format: LoadFormat::Safetensors,
            packed: None,
        };
        let serves = self.has_encoder(&source).await?;
        // A model without an encoder may replace one that has one, and the other way round.
        let replaced = match order.replaces.as_deref().filter(|old| has(old)) {
            Some(old) => Some(self.take_out(old, order.drain).await?),
            None => None,
        };
        if !serves {
            self.divide_among_rest().await?;
            return Ok(false);
        }
        let loaded = self.serve(source).await;
        if loaded.is_err() {
            self.divide_among_rest().await?;
        }
        if let (Err(failure), Some(old)) = (&loaded, replaced) {
            tracing::error!(%failure, dir = %old.dir.display(), "a model could not be loaded; the one before is loaded again");
            if let Err(worse) = self.serve(old).await {
                let [failure, worse] = [&failure.message, &worse.message];
                let text = format!("{failure}; and the model before could not be loaded again: {worse}");
                return Err(Failure::unavailable(text));
            }
        }
        loaded.map(|()| true)
    }

    /// Opens a model and looks at all its tensors, without reading weights. False: it has no encoder.
    async fn has_encoder(&self, source: &ModelSource) -> Result<bool, Failure> {
        let source = source.clone();
        let open = move || {
            let model = Model::open(&source)?;
            model.inventory().map(|inventory| inventory.encoder.is_some())
        };
        let checked = spawn_blocking(open).await.map_err(|e| from_join_error("opening a model", &e))?;
        checked.map_err(|e| Failure::invalid(format!("the model cannot be served: {e}")).with_param("path"))
    }

    /// Loads a model and serves it.
    async fn serve(&self, source: ModelSource) -> Result<(), Failure> {
        let loader = Arc::clone(&self.updates.loader);
        let memory = self.updates.memory.clone();
        let all: Vec<_> = self.sources().chain([source.clone()]).collect();
        let load = move || {
            memory.map(|memory| memory.divide(&all)).transpose()?;
            loader.load_all(std::slice::from_ref(&source))
        };
        let loaded = spawn_blocking(load).await.map_err(|e| from_join_error("loading a model", &e))?;
        let loaded = loaded.map_err(|e| {
            let source = std::error::Error::source(&e).map(|cause| format!(": {cause}"));
            Failure::invalid(format!("{e}{}", source.unwrap_or_default())).with_param("path")
        })?;
        for model in loaded {
            let started = model.start(&self.updates.batcher, &self.updates.meters).await;
            let (name, served) = started.map_err(|e| Failure::invalid(e.to_string()))?;
            tracing::info!(model = %name, "encoder ready");
            self.models.insert(name, Arc::new(served));
        }
        Ok(())
    }

    /// Directories of the models that are served.
    fn sources(&self) -> impl Iterator<Item = ModelSource> + use<> {
        self.models.all().into_iter().map(|(_, model)| model.source.clone())
    }

    /// Divides a stated memory among the models that are left.
    async fn divide_among_rest(&self) -> Result<(), Failure> {
        let Some(memory) = self.updates.memory.clone() else { return Ok(()) };
        let rest: Vec<_> = self.sources().collect();
        let divided = spawn_blocking(move || memory.divide(&rest)).await;
        let divided = divided.map_err(|e| from_join_error("dividing the memory", &e))?;
        divided.map_err(Failure::internal)
    }

    /// Takes a model from jobs to come, waits for those that run, and gives its memory back. Returns its directory.
    async fn take_out(&self, name: &str, drain: Duration) -> Result<ModelSource, Failure> {
        self.updates.allowed()?;
        let Some(model) = self.models.remove(name) else { return Err(self.models.missing(name)) };
        tracing::info!(model = name, ?drain, "a model is unloaded");
        let until = Instant::now() + drain;
        // A job holds the model from its check to its end.
        while Arc::strong_count(&model) > 1 {
            if Instant::now() >= until {
                self.models.insert(name.to_owned(), model);
                let text = format!("jobs of model {name:?} did not end within {drain:?}; it is served on");
                return Err(Failure::unavailable(text));
            }
            sleep(LOOK).await;
        }
        let ended: Vec<_> = model.encoders.values().map(|tower| tower.batcher.ended()).collect();
        let source = model.source.clone();
        drop(model);
        for ended in ended {
            if timeout(END_TIMEOUT, ended.cancelled()).await.is_err() {
                tracing::error!(model = name, "the encoder of an unloaded model does not end");
            }
        }
        Ok(source)
    }
}
