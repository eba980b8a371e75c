//! The PD worker's part of a request: carries out the actions of [`RequestMachine`].
//!
//! The machine decides when the request is forwarded, sent again, or given up; this task chooses the worker, reads its
//! stream, and passes it on. The next worker is given what the client has and goes on from there: the same seed gives
//! the same text, so the client sees one stream.

use super::sent::SentAnswer;
use super::supply::Supply;
use super::work::Work;
use crate::fleet::{Fleet, Lease, Prefixes, Size};
use crate::request::Resumption;
use crate::request_machine::action::{LeftItems, RequestAction};
use crate::request_machine::deaths::RequestFingerprint;
use crate::request_machine::event::{BrokenCall, RequestEvent};
use crate::request_machine::request::{RequestFacts, RequestMachine};
use crate::request_machine::surroundings::RequestSurroundings;
use crate::tool_calls::AnswerParser;
use crate::wire::{CallFailure, outgoing, read_to_end};
use bytes::Bytes;
use futures::FutureExt;
use futures::future::{BoxFuture, pending};
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::{Instant, sleep_until};
use tonic::{Status, Streaming};
use tracing::{Instrument, Span};
use triptych_core::lifetime::StageTimes;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{Failure, RequestId, WorkerId};
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;
use triptych_proto::v1::prefill_decode_worker_server::SERVICE_NAME;
use triptych_runtime::spans::{self, attribute};

/// Largest message of a PD worker.
const MAX_MESSAGE: usize = 16 << 20;

/// A request whose items are being supplied, or whose answer is being written.
pub(super) struct Decoding<'a> {
    work: &'a Work,
    supply: Supply<'a>,
    /// Prompt of the decoder.
    prompt: Prompt,
    /// Hash of what is asked for.
    fingerprint: RequestFingerprint,
    /// Pieces that wait for the end of a window, if they have to.
    held: Option<Vec<v1::Delta>>,
    /// The part of the answer that was sent.
    sent: SentAnswer,
    /// Reader of the answer's reasoning and calls.
    parser: AnswerParser,
    /// Times at which the first and the latest piece of text went out.
    text: Option<(Instant, Instant)>,
    /// The call that is under way.
    call: Call,
    /// True if its worker has written anything.
    has_written: bool,
    summary: v1::Summary,
}

/// The call to a PD worker, as far as it is.
enum Call {
    /// None.
    Idle,
    /// A worker is chosen as soon as there is one.
    Choosing(BoxFuture<'static, Lease>),
    /// A worker was chosen.
    Chosen(Lease),
    /// The request is on its way.
    Opening(Lease, Span, BoxFuture<'static, Result<Streaming<v1::PdGenerateResponse>, Status>>),
    /// The answer comes.
    Reading(Lease, Span, Box<Streaming<v1::PdGenerateResponse>>),
}

/// Progress of a call.
enum Progress {
    Chosen(Lease),
    Opened(Result<Streaming<v1::PdGenerateResponse>, Status>),
    Read(Result<Option<v1::PdGenerateResponse>, Status>),
}

impl Call {
    /// Its next progress; never, if there is none. Loses nothing when it is dropped.
    async fn next(&mut self) -> Progress {
        match self {
            Self::Idle | Self::Chosen(_) => pending().await,
            Self::Choosing(lease) => Progress::Chosen(lease.await),
            Self::Opening(_, span, stream) => Progress::Opened(stream.instrument(span.clone()).await),
            Self::Reading(_, span, stream) => Progress::Read(stream.message().instrument(span.clone()).await),
        }
    }
}

/// Lets the next suspect be tried when a request is given up by its client in the middle of its trial.
struct EndTrialOnDrop<'a>(&'a Fleet, RequestFingerprint, RequestId);

impl Drop for EndTrialOnDrop<'_> {
    fn drop(&mut self) {
        self.0.deaths().end_trial(&self.1, self.2);
    }
}

impl<'a> Decoding<'a> {
    pub(super) fn new(work: &'a Work, supply: Supply<'a>) -> Self {
        let prompt = work.request.prompt.clone();
        let sent = SentAnswer::nothing(work.request.n_choices());
        let (call, summary) = (Call::Idle, v1::Summary::default());
        let fingerprint = work.fingerprint(&prompt, &supply.keys());
        Self {
            work,
            supply,
            prompt,
            fingerprint,
            held: None,
            sent,
            parser: AnswerParser::new(work.format.clone(), work.request.id),
            text: None,
            call,
            has_written: false,
            summary,
        }
    }

    /// One window of an audio clip that is read in sequence: nothing goes out, so that it can be sent again to its end.
    pub(super) fn window(work: &'a Work, prompt: Prompt, supply: Supply<'a>) -> Self {
        let fingerprint = work.fingerprint(&prompt, &supply.keys());
        Self { prompt, fingerprint, held: Some(Vec::new()), ..Self::new(work, supply) }
    }

    /// Streams the answer to the client.
    ///
    /// # Errors
    /// [`Failure`] of the request, or of an item, which it names.
    pub(super) async fn run(mut self) -> Result<(v1::Summary, Vec<v1::Delta>), Failure> {
        let Work { request, orchestrator, .. } = self.work;
        let facts = RequestFacts {
            id: request.id,
            fingerprint: self.fingerprint,
            model: self.work.route.served.name.clone(),
            n_items: self.supply.len(),
            placed: self.supply.placed(),
            is_resumable: request.resumption != Resumption::Never && self.work.route.served.is_resumable,
            arrived: request.arrived.into_std(),
            deadline: request.deadline.into_std(),
        };
        let _trial = EndTrialOnDrop(&orchestrator.fleet, self.fingerprint, request.id);
        let (mut machine, begun) = self.around(|around| RequestMachine::new(facts, around));
        let mut actions = VecDeque::from(begun);
        loop {
            while let Some(action) = actions.pop_front() {
                match action {
                    RequestAction::Finish => {
                        let summary = self.finish();
                        return Ok((summary, self.held.unwrap_or_default()));
                    }
                    RequestAction::Fail { failure, item, items } => {
                        let failure = self.supply.at_item(failure, item);
                        // The worker's stream is dropped first: it needs no more.
                        self.call = Call::Idle;
                        if items == LeftItems::GoOn {
                            self.supply.leave_behind();
                        }
                        return Err(failure);
                    }
                    other => self.perform(other),
                }
            }
            let wake_at = machine.wake_at();
            let event = self.next(wake_at).await?;
            actions.extend(self.around(|around| machine.on(event, around)));
        }
    }

    /// One decision of the machine.
    fn around<T>(&self, decide: impl FnOnce(&mut RequestSurroundings<'_>) -> T) -> T {
        let orchestrator = &self.work.orchestrator;
        let (mut budget, mut deaths) = (orchestrator.budget.window(), orchestrator.fleet.deaths());
        let now = Instant::now().into_std();
        decide(&mut RequestSurroundings { now, budget: &mut budget, deaths: &mut deaths })
    }

    /// The next event: of the call, of an item, or of the time.
    ///
    /// # Errors
    /// Cancelled, if nobody reads the answer any more.
    async fn next(&mut self, wake_at: Option<std::time::Instant>) -> Result<RequestEvent, Failure> {
        let wake_at = wake_at.map(Instant::from_std);
        loop {
            let woken = async move {
                match wake_at {
                    Some(at) => sleep_until(at).await,
                    None => pending().await,
                }
            };
            let progress = tokio::select! {
                progress = self.call.next() => progress,
                report = self.supply.next() => return Ok(report),
                () = woken => return Ok(RequestEvent::Woken),
            };
            if let Some(event) = self.progressed(progress).await? {
                return Ok(event);
            }
        }
    }

    /// The event that the progress of a call is, if the machine has to know.
    async fn progressed(&mut self, progress: Progress) -> Result<Option<RequestEvent>, Failure> {
        Ok(Some(match progress {
            Progress::Chosen(lease) => {
                let id = lease.id().clone();
                self.call = Call::Chosen(lease);
                RequestEvent::Worker(id)
            }
            Progress::Opened(Ok(stream)) => {
                if let Call::Opening(lease, span, _) = std::mem::replace(&mut self.call, Call::Idle) {
                    self.call = Call::Reading(lease, span, Box::new(stream));
                }
                return Ok(None);
            }
            Progress::Opened(Err(status)) => self.broke(status.into()),
            Progress::Read(read) => return self.read(read).await,
        }))
    }

    /// Takes a message of the PD worker.
    async fn read(
        &mut self,
        read: Result<Option<v1::PdGenerateResponse>, Status>,
    ) -> Result<Option<RequestEvent>, Failure> {
        let ended_early = || CallFailure::from(Failure::unavailable("a worker ended its answer early"));
        let message = read.map_err(CallFailure::from).and_then(|message| message.ok_or_else(ended_early));
        let kind = match message {
            Ok(message) => message.kind,
            Err(failed) => return Ok(Some(self.broke(failed))),
        };
        match kind {
            Some(Kind::Delta(delta)) => {
                if let Err(failure) = self.sent.note(&delta) {
                    return Ok(Some(self.broke(failure.into())));
                }
                let (went_out, is_first) =
                    (self.held.is_none(), !std::mem::replace(&mut self.has_written, true));
                if let (true, Call::Reading(lease, ..)) = (is_first, &mut self.call) {
                    // A request that was tried alone has passed what kills at the start.
                    lease.admit_others();
                }
                self.pass_on(delta).await?;
                // Only the first one changes anything.
                Ok(is_first.then_some(RequestEvent::Wrote { went_out }))
            }
            Some(Kind::Summary(summary)) => {
                self.summary = summary;
                if let Call::Reading(lease, span, stream) = std::mem::replace(&mut self.call, Call::Idle) {
                    lease.report_ok();
                    spans::called(&span, Ok(()));
                    self.work.orchestrator.drain.tasks().spawn(read_to_end(*stream));
                }
                Ok(Some(RequestEvent::Answered))
            }
            None => {
                let failure = Failure::internal("a PD worker sent an empty message");
                Ok(Some(self.broke(failure.into())))
            }
        }
    }

    /// The call failed; the fleet hears of it too.
    fn broke(&mut self, failed: CallFailure) -> RequestEvent {
        let (lease, span) = match std::mem::replace(&mut self.call, Call::Idle) {
            Call::Opening(lease, span, _) | Call::Reading(lease, span, _) => (Some(lease), span),
            Call::Chosen(lease) => (Some(lease), Span::none()),
            Call::Idle | Call::Choosing(_) => (None, Span::none()),
        };
        if let Some(lease) = lease {
            lease.report(&failed, self.work.origin(&self.fingerprint));
        }
        spans::called(&span, Err(&failed.failure));
        // Nothing of a held window has gone out, so it starts again.
        if let Some(held) = &mut self.held {
            held.clear();
            self.sent = SentAnswer::nothing(self.work.request.n_choices());
        }
        let CallFailure { failure, missing, lost } = failed;
        RequestEvent::Broke(BrokenCall { failure, missing, lost })
    }

    /// Carries out an action.
    fn perform(&mut self, action: RequestAction) {
        let Work { orchestrator, route, .. } = self.work;
        match action {
            RequestAction::Supplied => self.supply.supplied(),
            RequestAction::Choose { tried, holders } => {
                let (fleet, want) = (std::sync::Arc::clone(&orchestrator.fleet), self.work.decoder());
                let size = self.size(holders);
                self.call = Call::Choosing(async move { fleet.lease(&want, size, &tried).await }.boxed());
            }
            RequestAction::ChooseIdle { tried } => {
                tracing::warn!("workers died of this request; it is tried alone");
                let (fleet, want) = (std::sync::Arc::clone(&orchestrator.fleet), self.work.decoder());
                let size = self.size(Vec::new());
                self.call =
                    Call::Choosing(async move { fleet.lease_idle(&want, size, &tried).await }.boxed());
            }
            RequestAction::GiveBack => self.call = Call::Idle,
            RequestAction::Send { attempt } => self.send(attempt),
            RequestAction::Retry { attempt, failure, resumed } => {
                tracing::warn!(attempt, resumed, %failure, "request sent to a PD worker again");
                self.work.record.retried();
                match resumed {
                    true => orchestrator.observer.resumed(&route.served.name),
                    false => orchestrator.observer.retried(&route.served.name),
                }
            }
            RequestAction::Renew { item, .. } => self.supply.renew(item),
            // The caller ends with them.
            RequestAction::Finish | RequestAction::Fail { .. } => {}
        }
    }

    fn send(&mut self, attempt: u32) {
        let Call::Chosen(lease) = std::mem::replace(&mut self.call, Call::Idle) else { return };
        if self.supply.is_pending() {
            self.work.orchestrator.observer.early(&self.work.route.served.name);
        }
        let span = spans::rpc_client(SERVICE_NAME, "Generate", lease.address());
        spans::set(&span, attribute::WORKER, lease.id().to_string());
        spans::set(&span, attribute::ATTEMPT, i64::from(attempt));
        self.work.record.sent_to(lease.id());
        let mut client =
            PrefillDecodeWorkerClient::new(lease.channel()).max_decoding_message_size(MAX_MESSAGE);
        // The trace goes with it.
        let request = span.in_scope(|| outgoing(self.message(), self.work.request.deadline));
        let stream = async move { client.generate(request).await.map(tonic::Response::into_inner) };
        self.has_written = false;
        self.call = Call::Opening(lease, span, stream.boxed());
    }

    /// The request as the choice of a worker sees it.
    fn size(&self, holders: Vec<WorkerId>) -> Size {
        let items = self.supply.sizes();
        let prompt = Prefixes::of(&self.tenant(), &self.prompt, &self.supply.item_keys());
        Size::Request { prompt, items, holders }
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
            resume: if self.held.is_some() { Vec::new() } else { self.sent.resume() },
            encoder_prompt: self.encoder_prompt().map(Into::into),
            originals: self.originals(),
        }
    }

    /// The items themselves, for a worker of another engine.
    fn originals(&self) -> Vec<v1::OriginalItem> {
        let foreign = self.work.route.served.foreign.as_ref();
        foreign
            .map_or_else(Vec::new, |foreign| self.supply.originals(|modality| foreign.reads_bytes(modality)))
    }

    /// The encoder's text, for a PD worker that rules out its n-grams.
    fn encoder_prompt(&self) -> Option<TextOrTokens> {
        let Work { request, route, .. } = self.work;
        let reads = match request.sampling.encoder_no_repeat_ngram_size {
            Some(size) => size > 0,
            None => route.served.reads_encoder_prompt,
        };
        request.encoder_prompt.clone().filter(|_| reads)
    }

    /// A digest: the worker tells tenants apart and learns no name.
    fn tenant(&self) -> Bytes {
        Bytes::copy_from_slice(self.work.tenant().as_bytes())
    }

    async fn pass_on(&mut self, delta: v1::Delta) -> Result<(), Failure> {
        if let Some(held) = &mut self.held {
            held.push(delta);
            return Ok(());
        }
        let delta = self.parser.read(delta);
        let now = Instant::now();
        match &mut self.text {
            // Log-probabilities of the prompt come before the first token.
            None if delta.token_ids.is_empty() && !delta.prompt_logprobs.is_empty() => {}
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
    fn finish(&mut self) -> v1::Summary {
        let mut summary = std::mem::take(&mut self.summary);
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
