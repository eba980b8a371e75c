//! Choices of a step: what each sampled row asks of the back end, and where its answer is.
//!
//! All is asked before the step runs, from the tokens so far. A row after draft tokens assumes that they are accepted; if one
//! is not, the rows after it are never read. It chooses nothing and knows no blocks.

use crate::completion::Completion;
use crate::plan::{Chunk, StepPlan};
use crate::request::SequenceId;
use crate::scheduler::Scheduler;
use std::collections::HashMap;
use triptych_models::sampling::ChooseBatch;

/// Source of one token of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenSource {
    /// A choice of the batch, by its index.
    Choice(usize),
    /// A whole row of logits, which may be changed.
    Row(usize),
    /// A whole row of logits that others read too.
    SharedRow(usize),
}

/// Sources of the tokens of a chunk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChunkSources {
    /// The first row of logits that its tokens are scored by; as many follow as are scored, then those of choices.
    pub scored_row: usize,
    /// The chunk's first row of logits that a token is chosen by.
    pub first_row: usize,
    /// Completions of its sequence; some may be cancelled before their tokens are there.
    pub completions: Vec<SequenceId>,
    /// One for each completion but the first, by the first row.
    pub others: Vec<TokenSource>,
    /// One for each row, of the first completion.
    pub own: Vec<TokenSource>,
}

/// Everything that a step asks of its logits.
#[derive(Clone, Debug, Default)]
pub struct StepChoices {
    /// The back end's part.
    pub batch: ChooseBatch,
    /// One for each chunk of the plan.
    pub chunks: Vec<ChunkSources>,
}

impl StepChoices {
    /// Choices of a plan by logits `[n, vocab]`. Sequences without sampled completions, such as beams, have whole rows.
    pub fn new(
        plan: &StepPlan,
        scheduler: &Scheduler,
        completions: &mut HashMap<SequenceId, Completion>,
        vocab: usize,
    ) -> Self {
        let mut choices = Self::default();
        let mut first_row = 0;
        for chunk in &plan.chunks {
            let sequence = scheduler.get(chunk.id);
            let ids = sequence.map_or(Vec::new(), |sequence| sequence.completions.clone());
            let scored_row = first_row;
            choices.batch.whole.extend(rows(scored_row, chunk.scored.len()));
            first_row += chunk.scored.len();
            let mut sources =
                ChunkSources { scored_row, first_row, completions: ids, ..ChunkSources::default() };
            match sequence {
                Some(sequence) if chunk.n_choices() > 0 && completions.contains_key(&chunk.id) => {
                    let mut asking = Asking { batch: &mut choices.batch, completions, vocab };
                    asking.ask(chunk, sequence.generated(0), &mut sources);
                }
                _ => choices.batch.whole.extend(rows(first_row, chunk.n_choices())),
            }
            choices.chunks.push(sources);
            first_row += chunk.n_choices();
        }
        choices
    }
}

/// A batch under construction.
struct Asking<'a> {
    batch: &'a mut ChooseBatch,
    completions: &'a mut HashMap<SequenceId, Completion>,
    vocab: usize,
}

impl Asking<'_> {
    /// Tokens of a chunk after `generated`.
    fn ask(&mut self, chunk: &Chunk, generated: &[u32], sources: &mut ChunkSources) {
        let first_row = sources.first_row;
        let others = sources.completions.iter().skip(1);
        let shared = others.map(|id| match self.one(*id, first_row, generated) {
            TokenSource::Row(row) => TokenSource::SharedRow(row),
            other => other,
        });
        sources.others = shared.collect();
        sources.own.push(self.one(chunk.id, first_row, generated));
        if !chunk.drafts.is_empty() {
            let mut written = generated.to_vec();
            for (row, draft) in (first_row + 1..).zip(&chunk.drafts) {
                written.push(*draft);
                sources.own.push(self.one(chunk.id, row, &written));
            }
        }
    }

    /// The token of a completion after `written`. One that is gone needs nothing, and its row is never read.
    fn one(&mut self, id: SequenceId, row: usize, written: &[u32]) -> TokenSource {
        let row_idx = u32::try_from(row).unwrap_or(u32::MAX);
        let completion = self.completions.get_mut(&id);
        if let Some(asked) = completion.and_then(|one| one.request(written, row_idx, self.vocab)) {
            self.batch.choices.push(asked);
            return TokenSource::Choice(self.batch.choices.len() - 1);
        }
        if self.batch.whole.last() != Some(&row_idx) {
            self.batch.whole.push(row_idx);
        }
        TokenSource::Row(row)
    }
}

/// Rows `first .. first + n`.
fn rows(first: usize, n: usize) -> impl Iterator<Item = u32> {
    (first..first + n).map(|row| u32::try_from(row).unwrap_or(u32::MAX))
}
