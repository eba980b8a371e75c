//! The circuit breaker of a worker that answers: the rules by which it is left alone for a while. A state machine that is handed its clock.
//!
//! After Envoy's outlier detection (envoyproxy.io, "Outlier detection"): failures in a row, or a success rate far below
//! the others', eject a worker for a time that grows with each ejection. Afterwards it is half-open: one piece of work
//! shows what it can do. That never more than half of those that can do the same work are ejected is the fleet's part:
//! it knows them.
//!
//! An internal error may be the worker's fault or that of the request, which is then answered alike everywhere. So it
//! counts once for each request, told apart by fingerprint, and ejects only where requests of several tenants fail, or
//! many different ones of one tenant.

use std::time::Duration;
use tokio::time::Instant;

/// Failures in a row that eject.
const FAILURES: u32 = 5;
/// Different requests in a row with internal errors that eject although all are one tenant's.
const INTERNAL_OF_ONE_TENANT: usize = 16;
/// Different requests in a row with internal errors by which a worker fails its probe.
const INTERNAL_IN_PROBES: usize = 2;
/// Different requests with internal errors that are told apart in an interval.
const MAX_INTERNAL: usize = 64;
/// Calls without an answer in a row that eject.
const TIMEOUTS: u32 = 3;
/// The first and the longest time of an ejection; each one adds the first to the one before.
const TIMES: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));
/// Fewer outcomes in an interval say nothing of a worker.
const VOLUME: u32 = 20;
/// A success rate lower by this than the mean of the others is an outlier. Envoy's standard deviations need many
/// workers: of three, none can be two deviations off.
const MARGIN: f64 = 0.3;

/// The end of a piece of work, as far as it tells of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The worker did its part; a refusal of what is wrong with a request is that too.
    Good,
    /// It failed.
    Failed,
    /// It answered with an internal error.
    Internal(Origin),
    /// It did not answer in time.
    TimedOut,
}

/// The origin of a call: as much of its fingerprint and its tenant as tells them apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    request: u64,
    tenant: u64,
}

impl Origin {
    /// Of the bytes of two hashes, or of as many as there are.
    pub fn new(request: &[u8], tenant: &[u8]) -> Self {
        let first = |bytes: &[u8]| bytes.iter().take(8).fold(0, |sum, byte| (sum << 8) | u64::from(*byte));
        Self { request: first(request), tenant: first(tenant) }
    }
}

/// The reason for which a worker is ejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Failures in a row.
    Failures,
    /// Calls without an answer in a row.
    Timeouts,
    /// A success rate far below the others'.
    SuccessRate,
    /// It failed its probe.
    Probe,
}

impl Cause {
    /// The word in metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Failures => "failures",
            Self::Timeouts => "timeouts",
            Self::SuccessRate => "success_rate",
            Self::Probe => "probe",
        }
    }
}

/// True if a worker takes work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Circuit {
    /// It does.
    #[default]
    Closed,
    /// It does not.
    Open {
        /// Until then.
        until: Instant,
    },
    /// It takes one piece, to show what it can do.
    HalfOpen {
        /// That piece is under way.
        probing: bool,
    },
}

/// The record of one worker's outcomes.
#[derive(Debug, Default)]
pub struct Outlier {
    circuit: Circuit,
    /// In a row.
    failures: u32,
    /// In a row.
    timeouts: u32,
    /// Number of its ejections, less the intervals in which it was well.
    ejections: u32,
    /// Good outcomes and all, in this interval.
    interval: (u32, u32),
    /// Requests with internal errors in a row, each once, at most [`INTERNAL_OF_ONE_TENANT`].
    internal: Vec<Origin>,
    /// Requests with internal errors in this interval, each once, at most [`MAX_INTERNAL`].
    interval_internal: Vec<u64>,
}

impl Outlier {
    /// True if it takes work.
    pub fn circuit(&self) -> Circuit {
        self.circuit
    }

    /// Counts an outcome. `Some` if the worker should be ejected for it.
    pub fn count(&mut self, outcome: Outcome) -> Option<Cause> {
        if let Outcome::Internal(origin) = outcome {
            return self.count_internal(origin);
        }
        let (good, all) = &mut self.interval;
        *all = all.saturating_add(1);
        if outcome == Outcome::Good {
            *good = good.saturating_add(1);
            (self.failures, self.timeouts) = (0, 0);
            self.internal.clear();
            if matches!(self.circuit, Circuit::HalfOpen { .. }) {
                self.circuit = Circuit::Closed;
            }
            return None;
        }
        self.failures = self.failures.saturating_add(1);
        self.timeouts = if outcome == Outcome::TimedOut { self.timeouts.saturating_add(1) } else { 0 };
        match self.circuit {
            Circuit::HalfOpen { .. } => Some(Cause::Probe),
            // What was sent before it was ejected tells nothing new.
            Circuit::Open { .. } => None,
            Circuit::Closed if self.timeouts >= TIMEOUTS => Some(Cause::Timeouts),
            Circuit::Closed => (self.failures >= FAILURES).then_some(Cause::Failures),
        }
    }

    /// Counts an internal error, unless it is that of a request that had one already.
    fn count_internal(&mut self, origin: Origin) -> Option<Cause> {
        if self.interval_internal.len() < MAX_INTERNAL && !self.interval_internal.contains(&origin.request) {
            self.interval_internal.push(origin.request);
            self.interval.1 = self.interval.1.saturating_add(1);
        }
        let is_known = self.internal.iter().any(|known| known.request == origin.request);
        if is_known || self.internal.len() >= INTERNAL_OF_ONE_TENANT {
            return None;
        }
        self.internal.push(origin);
        let n = self.internal.len();
        let needed = match self.internal.iter().all(|known| known.tenant == origin.tenant) {
            true => INTERNAL_OF_ONE_TENANT,
            false => FAILURES as usize,
        };
        match self.circuit {
            Circuit::HalfOpen { .. } if n >= INTERNAL_IN_PROBES => Some(Cause::Probe),
            Circuit::HalfOpen { .. } | Circuit::Open { .. } => None,
            Circuit::Closed => (n >= needed).then_some(Cause::Failures),
        }
    }

    /// Calls without an answer in a row.
    pub fn timeouts(&self) -> u32 {
        self.timeouts
    }

    /// Ejects it, and says for how long.
    pub fn eject(&mut self, now: Instant) -> Duration {
        self.ejections = self.ejections.saturating_add(1);
        let time = TIMES.0.saturating_mul(self.ejections).min(TIMES.1);
        self.circuit = Circuit::Open { until: now + time };
        (self.failures, self.timeouts) = (0, 0);
        self.internal.clear();
        time
    }

    /// Lets it show what it can do once its time is over. Whether that is now.
    pub fn half_open(&mut self, now: Instant) -> bool {
        let is_over = matches!(self.circuit, Circuit::Open { until } if until <= now);
        if is_over {
            self.circuit = Circuit::HalfOpen { probing: false };
        }
        is_over
    }

    /// Takes the probe's place, if it is half-open and nobody has.
    pub fn take_probe(&mut self) -> bool {
        let free = self.circuit == Circuit::HalfOpen { probing: false };
        if free {
            self.circuit = Circuit::HalfOpen { probing: true };
        }
        free
    }

    /// Gives it back without an outcome. Whether it was taken.
    pub fn give_back_probe(&mut self) -> bool {
        let taken = self.circuit == Circuit::HalfOpen { probing: true };
        if taken {
            self.circuit = Circuit::HalfOpen { probing: false };
        }
        taken
    }

    /// Ends an interval: the share of good outcomes, if there were enough to tell.
    pub fn end_interval(&mut self) -> Option<f64> {
        let (good, all) = std::mem::take(&mut self.interval);
        self.interval_internal.clear();
        if all > 0 && good == all && self.circuit == Circuit::Closed {
            self.ejections = self.ejections.saturating_sub(1);
        }
        (all >= VOLUME).then(|| f64::from(good) / f64::from(all))
    }
}

/// Indices of the success rates that are far below the others; at least three are needed to say so.
pub fn outliers(rates: &[f64]) -> Vec<usize> {
    let (n, sum) = (rates.len() as f64, rates.iter().sum::<f64>());
    if rates.len() < 3 {
        return Vec::new();
    }
    let is_far = |rate: f64| rate + MARGIN < (sum - rate) / (n - 1.0);
    (0..rates.len()).filter(|i| is_far(rates[*i])).collect()
}

#[cfg(test)]
mod tests {
    use super::Outcome::{Failed, Good, TimedOut};
    use super::*;

    fn now() -> Instant {
        Instant::now()
    }

    #[test]
    fn failures_in_a_row_eject_and_a_success_begins_the_row_again() {
        for (outcomes, expect) in [
            (vec![Failed; 4], None),
            (vec![Failed; 5], Some(Cause::Failures)),
            (vec![Failed, Failed, Failed, Failed, Good, Failed], None),
            (vec![TimedOut; 3], Some(Cause::Timeouts)),
            (vec![TimedOut, TimedOut, Failed, TimedOut], None),
            (vec![TimedOut, TimedOut, Failed, TimedOut, Failed], Some(Cause::Failures)),
        ] {
            let mut outlier = Outlier::default();
            let last = outcomes.iter().map(|o| outlier.count(*o)).last().flatten();
            assert_eq!(last, expect, "{outcomes:?}");
        }
    }

    fn internal(request: u64, tenant: u64) -> Outcome {
        Outcome::Internal(Origin { request, tenant })
    }

    #[test]
    fn internal_errors_count_by_request_and_tenant() {
        let cases: [(&str, Vec<Outcome>, Option<Cause>); 5] = [
            ("one bad request of many clients", (0..1000).map(|i| internal(7, i % 4)).collect(), None),
            ("four bad requests of one tenant", (0..1000).map(|i| internal(i % 4, 1)).collect(), None),
            (
                "different requests of two tenants",
                (0..5).map(|i| internal(i, i % 2)).collect(),
                Some(Cause::Failures),
            ),
            (
                "many different requests of one tenant",
                (0..16).map(|i| internal(i, 1)).collect(),
                Some(Cause::Failures),
            ),
            (
                "an answer to another one between them",
                (0..40).flat_map(|i| [internal(2 * i, 1), internal(2 * i + 1, 2), Good]).collect(),
                None,
            ),
        ];
        for (what, outcomes, expect) in cases {
            let mut outlier = Outlier::default();
            let causes: Vec<_> = outcomes.iter().filter_map(|outcome| outlier.count(*outcome)).collect();
            assert_eq!(causes.first().copied(), expect, "{what}");
        }
    }

    #[test]
    fn one_bad_request_keeps_no_worker_ejected_and_does_not_spoil_its_rate() {
        let (mut outlier, start) = (Outlier::default(), now());
        let time = outlier.eject(start);
        assert!(outlier.half_open(start + time));
        for _ in 0..100 {
            assert!(outlier.take_probe(), "the next request is a probe too");
            assert_eq!(outlier.count(internal(7, 1)), None);
            outlier.give_back_probe();
        }
        assert!(outlier.take_probe());
        assert_eq!(outlier.count(Good), None);
        assert_eq!(outlier.circuit(), Circuit::Closed);
        outlier.end_interval();
        (0..100).for_each(|_| {
            assert_eq!(outlier.count(internal(7, 1)), None);
            assert_eq!(outlier.count(Good), None);
        });
        assert!(outlier.end_interval().unwrap() > 0.9);
        // Two different ones in a row are the worker's.
        let time = outlier.eject(start);
        assert!(outlier.half_open(start + time) && outlier.take_probe());
        assert_eq!(outlier.count(internal(1, 1)), None);
        assert!(outlier.give_back_probe() && outlier.take_probe());
        assert_eq!(outlier.count(internal(2, 1)), Some(Cause::Probe));
    }

    #[test]
    fn each_ejection_is_longer_up_to_the_longest_and_good_intervals_forgive() {
        let mut outlier = Outlier::default();
        let seconds: Vec<_> = (0..3).map(|_| outlier.eject(now()).as_secs()).collect();
        assert_eq!(seconds, [5, 10, 15]);
        assert!((0..100).map(|_| outlier.eject(now())).all(|time| time <= TIMES.1));
        let mut forgiven = Outlier { ejections: 2, ..Outlier::default() };
        for _ in 0..2 {
            forgiven.count(Good);
            forgiven.end_interval();
        }
        assert_eq!(forgiven.eject(now()), TIMES.0);
    }

    #[test]
    fn one_probe_at_a_time_decides_what_becomes_of_it() {
        let (mut outlier, start) = (Outlier::default(), now());
        let time = outlier.eject(start);
        assert!(!outlier.take_probe() && !outlier.half_open(start));
        assert!(outlier.half_open(start + time));
        assert!(outlier.take_probe() && !outlier.take_probe());
        // Its caller went away: the next one probes.
        assert!(outlier.give_back_probe() && outlier.take_probe());
        assert_eq!(outlier.count(Failed), Some(Cause::Probe));
        let longer = outlier.eject(start);
        assert!(longer > time && outlier.half_open(start + longer) && outlier.take_probe());
        assert_eq!(outlier.count(Good), None);
        assert_eq!(outlier.circuit(), Circuit::Closed);
    }

    #[test]
    fn a_rate_far_below_the_others_is_an_outlier() {
        let cases: [(&[f64], &[usize]); 6] = [
            (&[], &[]),
            (&[0.0, 1.0], &[]),
            (&[0.0, 1.0, 1.0], &[0]),
            (&[0.8, 1.0, 1.0], &[]),
            (&[0.2, 0.3, 0.1], &[]),
            (&[1.0, 1.0, 0.5, 1.0], &[2]),
        ];
        for (rates, expect) in cases {
            assert_eq!(outliers(rates), expect, "{rates:?}");
        }
        let mut quiet = Outlier::default();
        (0..VOLUME - 1).for_each(|_| {
            quiet.count(Good);
        });
        assert_eq!(quiet.end_interval(), None);
    }
}
