//! One request from its sequences to its stream: one task, which ends when the client goes away.

use crate::assemble::{Assembler, Logprobs, Place};
use crate::driver::{Driver, RunningAnswers};
use crate::loads::{HeldItems, Loads, item_param};
use crate::meters::Meters;
use crate::resume::{Begun, BegunAnswers, Skip};
use crate::speech::{self, Act, Held};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::OwnedSemaphorePermit;
use tokio::sync::mpsc::{Sender, UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tracing::{Span, info_span};
use triptych_core::prompt::Prompt;
use triptych_core::sampling::SamplingParams;
use triptych_core::{EncodedItem, Extent, Failure, FailureClass, RequestId, TenantId};
use triptych_ec::connector::ItemHint;
use triptych_engine::constraint::CompiledConstraint;
use triptych_engine::{AlignJob, Arrival, Event, Output, SequenceId};
use triptych_models::prompt::{OutputKind, PreparedSequence};
use triptych_models::speech::SpeechFacts;
use triptych_models::tokenization::Tokenizer;
use triptych_proto::v1;
use triptych_runtime::status;

/// How long a client may take to make room for the status that ends its stream.
const LAST_WORD: Duration = Duration::from_secs(1);

/// A request whose prompt is laid out.
pub struct Prepared {
    /// Its id.
    pub request: RequestId,
    /// Its prompt, for what the summary says of it.
    pub prompt: Prompt,
    /// Its items.
    pub items: Vec<EncodedItem>,
    /// Where their outputs are, in their order; those that are missing here are in the store.
    pub hints: Vec<ItemHint>,
    /// Its sequences, one for each window.
    pub windows: Vec<PreparedSequence>,
    /// Its sampling.
    pub sampling: SamplingParams,
    /// What its sampling constrains the answers to, compiled.
    pub constraint: Option<CompiledConstraint>,
    /// Its answers that another worker began.
    pub begun: BegunAnswers,
    /// Whose it is.
    pub tenant: TenantId,
    /// Smaller runs first.
    pub priority: i32,
    /// When it arrived.
    pub arrived: Instant,
    /// When it has to have ended.
    pub deadline: Instant,
    /// Its room on this worker.
    pub _admission: Admission,
}

impl Prepared {
    /// Whether the engine can go on with what another worker began: one sequence an answer, whose text streams.
    fn goes_on(&self) -> bool {
        let is_text = |w: &PreparedSequence| matches!(w.output, OutputKind::Text);
        !self.begun.is_empty()
            && self.sampling.beams.is_none()
            && matches!(&self.windows[..], [one] if is_text(one))
    }

    /// An arrival for each answer, which goes on where another worker left it.
    fn resumed(&self, ids: &[SequenceId], sampling: &SamplingParams) -> Result<Vec<Arrival>, Failure> {
        let echo = self.windows.first().filter(|_| sampling.echo).map(|w| &w.tokens[..]);
        let nothing = Begun::default();
        let arrival = |(choice, id): (u32, &SequenceId)| {
            let resumed = self.begun.get(&choice).unwrap_or(&nothing).resumed(choice, echo)?;
            let arrival = self.arrival(0, vec![*id], SamplingParams { n: 1, ..sampling.clone() });
            Ok(Arrival { resumed: Some(resumed), ..arrival })
        };
        (0..).zip(ids).map(arrival).collect()
    }

    /// The arrival of a window's answers.
    fn arrival(&self, window: usize, ids: Vec<SequenceId>, sampling: SamplingParams) -> Arrival {
        Arrival {
            ids,
            prepared: self.windows[window].clone(),
            items: self.items.clone(),
            sampling,
            constraint: self.constraint.clone(),
            priority: self.priority,
            tenant: self.tenant,
            deadline: self.deadline,
            resumed: None,
        }
    }
}

/// Room for a request and for its sequences, given back when dropped.
pub struct Admission {
    /// One request.
    pub _request: Arc<OwnedSemaphorePermit>,
    /// As many sequences as it has.
    pub _sequences: OwnedSemaphorePermit,
}

/// What a request works with.
pub struct Parts {
    /// The engine.
    pub driver: Driver,
    /// The connector.
    pub loads: Loads,
    /// For language and segments.
    pub tokenizer: Arc<Tokenizer>,
    /// What transcripts are put together by, if the model is one of speech.
    pub speech: Option<SpeechFacts>,
    /// Counts.
    pub meters: Meters,
    /// Cancelled when the process must end.
    pub abort: CancellationToken,
}

/// What the client reads.
pub type Stream = Sender<Result<v1::PdGenerateResponse, Status>>;

/// A request whose sequences are in the engine. Dropping it takes them out.
///
/// Fields are dropped from top to bottom: sequences leave the engine before their room (in `prepared`) is given to
/// others.
pub struct Running {
    sequences: Vec<RunningAnswers>,
    items: HeldItems,
    parts: Parts,
    assembler: Assembler,
    /// The windows, if they are held back.
    held: Option<Held>,
    /// What the client has already.
    skip: Skip,
    /// Tokens that each sequence came with, written elsewhere.
    given: HashMap<SequenceId, usize>,
    sampling: SamplingParams,
    sender: UnboundedSender<Output>,
    news: UnboundedReceiver<Output>,
    prepared: Prepared,
    since: Instant,
    /// How long its items took to be here; `None`: not all are.
    load: Option<Duration>,
    /// What it is at, for its trace: `load`, then `prefill` until the first news, then `decode`.
    stage: Span,
}

impl Running {
    /// Gives the sequences to the engine and asks for the items.
    ///
    /// # Errors
    /// Unavailable when the engine is gone.
    pub fn start(prepared: Prepared, parts: Parts) -> Result<Self, Failure> {
        let speech = prepared.windows.iter().any(|w| matches!(w.output, OutputKind::Speech { .. }));
        let mut sampling = prepared.sampling.clone();
        let logprobs = if sampling.logprobs.is_some() { Logprobs::Report } else { Logprobs::Hide };
        if speech {
            sampling.logprobs = sampling.logprobs.or(Some(0));
        }
        // One seed for the request: its answers differ by their number, and a repeat needs only this one.
        sampling.seed = sampling.seed.or_else(|| Some(seed_of(prepared.request)));
        let (sender, news) = unbounded_channel();
        let tokenizer = parts.tokenizer.clone();
        let mut assembler =
            Assembler::new(&prepared.windows, sampling.n, tokenizer, logprobs).at(sampling.temperature);
        let mut held = speech::hold(&prepared, &parts, &mut sampling)?;
        let (mut sequences, mut given) = (Vec::new(), HashMap::new());
        let goes_on = prepared.goes_on();
        for window in 0..prepared.windows.len() {
            let ids: Vec<SequenceId> = (0..sampling.n).map(|_| parts.driver.next_id()).collect();
            for (choice, id) in (0..).zip(&ids) {
                let place = Place { choice, window };
                assembler.place(*id, place);
                if let Some(held) = &mut held {
                    held.place(*id, place);
                }
            }
            let arrivals = match goes_on {
                true => prepared.resumed(&ids, &sampling)?,
                false if held.as_ref().is_none_or(|held| held.is_heard(window)) => {
                    vec![prepared.arrival(window, ids, sampling.clone())]
                }
                false => Vec::new(),
            };
            for arrival in arrivals {
                let written = arrival.resumed.as_ref().map_or(0, |resumed| resumed.tokens.len());
                given.extend(arrival.ids.iter().map(|id| (*id, written)));
                sequences.push(parts.driver.start(arrival, sender.clone())?);
            }
        }
        let skip = match goes_on {
            true => Skip::ended(&prepared.begun),
            false => Skip::said(prepared.begun.clone()),
        };
        for (choice, _) in prepared.begun.iter().filter(|(_, begun)| goes_on && begun.is_ended) {
            assembler.had_ended(*choice);
        }
        let since = Instant::now();
        let items = parts.loads.start(&prepared.items, &prepared.hints, &parts.driver);
        let load = prepared.items.is_empty().then_some(Duration::ZERO);
        Ok(Self {
            sequences,
            items,
            parts,
            assembler,
            held,
            skip,
            given,
            sampling,
            sender,
            news,
            prepared,
            since,
            stage: if load.is_none() { info_span!("load") } else { info_span!("prefill") },
            load,
        })
    }

    /// Passes news on until the answer is complete, fails, or nobody reads it any more.
    pub async fn stream(mut self, client: Stream) {
        let abort = self.parts.abort.clone();
        let deadline = self.prepared.deadline.into();
        let outcome = tokio::select! {
            result = self.pass_on(&client) => result,
            () = client.closed() => Err(Failure::new(FailureClass::Cancelled, "the client went away")),
            () = abort.cancelled() => Err(Failure::unavailable("this worker is stopping")),
            // The engine ends what is late; this one is for a client that has stopped reading.
            () = sleep_until(deadline) => Err(late()),
        };
        match outcome {
            Ok(()) => self.parts.meters.request("ok"),
            Err(failure) => {
                let failure = self.locate(failure);
                self.parts.meters.request(failure.class.as_str());
                if failure.class != FailureClass::Cancelled {
                    tracing::warn!(class = failure.class.as_str(), detail = failure.detail, "request failed");
                }
                // A client that reads nothing must not keep the room of others.
                let _ = timeout(LAST_WORD, client.send(Err(status::to_status(&failure)))).await;
            }
        }
    }

    async fn pass_on(&mut self, client: &Stream) -> Result<(), Failure> {
        let gone = |_| Failure::new(FailureClass::Cancelled, "the client went away");
        let mut deltas = self.begin_held()?;
        let mut has_news = false;
        loop {
            for delta in deltas {
                let Some(delta) = self.skip.pass(delta)? else { continue };
                let kind = Some(v1::pd_generate_response::Kind::Delta(delta));
                client.send(Ok(v1::PdGenerateResponse { kind })).await.map_err(gone)?;
            }
            if self.assembler.is_complete() {
                break;
            }
            let output = self.next().await.ok_or_else(|| Failure::unavailable("the engine is gone"))?;
            if !has_news {
                has_news = true;
                self.stage = info_span!("decode");
            }
            if let Output::Finished(id, finished) = &output {
                self.parts.meters.finished(finished, self.given.get(id).copied().unwrap_or(0));
            }
            deltas = match self.held {
                Some(_) => self.hold_back(output)?,
                None => self.assembler.push(output)?,
            };
        }
        let kind = Some(v1::pd_generate_response::Kind::Summary(self.summary()));
        client.send(Ok(v1::PdGenerateResponse { kind })).await.map_err(gone)
    }

    /// The next news; on the way it takes note of when the items were here.
    async fn next(&mut self) -> Option<Output> {
        if self.load.is_none() {
            tokio::select! {
                biased;
                () = self.items.all_here() => {
                    let took = self.since.elapsed();
                    match self.prepared.items.iter().any(EncodedItem::is_pending) {
                        true => self.parts.meters.waited(took),
                        false => self.parts.meters.loaded(took),
                    }
                    self.load = Some(took);
                    self.stage = info_span!("prefill");
                }
                output = self.news.recv() => return output,
            }
        }
        self.news.recv().await
    }

    /// What can be told of held windows before any news.
    fn begin_held(&mut self) -> Result<Vec<v1::Delta>, Failure> {
        let acts = self.held.as_mut().map_or_else(Vec::new, Held::begin);
        self.act(acts)
    }

    /// Takes in news of a held window.
    fn hold_back(&mut self, output: Output) -> Result<Vec<v1::Delta>, Failure> {
        let acts = self.held.as_mut().map_or(Ok(Vec::new()), |held| held.push(output))?;
        self.act(acts)
    }

    fn act(&mut self, acts: Vec<Act>) -> Result<Vec<v1::Delta>, Failure> {
        let mut deltas = Vec::new();
        for act in acts {
            match act {
                Act::Retry { place, temperature } => self.decode_again(place, temperature)?,
                Act::Align { place, tokens } => self.align(place, tokens)?,
                Act::Tell(told) => deltas.extend(self.assembler.tell(told)?),
            }
        }
        Ok(deltas)
    }

    /// Decodes a window again, over the cross blocks that are there.
    fn decode_again(&mut self, place: Place, temperature: f32) -> Result<(), Failure> {
        let id = self.parts.driver.next_id();
        // Drawn with a seed of its own, or two answers would come to be the same.
        let seed = self.sampling.seed.map(|seed| seed.wrapping_add(u64::from(place.choice)));
        let sampling = SamplingParams { temperature, seed, n: 1, ..self.sampling.clone() };
        let arrival = self.prepared.arrival(place.window, vec![id], sampling);
        if let Some(held) = &mut self.held {
            held.place(id, place);
        }
        self.sequences.push(self.parts.driver.start(arrival, self.sender.clone())?);
        for item in &self.prepared.items {
            if let Some(output) = self.parts.loads.rows(&item.key) {
                self.parts.driver.tell(Event::ItemReady { key: item.key, output });
            }
        }
        Ok(())
    }

    /// Has the engine look where the heads that follow the sound look.
    fn align(&mut self, place: Place, tokens: Vec<u32>) -> Result<(), Failure> {
        let cross = self.prepared.windows.get(place.window).and_then(|w| w.cross);
        let cross = cross.ok_or_else(|| Failure::internal("a window of speech without rows"))?;
        let item = self.prepared.items.get(cross.item.0 as usize);
        let output = item.and_then(|item| self.parts.loads.rows(&item.key));
        let output = output.ok_or_else(|| Failure::unavailable("the rows of a window are gone"))?;
        let heads = self.parts.speech.as_ref().map(|s| s.alignment_heads.clone()).unwrap_or_default();
        let (first_row, n_rows) = (cross.first_row, cross.n_rows);
        let id = self.parts.driver.next_id();
        if let Some(held) = &mut self.held {
            held.place(id, place);
        }
        let job = AlignJob { id, tokens, output, first_row, n_rows, heads };
        self.parts.driver.align(job, self.sender.clone())
    }

    fn summary(&self) -> v1::Summary {
        let (usage, mut times) = self.assembler.totals(self.prepared.arrived);
        // The engine counts waiting for items as queueing; what was loading is told apart here.
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
            next: self.held.as_ref().and_then(Held::next).cloned().map(Into::into),
            decoder_prompt: self.decoder_prompt(),
            ..v1::Summary::default()
        }
    }

    /// What the decoder read first, for a model that also has an encoder side; the first window's, for a long sound.
    fn decoder_prompt(&self) -> Option<v1::DecoderPrompt> {
        let first = self.prepared.windows.first().filter(|w| w.cross.is_some())?;
        let text = self.parts.tokenizer.decode_all(&first.tokens);
        Some(v1::DecoderPrompt { text, token_ids: first.tokens.clone() })
    }

    /// Says which item of the request a failure is about, in the words of the request.
    fn locate(&self, mut failure: Failure) -> Failure {
        let named = |item: &EncodedItem| failure.param.as_deref() == Some(item_param(&item.key).as_str());
        if let Some(place) = self.prepared.items.iter().position(named) {
            failure.param = Some(format!("items[{place}]"));
        }
        failure
    }
}

fn late() -> Failure {
    Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out")
}

/// A seed for a request that brought none. Its id is random, and every worker that it is sent to makes the same of it.
fn seed_of(request: RequestId) -> u64 {
    let bits = request.to_bits();
    (bits >> 64) as u64 ^ bits as u64
}
