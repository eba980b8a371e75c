//! Work that workers report, and the sums of it that are forgotten in time.

use std::time::Duration;

/// Least part of the time of a worker that answers which is thought to be left to encodes and rows.
const LEAST_LEFT: f64 = 0.1;

/// Work of workers in some time, as they report it ([`triptych_proto::v1::ComputedWork`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkDone {
    /// Compute time of forwards of encoders, and of preprocessing by the part of the threads that it takes, in microseconds.
    pub encode_us: u64,
    /// Time of engine steps beyond a step's fixed time, in microseconds.
    pub step_us: u64,
    /// Fixed time of the engine steps that decode, in microseconds.
    pub step_fixed_us: u64,
    /// Time that those steps may take by the TPOT SLO, in microseconds; 0: there is none.
    pub step_slo_us: u64,
}

/// Work that is forgotten in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct RecentWork {
    /// Seconds of encodes.
    pub encodes_s: f64,
    /// Seconds of steps beyond the fixed time of each.
    pub steps_s: f64,
    /// Seconds of the fixed time of steps that decode.
    pub fixed_s: f64,
    /// Seconds that those steps may take by the TPOT SLO.
    pub slo_s: f64,
    /// Seconds that were seen: a mean over these alone is right from the start (Adam's correction,
    /// <https://arxiv.org/abs/1412.6980>).
    pub seen_s: f64,
}

impl RecentWork {
    /// So much later, with this memory: sums fall to a third in it.
    pub fn forget(&mut self, since: Duration, memory: Duration) {
        let left = (-since.as_secs_f64() / memory.as_secs_f64()).exp();
        for sum in [&mut self.encodes_s, &mut self.steps_s, &mut self.fixed_s, &mut self.slo_s] {
            *sum *= left;
        }
        self.seen_s = memory.as_secs_f64() * (1.0 - left) + self.seen_s * left;
    }

    /// With this work too.
    pub fn add(&mut self, done: WorkDone) {
        self.encodes_s += done.encode_us as f64 / 1e6;
        self.steps_s += done.step_us as f64 / 1e6;
        self.fixed_s += done.step_fixed_us as f64 / 1e6;
        self.slo_s += done.step_slo_us as f64 / 1e6;
    }

    /// All of them; no time is seen.
    pub fn sum<'a>(works: impl IntoIterator<Item = &'a Self>) -> Self {
        works.into_iter().fold(Self::default(), |sum, work| Self {
            encodes_s: sum.encodes_s + work.encodes_s,
            steps_s: sum.steps_s + work.steps_s,
            fixed_s: sum.fixed_s + work.fixed_s,
            slo_s: sum.slo_s + work.slo_s,
            seen_s: 0.0,
        })
    }

    /// Seconds of encodes and of steps beyond the fixed time of each.
    pub fn work_s(&self) -> f64 {
        self.encodes_s + self.steps_s
    }

    /// Part of it that is encodes, without the fixed time of steps: the part is of the mix, whatever the batches. Workers that
    /// report no steps, of other engines, say nothing of it.
    pub fn encode_share(&self) -> f64 {
        if self.steps_s > 0.0 { self.encodes_s / (self.encodes_s + self.steps_s) } else { 0.0 }
    }

    /// Part of the time of a worker that answers which steps at the pace of the TPOT SLO leave to encodes and rows; 1 without
    /// an SLO.
    pub fn left_share(&self) -> f64 {
        if self.slo_s > 0.0 { (1.0 - self.fixed_s / self.slo_s).max(LEAST_LEFT) } else { 1.0 }
    }
}
