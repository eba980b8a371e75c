//! The number of workers that are left to encodes: where the busiest worker is then no busier than all would be if each did both.
//!
//! Workers report what they computed: time of encodes, time of engine steps by the rows in them, and the fixed time of steps that
//! decode. The last fills the time that is left: a step is taken while anything decodes, and more sequences decode in
//! the same step. A worker that only decodes is always busy and far from its capacity, so the split is of the other two.
//! Of the fixed time counts what no load makes smaller: with a TPOT SLO each worker that answers takes a step in that time at
//! the least, and the rest of it is left to encodes and rows. One that only encodes has all of its time.
//!
//! Both grow with the load alike, and are measured as work ends: encodes that wait are no work yet, as prompts that wait are
//! none. So the number is the same at any rate, but where the load is low.

mod mix_change;

use mix_change::WorkParts;
use std::time::{Duration, Instant};

/// Factor on the utilisation of workers that do both: encodes and steps that wait for one another.
const BESIDE: f64 = 1.05;
/// Part of the utilisation by which the busiest has to be busier before the split changes, so that chance changes nothing: after
/// [`MEMORY`], and more before, as the error of a mean has it.
const HYSTERESIS: f64 = 0.04;
/// Time in which work that ended is forgotten, but for a third: some hundred requests.
const MEMORY: Duration = Duration::from_secs(20);
/// Part of the memory's time that has to be seen before anything is decided: encodes come before the steps of the same requests.
const LEAST_SEEN: f64 = 0.1;
/// Least part of the time of a worker that answers which is thought to be left to encodes and rows.
const LEAST_LEFT: f64 = 0.1;
/// Utilisation of the workers below which all do both: there is room, and an idle worker's cores help with encodes.
const LEAST_UTILISATION: f64 = 0.4;

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

/// Workers among which work is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerCounts {
    /// All of them.
    pub n: usize,
    /// Those that encode and nothing else, whatever is decided.
    pub n_encoders: usize,
}

/// Work of the workers whose roles are elastic.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkSplit {
    all: RecentWork,
    parts: WorkParts,
    at: Option<Instant>,
    /// True once enough was seen to decide anything.
    is_known: bool,
    n_encoders: usize,
}

/// Work that is forgotten in some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct RecentWork {
    /// Seconds of encodes.
    encodes_s: f64,
    /// Seconds of steps beyond the fixed time of each.
    steps_s: f64,
    /// Seconds of the fixed time of steps that decode.
    fixed_s: f64,
    /// Seconds that those steps may take by the TPOT SLO.
    slo_s: f64,
    /// Seconds that were seen: a mean over these alone is right from the start (Adam's correction,
    /// <https://arxiv.org/abs/1412.6980>).
    seen_s: f64,
}

impl RecentWork {
    fn forget(&mut self, since: Duration, memory: Duration) {
        let left = (-since.as_secs_f64() / memory.as_secs_f64()).exp();
        for sum in [&mut self.encodes_s, &mut self.steps_s, &mut self.fixed_s, &mut self.slo_s] {
            *sum *= left;
        }
        self.seen_s = memory.as_secs_f64() * (1.0 - left) + self.seen_s * left;
    }

    fn add(&mut self, done: WorkDone) {
        self.encodes_s += done.encode_us as f64 / 1e6;
        self.steps_s += done.step_us as f64 / 1e6;
        self.fixed_s += done.step_fixed_us as f64 / 1e6;
        self.slo_s += done.step_slo_us as f64 / 1e6;
    }

    /// All of them; no time is seen.
    fn sum<'a>(works: impl IntoIterator<Item = &'a Self>) -> Self {
        works.into_iter().fold(Self::default(), |sum, work| Self {
            encodes_s: sum.encodes_s + work.encodes_s,
            steps_s: sum.steps_s + work.steps_s,
            fixed_s: sum.fixed_s + work.fixed_s,
            slo_s: sum.slo_s + work.slo_s,
            seen_s: 0.0,
        })
    }

    /// Seconds of encodes and of steps beyond the fixed time of each.
    fn work_s(&self) -> f64 {
        self.encodes_s + self.steps_s
    }

    /// Part of it that is encodes, without the fixed time of steps: the part is of the mix, whatever the batches. Workers that
    /// report no steps, of other engines, say nothing of it.
    fn encode_share(&self) -> f64 {
        if self.steps_s > 0.0 { self.encodes_s / (self.encodes_s + self.steps_s) } else { 0.0 }
    }

    /// Part of the time of a worker that answers which steps at the pace of the TPOT SLO leave to encodes and rows; 1 without
    /// an SLO.
    fn left_share(&self) -> f64 {
        if self.slo_s > 0.0 { (1.0 - self.fixed_s / self.slo_s).max(LEAST_LEFT) } else { 1.0 }
    }
}

impl WorkSplit {
    /// Workers report that this was done. What was before a change of the mix is forgotten.
    pub fn add(&mut self, now: Instant, done: WorkDone) {
        let since = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
        self.all.forget(since, MEMORY);
        let (part, since_change) = self.parts.at(now);
        part.add(done);
        if let Some(since_change) = since_change {
            self.all = since_change;
        }
        self.all.add(done);
    }

    /// Workers to leave to encodes. With hysteresis: what was returned before counts.
    pub fn n_encoders(&mut self, workers: WorkerCounts) -> usize {
        self.is_known |= self.all.seen_s >= LEAST_SEEN * MEMORY.as_secs_f64();
        if !self.is_known {
            return self.n_encoders;
        }
        self.n_encoders = match self.busy_workers() < LEAST_UTILISATION * workers.n as f64 {
            true => 0,
            false => self.best_split(workers),
        };
        self.n_encoders
    }

    /// The split whose busiest worker is the least busy one; none where all are no busier if each does both. What is there already
    /// stays until another is better by the hysteresis.
    fn best_split(&self, workers: WorkerCounts) -> usize {
        let (work, n) = (self.all, workers.n);
        if work.encode_share() <= 0.0 {
            return 0;
        }
        let hysteresis = HYSTERESIS * (MEMORY.as_secs_f64() / work.seen_s).sqrt();
        let busiest = |k: usize| {
            let answering = (n - k) as f64 * work.left_share();
            let busiest = match k {
                0 => (work.encodes_s + work.steps_s) / answering * BESIDE,
                _ => (work.encodes_s / k as f64).max(work.steps_s / answering),
            };
            if k == self.n_encoders { busiest / (1.0 + hysteresis) } else { busiest }
        };
        (0..n).min_by(|a, b| busiest(*a).total_cmp(&busiest(*b))).unwrap_or(0)
    }

    /// Part of encodes in them and the rows of steps, 0 to 1; 0 where no engine took a step.
    pub fn encode_share(&self) -> f64 {
        self.all.encode_share()
    }

    /// Workers that all of it keeps busy.
    pub fn busy_workers(&self) -> f64 {
        let RecentWork { encodes_s, steps_s, fixed_s, seen_s, .. } = self.all;
        if seen_s > 0.0 { (encodes_s + steps_s + fixed_s) / seen_s } else { 0.0 }
    }
}

#[cfg(test)]
mod tests;
