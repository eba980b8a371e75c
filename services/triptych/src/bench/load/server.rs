//! The server that `bench run` measures: its flags, and the model that its requests name.

use super::screen::Screen;
use crate::error::CliError;
use clap::{Args, ValueEnum};
use std::sync::Arc;
use triptych_bench::client::Target;
use triptych_bench::client::grpc::GrpcTarget;
use triptych_bench::client::http::{Endpoint, HttpTarget};
use triptych_bench::client::models::{ListedModel, choose};
use triptych_bench::scrape::Scraper;
use triptych_bench::sweep::{N_CHANNELS, Server};
use triptych_bench::workload::Workload;
use triptych_runtime::grpc;

/// Flags of the server.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Server")]
pub struct ServerArgs {
    /// An OpenAI-compatible server, as in `http://127.0.0.1:8080`: this one or any other
    #[arg(long, value_name = "URL", required_unless_present = "grpc", conflicts_with = "grpc")]
    pub url: Option<String>,
    /// Triptych's gRPC API, as in `127.0.0.1:50051`: exact token times, stages, and where items came from
    #[arg(long, value_name = "ADDR")]
    pub grpc: Option<String>,
    /// Over HTTP: the endpoint of OpenAI's API. The completions of other servers take no items
    #[arg(long, value_name = "ENDPOINT", value_enum, default_value_t = EndpointArg::Chat, conflicts_with = "grpc")]
    pub endpoint: EndpointArg,
    /// Model name. Default: the first that the server lists and that takes the workload's items
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// API key or token, if the server requires one
    #[arg(long, value_name = "KEY", env = "TRIPTYCH_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// URL of a process's metrics; repeat for every worker. Default: `/metrics` of --url
    #[arg(long, value_name = "URL")]
    pub metrics: Vec<String>,
}

/// Endpoints of OpenAI's API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum EndpointArg {
    /// /v1/chat/completions
    Chat,
    /// /v1/completions
    Completions,
    /// /v1/audio/transcriptions; answers are as long as the model makes them
    Transcriptions,
}

/// The server; where no model is named, with the first that takes the workload's items, which is said on the screen.
///
/// # Errors
/// [`CliError`] for a wrong address, a server that does not answer, and a list of models of which none fits.
pub async fn find(args: &ServerArgs, workload: &Workload, screen: &Screen) -> Result<Server, CliError> {
    let (target, own): (Arc<dyn Target>, Option<String>) = match (&args.url, &args.grpc) {
        (_, Some(address)) => {
            let target = grpc_target(args, address)?;
            let target = match &args.model {
                Some(_) => target,
                None => {
                    let listed = target.models().await;
                    let listed = listed.map_err(|e| no_list(address, &e))?;
                    let model = chosen(&listed, workload, address, screen)?;
                    target.with_model(model)
                }
            };
            (Arc::new(target), None)
        }
        (Some(url), None) => {
            let target = http_target(args, url)?;
            let target = match &args.model {
                Some(_) => target,
                None => {
                    let listed = target.models().await.map_err(|e| no_list(url, &e))?;
                    let model = chosen(&listed, workload, url, screen)?;
                    target.with_model(model)
                }
            };
            let metrics = format!("{}/metrics", target.base());
            (Arc::new(target), Some(metrics))
        }
        (None, None) => return Err(CliError::Setting("the server is missing: give --url or --grpc".into())),
    };
    let urls = if args.metrics.is_empty() { own.into_iter().collect() } else { args.metrics.clone() };
    let scraper = Scraper::new(urls).map_err(|e| CliError::failed("cannot make an HTTP client", &e))?;
    Ok(Server { target, scraper })
}

fn no_list(place: &str, cause: &dyn std::error::Error) -> CliError {
    CliError::failed(format!("no models are listed at {place}; --model names one"), cause)
}

/// Name of the model for the workload.
fn chosen(
    listed: &[ListedModel],
    workload: &Workload,
    place: &str,
    screen: &Screen,
) -> Result<String, CliError> {
    let model = choose(listed, &workload.modalities()).map_err(|e| {
        CliError::setting(format!("--workload {} at {place}; --model names another", workload.text()), &e)
    })?;
    screen.line(&format!("model {}: {}; --model names another", model.name, model.why));
    Ok(model.name)
}

fn http_target(args: &ServerArgs, url: &str) -> Result<HttpTarget, CliError> {
    let endpoint = match args.endpoint {
        EndpointArg::Chat => Endpoint::Chat,
        EndpointArg::Completions => Endpoint::Completions,
        EndpointArg::Transcriptions => Endpoint::Transcriptions,
    };
    HttpTarget::new(url, endpoint, args.model.clone().unwrap_or_default(), args.api_key.clone())
        .map_err(|e| CliError::setting(format!("--url {url}"), &e))
}

fn grpc_target(args: &ServerArgs, address: &str) -> Result<GrpcTarget, CliError> {
    let channels = (0..N_CHANNELS).map(|_| grpc::channel(address)).collect::<Result<Vec<_>, _>>();
    let channels = channels.map_err(|e| {
        CliError::setting(format!("--grpc {address}: an address looks like 127.0.0.1:50051"), &e)
    })?;
    let model = args.model.clone().unwrap_or_default();
    // The error would repeat the key.
    GrpcTarget::new(address, channels, model, args.api_key.as_deref())
        .map_err(|_| CliError::Setting("--api-key is not ASCII text on one line".into()))
}
