//! Several servers under the same load, in turns: what a bad minute does to one of them it does to all.
//!
//! In each round every server has one rate; all run it with the first seed, then all with the second, and so on. When the
//! round is over each server's own search says which rate is next for it. One whose search has ended sits out.

use crate::goodput::Tested;
use crate::result::{RateResult, SweepResult};
use crate::search::{Search, SearchPlan};
use crate::slo::Slo;
use crate::sweep::{Measured, News, Rates, Server, Sweep, SweepError, SweepSettings};
use crate::workload::Workload;

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

/// Lanes, and how far each is.
#[derive(Clone, Debug)]
pub struct Race {
    lanes: Vec<Course>,
    seeds: Vec<u64>,
}

/// The rates of a lane.
#[derive(Clone, Debug)]
enum Course {
    Search(Search),
    Listed(Vec<f64>, usize),
}

impl Course {
    fn next(&self) -> Option<f64> {
        match self {
            Self::Search(search) => search.next_rate(),
            Self::Listed(rates, i) => rates.get(*i).copied(),
        }
    }
}

impl Race {
    /// As many lanes with the same plan.
    pub fn new(n_lanes: usize, plan: SearchPlan, seeds: Vec<u64>) -> Self {
        Self { lanes: vec![Course::Search(Search::new(plan)); n_lanes], seeds }
    }

    /// As many lanes with the same rates.
    pub fn of_rates(n_lanes: usize, rates: &[f64], seeds: Vec<u64>) -> Self {
        Self { lanes: vec![Course::Listed(rates.to_vec(), 0); n_lanes], seeds }
    }

    /// The runs of the next round, in their order; none when all lanes have ended.
    pub fn round(&self) -> Vec<Turn> {
        let rates: Vec<_> = self.lanes.iter().map(Course::next).collect();
        let turn = |seed: u64| {
            let rates = rates.clone().into_iter().enumerate();
            rates.filter_map(move |(lane, rate)| Some(Turn { lane, rate: rate?, seed }))
        };
        self.seeds.iter().flat_map(|seed| turn(*seed)).collect()
    }

    /// What all runs of a lane's rate came to. True if that was its last one.
    pub fn record(&mut self, lane: usize, rate: f64, passed: bool) -> bool {
        let Some(course) = self.lanes.get_mut(lane) else { return true };
        match course {
            Course::Search(search) => search.record(rate, passed),
            Course::Listed(_, i) => *i += 1,
        }
        course.next().is_none()
    }
}

/// Who takes part.
#[derive(Clone)]
pub struct Entrant {
    /// How its processes are laid out: its name in news and results.
    pub topology: String,
    /// Where it is.
    pub server: Server,
}

/// Hears of a race.
pub trait Spectator: Sync {
    /// Something happened on a lane.
    fn news(&self, lane: usize, news: News<'_>);

    /// A lane has its result.
    fn result(&self, lane: usize, result: &SweepResult);
}

/// One lane's work.
struct Lane {
    sweep: Sweep,
    runs: Vec<Measured>,
    tested: Vec<Tested>,
    rates: Vec<RateResult>,
}

/// Measures the goodput of all servers for one workload.
///
/// # Errors
/// [`SweepError`] if one of them answers nothing at all.
pub async fn run_race(
    entrants: &[Entrant],
    (workload, slo): (&Workload, &Slo),
    settings: &SweepSettings,
    spectator: &dyn Spectator,
) -> Result<(), SweepError> {
    let mut lanes = Vec::new();
    for entrant in entrants {
        let settings = SweepSettings { topology: Some(entrant.topology.clone()), ..settings.clone() };
        let sweep = Sweep::begin(&entrant.server, workload, slo, &settings).await?;
        lanes.push(Lane { sweep, runs: Vec::new(), tested: Vec::new(), rates: Vec::new() });
    }
    let mut race = start(&lanes, settings);
    loop {
        let round = race.round();
        if round.is_empty() {
            return Ok(());
        }
        for turn in &round {
            let Some(lane) = lanes.get_mut(turn.lane) else { continue };
            if !lane.sweep.is_hopeless(&lane.runs) {
                let listener = |news: News<'_>| spectator.news(turn.lane, news);
                lane.runs.push(lane.sweep.run(turn.rate, turn.seed, &listener).await);
            }
        }
        for (i, lane) in lanes.iter_mut().enumerate() {
            let Some(rate) = lane.runs.first().map(|run| run.result.rate) else { continue };
            let (tested, result) = lane.sweep.judge(rate, std::mem::take(&mut lane.runs));
            spectator.news(i, News::Rate(&result));
            let is_over = race.record(i, rate, result.verdict.passed);
            lane.tested.push(tested);
            lane.rates.push(result);
            if is_over {
                spectator.result(i, &lane.sweep.result(&lane.tested, std::mem::take(&mut lane.rates)));
                lane.tested.clear();
            }
        }
    }
}

fn start(lanes: &[Lane], settings: &SweepSettings) -> Race {
    let seeds = settings.seeds.clone();
    match &settings.rates {
        Rates::Listed(rates) => Race::of_rates(lanes.len(), rates, seeds),
        Rates::Search { first, resolution } => {
            // The slowest one's safe rate is safe for all, and the same rates can be compared.
            let safe = lanes.iter().map(|lane| lane.sweep.safe_rate()).min_by(f64::total_cmp);
            let plan = crate::sweep::search_plan(*first, safe.unwrap_or(1.0), *resolution);
            Race::new(lanes.len(), plan, seeds)
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

    #[test]
    fn listed_rates_are_all_run_whatever_passes() {
        let mut race = Race::of_rates(1, &[2.0, 1.0], vec![7]);
        assert_eq!(race.round(), [Turn { lane: 0, rate: 2.0, seed: 7 }]);
        assert!(!race.record(0, 2.0, false));
        assert_eq!(race.round(), [Turn { lane: 0, rate: 1.0, seed: 7 }]);
        assert!(race.record(0, 1.0, true));
        assert!(race.round().is_empty());
    }
}
