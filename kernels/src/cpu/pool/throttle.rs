//! Number of threads beside neighbours that take cores away.
//!
//! Two threads that share their cores with others can be slower than one, which the system gives more of a core and which waits
//! for nobody. How much slower depends on the system's rules, so it is measured: where the system puts threads off,
//! ops run with one thread less for a window, and then with as many as were faster. Later one thread more is tried.
//! Times between trials double as long as trials change nothing, and a trial that is much slower ends early. An op of a trial
//! is compared with ops of its size before it, as what ops cost for their work depends on what they do.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::cores::ThreadId;

/// Time in ops over which speed is measured: that of a hundred slices of the system's scheduler.
const WINDOW: Duration = Duration::from_millis(400);
/// Time in ops from a change of threads until the system has found the new shares of the cores.
const SETTLING: Duration = Duration::from_millis(200);
/// Preemptions of a caller in a window from which on neighbours count.
const PREEMPTIONS: u64 = 20;
/// Speed of a trial over the speed before from which on the trial is kept.
const GAIN: f64 = 1.05;
/// Time in ops of a trial after which one that is much slower ends.
const GLANCE: Duration = Duration::from_millis(80);
/// Time of a trial's ops over that of the same ops before from which on it is much slower: that of two threads on cores of their
/// own over that of one is 2.
const MUCH_SLOWER: f64 = 1.5;
/// Time from a trial that is kept to the next.
const SHORTEST: Duration = Duration::from_secs(1);
/// Longest time until a trial of one thread more where the caller is no longer put off.
const LONGEST_QUIET: Duration = Duration::from_secs(4);
/// Longest time until a trial: trials that are seen to their end take 2 % of the time.
const LONGEST: Duration = Duration::from_secs(32);

/// An op that ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Op {
    /// Threads that it could use, its caller included.
    pub(super) n_possible: usize,
    /// Threads that it might use.
    pub(super) n_threads: usize,
    pub(super) n_tasks: usize,
    /// Its work, in any unit.
    pub(super) cost: usize,
    pub(super) took: Duration,
}

/// Times that the system put a thread off, since it began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Preemptions {
    pub(super) thread: ThreadId,
    pub(super) count: u64,
}

/// The rule, without a clock.
#[derive(Debug)]
pub(super) struct Throttle {
    /// Threads that there are.
    n_all: usize,
    /// Threads that ops use outside of trials.
    n_threads: usize,
    /// Threads of the trial that runs.
    trial: Option<usize>,
    /// `true` if the next trial is of one thread more, where there is one.
    is_next_up: bool,
    /// End of the latest trial.
    tried_at: Option<Instant>,
    /// Time from the latest trial to the next.
    pause: Duration,
    /// Time in ops that is left until speed is measured.
    settling: Duration,
    window: Window,
    /// Ops of the trial from its first on.
    glance: Window,
    /// Time and work of ops outside of trials, the latest the most, by the magnitude of tasks and work.
    known: HashMap<(u32, u32), (Duration, f64)>,
}

/// Ops since a moment.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    took: Duration,
    /// The time that they would have taken outside of the trial.
    expected: Duration,
    /// At its first op, of that op's caller.
    preemptions: Option<Preemptions>,
}

impl Throttle {
    /// All of `n_all` threads, the caller included.
    pub(super) fn new(n_all: usize) -> Self {
        Self {
            n_all,
            n_threads: n_all,
            trial: None,
            is_next_up: false,
            tried_at: None,
            pause: SHORTEST,
            settling: Duration::ZERO,
            window: Window::default(),
            glance: Window::default(),
            known: HashMap::new(),
        }
    }

    /// Threads for an op that begins now.
    pub(super) fn n_threads(&self) -> usize {
        self.trial.unwrap_or(self.n_threads)
    }

    /// Takes an op into account. Asks for the preemptions of its caller once or twice in a window.
    pub(super) fn record(&mut self, op: Op, now: Instant, preemptions: impl Fn() -> Preemptions) {
        let n_compared = self.trial.unwrap_or(0).max(self.n_threads);
        if op.n_possible < n_compared || op.n_threads != self.n_threads() {
            return;
        }
        let of_its_size = (op.n_tasks.max(1).ilog2(), op.cost.max(1).ilog2());
        let work = op.cost.max(1) as f64;
        let mut expected = op.took;
        if let Some(n) = self.trial {
            // A size that is not known says nothing, and brings the end of the trial nearer.
            let known = self.known.get(&of_its_size);
            expected = known.map_or(op.took, |(took, of)| took.mul_f64(work / of));
            self.glance.took += op.took;
            self.glance.expected += expected;
            if self.glance.took >= GLANCE && self.glance.took >= self.glance.expected.mul_f64(MUCH_SLOWER) {
                return self.end_trial(n, false, now);
            }
        }
        if !self.settling.is_zero() {
            self.settling = self.settling.saturating_sub(op.took);
            return;
        }
        if self.trial.is_some() {
            self.window.expected += expected;
        } else {
            let known = self.known.entry(of_its_size).or_default();
            *known = (known.0 + op.took, known.1 + work);
        }
        let begun = *self.window.preemptions.get_or_insert_with(&preemptions);
        self.window.took += op.took;
        if self.window.took < WINDOW {
            return;
        }
        let Window { took, expected, .. } = std::mem::take(&mut self.window);
        if let Some(n) = self.trial {
            self.end_trial(n, took.mul_f64(GAIN) <= expected, now);
            return;
        }
        let ended = preemptions();
        let is_disturbed = ended.thread == begun.thread && ended.count >= begun.count + PREEMPTIONS;
        let is_quiet = !is_disturbed && self.n_threads < self.n_all;
        let pause = if is_quiet { self.pause.min(LONGEST_QUIET) } else { self.pause };
        if self.tried_at.is_none_or(|at| at + pause <= now) {
            self.trial = self.next_trial(is_disturbed);
        }
        match self.trial {
            Some(_) => self.settling = SETTLING,
            None => self.forget_half(),
        }
    }

    /// Halves what is known, and drops sizes of which little is left.
    fn forget_half(&mut self) {
        self.known.retain(|_, (took, work)| {
            (*took, *work) = (*took / 2, *work / 2.0);
            *took > Duration::from_micros(1)
        });
    }

    /// Threads of a trial that begins now, if there is one to make.
    fn next_trial(&self, is_disturbed: bool) -> Option<usize> {
        let up = (self.n_threads < self.n_all).then_some(self.n_threads + 1);
        let down = (is_disturbed && self.n_threads > 1).then_some(self.n_threads - 1);
        if self.is_next_up { up.or(down) } else { down.or(up) }
    }

    fn end_trial(&mut self, n_threads: usize, is_faster: bool, now: Instant) {
        let was_up = n_threads > self.n_threads;
        (self.trial, self.window, self.glance) = (None, Window::default(), Window::default());
        if is_faster {
            self.n_threads = n_threads;
            self.known.clear();
        }
        self.settling = SETTLING;
        self.pause = if is_faster { SHORTEST } else { (self.pause * 2).min(LONGEST) };
        // On in a direction that helps, else the other one.
        self.is_next_up = was_up == is_faster;
        self.tried_at = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::cores::current_thread;

    /// Ops of two sizes one after the other for `ms`, of `10 / speed(n)` ms with `n` threads on average, with a preemption of
    /// the caller each `preempted_every` ops. Milliseconds at each number of threads.
    fn run(
        throttle: &mut Throttle,
        from: Instant,
        ms: u64,
        speed: impl Fn(usize) -> u32,
        preempted_every: u64,
    ) -> Vec<u64> {
        let mut at = vec![Duration::ZERO; throttle.n_all + 1];
        let mut now = from;
        for i in 0.. {
            if now > from + Duration::from_millis(ms) {
                break;
            }
            let n_threads = throttle.n_threads();
            // The second size does ten times as much for its cost.
            let (cost, ten_ms) = [(1000, Duration::from_millis(18)), (100, Duration::from_millis(2))][i % 2];
            let took = ten_ms / speed(n_threads);
            now += took;
            at[n_threads] += took;
            let op = Op { n_possible: throttle.n_all, n_threads, n_tasks: 8, cost, took };
            let count = i as u64 / preempted_every;
            throttle.record(op, now, || Preemptions { thread: current_thread(), count });
        }
        at.into_iter().map(|time| time.as_millis() as u64).collect()
    }

    #[test]
    fn all_threads_stay_where_nobody_is_put_off() {
        let at = run(&mut Throttle::new(4), Instant::now(), 10_000, |_| 10, 1000);
        assert!(at[4] >= 10_000 && at[..4].iter().sum::<u64>() == 0, "{at:?}");
    }

    #[test]
    fn trials_that_are_slower_take_two_percent_of_the_time_and_much_slower_ones_less() {
        let at = |n_all| run(&mut Throttle::new(n_all), Instant::now(), 600_000, |n| 5 * n as u32, 3);
        let (of_two, of_four) = (at(2), at(4));
        assert!(of_four[3] > 9_000 && of_four[3] < 18_000, "{of_four:?}");
        assert!(of_two[1] > 0 && of_two[1] < 3_000, "{of_two:?}");
    }

    #[test]
    fn a_trial_that_is_much_slower_only_while_it_begins_is_seen_to_its_end() {
        let (mut throttle, mut now, mut count) = (Throttle::new(2), Instant::now(), 0);
        let mut run = |throttle: &mut Throttle, took| {
            now += took;
            count += 1;
            let op = Op { n_possible: 2, n_threads: throttle.n_threads(), n_tasks: 8, cost: 100, took };
            throttle.record(op, now, || Preemptions { thread: current_thread(), count });
        };
        while throttle.n_threads() == 2 {
            run(&mut throttle, Duration::from_millis(2));
        }
        run(&mut throttle, GLANCE / 2);
        (0..1000).for_each(|_| run(&mut throttle, Duration::from_millis(1)));
        assert_eq!(throttle.n_threads(), 1);
    }

    #[test]
    fn one_thread_computes_while_a_neighbour_makes_two_slower() {
        let (mut throttle, start) = (Throttle::new(2), Instant::now());
        let at = run(&mut throttle, start, 120_000, |n| [0, 10, 8][n], 3);
        assert!(at[1] > 114_000, "{at:?}");
        let later = start + Duration::from_secs(120);
        let at = run(&mut throttle, later, 10_000, |n| 5 * n as u32, 1000);
        assert!(at[2] > 5_500, "the neighbour went away: {at:?}");
    }

    #[test]
    fn as_many_threads_go_as_make_it_slower() {
        let speed = |n: usize| if n > 5 { 10 - (n as u32 - 5) } else { 2 * n as u32 };
        let at = run(&mut Throttle::new(8), Instant::now(), 60_000, speed, 3);
        assert!(at[5] > 50_000, "{at:?}");
    }

    #[test]
    fn a_trial_ends_where_all_ops_are_of_another_size() {
        let (mut throttle, mut now, mut count) = (Throttle::new(2), Instant::now(), 0);
        let mut run = |throttle: &mut Throttle, cost| {
            now += Duration::from_millis(1);
            count += 1;
            let (n_threads, took) = (throttle.n_threads(), Duration::from_millis(1));
            let op = Op { n_possible: 2, n_threads, n_tasks: 8, cost, took };
            throttle.record(op, now, || Preemptions { thread: current_thread(), count });
        };
        while throttle.n_threads() == 2 {
            run(&mut throttle, 100);
        }
        (0..1000).for_each(|_| run(&mut throttle, 1_000_000));
        assert_eq!(throttle.n_threads(), 2);
    }

    #[test]
    fn ops_that_use_fewer_threads_by_themselves_say_nothing() {
        let (mut throttle, now) = (Throttle::new(4), Instant::now());
        for count in 0..1000 {
            let op = Op { n_possible: 2, n_threads: 2, n_tasks: 2, cost: 1, took: Duration::from_millis(1) };
            throttle.record(op, now, || Preemptions { thread: current_thread(), count });
        }
        assert_eq!(throttle.n_threads(), 4);
    }
}
