//! Repeated measurements of points.

use super::progress::{Progress, micros};
use crate::curves::Spread;
use std::time::{Duration, Instant};

/// Within a round a point is measured again until so much time has passed, so that short ones have more samples.
const SLICE: Duration = Duration::from_millis(8);
/// But not more often than that.
const MOST: usize = 16;

/// Number of repeats of each point; one more before them warms up memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds(usize);

impl Rounds {
    /// At least one repeat.
    pub fn new(n: usize) -> Self {
        Self(n.max(1))
    }

    /// Number of repeats.
    pub fn get(self) -> usize {
        self.0
    }

    /// Measures all points in turn, `n` times; `part` is the name for progress.
    ///
    /// # Errors
    /// The first that `run` gives.
    pub fn measure<P, E>(
        self,
        points: &[P],
        (part, progress): (&'static str, Progress<'_>),
        mut run: impl FnMut(&P) -> Result<(), E>,
    ) -> Result<Vec<Spread>, E> {
        let mut times = vec![Vec::new(); points.len()];
        let all = points.len() * (self.0 + 1);
        for round in 0..=self.0 {
            for (i, point) in points.iter().enumerate() {
                progress(part, round * points.len() + i, all);
                let began = Instant::now();
                for _ in 0..MOST {
                    let start = Instant::now();
                    run(point)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn places_take_turns_and_the_first_turn_does_not_count() {
        let order = RefCell::new(Vec::new());
        let reported = RefCell::new(Vec::new());
        let progress = |_: &'static str, done: usize, of: usize| reported.borrow_mut().push((done, of));
        let spreads = Rounds::new(2).measure(&["a", "b"], ("x", &progress), |point| {
            order.borrow_mut().push(*point);
            std::thread::sleep(SLICE + Duration::from_millis(1));
            Ok::<_, ()>(())
        });
        assert_eq!(order.into_inner().concat(), "ababab");
        assert_eq!(reported.into_inner().last(), Some(&(6, 6)));
        assert!(spreads.unwrap().iter().all(|s| s.p95_us >= s.p50_us && s.p50_us > 0.0));
    }

    #[test]
    fn median_and_percentile_of_known_samples() {
        let samples: Vec<f64> = (1..=101).rev().map(f64::from).collect();
        assert_eq!(Spread::of(samples), Spread { p50_us: 51.0, p95_us: 96.0 });
        assert_eq!(Spread::of(Vec::new()), Spread { p50_us: 0.0, p95_us: 0.0 });
    }
}
