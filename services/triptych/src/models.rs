//! `triptych models`: facts about a directory, its stages, and their memory.
//!
//! It starts nothing. Numbers come from configuration and headers ([`triptych_models::model::Inventory`]);
//! `--measure` loads each stage and looks at this process's memory.

mod facts;
mod measure;
mod table;

use crate::args::PrecisionArg;
use crate::error::{CliError, chain};
use crate::model;
use clap::Args;
use facts::Facts;
use std::io::Write;
use tokio::task::spawn_blocking;
use triptych_models::compute::ComputeConfig;
use triptych_models::{Model, ModelSource};

/// Flags of `triptych models`.
#[derive(Args, Clone, Debug)]
pub struct ModelsArgs {
    /// Hugging Face directories, or model ids of the hub; none: the sample models
    #[arg(value_name = "[NAME=]DIR_OR_HUB_ID")]
    pub models: Vec<String>,
    /// Print one JSON list of everything, in bytes
    #[arg(long)]
    pub json: bool,
    /// Load each stage in turn, and print how much memory of this process that took (Linux only)
    #[arg(long)]
    pub measure: bool,
    /// Element type to load with
    #[arg(long, value_name = "TYPE", default_value = "f32", requires = "measure")]
    pub precision: PrecisionArg,
}

/// Looks at every model and prints what it found.
///
/// # Errors
/// [`CliError::Failed`] for a directory that cannot be served, with the words that serving it would have.
pub async fn run(args: ModelsArgs) -> Result<(), CliError> {
    let sources = model::find(&args.models).await.map_err(as_failure)?;
    let (measure, json) = (args.measure.then(|| config(args.precision)), args.json);
    let looked = spawn_blocking(move || {
        sources.iter().map(|source| look(source, measure)).collect::<Result<Vec<_>, _>>()
    });
    let all = looked.await.map_err(|e| CliError::failed("looking at the models ended early", &e))??;
    let text = if json {
        let list: Vec<_> = all.iter().map(Facts::json).collect();
        format!("{:#}\n", serde_json::Value::from(list))
    } else {
        all.iter().map(table::of).collect::<Vec<_>>().join("\n")
    };
    let written = std::io::stdout().lock().write_all(text.as_bytes());
    written.map_err(|e| CliError::failed("cannot write the answer", &e))
}

fn config(precision: PrecisionArg) -> ComputeConfig {
    ComputeConfig { precision: precision.into(), ..ComputeConfig::default() }
}

fn look(source: &ModelSource, measure: Option<ComputeConfig>) -> Result<Facts, CliError> {
    model::check(source).map_err(as_failure)?;
    let refused = |e| CliError::Failed(format!("{} cannot be served: {}", source.dir.display(), chain(&e)));
    let model = Model::open(source).map_err(refused)?;
    let inventory = model.inventory().map_err(refused)?;
    let measured = measure.map(|config| measure::stages(&model, config)).transpose().map_err(refused)?;
    Ok(Facts::new(source, &model, inventory, measured))
}

/// All refusals have one exit code here.
fn as_failure(error: CliError) -> CliError {
    CliError::Failed(error.to_string())
}
