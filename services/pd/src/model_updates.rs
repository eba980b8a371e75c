//! Models that operators load and unload while the worker serves.
//!
//! A model that is unloaded is refused at once; what runs on it has the time of the order to end, then it is cut and goes on
//! elsewhere. Its memory is free before another is loaded in its place. A directory that cannot be served is refused before
//! anything is given up; if the load fails all the same, the model that gave way is loaded again.

use crate::error::PdError;
use crate::served::{self, ServedDecoder};
use crate::state::PdWorkerState;
use crate::updates::ModelUpdates;
use futures::future::BoxFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use triptych_core::{Failure, FailureClass, ModelName};
use triptych_models::{LoadFormat, Model, ModelSource};
use triptych_runtime::status::from_join_error;
use triptych_runtime::worker_admin::{LoadOrder, ModelHost, UnloadOrder, checked_name, dir_below};

/// Limit on the end of requests that are cut, and on that of an engine's thread.
const END_TIMEOUT: Duration = Duration::from_secs(30);

impl ModelHost for PdWorkerState {
    fn load_model(self: Arc<Self>, order: LoadOrder) -> BoxFuture<'static, Result<bool, Failure>> {
        Box::pin(async move { self.load_in_place(order).await.map(|()| true) })
    }

    fn unload_model(self: Arc<Self>, order: UnloadOrder) -> BoxFuture<'static, Result<(), Failure>> {
        Box::pin(async move {
            let _one = self.updates.one_at_a_time.lock().await;
            self.take_out(&order.name, order.drain).await.map(drop)
        })
    }

    fn load_encoder_weights(&self) -> usize {
        self.colocated_weights.as_ref().map_or(0, |begin| begin())
    }
}

impl PdWorkerState {
    async fn load_in_place(&self, order: LoadOrder) -> Result<(), Failure> {
        let _one = self.updates.one_at_a_time.lock().await;
        let name = checked_name(&order.name)?.to_owned();
        let dir = dir_below(self.updates.allowed()?, &order.path)?;
        if served::find(&self.models, &name).is_some() && order.replaces.as_deref() != Some(name.as_str()) {
            let message = format!("{name:?} is served; unload it first, or name it in `replaces`");
            return Err(Failure::invalid(message).with_param("model"));
        }
        if let Some(old) = order.replaces.as_deref().filter(|old| self.models.get(old).is_none()) {
            return Err(self.models.missing(old).with_param("replaces"));
        }
        let source = ModelSource {
            dir,
            name: Some(ModelName::new(name)),
            format: LoadFormat::Safetensors,
            packed: None,
        };
        self.check(&source).await?;
        let replaced = match &order.replaces {
            Some(old) => Some(self.take_out(old, order.drain).await?),
            None => None,
        };
        let loaded = self.serve(source).await;
        let (Err(failure), Some(old)) = (&loaded, replaced) else { return loaded };
        tracing::error!(%failure, dir = %old.dir.display(), "a model could not be loaded; the one before is loaded again");
        match self.serve(old).await {
            Ok(()) => loaded,
            Err(worse) => Err(Failure::unavailable(format!(
                "{}; and the model before could not be loaded again: {}",
                failure.message, worse.message
            ))),
        }
    }

    /// Opens a model and looks at all its tensors, without reading weights.
    async fn check(&self, source: &ModelSource) -> Result<(), Failure> {
        let source = source.clone();
        let open = move || Model::open(&source).and_then(|model| model.inventory()).map(drop);
        let checked = spawn_blocking(open).await.map_err(|e| from_join_error("opening a model", &e))?;
        checked.map_err(|e| Failure::invalid(format!("the model cannot be served: {e}")).with_param("path"))
    }

    /// Loads a model and serves it.
    async fn serve(&self, source: ModelSource) -> Result<(), Failure> {
        let ModelUpdates { loader, memory, starter, .. } = &self.updates;
        let (loader, memory) = (loader.clone(), memory.clone());
        let taken = self.models.all().iter().map(|(_, model)| model.share).sum();
        let rows = self.loads.budget();
        let load = move || {
            let plan =
                memory.map(|memory| memory.plan_beside(taken, Some(rows), std::slice::from_ref(&source)));
            let plan = plan.transpose()?;
            if let Some(plan) = &plan {
                tracing::info!("memory {plan}");
            }
            let name = source.name.as_ref().map(ToString::to_string).unwrap_or_default();
            loader.for_update(&name, plan.as_ref()).load_all(std::slice::from_ref(&source))
        };
        let loaded = spawn_blocking(load).await.map_err(|e| from_join_error("loading a model", &e))?;
        let loaded = loaded.map_err(|e| refused(&e))?;
        for loaded in loaded {
            let (name, served) = starter.start(loaded).map_err(Failure::internal)?;
            self.loads.attach(&served.driver);
            self.models.insert(name, Arc::new(served));
        }
        Ok(())
    }

    /// Takes a model from requests, waits for those that run, and gives its memory back. Returns its directory.
    async fn take_out(&self, name: &str, drain: Duration) -> Result<ModelSource, Failure> {
        self.updates.allowed()?;
        let Some(model) = self.models.remove(name) else { return Err(self.models.missing(name)) };
        tracing::info!(model = name, ?drain, "a model is unloaded");
        if !model.is_drained(drain).await {
            tracing::warn!(model = name, "requests that did not end in time are cut");
            model.abort.cancel();
            if !model.is_drained(END_TIMEOUT).await {
                tracing::error!(model = name, "requests that were cut do not end");
            }
        }
        model.sequence_permits.close();
        self.loads.detach(&model.driver);
        let (source, ended) = (model.source.clone(), model.ended.clone());
        drop(model);
        if timeout(END_TIMEOUT, ended.cancelled()).await.is_err() {
            tracing::error!(model = name, "the engine of an unloaded model does not end");
        }
        Ok(source)
    }
}

impl ServedDecoder {
    /// Waits until no sequence runs or waits. False: that took longer.
    async fn is_drained(&self, limit: Duration) -> bool {
        let all = u32::try_from(self.max_live).unwrap_or(u32::MAX);
        let Ok(Ok(permits)) = timeout(limit, self.sequence_permits.acquire_many(all)).await else {
            return false;
        };
        // No later request has them.
        permits.forget();
        true
    }
}

fn refused(error: &PdError) -> Failure {
    let class = match error {
        PdError::Memory(_) | PdError::Model { .. } | PdError::Engine { .. } => FailureClass::InvalidArgument,
        _ => FailureClass::Internal,
    };
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    Failure::new(class, text)
}
