//! `triptych health`: checks the health of a process, for probes in an image without a shell or `curl`.
//!
//! In a container of a role the role's own variables give the address, so the probe is two words.

use crate::args::tls::TlsArgs;
use crate::error::{CliError, chain};
use crate::listen::here;
use crate::plain_http::HttpGet;
use clap::Args;
use std::time::Duration;
use tokio::time::timeout;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use triptych_runtime::Drain;

/// The answer to a probe is a line; whatever sends more is no role of ours.
const MAX_ANSWER_BYTES: u64 = 4096;

/// Flags of `health`.
#[derive(Args, Debug)]
pub struct HealthArgs {
    /// Ask over HTTP at this address, a role's `--admin`
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<String>,
    /// Address of a proxy without `--admin`: its `--http`, if that has no TLS
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_HTTP")]
    pub http: Option<String>,
    /// Ask over gRPC instead (`grpc.health.v1`), with this part's certificate where there is one
    #[arg(long, value_name = "ADDR")]
    pub grpc: Option<String>,
    /// Check readiness: loaded, not stopping, and for a proxy with workers. Default: check that it answers
    #[arg(long)]
    pub ready: bool,
    /// Milliseconds for the answer
    #[arg(long, value_name = "MS", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    pub timeout_ms: u64,
    /// TLS
    #[command(flatten)]
    pub tls: TlsArgs,
}

/// Asks once.
///
/// # Errors
/// [`CliError::Failed`] for a process that is not well, [`CliError::Setting`] if it is not said where one is.
pub async fn run(args: HealthArgs) -> Result<(), CliError> {
    let asked = async {
        match (&args.grpc, args.admin.as_ref().or(args.http.as_ref())) {
            (Some(address), _) => over_grpc(&args, address).await,
            (None, Some(address)) => over_http(address, if args.ready { "/readyz" } else { "/healthz" }).await,
            (None, None) => Err(CliError::Setting(
                "nobody to ask: give --admin ADDR (or TRIPTYCH_ADMIN), --http ADDR (or TRIPTYCH_HTTP), or --grpc ADDR"
                    .into(),
            )),
        }
    };
    let late = || CliError::Failed(format!("no answer within {} ms", args.timeout_ms));
    timeout(Duration::from_millis(args.timeout_ms), asked).await.map_err(|_| late())?
}

/// Asks a process over plain HTTP; `path` is `/readyz` or `/healthz`.
///
/// # Errors
/// [`CliError::Failed`] for any answer but 200.
pub async fn over_http(address: &str, path: &str) -> Result<(), CliError> {
    let at = here(address);
    let get = HttpGet { address: &at, path, token: None, max_bytes: MAX_ANSWER_BYTES };
    let answer = get.send().await.map_err(|e| CliError::failed(format!("http://{address}{path}"), &e))?;
    match answer.status {
        Some(200) => Ok(()),
        Some(status) => {
            Err(CliError::Failed(format!("http://{address}{path}: {status} {}", answer.body.trim())))
        }
        None => Err(CliError::Failed(format!("{address} does not speak plain HTTP"))),
    }
}

/// Health over gRPC is readiness: a server that says NOT_SERVING answers, so without `--ready` that will do.
async fn over_grpc(args: &HealthArgs, address: &str) -> Result<(), CliError> {
    let channel = args.tls.links(&Drain::new())?.dialer().dial(&here(address));
    let channel = channel.map_err(|e| CliError::setting(format!("--grpc {address}"), &e))?;
    let asked = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
    let status = asked.map_err(|e| CliError::Failed(format!("grpc {address}: {}", chain(&e))))?;
    match status.get_ref().status() {
        ServingStatus::Serving => Ok(()),
        _ if !args.ready => Ok(()),
        other => Err(CliError::Failed(format!("grpc {address}: {}", other.as_str_name()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use tokio::net::TcpListener;
    use triptych_runtime::MetricsRegistry;
    use triptych_runtime::admin::{self, Readiness};

    fn flags(line: &[&str]) -> HealthArgs {
        match Cli::parse_from([&["triptych", "health"], line].concat()).command {
            Command::Health(args) => args,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_process_that_loads_is_alive_and_not_ready() {
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let drain = Drain::new();
        let readiness = Readiness::new(drain.clone());
        admin::spawn(listener, admin::router(readiness.clone(), MetricsRegistry::default()), &drain);
        run(flags(&["--admin", &address])).await.unwrap();
        let e = run(flags(&["--admin", &address, "--ready"])).await.unwrap_err().to_string();
        assert!(e.contains("503 not ready"), "{e}");
        readiness.set_loaded();
        run(flags(&["--admin", &address, "--ready"])).await.unwrap();
        run(flags(&["--http", &address, "--ready"])).await.unwrap();
    }

    #[tokio::test]
    async fn nobody_there_and_nobody_named_are_told_apart() {
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().to_string();
        let e = run(flags(&["--admin", &closed])).await.unwrap_err();
        assert!(matches!(e, CliError::Failed(_)) && e.to_string().contains(&closed), "{e}");
        assert!(matches!(run(flags(&["--grpc", &closed])).await, Err(CliError::Failed(_))));
        assert!(matches!(run(flags(&[])).await, Err(CliError::Setting(_))));
    }

    #[tokio::test]
    async fn who_never_answers_is_not_waited_for() {
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = silent.local_addr().unwrap().to_string();
        let e = run(flags(&["--admin", &address, "--timeout-ms", "20"])).await.unwrap_err();
        assert!(e.to_string().contains("20 ms"), "{e}");
    }
}
