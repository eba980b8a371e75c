//! `triptych profile`: measures the cost curves of a model on this machine, for `triptych plan`.
//!
//! Compute is measured in this process with the workers' own parts ([`triptych_plan::profile`]), publishing and loading
//! with a connector over the store, and the proxy as a process between two workers that take no time. What a worker with
//! its own cores takes is what comes out, so nothing else should run meanwhile; what did is measured, and told.

mod displaced;
mod host;
mod null;
mod page;
mod proxy;
mod store;

use crate::args::rows::RowArgs;
use crate::args::{ComputeArgs, OperatorEcArgs};
use crate::error::{CliError, chain};
use crate::model;
use clap::Args;
use clap::builder::FalseyValueParser;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::sync::Arc;
use triptych_core::DType;
use triptych_core::limits::Limits;
use triptych_ec::EcStore;
use triptych_models::{Model, ModelSource};
use triptych_plan::curves::{CostCurves, Provenance, VERSION};
use triptych_plan::profile::{self, Busy, BusyWatch, Extent, ProfileSettings, Profiled, Rounds};

/// Memory for keys and values while steps are measured: as much as a worker has by default.
const KV_BYTES: usize = 1 << 30;
/// Largest share that may be asked for: a week of rounds helps nobody.
const MOST_ROUNDS: u32 = 1000;

/// Flags of `triptych profile`.
#[derive(Args, Clone, Debug)]
pub struct ProfileArgs {
    /// A Hugging Face directory, or a model id of the hub
    #[arg(value_name = "DIR_OR_HUB_ID")]
    pub model: String,
    /// How workers compute: `--threads` is how many cores one worker has
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// What outputs look like
    #[command(flatten)]
    pub rows: RowArgs,
    /// Where outputs go
    #[command(flatten)]
    pub store: OperatorEcArgs,
    /// Cores that the measurement is bound to, as in 0,1; none: wherever the system puts it. As many as --threads
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// How often each place of a curve is measured; medians and 95th percentiles are taken of them
    #[arg(long, value_name = "N", default_value_t = 15,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_ROUNDS)))]
    pub rounds: u32,
    /// Few small places: shows that it works, and is too coarse to plan by
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub quick: bool,
    /// Where the curves are written, as JSON
    #[arg(long, short = 'o', value_name = "FILE", default_value = "curves.json")]
    pub output: PathBuf,
}

/// Measures, writes the file, and prints a summary in Markdown.
///
/// # Errors
/// [`CliError`] for a model or store that cannot be used, and for cores that are not there.
pub async fn run(args: ProfileArgs) -> Result<(), CliError> {
    host::bind(&args.cores, args.compute.threads)?;
    let source = found(&args).await?;
    // What cannot be opened is told before minutes of measuring.
    let opened = args.store.open_alone(&Limits::default()).await?;
    let bar = bar();
    let (measured, busy, args) = tokio::task::spawn_blocking({
        let bar = bar.clone();
        move || {
            let watch = BusyWatch::start(&args.cores);
            let measured = compute(&source, &args, &bar)?;
            Ok::<_, CliError>((measured, watch.so_far(), args))
        }
    })
    .await
    .map_err(|e| CliError::failed("measuring ended early", &e))??;
    let curves = assemble(&args, measured, opened, &bar).await?;
    let curves = CostCurves { measured: host::provenance(&args, busy, curves.measured.store), ..curves };
    bar.finish_and_clear();
    curves.check().map_err(|e| CliError::failed("the curves that were measured cannot be used", &e))?;
    let text = serde_json::to_string_pretty(&curves);
    let text = text.map_err(|e| CliError::failed("cannot write the curves as JSON", &e))?;
    std::fs::write(&args.output, text + "\n")
        .map_err(|e| CliError::setting(format!("cannot write --output {}", args.output.display()), &e))?;
    let mut page = page::of(&curves);
    if let Some(busy) = busy.filter(|busy| busy.total() > Busy::DOUBTFUL) {
        page.push_str(&page::warning(busy));
    }
    let written = std::io::stdout().lock().write_all(page.as_bytes());
    written.map_err(|e| CliError::failed("cannot write the summary", &e))
}

struct Measured {
    name: String,
    profiled: Profiled,
    dtype: DType,
}

async fn found(args: &ProfileArgs) -> Result<ModelSource, CliError> {
    let mut sources = model::find(std::slice::from_ref(&args.model)).await?;
    let source = sources.pop().ok_or_else(|| CliError::Setting("no model to measure".into()))?;
    let source = ModelSource { format: args.compute.load_format.into(), ..source };
    let dir = args.output.parent().filter(|dir| !dir.as_os_str().is_empty());
    match dir.filter(|dir| !dir.is_dir()) {
        // After minutes of measuring is too late to say so.
        Some(dir) => Err(CliError::Setting(format!("--output: there is no directory {}", dir.display()))),
        None => Ok(source),
    }
}

fn compute(source: &ModelSource, args: &ProfileArgs, bar: &ProgressBar) -> Result<Measured, CliError> {
    model::check(source)?;
    let refused =
        |e: &dyn std::error::Error| CliError::setting(format!("cannot measure {}", source.dir.display()), e);
    let model = Model::open(source).map_err(|e| refused(&e))?;
    let settings = ProfileSettings {
        compute: args.compute.config(),
        rounds: Rounds::new(usize::try_from(args.rounds).unwrap_or(1)),
        extent: if args.quick { Extent::Quick } else { Extent::Full },
        kv_bytes: KV_BYTES,
    };
    let progress = |part: &'static str, done: usize, of: usize| {
        bar.set_message(part);
        bar.set_length(of as u64);
        bar.set_position(done as u64);
    };
    let profiled = profile::measure(&model, &settings, &progress).map_err(|e| refused(&e))?;
    let name = model.name().to_string();
    let types = args.rows.types(args.compute.encoder_dtype());
    Ok(Measured { dtype: types.of(&name), name, profiled })
}

async fn assemble(
    args: &ProfileArgs,
    measured: Measured,
    (opened, store): (Arc<dyn EcStore>, String),
    bar: &ProgressBar,
) -> Result<CostCurves, CliError> {
    let Measured { name, profiled, dtype } = measured;
    let row_bytes = row_bytes(profiled.hidden, dtype);
    let sizes = store::Sizes { hidden: profiled.hidden, dtype, quick: args.quick };
    let (publish, load) = store::measure(opened, &sizes, args.rounds, bar).await?;
    host::spread(&args.cores)?;
    let (proxy, front) = proxy::measure(args.rounds, args.quick, bar).await?;
    Ok(CostCurves {
        version: VERSION,
        model: name,
        precision: crate::args::name_of(args.compute.precision),
        kv_dtype: args.compute.kv_cache_dtype.map(crate::args::name_of),
        threads: host::threads(args.compute.threads, &args.cores),
        measured: Provenance { store, ..Provenance::default() },
        encode: profiled.encode,
        encode_parts: profiled.encode_parts,
        preprocess: profiled.preprocess,
        items: profiled.items,
        step: profiled.step,
        publish,
        load,
        row_bytes,
        kv: profiled.kv,
        prompt: profiled.prompt,
        proxy,
        front,
        together: profiled.together,
    })
}

fn row_bytes(hidden: usize, dtype: DType) -> usize {
    let scale = if dtype.is_scaled() { size_of::<f32>() } else { 0 };
    hidden * dtype.size() + scale
}

fn bar() -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{msg:>10} {wide_bar} {pos}/{len} {elapsed}");
    ProgressBar::new(1).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// The error of an asynchronous part.
fn broken(what: &str, cause: &dyn std::error::Error) -> CliError {
    CliError::Failed(format!("{what}: {}", chain(cause)))
}
