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
mod recent;

pub use recent::WorkDone;

use mix_change::WorkParts;
use recent::RecentWork;
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
/// Utilisation of the workers below which all do both: there is room, and an idle worker's cores help with encodes.
const LEAST_UTILISATION: f64 = 0.4;

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
