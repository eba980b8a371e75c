//! One encoder job, and the ladder below it: another encoder, the same one when it is back, a typed error.
//!
//! Jobs are idempotent by key, so sending one twice costs time and nothing else.

use crate::cache::{EncoderCache, Wanted};
use crate::fleet::catalog::Want;
use crate::fleet::{Fleet, Lease};
use crate::flights::{Boarding, Flights};
use crate::wire::{CallFailure, outgoing};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{
    ContentKey, EncodedItem, Failure, FailureClass, ItemForm, ItemOptions, ModelName, RequestId, WorkerId,
};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;

/// Times a job is sent before it is given up.
pub const ATTEMPTS: u32 = 5;
/// How long a request waits for a worker to be there at all: long enough for a restart.
pub const WORKER_WAIT: Duration = Duration::from_secs(30);

/// An item to be encoded.
#[derive(Clone, Debug)]
pub struct Job {
    /// The request that asks.
    pub request_id: RequestId,
    /// Its model.
    pub model: ModelName,
    /// The output.
    pub wanted: Wanted,
    /// The item.
    pub bytes: Bytes,
    /// What is asked of its processing; in the key.
    pub options: ItemOptions,
}

/// An item whose encoder output is in the store.
#[derive(Clone, Debug)]
pub struct Encoded {
    /// The output.
    pub item: EncodedItem,
    /// Where it came from, seen from one request.
    pub source: ItemSource,
    /// Queue, encode and publish.
    pub times: StageTimes,
}

/// The outcome of a flight.
type Outcome = Result<Encoded, Failure>;

/// What the store said about the items of a request; asked when the first of its flights needs it.
type Probe = Shared<BoxFuture<'static, Arc<Vec<Option<EncodedItem>>>>>;

/// Whether the store may answer for the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Origin {
    /// It may.
    Any,
    /// Its object was found missing or corrupt: encode.
    Fresh,
}

/// Encodes items, each once for all the requests that need it at the same moment.
#[derive(Clone)]
pub struct Encodes {
    fleet: Arc<Fleet>,
    cache: EncoderCache,
    flights: Arc<Flights<(ContentKey, Origin), Outcome>>,
    /// The most that a job may take, however long its waiters would.
    max_time: Duration,
}

impl Encodes {
    /// Encodes on the workers of `fleet` what `cache` does not hold.
    pub fn new(fleet: Arc<Fleet>, cache: EncoderCache, max_time: Duration) -> Self {
        Self { fleet, cache, flights: Arc::new(Flights::new()), max_time }
    }

    /// Finds or makes the outputs of the items, all at once, in their order. The store is asked once for all of them,
    /// inside the flights: so a second request either joins the first one's flight or asks the store after it.
    ///
    /// # Errors
    /// Of the first item that fails, its place and the failure.
    pub async fn all(&self, jobs: &[Job]) -> Result<Vec<Encoded>, (usize, Failure)> {
        let wanted: Vec<_> = jobs.iter().map(|job| job.wanted).collect();
        let cache = self.cache.clone();
        let probe: Probe = async move { Arc::new(cache.probe(&wanted).await) }.boxed().shared();
        let waits = jobs.iter().enumerate().map(|(i, job)| {
            let encodes = self.clone();
            let (own, probe) = (job.clone(), probe.clone());
            let work = async move {
                match probe.await.get(i).cloned().flatten() {
                    Some(item) => {
                        Ok(Encoded { item, source: ItemSource::Cached, times: StageTimes::default() })
                    }
                    None => encodes.run(&own).await,
                }
            };
            let wait = self.wait(job, Origin::Any, work);
            async move { wait.await.map_err(|failure| (i, failure)) }
        });
        // Every flight is boarded before the first is awaited: `all` of one request is one moment.
        let waits: Vec<_> = waits.collect();
        futures::future::try_join_all(waits).await
    }

    /// Makes the output of an item whose object in the store is missing or corrupt.
    ///
    /// # Errors
    /// [`Failure`] of the job.
    pub async fn again(&self, job: &Job) -> Outcome {
        let (encodes, own) = (self.clone(), job.clone());
        self.wait(job, Origin::Fresh, async move { encodes.run(&own).await }).await
    }

    fn wait<W>(&self, job: &Job, origin: Origin, work: W) -> impl Future<Output = Outcome> + use<W>
    where
        W: Future<Output = Outcome> + Send + 'static,
    {
        let (flight, boarding) = self.flights.board((job.wanted.key, origin), work);
        async move {
            let mut encoded = flight.await?;
            if boarding == Boarding::Joined {
                encoded.times = StageTimes::default();
                if encoded.source == ItemSource::Encoded {
                    encoded.source = ItemSource::Shared;
                }
            }
            Ok(encoded)
        }
    }

    async fn run(&self, job: &Job) -> Outcome {
        let deadline = Instant::now() + self.max_time;
        let want = Want::Encoder {
            model: job.model.clone(),
            modality: job.wanted.modality,
            fingerprint: job.wanted.fingerprint,
        };
        let cost = job.bytes.len() as u64;
        let mut tried: Vec<WorkerId> = Vec::new();
        let mut attempt = 1;
        loop {
            let wait = (Instant::now() + WORKER_WAIT).min(deadline);
            let lease =
                timeout_at(wait, self.fleet.lease(&want, cost, &tried)).await.map_err(|_| no_encoder(job))?;
            let failure = match call(&lease, job, deadline).await {
                Ok(encoded) => return Ok(encoded),
                Err(failure) => failure,
            };
            if failure.broken {
                lease.report_broken();
            }
            if attempt == ATTEMPTS || !failure.failure.class.is_retryable() {
                return Err(failure.failure);
            }
            tracing::warn!(encoder = %lease.id(), attempt, failure = %failure.failure, "encoder job sent again");
            tried.push(lease.id().clone());
            drop(lease);
            tokio::time::sleep(backoff(attempt)).await;
            attempt += 1;
        }
    }
}

/// The pause after an attempt.
pub fn backoff(attempt: u32) -> Duration {
    Duration::from_millis(50 << attempt.saturating_sub(1).min(4))
}

async fn call(lease: &Lease, job: &Job, deadline: Instant) -> Result<Encoded, CallFailure> {
    let wanted = &job.wanted;
    let message = v1::EncodeRequest {
        request_id: job.request_id.to_string(),
        model: job.model.to_string(),
        key: Bytes::copy_from_slice(wanted.key.as_bytes()),
        modality: v1::Modality::from(wanted.modality).into(),
        item: job.bytes.clone(),
        fingerprint: Bytes::copy_from_slice(wanted.fingerprint.as_bytes()),
        item_is_token_ids: job.options.form == ItemForm::TokenIds,
        options: Some(job.options.clone().into()),
        fence: 0,
    };
    let mut client = EncoderWorkerClient::new(lease.channel());
    let answer = timeout_at(deadline, async {
        let mut events = client.encode(outgoing(message, deadline)).await?.into_inner();
        while let Some(event) = events.message().await? {
            if let Some(Kind::Ready(response)) = event.kind {
                return Ok(response);
            }
        }
        Err(Status::unavailable("an encoder ended its job early"))
    });
    let answer = answer.await.map_err(|_| {
        Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out while an item was encoded")
    })?;
    let response = match answer {
        Ok(response) => response,
        Err(status) => return Err(changed_encoder(lease, status.into())),
    };
    accept(response, job).map_err(CallFailure::from)
}

/// A worker that came back with another encoder refuses the key; its new description is asked for at once.
fn changed_encoder(lease: &Lease, mut failure: CallFailure) -> CallFailure {
    if failure.failure.class == FailureClass::Mismatch {
        lease.report_broken();
        failure.failure = Failure { class: FailureClass::Unavailable, ..failure.failure };
    }
    failure
}

fn accept(response: v1::EncodeResponse, job: &Job) -> Outcome {
    let us = Duration::from_micros;
    let times = StageTimes {
        queue: us(response.queue_us),
        encode: us(response.preprocess_us.saturating_add(response.encode_us)),
        publish: us(response.publish_us),
        ..StageTimes::default()
    };
    let item = response.item.ok_or_else(|| Failure::internal("an encoder answered without an item"))?;
    let item =
        EncodedItem::try_from(item).map_err(|e| Failure::internal(format!("an encoder answered: {e}")))?;
    let wanted = Wanted { key: item.key, fingerprint: item.fingerprint, modality: item.modality };
    if wanted != job.wanted {
        return Err(Failure::internal(format!("asked an encoder for {:?}, it made {wanted:?}", job.wanted)));
    }
    Ok(Encoded { item, source: ItemSource::Encoded, times })
}

fn no_encoder(job: &Job) -> Failure {
    let modality = job.wanted.modality;
    Failure::unavailable(format!(
        "no encoder that reads {modality} for model {:?} is there now; try again",
        job.model
    ))
}
