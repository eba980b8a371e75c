//! Engine time for decoding while other sequences prefill.
//!
//! A step with a prefill chunk may take as long as many decode-only steps: on a CPU, a hundred of them. Chunks
//! bound the length of such a step (<https://arxiv.org/abs/2403.02310>), but not how many follow each other
//! while prompts wait. So decoding gets a share of the time: after a step that prefilled beside decoding
//! sequences, decode-only steps follow until the share is met. Time in which nothing decodes is not owed, and
//! nothing is saved up.

use std::time::Duration;

/// Time owed to decode-only steps.
#[derive(Debug)]
pub(super) struct DecodeShare {
    /// Seconds of decode-only steps for each second of mixed steps.
    ratio: f64,
    owed_s: f64,
}

/// Kinds of rows in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepMix {
    /// The step had prompt rows or projections.
    pub prefills: bool,
    /// The step had decode rows.
    pub decodes: bool,
}

impl DecodeShare {
    /// A share in percent, below 100.
    pub fn new(percent: u8) -> Self {
        let percent = f64::from(percent.min(99));
        Self { ratio: percent / (100.0 - percent), owed_s: 0.0 }
    }

    /// True if the next step must only decode, if anything decodes.
    pub fn only_decodes(&self) -> bool {
        self.owed_s > 0.0
    }

    /// Records a step and its time.
    pub fn observe(&mut self, mix: StepMix, took: Duration) {
        let took_s = took.as_secs_f64();
        self.owed_s = match mix {
            StepMix { prefills: true, decodes: true } => took_s * self.ratio,
            StepMix { prefills: true, decodes: false } => 0.0,
            StepMix { prefills: false, .. } => (self.owed_s - took_s).max(0.0),
        };
    }
}
