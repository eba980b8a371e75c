//! One encoder job at one worker: the call, its time, and what its answer has to be.

use super::flight::Teller;
use super::{Belief, Encoded, Job, Parts};
use crate::cache::Wanted;
use crate::fleet::Lease;
use crate::wire::{CallFailure, outgoing};
use bytes::Bytes;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tonic::Status;
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{EncodedItem, Failure, FailureClass, ItemForm};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;

/// One try of a job.
pub(super) struct Attempt<'a> {
    pub(super) parts: &'a Parts,
    pub(super) job: &'a Job,
    pub(super) fence: u64,
    pub(super) deadline: Instant,
    pub(super) teller: &'a Teller,
}

/// A try that ended, and the worker that had it.
pub(super) struct Tried {
    pub(super) worker: Lease,
    pub(super) result: Result<Encoded, CallFailure>,
}

impl Attempt<'_> {
    pub(super) async fn run(self, worker: Lease) -> Tried {
        let began = Instant::now();
        let end = self.deadline.min(began + self.parts.policy.attempt_time);
        let result = match timeout_at(end, self.call(&worker, end)).await {
            Ok(Ok(response)) => self.accept(&worker, response).map_err(CallFailure::from),
            Ok(Err(failed)) => {
                worker.report(&failed);
                Err(changed_encoder(&worker, failed))
            }
            Err(_) if end < self.deadline => {
                worker.report_timeout();
                let message = format!("an encoder did not answer within {} s", (end - began).as_secs());
                Err(Failure::unavailable(message).into())
            }
            Err(_) => Err(Failure::new(
                FailureClass::DeadlineExceeded,
                "the request's time ran out while an item was encoded",
            )
            .into()),
        };
        if result.is_ok() {
            worker.report_ok();
            self.parts.pace.saw(&self.job.model, self.job.wanted.modality, began.elapsed());
        }
        Tried { worker, result }
    }

    async fn call(&self, worker: &Lease, end: Instant) -> Result<v1::EncodeResponse, CallFailure> {
        let mut client = EncoderWorkerClient::new(worker.channel());
        let mut events = client.encode(outgoing(self.message(), end)).await?.into_inner();
        while let Some(event) = events.message().await? {
            match event.kind {
                Some(Kind::Announced(item)) => {
                    let item = self.check(item)?;
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
        Ok(Encoded {
            item,
            source,
            times,
            peers,
            belief: Belief::Made,
            holders: Vec::new(),
            at: Instant::now(),
        })
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
