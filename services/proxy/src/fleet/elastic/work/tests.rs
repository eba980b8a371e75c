//! The split of work by what workers report, second by second.

use super::*;

/// All do both at first.
const TWO: WorkerCounts = WorkerCounts { n: 2, n_encoders: 0 };

/// Work of a second in parts of a worker: encodes, steps by their rows, and the fixed time of steps with a mean batch.
#[derive(Clone, Copy, Debug)]
struct Second {
    encodes: f64,
    steps: f64,
    fixed: f64,
    batch: f64,
}

impl Second {
    /// Steps of half a millisecond and batches of one: fewer workers take as many.
    fn alone(encodes: f64, steps: f64, fixed: f64) -> Self {
        Self { encodes, steps, fixed, batch: 1.0 }
    }

    fn done(self) -> WorkDone {
        let us = |part: f64| (part * 1e6) as u64;
        let n_decode_steps = us(self.fixed) / 500;
        let n_decoded = (n_decode_steps as f64 * self.batch) as u64;
        let (encode_us, step_us, step_fixed_us) = (us(self.encodes), us(self.steps), us(self.fixed));
        WorkDone { encode_us, step_us, step_fixed_us, n_decode_steps, n_decoded }
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
    // Encodes, steps, fixed time and the mean batch, and the workers left to encodes after two minutes of it.
    for ((encodes, steps, fixed, batch), expect) in [
        ((0.7, 0.9, 0.1, 1.0), 0),
        ((0.75, 0.65, 0.1, 1.0), 1),
        // Within the hysteresis, as before.
        ((0.8, 0.6, 0.1, 1.0), 1),
        ((0.6, 0.8, 0.1, 1.0), 0),
        // Too many encodes for one, and the other has room.
        ((0.9, 0.4, 0.1, 1.0), 0),
        ((0.8, 0.6, 0.1, 1.0), 0),
        // Half of the fixed time goes where batches are large, since one worker then takes half as many steps, and none of it where
        // each step decodes one sequence.
        ((0.72, 0.5, 0.4, 8.0), 1),
        ((0.3, 0.9, 0.4, 8.0), 0),
        ((0.72, 0.5, 0.4, 1.0), 0),
        // All do both where there is room.
        ((0.5, 0.1, 0.1, 1.0), 0),
    ] {
        let found = after(&mut work, &mut now, 120, Second { encodes, steps, fixed, batch }, TWO);
        assert_eq!(found, expect, "{encodes} {steps} {fixed} {batch}");
    }
    let nobody_answers = Second::alone(1.9, 0.0, 0.0);
    assert_eq!(
        after(&mut WorkSplit::default(), &mut now, 120, nobody_answers, TWO),
        0,
        "no engine took a step"
    );
}

#[test]
fn the_first_seconds_are_right_and_before_them_nothing_is_decided() {
    let (mut work, mut now) = (WorkSplit::default(), Instant::now());
    let second = Second::alone(0.7, 0.6, 0.1);
    assert_eq!(after(&mut work, &mut now, 8, second, TWO), 0);
    assert_eq!(after(&mut work, &mut now, 5, second, TWO), 1);
    assert!((work.busy_workers() - 1.4).abs() < 0.15, "{}", work.busy_workers());
    assert!((work.encode_share() - 0.7 / 1.3).abs() < 1e-6, "{}", work.encode_share());
    // A clock that stands still or goes back is no trouble.
    let most = WorkDone { encode_us: u64::MAX, ..WorkDone::default() };
    work.add(now.checked_sub(Duration::from_secs(9)).unwrap(), most);
    work.add(now, WorkDone { step_us: 1, ..WorkDone::default() });
    assert_eq!(work.n_encoders(TWO), 0, "more encodes than one worker has time for");
}

#[test]
fn a_mix_that_changes_is_noticed_within_seconds() {
    let (mut work, mut now) = (WorkSplit::default(), Instant::now());
    assert_eq!(after(&mut work, &mut now, 120, Second::alone(0.4, 1.1, 0.1), TWO), 0);
    let new = Second { encodes: 1.0, steps: 0.7, fixed: 0.4, batch: 6.0 };
    assert_eq!(after(&mut work, &mut now, 15, new, TWO), 1, "and not after a minute");
    assert_eq!(after(&mut work, &mut now, 15, Second::alone(0.2, 1.3, 0.1), TWO), 0);
}

#[test]
fn the_parts_count_and_not_the_rate() {
    for rate in [1.0, 3.0, 20.0] {
        let (mut work, mut now) = (WorkSplit::default(), Instant::now());
        let second = Second::alone(0.6 * rate, 0.55 * rate, 0.05 * rate);
        assert_eq!(after(&mut work, &mut now, 90, second, TWO), 1, "{rate}");
    }
}

#[test]
fn whole_workers_of_many_are_left_to_encodes() {
    let eight = |n_encoders| WorkerCounts { n: 8, n_encoders };
    for (encodes, steps, n_encoders, expect) in
        [(0.3, 5.0, 0, 0), (2.5, 4.0, 0, 3), (4.6, 2.3, 0, 5), (2.5, 4.0, 3, 3)]
    {
        let (mut work, mut now) = (WorkSplit::default(), Instant::now());
        let second = Second { encodes, steps, fixed: 0.5, batch: 3.0 };
        let found = after(&mut work, &mut now, 90, second, eight(n_encoders));
        assert_eq!(found, expect, "{encodes} {n_encoders}");
    }
}

#[test]
fn fixed_times_follow_the_number_of_workers_that_decode() {
    let work = |batch: f64| {
        let mut work = RecentWork::default();
        work.add(Second { encodes: 0.0, steps: 0.0, fixed: 0.6, batch }.done());
        work
    };
    assert!((work(1.0).fixed_s(2.0)(1.0) - 0.6).abs() < 0.02, "each step decodes one sequence");
    assert!((work(12.0).fixed_s(2.0)(1.0) - 0.3).abs() < 0.01, "both always decode");
    assert!((work(3.0).fixed_s(1.0)(1.0) - 0.6).abs() < 1e-9);
    let there = work(3.0).fixed_s(2.0)(1.0);
    assert!(there > 0.3 && there < 0.36, "{there}");
    assert!(RecentWork::default().fixed_s(2.0)(1.0).abs() < 1e-9, "nothing decodes");
}
