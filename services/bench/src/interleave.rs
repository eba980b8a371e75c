//! Several servers compared under the same load, one run at a time in turn, so that a disturbance hits all alike.
//!
//! In each round every server has one rate. All run it with the first seed, then all with the second, and so on. After the
//! round each server's own search gives its next rate. A server whose search has ended has no more runs.

use crate::goodput::Tested;
use crate::result::{RateResult, SweepResult};
use crate::search::{Search, SearchPlan, Trial};
use crate::sweep::{Measured, OfferedLoad, Rates, Server, Sweep, SweepError, SweepEvent, SweepSettings};

/// One run of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduledRun {
    /// Index of the server.
    pub lane: usize,
    /// Requests a second.
    pub rate: f64,
    /// Seed of the workload.
    pub seed: u64,
}

/// The schedule of all servers; a lane is the sequence of rates of one server.
#[derive(Clone, Debug)]
pub struct InterleavedSchedule {
    lanes: Vec<LaneRates>,
    seeds: Vec<u64>,
}

/// Rates of one lane.
#[derive(Clone, Debug)]
enum LaneRates {
    Search(Search),
    Listed(Vec<f64>, usize),
}

impl LaneRates {
    fn next(&self) -> Option<f64> {
        match self {
            Self::Search(search) => search.next_rate(),
            Self::Listed(rates, i) => rates.get(*i).copied(),
        }
    }
}

impl InterleavedSchedule {
    /// A schedule of `n_lanes` searches with the same plan.
    pub fn new(n_lanes: usize, plan: SearchPlan, seeds: Vec<u64>) -> Self {
        Self { lanes: vec![LaneRates::Search(Search::new(plan)); n_lanes], seeds }
    }

    /// A schedule of `n_lanes` lanes with the same rates.
    pub fn of_rates(n_lanes: usize, rates: &[f64], seeds: Vec<u64>) -> Self {
        Self { lanes: vec![LaneRates::Listed(rates.to_vec(), 0); n_lanes], seeds }
    }

    /// Runs of the next round in their order; empty when all lanes have ended.
    pub fn round(&self) -> Vec<ScheduledRun> {
        let rates: Vec<_> = self.lanes.iter().map(LaneRates::next).collect();
        let runs = |seed: u64| {
            let rates = rates.clone().into_iter().enumerate();
            rates.filter_map(move |(lane, rate)| Some(ScheduledRun { lane, rate: rate?, seed }))
        };
        self.seeds.iter().flat_map(|seed| runs(*seed)).collect()
    }

    /// Records the verdict on a lane's rate; true if that was its last rate.
    pub fn record(&mut self, lane: usize, trial: Trial) -> bool {
        let Some(rates) = self.lanes.get_mut(lane) else { return true };
        match rates {
            LaneRates::Search(search) => search.record(trial),
            LaneRates::Listed(_, i) => *i += 1,
        }
        rates.next().is_none()
    }
}

/// A server that is compared.
#[derive(Clone)]
pub struct ComparedServer {
    /// Layout of its processes: its name in events and results.
    pub topology: String,
    /// Target and metrics.
    pub server: Server,
}

/// Observer of an interleaved sweep.
pub trait SweepObserver: Sync {
    /// An event of one lane.
    fn event(&self, lane: usize, event: SweepEvent<'_>);

    /// The result of a lane that has ended.
    fn result(&self, lane: usize, result: &SweepResult);
}

/// Runs and results of one lane so far.
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
pub async fn run_interleaved(
    servers: &[ComparedServer],
    load: &OfferedLoad<'_>,
    settings: &SweepSettings,
    observer: &dyn SweepObserver,
) -> Result<(), SweepError> {
    let mut lanes = Vec::new();
    for compared in servers {
        let settings = SweepSettings { topology: Some(compared.topology.clone()), ..settings.clone() };
        let sweep = Sweep::begin(&compared.server, load.workload, load.slo, &settings).await?;
        lanes.push(Lane { sweep, runs: Vec::new(), tested: Vec::new(), rates: Vec::new() });
    }
    let mut schedule = start(&lanes, settings);
    loop {
        let round = schedule.round();
        if round.is_empty() {
            return Ok(());
        }
        for scheduled in &round {
            let Some(lane) = lanes.get_mut(scheduled.lane) else { continue };
            if !lane.sweep.is_hopeless(&lane.runs) {
                let listener = |event: SweepEvent<'_>| observer.event(scheduled.lane, event);
                lane.runs.push(lane.sweep.run(scheduled.rate, scheduled.seed, &listener).await);
            }
        }
        for (i, lane) in lanes.iter_mut().enumerate() {
            let Some(rate) = lane.runs.first().map(|run| run.result.rate) else { continue };
            let (tested, result) = lane.sweep.judge(rate, std::mem::take(&mut lane.runs));
            observer.event(i, SweepEvent::Rate(&result));
            let trial = Trial { asked: rate, offered: result.offered(), passed: result.verdict.passed };
            let is_over = schedule.record(i, trial);
            lane.tested.push(tested);
            lane.rates.push(result);
            if is_over {
                observer.result(i, &lane.sweep.result(&lane.tested, std::mem::take(&mut lane.rates)));
                lane.tested.clear();
            }
        }
    }
}

fn start(lanes: &[Lane], settings: &SweepSettings) -> InterleavedSchedule {
    let seeds = settings.seeds.clone();
    match &settings.rates {
        Rates::Listed(rates) => InterleavedSchedule::of_rates(lanes.len(), rates, seeds),
        Rates::Search { first, resolution } => {
            // The safe rate of the slowest server is safe for all, and the same rates can be compared.
            let safe = lanes.iter().map(|lane| lane.sweep.safe_rate()).min_by(f64::total_cmp);
            let plan = crate::sweep::search_plan(*first, safe.unwrap_or(1.0), *resolution);
            InterleavedSchedule::new(lanes.len(), plan, seeds)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rate that was offered as it was asked for.
    fn exact(rate: f64, passed: bool) -> Trial {
        Trial { asked: rate, offered: rate, passed }
    }

    #[test]
    fn lanes_run_interleaved_until_each_search_has_ended() {
        let goodput = [3.0, 11.0];
        let mut schedule = InterleavedSchedule::new(2, SearchPlan::from(4.0, 0.2), vec![1, 2]);
        let mut n_rounds = 0;
        let mut last_pass = [0.0f64; 2];
        loop {
            let round = schedule.round();
            if round.is_empty() {
                break;
            }
            let order: Vec<_> = round.iter().map(|run| (run.seed, run.lane)).collect();
            assert!(order.is_sorted(), "all lanes with one seed before the next: {order:?}");
            for lane in 0..2 {
                let own: Vec<_> = round.iter().filter(|run| run.lane == lane).collect();
                assert!(own.is_empty() || own.len() == 2 && own[0].rate == own[1].rate, "{own:?}");
                if let Some(run) = own.first() {
                    let passed = run.rate <= goodput[lane];
                    if passed {
                        last_pass[lane] = last_pass[lane].max(run.rate);
                    }
                    schedule.record(lane, exact(run.rate, passed));
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
    fn listed_rates_are_all_run_whether_they_pass_or_not() {
        let mut schedule = InterleavedSchedule::of_rates(1, &[2.0, 1.0], vec![7]);
        assert_eq!(schedule.round(), [ScheduledRun { lane: 0, rate: 2.0, seed: 7 }]);
        assert!(!schedule.record(0, exact(2.0, false)));
        assert_eq!(schedule.round(), [ScheduledRun { lane: 0, rate: 1.0, seed: 7 }]);
        assert!(schedule.record(0, exact(1.0, true)));
        assert!(schedule.round().is_empty());
    }
}
