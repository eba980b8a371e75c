//! Comparison of topologies by simulation: the workloads of the bench's suite, and a day whose mix changes.
//!
//! Goodput as a plan finds it: the bench's search and judge over simulated runs, with every seed. The first topology is set
//! beside the best of the others. Nothing is measured, and the page says so.

mod page;

pub use page::report;

use crate::planner::inputs::PlanInputs;
use crate::planner::{self, Budget, Demand, Effort, Interval, PlanError, Question, SearchedCandidate};
use crate::validation::candidate;
use serde::Serialize;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::slo::Slo;
use triptych_bench::text::TextError;
use triptych_bench::topology::Topology;
use triptych_bench::workload::Workload;

/// Cycles of a day in one run: with fewer a mix counts for more than the others.
const CYCLES: u32 = 2;

/// Topologies to compare, on the same number of cores.
#[derive(Clone, Debug)]
pub struct Contest {
    /// Topologies; the first is compared with the best of the others.
    pub topologies: Vec<Topology>,
    /// Cores of the workers of each.
    pub n_cores: usize,
}

/// One demand on every topology.
#[derive(Clone, Debug, Serialize)]
pub struct ComparedDemand {
    /// The demand.
    pub demand: String,
    /// Latency limits.
    pub slo: String,
    /// Topology and goodput in requests a second, in the order of the contest.
    pub goodput: Vec<(String, Interval)>,
}

impl ComparedDemand {
    /// Goodput of the best topology but the first, in requests a second.
    pub fn best_other(&self) -> f64 {
        self.goodput.iter().skip(1).map(|(_, goodput)| goodput.mean).fold(0.0, f64::max)
    }

    /// Goodput of the first topology over the best of the others; `None` if no other has any.
    pub fn ratio(&self) -> Option<f64> {
        let first = self.goodput.first()?.1.mean;
        Some(first / self.best_other()).filter(|ratio| ratio.is_finite())
    }
}

/// A demand and its latency limits.
#[derive(Clone, Copy)]
pub struct Asked<'a> {
    /// Offered requests.
    pub demand: &'a dyn Demand,
    /// Latency limits.
    pub slo: Slo,
}

/// Error of a comparison.
#[derive(Debug, thiserror::Error)]
pub enum ComparisonError {
    /// There are no curves of such workers.
    #[error(
        "--topology {topology}: no curves of workers with {threads} threads, {n_cores} cores over its workers"
    )]
    Curves {
        /// The topology.
        topology: String,
        /// Threads of each worker.
        threads: usize,
        /// Cores in all.
        n_cores: usize,
    },
    /// A simulation is refused.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

impl Contest {
    /// Goodput of every topology for one demand.
    ///
    /// # Errors
    /// [`ComparisonError`].
    pub fn compare(&self, inputs: &PlanInputs, asked: Asked<'_>) -> Result<ComparedDemand, ComparisonError> {
        self.compare_with(inputs, asked, inputs.effort)
    }

    /// The same for a workload that changes, in runs that are long enough for all of its mixes.
    ///
    /// # Errors
    /// [`ComparisonError`].
    pub fn compare_day(
        &self,
        inputs: &PlanInputs,
        day: &planner::Named,
        slo: Slo,
    ) -> Result<ComparedDemand, ComparisonError> {
        let effort = match day.workload.cycle() {
            Some(cycle) => Effort { requests: usize::MAX, longest: cycle * CYCLES, ..inputs.effort },
            None => inputs.effort,
        };
        self.compare_with(inputs, Asked { demand: day, slo }, effort)
    }

    fn compare_with(
        &self,
        inputs: &PlanInputs,
        asked: Asked<'_>,
        effort: Effort,
    ) -> Result<ComparedDemand, ComparisonError> {
        let question = inputs.question(Budget::Workers(usize::MAX), asked.demand);
        let question = Question { slo: asked.slo, effort, ..question };
        let found = self.topologies.iter().map(|topology| {
            let found = self.goodput(inputs, &question, topology)?;
            Ok((topology.to_string(), found.goodput))
        });
        Ok(ComparedDemand {
            demand: asked.demand.name(),
            slo: asked.slo.to_string(),
            goodput: found.collect::<Result<_, ComparisonError>>()?,
        })
    }

    fn goodput(
        &self,
        inputs: &PlanInputs,
        question: &Question<'_>,
        topology: &Topology,
    ) -> Result<SearchedCandidate, ComparisonError> {
        let threads = self.n_cores / topology.kinds().len().max(1);
        let curves = inputs.curves.iter().find(|curves| curves.threads == threads);
        let curves = curves.ok_or_else(|| ComparisonError::Curves {
            topology: topology.to_string(),
            threads,
            n_cores: self.n_cores,
        })?;
        let cluster = candidate(topology, curves, Some(&question.slo));
        let mut found = planner::choose(question, vec![cluster])?;
        found.pop().ok_or(ComparisonError::Plan(PlanError::Empty))
    }
}

/// A day of these workloads, each two minutes long, within its own latency limits, and as much load for the best of the fixed
/// topologies as any other.
///
/// # Errors
/// [`TextError`] if one of them is served by none.
pub fn day(mixes: &[(&str, &ComparedDemand)], arrivals: Arrivals) -> Result<planner::Named, TextError> {
    let mixes =
        mixes.iter().map(|(name, compared)| format!("|{:.3}*{name}@{}", compared.best_other(), compared.slo));
    let text = format!("changing:120s{}", mixes.collect::<String>());
    Ok(planner::Named { workload: Workload::parse(&text)?, arrivals })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn mixes_of_a_day_are_as_much_load_as_each_other() {
        let of = |rates: &[f64]| ComparedDemand {
            demand: "d".into(),
            slo: "ttft=3000ms,tpot=5ms".into(),
            goodput: rates
                .iter()
                .map(|mean| ("t".into(), Interval { mean: *mean, ..Interval::default() }))
                .collect(),
        };
        let (text, images) = (of(&[9.0, 2.0, 3.0]), of(&[9.0, 1.5, 1.0]));
        let mixes = [("text", &text), ("epd-short:images=4", &images)];
        let day = day(&mixes, Arrivals::Poisson).unwrap();
        let limits = "ttft=3000ms,tpot=5ms";
        let expect = format!("changing:120s|3.000*text@{limits}|1.500*epd-short:images=4@{limits}");
        assert_eq!(day.workload.text(), expect);
        assert_eq!(day.workload.cycle(), Some(Duration::from_secs(240)));
        let none = of(&[1.0, 0.0]);
        assert!(super::day(&[("text", &none)], Arrivals::Poisson).is_err());
    }
}
