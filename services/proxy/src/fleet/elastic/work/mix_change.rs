//! Changes of the mix of requests, noticed by what encodes are of all work.
//!
//! Work is kept in parts of a quarter of a second. The mix has changed where the latest of them have more or fewer encodes than
//! the parts before, by more than chance makes of so many: a test of means of one sequence before and after a point, at several
//! points (Basseville and Nikiforov, Detection of Abrupt Changes, 1993). A mix of text alone is noticed within a second or two of
//! some ten requests each, where means that forget in seconds take as many seconds more.

use super::recent::RecentWork;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Time of a part.
const PART: Duration = Duration::from_millis(250);
/// Parts that are kept: 20 s.
const MAX_PARTS: usize = 80;
/// Least parts before a change: they say what chance does.
const LEAST_BEFORE: usize = 8;
/// Numbers of the latest parts that may be of another mix.
const LATEST_PARTS: [usize; 7] = [2, 3, 4, 6, 8, 12, 16];
/// Least difference of the parts of encodes before and after a change.
const LEAST_DIFFERENCE: f64 = 0.12;
/// Least excess of encodes after a change in standard deviations. With 3 and with 5 a changing day is served as well.
const LEAST_DEVIATIONS: f64 = 4.0;

/// Work of the latest seconds, by parts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct WorkParts {
    ended: VecDeque<RecentWork>,
    /// The part under way.
    part: RecentWork,
    /// Its end.
    end: Option<Instant>,
}

impl WorkParts {
    /// The part under way, once those that have ended by `now` are put aside; and if the mix has changed by them, the work since.
    pub(super) fn at(&mut self, now: Instant) -> (&mut RecentWork, Option<RecentWork>) {
        let end = *self.end.get_or_insert(now + PART);
        let since = now.checked_duration_since(end).map(|late| self.end_parts(end, late));
        (&mut self.part, since.flatten())
    }

    fn end_parts(&mut self, end: Instant, late: Duration) -> Option<RecentWork> {
        // Those in which nothing was reported; a longer silence says no more than one of all that is kept.
        let n_empty = late.as_nanos() / PART.as_nanos();
        let n_kept = usize::try_from(n_empty).unwrap_or(usize::MAX).min(MAX_PARTS);
        self.end = u32::try_from(n_empty + 1).ok().and_then(|n| end.checked_add(PART.checked_mul(n)?));
        self.ended.push_back(std::mem::take(&mut self.part));
        self.ended.extend(std::iter::repeat_n(RecentWork::default(), n_kept));
        self.ended.drain(..self.ended.len().saturating_sub(MAX_PARTS));
        let n_latest = n_latest(self.ended.make_contiguous())?;
        self.ended.drain(..self.ended.len().saturating_sub(n_latest));
        let mut since = RecentWork::sum(&self.ended);
        since.seen_s = PART.as_secs_f64() * n_latest as f64;
        Some(since)
    }
}

/// Number of the latest parts that are of another mix than those before, if it changed; of several the likeliest.
fn n_latest(parts: &[RecentWork]) -> Option<usize> {
    let changed = |n: &usize| {
        let (before, latest) = parts.split_at_checked(parts.len().checked_sub(*n)?)?;
        Some((*n, deviations(before, latest)?))
    };
    let found = LATEST_PARTS.iter().filter_map(changed);
    found.max_by(|(_, a), (_, b)| a.total_cmp(b)).map(|(n, _)| n)
}

/// Standard deviations by which encodes in the latest parts are more or fewer than by the mix before; `None` if it has not changed.
fn deviations(before: &[RecentWork], latest: &[RecentWork]) -> Option<f64> {
    if before.len() < LEAST_BEFORE {
        return None;
    }
    let (before_work, found) = (RecentWork::sum(before), RecentWork::sum(latest));
    let (share, found_share) = (encode_share(&before_work)?, encode_share(&found)?);
    if (found_share - share).abs() <= LEAST_DIFFERENCE {
        return None;
    }
    let excess = |work: &RecentWork| work.encodes_s - share * work.work_s();
    let before: Vec<f64> = before.iter().map(excess).collect();
    // What waits for a busy encoder makes parts alike, and the sums of neighbours differ by more than independent ones would.
    let of_parts = mean_square(before.iter().copied()) * latest.len() as f64;
    let of_neighbours = mean_square(before.windows(latest.len()).map(|parts| parts.iter().sum()));
    let of_mean = 1.0 + latest.len() as f64 / before.len() as f64;
    let deviation = (of_parts.max(of_neighbours) * of_mean).sqrt();
    let deviations = excess(&found).abs() / deviation;
    (deviations > LEAST_DEVIATIONS).then_some(deviations)
}

/// Part of encodes in them and the rows of steps; `None` where nothing was done.
fn encode_share(work: &RecentWork) -> Option<f64> {
    let work_s = work.work_s();
    (work_s > 0.0).then(|| work.encodes_s / work_s)
}

/// Mean of the squares; 0 of nothing.
fn mean_square(values: impl Iterator<Item = f64>) -> f64 {
    let (n, sum) = values.fold((0_u32, 0.0), |(n, sum), value| (n + 1, sum + value * value));
    sum / f64::from(n.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    /// Milliseconds of encodes and of steps; reported every 50 ms.
    fn run(
        parts: &mut WorkParts,
        now: &mut Instant,
        seconds: f64,
        report: &mut dyn FnMut() -> (f64, f64),
    ) -> Option<f64> {
        for n in 1..=(seconds * 20.0) as usize {
            *now += Duration::from_millis(50);
            let (part, since) = parts.at(*now);
            let (encodes_ms, steps_ms) = report();
            part.encodes_s += encodes_ms / 1e3;
            part.steps_s += steps_ms / 1e3;
            if since.is_some() {
                return Some(n as f64 / 20.0);
            }
        }
        None
    }

    /// Reports of requests that come at random, some of them with images.
    fn mix(rng: &mut StdRng, images: f64) -> (f64, f64) {
        let n_requests = (0..4).filter(|_| rng.random_bool(0.15)).count();
        let n_images = (0..n_requests).filter(|_| rng.random_bool(images)).count();
        (60.0 * n_images as f64, 60.0 * n_requests as f64)
    }

    #[test]
    fn a_mix_that_stays_does_not_change() {
        for images in [0.0, 0.2, 0.5, 0.9] {
            let (mut parts, mut now, mut rng) =
                (WorkParts::default(), Instant::now(), StdRng::seed_from_u64(7));
            let mut n_changes = 0;
            for _ in 0..20 {
                n_changes +=
                    usize::from(run(&mut parts, &mut now, 30.0, &mut || mix(&mut rng, images)).is_some());
            }
            assert!(n_changes <= 2, "{images}: {n_changes} in ten minutes");
        }
    }

    #[test]
    fn another_mix_is_noticed_within_two_seconds() {
        for (before, after) in [(0.5, 0.0), (0.0, 0.5), (0.9, 0.1), (0.1, 0.9)] {
            let (mut parts, mut now, mut rng) =
                (WorkParts::default(), Instant::now(), StdRng::seed_from_u64(7));
            run(&mut parts, &mut now, 30.0, &mut || mix(&mut rng, before));
            let noticed = run(&mut parts, &mut now, 30.0, &mut || mix(&mut rng, after));
            assert!(noticed.is_some_and(|seconds| seconds <= 2.0), "{before} to {after}: {noticed:?}");
        }
    }

    #[test]
    fn silence_and_clocks_that_jump_are_no_change() {
        let (mut parts, mut now) = (WorkParts::default(), Instant::now());
        assert_eq!(run(&mut parts, &mut now, 30.0, &mut || (10.0, 20.0)), None);
        assert_eq!(run(&mut parts, &mut now, 30.0, &mut || (0.0, 0.0)), None, "nothing to do");
        now += Duration::from_secs(1_000_000);
        assert_eq!(parts.at(now).1, None);
        assert!(parts.ended.len() <= MAX_PARTS);
        let earlier = now.checked_sub(Duration::from_secs(100)).unwrap();
        assert_eq!(parts.at(earlier).1, None);
    }
}
