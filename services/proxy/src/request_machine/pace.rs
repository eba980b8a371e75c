//! Times of the latest jobs, for workers that have not measured what an item costs them.
//!
//! Workers report what an item costs them, as they measured it. Until they do, the p95 of the jobs that this proxy saw
//! has to do, whatever their size.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;
use triptych_core::{EncoderId, ModelName};

/// Jobs that are remembered for each encoder of a model.
const N_KEPT: usize = 64;
/// Fewer say nothing.
const N_ENOUGH: usize = 8;

/// Time that a job is expected to take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// From being sent to READY, usually.
    pub usual: Duration,
    /// The same at the 95th percentile.
    pub p95: Duration,
}

/// Jobs as this proxy saw them.
#[derive(Debug, Default)]
pub struct Pace(HashMap<(ModelName, EncoderId), VecDeque<Duration>>);

impl Pace {
    /// A job took this long, from being sent to READY.
    pub fn saw(&mut self, model: &ModelName, encoder: EncoderId, took: Duration) {
        let seen = self.0.entry((model.clone(), encoder)).or_default();
        if seen.len() == N_KEPT {
            seen.pop_front();
        }
        seen.push_back(took);
    }

    /// Prediction for the next one; `None` until enough were seen.
    pub fn predict(&self, model: &ModelName, encoder: EncoderId) -> Option<Prediction> {
        let seen = self.0.get(&(model.clone(), encoder)).filter(|seen| seen.len() >= N_ENOUGH)?;
        let mut sorted: Vec<_> = seen.iter().copied().collect();
        sorted.sort_unstable();
        let at = |share: usize| sorted.get((sorted.len() - 1) * share / 100).copied();
        Some(Prediction { usual: at(50)?, p95: at(95)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::{Modality, TowerIdx};

    #[test]
    fn a_few_jobs_predict_nothing_and_the_latest_count() {
        let (mut pace, model) = (Pace::default(), ModelName::new("vl"));
        let ms = Duration::from_millis;
        let image = EncoderId::from(Modality::Image);
        for n in 1..=7 {
            pace.saw(&model, image, ms(n));
        }
        assert_eq!(pace.predict(&model, image), None);
        for n in 0..64 {
            pace.saw(&model, image, ms(100 + n));
        }
        let expect = Prediction { usual: ms(131), p95: ms(159) };
        assert_eq!(pace.predict(&model, image), Some(expect));
        for other in [Modality::Audio.into(), EncoderId { tower: TowerIdx(1), ..image }] {
            assert_eq!(pace.predict(&model, other), None);
        }
    }
}
