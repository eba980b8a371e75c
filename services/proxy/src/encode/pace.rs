//! How long a job may take before a second one is worth its price.
//!
//! The workers say what an item costs them, as they measured it. Where they do not, what this proxy saw of its own jobs
//! has to do: the 95th percentile of the latest ones, whatever their size.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;
use triptych_core::{Modality, ModelName};

/// Jobs that are remembered for each model and kind of item.
const N_KEPT: usize = 64;
/// Fewer say nothing.
const N_ENOUGH: usize = 8;

/// What a job is expected to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// From being sent to READY, usually.
    pub usual: Duration,
    /// The same, for nineteen of twenty.
    pub p95: Duration,
}

/// Jobs as this proxy saw them.
#[derive(Debug, Default)]
pub struct Pace(Mutex<HashMap<(ModelName, Modality), VecDeque<Duration>>>);

impl Pace {
    /// A job took this long, from being sent to READY.
    pub fn saw(&self, model: &ModelName, modality: Modality, took: Duration) {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = seen.entry((model.clone(), modality)).or_default();
        if seen.len() == N_KEPT {
            seen.pop_front();
        }
        seen.push_back(took);
    }

    /// What the next one may take; `None` until enough were seen.
    pub fn predict(&self, model: &ModelName, modality: Modality) -> Option<Prediction> {
        let seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = seen.get(&(model.clone(), modality)).filter(|seen| seen.len() >= N_ENOUGH)?;
        let mut sorted: Vec<_> = seen.iter().copied().collect();
        sorted.sort_unstable();
        let at = |share: usize| sorted.get((sorted.len() - 1) * share / 100).copied();
        Some(Prediction { usual: at(50)?, p95: at(95)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_nothing_of_a_few_jobs_and_the_latest_count() {
        let (pace, model) = (Pace::default(), ModelName::new("vl"));
        let ms = Duration::from_millis;
        let predict = || pace.predict(&model, Modality::Image);
        for n in 1..=7 {
            pace.saw(&model, Modality::Image, ms(n));
        }
        assert_eq!(predict(), None);
        for n in 0..64 {
            pace.saw(&model, Modality::Image, ms(100 + n));
        }
        assert_eq!(predict(), Some(Prediction { usual: ms(131), p95: ms(159) }));
        assert_eq!(pace.predict(&model, Modality::Audio), None);
    }
}
