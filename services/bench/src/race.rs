//! Several searches in turns: what a bad minute does to one of them it does to all.
//!
//! In each round every lane has one rate; all lanes run it with the first seed, then all with the second, and so on. When
//! the round is over each lane's search says which rate is next. A lane whose search has ended sits out.

use crate::search::{Search, SearchPlan};

/// One run that is to be made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Turn {
    /// For which lane.
    pub lane: usize,
    /// At which rate.
    pub rate: f64,
    /// With which seed.
    pub seed: u64,
}

/// Lanes and their searches.
#[derive(Clone, Debug)]
pub struct Race {
    lanes: Vec<Search>,
    seeds: Vec<u64>,
}

impl Race {
    /// As many lanes with the same plan.
    pub fn new(n_lanes: usize, plan: SearchPlan, seeds: Vec<u64>) -> Self {
        Self { lanes: vec![Search::new(plan); n_lanes], seeds }
    }

    /// The runs of the next round, in their order; none when all searches have ended.
    pub fn round(&self) -> Vec<Turn> {
        let rates: Vec<_> = self.lanes.iter().map(Search::next_rate).collect();
        let turn = |seed: u64| {
            let rates = rates.iter().enumerate();
            rates.filter_map(move |(lane, rate)| Some(Turn { lane, rate: (*rate)?, seed }))
        };
        self.seeds.iter().flat_map(|seed| turn(*seed)).collect()
    }

    /// What all runs of a lane's rate came to.
    pub fn record(&mut self, lane: usize, rate: f64, passed: bool) {
        if let Some(search) = self.lanes.get_mut(lane) {
            search.record(rate, passed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_take_turns_until_each_has_its_answer() {
        let goodput = [3.0, 11.0];
        let mut race = Race::new(2, SearchPlan::from(4.0, 0.2), vec![1, 2]);
        let mut n_rounds = 0;
        let mut last_pass = [0.0f64; 2];
        loop {
            let round = race.round();
            if round.is_empty() {
                break;
            }
            let order: Vec<_> = round.iter().map(|turn| (turn.seed, turn.lane)).collect();
            assert!(order.is_sorted(), "all lanes with one seed before the next: {order:?}");
            for lane in 0..2 {
                let own: Vec<_> = round.iter().filter(|turn| turn.lane == lane).collect();
                assert!(own.is_empty() || own.len() == 2 && own[0].rate == own[1].rate, "{own:?}");
                if let Some(turn) = own.first() {
                    let passed = turn.rate <= goodput[lane];
                    if passed {
                        last_pass[lane] = last_pass[lane].max(turn.rate);
                    }
                    race.record(lane, turn.rate, passed);
                }
            }
            n_rounds += 1;
        }
        assert!(n_rounds < 12);
        for (found, goodput) in last_pass.into_iter().zip(goodput) {
            assert!(found <= goodput && found * 1.21 > goodput, "{found} of {goodput}");
        }
    }
}
