//! The engine: events in, steps, outputs out. It joins scheduler, runner and answers, and decides nothing
//! that one of them decides.

use crate::answer::Answer;
use crate::blocks::MAX_BLOCKS;
use crate::error::EngineError;
use crate::output::{Delta, Finished, Output, SequenceTimes};
use crate::plan::Plan;
use crate::request::{Arrival, SequenceId};
use crate::runner::Runner;
use crate::scheduler::{Bounds, Scheduler};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;
use triptych_core::clock::Clock;
use triptych_core::sampling::FinishReason;
use triptych_core::{ContentKey, EncoderOutput, Failure};
use triptych_models::decoder::{Decoder, DecoderInfo};
use triptych_models::tokenization::Tokenizer;

/// Sizes of the KV caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// In blocks of `KV_BLOCK_TOKENS` tokens.
    Blocks {
        /// Self-attention.
        self_attention: usize,
        /// Cross-attention; not read without it.
        cross_attention: usize,
    },
    /// In bytes; a rest that is no whole block is not used.
    Bytes {
        /// Self-attention.
        self_attention: usize,
        /// Cross-attention; not read without it.
        cross_attention: usize,
    },
}

/// What an engine may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// Sizes of the KV caches.
    pub kv: KvBudget,
    /// Most rows in a step, at least `max_sequences`. Large: prompts are read fast. Small: a prompt delays
    /// the tokens of others less.
    pub token_budget: usize,
    /// Most sequences that run at once, at least 1.
    pub max_sequences: usize,
    /// Most sequences that wait, at least 1; one more is refused as overload.
    pub max_waiting: usize,
}

/// Something that happened outside.
#[derive(Clone, Debug)]
pub enum Event {
    /// A sequence to generate.
    Arrive(Box<Arrival>),
    /// An encoder output is here.
    ItemReady {
        /// The key it was asked for by.
        key: ContentKey,
        /// Its rows.
        output: EncoderOutput,
    },
    /// An encoder output will not come.
    ItemFailed {
        /// Its key.
        key: ContentKey,
        /// Why; what the sequences that need it fail with.
        failure: Failure,
    },
    /// Nobody waits for this sequence any more. Unknown ids are ignored.
    Abort(SequenceId),
}

/// When to step next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// At once.
    Now,
    /// Nothing can run before an event, but a deadline passes then.
    At(Instant),
    /// There are no sequences.
    OnEvent,
}

/// Counts at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that hold blocks.
    pub running: usize,
    /// Sequences in line.
    pub waiting: usize,
    /// Self-attention blocks in use.
    pub self_used: usize,
    /// Self-attention blocks in all.
    pub self_total: usize,
    /// Cross-attention blocks that sequences hold.
    pub cross_used: usize,
    /// Cross-attention blocks kept for the next sequence over the same input; free when needed.
    pub cross_cached: usize,
    /// Cross-attention blocks in all.
    pub cross_total: usize,
    /// Encoder outputs that are here.
    pub items_ready: usize,
    /// Encoder outputs that are waited for.
    pub items_pending: usize,
    /// Preemptions since the start.
    pub preemptions: u64,
}

/// The engine. See the crate's documentation for the loop that drives it.
pub struct Engine {
    scheduler: Scheduler,
    runner: Runner,
    tokenizer: Arc<Tokenizer>,
    /// One for each live sequence of the scheduler.
    answers: HashMap<SequenceId, Answer>,
    /// Whether the last step left nothing that could run, and nothing happened since.
    stalled: bool,
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
        at_least("max_sequences", config.max_sequences, 1)?;
        at_least("max_waiting", config.max_waiting, 1)?;
        at_least("token_budget", config.token_budget, config.max_sequences)?;
        let (self_blocks, cross_blocks) = config.kv.blocks(&info)?;
        decoder.allocate_kv(self_blocks, cross_blocks).map_err(EngineError::Kv)?;
        let bounds = Bounds {
            token_budget: config.token_budget,
            max_sequences: config.max_sequences,
            max_waiting: config.max_waiting,
        };
        Ok(Self {
            scheduler: Scheduler::new(bounds, info, self_blocks, cross_blocks),
            runner: Runner::new(decoder),
            tokenizer,
            answers: HashMap::new(),
            stalled: true,
        })
    }

    /// Takes note of an event. Returns the failure of an arrival that is refused.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Output> {
        self.stalled = false;
        match event {
            Event::Arrive(arrival) => return self.arrive(&arrival, now),
            Event::ItemReady { key, output } => self.scheduler.items().deliver(&key, output),
            Event::ItemFailed { key, failure } => self.scheduler.items().fail(&key, failure),
            Event::Abort(id) => self.retire(id),
        }
        Vec::new()
    }

    /// Runs one step, and ends what has to end. Returns at once when nothing can run.
    pub fn step(&mut self, clock: &dyn Clock) -> Vec<Output> {
        let step = self.scheduler.step(clock.now());
        let mut outputs = Vec::new();
        self.stalled = step.plan.is_empty() && step.failed.is_empty() && step.n_preempted == 0;
        for (id, failure) in step.failed {
            self.fail(id, failure, &mut outputs);
        }
        if !step.plan.is_empty() {
            self.run(&step.plan, clock, &mut outputs);
        }
        outputs
    }

    /// When to call [`step`](Self::step) next.
    pub fn readiness(&self) -> Readiness {
        match self.scheduler.next_deadline() {
            None => Readiness::OnEvent,
            Some(deadline) if self.stalled => Readiness::At(deadline),
            Some(_) => Readiness::Now,
        }
    }

    /// Whether no sequence lives.
    pub fn is_idle(&self) -> bool {
        self.answers.is_empty()
    }

    /// Counts at this moment.
    pub fn stats(&self) -> Stats {
        let (items_ready, items_pending) = self.scheduler.items().counts();
        let (pool, cross) = (self.scheduler.pool(), self.scheduler.cross());
        Stats {
            running: self.scheduler.n_running(),
            waiting: self.scheduler.n_waiting(),
            self_used: pool.used(),
            self_total: pool.total(),
            cross_used: cross.held(),
            cross_cached: cross.cached(),
            cross_total: cross.total(),
            items_ready,
            items_pending,
            preemptions: self.scheduler.n_preempted(),
        }
    }

    fn arrive(&mut self, arrival: &Arrival, now: Instant) -> Vec<Output> {
        let mut outputs = Vec::new();
        if let Some(twice) = arrival.ids.iter().find(|id| self.answers.contains_key(id)) {
            // Two with one name cannot be told apart by whoever listens, so neither may go on.
            let failure = Failure::internal(format!("{twice:?} arrived twice"));
            for id in &arrival.ids {
                self.fail(*id, failure.clone(), &mut outputs);
            }
            return outputs;
        }
        match self.scheduler.arrive(arrival, now) {
            Ok(()) => {
                for (choice, id) in (0..).zip(&arrival.ids) {
                    self.answers.insert(*id, Answer::new(arrival, choice, Arc::clone(&self.tokenizer)));
                }
            }
            Err(failure) => outputs.extend(arrival.ids.iter().map(|id| Output::Failed(*id, failure.clone()))),
        }
        outputs
    }

    fn run(&mut self, plan: &Plan, clock: &dyn Clock, outputs: &mut Vec<Output>) {
        match self.runner.run(plan) {
            Ok(mut logits) => {
                let now = clock.now();
                self.scheduler.commit(plan);
                let sampling = plan.chunks.iter().filter(|c| c.samples);
                for (chunk, row) in sampling.zip(logits.chunks_exact_mut(self.runner.vocab())) {
                    self.write(chunk.id, row, now, outputs);
                }
            }
            Err(error) => {
                self.scheduler.roll_back();
                for chunk in &plan.chunks {
                    self.fail(chunk.id, Failure::internal(&error), outputs);
                }
            }
        }
    }

    /// Chooses a sequence's next token from its `logits [vocab]`.
    fn write(&mut self, id: SequenceId, logits: &mut [f32], now: Instant, outputs: &mut Vec<Output>) {
        let (Some(answer), Some(sequence)) = (self.answers.get_mut(&id), self.scheduler.get(id)) else {
            return;
        };
        let progress = match answer.advance(sequence.generated(), logits) {
            Ok(progress) => progress,
            Err(failure) => return self.fail(id, failure, outputs),
        };
        let fits_more = self.scheduler.push(id, progress.token, now);
        let (mut delta, mut end) = (progress.delta, progress.end);
        if end.is_none() && !fits_more {
            let (rest, reason) = answer.flush();
            delta.text.push_str(&rest);
            end = Some(reason);
        }
        if delta != Delta::default() {
            outputs.push(Output::Delta(id, delta));
        }
        if let Some(reason) = end {
            self.finish(id, reason, now, outputs);
        }
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason, now: Instant, outputs: &mut Vec<Output>) {
        let answer = self.answers.remove(&id);
        let Some(sequence) = self.scheduler.retire(id) else { return };
        let milestones = sequence.milestones;
        let first_step = milestones.first_step.unwrap_or(milestones.arrived);
        let first_token = milestones.first_token.unwrap_or(now);
        let finished = Finished {
            reason,
            n_prompt: sequence.n_prompt(),
            n_cached: 0,
            n_generated: sequence.generated().len(),
            n_drafted: 0,
            n_accepted: 0,
            no_speech_prob: answer.as_ref().and_then(Answer::no_speech_prob),
            end_logprob: answer.as_ref().and_then(Answer::end_logprob),
            times: SequenceTimes {
                queue: first_step.saturating_duration_since(milestones.arrived),
                prefill: first_token.saturating_duration_since(first_step),
                first_token,
                last_token: now,
            },
        };
        outputs.push(Output::Finished(id, finished));
    }

    fn fail(&mut self, id: SequenceId, failure: Failure, outputs: &mut Vec<Output>) {
        self.retire(id);
        outputs.push(Output::Failed(id, failure));
    }

    fn retire(&mut self, id: SequenceId) {
        self.answers.remove(&id);
        self.scheduler.retire(id);
    }
}

impl KvBudget {
    /// Blocks for self- and cross-attention.
    fn blocks(self, info: &DecoderInfo) -> Result<(usize, usize), EngineError> {
        let (own, cross) = match self {
            Self::Blocks { self_attention, cross_attention } => (self_attention, cross_attention),
            Self::Bytes { self_attention, cross_attention } => (
                self_attention.checked_div(info.self_block_bytes).unwrap_or(0),
                cross_attention.checked_div(info.cross_block_bytes).unwrap_or(0),
            ),
        };
        at_least("kv.self_attention", own, 1)?;
        if !info.cross_attention {
            return Ok((own.min(MAX_BLOCKS), 0));
        }
        at_least("kv.cross_attention", cross, 1)?;
        Ok((own.min(MAX_BLOCKS), cross.min(MAX_BLOCKS)))
    }
}

fn at_least(setting: &'static str, actual: usize, needed: usize) -> Result<(), EngineError> {
    if actual >= needed {
        return Ok(());
    }
    Err(EngineError::Setting { setting, actual, needed: format!("{needed} or more") })
}
