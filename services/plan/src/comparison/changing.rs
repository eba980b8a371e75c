//! A demand whose mix changes: several demands in turn, each for the same time.

use crate::planner::demand::Requests;
use crate::planner::{Demand, Named};
use std::time::Duration;
use triptych_bench::seed::mix;

/// A demand among those that take turns.
#[derive(Clone, Debug)]
pub struct Mix {
    /// Offered requests.
    pub demand: Named,
    /// Rate of it, over the others' weights: a mix of heavy requests has a small one.
    pub weight: f64,
}

/// Several demands in turn.
#[derive(Clone, Debug)]
pub struct Changing {
    mixes: Vec<Mix>,
    period: Duration,
}

/// A day without requests, or with one that takes no time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("every mix of a changing demand needs a weight above 0, and a period above 0")]
pub struct EmptyDay;

impl Changing {
    /// Mixes in turn, each for `period`.
    ///
    /// # Errors
    /// [`EmptyDay`] if there is no mix, or one has no weight.
    pub fn new(mut mixes: Vec<Mix>, period: Duration) -> Result<Self, EmptyDay> {
        let mean = mixes.iter().map(|mix| mix.weight).sum::<f64>() / mixes.len() as f64;
        let is_weight = |weight: f64| weight.is_finite() && weight > 0.0;
        if !mixes.iter().all(|mix| is_weight(mix.weight)) || !is_weight(mean) || period.is_zero() {
            return Err(EmptyDay);
        }
        mixes.iter_mut().for_each(|mix| mix.weight /= mean);
        Ok(Self { mixes, period })
    }

    /// Time until the first mix comes again.
    pub fn cycle(&self) -> Duration {
        self.period.saturating_mul(u32::try_from(self.mixes.len()).unwrap_or(u32::MAX))
    }
}

impl Demand for Changing {
    fn name(&self) -> String {
        let names: Vec<_> = self.mixes.iter().map(|mix| mix.demand.workload.text()).collect();
        format!("{} in turn, {} s each", names.join(", "), self.period.as_secs_f64())
    }

    fn requests(&self, rate: f64, seed: u64) -> Requests<'_> {
        let turns = (0_u32..).zip(self.mixes.iter().cycle());
        let requests = turns.flat_map(move |(turn, each)| {
            let offered = each.demand.requests(rate * each.weight, mix(seed ^ u64::from(turn)));
            let content = mix(u64::from(turn));
            offered.take_while(|offered| offered.at < self.period).map(move |mut offered| {
                offered.at = offered.at.saturating_add(self.period.saturating_mul(turn));
                // Items of one turn are not those of another.
                offered.items.iter_mut().for_each(|item| item.content ^= content);
                offered
            })
        });
        Box::new((0..).zip(requests).map(|(index, mut offered)| {
            offered.index = index;
            offered
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_bench::arrivals::Arrivals;
    use triptych_bench::workload::Workload;

    fn of(workload: &str, weight: f64) -> Mix {
        let workload = Workload::parse(workload).unwrap();
        Mix { demand: Named { workload, arrivals: Arrivals::Constant }, weight }
    }

    #[test]
    fn mixes_take_turns_at_rates_by_their_weights() {
        let period = Duration::from_secs(10);
        let day = Changing::new(vec![of("text", 3.0), of("epd-short:images=2", 1.0)], period).unwrap();
        assert_eq!(day.cycle(), Duration::from_secs(20));
        let requests: Vec<_> = day.requests(4.0, 1).take_while(|r| r.at < day.cycle() * 2).collect();
        assert!(
            requests.windows(2).all(|pair| pair[0].at <= pair[1].at && pair[0].index + 1 == pair[1].index)
        );
        let turn = |n: u32| {
            requests
                .iter()
                .filter(move |r| r.at / n.max(1) >= Duration::ZERO && r.at.as_secs() / 10 == u64::from(n))
        };
        for (n, rate, items) in [(0, 6, 0), (1, 2, 2), (2, 6, 0), (3, 2, 2)] {
            let found: Vec<_> = turn(n).collect();
            assert!(found.len().abs_diff(rate * 10) <= 1, "turn {n}: {}", found.len());
            assert!(found.iter().all(|r| r.items.len() == items), "turn {n}");
        }
        let mut contents: Vec<_> = requests.iter().flat_map(|r| &r.items).map(|item| item.content).collect();
        let n = contents.len();
        contents.sort_unstable();
        contents.dedup();
        assert_eq!(contents.len(), n, "nothing is repeated");
        assert_eq!(day.requests(4.0, 1).take(99).collect::<Vec<_>>(), requests[..99]);
    }

    #[test]
    fn a_day_without_requests_is_refused() {
        let period = Duration::from_secs(1);
        for mixes in [
            vec![],
            vec![of("text", 0.0)],
            vec![of("text", f64::NAN)],
            vec![of("text", 1.0), of("text", -1.0)],
        ] {
            assert_eq!(Changing::new(mixes, period).unwrap_err(), EmptyDay);
        }
        assert_eq!(Changing::new(vec![of("text", 1.0)], Duration::ZERO).unwrap_err(), EmptyDay);
    }
}
