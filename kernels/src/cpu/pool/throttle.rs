//! Number of threads beside neighbours that take cores away.
//!
//! Two threads that share their cores with others can be slower than one, which the system gives more of a core and which waits
//! for nobody. How much slower depends on the system's rules, so it is measured: where the system puts threads off,
//! ops run with one thread less for a window, and then with as many as were faster. Later one thread more is tried.
//! Times between trials double as long as trials change nothing, and a trial that loses too much ends early. An op of a trial
//! is compared with ops of its size before it, as what ops cost for their work depends on what they do.
//!
//! Beside neighbours speed scatters by a tenth from window to window. So a trial of one thread more that begins while the system
//! puts the caller off as before comes late and has to gain more: as long as it does, what took the core is still there.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::cores::ThreadId;

/// Time in ops over which speed is measured: that of a hundred slices of the system's scheduler.
const WINDOW: Duration = Duration::from_millis(400);
/// Time in ops from a change of threads until the system has found the new shares of the cores.
const SETTLING: Duration = Duration::from_millis(200);
/// Preemptions of a caller in a window from which on neighbours count.
const PREEMPTIONS: u64 = 20;
/// Speed of a trial over the speed before above which it is kept.
const GAIN: f64 = 1.05;
/// That of a trial of one thread less where all threads together had less than as many cores would be.
const GAIN_WHERE_SHORT: f64 = 1.0;
/// That of a trial of one thread more where the caller is put off as before.
const GAIN_WHERE_DISTURBED: f64 = 1.2;
/// Time in ops that a trial may lose; one that is much slower then ends.
const LOSS: Duration = Duration::from_millis(80);
/// Time of a trial's ops over that of the same ops before from which on it is much slower: that of two threads on cores of their
/// own over that of one is 2.
const MUCH_SLOWER: f64 = 1.5;
/// Time from a trial that is kept to the next.
const SHORTEST: Duration = Duration::from_secs(1);
/// Shortest time until a trial of one thread more where the caller is put off as before.
const SHORTEST_WHERE_DISTURBED: Duration = Duration::from_secs(8);
/// Longest time until a trial of one thread more where the caller is no longer put off.
const LONGEST_QUIET: Duration = Duration::from_secs(4);
/// Longest time until a trial of one thread less where all threads together had less than as many cores would be: it cannot lose much.
const LONGEST_WHERE_SHORT: Duration = Duration::from_secs(2);
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

/// Preemptions of a thread and processor time of its process, since each began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    /// The caller of an op.
    pub(super) thread: ThreadId,
    /// Times that it was put off.
    pub(super) n_preemptions: u64,
    /// Processor time of all threads of the process.
    pub(super) processor_time: Duration,
}

/// A number of threads that is tried.
#[derive(Clone, Copy, Debug)]
struct Trial {
    n_threads: usize,
    /// Speed over the speed before above which it is kept.
    gain: f64,
}

/// The rule, without a clock.
#[derive(Debug)]
pub(super) struct Throttle {
    /// Threads that there are.
    n_all: usize,
    /// Threads that ops use outside of trials.
    n_threads: usize,
    /// The trial that runs.
    trial: Option<Trial>,
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
    whole_trial: Window,
    /// Time and work of ops outside of trials, the latest the most, by the magnitude of tasks and work.
    known: HashMap<(u32, u32), (Duration, f64)>,
}

/// Ops since a moment.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    took: Duration,
    /// The time that they would have taken outside of the trial.
    expected: Duration,
    /// At its start, which is the end of an op.
    at_start: Option<Received>,
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
            whole_trial: Window::default(),
            known: HashMap::new(),
        }
    }

    /// Threads for an op that begins now.
    pub(super) fn n_threads(&self) -> usize {
        self.trial.map_or(self.n_threads, |trial| trial.n_threads)
    }

    /// Takes an op into account. Asks for what its caller and the process received once or twice in a window.
    pub(super) fn record(&mut self, op: Op, now: Instant, received: impl Fn() -> Received) {
        let n_compared = self.n_threads().max(self.n_threads);
        if op.n_possible < n_compared || op.n_threads != self.n_threads() {
            return;
        }
        let of_its_size = (op.n_tasks.max(1).ilog2(), op.cost.max(1).ilog2());
        let work = op.cost.max(1) as f64;
        let mut expected = op.took;
        if let Some(trial) = self.trial {
            // A size that is not known says nothing, and brings the end of the trial nearer.
            let known = self.known.get(&of_its_size);
            expected = known.map_or(op.took, |(took, of)| took.mul_f64(work / of));
            self.whole_trial.took += op.took;
            self.whole_trial.expected += expected;
            let Window { took, expected, .. } = self.whole_trial;
            if took >= (expected + LOSS).max(expected.mul_f64(MUCH_SLOWER)) {
                return self.end_trial(trial, false, now);
            }
        }
        if !self.settling.is_zero() {
            self.settling = self.settling.saturating_sub(op.took);
            return;
        }
        let Some(at_start) = self.window.at_start else {
            self.window.at_start = Some(received());
            return;
        };
        if self.trial.is_some() {
            self.window.expected += expected;
        } else {
            let known = self.known.entry(of_its_size).or_default();
            *known = (known.0 + op.took, known.1 + work);
        }
        self.window.took += op.took;
        if self.window.took < WINDOW {
            return;
        }
        let Window { took, expected, .. } = std::mem::take(&mut self.window);
        if let Some(trial) = self.trial {
            self.end_trial(trial, took.mul_f64(trial.gain) < expected, now);
            return;
        }
        self.end_window(at_start, received(), took, now);
    }

    /// Begins a trial behind a window without one, if it is time for it.
    fn end_window(&mut self, at_start: Received, at_end: Received, took: Duration, now: Instant) {
        let is_disturbed =
            at_end.thread == at_start.thread && at_end.n_preemptions >= at_start.n_preemptions + PREEMPTIONS;
        let processor_time = at_end.processor_time.saturating_sub(at_start.processor_time);
        let is_short = processor_time < took * self.n_threads.saturating_sub(1) as u32;
        let next = self.next_trial(is_disturbed, is_short);
        let pause = match next {
            Some(trial) if trial.n_threads < self.n_threads && is_short => {
                self.pause.min(LONGEST_WHERE_SHORT)
            }
            Some(trial) if trial.n_threads < self.n_threads => self.pause,
            _ if is_disturbed => self.pause.max(SHORTEST_WHERE_DISTURBED),
            _ => self.pause.min(LONGEST_QUIET),
        };
        if self.tried_at.is_none_or(|at| at + pause <= now) {
            self.trial = next;
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

    /// A trial that begins now, if there is one to make. `is_short`: all threads together had less processor time than one thread
    /// less may have.
    fn next_trial(&self, is_disturbed: bool, is_short: bool) -> Option<Trial> {
        let gain_of_more = if is_disturbed { GAIN_WHERE_DISTURBED } else { GAIN };
        let gain_of_fewer = if is_short { GAIN_WHERE_SHORT } else { GAIN };
        let more = Trial { n_threads: self.n_threads + 1, gain: gain_of_more };
        let fewer = Trial { n_threads: self.n_threads.saturating_sub(1), gain: gain_of_fewer };
        let more = (self.n_threads < self.n_all).then_some(more);
        let fewer = (is_disturbed && self.n_threads > 1).then_some(fewer);
        if self.is_next_up { more.or(fewer) } else { fewer.or(more) }
    }

    fn end_trial(&mut self, trial: Trial, is_kept: bool, now: Instant) {
        let was_up = trial.n_threads > self.n_threads;
        (self.trial, self.window, self.whole_trial) = (None, Window::default(), Window::default());
        if is_kept {
            self.n_threads = trial.n_threads;
            self.known.clear();
        }
        self.settling = SETTLING;
        self.pause = if is_kept { SHORTEST } else { (self.pause * 2).min(LONGEST) };
        // On in a direction that helps, else the other one.
        self.is_next_up = was_up == is_kept;
        self.tried_at = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::pool::cores::current_thread;
    use std::cell::Cell;

    /// Neighbours, as the system's counts tell of them.
    #[derive(Clone, Copy)]
    struct Neighbours {
        /// Ops of the caller from one preemption to the next.
        preempted_every: u64,
        /// Cores that the process has.
        n_cores: f64,
    }

    const NONE: Neighbours = Neighbours { preempted_every: 1000, n_cores: 8.0 };
    /// Ones that put the caller off often, and leave all threads their cores.
    const OFTEN: Neighbours = Neighbours { preempted_every: 3, ..NONE };
    /// Ones that leave all threads more than a core.
    const SOME: Neighbours = Neighbours { preempted_every: 3, n_cores: 1.2 };
    /// Ones that leave them less.
    const MANY: Neighbours = Neighbours { preempted_every: 3, n_cores: 0.6 };

    fn received(n_preemptions: u64, processor_time: Duration) -> Received {
        Received { thread: current_thread(), n_preemptions, processor_time }
    }

    /// Ops of two sizes one after the other for `ms`, of `10 / speed(n)` ms with `n` threads on average. Milliseconds at each
    /// number of threads.
    fn run(
        throttle: &mut Throttle,
        from: Instant,
        ms: u64,
        speed: impl Fn(usize) -> u32,
        neighbours: Neighbours,
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
            let count = i as u64 / neighbours.preempted_every;
            let processor_time = (now - from).mul_f64(neighbours.n_cores);
            throttle.record(op, now, || received(count, processor_time));
        }
        at.into_iter().map(|time| time.as_millis() as u64).collect()
    }

    #[test]
    fn all_threads_stay_where_nobody_is_put_off() {
        let at = run(&mut Throttle::new(4), Instant::now(), 10_000, |_| 10, NONE);
        assert!(at[4] >= 10_000 && at[..4].iter().sum::<u64>() == 0, "{at:?}");
    }

    #[test]
    fn trials_that_are_slower_take_two_percent_of_the_time_and_much_slower_ones_less() {
        let at = |n_all| run(&mut Throttle::new(n_all), Instant::now(), 600_000, |n| 5 * n as u32, OFTEN);
        let (of_two, of_four) = (at(2), at(4));
        assert!(of_four[3] > 9_000 && of_four[3] < 18_000, "{of_four:?}");
        assert!(of_two[1] > 0 && of_two[1] < 4_000, "{of_two:?}");
    }

    #[test]
    fn a_trial_that_is_much_slower_only_while_it_begins_is_seen_to_its_end() {
        let (mut throttle, mut now, mut count) = (Throttle::new(2), Instant::now(), 0);
        let mut run = |throttle: &mut Throttle, took| {
            now += took;
            count += 1;
            let op = Op { n_possible: 2, n_threads: throttle.n_threads(), n_tasks: 8, cost: 100, took };
            throttle.record(op, now, || received(count, Duration::ZERO));
        };
        while throttle.n_threads() == 2 {
            run(&mut throttle, Duration::from_millis(2));
        }
        // It loses a little less: it would have taken 2 ms.
        run(&mut throttle, LOSS);
        (0..1000).for_each(|_| run(&mut throttle, Duration::from_millis(1)));
        assert_eq!(throttle.n_threads(), 1);
    }

    #[test]
    fn one_thread_computes_while_a_neighbour_makes_two_slower() {
        let (mut throttle, start) = (Throttle::new(2), Instant::now());
        let at = run(&mut throttle, start, 120_000, |n| [0, 10, 8][n], SOME);
        assert!(at[1] > 114_000, "{at:?}");
        let later = start + Duration::from_secs(120);
        let at = run(&mut throttle, later, 10_000, |n| 5 * n as u32, NONE);
        assert!(at[2] > 5_500, "the neighbour went away: {at:?}");
    }

    #[test]
    fn of_two_numbers_that_are_nearly_level_the_smaller_one_computes_where_cores_are_short() {
        let shares =
            |neighbours| run(&mut Throttle::new(2), Instant::now(), 30_000, |n| [0, 51, 50][n], neighbours);
        let (some, many) = (shares(SOME), shares(MANY));
        assert!(some[2] > 25_000 && many[1] > 27_000, "{some:?} {many:?}");
    }

    #[test]
    fn a_little_gain_by_one_thread_more_counts_where_the_caller_is_not_put_off() {
        let (mut throttle, start, n_ops) = (Throttle::new(2), Instant::now(), Cell::new(0));
        // Two threads are slower for some 10 s, and faster then.
        let speed = |n: usize| {
            n_ops.set(n_ops.get() + 1);
            [0, 10, if n_ops.get() < 10_000 { 8 } else { 11 }][n]
        };
        let disturbed = run(&mut throttle, start, 60_000, speed, MANY);
        let later = start + Duration::from_secs(60);
        let quiet = run(&mut throttle, later, 60_000, speed, NONE);
        assert!(disturbed[2] < 4_000 && quiet[2] > 50_000, "{disturbed:?} {quiet:?}");
    }

    #[test]
    fn one_thread_less_is_tried_again_soon_where_cores_are_short() {
        let n_ops = Cell::new(0);
        // One thread is slower for some 20 s, and faster then.
        let speed = |n: usize| {
            n_ops.set(n_ops.get() + 1);
            [0, if n_ops.get() < 20_000 { 9 } else { 12 }, 10][n]
        };
        let at = run(&mut Throttle::new(2), Instant::now(), 40_000, speed, MANY);
        assert!(at[1] > 18_000, "{at:?}");
    }

    #[test]
    fn one_thread_more_is_not_tried_soon_where_the_caller_is_put_off() {
        let at = run(&mut Throttle::new(2), Instant::now(), 8_000, |n| [0, 10, 8][n], MANY);
        assert!(at[2] < 900, "{at:?}");
    }

    #[test]
    fn as_many_threads_go_as_make_it_slower() {
        let speed = |n: usize| if n > 5 { 10 - (n as u32 - 5) } else { 2 * n as u32 };
        let at = run(&mut Throttle::new(8), Instant::now(), 60_000, speed, OFTEN);
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
            throttle.record(op, now, || received(count, Duration::ZERO));
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
            throttle.record(op, now, || received(count, Duration::ZERO));
        }
        assert_eq!(throttle.n_threads(), 4);
    }
}
