//! The suite of the claim: encode, prefill and decode apart against both rivals with the same cores, over the workloads
//! on which it should win and those on which it should not.
//!
//! A cell is one workload at one topology; its result is one file, so that a suite that was broken off goes on.

use crate::result::SweepResult;
use crate::search::SearchPlan;
use crate::topology::Topology;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// What is compared where nothing else is said: the first is the claim, the others are its rivals.
pub const TOPOLOGIES: [&str; 3] = ["1e1pd", "dp2", "colocated"];

/// The workloads of the claim: both of the EPD blog's with one to four pictures, pictures that come again, and mixes of
/// requests with and without pictures.
pub fn workloads() -> Vec<String> {
    let blog = ["epd-short", "epd-long"].into_iter();
    let blog = blog.flat_map(|name| (1..=4).map(move |n| format!("{name}:images={n}")));
    let reuse = [50, 90].map(|percent| format!("epd-short:images=2,share={}", f64::from(percent) / 100.0));
    let mixes = [25, 50, 75].map(|percent| format!("mixed:with={},images=1-4", f64::from(percent) / 100.0));
    blog.chain(reuse).chain(mixes).collect()
}

/// Those that a first look takes.
pub fn quick_workloads() -> Vec<String> {
    ["epd-short:images=1", "epd-short:images=4", "epd-short:images=2,share=0.9", "mixed:with=0.25,images=1-4"]
        .map(str::to_owned)
        .to_vec()
}

/// How large the runs are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Size {
    /// Judged requests of a run.
    pub n_requests: u64,
    /// Runs of a rate.
    pub n_seeds: u64,
    /// The longest judged window.
    pub max_window: Duration,
}

/// Where the results of a suite lie.
#[derive(Clone, Debug)]
pub struct Results {
    dir: PathBuf,
}

impl Results {
    /// In a folder, which is made.
    ///
    /// # Errors
    /// The file system's.
    pub fn in_dir(dir: &Path) -> io::Result<Self> {
        fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned() })
    }

    /// The file of a cell.
    pub fn path(&self, workload: &str, topology: &Topology) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '.') { c } else { '_' };
        let name: String = format!("{workload}__{topology}").chars().map(plain).collect();
        self.dir.join(format!("{name}.json"))
    }

    /// A cell's result, if it is there, is whole, and was measured as is asked now.
    pub fn read(
        &self,
        workload: &str,
        topology: &Topology,
        is_same: impl Fn(&SweepResult) -> bool,
    ) -> Option<SweepResult> {
        let text = fs::read_to_string(self.path(workload, topology)).ok()?;
        SweepResult::read(&text).ok().filter(is_same)
    }

    /// Writes a cell's result, whole or not at all.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, workload: &str, topology: &Topology, result: &SweepResult) -> io::Result<()> {
        let path = self.path(workload, topology);
        let beside = path.with_extension("part");
        fs::write(&beside, result.to_json())?;
        fs::rename(beside, path)
    }
}

/// How long so many sweeps take, if goodput is about the first rate of the search: runs, their warm-up, and the drain.
pub fn estimate(n_sweeps: usize, plan: &SearchPlan, size: &Size) -> Duration {
    let window = Duration::from_secs_f64(size.n_requests as f64 / plan.first).min(size.max_window);
    // A fifth of the window goes before it and behind it, and a little between runs.
    let run = window.mul_f64(1.2) + Duration::from_secs(5);
    let n_runs = n_sweeps as f64 * f64::from(plan.likely_rates()) * size.n_seeds as f64;
    run.mul_f64(n_runs)
}

/// A time as people say it.
pub fn spoken(time: Duration) -> String {
    match time.as_secs() {
        s @ 0..120 => format!("{s} s"),
        s @ 120..7200 => format!("{} min", s / 60),
        s => format!("{:.1} h", s as f64 / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests_support::sweep;
    use crate::workload::Workload;

    #[test]
    fn every_workload_and_topology_of_the_suite_can_be_read() {
        for workload in workloads().into_iter().chain(quick_workloads()) {
            Workload::parse(&workload).unwrap_or_else(|e| panic!("{workload}: {e}"));
        }
        for name in TOPOLOGIES {
            name.parse::<Topology>().unwrap();
        }
        assert!(quick_workloads().iter().all(|quick| workloads().contains(quick)));
        assert_eq!(workloads().len(), 13);
    }

    #[test]
    fn a_result_is_found_again_and_one_that_is_not_whole_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let results = Results::in_dir(&dir.path().join("new")).unwrap();
        let (workload, topology) = ("epd-short:images=1", "colocated:budget=64".parse().unwrap());
        assert!(results.read(workload, &topology, |_| true).is_none());
        let result = sweep("colocated:budget=64", workload, 4.0);
        results.write(workload, &topology, &result).unwrap();
        assert_eq!(results.read(workload, &topology, |_| true).unwrap().setup, result.setup);
        assert!(
            results.read(workload, &topology, |found| found.setup.n_requests == 7).is_none(),
            "measured otherwise"
        );
        fs::write(results.path(workload, &topology), "{\"version\": 1").unwrap();
        assert!(results.read(workload, &topology, |_| true).is_none());
        assert_ne!(results.path(workload, &topology), results.path(workload, &"dp2".parse().unwrap()));
    }

    #[test]
    fn times_are_estimated_and_spoken() {
        let size = Size { n_requests: 1000, n_seeds: 3, max_window: Duration::from_secs(600) };
        let plan = SearchPlan::from(10.0, 0.1);
        let one = estimate(1, &plan, &size);
        assert_eq!(one, Duration::from_secs(125) * (plan.likely_rates() * 3));
        assert_eq!(estimate(2, &plan, &size), one * 2);
        assert_eq!(
            ["45 s", "10 min", "2.5 h"],
            [45, 600, 9000].map(|s| spoken(Duration::from_secs(s))).map(|s| s).each_ref().map(String::as_str)
        );
    }
}
