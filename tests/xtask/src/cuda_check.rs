//! `cargo xtask cuda-check`: what only a GPU can show, in one command of less than nine minutes.
//!
//! `pack` builds the product, its benches and the tests of the CUDA back end into `.cuda-check/`, from where `run.sh` runs them on
//! a machine that has a driver and no Rust. Each part has a time limit of its own, so that one that hangs takes no other with
//! it, and a line in the table at the end: a part that could not run has not passed. Where there is no device, nothing of
//! this runs; its own logic is tested without one.

mod child;
mod device;
mod libtest;
mod pack;
mod parts;
mod report;
mod scene;
mod timing;

use crate::shell::{command, has, root, run as run_shown};
use anyhow::{Context, Result, bail, ensure};
use clap::{Args, Subcommand};
use device::Device;
use parts::PARTS;
use report::Row;
use scene::{FOLDER, Outcome, Ran, Scene};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Least time that a part is begun with.
const LEAST: Duration = Duration::from_secs(5);

/// Settings of `cargo xtask cuda-check`.
#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true)]
pub struct CudaCheckArgs {
    #[command(subcommand)]
    step: Option<Step>,
    #[command(flatten)]
    run: RunArgs,
}

#[derive(Subcommand, Debug)]
enum Step {
    /// Build what is needed and pack it into .cuda-check/
    Pack,
    /// Run what is packed and unpacked; `.cuda-check/run.sh` does both
    Run(RunArgs),
}

#[derive(Args, Debug)]
struct RunArgs {
    /// Only these parts, separated by commas; an unknown name lists them
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Few tests and tiny shapes: that it runs, not how fast. No number is kept
    #[arg(long)]
    smoke: bool,
    /// Seconds of all parts together
    #[arg(long, default_value_t = 530)]
    seconds: u64,
    /// Folder of the results
    #[arg(long, default_value = ".cuda-check/out")]
    out: PathBuf,
}

/// Packs, runs, or both.
///
/// # Errors
/// If something cannot be built, if there is no device, or if a part has not passed.
pub fn run(args: &CudaCheckArgs) -> Result<()> {
    match &args.step {
        Some(Step::Pack) => pack::pack(),
        Some(Step::Run(args)) => check(args),
        None => {
            pack::pack()?;
            ensure!(
                has("nvidia-smi"),
                "no device here: take the checkout with {FOLDER} to a machine that has one, and run `bash {FOLDER}/run.sh`"
            );
            let RunArgs { only, smoke, seconds, out } = &args.run;
            let mut script =
                command("bash", &[&format!("{FOLDER}/run.sh"), "--seconds", &seconds.to_string()]);
            script.arg("--out").arg(out).args(smoke.then_some("--smoke"));
            if !only.is_empty() {
                script.args(["--only", &only.join(",")]);
            }
            run_shown(&mut script)
        }
    }
}

/// Runs the parts in the folder of a checkout, and prints their table.
fn check(args: &RunArgs) -> Result<()> {
    let names = PARTS.map(|part| part.name);
    let unknown: Vec<_> = args.only.iter().filter(|name| !names.contains(&name.as_str())).collect();
    ensure!(unknown.is_empty(), "there are no parts {unknown:?}, there are {}", names.join(", "));
    let here = std::env::current_dir()?;
    let _link = Link::new(&root(), &here)?;
    fs::create_dir_all(&args.out)?;
    let device = Device::ask();
    println!("{device}");
    let mut scene = Scene::new(&here, args.smoke, &device);
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let mut rows: Vec<Row> = Vec::new();
    for part in PARTS.iter().filter(|part| args.only.is_empty() || args.only.iter().any(|n| n == part.name)) {
        let start = Instant::now();
        let limit = part.limit.min(end.saturating_duration_since(start));
        let ran = match limit < LEAST {
            true => Ran::of(Outcome::NotReached),
            false => {
                println!("\n━━ {}: {}; at most {} s", part.name, part.about, limit.as_secs());
                part.run(&mut scene, start + limit)
                    .unwrap_or_else(|error| Ran::of(Outcome::Failed(format!("{error:#}"))))
            }
        };
        println!("{}: {}", part.name, ran.outcome);
        rows.push(Row { name: part.name, took: start.elapsed(), ran });
        // After each part, so that a run that is cut off leaves what it has.
        fs::write(args.out.join("log.txt"), &scene.log)?;
        if !args.smoke {
            report::write(&args.out, &device, &rows)?;
        }
    }
    println!("\n{}", report::markdown(&device, &rows));
    let n_passed = rows.iter().filter(|row| row.ran.outcome == Outcome::Passed).count();
    if n_passed < rows.len() {
        bail!(
            "{n_passed} of {} parts passed; see the table, and {}",
            rows.len(),
            args.out.join("log.txt").display()
        );
    }
    Ok(())
}

/// The checkout at the place where the tests were built, and look for their files.
struct Link(Option<PathBuf>);

impl Link {
    fn new(built: &Path, here: &Path) -> Result<Self> {
        if built.exists() {
            return Ok(Self(None));
        }
        fs::create_dir_all(built.parent().context("a checkout lies in a folder")?)?;
        std::os::unix::fs::symlink(here, built)
            .with_context(|| format!("tests look for their files in {}", built.display()))?;
        Ok(Self(Some(built.to_owned())))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(link) = &self.0 {
            let _ = fs::remove_file(link);
        }
    }
}
