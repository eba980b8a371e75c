//! The PD worker's part of a request, and the ladder below it.
//!
//! A request whose worker went away is sent again, to another one, and so is one whose worker did not find an item,
//! which is then encoded anew. Once text has gone out, the next worker is told what the caller has and goes on from
//! there: the same seed gives the same text, so the caller sees one stream. A caller that does not want that gets a
//! failure that says what happened.

use super::Work;
use super::said::Said;
use super::supply::Supply;
use crate::encode::{ATTEMPTS, WORKER_WAIT, backoff};
use crate::fleet::{Lease, Prefixes, Size};
use crate::request::Resumption;
use crate::wire::{CallFailure, outgoing};
use bytes::Bytes;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use tonic::Status;
use tracing::Instrument;
use triptych_core::lifetime::StageTimes;
use triptych_core::prompt::Prompt;
use triptych_core::{Failure, FailureClass, TenantId, WorkerId};
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;

/// Largest message of a PD worker.
const MAX_MESSAGE: usize = 16 << 20;

/// A request whose items are announced.
pub(super) struct Decoding<'a> {
    work: &'a Work,
    supply: Supply<'a>,
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
    pub(super) fn new(work: &'a Work, supply: Supply<'a>) -> Self {
        let prompt = work.request.prompt.clone();
        let said = Said::nothing(work.request.n_choices());
        Self { work, supply, prompt, held: None, said, text: None }
    }

    /// One window of a sound read in sequence: nothing goes out, so that it can be sent again to its end.
    pub(super) fn window(work: &'a Work, prompt: Prompt, supply: Supply<'a>) -> Self {
        Self { prompt, held: Some(Vec::new()), ..Self::new(work, supply) }
    }

    /// Streams the answer to the caller. When it fails, items that are being encoded for it are left to whoever asks
    /// again.
    pub(super) async fn run(mut self) -> Result<(v1::Summary, Vec<v1::Delta>), Failure> {
        match self.attempts().await {
            Ok(summary) => {
                self.supply.settle().await;
                Ok((self.finish(summary), self.held.unwrap_or_default()))
            }
            Err(failure) => {
                self.supply.leave_behind();
                Err(failure)
            }
        }
    }

    async fn attempts(&mut self) -> Result<v1::Summary, Failure> {
        let budget = &self.work.orchestrator.budget;
        budget.first_try();
        let mut tried: Vec<WorkerId> = Vec::new();
        let mut attempt = 1;
        loop {
            let lease = self.lease(&tried).await.map_err(|failure| self.tell_apart(failure))?;
            let span = tracing::info_span!("answer", pd = %lease.id(), attempt);
            let failed = match self.stream(&lease).instrument(span).await {
                Ok(summary) => {
                    lease.report_ok();
                    return Ok(summary);
                }
                // The worker's stream was dropped: it needs no more.
                Err(Broken::Item(failure)) => return Err(failure),
                Err(Broken::Worker(failed)) => failed,
            };
            lease.report(&failed);
            if self.text.is_some() && self.work.request.resumption == Resumption::Never {
                return Err(broken_off(failed.failure));
            }
            self.forget_held();
            if let Some(idx) = failed.missing {
                drop(lease);
                self.supply.renew(idx, failed.failure).await?;
                continue;
            }
            if attempt == ATTEMPTS || !failed.failure.class.is_retryable() || !budget.try_spend() {
                return Err(self.tell_apart(failed.failure));
            }
            self.tell_of_retry(&lease, attempt, &failed.failure);
            tried.push(lease.id().clone());
            drop(lease);
            tokio::time::sleep(backoff(attempt)).await;
            attempt += 1;
        }
    }

    /// A caller who has some of the answer has to know that it is incomplete.
    fn tell_apart(&self, failure: Failure) -> Failure {
        if self.text.is_some() { broken_off(failure) } else { failure }
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
        let want = self.work.decoder();
        // The request's own time is held by whoever waits for this.
        let lease = timeout(WORKER_WAIT, self.work.orchestrator.fleet.lease(&want, self.size(), tried)).await;
        lease.map_err(|_| {
            Failure::unavailable(format!(
                "no decoder worker for model {:?} is there now; try again",
                served.name
            ))
        })
    }

    /// What the choice of a worker looks at.
    fn size(&self) -> Size {
        let items = self.supply.sizes();
        let keys: Vec<_> = items.iter().map(|(key, _)| *key).collect();
        let prompt = Prefixes::of(&self.tenant(), &self.prompt, &keys);
        Size::Request { prompt, items, holders: self.supply.holders() }
    }

    fn message(&self) -> v1::PdGenerateRequest {
        let request = &self.work.request;
        v1::PdGenerateRequest {
            request_id: request.id.to_string(),
            model: self.work.route.served.name.to_string(),
            prompt: Some(self.prompt.clone().into()),
            items: self.supply.items(),
            sampling: Some(request.sampling.clone()),
            tenant: self.tenant(),
            priority: request.priority,
            hints: self.supply.hints(),
            resume: if self.held.is_some() { Vec::new() } else { self.said.resume() },
        }
    }

    /// A digest: the worker tells tenants apart and learns no name.
    fn tenant(&self) -> Bytes {
        let work = self.work;
        let secret = work.request.tenant_secret(&work.orchestrator.materials.tenant_salt);
        Bytes::copy_from_slice(TenantId::of(&secret).as_bytes())
    }

    async fn stream(&mut self, lease: &Lease) -> Result<v1::Summary, Broken> {
        if self.supply.is_pending() {
            self.work.orchestrator.observer.early(&self.work.route.served.name);
        }
        let mut client =
            PrefillDecodeWorkerClient::new(lease.channel()).max_decoding_message_size(MAX_MESSAGE);
        let request = outgoing(self.message(), self.work.request.deadline);
        let mut pieces = client.generate(request).await?.into_inner();
        let ended_early = || CallFailure {
            failure: Failure::unavailable("a worker ended its answer early"),
            broken: false,
            missing: None,
        };
        // Whoever writes has read all items, whatever becomes of the encoders' word for it.
        let mut writes = false;
        loop {
            let piece = tokio::select! {
                piece = pieces.message() => piece?.ok_or_else(ended_early)?,
                landed = self.supply.landed(), if !writes => {
                    landed.map_err(Broken::Item)?;
                    continue;
                }
            };
            match piece.kind {
                Some(Kind::Delta(delta)) => {
                    writes = true;
                    self.pass_on(delta).await?;
                }
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

    /// Adds the stages before the PD worker, and what only the proxy can measure.
    fn finish(&self, mut summary: v1::Summary) -> v1::Summary {
        let usage = summary.usage.unwrap_or_default();
        let per_token = self.per_token(usage.completion_tokens);
        let before = self.supply.times();
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
        summary.item_sources = self.supply.sources();
        let (observer, model) = (&self.work.orchestrator.observer, &self.work.route.served.name);
        observer.tokens(model, &usage, per_token);
        observer.size(model, &usage, self.supply.size());
        summary
    }

    /// Mean time between tokens after the first; the choices of a request are written side by side.
    fn per_token(&self, completion_tokens: u32) -> Option<Duration> {
        let (first, latest) = self.text?;
        let per_choice = completion_tokens / self.work.request.n_choices().max(1);
        (per_choice >= 2).then(|| latest.duration_since(first) / (per_choice - 1))
    }
}

/// Why a stream has no summary.
#[derive(Debug)]
enum Broken {
    /// The worker's doing, or its fate: another one may do better.
    Worker(CallFailure),
    /// An item failed for good.
    Item(Failure),
}

impl From<CallFailure> for Broken {
    fn from(failed: CallFailure) -> Self {
        Self::Worker(failed)
    }
}

impl From<Status> for Broken {
    fn from(status: Status) -> Self {
        Self::Worker(status.into())
    }
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Self::Worker(failure.into())
    }
}

/// A failure after text went out: it is not sent again from here, and the caller should know why.
fn broken_off(failure: Failure) -> Failure {
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
