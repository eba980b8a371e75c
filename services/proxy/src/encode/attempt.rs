//! The encoders of the fleet as a [`Ladder`](super::ladder::Ladder) climbs them: which one, for how long, and what its
//! answer has to be.

use super::flight::Teller;
use super::ladder::Rungs;
use super::{Belief, Encoded, Job, Parts, WORKER_WAIT};
use crate::cache::Wanted;
use crate::fleet::catalog::Want;
use crate::fleet::{Lease, Size};
use crate::wire::{CallFailure, outgoing};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use tracing::Instrument;
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{EncodedItem, Failure, FailureClass, ItemForm, WorkerId};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;

/// A try is given up after so many times what nineteen of twenty such jobs take, but never before the second.
const PATIENT: u32 = 16;
const AT_LEAST: Duration = Duration::from_secs(15);

/// One job at the encoders of the fleet.
pub(super) struct AtEncoders<'a> {
    pub(super) parts: &'a Parts,
    pub(super) job: &'a Job,
    /// Token of the lease under which it is done; 0: without one.
    pub(super) fence: u64,
    pub(super) deadline: Instant,
    /// When the most patient of those who wait needs it.
    pub(super) due: Instant,
    pub(super) teller: &'a Teller,
    /// What nineteen of twenty such jobs take, once its tokens are known.
    pub(super) sized: watch::Sender<Option<Duration>>,
}

impl Rungs for AtEncoders<'_> {
    type Worker = Lease;

    async fn worker(&self, seen: &[WorkerId]) -> Result<Lease, Failure> {
        if seen.is_empty() {
            let deadline = self.deadline.min(self.due);
            self.parts.fleet.admit(&self.want(), self.n_bytes(), deadline)?;
        }
        let wait = (Instant::now() + WORKER_WAIT).min(self.deadline);
        let (want, modality) = (self.want(), self.job.wanted.modality);
        timeout_at(wait, self.parts.fleet.lease(&want, self.size(), seen)).await.map_err(|_| {
            Failure::unavailable(format!(
                "no encoder that reads {modality} for model {:?} is there now; try again",
                self.job.model
            ))
        })
    }

    fn spare(&self, seen: &[WorkerId]) -> Option<Lease> {
        let asked = self.parts.fleet.lease(&self.want(), self.size(), seen).now_or_never();
        // A PD worker has its own work: it helps out when nobody else can. Where only PD workers encode, a job is slow
        // because its worker decodes, and a second one would only slow another one's answers.
        asked.filter(|worker| !seen.contains(worker.id()) && !worker.is_pd())
    }

    fn id(worker: &Lease) -> &WorkerId {
        worker.id()
    }

    fn is_last_resort(worker: &Lease) -> bool {
        worker.is_last_resort()
    }

    fn patience(&self, worker: &Lease) -> Duration {
        let policy = self.parts.policy;
        let Job { model, wanted, .. } = self.job;
        let seen = || self.parts.pace.predict(model, wanted.modality).map(|seen| seen.p95);
        // The workers know best; before they have measured anything, what was seen of them has to do.
        let forecast = worker.forecast().map(|f| f.queue.saturating_add(f.p95));
        let sized = *self.sized.borrow();
        let expected = sized.or(forecast).or_else(seen).unwrap_or(policy.hedge_after_unknown);
        expected.max(policy.hedge_after_at_least)
    }

    async fn revised(&self) -> Duration {
        let mut sized = self.sized.subscribe();
        match sized.wait_for(Option::is_some).await.map(|sized| *sized) {
            Ok(Some(expected)) => expected.max(self.parts.policy.hedge_after_at_least),
            _ => std::future::pending().await,
        }
    }

    fn attempt(&self, worker: Lease) -> BoxFuture<'_, Result<Encoded, CallFailure>> {
        if let Some(home) = &self.job.home {
            home.given(&self.job.wanted.key);
        }
        let span = tracing::info_span!("item", key = %self.job.wanted.key, encoder = %worker.id());
        self.run(worker).instrument(span).boxed()
    }
}

impl AtEncoders<'_> {
    fn want(&self) -> Want {
        self.job.encoder()
    }

    fn size(&self) -> Size {
        Size::Item {
            key: Some(self.job.wanted.key),
            bytes: self.n_bytes(),
            home: self.job.home.as_ref().map(|home| home.id().clone()),
        }
    }

    fn n_bytes(&self) -> u64 {
        self.job.bytes.len() as u64
    }

    async fn run(&self, worker: Lease) -> Result<Encoded, CallFailure> {
        let began = Instant::now();
        let end = self.deadline.min(began + self.attempt_time(&worker));
        let result = match timeout_at(end, self.call(&worker, end)).await {
            Ok(Ok(response)) => self.accept(&worker, response).map_err(CallFailure::from),
            Ok(Err(failed)) => Err(changed_encoder(&worker, failed)),
            Err(_) => {
                worker.report_timeout();
                return Err(self.too_late(end, began).into());
            }
        };
        match &result {
            Ok(_) => {
                self.parts.pace.saw(&self.job.model, self.job.wanted.modality, began.elapsed());
                worker.report_ok();
            }
            Err(failed) => worker.report(failed),
        }
        result
    }

    /// How long one try may take: far longer than it should, and no longer than that.
    fn attempt_time(&self, worker: &Lease) -> Duration {
        let most = self.parts.policy.attempt_time;
        let expected = worker.forecast().map(|f| f.queue.saturating_add(f.p95).saturating_mul(PATIENT));
        expected.map_or(most, |expected| expected.max(AT_LEAST).min(most))
    }

    fn too_late(&self, end: Instant, began: Instant) -> Failure {
        if end < self.deadline {
            let message = format!("an encoder did not answer within {} s", (end - began).as_secs());
            return Failure::unavailable(message);
        }
        let message = "the request's time ran out while an item was encoded";
        Failure::new(FailureClass::DeadlineExceeded, message)
    }

    async fn call(&self, worker: &Lease, end: Instant) -> Result<v1::EncodeResponse, CallFailure> {
        let mut client = EncoderWorkerClient::new(worker.channel());
        let mut events = client.encode(outgoing(self.message(), end)).await?.into_inner();
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(Kind::Announced(item)) => {
                    let item = self.check(item)?;
                    let modality = self.job.wanted.modality;
                    if let Some(p95) = worker.p95_of_tokens(&self.job.model, modality, item.n_tokens) {
                        self.sized.send_if_modified(|sized| sized.replace(p95).is_none());
                    }
                    self.teller.announce(item, self.parts.peers_of(worker.id()));
                }
                Some(Kind::Ready(response)) => return Ok(response),
                None => {}
            }
        }
        Err(Status::unavailable("an encoder ended its job early").into())
    }

    fn message(&self) -> v1::EncodeRequest {
        let Job { wanted, options, .. } = self.job;
        v1::EncodeRequest {
            request_id: self.job.request_id.to_string(),
            model: self.job.model.to_string(),
            key: Bytes::copy_from_slice(wanted.key.as_bytes()),
            modality: v1::Modality::from(wanted.modality).into(),
            item: self.job.bytes.clone(),
            fingerprint: Bytes::copy_from_slice(wanted.fingerprint.as_bytes()),
            item_is_token_ids: options.form == ItemForm::TokenIds,
            options: Some(options.clone().into()),
            fence: self.fence,
        }
    }

    fn accept(&self, worker: &Lease, response: v1::EncodeResponse) -> Result<Encoded, Failure> {
        let us = Duration::from_micros;
        let times = StageTimes {
            queue: us(response.queue_us),
            encode: us(response.preprocess_us.saturating_add(response.encode_us)),
            publish: us(response.publish_us),
            ..StageTimes::default()
        };
        let item = response.item.ok_or_else(|| Failure::internal("an encoder answered without an item"))?;
        let item = self.check(item)?;
        let peers: Vec<_> = Some(response.peer).filter(|peer| !peer.is_empty()).into_iter().collect();
        self.parts.note_peers(worker.id(), &peers);
        let source = if response.shared { ItemSource::Shared } else { ItemSource::Encoded };
        let (holders, at) = (Vec::new(), Instant::now());
        Ok(Encoded { item, source, times, peers, belief: Belief::Made, holders, at })
    }

    fn check(&self, item: v1::EncodedItem) -> Result<EncodedItem, Failure> {
        let item = EncodedItem::try_from(item)
            .map_err(|e| Failure::internal(format!("an encoder answered: {e}")))?;
        let made = Wanted { key: item.key, fingerprint: item.fingerprint, modality: item.modality };
        if made != self.job.wanted {
            let wanted = self.job.wanted;
            return Err(Failure::internal(format!("asked an encoder for {wanted:?}, it made {made:?}")));
        }
        Ok(item)
    }
}

/// A worker that came back with another encoder refuses the key; its new description is asked for at once.
fn changed_encoder(worker: &Lease, mut failed: CallFailure) -> CallFailure {
    if failed.failure.class == FailureClass::Mismatch {
        worker.report_broken();
        failed.failure = Failure { class: FailureClass::Unavailable, ..failed.failure };
    }
    failed
}
