//! Flags of a plan's inputs.

use crate::error::CliError;
use clap::Args;
use clap::builder::FalseyValueParser;
use std::path::PathBuf;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::slo::Slo;
use triptych_bench::workload::Workload;
use triptych_plan::planner::inputs::{PlanInputs, read_curves, read_residuals, with_pd_curves};
use triptych_plan::planner::{Effort, Named};
use triptych_plan::simulator::spec::FrontCores;

/// Flags of a plan's inputs.
#[derive(Args, Clone, Debug)]
pub struct QuestionArgs {
    /// Cost curves that `triptych profile` wrote; repeat for each number of threads that a worker may have
    #[arg(long, value_name = "FILE", default_value = "curves.json")]
    pub curves: Vec<PathBuf>,
    /// Cost curves of another engine's server, as `triptych profile --url` wrote them: the encoders of --curves before its PD workers,
    /// and such servers alone, are compared with clusters of --curves; repeat for several
    #[arg(long, value_name = "FILE")]
    pub pd_curves: Vec<PathBuf>,
    /// Use only curves of workers with so many threads
    #[arg(long, value_name = "N")]
    pub threads_per_worker: Option<usize>,
    /// Workload, as `triptych bench` takes it: NAME[:key=value,…]
    #[arg(long, value_name = "WORKLOAD", default_value = "epd-short")]
    pub workload: String,
    /// Arrival process: own, poisson, gamma:cv=2, constant
    #[arg(long, value_name = "ARRIVALS", default_value = "own")]
    pub arrivals: Arrivals,
    /// SLO of every request, as in ttft=500ms,tpot=50ms; e2el limits the time to the end. Required, except where stored results
    /// have one
    #[arg(long, value_name = "SLO")]
    pub slo: Option<Slo>,
    /// Proxy, store and clients use the workers' cores, as on one machine. Default: they have their own
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub one_machine: bool,
    /// The workers of the machine lend each other their cores, as `triptych up` has it: a worker that computes alone has as many
    /// as the curves with the most threads. Default: each has its own, as in `triptych bench suite`
    #[arg(long, requires = "one_machine", value_parser = FalseyValueParser::new())]
    pub share_cores: bool,
    /// Fewer and shorter simulations, and a wider interval: seconds instead of minutes, or minutes where requests take seconds
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub quick: bool,
    /// Seeds that the best few are simulated with; goodput and its interval are over them. Default: 5, with --quick 3
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=100))]
    pub seeds: Option<u64>,
    /// First of these seeds: figures of seeds that nothing was tuned with
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub first_seed: u64,
    /// Requests of a simulated run. Default: 1200, with --quick 200
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(50..=1_000_000))]
    pub requests: Option<u32>,
    /// Residuals of measured clusters, as `triptych plan validate` writes them: the model's own error in each interval. Default:
    /// those of this repository's measurements
    #[arg(long, value_name = "FILE")]
    pub residuals: Option<PathBuf>,
}

impl QuestionArgs {
    /// Reads the files and parses the texts.
    ///
    /// # Errors
    /// [`CliError::Setting`] that names the flag, its value and what is allowed.
    pub fn read(&self) -> Result<PlanInputs, CliError> {
        let slo = self.slo.ok_or_else(|| CliError::Setting("--slo is missing, as in ttft=500ms".into()))?;
        self.read_with(slo)
    }

    /// The same with this SLO, as stored results have one.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_with(&self, slo: Slo) -> Result<PlanInputs, CliError> {
        let curves = read_curves(&self.curves, self.threads_per_worker)?;
        let curves = with_pd_curves(curves, &self.pd_curves)?;
        let workload = Workload::parse(&self.workload)
            .map_err(|e| CliError::setting(format!("--workload {}", self.workload), &e))?;
        Ok(PlanInputs {
            curves,
            demand: Named { workload, arrivals: self.arrivals },
            slo,
            frontend: if self.one_machine { FrontCores::Workers } else { FrontCores::Own },
            shares_cores: self.share_cores,
            effort: self.effort(),
            residuals: read_residuals(self.residuals.as_deref())?,
        })
    }

    fn effort(&self) -> Effort {
        let base = if self.quick { Effort::QUICK } else { Effort::FULL };
        Effort {
            seeds: self.seeds.unwrap_or(base.seeds),
            first_seed: self.first_seed,
            requests: self.requests.and_then(|n| usize::try_from(n).ok()).unwrap_or(base.requests),
            ..base
        }
    }
}
