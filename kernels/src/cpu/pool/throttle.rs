//! Number of threads beside neighbours that take cores away.
//!
//! A thread that the system puts off in the middle of a task holds up its op, for milliseconds at a time, while the
//! others wait. If `n` threads wait for more than one n-th of the time, `n - 1` of them would have been faster:
//! `(took - stalled) · n / (n - 1) < took`. Then there is one less for a while, and after that one more on trial, at
//! times that double as long as trials fail.

use std::time::{Duration, Instant};

/// Time in ops over which waits are judged.
const WINDOW: Duration = Duration::from_millis(10);
/// Time until the first trial.
const SHORTEST: Duration = Duration::from_millis(40);
/// Longest time until a trial: with a window for each, trials take 2 % of the time.
const LONGEST: Duration = Duration::from_millis(640);

/// Time of an op.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpTime {
    /// Threads that it might use, its caller included.
    pub(super) n_threads: usize,
    /// All of it.
    pub(super) took: Duration,
    /// Of that, the time for which its caller slept until others had ended their tasks.
    pub(super) stalled: Duration,
}

/// The rule, without a clock.
#[derive(Debug)]
pub(super) struct Throttle {
    /// Threads that there are.
    n_all: usize,
    /// Threads that an op may use.
    n_threads: usize,
    /// The running window.
    took: Duration,
    stalled: Duration,
    /// Time of the next trial; `None`: all threads are used, or a trial runs.
    trial_at: Option<Instant>,
    /// Time from the latest reduction to its trial.
    pause: Duration,
}

impl Throttle {
    /// All of `n_all` threads, the caller included.
    pub(super) fn new(n_all: usize) -> Self {
        Self {
            n_all,
            n_threads: n_all,
            took: Duration::ZERO,
            stalled: Duration::ZERO,
            trial_at: None,
            pause: SHORTEST,
        }
    }

    /// Threads for an op that begins now.
    pub(super) fn n_threads(&mut self, now: Instant) -> usize {
        if self.trial_at.is_some_and(|at| at <= now) {
            self.trial_at = None;
            self.n_threads += 1;
            self.begin_window();
        }
        self.n_threads
    }

    /// Takes an op into account.
    pub(super) fn record(&mut self, op: OpTime, now: Instant) {
        if op.n_threads < self.n_threads || self.n_threads == 1 {
            return;
        }
        self.took += op.took;
        self.stalled += op.stalled;
        if self.took < WINDOW {
            return;
        }
        let n = u32::try_from(self.n_threads).unwrap_or(u32::MAX);
        if self.stalled.saturating_mul(n) > self.took {
            self.n_threads -= 1;
            self.trial_at = Some(now + self.pause);
            self.pause = (self.pause * 2).min(LONGEST);
        } else if self.trial_at.is_none() {
            self.pause = SHORTEST;
            self.trial_at = (self.n_threads < self.n_all).then(|| now + SHORTEST);
        }
        self.begin_window();
    }

    fn begin_window(&mut self) {
        (self.took, self.stalled) = (Duration::ZERO, Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ops of a millisecond for `ms`, of which `stalled(n)` percent are waits with `n` threads. Milliseconds at each number
    /// of threads.
    fn run(throttle: &mut Throttle, from: Instant, ms: u64, stalled: impl Fn(usize) -> u64) -> Vec<u64> {
        let mut at = vec![0; throttle.n_all + 1];
        for i in 0..ms {
            let now = from + Duration::from_millis(i);
            let n_threads = throttle.n_threads(now);
            at[n_threads] += 1;
            let stalled = Duration::from_micros(10 * stalled(n_threads));
            let op = OpTime { n_threads, took: Duration::from_millis(1), stalled };
            throttle.record(op, now + Duration::from_millis(1));
        }
        at
    }

    #[test]
    fn threads_that_wait_less_than_one_would_lose_stay() {
        let at = run(&mut Throttle::new(4), Instant::now(), 1000, |n| 100 / n as u64);
        assert_eq!(at[4], 1000);
    }

    #[test]
    fn one_thread_computes_while_a_neighbour_holds_up_two() {
        let (mut throttle, start) = (Throttle::new(2), Instant::now());
        let at = run(&mut throttle, start, 10_000, |_| 60);
        assert!(at[1] > 9_500, "{at:?}");
        let later = start + Duration::from_secs(10);
        let at = run(&mut throttle, later, 2_000, |_| 0);
        assert!(at[2] > 1_300, "the neighbour went away: {at:?}");
    }

    #[test]
    fn as_many_threads_go_as_are_held_up() {
        let at = run(&mut Throttle::new(8), Instant::now(), 20_000, |n| if n > 6 { 50 } else { 1 });
        assert!(at[6] > 18_000 && at[..6].iter().sum::<u64>() == 0, "{at:?}");
    }

    #[test]
    fn ops_that_use_fewer_threads_by_themselves_say_nothing() {
        let (mut throttle, now) = (Throttle::new(4), Instant::now());
        for _ in 0..100 {
            let took = Duration::from_millis(1);
            throttle.record(OpTime { n_threads: 2, took, stalled: took }, now);
        }
        assert_eq!(throttle.n_threads(now), 4);
    }
}
