//! The PD worker's part of a request, and the ladder below it.
//!
//! A request whose worker went away is sent again, to another one, and so is one whose worker did not find an item,
//! which is then encoded anew. Once text has gone out, the next worker is told what the caller has and goes on from
//! there: the same seed gives the same text, so the caller sees one stream. A caller that does not want that gets a
//! failure that says what happened.

use super::said::Said;
use super::{Work, encode_times};
use crate::encode::{ATTEMPTS, Encoded, Job, WORKER_WAIT, backoff};
use crate::fleet::Lease;
use crate::fleet::catalog::Want;
use crate::observe::wire_source;
use crate::request::Resumption;
use crate::wire::{CallFailure, outgoing};
use bytes::Bytes;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use triptych_core::lifetime::StageTimes;
use triptych_core::prompt::Prompt;
use triptych_core::{Failure, FailureClass, ItemIdx, TenantId, WorkerId};
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;

/// Times one item is encoded again because a PD worker did not find it.
const AGAIN_PER_ITEM: u32 = 2;
/// Largest message of a PD worker.
const MAX_MESSAGE: usize = 16 << 20;

/// A request whose items are encoded.
pub(super) struct Decoding<'a> {
    work: &'a Work,
    jobs: Vec<Job>,
    encoded: Vec<Encoded>,
    /// How often each item was encoded again.
    again: Vec<u32>,
    /// What the decoder reads first.
    prompt: Prompt,
    /// Pieces that wait for the end of a window, if they have to.
    held: Option<Vec<v1::Delta>>,
    /// What has gone out.
    said: Said,
    /// When the first and the latest piece of text went out.
    text: Option<(Instant, Instant)>,
}

impl<'a> Decoding<'a> {
    pub(super) fn new(work: &'a Work, jobs: Vec<Job>, encoded: Vec<Encoded>) -> Self {
        let again = vec![0; jobs.len()];
        let prompt = work.request.prompt.clone();
        let said = Said::nothing(work.request.n_choices());
        Self { work, jobs, encoded, again, prompt, held: None, said, text: None }
    }

    /// One window of a sound read in sequence: nothing goes out, so that it can be sent again to its end.
    pub(super) fn window(work: &'a Work, prompt: Prompt, job: Job, encoded: Encoded) -> Self {
        let (jobs, encoded) = (vec![job], vec![encoded]);
        let said = Said::nothing(work.request.n_choices());
        Self { work, jobs, encoded, again: vec![0], prompt, held: Some(Vec::new()), said, text: None }
    }

    /// The pieces of a window.
    pub(super) fn into_held(self) -> Vec<v1::Delta> {
        self.held.unwrap_or_default()
    }

    /// Streams the answer to the caller.
    pub(super) async fn run(&mut self) -> Result<v1::Summary, Failure> {
        let mut tried: Vec<WorkerId> = Vec::new();
        let mut attempt = 1;
        loop {
            let lease = self.lease(&tried).await?;
            let failed = match self.stream(&lease).await {
                Ok(summary) => return Ok(self.finish(summary)),
                Err(failed) => failed,
            };
            if failed.broken {
                lease.report_broken();
            }
            if self.text.is_some() && self.work.request.resumption == Resumption::Never {
                return Err(broken_off(failed));
            }
            self.forget_held();
            if let Some(idx) = failed.missing {
                drop(lease);
                self.encode_again(idx, failed.failure).await?;
                continue;
            }
            if attempt == ATTEMPTS || !failed.failure.class.is_retryable() {
                return Err(if self.text.is_some() { broken_off(failed) } else { failed.failure });
            }
            self.tell_of_retry(&lease, attempt, &failed.failure);
            tried.push(lease.id().clone());
            drop(lease);
            tokio::time::sleep(backoff(attempt)).await;
            attempt += 1;
        }
    }

    /// Nothing of a held window has gone out, so it starts again.
    fn forget_held(&mut self) {
        if let Some(held) = &mut self.held {
            held.clear();
            self.said = Said::nothing(self.work.request.n_choices());
        }
    }

    fn tell_of_retry(&self, lease: &Lease, attempt: u32, failure: &Failure) {
        let Work { orchestrator, route, .. } = self.work;
        let (pd, resumed) = (lease.id(), self.text.is_some());
        tracing::warn!(%pd, attempt, resumed, %failure, "request sent to a PD worker again");
        match resumed {
            true => orchestrator.observer.resumed(&route.served.name),
            false => orchestrator.observer.retried(&route.served.name),
        }
    }

    async fn lease(&self, tried: &[WorkerId]) -> Result<Lease, Failure> {
        let served = &self.work.route.served;
        let want = Want::Pd { model: served.name.clone(), edition: served.edition.clone() };
        let wait = (Instant::now() + WORKER_WAIT).min(self.work.request.deadline);
        let lease = timeout_at(wait, self.work.orchestrator.fleet.lease(&want, 1, tried)).await;
        lease.map_err(|_| {
            Failure::unavailable(format!(
                "no decoder worker for model {:?} is there now; try again",
                served.name
            ))
        })
    }

    fn message(&self) -> v1::PdGenerateRequest {
        let request = &self.work.request;
        v1::PdGenerateRequest {
            request_id: request.id.to_string(),
            model: self.work.route.served.name.to_string(),
            prompt: Some(self.prompt.clone().into()),
            items: self.encoded.iter().map(|one| (&one.item).into()).collect(),
            sampling: Some(request.sampling.clone()),
            tenant: self.tenant(),
            priority: request.priority,
            hints: Vec::new(),
            resume: if self.held.is_some() { Vec::new() } else { self.said.resume() },
        }
    }

    /// A digest: the worker tells tenants apart and learns no name.
    fn tenant(&self) -> Bytes {
        let work = self.work;
        let secret = work.request.tenant_secret(&work.orchestrator.materials.tenant_salt);
        Bytes::copy_from_slice(TenantId::of(&secret).as_bytes())
    }

    async fn stream(&mut self, lease: &Lease) -> Result<v1::Summary, CallFailure> {
        let mut client =
            PrefillDecodeWorkerClient::new(lease.channel()).max_decoding_message_size(MAX_MESSAGE);
        let request = outgoing(self.message(), self.work.request.deadline);
        let mut pieces = client.generate(request).await?.into_inner();
        let ended_early = || CallFailure {
            failure: Failure::unavailable("a worker ended its answer early"),
            broken: false,
            missing: None,
        };
        loop {
            match pieces.message().await?.ok_or_else(ended_early)?.kind {
                Some(Kind::Delta(delta)) => self.pass_on(delta).await?,
                Some(Kind::Summary(summary)) => return Ok(summary),
                None => return Err(Failure::internal("a PD worker sent an empty message").into()),
            }
        }
    }

    async fn pass_on(&mut self, delta: v1::Delta) -> Result<(), Failure> {
        self.said.note(&delta)?;
        if let Some(held) = &mut self.held {
            held.push(delta);
            return Ok(());
        }
        let now = Instant::now();
        match &mut self.text {
            Some((_, latest)) => *latest = now,
            None => {
                self.text = Some((now, now));
                let observer = &self.work.orchestrator.observer;
                observer.first_token(&self.work.route.served.name, self.work.elapsed());
            }
        }
        self.work.send(delta).await
    }

    async fn encode_again(&mut self, idx: ItemIdx, failure: Failure) -> Result<(), Failure> {
        let i = idx.0 as usize;
        let (Some(job), Some(n)) = (self.jobs.get(i), self.again.get_mut(i)) else {
            return Err(Failure::internal(format!("a PD worker misses item {i} of {}", self.jobs.len())));
        };
        if *n == AGAIN_PER_ITEM {
            return Err(failure);
        }
        *n += 1;
        tracing::warn!(item = i, key = ?job.wanted.key, "encoder output is gone, encoding again");
        let Some(lost) = self.encoded.get(i) else {
            return Err(Failure::internal(format!("item {i} of {} was never encoded", self.jobs.len())));
        };
        let again =
            self.work.orchestrator.encodes.again(job, lost).await.map_err(|f| super::at_item(f, i))?;
        self.work.orchestrator.observer.encoded_again(&again);
        // The same item may stand in the request twice; both places must announce the object that is there now.
        for place in self.encoded.iter_mut().filter(|place| place.item.key == again.item.key) {
            *place = again.clone();
        }
        Ok(())
    }

    /// Adds the stages before the PD worker, and what only the proxy can measure.
    fn finish(&self, mut summary: v1::Summary) -> v1::Summary {
        let usage = summary.usage.unwrap_or_default();
        let per_token = self.per_token(usage.completion_tokens);
        let before = encode_times(&self.encoded);
        let pd = summary.times.map(StageTimes::from).unwrap_or_default();
        let first_token = self.text.map(|(first, _)| first.duration_since(self.work.request.arrived));
        summary.times = Some(
            StageTimes {
                queue: before.queue + pd.queue,
                encode: before.encode,
                publish: before.publish,
                load: pd.load,
                prefill: pd.prefill,
                first_token: first_token.unwrap_or_default(),
                // The engine's own: what arrives here comes in bunches when tokens are faster than packets.
                per_token: pd.per_token,
            }
            .into(),
        );
        summary.encoder_prompt = self.work.request.encoder_prompt.clone().map(Into::into);
        summary.item_sources = self.encoded.iter().map(|one| wire_source(one.source)).collect();
        self.work.orchestrator.observer.tokens(&self.work.route.served.name, &usage, per_token);
        summary
    }

    /// Mean time between tokens after the first; the choices of a request are written side by side.
    fn per_token(&self, completion_tokens: u32) -> Option<Duration> {
        let (first, latest) = self.text?;
        let per_choice = completion_tokens / self.work.request.n_choices().max(1);
        (per_choice >= 2).then(|| latest.duration_since(first) / (per_choice - 1))
    }
}

/// A failure after text went out: it cannot be sent again from here, and the caller should know why.
fn broken_off(failed: CallFailure) -> Failure {
    let failure = failed.failure;
    if failure.param.as_deref() == Some("resume") {
        // What we told the worker of the answer, and nothing of the client's.
        return Failure::internal(failure);
    }
    if failure.class != FailureClass::Unavailable {
        return failure;
    }
    let detail = failure.to_string();
    Failure::unavailable("the worker went away while it wrote the answer, which is incomplete; try again")
        .with_detail(detail)
}
