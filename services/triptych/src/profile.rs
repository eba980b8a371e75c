//! `triptych profile`: flags of the measurement of cost curves, the processes that it needs, and its files.
//!
//! Compute, publishing and loading are measured by [`triptych_plan::profile`], the proxy by [`triptych_bench::overhead`] with
//! processes of this binary. Nothing else should run meanwhile; the load of other processes is measured and reported. A server of
//! another engine is measured through its API ([`triptych_plan::profile::api`]).

mod api;
mod output;
mod processes;

use crate::args::rows::RowArgs;
use crate::args::{ComputeArgs, OperatorEcArgs};
use crate::commit::commit;
use crate::error::CliError;
use crate::model;
use api::ApiArgs;
use clap::Args;
use clap::builder::FalseyValueParser;
use indicatif::ProgressBar;
use output::{bar, progress_on};
use processes::Processes;
use std::path::PathBuf;
use std::sync::Arc;
use triptych_bench::overhead;
use triptych_core::DType;
use triptych_core::limits::Limits;
use triptych_ec::EcStore;
use triptych_models::{Model, ModelSource};
use triptych_plan::curves::{CostCurves, FrontCost, Provenance, ProxyCost, TowerCurves, VERSION};
use triptych_plan::profile::{
    self, BusyWatch, Extent, ProfileSettings, Profiled, ProfiledTower, Rounds, host, store,
};

/// Memory for keys and values while steps are measured: as much as a worker has by default.
const KV_BYTES: usize = 1 << 30;
/// Most rounds that can be asked for.
const MOST_ROUNDS: u32 = 1000;

/// Flags of `triptych profile`.
#[derive(Args, Clone, Debug)]
pub struct ProfileArgs {
    /// A Hugging Face directory, or a model id of the hub
    #[arg(value_name = "DIR_OR_HUB_ID", required_unless_present = "url")]
    pub model: Option<String>,
    /// Cores that the measurement is bound to, as in 0,1, as many as --threads. Default: not bound
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub cores: Vec<usize>,
    /// Repeats of each point of a curve, of which median and 95th percentile are kept
    #[arg(long, value_name = "N", default_value_t = 15,
          value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_ROUNDS)))]
    pub rounds: u32,
    /// Few small points: a smoke test, too coarse to plan by
    #[arg(long, value_parser = FalseyValueParser::new())]
    pub quick: bool,
    /// File for the curves, as JSON
    #[arg(long, short = 'o', value_name = "FILE", default_value = "curves.json")]
    pub output: PathBuf,
    // Below, since each heading lasts until the next.
    /// Compute settings of the workers; `--threads` is the number of cores of one worker
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Store of encoder outputs
    #[command(flatten)]
    pub store: OperatorEcArgs,
    /// Format of encoder outputs
    #[command(flatten)]
    pub rows: RowArgs,
    /// A server of another engine
    #[command(flatten)]
    pub api: ApiArgs,
}

/// Measures, writes the file, and prints a summary in Markdown.
///
/// # Errors
/// [`CliError`] for a model or store that cannot be used, and for cores that do not exist.
pub async fn run(args: ProfileArgs) -> Result<(), CliError> {
    output::check(&args.output)?;
    if let Some(url) = &args.api.url {
        let size = api::Size { rounds: args.rounds, is_quick: args.quick, threads: args.compute.threads };
        let curves = api::measure(&args.api, url, &size).await?;
        return output::write_curves(&args.output, &curves, None);
    }
    host::bind(&args.cores, args.compute.threads)?;
    let source = find_model(&args).await?;
    // A store that cannot be opened is an error before minutes of measuring.
    let (opened, store_name) = args.store.open_alone(&Limits::default()).await?;
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
    let built_from = host::Build { commit: commit(), store: store_name };
    let provenance = host::provenance(&args.cores, args.rounds, busy, built_from);
    let curves = assemble(&args, measured, opened, provenance, &bar).await?;
    bar.finish_and_clear();
    output::write_curves(&args.output, &curves, busy)
}

/// Compute curves of a model.
struct Measured {
    name: String,
    profiled: Profiled,
    dtype: DType,
}

async fn find_model(args: &ProfileArgs) -> Result<ModelSource, CliError> {
    let mut sources = model::find(args.model.as_slice()).await?;
    let source = sources.pop().ok_or_else(|| CliError::Setting("no model to measure".into()))?;
    Ok(ModelSource { format: args.compute.load_format.into(), ..source })
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
    let profiled = profile::measure(&model, &settings, &progress_on(bar)).map_err(|e| refused(&e))?;
    let name = model.name().to_string();
    let types = args.rows.types(args.compute.encoder_dtype());
    Ok(Measured { dtype: types.of(&name), name, profiled })
}

async fn assemble(
    args: &ProfileArgs,
    measured: Measured,
    opened: Arc<dyn EcStore>,
    provenance: Provenance,
    bar: &ProgressBar,
) -> Result<CostCurves, CliError> {
    let Measured { name, profiled, dtype } = measured;
    let format = store::OutputFormat { hidden: profiled.hidden, dtype, quick: args.quick };
    let (publish, load) = store::measure(opened, &format, args.rounds, &progress_on(bar)).await?;
    host::spread(&args.cores)?;
    let (proxy, front) = proxy_costs(args, bar).await?;
    Ok(CostCurves {
        version: VERSION,
        model: name,
        precision: crate::args::name_of(args.compute.precision),
        kv_dtype: args.compute.kv_cache_dtype.map(crate::args::name_of),
        threads: host::threads(args.compute.threads, &args.cores),
        on_device: args.compute.timed_by.is_some() || !args.compute.device.is_cpu(),
        measured: provenance,
        encode: profiled.encode,
        encode_parts: profiled.encode_parts,
        preprocess: profiled.preprocess,
        items: profiled.items,
        step: profiled.step,
        publish,
        load,
        row_bytes: row_bytes(profiled.hidden, dtype),
        tower: profiled.tower,
        more_towers: profiled.more_towers.into_iter().map(|tower| tower_curves(tower, dtype)).collect(),
        kv: profiled.kv,
        prompt: profiled.prompt,
        proxy,
        front,
        colocated: profiled.colocated,
        interference: Some(profiled.interference),
        between_steps_us: profiled.between_steps_us,
        pipelining: profiled.pipelining,
        in_service: None,
        api: None,
    })
}

/// Starts the processes, and measures what the proxy costs.
async fn proxy_costs(args: &ProfileArgs, bar: &ProgressBar) -> Result<(ProxyCost, FrontCost), CliError> {
    let workers = overhead::null_workers::start().await?;
    let processes = Processes::start(&workers.address)?;
    bar.set_message("proxy");
    let progress = |done: u64, of: u64| {
        bar.set_length(of);
        bar.set_position(done);
    };
    let (added, front) = overhead::measure(&processes.servers, args.rounds, args.quick, &progress).await?;
    let proxy = ProxyCost {
        request_us: added.request_us,
        item_us: added.item_us,
        item_byte_us: added.item_byte_us,
        token_us: added.token_us,
    };
    let front = FrontCost {
        request_us: front.request_us,
        item_us: front.item_us,
        item_byte_us: front.item_byte_us,
        wake_us: front.wake_us,
        write_us: front.write_us,
        message_us: front.message_us,
        misplaced: front.misplaced,
    };
    Ok((proxy, front))
}

fn tower_curves(tower: ProfiledTower, dtype: DType) -> TowerCurves {
    TowerCurves {
        name: tower.name,
        encode: tower.encode,
        encode_parts: tower.encode_parts,
        preprocess: tower.preprocess,
        items: tower.items,
        row_bytes: row_bytes(tower.hidden, dtype),
        is_cross_attended: tower.is_cross_attended,
    }
}

fn row_bytes(hidden: usize, dtype: DType) -> usize {
    let scale = if dtype.is_scaled() { size_of::<f32>() } else { 0 };
    hidden * dtype.size() + scale
}
