//! Progress of a plan, for whoever waits for it.

/// Part of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Every cluster, with one seed.
    FirstSearch,
    /// The best few: their settings are tuned, and they are searched with every seed.
    Finalists,
    /// Plans for other demands.
    WhatIf,
}

impl Phase {
    /// Every part, in order.
    pub const ALL: [Self; 3] = [Self::FirstSearch, Self::Finalists, Self::WhatIf];

    /// Its name.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::FirstSearch => "first search, one seed",
            Self::Finalists => "the best few, tuned and with every seed",
            Self::WhatIf => "what if",
        }
    }

    /// Its number among all, from 1.
    pub fn number(self) -> usize {
        self as usize + 1
    }
}

/// The next simulation.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Part of the plan.
    pub phase: Phase,
    /// Finished steps of the phase.
    pub done: usize,
    /// All steps of the phase.
    pub of: usize,
    /// Name of the next simulation.
    pub what: &'a str,
}

/// Called before each step.
pub type Progress<'a> = &'a dyn Fn(Step<'_>);

/// Progress of one part whose number of steps is known.
pub(super) struct PhaseProgress<'a> {
    phase: Phase,
    of: usize,
    done: usize,
    progress: Progress<'a>,
}

impl<'a> PhaseProgress<'a> {
    /// A part with so many steps.
    pub(super) fn new(phase: Phase, of: usize, progress: Progress<'a>) -> Self {
        Self { phase, of, done: 0, progress }
    }

    /// The next step begins.
    pub(super) fn next(&mut self, what: &str) {
        (self.progress)(Step { phase: self.phase, done: self.done, of: self.of, what });
        self.done += 1;
    }

    /// So many steps are left out.
    pub(super) fn skip(&mut self, n: usize) {
        self.done += n;
    }
}
