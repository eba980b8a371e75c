//! `triptych plan trace`: flags of the timeline of a simulated run, which `benches/overlay.py` lays over that of a cluster.

use super::question::QuestionArgs;
use crate::error::CliError;
use clap::Args;
use std::path::PathBuf;
use triptych_bench::topology::Topology;
use triptych_plan::planner::Budget;
use triptych_plan::simulator::{simulate, trace};
use triptych_plan::validation::candidate;

/// Flags of `triptych plan trace`.
#[derive(Args, Clone, Debug)]
pub struct TraceArgs {
    /// Inputs of the simulation
    #[command(flatten)]
    pub question: QuestionArgs,
    /// The cluster
    #[arg(long, value_name = "TOPOLOGY", default_value = "1e1pd")]
    pub topology: Topology,
    /// Cores of all its workers
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    pub cores: u32,
    /// Requests a second
    #[arg(long, value_name = "RATE")]
    pub rate: f64,
    /// Seed of arrivals and lengths, as `triptych bench run` has it
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// The timeline
    #[arg(long, short = 'o', value_name = "FILE", default_value = "simulated.json")]
    pub output: PathBuf,
}

/// Simulates a run and writes its timeline.
///
/// # Errors
/// [`CliError`] for a rate that is none, for curves of other workers than the topology's, and a file that cannot be written.
pub fn run(args: &TraceArgs) -> Result<(), CliError> {
    if !(args.rate.is_finite() && args.rate > 0.0) {
        return Err(CliError::Setting(format!("--rate {}: allowed are rates above 0", args.rate)));
    }
    let inputs = args.question.read()?;
    let n_workers = args.topology.kinds().len().max(1);
    let threads = (usize::try_from(args.cores).unwrap_or(usize::MAX) / n_workers).max(1);
    let curves = inputs.curves.iter().find(|curves| curves.threads == threads).ok_or_else(|| {
        CliError::Setting(format!(
            "--topology {}: its workers have {threads} cores each, and no file of --curves is of such workers",
            args.topology
        ))
    })?;
    let candidate = candidate(&args.topology, curves, Some(&inputs.slo));
    let mut spec = candidate.spec(&inputs.question(Budget::Workers(n_workers), &inputs.demand));
    spec.records_spans = true;
    let offered = inputs.demand.workload.requests(args.rate, inputs.demand.arrivals, args.seed);
    let run = simulate(&spec, offered.take(inputs.effort.requests), args.seed);
    let run = run.map_err(|e| CliError::setting("cannot simulate", &e))?;
    std::fs::write(&args.output, trace::text(trace::events(&spec, &run)))
        .map_err(|e| CliError::setting(format!("cannot write --output {}", args.output.display()), &e))
}
