//! The engine: events in, steps, outputs out. It joins scheduler, runner and answers, and decides nothing
//! that one of them decides.

use crate::align::AlignJob;
use crate::answer::{Answer, Standing};
use crate::beam::Turn;
use crate::beams::{BeamAnswer, Beams};
use crate::config::EngineConfig;
use crate::drafting::Drafter;
use crate::error::EngineError;
use crate::output::{Delta, Finished, Output, SequenceTimes};
use crate::plan::{Chunk, Plan};
use crate::request::{Arrival, SequenceId};
use crate::runner::Runner;
use crate::scheduler::{Bounds, Scheduler};
use crate::sequence::Sequence;
use crate::stats::Stats;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;
use tracing::trace_span;
use triptych_core::clock::Clock;
use triptych_core::sampling::FinishReason;
use triptych_core::timeline::COMPUTE;
use triptych_core::{ContentKey, EncoderOutput, Failure};
use triptych_models::decoder::Decoder;
use triptych_models::tokenization::Tokenizer;

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
    /// Known tokens whose attention is wanted; answered at once.
    Align(Box<AlignJob>),
    /// Nobody waits for this answer any more. Unknown ids are ignored.
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

/// The engine. See the crate's documentation for the loop that drives it.
pub struct Engine {
    scheduler: Scheduler,
    runner: Runner,
    drafter: Drafter,
    tokenizer: Arc<Tokenizer>,
    /// One for each live answer that is sampled.
    answers: HashMap<SequenceId, Answer>,
    /// One for each live sequence under beam search, by its name.
    searches: HashMap<SequenceId, Search>,
    /// Whether the last step left nothing that could run, and nothing happened since.
    stalled: bool,
}

/// A beam search, and who its answers go to, best first.
struct Search {
    beams: Beams,
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
        let bounds = Bounds {
            token_budget: config.token_budget,
            decode_share: config.decode_share,
            max_sequences: config.max_sequences,
            max_waiting: config.max_waiting,
            prefix_cache: config.prefix_cache,
            preemption: config.preemption,
        };
        Ok(Self {
            scheduler: Scheduler::new(bounds, info, pools),
            runner: Runner::new(decoder),
            drafter: Drafter::new(config.speculation, info.vocab),
            tokenizer,
            answers: HashMap::new(),
            searches: HashMap::new(),
            stalled: true,
        })
    }

    /// Gives the engine a model of its family that is faster and guesses ahead of it, as
    /// [`Speculation::DraftModel`](crate::Speculation::DraftModel) says.
    ///
    /// # Errors
    /// [`EngineError`] for a model that does not read and write what this one does, or memory that cannot be had.
    pub fn with_draft_model(
        mut self,
        decoder: Box<dyn Decoder>,
        kv: crate::config::KvBudget,
    ) -> Result<Self, EngineError> {
        self.drafter.hire(decoder, kv, &self.runner.info())?;
        Ok(self)
    }

    /// Takes note of an event. Returns the failures of an arrival that is refused.
    pub fn handle(&mut self, event: Event, now: Instant) -> Vec<Output> {
        self.stalled = false;
        match event {
            Event::Arrive(arrival) => return self.arrive(&arrival, now),
            Event::ItemReady { key, output } => self.scheduler.items().deliver(&key, output),
            Event::ItemFailed { key, failure } => self.scheduler.items().fail(&key, failure),
            Event::Align(job) => return vec![self.align(&job)],
            Event::Abort(id) => self.abort(id),
        }
        Vec::new()
    }

    fn align(&mut self, job: &AlignJob) -> Output {
        match self.runner.align(job) {
            Ok(weights) => Output::Aligned(job.id, weights),
            Err(error) => Output::Failed(job.id, Failure::internal(error)),
        }
    }

    /// Runs one step, and ends what has to end. Returns at once when nothing can run.
    pub fn step(&mut self, clock: &dyn Clock) -> Vec<Output> {
        let mut drafts = self.drafter.propose(self.scheduler.writing());
        let step = self.scheduler.step(clock.now(), &mut drafts);
        let mut outputs = Vec::new();
        self.stalled = step.plan.is_empty() && step.failed.is_empty() && !step.changed;
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
        self.answers.is_empty() && self.searches.is_empty()
    }

    /// Counts at this moment.
    pub fn stats(&self) -> Stats {
        Stats::of(&self.scheduler)
    }

    /// Forgets every block that is kept for later, as after a change of weights. What runs goes on.
    pub fn reset(&mut self) {
        self.scheduler.reset();
    }

    fn arrive(&mut self, arrival: &Arrival, now: Instant) -> Vec<Output> {
        let mut outputs = Vec::new();
        if let Some(twice) = arrival.ids.iter().find(|id| self.scheduler.get(**id).is_some()) {
            // Two with one name cannot be told apart by whoever listens, so neither may go on.
            let failure = Failure::internal(format!("{twice:?} arrived twice"));
            for id in &arrival.ids {
                self.fail(*id, failure.clone(), &mut outputs);
            }
            return outputs;
        }
        match self.scheduler.arrive(arrival, now) {
            Ok(()) => self.begin(arrival, now, &mut outputs),
            Err(failure) => outputs.extend(arrival.ids.iter().map(|id| Output::Failed(*id, failure.clone()))),
        }
        outputs
    }

    /// Empty answers to an arrival that is in line, or the one that it goes on with.
    fn begin(&mut self, arrival: &Arrival, now: Instant, outputs: &mut Vec<Output>) {
        let Some(name) = arrival.ids.first() else { return };
        let room = self.scheduler.get(*name).map_or(1, |s| s.limit().saturating_sub(s.n_prompt()).max(1));
        if let Some(params) = &arrival.sampling.beams {
            let beams = Beams::new(arrival, params, room, Arc::clone(&self.tokenizer));
            self.searches.insert(*name, Search { beams, ids: arrival.ids.clone() });
            return;
        }
        if let Some(resumed) = &arrival.resumed {
            let mut answer = Answer::new(arrival, resumed.choice, room, Arc::clone(&self.tokenizer));
            let standing = answer.take_over(resumed);
            self.answers.insert(*name, answer);
            match standing {
                Ok(standing) => self.go_on(*name, standing, now, outputs),
                Err(failure) => self.fail(*name, failure, outputs),
            }
            return;
        }
        for (choice, id) in (0..).zip(&arrival.ids) {
            self.answers.insert(*id, Answer::new(arrival, choice, room, Arc::clone(&self.tokenizer)));
        }
    }

    /// Says what is still to be said of an answer that was begun elsewhere, and ends it if it has ended.
    fn go_on(&mut self, id: SequenceId, standing: Standing, now: Instant, outputs: &mut Vec<Output>) {
        let Standing { delta, end, n_generated } = standing;
        if delta != Delta::default() {
            outputs.push(Output::Delta(id, delta));
        }
        let Some(reason) = end else { return };
        self.finish(id, reason, now, outputs);
        if let Some(Output::Finished(_, finished)) = outputs.last_mut() {
            finished.n_generated = n_generated;
        }
    }

    fn run(&mut self, plan: &Plan, clock: &dyn Clock, outputs: &mut Vec<Output>) {
        let start = clock.now();
        let (sequences, tokens) = (plan.chunks.len(), plan.token_ids.len());
        let span = trace_span!(target: COMPUTE, "forward", sequences, tokens);
        match span.in_scope(|| self.runner.run(plan)) {
            Ok(mut logits) => {
                let _choosing = trace_span!(target: COMPUTE, "choose").entered();
                let now = clock.now();
                self.scheduler.commit(plan, now.saturating_duration_since(start));
                let vocab = self.runner.vocab();
                let mut rest = &mut logits[..];
                for chunks in plan.chunks.chunk_by(|a, b| a.id == b.id) {
                    let n_rows: usize = chunks.iter().map(Chunk::n_logits).sum();
                    let (rows, after) = rest.split_at_mut(n_rows * vocab);
                    rest = after;
                    match chunks {
                        _ if n_rows == 0 => {}
                        [chunk] if !self.searches.contains_key(&chunk.id) => {
                            self.write(chunk, rows, now, outputs);
                        }
                        _ => self.search(chunks[0].id, rows, now, outputs),
                    }
                }
            }
            Err(error) => {
                self.scheduler.roll_back(plan);
                for chunk in &plan.chunks {
                    self.fail_all(chunk.id, &Failure::internal(&error), outputs);
                }
            }
        }
    }

    /// Chooses the next tokens of a sequence from logits `[1 + drafts, vocab]`: one, and another after each draft
    /// that was right.
    fn write(&mut self, chunk: &Chunk, rows: &mut [f32], now: Instant, outputs: &mut Vec<Output>) {
        let vocab = self.runner.vocab();
        let names = self.scheduler.fork(chunk.id);
        if let [_, others @ ..] = &names[..] {
            for id in others {
                // Each answer changes the logits in its own way.
                self.choose(*id, &mut rows[..vocab].to_vec(), now, outputs);
            }
        }
        for (i, row) in rows.chunks_exact_mut(vocab).enumerate() {
            let token = self.choose(chunk.id, row, now, outputs);
            if token.is_none() || chunk.drafts.get(i).copied() != token {
                return;
            }
            self.scheduler.accept(chunk.id);
        }
    }

    /// Chooses the next token of an answer from its `logits [vocab]`. `None` when it ended.
    fn choose(
        &mut self,
        id: SequenceId,
        logits: &mut [f32],
        now: Instant,
        outputs: &mut Vec<Output>,
    ) -> Option<u32> {
        let (answer, sequence) = (self.answers.get_mut(&id)?, self.scheduler.get(id)?);
        let progress = match answer.advance(sequence.generated(0), logits) {
            Ok(progress) => progress,
            Err(failure) => {
                self.fail(id, failure, outputs);
                return None;
            }
        };
        let fits_more = self.scheduler.push(id, progress.token, now);
        let (mut delta, mut end) = (progress.delta, progress.end);
        if end.is_none() && !fits_more {
            match answer.flush() {
                Ok((rest, reason)) => {
                    delta.text.push_str(&rest);
                    end = Some(reason);
                }
                Err(failure) => {
                    self.fail(id, failure, outputs);
                    return None;
                }
            }
        }
        if delta != Delta::default() {
            outputs.push(Output::Delta(id, delta));
        }
        let Some(reason) = end else { return Some(progress.token) };
        self.finish(id, reason, now, outputs);
        None
    }

    /// Takes a step of a beam search with the logits of its live beams, `[n_live, vocab]`.
    fn search(&mut self, name: SequenceId, rows: &mut [f32], now: Instant, outputs: &mut Vec<Output>) {
        let Some(search) = self.searches.get_mut(&name) else { return };
        match search.beams.advance(rows) {
            Err(failure) => self.fail_all(name, &failure, outputs),
            Ok(Turn::Done) => self.conclude(name, now, outputs),
            Ok(Turn::Continue(branches)) => {
                let children: Vec<_> = branches.iter().map(|b| (b.parent, b.token)).collect();
                if !self.scheduler.branch(name, &children, now) {
                    self.conclude(name, now, outputs);
                }
            }
        }
    }

    /// Gives out the answers of a beam search to those that are still wanted.
    fn conclude(&mut self, name: SequenceId, now: Instant, outputs: &mut Vec<Output>) {
        let Some(Search { beams, ids }) = self.searches.remove(&name) else { return };
        let Some(sequence) = self.scheduler.retire(name) else { return };
        for (id, answer) in ids.into_iter().zip(beams.into_answers()) {
            let BeamAnswer { delta, reason, n_generated, no_speech_prob, end_logprob, .. } = answer;
            if sequence.answers.contains(&id) {
                outputs.push(Output::Delta(id, delta));
                let finished = finished(&sequence, reason, now);
                let finished = Finished { n_generated, no_speech_prob, end_logprob, ..finished };
                outputs.push(Output::Finished(id, finished));
            }
        }
    }

    fn finish(&mut self, id: SequenceId, reason: FinishReason, now: Instant, outputs: &mut Vec<Output>) {
        let answer = self.answers.remove(&id);
        let Some(sequence) = self.scheduler.retire(id) else { return };
        let no_speech_prob = answer.as_ref().and_then(Answer::no_speech_prob);
        let end_logprob = answer.as_ref().and_then(Answer::end_logprob);
        let finished = Finished { no_speech_prob, end_logprob, ..finished(&sequence, reason, now) };
        outputs.push(Output::Finished(id, finished));
    }

    /// Ends all answers of a sequence.
    fn fail_all(&mut self, name: SequenceId, failure: &Failure, outputs: &mut Vec<Output>) {
        let answers = self.scheduler.get(name).map_or(Vec::new(), |s| s.answers.clone());
        for id in answers {
            self.fail(id, failure.clone(), outputs);
        }
    }

    fn fail(&mut self, id: SequenceId, failure: Failure, outputs: &mut Vec<Output>) {
        self.abort(id);
        outputs.push(Output::Failed(id, failure));
    }

    /// Lets go of an answer, and of what only it needed.
    fn abort(&mut self, id: SequenceId) {
        self.answers.remove(&id);
        let search = self.searches.remove(&id);
        let next_name = self.scheduler.abandon(id);
        // A search goes on for the answers that are left, under the name of the first of them.
        if let (Some(search), Some(name)) = (search, next_name) {
            self.searches.insert(name, search);
        }
    }
}

/// What is said of a sequence at its end.
fn finished(sequence: &Sequence, reason: FinishReason, now: Instant) -> Finished {
    let milestones = sequence.milestones;
    let first_step = milestones.first_step.unwrap_or(milestones.arrived);
    let first_token = milestones.first_token.unwrap_or(now);
    Finished {
        reason,
        n_prompt: sequence.n_prompt(),
        n_cached: sequence.tally.n_cached,
        n_generated: sequence.generated(0).len(),
        n_drafted: sequence.tally.n_drafted,
        n_accepted: sequence.tally.n_accepted,
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
