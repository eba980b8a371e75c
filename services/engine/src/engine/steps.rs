//! Steps of the engine: a plan is submitted, waited for, and its tokens are handed out.
//!
//! Pipelined, a step is waited for after the next one was submitted. A sequence is then planned with a placeholder for the token
//! that is being chosen, unless the host must see the token first. The idea is that of asynchronous scheduling in vLLM and SGLang
//! (<https://lmsys.org/blog/2024-12-04-sglang-v0-4/>). It plans nothing and ends no sequence by itself.

use super::Engine;
use crate::beam_search::BeamStep;
use crate::choosing::{ChunkSources, StepChoices, TokenSource};
use crate::in_flight::InFlight;
use crate::output::{Delta, Output};
use crate::plan::{Chunk, StepPlan};
use crate::request::SequenceId;
use crate::runner::RunError;
use std::ops::Range;
use std::time::Instant;
use tracing::trace_span;
use triptych_core::Failure;
use triptych_core::clock::Clock;
use triptych_core::sampling::PromptToken;
use triptych_core::timeline::COMPUTE;
use triptych_models::sampling::Choices;

/// Answers of a step on their way to the completions.
struct StepResults<'a> {
    chosen: Choices,
    now: Instant,
    outputs: &'a mut Vec<Output>,
}

/// The token after the one that a submitted step chooses for a sequence.
enum Continuation {
    /// The sequence ends with the chosen one, or none is chosen.
    None,
    /// It is computed beside the step: the device carries over the choice of this index.
    Carried(u32),
    /// It depends on the chosen one in a way that the host must see.
    AfterWait,
}

impl Engine {
    /// Submits a plan; `None` if the decoder refuses it, which fails its sequences.
    pub(super) fn submit(
        &mut self,
        plan: StepPlan,
        before: Option<&InFlight>,
        clock: &dyn Clock,
        outputs: &mut Vec<Output>,
    ) -> Option<InFlight> {
        let start = clock.now();
        let (sequences, tokens) = (plan.chunks.len(), plan.token_ids.len());
        let choices = StepChoices::new(&plan, &self.scheduler, &mut self.completions, self.runner.vocab());
        let carried = before.map(|before| (before.carried(&plan), &before.pending));
        let carried = carried.as_ref().map(|(tokens, pending)| (&tokens[..], *pending));
        let span = trace_span!(target: COMPUTE, "forward", sequences, tokens);
        match span.in_scope(|| self.runner.submit(&plan, &choices.batch, carried)) {
            Ok(pending) => Some(InFlight::new(plan, choices, pending, start)),
            Err(error) => {
                self.fail_step(&plan, &error, outputs);
                None
            }
        }
    }

    /// Leaves a submitted step under way, or ends it at once where there is no pipelining.
    pub(super) fn begin(&mut self, mut next: InFlight, clock: &dyn Clock, outputs: &mut Vec<Output>) {
        if !self.is_pipelined {
            self.settle(next, clock, outputs);
            return;
        }
        // Whatever reads its KV is submitted later, and so runs later.
        self.scheduler.commit(&next.plan);
        for (chunk, sources) in next.plan.chunks.iter().zip(&next.choices.chunks) {
            match self.continuation(chunk, sources) {
                Continuation::Carried(choice) => {
                    self.scheduler.push_placeholder(chunk.id);
                    next.placeholders.insert(chunk.id, choice);
                }
                Continuation::AfterWait => next.holds_up = true,
                Continuation::None => {}
            }
        }
        self.in_flight = Some(next);
    }

    /// The token after the one that a chunk of a submitted step chooses.
    fn continuation(&self, chunk: &Chunk, sources: &ChunkSources) -> Continuation {
        let Some(sequence) = self.scheduler.get(chunk.id).filter(|_| chunk.samples) else {
            return Continuation::None;
        };
        let ahead = self.completions.get(&chunk.id).filter(|_| sequence.is_single());
        let (Some(completion), [TokenSource::Choice(choice)]) = (ahead, &sources.own[..]) else {
            return Continuation::AfterWait;
        };
        if sequence.n_tokens() + 1 >= sequence.limit() || completion.ends_after(sequence.generated(0).len()) {
            return Continuation::None;
        }
        match u32::try_from(*choice) {
            Ok(choice) if completion.is_by_count() => Continuation::Carried(choice),
            _ => Continuation::AfterWait,
        }
    }

    /// Waits for a step and hands out its tokens.
    pub(super) fn settle(&mut self, step: InFlight, clock: &dyn Clock, outputs: &mut Vec<Output>) {
        let InFlight { plan, choices, pending, start, .. } = step;
        let span = trace_span!(target: COMPUTE, "wait");
        match span.in_scope(|| self.runner.wait(pending, &choices.batch)) {
            Ok(chosen) => {
                let _sampling = trace_span!(target: COMPUTE, "sample").entered();
                let now = clock.now();
                if !self.is_pipelined {
                    self.scheduler.commit(&plan);
                }
                let began = self.began(start);
                self.last_end = Some(now);
                self.scheduler.observe(&plan, now.saturating_duration_since(began));
                self.take_tokens(&plan, &choices.chunks, &mut StepResults { chosen, now, outputs });
            }
            // Later steps read what this one was to compute.
            Err(error) if self.is_pipelined => self.lose_device(&error),
            Err(error) => self.fail_step(&plan, &error, outputs),
        }
    }

    /// Nothing of this process can go on; sequences stay open, so that they are taken up elsewhere.
    fn lose_device(&mut self, error: &RunError) {
        tracing::error!(%error, "no step can run any more");
        self.device_lost = true;
    }

    /// Ends the sequences of a step that failed.
    fn fail_step(&mut self, plan: &StepPlan, error: &RunError, outputs: &mut Vec<Output>) {
        if error.is_device_lost() {
            return self.lose_device(error);
        }
        self.scheduler.roll_back(plan);
        for id in plan.ids() {
            self.fail_all(id, &Failure::internal(error), outputs);
        }
    }

    /// Hands the answers of a step to its sequences; `sources` are those of the plan's chunks.
    fn take_tokens(&mut self, plan: &StepPlan, sources: &[ChunkSources], results: &mut StepResults<'_>) {
        let mut rest = sources;
        for chunks in plan.chunks.chunk_by(|a, b| a.id == b.id) {
            let (own, after) = rest.split_at(chunks.len().min(rest.len()));
            rest = after;
            let Some(first) = own.first() else { continue };
            // The first of its completions that was not cancelled names the sequence.
            let mut names = first.completions.iter().copied();
            let Some(name) = names.find(|id| self.scheduler.get(*id).is_some()) else { continue };
            if let Some(chunk) = chunks.first().filter(|chunk| !chunk.scored.is_empty()) {
                self.score(name, chunk, first.scored_row, results);
            }
            let n_rows: usize = chunks.iter().map(Chunk::n_choices).sum();
            if n_rows == 0 {
                continue;
            }
            if self.searches.contains_key(&name) {
                self.advance_search(name, first.first_row..first.first_row + n_rows, results);
            } else {
                self.sample(name, &chunks[0], first, results);
            }
        }
    }

    /// Reports the log-probabilities of the tokens after those of a chunk that are scored.
    fn score(&self, name: SequenceId, chunk: &Chunk, first_row: usize, results: &mut StepResults<'_>) {
        let (Some(completion), Some(sequence)) = (self.completions.get(&name), self.scheduler.get(name))
        else {
            return;
        };
        let mut scores = Vec::with_capacity(chunk.scored.len());
        for (at, row) in chunk.scored.clone().zip(first_row..) {
            let logits = results.chosen.rows.get_mut(row, 1);
            let token = logits.zip(sequence.prompt_text_token(at + 1));
            scores.push(
                token.map_or_else(PromptToken::default, |(logits, token)| completion.score(token, logits)),
            );
        }
        results.outputs.push(Output::Delta(name, Delta { prompt_logprobs: scores, ..Delta::default() }));
    }

    /// Appends the next tokens of a sequence: one token, and another after each accepted draft.
    fn sample(
        &mut self,
        name: SequenceId,
        chunk: &Chunk,
        sources: &ChunkSources,
        results: &mut StepResults<'_>,
    ) {
        self.scheduler.fork(name);
        for (id, source) in sources.completions.iter().skip(1).zip(&sources.others) {
            self.choose(*id, *source, results);
        }
        for (i, source) in sources.own.iter().enumerate() {
            let token = self.choose(chunk.id, *source, results);
            if token.is_none() || chunk.drafts.get(i).copied() != token {
                return;
            }
            self.scheduler.accept(chunk.id);
        }
    }

    /// Appends the next token of a completion. `None` when the completion ended.
    fn choose(&mut self, id: SequenceId, source: TokenSource, results: &mut StepResults<'_>) -> Option<u32> {
        let StepResults { chosen, now, outputs } = results;
        let now = *now;
        let completion = self.completions.get_mut(&id)?;
        let generated = self.scheduler.get(id)?.chosen();
        let missing = || Failure::internal("the decoder gave no logits for a sequence");
        let next = match source {
            TokenSource::Choice(i) => {
                let choice = chosen.choices.get(i).ok_or_else(missing);
                choice.and_then(|choice| completion.accept(generated, choice))
            }
            TokenSource::Row(row) => {
                let logits = chosen.rows.get_mut(row, 1).ok_or_else(missing);
                logits.and_then(|logits| completion.advance(generated, logits))
            }
            TokenSource::SharedRow(row) => {
                // Each completion changes the logits in its own way, so each gets a copy.
                let logits = chosen.rows.get_mut(row, 1).ok_or_else(missing);
                logits.and_then(|logits| completion.advance(generated, &mut logits.to_vec()))
            }
        };
        let next = match next {
            Ok(next) => next,
            Err(failure) => {
                self.fail(id, failure, outputs);
                return None;
            }
        };
        let fits_more = self.scheduler.push(id, next.token, now);
        let mut delta = next.delta;
        let mut end = next.end;
        if end.is_none() && !fits_more {
            match completion.flush() {
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
        let Some(reason) = end else { return Some(next.token) };
        self.finish(id, reason, now, outputs);
        None
    }

    /// Advances a beam search by the logits of its live beams, `[n_live, vocab]`, which are rows of the step.
    fn advance_search(&mut self, name: SequenceId, rows: Range<usize>, results: &mut StepResults<'_>) {
        let StepResults { chosen, now, outputs } = results;
        let now = *now;
        let Some(search) = self.searches.get_mut(&name) else { return };
        let missing = || Failure::internal("the decoder gave no logits for a beam search");
        let logits = chosen.rows.get_mut(rows.start, rows.len()).ok_or_else(missing);
        match logits.and_then(|logits| search.beams.advance(logits)) {
            Err(failure) => self.fail_all(name, &failure, outputs),
            Ok(BeamStep::Done) => self.finish_search(name, now, outputs),
            Ok(BeamStep::Continue(branches)) => {
                let children: Vec<_> = branches.iter().map(|b| (b.parent, b.token)).collect();
                if !self.scheduler.branch(name, &children, now) {
                    self.finish_search(name, now, outputs);
                }
            }
        }
    }
}
