//! LoRA adapters that are loaded and unloaded while the cluster serves: every PD worker of the base model is asked, and where the
//! adapter has a part for the encoder every encoder worker too; each says by itself whether it allows that. All of them load it or
//! none does. Requests go to the workers that hold the adapter, so that a worker that joins later makes it slower and not wrong.

use super::work::Orchestrator;
use crate::auth::Caller;
use crate::request_machine::failures::out_of_time;
use crate::wire::{CallFailure, outgoing};
use futures::future::join_all;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tonic::transport::Channel;
use triptych_core::{Failure, FailureClass, ModelName, WorkerId};
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;

/// Time of workers to drop what others could not load. The request's own may be over.
const UNDO_TIMEOUT: Duration = Duration::from_secs(5);

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

/// Workers of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pool {
    Pd,
    Encoder,
}

/// A worker's half of a change: a worker that holds both has two.
#[derive(Clone)]
pub(super) struct Half {
    pub(super) worker: WorkerId,
    pub(super) pool: Pool,
    pub(super) channel: Channel,
}

/// Halves that loaded an adapter.
#[derive(Default)]
struct Loading {
    /// Those that had it not before, or may have loaded it without an answer.
    changed: Vec<Half>,
    adapts_encoder: bool,
    /// The first refusal.
    failure: Option<Failure>,
}

impl Orchestrator {
    /// Has every PD worker of the base model load an adapter, and every encoder worker too if the adapter has a part for the
    /// encoder. If one refuses or does not answer, those that loaded it drop it again.
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
        let asked = v1::LoadAdapterRequest { model: base.name.to_string(), name: name.clone(), path };
        let mut loading = self.load_in(Pool::Pd, &asked, deadline).await?;
        if loading.failure.is_none() && loading.adapts_encoder {
            match self.load_in(Pool::Encoder, &asked, deadline).await {
                Ok(of_encoders) => {
                    loading.failure = of_encoders.failure;
                    loading.changed.extend(of_encoders.changed);
                }
                Err(failure) => loading.failure = Some(failure),
            }
        }
        match loading.failure {
            None => {
                self.adapters.insert(&asked, loading.adapts_encoder);
                Ok(())
            }
            Some(failure) => Err(self.undo(&name, loading.changed, failure).await),
        }
    }

    /// Has every worker that holds an adapter refuse new requests for it, and drop it after the running ones.
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
        let served = catalog.models().get(name).filter(|served| served.adapter.is_some()).copied();
        let Some(adapter) = served else {
            let message = format!("no adapter is called {name:?}");
            return Err(Failure::new(FailureClass::NotFound, message).with_param("lora_name"));
        };
        let mut halves = self.halves(Pool::Pd, name)?;
        if adapter.adapts_encoder {
            halves.extend(self.halves(Pool::Encoder, name).unwrap_or_default());
        }
        self.adapters.remove(name.as_str());
        let unload = v1::UnloadAdapterRequest { name: name.to_string() };
        let asked =
            halves.iter().map(|half| self.ask_half(half, deadline, half.unload(unload.clone(), deadline)));
        let answers = join_all(asked.collect::<Vec<_>>()).await;
        // An encoder that has it not, such as that of a process that has restarted, is as it shall be.
        let is_left = |(half, answer): &(&Half, Result<(), Failure>)| match answer {
            Err(failure) => half.pool == Pool::Pd || failure.class != FailureClass::NotFound,
            Ok(()) => false,
        };
        halves.iter().zip(answers).filter(is_left).try_for_each(|(_, answer)| answer)
    }

    /// Asks all workers of a pool that serve the base model to load an adapter.
    async fn load_in(
        &self,
        pool: Pool,
        asked: &v1::LoadAdapterRequest,
        deadline: Instant,
    ) -> Result<Loading, Failure> {
        let halves = self.halves(pool, &ModelName::new(asked.model.as_str()))?;
        let catalog = self.fleet.catalog();
        let calls =
            halves.iter().map(|half| self.ask_half(half, deadline, half.load(asked.clone(), deadline)));
        let answers = join_all(calls.collect::<Vec<_>>()).await;
        let mut loading = Loading::default();
        for (half, answer) in halves.into_iter().zip(answers) {
            match answer {
                Ok(loaded) => {
                    loading.adapts_encoder |= loaded.adapts_encoder;
                    if !loaded.was_loaded {
                        loading.changed.push(half);
                    }
                }
                Err(failure) => {
                    let known = catalog.workers.iter().find(|known| known.id == half.worker);
                    let had_it =
                        known.is_some_and(|known| known.models.iter().any(|m| m.name.as_str() == asked.name));
                    let may_have_it =
                        matches!(failure.class, FailureClass::Unavailable | FailureClass::DeadlineExceeded);
                    if may_have_it && !had_it {
                        loading.changed.push(half);
                    }
                    loading.failure.get_or_insert(failure);
                }
            }
        }
        Ok(loading)
    }

    /// Has workers drop an adapter that others did not load. Returns the failure of those, and says what became of it.
    async fn undo(&self, name: &str, halves: Vec<Half>, failure: Failure) -> Failure {
        if halves.is_empty() {
            return failure;
        }
        let deadline = Instant::now() + UNDO_TIMEOUT;
        let unload = v1::UnloadAdapterRequest { name: name.to_owned() };
        let asked =
            halves.iter().map(|half| self.ask_half(half, deadline, half.unload(unload.clone(), deadline)));
        let kept = join_all(asked.collect::<Vec<_>>()).await;
        let kept = kept.into_iter().filter_map(Result::err).filter(|f| f.class != FailureClass::NotFound);
        let text = match kept.count() {
            0 => "workers that had loaded it have dropped it again".to_owned(),
            n => format!("{n} workers that had loaded it keep it: unload it"),
        };
        Failure { message: format!("{}; {text}", failure.message), ..failure }
    }

    /// The workers of a pool that serve a model, adapters of it included.
    fn halves(&self, pool: Pool, model: &ModelName) -> Result<Vec<Half>, Failure> {
        let (workers, word) = match pool {
            Pool::Pd => (self.fleet.decoders_of(model), "decoder"),
            Pool::Encoder => (self.fleet.encoders_of(model), "encoder"),
        };
        if workers.is_empty() {
            return Err(Failure::unavailable(format!("no {word} worker of model {model:?} is ready")));
        }
        Ok(workers.into_iter().map(|(worker, channel)| Half { worker, pool, channel }).collect())
    }

    /// Waits for a worker's answer, and learns what it serves from then on.
    pub(super) async fn ask_half<T>(
        &self,
        half: &Half,
        deadline: Instant,
        call: impl Future<Output = Result<T, Status>>,
    ) -> Result<T, Failure> {
        let started = Instant::now();
        let answer = timeout_at(deadline, call).await;
        self.fleet.ask_again(&half.worker);
        match answer {
            Ok(answer) => answer.map_err(|status| {
                tracing::warn!(worker = %half.worker, error = %status, "an adapter was not changed here");
                CallFailure::from(status).failure
            }),
            Err(_) => Err(out_of_time(deadline.duration_since(started))),
        }
    }
}

impl Half {
    pub(super) async fn load(
        &self,
        request: v1::LoadAdapterRequest,
        deadline: Instant,
    ) -> Result<v1::LoadAdapterResponse, Status> {
        let (channel, request) = (self.channel.clone(), outgoing(request, deadline));
        let answer = match self.pool {
            Pool::Pd => PrefillDecodeWorkerClient::new(channel).load_adapter(request).await,
            Pool::Encoder => EncoderWorkerClient::new(channel).load_encoder_adapter(request).await,
        };
        answer.map(tonic::Response::into_inner)
    }

    async fn unload(&self, request: v1::UnloadAdapterRequest, deadline: Instant) -> Result<(), Status> {
        let (channel, request) = (self.channel.clone(), outgoing(request, deadline));
        match self.pool {
            Pool::Pd => PrefillDecodeWorkerClient::new(channel).unload_adapter(request).await.map(drop),
            Pool::Encoder => {
                EncoderWorkerClient::new(channel).unload_encoder_adapter(request).await.map(drop)
            }
        }
    }
}
