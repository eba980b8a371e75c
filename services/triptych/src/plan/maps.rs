//! `triptych plan map`: flags and files of the maps of where disaggregated encoders serve more.

use super::output::to_json;
use crate::error::CliError;
use clap::Args;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;
use triptych_bench::slo::Slo;
use triptych_plan::maps::{Map, MapAxes, MapSettings, draw};
use triptych_plan::planner::WorkerSettings;
use triptych_plan::planner::inputs::read_curves;

/// Flags of `triptych plan map`.
#[derive(Args, Clone, Debug)]
pub struct MapArgs {
    /// Cost curves of a worker
    #[arg(long, value_name = "FILE", default_value = "curves.json")]
    pub curves: PathBuf,
    /// Workers of each fleet
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "8,64,512",
          value_parser = clap::value_parser!(u32).range(2..=65_536))]
    pub workers: Vec<u32>,
    /// SLO, as in ttft=500ms,tpot=50ms; repeat for a tight and a loose one
    #[arg(long, value_name = "SLO", required = true)]
    pub slo: Vec<Slo>,
    /// Shares of images that were sent before
    #[arg(long, value_name = "SHARE,…", value_delimiter = ',', default_value = "0,0.5,0.9", value_parser = share)]
    pub reuse: Vec<f64>,
    /// Tokens of text
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "100,400,2000,8000",
          value_parser = clap::value_parser!(u32).range(1..=200_000))]
    pub text: Vec<u32>,
    /// Images of a request
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_value = "1,2,4,8",
          value_parser = clap::value_parser!(u32).range(1..=256))]
    pub images: Vec<u32>,
    /// Shape of an image
    #[arg(long, value_name = "WxH", default_value = "640x640")]
    pub size: String,
    /// Output tokens
    #[arg(long, value_name = "N", default_value_t = 150, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub output_tokens: u32,
    /// Token rows of a step of each worker
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub token_budget: u32,
    /// Sequences that run at once on each worker
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_sequences: u32,
    /// Output tokens of an encoder batch
    #[arg(long, value_name = "N", default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_tokens: u32,
    /// Seconds of each simulated run: a short one takes requests that are under way at its end for a backlog
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=3600))]
    pub seconds: u32,
    /// Seeds of each goodput, which is their median
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=100))]
    pub seeds: u64,
    /// Folder for `map.json` and `map.svg`. Cells that `map.json` has already are not made again: one that was interrupted
    /// goes on
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..1.0).contains(share));
    share.ok_or_else(|| "is a number from 0 to below 1".to_owned())
}

/// Makes the cells that are missing, and draws the map after each fleet.
///
/// # Errors
/// [`CliError`] for inputs that cannot be used and files that cannot be written.
pub fn run(args: &MapArgs) -> Result<(), CliError> {
    let curves = read_curves(std::slice::from_ref(&args.curves), None)?;
    let curves = curves.first().ok_or_else(|| CliError::Setting("--curves: no file".into()))?;
    let size = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
    let settings = MapSettings {
        curves: curves.clone(),
        worker: WorkerSettings {
            token_budget: size(args.token_budget),
            max_sequences: size(args.max_sequences),
            batch_tokens: size(args.batch_tokens),
            ..WorkerSettings::default()
        },
        size: args.size.clone(),
        output: args.output_tokens,
        span: Duration::from_secs(u64::from(args.seconds)),
        seeds: args.seeds,
    };
    let axes = MapAxes {
        workers: args.workers.iter().copied().map(size).collect(),
        slos: args.slo.clone(),
        reuse: args.reuse.clone(),
        text: args.text.clone(),
        images: args.images.clone(),
    };
    let file = args.output.join("map.json");
    let mut map = read(&file)?;
    let places = axes.places();
    for (i, place) in places.iter().enumerate() {
        if map.cell(place).is_some() {
            continue;
        }
        let slo = axes.slos.iter().find(|slo| slo.to_string() == place.slo);
        let Some(slo) = slo else { continue };
        let cell = settings.cell(place, *slo).map_err(|e| CliError::setting("no map", &e))?;
        // Nobody may be reading it.
        let _ = writeln!(
            std::io::stderr(),
            "{}/{}: {} {:.2}/s, both {:.2}/s",
            i + 1,
            places.len(),
            cell.disaggregated,
            cell.goodput,
            cell.colocated
        );
        map.cells.push(cell);
        write(&file, &to_json(&map)?)?;
    }
    write(&args.output.join("map.svg"), &draw::svg(&curves.model, &axes, &map))
}

fn read(file: &Path) -> Result<Map, CliError> {
    match std::fs::read_to_string(file) {
        Ok(text) => serde_json::from_str(&text).map_err(|e| CliError::setting(file.display(), &e)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Map::default()),
        Err(e) => Err(CliError::setting(file.display(), &e)),
    }
}

fn write(file: &Path, text: &str) -> Result<(), CliError> {
    std::fs::write(file, text).map_err(|e| CliError::failed(format!("cannot write {}", file.display()), &e))
}
