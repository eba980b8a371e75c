//! `triptych profile --url`: flags of a server of another engine, and the measurement of its curves.

use super::output::{bar, progress_on};
use crate::commit::commit;
use crate::error::CliError;
use clap::Args;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use triptych_bench::client::Target;
use triptych_bench::client::http::{Endpoint, HttpTarget};
use triptych_bench::client::models::choose;
use triptych_plan::curves::CostCurves;
use triptych_plan::profile::api::{self, ApiServer, ApiSettings, ServerInfo};
use triptych_plan::profile::{Extent, host};

/// Flags of a server of another engine.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Another engine's server")]
pub struct ApiArgs {
    /// Measure a running vLLM, or any other OpenAI-compatible server, through its API alone, in place of a model: as in
    /// http://gpu1:8000 or vllm+http://gpu1:8000. --threads is then the number of its cores
    #[arg(long, value_name = "URL", conflicts_with_all = ["model", "cores"])]
    pub url: Option<String>,
    /// Another instance of the engine that only encodes (vLLM's `ec_producer`): images are measured there
    #[arg(long, value_name = "URL", requires = "url")]
    pub encoder_url: Option<String>,
    /// Name of the model there. Default: the first that is listed
    #[arg(long, value_name = "NAME", requires = "url")]
    pub served_model_name: Option<String>,
    /// API key, if the server requires one
    #[arg(long, value_name = "KEY", env = "TRIPTYCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}

/// Size of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Repeats of each point.
    pub rounds: u32,
    /// True for few small points.
    pub is_quick: bool,
    /// Threads of the server; 0: not known.
    pub threads: usize,
}

/// Measures the server at `url`.
///
/// # Errors
/// [`CliError`] for an address that is none, and a server that does not answer.
pub async fn measure(args: &ApiArgs, url: &str, size: &Size) -> Result<CostCurves, CliError> {
    let bar = bar();
    let server = find(args, url).await?;
    let measured = api::measure(&server, &settings(size, &server), &progress_on(&bar)).await;
    bar.finish_and_clear();
    measured.map_err(|e| CliError::failed(format!("cannot measure {url}"), &e))
}

/// The server with its model and its description.
async fn find(args: &ApiArgs, url: &str) -> Result<ApiServer, CliError> {
    let target = target(args, ("--url", url), Endpoint::Chat)?;
    let model = match &args.served_model_name {
        Some(name) => name.clone(),
        None => {
            let listed = target.models().await;
            let listed =
                listed.map_err(|e| CliError::failed(format!("no models are listed at {url}"), &e))?;
            choose(&listed, &BTreeSet::new()).map_err(|e| CliError::setting(format!("--url {url}"), &e))?.name
        }
    };
    let info = ServerInfo::ask(target.base(), &model, args.api_key.as_deref()).await;
    let info = info.map_err(|e| CliError::failed(format!("{url} does not describe itself"), &e))?;
    let with_model = |target: HttpTarget| -> Arc<dyn Target> { Arc::new(target.with_model(model.clone())) };
    let encoder = args.encoder_url.as_deref();
    let encoder = encoder.map(|url| target_of_encoder(args, url)).transpose()?;
    Ok(ApiServer {
        text: with_model(self::target(args, ("--url", url), Endpoint::Completions)?),
        chat: with_model(target),
        encoder: encoder.map(with_model),
        info,
    })
}

fn target_of_encoder(args: &ApiArgs, url: &str) -> Result<HttpTarget, CliError> {
    target(args, ("--encoder-url", url), Endpoint::Chat)
}

/// A client of an endpoint; `vllm+` before the address and options behind it are a proxy's, and left out.
fn target(args: &ApiArgs, (flag, url): (&str, &str), endpoint: Endpoint) -> Result<HttpTarget, CliError> {
    let plain = url.strip_prefix("vllm+").unwrap_or(url);
    let plain = plain.split_once('?').map_or(plain, |(address, _)| address);
    HttpTarget::new(plain, endpoint, String::new(), args.api_key.clone())
        .map_err(|e| CliError::setting(format!("{flag} {url}"), &e))
}

fn settings(size: &Size, server: &ApiServer) -> ApiSettings {
    let built_from = host::Build { commit: commit(), store: "none".into() };
    let mut measured = host::provenance(&[], size.rounds, None, built_from);
    let engine = server.info.engine.as_deref().unwrap_or("a server");
    measured.host = format!("{engine} at {}, asked from {}", server.info.url, measured.host);
    let name = server.text.model();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    ApiSettings {
        rounds: size.rounds,
        extent: if size.is_quick { Extent::Quick } else { Extent::Full },
        // The low digits: no two measurements have a text in common.
        salt: now as u64,
        threads: Some(size.threads).filter(|n| *n > 0),
        // The part that a directory of the model would be named by.
        model: name.rsplit('/').next().unwrap_or(&name).to_owned(),
        measured,
    }
}
