//! Engine time for decoding while other sequences prefill.
//!
//! A step with a prefill chunk may take as long as many decode-only steps: on a CPU, a hundred of them. Chunks
//! bound the length of such a step (<https://arxiv.org/abs/2403.02310>), but not how many follow each other
//! while prompts wait. So decoding gets a share of the time: after a step that prefilled beside decoding
//! sequences, decode-only steps follow until the share is met. Time in which nothing decodes is not owed, and
//! nothing is saved up.
//!
//! A share is right for one load: too large, and prompts wait for answers that are well within their SLO; too small, and answers
//! are late. With a TPOT SLO the share follows from it. Each sequence that decodes has a slack, the time for which its next
//! token may wait before the mean time of its tokens exceeds the SLO (as deadlines by token do in
//! <https://arxiv.org/abs/2404.16283>). While the least slack covers a step with prompts, such steps follow each other; else
//! decoding has [`BEHIND_SHARE`] of the time, so that prompts go on however late answers are.
//!
//! An SLO that is easily met alone is dear where many wait: to keep answers of a few sequences at ten tokens a second, others wait
//! for many seconds to begin. So it may give way ([`DecodePacing::relax`]): while a first token has been waited for longer than
//! [`WAIT_TOKENS`] tokens of it, that many tokens may take as long as the wait, up to a maximum.

use std::time::Duration;

/// Percent of the time for decoding while an answer is behind its SLO.
const BEHIND_SHARE: u8 = 50;
/// Percent of the SLO that is aimed at: what client and network add is not seen here.
const AIM: u32 = 90;

/// Tokens that may take as long together as a first token has been waited for.
const WAIT_TOKENS: f64 = 20.0;

/// Time owed to decode-only steps.
#[derive(Debug)]
pub(super) struct DecodePacing {
    /// Percent of the time without an SLO, below 100.
    share: u8,
    slo: Option<Duration>,
    /// Largest stretch of the SLO, at least 1.
    most_stretch: f64,
    /// Factor on the SLO, from 1 to that.
    stretch: f64,
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

impl DecodePacing {
    /// A share in percent, below 100, that holds where there is no SLO or none that can be met. `max_tpot_slo`: the time to which
    /// the SLO gives way.
    pub fn new(percent: u8, tpot_slo: Option<Duration>, max_tpot_slo: Option<Duration>) -> Self {
        let slo = tpot_slo.filter(|slo| !slo.is_zero());
        let most = slo.zip(max_tpot_slo).map_or(1.0, |(slo, most)| most.as_secs_f64() / slo.as_secs_f64());
        Self { share: percent.min(99), slo, most_stretch: most.max(1.0), stretch: 1.0, owed_s: 0.0 }
    }

    /// Lets the SLO give way to a first token that has been waited for that long.
    pub fn relax(&mut self, wait: Duration) {
        let of_slo = |slo: Duration| wait.as_secs_f64() / (WAIT_TOKENS * slo.as_secs_f64());
        self.stretch = self.slo.map_or(1.0, |slo| of_slo(slo).clamp(1.0, self.most_stretch));
    }

    /// Factor on the SLO for tokens from now on, at least 1.
    pub fn stretch(&self) -> f64 {
        self.stretch
    }

    /// True if decode-only steps are owed. With a [`Self::target`] a step with prompts may come before them where it delays no
    /// answer beyond that.
    pub fn is_owed(&self) -> bool {
        self.owed_s > 0.0
    }

    /// The SLO of the mean time of tokens, where it is not stretched.
    pub fn slo(&self) -> Option<Duration> {
        self.slo
    }

    /// Mean time of tokens that is aimed at, where it is not stretched. `None` without an SLO, and where the fastest step that only
    /// decodes takes longer than it does as it is stretched: no order of steps can meet it.
    pub fn target(&self, fastest_step: Duration) -> Option<Duration> {
        let target = self.slo.map(|slo| slo * AIM / 100);
        target.filter(|target| target.mul_f64(self.stretch) > fastest_step)
    }

    /// The target as it is stretched now.
    pub fn stretched_target(&self, fastest_step: Duration) -> Option<Duration> {
        self.target(fastest_step).map(|target| target.mul_f64(self.stretch))
    }

    /// Records a step and its time, beside the time of the fastest one that only decodes.
    pub fn observe(&mut self, mix: StepMix, took: Duration, fastest_step: Duration) {
        let took_s = took.as_secs_f64();
        let share = self.target(fastest_step).map_or(self.share, |_| BEHIND_SHARE);
        let ratio = f64::from(share) / f64::from(100 - share);
        self.owed_s = match mix {
            StepMix { prefills: true, decodes: true } => took_s * ratio,
            StepMix { prefills: true, decodes: false } => 0.0,
            StepMix { prefills: false, .. } => (self.owed_s - took_s).max(0.0),
        };
    }
}
