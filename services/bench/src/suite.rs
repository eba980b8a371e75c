//! The suite of the claim: disaggregated encode, prefill and decode against colocated workers with the same cores, over the
//! workloads on which it should win and those on which it should not.
//!
//! Each run, or block of one, is kept as soon as it has ended, and each result, of one workload at one topology, as soon as it is known.
//! A suite that was interrupted, by whatever means, goes on behind the last run.

mod estimate;
mod results;
mod runs;
mod workloads;

pub use estimate::{Size, estimate, readable};
pub use results::Results;
pub use runs::{RunOf, StoredRuns};
pub use workloads::{TOPOLOGIES, quick_workloads, workloads};

use crate::blocks::RunKey;
use crate::cluster::{ClusterStarter, RunningCluster};
use crate::error::MeasureError;
use crate::interleave::SweepObserver;
use crate::rates::{Bracketing, Rates};
use crate::result::{Host, RateResult, SweepResult};
use crate::search::SearchPlan;
use crate::seed::mix;
use crate::side_by_side::SideBySide;
use crate::slo::Slo;
use crate::sweep::{Measured, OfferedLoad, SweepEvent, SweepSettings};
use crate::topology::Topology;
use crate::workload::Workload;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Observer of a suite.
pub trait SuiteObserver: Sync {
    /// A line of progress.
    fn line(&self, text: &str);

    /// A result was stored: pages of results are out of date.
    fn stored(&self) {}
}

/// Measurements of a suite, decided before anything is started.
#[derive(Clone, Debug)]
pub struct SuitePlan {
    /// Workloads, measured one after the other.
    pub workloads: Vec<Workload>,
    /// Topologies that are compared.
    pub topologies: Vec<Topology>,
    /// Latency limits.
    pub slo: Slo,
    /// Settings of every sweep.
    pub settings: SweepSettings,
    /// Size of the runs.
    pub size: Size,
    /// The search that the estimate of time is made for.
    pub search: SearchPlan,
}

impl SuitePlan {
    /// True if a stored result was measured with these settings.
    fn is_same(&self, found: &SweepResult) -> bool {
        let setup = &found.setup;
        let settings = &self.settings;
        !found.partial
            && setup.slo == self.slo.to_string()
            && setup.arrivals == settings.arrivals.to_string()
            && setup.seeds == settings.seeds
            && match &settings.rates {
                Rates::Search { resolution, .. } => (setup.resolution - resolution).abs() < 1e-9,
                Rates::Listed(rates) => rates.iter().all(|rate| found.rates.iter().any(|r| r.rate == *rate)),
                Rates::Bracketed(rates) => {
                    Bracketing::new(rates).is_over(found.rates.iter().map(RateResult::trial))
                }
            }
            && setup.n_requests == settings.n_requests
            && (setup.max_window_s - settings.max_window.as_secs_f64()).abs() < 1e-6
            && setup.block_s == settings.block.map(|block| block.as_secs_f64())
            && setup.until_clear == settings.until_clear
            && setup.pd_tpot_slo_ms.map(whole_us)
                == settings.pd_tpot_slo.map(|t| whole_us(t.as_secs_f64() * 1e3))
            && setup.worker_flags == settings.worker_flags
    }

    /// Settings that a run depends on, as text.
    fn run_settings(&self, settings: &SweepSettings) -> String {
        format!(
            "{} {} requests={} window={:?} warm-up={:?} block={:?} drain={:?} pd-tpot-slo={:?} worker-flags={:?} salt={}",
            self.slo,
            settings.arrivals,
            settings.n_requests,
            settings.max_window,
            settings.warm_up,
            settings.block,
            settings.drain,
            settings.pd_tpot_slo,
            settings.worker_flags,
            settings.salt
        )
    }

    /// Removes stored results and runs whose workload and topology contain `part`, so that they are measured anew; their number.
    ///
    /// # Errors
    /// [`MeasureError::Failed`] if a file cannot be removed, and [`MeasureError::Setting`] if nothing of the suite is of that name.
    pub fn forget(&self, results: &Results, part: &str) -> Result<usize, MeasureError> {
        let is_meant = |(w, t): &(&Workload, &Topology)| format!("{} {t}", w.text()).contains(part);
        let meant: Vec<_> = self.pairs().filter(is_meant).collect();
        if meant.is_empty() {
            return Err(MeasureError::Setting(format!(
                "{part:?} is a part of no workload and topology of the suite"
            )));
        }
        for (workload, topology) in &meant {
            let forgotten = results.forget(workload.text(), topology);
            forgotten.map_err(|e| MeasureError::failed("cannot remove a result", &e))?;
        }
        Ok(meant.len())
    }

    /// A stored result, if it was measured with these settings.
    pub fn stored(&self, results: &Results, workload: &Workload, topology: &Topology) -> Option<SweepResult> {
        results.read(workload.text(), topology, |found| self.is_same(found))
    }

    /// All stored results of the plan.
    pub fn all_stored(&self, results: &Results) -> Vec<SweepResult> {
        self.pairs().filter_map(|(workload, topology)| self.stored(results, workload, topology)).collect()
    }

    /// Number of results that are to be measured.
    pub fn n_missing(&self, results: &Results) -> usize {
        self.pairs().filter(|(workload, topology)| self.stored(results, workload, topology).is_none()).count()
    }

    fn pairs(&self) -> impl Iterator<Item = (&Workload, &Topology)> {
        self.workloads.iter().flat_map(|w| self.topologies.iter().map(move |t| (w, t)))
    }

    /// The number of measurements and their estimated time, as a sentence.
    pub fn describe(&self, n_missing: usize) -> String {
        let n = self.workloads.len() * self.topologies.len();
        let time = estimate(n_missing, &self.search, &self.size);
        let slow = SearchPlan { first: 1.0, ..self.search };
        let is_expected = matches!(self.settings.rates, Rates::Search { first: Some(_), .. });
        let condition = if is_expected { "" } else { ", if goodput is about 5 requests/s" };
        format!(
            "{n_missing} of {n} results are to be measured: about {}{condition}; at 1 request/s it would be {}",
            readable(time),
            readable(estimate(n_missing, &slow, &self.size))
        )
    }

    /// Measures the missing results and stores each; returns the cores of every process.
    ///
    /// # Errors
    /// [`MeasureError`] if a cluster cannot start or dies, or a result cannot be written; earlier results are kept.
    pub async fn measure(
        &self,
        starter: &impl ClusterStarter,
        results: &Results,
        observer: &dyn SuiteObserver,
    ) -> Result<Vec<(String, String)>, MeasureError> {
        let report = |text: &str| observer.line(text);
        let mut clusters = SideBySide::start(starter, &self.topologies, &report).await?;
        let measured = self.measure_on(&mut clusters, results, observer).await;
        let placement = clusters.placement();
        clusters.stop().await;
        measured.map(|()| placement)
    }

    async fn measure_on<C: RunningCluster>(
        &self,
        clusters: &mut SideBySide<C>,
        results: &Results,
        observer: &dyn SuiteObserver,
    ) -> Result<(), MeasureError> {
        let n_missing = self.n_missing(results) as u64;
        let runs = results.runs().map_err(|e| MeasureError::failed("cannot store runs", &e))?;
        let progress =
            SuiteProgress { observer, began: Instant::now(), n_missing, n_done: AtomicU64::new(0) };
        for workload in &self.workloads {
            let is_missing = |topology: &&Topology| self.stored(results, workload, topology).is_none();
            let missing: Vec<Topology> = self.topologies.iter().filter(is_missing).cloned().collect();
            if missing.is_empty() {
                continue;
            }
            let settings = SweepSettings { salt: salt_of(workload), ..self.settings.clone() };
            let lanes = SuiteLanes {
                progress: &progress,
                results,
                runs: &runs,
                run_settings: self.run_settings(&settings),
                commit: self.settings.commit.clone(),
                workload,
                topologies: &missing,
                unwritten: Mutex::default(),
            };
            let load = OfferedLoad { workload, slo: &self.slo };
            clusters.measure(&missing, &load, &settings, &lanes).await?;
            lanes.written()?;
        }
        Ok(())
    }
}

/// Milliseconds as whole microseconds: a number in a file may differ in its last digit.
fn whole_us(ms: f64) -> f64 {
    (ms * 1e3).round()
}

/// Keeps the content of each workload apart from the others': the clusters' caches last through all of them.
fn salt_of(workload: &Workload) -> u64 {
    workload.text().bytes().fold(0, |salt, byte| mix(salt ^ u64::from(byte)))
}

/// Progress of the suite.
struct SuiteProgress<'a> {
    observer: &'a dyn SuiteObserver,
    began: Instant,
    n_missing: u64,
    n_done: AtomicU64,
}

/// Observer of one workload's sweeps: reports events and stores results.
struct SuiteLanes<'a> {
    progress: &'a SuiteProgress<'a>,
    results: &'a Results,
    runs: &'a StoredRuns,
    run_settings: String,
    commit: Option<String>,
    workload: &'a Workload,
    topologies: &'a [Topology],
    unwritten: Mutex<Option<std::io::Error>>,
}

impl SuiteLanes<'_> {
    fn report(&self, lane: usize, text: &str) {
        let topology = self.topologies.get(lane).map(ToString::to_string).unwrap_or_default();
        self.progress.observer.line(&format!("{} · {topology}: {text}", self.workload.text()));
    }

    /// Gives what a run of a lane is of, on this machine and at this time, to `with`.
    fn with_run<T>(&self, lane: usize, with: impl FnOnce(&RunOf<'_>) -> T) -> T {
        let host = Host::here(self.commit.clone());
        let topology = self.topologies.get(lane).map(ToString::to_string).unwrap_or_default();
        let workload = self.workload.text();
        with(&RunOf { workload, topology: &topology, settings: &self.run_settings, host: &host })
    }

    /// Remembers a file that could not be written.
    fn check(&self, written: std::io::Result<()>) {
        if let Err(e) = written {
            *self.unwritten.lock() = Some(e);
        }
    }

    /// Fails if a result could not be stored.
    fn written(&self) -> Result<(), MeasureError> {
        match self.unwritten.lock().take() {
            None => Ok(()),
            Some(e) => Err(MeasureError::failed("cannot write a result", &e)),
        }
    }
}

impl SweepObserver for SuiteLanes<'_> {
    fn event(&self, lane: usize, event: SweepEvent<'_>) {
        match event {
            SweepEvent::Plan(plan) => self.report(lane, plan),
            SweepEvent::Rate(rate) => self.report(lane, &rate_line(rate)),
            SweepEvent::Run { .. } | SweepEvent::Progress(_) => {}
        }
    }

    fn result(&self, lane: usize, result: &SweepResult) {
        let Some(topology) = self.topologies.get(lane) else { return };
        self.check(self.results.write(self.workload.text(), topology, result));
        self.progress.observer.stored();
        let n = self.progress.n_done.fetch_add(1, Ordering::Relaxed) + 1;
        let n_left = self.progress.n_missing.saturating_sub(n);
        let each = self.progress.began.elapsed().div_f64(n as f64);
        let goodput =
            result.goodput.rate.map_or_else(|| "no rate passes".to_owned(), |r| format!("{r} requests/s"));
        let left = readable(each.mul_f64(n_left as f64));
        self.report(lane, &format!("goodput: {goodput}; {n_left} are left, about {left}"));
    }

    fn kept(&self, lane: usize, key: &RunKey) -> Option<Measured> {
        self.with_run(lane, |of| self.runs.read(of, key))
    }

    fn measured(&self, lane: usize, key: &RunKey, measured: &Measured) {
        self.check(self.with_run(lane, |of| self.runs.write(of, key, measured)));
    }

    fn first_rate(&self, chosen: f64) -> f64 {
        match self.with_run(0, |of| self.runs.first_rate(of, chosen)) {
            Ok(rate) => rate,
            Err(e) => {
                self.check(Err(e));
                chosen
            }
        }
    }
}

/// A judged rate as a line.
fn rate_line(rate: &RateResult) -> String {
    let verdict = &rate.verdict;
    let ms = |value: Option<f64>| value.map_or_else(|| "infinite".to_owned(), |v| format!("{v:.0} ms"));
    let word = if verdict.passed { "passes" } else { "fails" };
    let broken: Vec<_> = verdict.findings.iter().filter(|f| !f.passed).map(|f| f.rule.as_str()).collect();
    let why = if broken.is_empty() { String::new() } else { format!(" ({})", broken.join(", ")) };
    format!(
        "{} {word}{why}: {:.1} % meet the SLO, p99 TTFT {}, p99 TPOT {}",
        rate.rate_text(),
        verdict.attainment() * 100.0,
        ms(verdict.ttft_ms.p99),
        ms(verdict.tpot_ms.p99)
    )
}

#[cfg(test)]
mod tests;
