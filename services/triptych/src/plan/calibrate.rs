//! `triptych plan calibrate`: flags of the measurement of curves in service, and its files.

use super::output::{print, to_json};
use crate::args::LogArgs;
use crate::error::CliError;
use crate::model;
use crate::topology::{Starter, TopologyArgs};
use crate::up::screen::Screen;
use clap::Args;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use triptych_bench::arrivals::Arrivals;
use triptych_bench::slo::Slo;
use triptych_bench::topology::{Topology, Workers};
use triptych_bench::workload::Workload;
use triptych_plan::calibration::{CalibrationSettings, calibrate};
use triptych_plan::curves::ServiceFactors;
use triptych_plan::planner::inputs::{PlanInputs, read_curves, read_residuals};
use triptych_plan::planner::{Effort, Named};
use triptych_plan::simulator::spec::FrontCores;

/// Load before the measured one.
const WARM_UP: Duration = Duration::from_secs(2);

/// First lines of the table of factors.
const HEADER: &str = "\
| cluster | requests/s | requests | encode | prefill | decode | µs between steps | client, proxy and network | of items there |
|---|---|---|---|---|---|---|---|---|
";

/// Flags of `triptych plan calibrate`.
#[derive(Args, Clone, Debug)]
pub struct CalibrateArgs {
    /// Cost curves that `triptych profile` wrote; repeat for each number of threads that a worker may have
    #[arg(long, value_name = "FILE", default_value = "curves.json")]
    pub curves: Vec<PathBuf>,
    /// Workload, as `triptych bench` takes it: NAME[:key=value,…]
    #[arg(long, value_name = "WORKLOAD", default_value = "mixed:with=0.8,images=1-3")]
    pub workload: String,
    /// Length of the load on each cluster, in seconds; one of half of it, which tells the rate, comes before it, and one of text
    /// alone, as long, after it
    #[arg(long, value_name = "S", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub window_s: u64,
    /// Utilisation of the busiest worker under these loads, in percent. Steps of a worker with several cores take longer where it
    /// is seldom busy, and goodput is decided where it is not
    #[arg(long, value_name = "PERCENT", default_value_t = 85, value_parser = clap::value_parser!(u8).range(1..=95))]
    pub utilisation: u8,
    /// Folder for the scaled curves, with the names of the given files
    #[arg(long, value_name = "DIR", default_value = "in-service")]
    pub output: PathBuf,
    /// Clusters; by default `1e1pd` and `colocated`, those for which there are curves
    #[command(flatten)]
    pub topology: TopologyArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
}

/// Measures, writes the scaled curves, and prints the factors.
///
/// # Errors
/// [`CliError`] for settings that cannot work, and if a cluster dies.
pub async fn run(args: CalibrateArgs) -> Result<(), CliError> {
    let inputs = inputs(&args)?;
    let (cores, _) = args.topology.core_lists()?;
    let n_cores = cores.iter().count();
    args.topology.pin_self()?;
    let model = model::check_one(&args.topology.models).await?;
    std::fs::create_dir_all(&args.output).map_err(|e| failed(&args.output, &e))?;
    let screen = Screen::new(&args.log)?;
    let dir = tempfile::tempdir().map_err(|e| CliError::failed("cannot make a folder", &e))?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let settings = CalibrationSettings {
        n_cores,
        window: Duration::from_secs(args.window_s),
        warm_up: WARM_UP,
        utilisation: f64::from(args.utilisation) / 100.0,
        salt: now,
        timeline: dir.path().join("timeline.json"),
    };
    let traced = TopologyArgs { timeline: Some(settings.timeline.clone()), ..args.topology.clone() };
    let starter = Starter { args: &traced, model: &model, screen: &screen, dir: dir.path() };
    let mut page = HEADER.to_owned();
    for (file, topology) in clusters(&args, &inputs, n_cores)? {
        screen.say(&format!("{topology}: {} s of {}", args.window_s, args.workload));
        // Each cluster has a timeline of its own.
        let _ = std::fs::remove_file(&settings.timeline);
        let (curves, found) = calibrate(&starter, &topology, &inputs, &settings).await?;
        let to = args.output.join(file.file_name().unwrap_or(file.as_os_str()));
        let factors = ServiceFactors { at_s: Some(now), ..found.factors };
        let scaled = curves.in_service(factors);
        std::fs::write(&to, to_json(&scaled)?).map_err(|e| failed(&to, &e))?;
        if !factors.are_usual() {
            screen.say(&format!(
                "{topology}: such factors are not usual: was something else running? Measure again"
            ));
        }
        let _ = writeln!(
            page,
            "| {topology} | {:.2} | {} | {:.2} | {:.2} | {:.2} | {:.0} | {:.2} | {:.2} |",
            found.rate,
            found.n_requests,
            factors.encode,
            factors.prefill_steps(),
            factors.step,
            scaled.between_steps_us,
            factors.front,
            factors.items()
        );
    }
    screen.end_progress();
    print(&page)
}

fn failed(path: &Path, e: &std::io::Error) -> CliError {
    CliError::failed(format!("cannot write --output {}", path.display()), e)
}

fn inputs(args: &CalibrateArgs) -> Result<PlanInputs, CliError> {
    let workload = Workload::parse(&args.workload)
        .map_err(|e| CliError::setting(format!("--workload {}", args.workload), &e))?;
    Ok(PlanInputs {
        curves: read_curves(&args.curves, None)?,
        demand: Named { workload, arrivals: Arrivals::Own },
        // Nothing is judged.
        slo: Slo { ttft: None, tpot: None, e2el: None },
        frontend: FrontCores::Workers,
        shares_cores: false,
        effort: Effort::QUICK,
        residuals: read_residuals(None)?,
    })
}

/// A cluster for each file of curves, of workers with as many threads.
fn clusters(
    args: &CalibrateArgs,
    inputs: &PlanInputs,
    n_cores: usize,
) -> Result<Vec<(PathBuf, Topology)>, CliError> {
    let apart = Workers::Disaggregated { n_encoders: 1, n_pds: 1 };
    let usual = [apart, Workers::Colocated { n: 1 }].map(|workers| Topology { workers, budget: None });
    let given = match args.topology.topologies.is_empty() {
        true => usual.to_vec(),
        false => args.topology.topologies.clone(),
    };
    let mut found = Vec::new();
    for (file, curves) in args.curves.iter().zip(&inputs.curves) {
        let fits = |topology: &&Topology| n_cores == curves.threads * topology.kinds().len();
        let topology = given.iter().find(fits).ok_or_else(|| {
            CliError::Setting(format!(
                "--curves {}: of workers with {} threads, which --topology has none of on {n_cores} cores",
                file.display(),
                curves.threads
            ))
        })?;
        found.push((file.clone(), topology.clone()));
    }
    Ok(found)
}
