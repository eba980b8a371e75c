//! The number of workers that are left to encodes: where the busiest worker is then no busier than all would be if each did both.
//!
//! Workers report what they computed: time of encodes, time of engine steps by the rows in them, and the fixed time of steps that
//! decode. The last depends on the number of workers that answer: a step is taken while anything decodes, and
//! more sequences at a worker decode in the same step. With sequences that come by chance (Poisson) and a mean of `c` that decode
//! at a time, `m` workers take steps for `m (1 - exp(-c / m))` of the time of one that always does, and the mean batch of a
//! worker's steps is `x / (1 - exp(-x))` for `x = c / m`, from which `c` follows.
//!
//! All terms grow with the load alike, and are measured as work ends: encodes that wait are no work yet, as prompts that wait are
//! none. So the number is the same at any rate, but where the load is low.

use std::time::{Duration, Instant};

/// Factor on the utilisation of workers that do both: encodes and steps that wait for one another.
const BESIDE: f64 = 1.05;
/// Part of the utilisation by which the busiest has to be busier before all do both again, so that chance changes nothing.
const HYSTERESIS: f64 = 0.04;
/// Time in which work that ended is forgotten, but for a third: some hundred requests.
const MEMORY: Duration = Duration::from_secs(20);
/// The same for the latest work, by which a change of mixes is noticed.
const LATEST: Duration = Duration::from_secs(5);
/// Difference of the parts of encodes in the latest and in all remembered work by which the mix has changed, and what was before
/// is forgotten: three standard deviations of the former with some requests a second.
const CHANGE: f64 = 0.12;
/// Part of the weight that has to be there before anything is decided.
const LEAST_WEIGHT: f64 = 0.4;
/// Utilisation of the workers below which all do both: there is room, and an idle worker's cores help with encodes.
const LEAST_UTILISATION: f64 = 0.4;
/// Rounds of Newton's method, which halves the error of the mean number of decoding sequences at least.
const ROUNDS: usize = 20;

/// Work of workers in some time, as they report it ([`triptych_proto::v1::ComputedWork`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkDone {
    /// Compute time of forwards of encoders, and of preprocessing by the part of the threads that it takes, in microseconds.
    pub encode_us: u64,
    /// Time of engine steps beyond a step's fixed time, in microseconds.
    pub step_us: u64,
    /// Fixed time of the engine steps that decode, in microseconds.
    pub step_fixed_us: u64,
    /// Engine steps that decode.
    pub n_decode_steps: u64,
    /// Tokens that they decode.
    pub n_decoded: u64,
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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkSplit {
    all: RecentWork,
    latest: RecentWork,
    at: Option<Instant>,
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
    /// Steps that decode.
    n_decode_steps: f64,
    /// Tokens that they decode.
    n_decoded: f64,
    /// Seconds that were seen: a mean over these alone is right from the start (Adam's correction,
    /// <https://arxiv.org/abs/1412.6980>).
    seen_s: f64,
}

impl RecentWork {
    fn forget(&mut self, since: Duration, memory: Duration) {
        let left = (-since.as_secs_f64() / memory.as_secs_f64()).exp();
        for sum in [
            &mut self.encodes_s,
            &mut self.steps_s,
            &mut self.fixed_s,
            &mut self.n_decode_steps,
            &mut self.n_decoded,
        ] {
            *sum *= left;
        }
        self.seen_s = memory.as_secs_f64() * (1.0 - left) + self.seen_s * left;
    }

    fn add(&mut self, done: WorkDone) {
        self.encodes_s += done.encode_us as f64 / 1e6;
        self.steps_s += done.step_us as f64 / 1e6;
        self.fixed_s += done.step_fixed_us as f64 / 1e6;
        self.n_decode_steps += done.n_decode_steps as f64;
        self.n_decoded += done.n_decoded as f64;
    }

    /// Part of it that is encodes, without the fixed time of steps: the part is of the mix, whatever the batches. Workers that
    /// report no steps, of other engines, say nothing of it.
    fn encode_share(&self) -> f64 {
        if self.steps_s > 0.0 { self.encodes_s / (self.encodes_s + self.steps_s) } else { 0.0 }
    }

    /// Mean number of sequences that decode at a time, on all of `n` workers, while any does.
    fn decoding(&self, n: f64) -> f64 {
        let batch = (self.n_decoded / self.n_decode_steps.max(1.0)).max(1.0);
        let nearer = |x: f64| {
            let (value, slope) = (x - batch + batch * (-x).exp(), 1.0 - batch * (-x).exp());
            x - value / slope.max(f64::MIN_POSITIVE)
        };
        let each = (0..ROUNDS).fold(batch, |x, _| nearer(x));
        each * n
    }

    /// Seconds of fixed times by the number of workers that answer, where `n` of them did.
    fn fixed_s(&self, n: f64) -> impl Fn(f64) -> f64 {
        let decoding = self.decoding(n);
        let taken = move |n: f64| n * (1.0 - (-decoding / n).exp());
        let (fixed_s, now) = (self.fixed_s, taken(n));
        move |n| if now > 0.0 { fixed_s * taken(n) / now } else { fixed_s }
    }
}

impl WorkSplit {
    /// Workers report that this was done.
    pub fn add(&mut self, now: Instant, done: WorkDone) {
        self.forget(now);
        self.all.add(done);
        self.latest.add(done);
    }

    fn forget(&mut self, now: Instant) {
        let since = self.at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        self.at = Some(self.at.map_or(now, |at| at.max(now)));
        self.all.forget(since, MEMORY);
        self.latest.forget(since, LATEST);
    }

    /// Workers to leave to encodes. With hysteresis: what was returned before counts.
    pub fn n_encoders(&mut self, workers: WorkerCounts) -> usize {
        let is_seen =
            |work: &RecentWork, memory: Duration| work.seen_s >= LEAST_WEIGHT * memory.as_secs_f64();
        let change = (self.latest.encode_share() - self.all.encode_share()).abs();
        if change > CHANGE && is_seen(&self.latest, LATEST) && self.all.seen_s > self.latest.seen_s {
            self.all = self.latest;
        }
        if !is_seen(&self.all, MEMORY) {
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
        let answering = n.saturating_sub(self.n_encoders.max(workers.n_encoders)).max(1) as f64;
        let fixed_s = work.fixed_s(answering);
        let answers_s = |m: f64| work.steps_s + fixed_s(m);
        let busiest = |k: usize| {
            let m = (n - k) as f64;
            let busiest = match k {
                0 => (work.encodes_s + answers_s(m)) / m * BESIDE,
                _ => (work.encodes_s / k as f64).max(answers_s(m) / m),
            };
            if k == self.n_encoders { busiest / (1.0 + HYSTERESIS) } else { busiest }
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
