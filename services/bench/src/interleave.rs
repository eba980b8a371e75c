//! Several servers compared under the same load, one run at a time in turn, so that a disturbance hits all alike.
//!
//! In each round every server has one rate. All run it with the first seed, then all with the second, and so on. Where runs are cut
//! into blocks, all run the first block, then all the second, and who is first changes from block to block. After the round each
//! server's own search gives its next rate; a server whose rate needs fewer runs ([`SweepSettings::until_clear`]), or is not repeated
//! ([`repeat`]), waits for the others. A server that passes has the seeds of others for which the same rate is open, in this round or
//! in one before: what a seed offers differs by chance, and two clusters that are as good are not told apart by the seeds that they
//! happened to need. When all searches have ended, a server runs the rates at which others have their goodput, where these lie between
//! what it passes and what it fails, so that the rates that searches happened to try do not tell them apart either. Runs that the
//! observer has kept are not measured again.

use crate::blocks::{Block, RunKey};
use crate::goodput::Tested;
use crate::rates::{Rates, Steps};
use crate::repeat;
use crate::result::{RateResult, SweepResult};
use crate::search::Trial;
use crate::sweep::{Measured, OfferedLoad, Server, Sweep, SweepError, SweepEvent, SweepSettings};

/// One run of a round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScheduledRun {
    /// Index of the server.
    pub lane: usize,
    /// The run, or the block of one.
    pub key: RunKey,
}

/// The schedule of all servers; a lane is the sequence of rates of one server.
#[derive(Clone, Debug)]
pub struct InterleavedSchedule {
    lanes: Vec<Steps>,
    seeds: Vec<u64>,
}

impl InterleavedSchedule {
    /// A schedule of `n_lanes` lanes that all begin with `steps`.
    pub fn new(n_lanes: usize, steps: &Steps, seeds: Vec<u64>) -> Self {
        Self { lanes: vec![steps.clone(); n_lanes], seeds }
    }

    /// Runs of the next round in their order; empty when all lanes have ended. `n_blocks` gives the blocks of a run of a lane at a rate.
    pub fn round(&self, n_blocks: impl Fn(usize, f64) -> u32) -> Vec<ScheduledRun> {
        let next = (0..self.lanes.len()).filter_map(|lane| Some((lane, self.next(lane)?)));
        let lanes: Vec<_> = next.map(|(lane, rate)| (lane, rate, n_blocks(lane, rate).max(1))).collect();
        let most = lanes.iter().map(|(_, _, n)| *n).max().unwrap_or(0);
        let mut runs = Vec::new();
        for &seed in &self.seeds {
            for idx in 0..most {
                let mut turn = lanes.clone();
                turn.rotate_left(idx as usize % lanes.len().max(1));
                let has_block = turn.into_iter().filter(|(_, _, n)| idx < *n);
                runs.extend(has_block.map(|(lane, rate, n)| ScheduledRun {
                    lane,
                    key: RunKey { rate, seed, block: Block { idx, n } },
                }));
            }
        }
        runs
    }

    /// The next rate of a lane: its search's, or when all searches have ended the highest goodput of another that it leaves open.
    fn next(&self, lane: usize) -> Option<f64> {
        let own = self.lanes.get(lane)?;
        if self.lanes.iter().any(|steps| steps.next().is_some()) {
            return own.next();
        }
        let own = own.search()?;
        let others = self.lanes.iter().filter_map(|steps| steps.search()?.goodput());
        let open = others.filter(|goodput| own.leaves_open(goodput));
        open.max_by(|a, b| a.offered.total_cmp(&b.offered)).map(|goodput| goodput.asked)
    }

    /// Records the verdict on a lane's rate.
    pub fn record(&mut self, lane: usize, trial: Trial) {
        if let Some(steps) = self.lanes.get_mut(lane) {
            steps.record(trial);
        }
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

    /// The result of a lane, when all have ended.
    fn result(&self, lane: usize, result: &SweepResult);

    /// A run of a lane that was measured before, and is not measured again.
    fn kept(&self, _lane: usize, _key: &RunKey) -> Option<Measured> {
        None
    }

    /// A run that was measured.
    fn measured(&self, _lane: usize, _key: &RunKey, _measured: &Measured) {}

    /// The first rate of all searches, where none is given: `chosen`, or the one that was chosen before.
    fn first_rate(&self, chosen: f64) -> f64 {
        chosen
    }
}

/// Runs and results of one lane so far.
struct Lane {
    sweep: Sweep,
    runs: Vec<Measured>,
    tested: Vec<Tested>,
    rates: Vec<RateResult>,
}

impl Lane {
    /// True if its rate needs a further run: for its own verdict, or because another that it is compared with needs one.
    fn needs(&self, rate: f64, open: &[f64]) -> bool {
        !self.sweep.is_decided(&self.runs) || open.contains(&rate) && self.sweep.passes(&self.runs)
    }

    /// True if a rate that was judged in an earlier round has a run of this one's rate and seed.
    fn has_run(&self, key: &RunKey) -> bool {
        let of_rate = self.rates.iter().filter(|judged| judged.rate == key.rate);
        of_rate.flat_map(|judged| &judged.runs).any(|run| run.seed == key.seed)
    }
}

/// Rates of a seed's runs for which a lane needs that seed, or needed it in an earlier round; none for a seed of a repetition.
fn open_rates(lanes: &[Lane], of_seed: &[ScheduledRun], seeds: &[u64]) -> Vec<f64> {
    let is_open = |run: &ScheduledRun| {
        let own = lanes.get(run.lane);
        own.is_some_and(|lane| !lane.sweep.is_decided(&lane.runs))
            || lanes.iter().any(|lane| lane.has_run(&run.key))
    };
    let open = of_seed.iter().filter(|run| seeds.contains(&run.key.seed) && is_open(run));
    open.map(|run| run.key.rate).collect()
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
    let mut schedule = start(&lanes, settings, observer);
    loop {
        let round = schedule.round(|lane, rate| lanes.get(lane).map_or(1, |lane| lane.sweep.n_blocks(rate)));
        if round.is_empty() {
            break;
        }
        for of_seed in round.chunk_by(|a, b| a.key.seed == b.key.seed) {
            let open = open_rates(&lanes, of_seed, &settings.seeds);
            for scheduled in of_seed {
                let Some(lane) = lanes.get_mut(scheduled.lane) else { continue };
                if lane.needs(scheduled.key.rate, &open) {
                    lane.runs.push(run_one(lane, scheduled, observer).await);
                }
            }
        }
        for (i, lane) in lanes.iter_mut().enumerate() {
            let Some(rate) = lane.runs.first().map(|run| run.result.rate) else { continue };
            let (tested, result) = lane.sweep.judge(rate, std::mem::take(&mut lane.runs));
            observer.event(i, SweepEvent::Rate(&result));
            schedule.record(i, result.trial());
            lane.tested.push(tested);
            lane.rates.push(result);
        }
    }
    for (i, lane) in lanes.into_iter().enumerate() {
        observer.result(i, &lane.sweep.result(&lane.tested, lane.rates));
    }
    Ok(())
}

/// The run as it was kept, or else measured.
async fn run_one(lane: &Lane, scheduled: &ScheduledRun, observer: &dyn SweepObserver) -> Measured {
    let ScheduledRun { lane: idx, key } = scheduled;
    if let Some(kept) = observer.kept(*idx, key) {
        return kept;
    }
    let listener = |event: SweepEvent<'_>| observer.event(*idx, event);
    let measured = lane.sweep.run(*key, &listener).await;
    observer.measured(*idx, key, &measured);
    measured
}

fn start(lanes: &[Lane], settings: &SweepSettings, observer: &dyn SweepObserver) -> InterleavedSchedule {
    // The safe rate of the slowest server is safe for all, and the same rates can be compared.
    let safe = lanes.iter().map(|lane| lane.sweep.safe_rate()).min_by(f64::total_cmp).unwrap_or(1.0);
    let safe = match &settings.rates {
        Rates::Search { first: None, .. } => observer.first_rate(safe),
        _ => safe,
    };
    InterleavedSchedule::new(
        lanes.len(),
        &Steps::new(&settings.rates, safe),
        repeat::all_seeds(&settings.seeds),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::search::Search;

    /// A rate that was offered as it was asked for.
    fn exact(rate: f64, passed: bool) -> Trial {
        Trial { asked: rate, offered: rate, passed }
    }

    #[test]
    fn lanes_run_interleaved_until_each_search_has_ended() {
        let goodput = [3.0, 11.0];
        let steps = Steps::new(&Rates::Search { first: None, resolution: 0.2 }, 4.0);
        let mut schedule = InterleavedSchedule::new(2, &steps, vec![1, 2]);
        let mut n_rounds = 0;
        let mut last_pass = [0.0f64; 2];
        loop {
            let round = schedule.round(|_, _| 1);
            if round.is_empty() {
                break;
            }
            let order: Vec<_> = round.iter().map(|run| (run.key.seed, run.lane)).collect();
            assert!(order.is_sorted(), "all lanes with one seed before the next: {order:?}");
            for lane in 0..2 {
                let own: Vec<_> = round.iter().filter(|run| run.lane == lane).collect();
                assert!(own.is_empty() || own.len() == 2 && own[0].key.rate == own[1].key.rate, "{own:?}");
                if let Some(run) = own.first() {
                    let rate = run.key.rate;
                    let passed = rate <= goodput[lane];
                    if passed {
                        last_pass[lane] = last_pass[lane].max(rate);
                    }
                    schedule.record(lane, exact(rate, passed));
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
    fn lanes_that_are_as_good_end_at_the_same_rate() {
        let steps = Steps::new(&Rates::Search { first: None, resolution: 0.3 }, 4.0);
        let mut schedule = InterleavedSchedule::new(3, &steps, vec![1]);
        // Chance offers the second less at its second rate, so its search tries others than the first's from there on.
        let offered = |lane: usize, asked: f64, n_tried: usize| match (lane, n_tried) {
            (1, 1) => asked * 0.93,
            _ => asked,
        };
        let capacity = [9.3, 9.3, 3.0];
        let mut tried = [const { Vec::new() }; 3];
        loop {
            let round = schedule.round(|_, _| 1);
            if round.is_empty() {
                break;
            }
            for ScheduledRun { lane, key } in round {
                let offered = offered(lane, key.rate, tried[lane].len());
                assert!(!tried[lane].contains(&key.rate), "lane {lane}: {} again", key.rate);
                tried[lane].push(key.rate);
                schedule.record(lane, Trial { asked: key.rate, offered, passed: offered <= capacity[lane] });
            }
        }
        let goodput = |lane: usize| schedule.lanes[lane].search().and_then(Search::goodput).map(|t| t.asked);
        assert_eq!(goodput(0), goodput(1), "{tried:?}");
        assert_eq!(
            goodput(0),
            tried[0].last().copied(),
            "the second's, which the search of the first had not tried"
        );
        assert!(
            goodput(2).is_some_and(|rate| rate <= 3.0) && tried[2].iter().all(|rate| *rate <= 4.0),
            "{tried:?}"
        );
    }

    fn of_rates(n_lanes: usize, rates: &[f64]) -> InterleavedSchedule {
        InterleavedSchedule::new(n_lanes, &Steps::new(&Rates::Listed(rates.to_vec()), 1.0), vec![7])
    }

    #[test]
    fn listed_rates_are_all_run_whether_they_pass_or_not() {
        let mut schedule = of_rates(1, &[2.0, 1.0]);
        let run = |rate| ScheduledRun { lane: 0, key: RunKey { rate, seed: 7, block: Block::WHOLE } };
        assert_eq!(schedule.round(|_, _| 1), [run(2.0)]);
        schedule.record(0, exact(2.0, false));
        assert_eq!(schedule.round(|_, _| 1), [run(1.0)]);
        schedule.record(0, exact(1.0, true));
        assert!(schedule.round(|_, _| 1).is_empty());
    }

    #[test]
    fn brackets_begin_at_the_same_rate_for_all() {
        let goodput = [2.5, 3.5, 1.5];
        let steps = Steps::new(&Rates::Bracketed(vec![1.0, 2.0, 3.0, 4.0, 5.0]), 1.0);
        let mut schedule = InterleavedSchedule::new(3, &steps, vec![7]);
        let mut rounds = Vec::new();
        loop {
            let round: Vec<_> = schedule.round(|_, _| 1).iter().map(|run| (run.lane, run.key.rate)).collect();
            if round.is_empty() {
                break;
            }
            for &(lane, rate) in &round {
                schedule.record(lane, exact(rate, rate <= goodput[lane]));
            }
            rounds.push(round);
        }
        let expect = [vec![(0, 3.0), (1, 3.0), (2, 3.0)], vec![(0, 2.0), (1, 4.0), (2, 2.0)], vec![(2, 1.0)]];
        assert_eq!(rounds, expect);
    }

    #[test]
    fn blocks_take_turns_and_so_does_who_is_first() {
        let schedule = of_rates(3, &[2.0]);
        let round = schedule.round(|lane, _| if lane == 2 { 1 } else { 3 });
        let order: Vec<_> = round.iter().map(|run| (run.key.block.idx, run.lane)).collect();
        assert_eq!(order, [(0, 0), (0, 1), (0, 2), (1, 1), (1, 0), (2, 0), (2, 1)]);
    }
}
