//! The split of work by what workers report, second by second.

use super::*;

/// All do both at first.
const TWO: WorkerCounts = WorkerCounts { n: 2, n_encoders: 0 };

/// Work of a second in parts of a worker: encodes, steps by their rows, and the fixed time of steps.
#[derive(Clone, Copy, Debug, Default)]
struct Second {
    encodes: f64,
    steps: f64,
    fixed: f64,
    /// Time that the steps may take by the SLO.
    slo: f64,
}

impl Second {
    fn done(self) -> WorkDone {
        let us = |part: f64| (part * 1e6) as u64;
        WorkDone {
            encode_us: us(self.encodes),
            step_us: us(self.steps),
            step_fixed_us: us(self.fixed),
            step_slo_us: us(self.slo),
        }
    }
}

/// Seconds of work from `now` on; the workers left to encodes.
fn after(
    work: &mut WorkSplit,
    now: &mut Instant,
    seconds: u32,
    second: Second,
    workers: WorkerCounts,
) -> usize {
    for _ in 0..seconds {
        *now += Duration::from_secs(1);
        work.add(*now, second.done());
        work.n_encoders(workers);
    }
    work.n_encoders(workers)
}

#[test]
fn a_worker_is_left_to_encodes_where_neither_is_busier_than_both_would_be() {
    let (mut work, mut now) = (WorkSplit::default(), Instant::now());
    // Encodes, steps and their fixed time, and the workers left to encodes after two minutes of it.
    for ((encodes, steps, fixed), expect) in [
        ((0.73, 0.65, 0.1), 0),
        ((0.7, 0.7, 0.1), 1),
        // Within the hysteresis, as before.
        ((0.73, 0.65, 0.1), 1),
        ((0.6, 0.8, 0.1), 0),
        // Steps that decode fill the time that is left, and say nothing of what a worker can do.
        ((0.7, 0.7, 0.6), 1),
        ((0.3, 0.4, 1.2), 0),
        ((0.3, 0.3, 1.2), 1),
        // Too many encodes for one, and the other has room.
        ((0.9, 0.4, 0.1), 0),
        // All do both where there is room.
        ((0.3, 0.3, 0.1), 0),
    ] {
        let found =
            after(&mut work, &mut now, 120, Second { encodes, steps, fixed, ..Second::default() }, TWO);
        assert_eq!(found, expect, "{encodes} {steps} {fixed}");
    }
    let nobody_answers = Second { encodes: 1.9, steps: 0.0, fixed: 0.0, ..Second::default() };
    assert_eq!(
        after(&mut WorkSplit::default(), &mut now, 120, nobody_answers, TWO),
        0,
        "no engine took a step"
    );
}

#[test]
fn the_less_was_seen_the_more_a_split_has_to_gain() {
    let (mut work, mut now) = (WorkSplit::default(), Instant::now());
    let second = Second { encodes: 0.7, steps: 0.7, fixed: 0.1, ..Second::default() };
    assert_eq!(after(&mut work, &mut now, 15, second, TWO), 0);
    assert_eq!(after(&mut work, &mut now, 10, second, TWO), 1);
    assert!((work.busy_workers() - 1.5).abs() < 0.15, "{}", work.busy_workers());
    assert!((work.encode_share() - 0.5).abs() < 1e-6, "{}", work.encode_share());
    // Encodes, steps and what the SLO leaves to them, by which a split gains a quarter, a twentieth and a hundredth; and the
    // seconds after which it is there.
    for (encodes, steps, left, expect) in
        [(0.7, 0.5, 0.5, 2..5), (0.7, 0.7, 0.5, 15..30), (0.75, 0.7, 1.0, 200..201)]
    {
        let mut work = WorkSplit::default();
        let second = Second { encodes, steps, fixed: 1.0 - left, slo: 1.0 };
        let splits = (1..200).find(|_| after(&mut work, &mut now, 1, second, TWO) == 1);
        assert!(expect.contains(&splits.unwrap_or(200)), "{encodes} {steps} {left}: {splits:?}");
    }
    // A clock that stands still or goes back is no trouble.
    let most = WorkDone { encode_us: u64::MAX, ..WorkDone::default() };
    work.add(now.checked_sub(Duration::from_secs(9)).unwrap(), most);
    work.add(now, WorkDone { step_us: 1, ..WorkDone::default() });
    assert_eq!(work.n_encoders(TWO), 0, "more encodes than one worker has time for");
}

#[test]
fn a_mix_that_changes_is_noticed_within_seconds() {
    let (mut work, mut now) = (WorkSplit::default(), Instant::now());
    assert_eq!(
        after(
            &mut work,
            &mut now,
            120,
            Second { encodes: 0.1, steps: 1.2, fixed: 0.1, ..Second::default() },
            TWO
        ),
        0
    );
    let new = Second { encodes: 0.18, steps: 0.12, fixed: 0.05, slo: 0.1 };
    for _ in 0..250 {
        now += Duration::from_millis(100);
        work.add(now, new.done());
        work.n_encoders(TWO);
    }
    assert_eq!(work.n_encoders(TWO), 1, "and not after twice the time");
    assert_eq!(
        after(
            &mut work,
            &mut now,
            15,
            Second { encodes: 0.2, steps: 1.3, fixed: 0.1, ..Second::default() },
            TWO
        ),
        0
    );
}

#[test]
fn the_parts_count_and_not_the_rate() {
    for rate in [1.0, 3.0, 20.0] {
        let (mut work, mut now) = (WorkSplit::default(), Instant::now());
        let second =
            Second { encodes: 0.6 * rate, steps: 0.6 * rate, fixed: 0.05 * rate, ..Second::default() };
        assert_eq!(after(&mut work, &mut now, 90, second, TWO), 1, "{rate}");
    }
}

#[test]
fn steps_that_the_slo_needs_leave_less_time_to_workers_that_answer() {
    let (mut now, four) = (Instant::now(), WorkerCounts { n: 4, n_encoders: 0 });
    // Of 35 ms that a step may take, 22 are its fixed time; or of 60; or there is no SLO, or none that a step can meet.
    for (slo, expect) in [(35.0, 1), (60.0, 1), (120.0, 0), (0.0, 0)] {
        let second = Second { encodes: 0.4, steps: 0.75, fixed: 2.2, slo: 2.2 / 22.0 * slo };
        assert_eq!(after(&mut WorkSplit::default(), &mut now, 90, second, four), expect, "{slo}");
    }
    let too_many_encodes = Second { encodes: 1.5, steps: 0.75, fixed: 2.2, slo: 6.0 };
    assert_eq!(after(&mut WorkSplit::default(), &mut now, 90, too_many_encodes, four), 2);
}

#[test]
fn whole_workers_of_many_are_left_to_encodes() {
    let eight = |n_encoders| WorkerCounts { n: 8, n_encoders };
    for (encodes, steps, n_encoders, expect) in
        [(0.3, 5.0, 0, 0), (2.55, 4.25, 0, 3), (4.5, 2.7, 0, 5), (2.55, 4.25, 3, 3)]
    {
        let (mut work, mut now) = (WorkSplit::default(), Instant::now());
        let second = Second { encodes, steps, fixed: 0.5, ..Second::default() };
        let found = after(&mut work, &mut now, 90, second, eight(n_encoders));
        assert_eq!(found, expect, "{encodes} {n_encoders}");
    }
}
