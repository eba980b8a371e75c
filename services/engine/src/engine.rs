//! The engine: events in, steps, outputs out. It joins scheduler, runner and completions, and takes none of
//! their decisions. `engine/steps.rs` runs the steps.

mod adapter_states;
mod adapters;
mod steps;

use crate::align::{AlignJob, AlignQueue};
use crate::beam_completions::{BeamCompletion, BeamCompletions};
use crate::completion::{Completion, ResumedState};
use crate::config::{EngineConfig, KvBudget, Pipelining, Speculation};
use crate::error::EngineError;
use crate::in_flight::InFlight;
use crate::output::{Delta, Finished, Output, SequenceTimes};
use crate::request::{SequenceId, SequenceRequest};
use crate::runner::Runner;
use crate::scheduler::{AdmissionOrder, Scheduler, SchedulerConfig};
use crate::sequence::Sequence;
use crate::speculation::DraftProposer;
use crate::stats::Stats;
use adapter_states::EngineAdapters;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::trace_span;
use triptych_core::clock::Clock;
use triptych_core::graph_stats::GraphStats;
use triptych_core::sampling::FinishReason;
use triptych_core::timeline::COMPUTE;
use triptych_core::{ContentKey, EncoderOutput, Failure};
use triptych_models::decoder::{DecodeGraphConfig, Decoder};
use triptych_models::tokenization::Tokenizer;

/// An input of the engine.
#[derive(Clone, Debug)]
pub enum Event {
    /// A sequence to generate.
    Add(Box<SequenceRequest>),
    /// An encoder output is here.
    ItemReady {
        /// Content key that the item was requested under.
        key: ContentKey,
        /// Encoder output rows, `[n_tokens, hidden]`.
        output: EncoderOutput,
    },
    /// An encoder output that cannot be loaded.
    ItemFailed {
        /// Its key.
        key: ContentKey,
        /// Cause; the sequences that need the item fail with it.
        failure: Failure,
    },
    /// Known tokens whose cross-attention weights are wanted; each step runs one layer of it.
    Align(Box<AlignJob>),
    /// Cancels one completion or alignment. Unknown ids are ignored.
    Abort(SequenceId),
}

/// Time of the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextStep {
    /// At once.
    Now,
    /// Nothing can run before an event, but a deadline passes then.
    At(Instant),
    /// There are no sequences, and there is nothing to align.
    OnEvent,
}

/// Part of the expected time of a step that it is relied upon to take.
const CERTAIN: f64 = 0.8;
/// Least time before that at which the next step is planned.
const LEAST_LEAD: Duration = Duration::from_millis(1);

/// The engine. See the crate's documentation for the loop that drives it.
pub struct Engine {
    scheduler: Scheduler,
    runner: Runner,
    /// The device of the decoder is lost.
    device_lost: bool,
    proposer: DraftProposer,
    is_pipelined: bool,
    /// The step that computes while the next is planned.
    in_flight: Option<InFlight>,
    /// Time at which the last step ended.
    last_end: Option<Instant>,
    /// Time to plan and submit a step: the longest of the latest.
    planning: Duration,
    tokenizer: Arc<Tokenizer>,
    /// State of each live sampled completion.
    completions: HashMap<SequenceId, Completion>,
    /// Each live beam search, by the id of its sequence.
    searches: HashMap<SequenceId, BeamSearchState>,
    alignments: AlignQueue,
    adapters: EngineAdapters,
    /// True if the last step left nothing that could run, and no event came since.
    stalled: bool,
}

/// A beam search and the ids of its completions, best first.
struct BeamSearchState {
    beams: BeamCompletions,
    ids: Vec<SequenceId>,
}

impl Engine {
    /// Allocates the KV caches.
    ///
    /// # Errors
    /// [`EngineError`] for settings that cannot work, or memory that cannot be had.
    pub fn new(
        mut decoder: Box<dyn Decoder>,
        tokenizer: Arc<Tokenizer>,
        config: EngineConfig,
    ) -> Result<Self, EngineError> {
        let info = decoder.info();
        let pools = config.check(&info)?;
        decoder.allocate_kv(pools.own, pools.cross).map_err(EngineError::Kv)?;
        decoder.allocate_host(pools.host).map_err(EngineError::Kv)?;
        decoder.allocate_states(pools.states).map_err(EngineError::Kv)?;
        let scheduler_config = SchedulerConfig {
            token_budget: config.token_budget,
            decode_share: config.decode_share,
            tpot_slo: config.tpot_slo,
            max_tpot_slo: config.max_tpot_slo,
            max_sequences: config.max_sequences,
            max_waiting: config.max_waiting,
            max_loras: config.max_loras,
            prefix_cache: config.prefix_cache,
            preemption: config.preemption,
            rows: config.rows,
            order: AdmissionOrder::default(),
        };
        Ok(Self {
            scheduler: Scheduler::new(scheduler_config, info, pools),
            runner: Runner::new(decoder),
            device_lost: false,
            proposer: DraftProposer::new(config.speculation, info.vocab),
            is_pipelined: config.pipelining == Pipelining::On && config.speculation == Speculation::Off,
            in_flight: None,
            last_end: None,
            planning: Duration::ZERO,
            tokenizer,
            completions: HashMap::new(),
            searches: HashMap::new(),
            alignments: AlignQueue::default(),
            adapters: EngineAdapters::default(),
            stalled: true,
        })
    }

    /// Attaches a draft model: a smaller, faster model of the same family, as in
    /// [`Speculation::DraftModel`](crate::Speculation::DraftModel).
    ///
    /// # Errors
    /// [`EngineError`] for a model whose vocabulary or encoder input differs from this one's, or memory that
    /// cannot be had.
    pub fn with_draft_model(mut self, decoder: Box<dyn Decoder>, kv: KvBudget) -> Result<Self, EngineError> {
        self.proposer.attach_model(decoder, kv, &self.runner.info())?;
        Ok(self)
    }

    /// Applies an event. Returns the outputs it causes at once, such as the failure of a refused request.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Output> {
        self.stalled = false;
        match event {
            Event::Add(request) => return self.add(&request, now),
            Event::ItemReady { key, output } => self.scheduler.items().deliver(&key, output),
            Event::ItemFailed { key, failure } => self.scheduler.items().fail(&key, failure),
            Event::Align(job) => self.alignments.push(*job),
            Event::Abort(id) => {
                self.alignments.abort(id);
                self.abort(id);
            }
        }
        Vec::new()
    }

    /// Runs one step, and a layer of an alignment; ends the sequences that are due. Returns at once when nothing can
    /// run.
    ///
    /// Pipelined, it begins a step and ends the one before, whose outputs it returns.
    pub fn step(&mut self, clock: &dyn Clock) -> Vec<Output> {
        let mut outputs = Vec::new();
        let mut before = self.in_flight.take();
        if let Some(step) = before.take_if(|step| step.holds_up) {
            self.settle(step, clock, &mut outputs);
        }
        let began = clock.now();
        let mut drafts = self.proposer.propose(self.scheduler.decoding());
        let step = self.scheduler.step(clock.now(), &mut drafts);
        self.stalled = step.plan.is_empty() && step.failed.is_empty() && !step.changed && before.is_none();
        for (id, failure) in step.failed {
            self.fail(id, failure, &mut outputs);
        }
        let mut next = None;
        if !step.plan.is_empty() {
            next = self.submit(step.plan, before.as_ref(), clock, &mut outputs);
            self.planning = clock.now().saturating_duration_since(began).max(self.planning * 15 / 16);
        }
        if let Some(before) = before {
            self.settle(before, clock, &mut outputs);
        }
        if let Some(next) = next.filter(|_| !self.device_lost) {
            self.begin(next, clock, &mut outputs);
        }
        outputs.extend(self.advance_alignment());
        outputs.extend(self.scheduler.take_row_uses().into_iter().map(|(id, rows)| Output::Rows(id, rows)));
        self.drop_unused_adapters();
        outputs
    }

    fn advance_alignment(&mut self) -> Option<Output> {
        if self.alignments.is_empty() {
            return None;
        }
        trace_span!(target: COMPUTE, "align").in_scope(|| self.alignments.advance(&mut self.runner))
    }

    /// `true` once a step found the device lost: the process has to be replaced.
    pub fn is_device_lost(&self) -> bool {
        self.device_lost
    }

    /// Time at which to call [`step`](Self::step) next.
    pub fn next_step(&self) -> NextStep {
        if !self.alignments.is_empty() || self.in_flight.is_some() {
            return NextStep::Now;
        }
        match self.scheduler.next_deadline() {
            None => NextStep::OnEvent,
            Some(deadline) if self.stalled => NextStep::At(deadline),
            Some(_) => NextStep::Now,
        }
    }

    /// Time until which [`step`](Self::step) may be put off, so that what comes meanwhile is in the next step: the one under way
    /// is expected to compute for longer, and what the host needs before its end is taken off. `None` where that is not known.
    ///
    /// Four fifths of the expected time count. A step that ends before the next is planned is measured as long as it was waited for, so
    /// that an expectation that is too long falls by a fifth with each step.
    ///
    /// A step that is planned as the one before begins would make each request wait for one step more. The idea of asynchronous
    /// scheduling leaves that open (<https://lmsys.org/blog/2024-12-04-sglang-v0-4/>).
    pub fn next_plan(&self) -> Option<Instant> {
        let step = self.in_flight.as_ref().filter(|_| self.alignments.is_empty())?;
        let expected = self.scheduler.expected_time(&step.plan)?;
        let lead = LEAST_LEAD + self.planning * 2;
        self.began(step.start).checked_add(expected.mul_f64(CERTAIN).checked_sub(lead)?)
    }

    /// Start of a step that was submitted then: one that was submitted early begins as the one before it ends.
    fn began(&self, submitted: Instant) -> Instant {
        self.last_end.map_or(submitted, |end| end.max(submitted))
    }

    /// True if no sequence lives, and there is nothing to align.
    pub fn is_idle(&self) -> bool {
        let lives = !self.completions.is_empty() || !self.searches.is_empty();
        !lives && self.alignments.is_empty() && self.in_flight.is_none()
    }

    /// Counters and gauges at this moment.
    pub fn stats(&self) -> Stats {
        Stats::of(&self.scheduler)
    }

    /// Time for which the next step may wait so that no answer exceeds the TPOT SLO by it; zero where more than decodes is to be done.
    pub fn decode_slack(&self, now: Instant) -> Duration {
        if self.alignments.is_empty() { self.scheduler.decode_slack(now) } else { Duration::ZERO }
    }

    /// The part of [`decode_slack`](Self::decode_slack) for which no answer exceeds the TPOT SLO if a step with prompts comes before
    /// the next token; zero once half of the time up to an answer's deadline has passed, and while a step under way holds tokens.
    pub fn spare_decode_slack(&self, now: Instant) -> Duration {
        let is_free = self.alignments.is_empty() && self.in_flight.is_none();
        if is_free { self.scheduler.spare_decode_slack(now) } else { Duration::ZERO }
    }

    /// From now on decode steps are captured as graphs, as [`Decoder::use_graphs`] says.
    pub fn use_graphs(&mut self, config: Option<DecodeGraphConfig>) {
        self.runner.use_graphs(config);
    }

    /// Decode steps with and without graphs so far.
    pub fn graph_stats(&self) -> GraphStats {
        self.runner.graph_stats()
    }

    /// Clears the prefix cache and the cross-attention cache, as after a change of weights. Running sequences go
    /// on.
    pub fn reset(&mut self) {
        self.scheduler.reset();
    }

    fn add(&mut self, request: &SequenceRequest, now: Instant) -> Vec<Output> {
        let mut outputs = Vec::new();
        if let Some(twice) = request.ids.iter().find(|id| self.scheduler.get(**id).is_some()) {
            // The listener cannot tell two sequences of one id apart, so neither may go on.
            let failure = Failure::internal(format!("{twice:?} arrived twice"));
            for id in &request.ids {
                self.fail(*id, failure.clone(), &mut outputs);
            }
            return outputs;
        }
        match self.check_adapter(request).and_then(|()| self.scheduler.add(request, now)) {
            Ok(()) => self.start_completions(request, now, &mut outputs),
            Err(failure) => outputs.extend(request.ids.iter().map(|id| Output::Failed(*id, failure.clone()))),
        }
        outputs
    }

    /// Empty completions for a queued request, or the resumed one.
    fn start_completions(&mut self, request: &SequenceRequest, now: Instant, outputs: &mut Vec<Output>) {
        let Some(name) = request.ids.first() else { return };
        let room = self.scheduler.get(*name).map_or(1, |s| s.limit().saturating_sub(s.n_prompt()).max(1));
        if let Some(params) = &request.sampling.beams {
            let beams = BeamCompletions::new(request, params, room, Arc::clone(&self.tokenizer));
            self.searches.insert(*name, BeamSearchState { beams, ids: request.ids.clone() });
            return;
        }
        if let Some(resumed) = &request.resumed {
            let mut completion = Completion::new(request, resumed.choice, room, Arc::clone(&self.tokenizer));
            let state = completion.resume(resumed);
            self.completions.insert(*name, completion);
            match state {
                Ok(state) => self.emit_resumed(*name, state, now, outputs),
                Err(failure) => self.fail(*name, failure, outputs),
            }
            return;
        }
        let first = Completion::new(request, 0, room, Arc::clone(&self.tokenizer));
        for (choice, id) in (0..).zip(&request.ids) {
            self.completions.insert(*id, first.for_choice(&request.sampling, choice));
        }
    }

    /// Emits the unsent text of a resumed completion, and finishes it if it has ended.
    fn emit_resumed(&mut self, id: SequenceId, state: ResumedState, now: Instant, outputs: &mut Vec<Output>) {
        let ResumedState { delta, end, n_generated } = state;
        if delta != Delta::default() {
            outputs.push(Output::Delta(id, delta));
        }
        let Some(reason) = end else { return };
        self.finish(id, reason, now, outputs);
        if let Some(Output::Finished(_, finished)) = outputs.last_mut() {
            finished.n_generated = n_generated;
        }
    }

    /// Emits the completions of a beam search, except the cancelled ones.
    fn finish_search(&mut self, name: SequenceId, now: Instant, outputs: &mut Vec<Output>) {
        let Some(BeamSearchState { beams, ids }) = self.searches.remove(&name) else { return };
        let Some(sequence) = self.scheduler.retire(name) else { return };
        for (id, completion) in ids.into_iter().zip(beams.into_completions()) {
            let BeamCompletion { delta, reason, n_generated, no_speech_prob, end_logprob, .. } = completion;
            if sequence.completions.contains(&id) {
                outputs.push(Output::Delta(id, delta));
                let finished = finished(&sequence, reason, now);
                let finished = Finished { n_generated, no_speech_prob, end_logprob, ..finished };
                outputs.push(Output::Finished(id, finished));
            }
        }
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason, now: Instant, outputs: &mut Vec<Output>) {
        let completion = self.completions.remove(&id);
        let Some(sequence) = self.scheduler.retire(id) else { return };
        let no_speech_prob = completion.as_ref().and_then(Completion::no_speech_prob);
        let end_logprob = completion.as_ref().and_then(Completion::end_logprob);
        let finished = Finished { no_speech_prob, end_logprob, ..finished(&sequence, reason, now) };
        outputs.push(Output::Finished(id, finished));
    }

    /// Ends all completions of a sequence.
    fn fail_all(&mut self, name: SequenceId, failure: &Failure, outputs: &mut Vec<Output>) {
        let completions = self.scheduler.get(name).map_or(Vec::new(), |s| s.completions.clone());
        for id in completions {
            self.fail(id, failure.clone(), outputs);
        }
    }

    fn fail(&mut self, id: SequenceId, failure: Failure, outputs: &mut Vec<Output>) {
        self.abort(id);
        outputs.push(Output::Failed(id, failure));
    }

    /// Drops a completion and the state that only it needed.
    fn abort(&mut self, id: SequenceId) {
        self.completions.remove(&id);
        let search = self.searches.remove(&id);
        let next_name = self.scheduler.abandon(id);
        // The search goes on for the other completions, under the id of the first of them.
        if let (Some(search), Some(name)) = (search, next_name) {
            self.searches.insert(name, search);
        }
    }
}

/// Usage and times of a finished sequence.
fn finished(sequence: &Sequence, reason: FinishReason, now: Instant) -> Finished {
    let milestones = sequence.milestones;
    let first_step = milestones.first_step.unwrap_or(milestones.arrived);
    let first_token = milestones.first_token.unwrap_or(now);
    Finished {
        reason,
        n_prompt: sequence.n_prompt(),
        n_cached: sequence.counters.n_cached,
        n_generated: sequence.chosen().len(),
        n_drafted: sequence.counters.n_drafted,
        n_accepted: sequence.counters.n_accepted,
        no_speech_prob: None,
        end_logprob: None,
        times: SequenceTimes {
            queue: first_step.saturating_duration_since(milestones.arrived),
            prefill: first_token.saturating_duration_since(first_step),
            first_token,
            last_token: now,
        },
    }
}
