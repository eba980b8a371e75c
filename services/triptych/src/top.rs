//! `triptych top`: a running cluster in a terminal, from its proxy's metrics and, where that is open, its admin API.
//!
//! It asks one proxy, and shows what that proxy knows. It changes nothing.

mod page;
mod summary;

use crate::error::CliError;
use crate::listen::here;
use crate::plain_http::HttpGet;
use clap::Args;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use summary::{Look, Summary};
use tokio::time::sleep;
use triptych_bench::slo::Slo;
use triptych_plan::online::Exposition;

/// Most bytes of an answer.
const MAX_BYTES: u64 = 16 << 20;
/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);

/// Flags of `top`.
#[derive(Args, Debug)]
pub struct TopArgs {
    /// Address of the proxy's metrics and admin API, its --admin
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<String>,
    /// Address of a proxy without --admin: its --http, if that has no TLS
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_HTTP", default_value = "127.0.0.1:8080")]
    pub http: String,
    /// File with the token of the admin API
    #[arg(long, value_name = "FILE", env = "TRIPTYCH_ADMIN_TOKEN_FILE")]
    pub admin_token_file: Option<PathBuf>,
    /// SLO of the goodput, as in ttft=500ms,tpot=50ms
    #[arg(long, value_name = "SLO")]
    pub slo: Option<Slo>,
    /// Seconds between two looks
    #[arg(long, value_name = "S", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval_s: u64,
    /// Show once, of one interval, and end
    #[arg(long)]
    pub once: bool,
    /// Print a JSON object for each look
    #[arg(long)]
    pub json: bool,
}

/// Looks until it is stopped.
///
/// # Errors
/// [`CliError::Failed`] if the proxy does not answer.
pub async fn run(args: TopArgs) -> Result<(), CliError> {
    let token = args.admin_token_file.as_ref().map(|file| {
        let read = std::fs::read_to_string(file).map(|text| text.trim().to_owned());
        read.map_err(|e| CliError::setting(file.display(), &e))
    });
    let token = token.transpose()?;
    let mut before = look(&args, token.as_deref()).await?;
    loop {
        sleep(Duration::from_secs(args.interval_s)).await;
        let now = look(&args, token.as_deref()).await?;
        let summary = Summary::between(&before, &now, args.slo.as_ref());
        show(&args, &summary)?;
        if args.once {
            return Ok(());
        }
        before = now;
    }
}

/// Asks once.
async fn look(args: &TopArgs, token: Option<&str>) -> Result<Look, CliError> {
    let given = args.admin.as_ref().unwrap_or(&args.http);
    let address = here(given);
    let ask =
        |path, token| HttpGet { address: &address, path, token, max_bytes: MAX_BYTES }.send_within(PATIENCE);
    let failed =
        |e: std::io::Error| CliError::failed(format!("http://{given}/metrics; is this a proxy?"), &e);
    let answer = ask("/metrics", None).await.map_err(failed)?;
    if answer.status != Some(200) {
        return Err(CliError::Failed(format!("http://{given}/metrics: not plain HTTP, or not 200")));
    }
    let metrics = Exposition::read(&answer.body)
        .map_err(|e| CliError::failed(format!("http://{given}/metrics"), &e))?;
    let workers = match &args.admin {
        Some(_) => ask("/admin/workers", token).await.ok().filter(|answer| answer.status == Some(200)),
        None => None,
    };
    let workers = workers.and_then(|answer| serde_json::from_str(&answer.body).ok());
    Ok(Look { at: Instant::now(), metrics, workers })
}

fn show(args: &TopArgs, summary: &Summary) -> Result<(), CliError> {
    let mut out = std::io::stdout();
    let text = if args.json {
        serde_json::to_string(summary).map_err(|e| CliError::failed("cannot write JSON", &e))? + "\n"
    } else {
        // Clears the screen of a terminal, so that the next look stands where this one did.
        let clear = if out.is_terminal() && !args.once { "\x1b[H\x1b[2J" } else { "" };
        format!("{clear}{}", page::text(summary))
    };
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| CliError::failed("cannot print", &e))
}
