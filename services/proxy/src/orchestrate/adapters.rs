//! LoRA adapters that are loaded and unloaded while the cluster serves: every PD worker of the base model is asked, and says by
//! itself whether it allows that. Requests go to the workers that hold the adapter, so that a worker that failed, or joins later,
//! makes the adapter slower and not wrong.

use super::work::Orchestrator;
use crate::auth::Caller;
use crate::request_machine::failures::out_of_time;
use crate::wire::{CallFailure, outgoing};
use futures::future::join_all;
use std::collections::BTreeSet;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tonic::transport::Channel;
use triptych_core::{Failure, FailureClass, ModelName, WorkerId};
use triptych_proto::v1;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;

/// An adapter to load.
#[derive(Clone, Debug)]
pub struct NewAdapter {
    /// The name that clients will use.
    pub name: String,
    /// Directory, as the workers name it.
    pub path: String,
    /// Its base model; `None`: the only one that is served.
    pub base: Option<ModelName>,
}

impl Orchestrator {
    /// Has every PD worker of the base model load an adapter.
    ///
    /// # Errors
    /// The first refusal of a worker; NotFound for a base model that is not served; if a worker does not answer in time.
    pub async fn load_adapter(
        &self,
        adapter: NewAdapter,
        caller: &Caller,
        deadline: Instant,
    ) -> Result<(), Failure> {
        let NewAdapter { name, path, base } = adapter;
        caller.check_model(&ModelName::new(name.as_str()))?;
        let base = self.fleet.catalog().choose(base.as_ref(), &BTreeSet::new())?.served;
        if base.adapter.is_some() {
            let message = format!("{} is an adapter itself", base.name);
            return Err(Failure::invalid(message).with_param("base_model_name"));
        }
        caller.check_model(&base.name)?;
        let change = AdapterChange::Load(v1::LoadAdapterRequest { model: base.name.to_string(), name, path });
        self.of_decoders(&base.name, deadline, change).await
    }

    /// Has every PD worker that holds an adapter refuse new requests for it, and drop it after the running ones.
    ///
    /// # Errors
    /// NotFound for an adapter that nobody serves; the first refusal of a worker.
    pub async fn unload_adapter(
        &self,
        name: &ModelName,
        caller: &Caller,
        deadline: Instant,
    ) -> Result<(), Failure> {
        caller.check_model(name)?;
        let catalog = self.fleet.catalog();
        if catalog.models().get(name).is_none_or(|served| served.adapter.is_none()) {
            let message = format!("no adapter is called {name:?}");
            return Err(Failure::new(FailureClass::NotFound, message).with_param("lora_name"));
        }
        let change = AdapterChange::Unload(v1::UnloadAdapterRequest { name: name.to_string() });
        self.of_decoders(name, deadline, change).await
    }

    /// Asks all PD workers that serve a model, and learns what they serve from then on.
    async fn of_decoders(
        &self,
        model: &ModelName,
        deadline: Instant,
        change: AdapterChange,
    ) -> Result<(), Failure> {
        let workers = self.fleet.decoders_of(model);
        if workers.is_empty() {
            return Err(Failure::unavailable(format!("no decoder worker of model {model:?} is ready")));
        }
        let asked = workers.into_iter().map(|(id, channel)| self.ask_one(id, channel, deadline, &change));
        join_all(asked.collect::<Vec<_>>()).await.into_iter().collect()
    }

    async fn ask_one(
        &self,
        id: WorkerId,
        channel: Channel,
        deadline: Instant,
        change: &AdapterChange,
    ) -> Result<(), Failure> {
        let started = Instant::now();
        let answer = timeout_at(deadline, change.clone().send(channel, deadline)).await;
        self.fleet.ask_again(&id);
        match answer {
            Ok(answer) => answer.map_err(|status| {
                tracing::warn!(worker = %id, error = %status, "an adapter was not changed here");
                CallFailure::from(status).failure
            }),
            Err(_) => Err(out_of_time(deadline.duration_since(started))),
        }
    }
}

/// A change of the adapters of a worker.
#[derive(Clone)]
enum AdapterChange {
    Load(v1::LoadAdapterRequest),
    Unload(v1::UnloadAdapterRequest),
}

impl AdapterChange {
    async fn send(self, channel: Channel, deadline: Instant) -> Result<(), Status> {
        let mut client = PrefillDecodeWorkerClient::new(channel);
        match self {
            Self::Load(request) => client.load_adapter(outgoing(request, deadline)).await.map(drop),
            Self::Unload(request) => client.unload_adapter(outgoing(request, deadline)).await.map(drop),
        }
    }
}
