//! A running request, from its sequences to its response stream: one task, which ends when the client goes away.

use crate::assemble::{Assembler, LogprobReporting};
use crate::coalesce::DeltaCoalescer;
use crate::driver::RunningSequences;
use crate::loads::{NeededItems, item_param};
use crate::request::{AdmittedRequest, ChoiceWindow, RequestContext};
use crate::request_rows::{RequestRows, Retention, RowProgress};
use crate::resume::ReplayFilter;
use crate::speech::{self, SpeechAction, WindowBuffer};
use std::collections::HashMap;
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{sleep_until, timeout};
use tonic::Status;
use tracing::{Span, info_span};
use triptych_core::prompt::Prompt;
use triptych_core::sampling::SamplingParams;
use triptych_core::{EncodedItem, Extent, Failure, FailureClass, RequestId};
use triptych_engine::{AlignJob, Event, Output, SequenceId};
use triptych_models::prompt::OutputKind;
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;
use triptych_runtime::trace_context::REQUEST_TARGET;
use triptych_runtime::{spans, status};

/// Limit on waiting for a client to read the status that ends its stream.
const STATUS_SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// Response stream of a request.
pub type ResponseStream = Sender<Result<v1::PdGenerateResponse, Status>>;

/// An event of a running request.
enum Next {
    Output(Output),
    /// A message that was held is due.
    Due,
    /// The engine has ended.
    Gone,
}

/// A request whose sequences are in the engine. Dropping it aborts them.
///
/// Fields are dropped from top to bottom: sequences leave the engine before their permits (in `prepared`) are
/// released.
pub struct RunningRequest {
    sequences: Vec<RunningSequences>,
    rows: RequestRows,
    context: RequestContext,
    assembler: Assembler,
    /// Speech windows, if they are buffered.
    buffer: Option<WindowBuffer>,
    /// Output that is merged into the next messages.
    coalescer: DeltaCoalescer,
    /// Filter of output that the client has already.
    replay_filter: ReplayFilter,
    /// Tokens of each sequence that another worker generated.
    n_resumed: HashMap<SequenceId, usize>,
    sampling: SamplingParams,
    sender: UnboundedSender<Output>,
    outputs: UnboundedReceiver<Output>,
    prepared: AdmittedRequest,
    since: Instant,
    /// Time until all items were loaded; `None` before that.
    load: Option<Duration>,
    /// Span of the present stage: `load`, then `prefill` until the first output, then `decode`.
    stage: Span,
}

impl RunningRequest {
    /// Sends the sequences to the engine and requests the items.
    ///
    /// # Errors
    /// Unavailable when the engine is gone.
    pub fn start(prepared: AdmittedRequest, context: RequestContext) -> Result<Self, Failure> {
        let speech = prepared.windows.iter().any(|w| matches!(w.output, OutputKind::Speech { .. }));
        let mut sampling = prepared.sampling.clone();
        let logprobs =
            if sampling.logprobs.is_some() { LogprobReporting::Report } else { LogprobReporting::Hide };
        if speech {
            sampling.logprobs = sampling.logprobs.or(Some(0));
        }
        // One seed for the request: its choices differ by their index, and a repeat needs only this one.
        sampling.seed = sampling.seed.or_else(|| Some(seed_of(prepared.request)));
        let (sender, outputs) = unbounded_channel();
        let (tokenizer, stream_ticks) = (context.tokenizer.clone(), context.stream_ticks);
        let mut assembler = Assembler::new(&prepared.windows, sampling.n, tokenizer, logprobs)
            .at(sampling.temperature)
            .with_encoder_texts(&prepared.items);
        let mut buffer = speech::window_buffer(&prepared, &context, &mut sampling)?;
        let (mut sequences, mut readers) = (Vec::new(), Vec::new());
        let mut n_resumed = HashMap::new();
        let can_resume = prepared.can_resume();
        for window in 0..prepared.windows.len() {
            let ids: Vec<SequenceId> = (0..sampling.n).map(|_| context.driver.next_id()).collect();
            for (choice, id) in (0..).zip(&ids) {
                let position = ChoiceWindow { choice, window };
                assembler.position(*id, position);
                if let Some(buffer) = &mut buffer {
                    buffer.position(*id, position);
                }
            }
            let arrivals = match can_resume {
                true => prepared.resumed(&ids, &sampling)?,
                false if buffer.as_ref().is_none_or(|buffer| buffer.has_audio(window)) => {
                    vec![prepared.sequence(window, ids, sampling.clone())]
                }
                false => Vec::new(),
            };
            for arrival in arrivals {
                readers.extend(arrival.ids.first());
                let written = arrival.resumed.as_ref().map_or(0, |resumed| resumed.tokens.len());
                n_resumed.extend(arrival.ids.iter().map(|id| (*id, written)));
                sequences.push(context.driver.start(arrival, sender.clone())?);
            }
        }
        let replay_filter = match can_resume {
            true => ReplayFilter::ended(&prepared.prior),
            false => ReplayFilter::replayed(prepared.prior.clone()),
        };
        for (choice, _) in prepared.prior.iter().filter(|(_, prior)| can_resume && prior.is_ended) {
            assembler.ended_elsewhere(*choice);
        }
        let since = Instant::now();
        let needed = NeededItems { items: prepared.items.clone(), hints: prepared.hints.clone() };
        let retention = if buffer.is_some() { Retention::ToTheEnd } else { Retention::WhileRead };
        let mut rows = RequestRows::start(&context.loads, &context.driver, needed, retention)?;
        rows.read_by(readers);
        let load = prepared.items.is_empty().then_some(Duration::ZERO);
        Ok(Self {
            sequences,
            rows,
            context,
            assembler,
            buffer,
            coalescer: DeltaCoalescer::new(stream_ticks),
            replay_filter,
            n_resumed,
            sampling,
            sender,
            outputs,
            prepared,
            since,
            stage: if load.is_none() { info_span!("load") } else { info_span!("prefill") },
            load,
        })
    }

    /// Forwards outputs until the response is complete, fails, or the client is gone.
    pub async fn stream(mut self, client: ResponseStream) {
        let abort = self.context.abort.clone();
        let deadline = self.prepared.deadline.into();
        let outcome = tokio::select! {
            result = self.pass_on(&client) => result,
            () = client.closed() => Err(Failure::new(FailureClass::Cancelled, "the client went away")),
            () = abort.cancelled() => Err(Failure::unavailable("this worker is stopping")),
            // The engine ends late sequences; this is for a client that stopped reading.
            () = sleep_until(deadline) => Err(late()),
        };
        let ended = outcome.as_ref().map_or_else(|failure| failure.class.as_str(), |()| "ok");
        tracing::debug!(target: REQUEST_TARGET, outcome = ended, items = self.prepared.items.len(), "call of a PD worker ended");
        match outcome {
            Ok(()) => self.context.meters.request("ok"),
            Err(failure) => {
                let failure = self.locate(failure);
                spans::failed(&Span::current(), failure.class);
                self.context.meters.request(failure.class.as_str());
                if failure.class != FailureClass::Cancelled {
                    tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "request failed");
                }
                // A client that does not read must not keep its permits.
                let _ = timeout(STATUS_SEND_TIMEOUT, self.end_with(&failure, &client)).await;
            }
        }
    }

    /// Sends what is held, then the status.
    async fn end_with(&mut self, failure: &Failure, client: &ResponseStream) {
        for delta in self.coalescer.rest() {
            if send(client, Kind::Delta(delta)).await.is_err() {
                return;
            }
        }
        let _ = client.send(Err(status::to_status(failure))).await;
    }

    async fn pass_on(&mut self, client: &ResponseStream) -> Result<(), Failure> {
        let mut deltas = self.begin_held()?;
        let begins_in_reasoning = self.begins_in_reasoning();
        let mut has_output = false;
        loop {
            for delta in deltas.drain(..) {
                let Some(mut delta) = self.replay_filter.pass(delta)? else { continue };
                delta.begins_in_reasoning = begins_in_reasoning;
                self.coalescer.push(delta, Instant::now());
            }
            while let Some(delta) = self.coalescer.pop(Instant::now()) {
                send(client, Kind::Delta(delta)).await?;
            }
            if self.assembler.is_complete() {
                break;
            }
            let output = match self.next().await {
                Next::Output(output) => output,
                Next::Due => continue,
                Next::Gone => return Err(Failure::unavailable("the engine is gone")),
            };
            self.rows.observe(&output)?;
            if matches!(output, Output::Rows(..)) {
                continue;
            }
            if !has_output {
                has_output = true;
                self.prepared.starting = None;
                self.stage = info_span!("decode");
            }
            if let Output::Finished(id, finished) = &output {
                self.context.meters.finished(finished, self.n_resumed.get(id).copied().unwrap_or(0));
            }
            deltas = match self.buffer {
                Some(_) => self.hold_back(output)?,
                None => self.assembler.push(output)?,
            };
        }
        for delta in self.coalescer.rest() {
            send(client, Kind::Delta(delta)).await?;
        }
        send(client, Kind::Summary(self.summary())).await
    }

    /// Next output, or the time of a message that is held. Meanwhile waits for room for the rows, and records when all items
    /// are loaded.
    async fn next(&mut self) -> Next {
        let due = self.coalescer.due();
        loop {
            let advances = self.rows.is_waiting() || self.load.is_none();
            let is_due = async { sleep_until(due.unwrap_or(self.prepared.deadline).into()).await };
            tokio::select! {
                biased;
                progress = self.rows.advance(), if advances => {
                    if progress == RowProgress::Loaded {
                        self.record_load();
                    }
                }
                output = self.outputs.recv() => return output.map_or(Next::Gone, Next::Output),
                () = is_due, if due.is_some() => return Next::Due,
            }
        }
    }

    fn record_load(&mut self) {
        let took = self.since.elapsed();
        match self.prepared.items.iter().any(EncodedItem::is_pending) {
            true => self.context.meters.waited(took),
            false => self.context.meters.loaded(took),
        }
        self.load = Some(took);
        self.stage = info_span!("prefill");
    }

    /// Deltas of buffered windows before any output.
    fn begin_held(&mut self) -> Result<Vec<v1::Delta>, Failure> {
        let actions = self.buffer.as_mut().map_or_else(Vec::new, WindowBuffer::begin);
        self.perform(actions)
    }

    /// Passes an output to the window buffer.
    fn hold_back(&mut self, output: Output) -> Result<Vec<v1::Delta>, Failure> {
        let actions = self.buffer.as_mut().map_or(Ok(Vec::new()), |buffer| buffer.push(output))?;
        self.perform(actions)
    }

    fn perform(&mut self, actions: Vec<SpeechAction>) -> Result<Vec<v1::Delta>, Failure> {
        let mut deltas = Vec::new();
        for action in actions {
            match action {
                SpeechAction::Retry { position, temperature } => self.decode_again(position, temperature)?,
                SpeechAction::Align { position, tokens } => self.align(position, tokens)?,
                SpeechAction::Emit(settled) => deltas.extend(self.assembler.push_window(*settled)?),
            }
        }
        Ok(deltas)
    }

    /// Decodes a window again, over the cross-attention blocks that are cached.
    fn decode_again(&mut self, position: ChoiceWindow, temperature: f32) -> Result<(), Failure> {
        let id = self.context.driver.next_id();
        // A seed of its own for each choice, or two choices would become equal.
        let seed = self.sampling.seed.map(|seed| seed.wrapping_add(u64::from(position.choice)));
        let sampling = SamplingParams { temperature, seed, n: 1, ..self.sampling.clone() };
        let arrival = self.prepared.sequence(position.window, vec![id], sampling);
        if let Some(buffer) = &mut self.buffer {
            buffer.position(id, position);
        }
        self.sequences.push(self.context.driver.start(arrival, self.sender.clone())?);
        for item in &self.prepared.items {
            if let Some(output) = self.context.loads.rows(&item.key) {
                self.context.driver.send(Event::ItemReady { key: item.key, output });
            }
        }
        Ok(())
    }

    /// Runs the alignment of a window: weights of the heads that follow the audio.
    fn align(&mut self, position: ChoiceWindow, tokens: Vec<u32>) -> Result<(), Failure> {
        let cross = self.prepared.windows.get(position.window).and_then(|w| w.cross.first().copied());
        let cross = cross.ok_or_else(|| Failure::internal("a window of speech without rows"))?;
        let item = self.prepared.items.get(cross.item.0 as usize);
        let output = item.and_then(|item| self.context.loads.rows(&item.key));
        let output = output.ok_or_else(|| Failure::unavailable("the rows of a window are gone"))?;
        let heads = self.context.speech.as_ref().map(|s| s.alignment_heads.clone()).unwrap_or_default();
        let first_row = cross.first_row;
        let n_rows = cross.n_rows;
        let id = self.context.driver.next_id();
        if let Some(buffer) = &mut self.buffer {
            buffer.position(id, position);
        }
        let job = AlignJob { id, tokens, output, first_row, n_rows, heads, adapter: self.prepared.adapter };
        self.sequences.push(self.context.driver.align(job, self.sender.clone())?);
        Ok(())
    }

    /// True if the prompt's last reasoning has no end: the answer goes on with it.
    fn begins_in_reasoning(&self) -> bool {
        let (Some([begin, end]), Prompt::Chat(_)) = (self.context.reasoning_tokens, &self.prepared.prompt)
        else {
            return false;
        };
        let tokens = self.prepared.windows.first().map(|window| window.tokens.as_slice());
        let marks = tokens.unwrap_or_default().iter().rev();
        marks.copied().find(|id| [begin, end].contains(id)) == Some(begin)
    }

    fn summary(&self) -> v1::Summary {
        let (usage, mut times) = self.assembler.totals(self.prepared.arrived);
        // The engine counts waiting for items as queueing; loading is a stage of its own here.
        times.load = self.load.unwrap_or_default();
        times.queue = times.queue.saturating_sub(times.load);
        let asked = match &self.prepared.prompt {
            Prompt::Speech(task) => task.language.clone(),
            _ => None,
        };
        let duration = self.prepared.items.iter().find_map(|item| match &item.extent {
            Extent::Windows { duration_ms, .. } => Some(*duration_ms as f64 / 1000.0),
            _ => None,
        });
        v1::Summary {
            usage: Some(usage),
            times: Some(times.into()),
            item_sources: Vec::new(),
            language: asked.or_else(|| self.assembler.language()).unwrap_or_default(),
            duration_s: duration.unwrap_or(0.0),
            next: self.buffer.as_ref().and_then(WindowBuffer::next).cloned().map(Into::into),
            decoder_prompt: self.decoder_prompt(),
            ..v1::Summary::default()
        }
    }

    /// The decoder's prompt, for a model with an encoder side; that of the first window, for long audio.
    fn decoder_prompt(&self) -> Option<v1::DecoderPrompt> {
        let first = self.prepared.windows.first().filter(|w| !w.cross.is_empty())?;
        let text = self.context.tokenizer.decode_all(&first.tokens);
        Some(v1::DecoderPrompt { text, token_ids: first.tokens.clone() })
    }

    /// Names the item of a failure by its index in the request.
    fn locate(&self, mut failure: Failure) -> Failure {
        let named = |item: &EncodedItem| failure.param.as_deref() == Some(item_param(&item.key).as_str());
        if let Some(position) = self.prepared.items.iter().position(named) {
            failure.param = Some(format!("items[{position}]"));
        }
        failure
    }
}

async fn send(client: &ResponseStream, kind: Kind) -> Result<(), Failure> {
    let response = Ok(v1::PdGenerateResponse { kind: Some(kind) });
    client.send(response).await.map_err(|_| Failure::new(FailureClass::Cancelled, "the client went away"))
}

fn late() -> Failure {
    Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out")
}

/// Seed of a request without one: a function of its random id, so that every worker derives the same.
fn seed_of(request: RequestId) -> u64 {
    let bits = request.to_bits();
    (bits >> 64) as u64 ^ bits as u64
}
