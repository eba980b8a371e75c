//! A step that was submitted and is not waited for.
//!
//! The next step may be planned meanwhile. Where it computes a token that this one chooses, the device carries the token over.
//! It knows no decoder and decides nothing about sequences.

use crate::choosing::StepChoices;
use crate::plan::StepPlan;
use crate::request::SequenceId;
use std::collections::HashMap;
use std::time::Instant;
use triptych_models::decoder::Pending;
use triptych_models::sampling::CarriedToken;

/// A submitted step.
#[derive(Debug)]
pub struct InFlight {
    /// Its plan.
    pub plan: StepPlan,
    /// Everything that it asks of its logits.
    pub choices: StepChoices,
    /// The decoder's handle.
    pub pending: Pending,
    /// Time of its submission.
    pub start: Instant,
    /// Choice of each sequence that goes on with a placeholder, by its index.
    pub placeholders: HashMap<SequenceId, u32>,
    /// True if a sequence of it would sit out a step that is planned before this one has ended.
    pub holds_up: bool,
}

impl InFlight {
    /// A step of which no sequence goes on yet.
    pub fn new(plan: StepPlan, choices: StepChoices, pending: Pending, start: Instant) -> Self {
        Self { plan, choices, pending, start, placeholders: HashMap::new(), holds_up: false }
    }

    /// Rows of the next plan whose tokens this step chooses: the last ones of sequences that go on with a placeholder.
    pub fn carried(&self, next: &StepPlan) -> Vec<CarriedToken> {
        let mut carried = Vec::new();
        let mut end = 0;
        for chunk in &next.chunks {
            end += chunk.n_rows();
            if let Some(choice) = self.placeholders.get(&chunk.id)
                && chunk.samples
            {
                // Nothing is drafted after a token that is not known.
                let row = u32::try_from(end - 1 - chunk.drafts.len()).unwrap_or(u32::MAX);
                carried.push(CarriedToken { row, choice: *choice });
            }
        }
        carried
    }
}
