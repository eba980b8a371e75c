//! Repeats, and what is kept of them.

use super::{Progress, micros};
use std::time::{Duration, Instant};

/// Within a round a place is measured again until so much time has passed, so that short ones have more samples.
const SLICE: Duration = Duration::from_millis(8);
/// But not more often than that.
const MOST: usize = 16;

/// How often each place is measured; once more before, to touch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds(usize);

/// Median and 95th percentile of a place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 95th percentile, in microseconds.
    pub p95_us: f64,
}

impl Rounds {
    /// At least one.
    pub fn new(n: usize) -> Self {
        Self(n.max(1))
    }

    /// How many.
    pub fn get(self) -> usize {
        self.0
    }

    /// Measures `places` in turn, so often; `part` is what progress is told.
    ///
    /// # Errors
    /// The first that `run` gives.
    pub fn measure<P, E>(
        self,
        places: &[P],
        (part, progress): (&'static str, Progress<'_>),
        mut run: impl FnMut(&P) -> Result<(), E>,
    ) -> Result<Vec<Spread>, E> {
        let mut times = vec![Vec::new(); places.len()];
        let all = places.len() * (self.0 + 1);
        for round in 0..=self.0 {
            for (i, place) in places.iter().enumerate() {
                progress(part, round * places.len() + i, all);
                let began = Instant::now();
                for _ in 0..MOST {
                    let start = Instant::now();
                    run(place)?;
                    if round > 0 {
                        times[i].push(micros(start.elapsed()));
                    }
                    if began.elapsed() > SLICE {
                        break;
                    }
                }
            }
        }
        progress(part, all, all);
        Ok(times.into_iter().map(Spread::of).collect())
    }
}

impl Spread {
    /// Of samples in microseconds; zero of none.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = samples.len().saturating_sub(1);
            samples.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
        };
        Self { p50_us: at(0.5), p95_us: at(0.95) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn places_take_turns_and_the_first_turn_does_not_count() {
        let order = RefCell::new(Vec::new());
        let told = RefCell::new(Vec::new());
        let progress = |_: &'static str, done: usize, of: usize| told.borrow_mut().push((done, of));
        let spreads = Rounds::new(2).measure(&["a", "b"], ("x", &progress), |place| {
            order.borrow_mut().push(*place);
            std::thread::sleep(SLICE + Duration::from_millis(1));
            Ok::<_, ()>(())
        });
        assert_eq!(order.into_inner().concat(), "ababab");
        assert_eq!(told.into_inner().last(), Some(&(6, 6)));
        assert!(spreads.unwrap().iter().all(|s| s.p95_us >= s.p50_us && s.p50_us > 0.0));
    }

    #[test]
    fn median_and_percentile_of_known_samples() {
        let samples: Vec<f64> = (1..=101).rev().map(f64::from).collect();
        assert_eq!(Spread::of(samples), Spread { p50_us: 51.0, p95_us: 96.0 });
        assert_eq!(Spread::of(Vec::new()), Spread { p50_us: 0.0, p95_us: 0.0 });
    }
}
