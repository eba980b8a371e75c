//! One attempt: a job at one encoder, and what its answer has to be.

use super::job::EncodeJob;
use super::parts::{Parts, now};
use crate::fleet::{Lease, Origin};
use crate::request_machine::action::AttemptId;
use crate::request_machine::deaths::{Aboard, Lost, RequestFingerprint, Stage, Verdict};
use crate::request_machine::event::EncodeEvent;
use crate::request_machine::failures::quarantined;
use crate::request_machine::output::{Belief, Encoded, Wanted};
use crate::wire::{CallFailure, outgoing, read_to_end};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::Status;
use tracing::Span;
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{EncodedItem, Failure, FailureClass, ItemForm};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_runtime::spans;

/// A job at one encoder. Dropping the future of [`Attempt::run`] cancels it.
pub(super) struct Attempt {
    pub(super) parts: Arc<Parts>,
    pub(super) job: Arc<EncodeJob>,
    pub(super) id: AttemptId,
    pub(super) worker: Arc<Lease>,
    /// Token of the lease under which it is done; 0: without one.
    pub(super) fence: u64,
    /// End of its time, which the driver keeps.
    pub(super) until: Instant,
    /// Receives the description of the output.
    pub(super) announcements: mpsc::Sender<EncodeEvent>,
}

impl Attempt {
    /// To READY or to a failure, which the fleet hears of too.
    pub(super) async fn run(self) -> EncodeEvent {
        let fingerprint = self.job.death_fingerprint();
        let fleet = &self.parts.fleet;
        if fleet.verdict(&fingerprint) == Verdict::Refused {
            return EncodeEvent::Ended { attempt: self.id, result: Err(quarantined()) };
        }
        let result = match self.call().await {
            Ok(response) => self.accept(response).map_err(CallFailure::from),
            Err(failed) => Err(self.changed_encoder(failed)),
        };
        match &result {
            Ok(_) => fleet.deaths().answered(&fingerprint),
            Err(failed) => self.note_end(fingerprint, failed.lost),
        }
        spans::called(&Span::current(), result.as_ref().map(drop).map_err(|failed| &failed.failure));
        match &result {
            Ok(_) => self.worker.report_ok(),
            Err(failed) => self.worker.report(failed, self.origin()),
        }
        EncodeEvent::Ended { attempt: self.id, result: result.map_err(|failed| failed.failure) }
    }

    /// Its encoder did not make it; one that went away may have died of it.
    fn note_end(&self, fingerprint: RequestFingerprint, lost: Option<Lost>) {
        let mut deaths = self.parts.fleet.deaths();
        deaths.end_trial(&fingerprint, self.job.request_id);
        if let Some(lost) = lost {
            let stage = if self.worker.is_alone() { Stage::Alone } else { Stage::Starting };
            let aboard = Aboard { request: self.job.request_id, fingerprint, stage };
            deaths.broke(self.worker.id(), aboard, lost, now());
        }
    }

    /// Of its key, whose last two bytes are the tenant's.
    fn origin(&self) -> Origin {
        let key = self.job.wanted.key.as_bytes();
        let (request, tenant) = key.split_at(key.len() - 2);
        Origin::new(request, tenant)
    }

    async fn call(&self) -> Result<v1::EncodeResponse, CallFailure> {
        let mut client = EncoderWorkerClient::new(self.worker.channel());
        let mut events = client.encode(outgoing(self.message(), self.until)).await?.into_inner();
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(Kind::Announced(item)) => self.announce(self.check(item)?).await,
                Some(Kind::Ready(response)) => {
                    self.parts.leases.tasks.spawn(read_to_end(events));
                    return Ok(response);
                }
                None => {}
            }
        }
        Err(Status::unavailable("an encoder ended its job early").into())
    }

    async fn announce(&self, item: EncodedItem) {
        let encoder = self.job.wanted.encoder();
        let p95 = self.worker.p95_of_tokens(&self.job.model, encoder, item.n_tokens);
        let peers = self.parts.peers_of(self.worker.id());
        let announced = EncodeEvent::Announced { attempt: self.id, item, peers, p95 };
        // The receiver lives longer than the attempt.
        let _ = self.announcements.send(announced).await;
    }

    fn message(&self) -> v1::EncodeRequest {
        let EncodeJob { wanted, options, .. } = &*self.job;
        v1::EncodeRequest {
            request_id: self.job.request_id.to_string(),
            model: self.job.model.to_string(),
            key: Bytes::copy_from_slice(wanted.key.as_bytes()),
            modality: v1::Modality::from(wanted.modality).into(),
            item: self.job.bytes.clone(),
            fingerprint: Bytes::copy_from_slice(wanted.fingerprint.as_bytes()),
            item_is_token_ids: options.form == ItemForm::TokenIds,
            item_is_embeddings: options.form == ItemForm::Embeddings,
            options: Some(options.clone().into()),
            fence: self.fence,
            priority: self.job.priority,
            tower_index: wanted.tower.0.into(),
        }
    }

    fn accept(&self, response: v1::EncodeResponse) -> Result<Encoded, Failure> {
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
        self.parts.note_peers(self.worker.id(), &peers);
        let source = if response.shared { ItemSource::Shared } else { ItemSource::Encoded };
        let (holders, at) = (Vec::new(), now());
        Ok(Encoded { item, source, times, peers, belief: Belief::Made, holders, at })
    }

    fn check(&self, item: v1::EncodedItem) -> Result<EncodedItem, Failure> {
        let item = EncodedItem::try_from(item)
            .map_err(|e| Failure::internal(format!("an encoder answered: {e}")))?;
        let EncodedItem { key, fingerprint, modality, .. } = item;
        let made = Wanted { key, fingerprint, modality, ..self.job.wanted };
        if made != self.job.wanted {
            let wanted = self.job.wanted;
            return Err(Failure::internal(format!("asked an encoder for {wanted:?}, it made {made:?}")));
        }
        Ok(item)
    }

    /// A worker that came back with another encoder refuses the key; its new description is asked for at once.
    fn changed_encoder(&self, mut failed: CallFailure) -> CallFailure {
        if failed.failure.class == FailureClass::Mismatch {
            self.worker.report_broken();
            failed.failure = Failure { class: FailureClass::Unavailable, ..failed.failure };
        }
        failed
    }
}
