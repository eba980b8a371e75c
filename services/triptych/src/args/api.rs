//! Flags of the APIs that clients use.

use clap::Args;
use std::ffi::OsString;
use triptych_proxy::{AllowedOrigin, RequestLog};

/// Flags of the APIs.
#[derive(Args, Clone, Debug)]
pub struct ApiArgs {
    /// Origin whose web pages may call the HTTP API from a browser (CORS), as in https://app.example.com; `*`: every
    /// origin. Repeat, or part by commas, for several. Default: none
    #[arg(
        long,
        value_name = "ORIGIN",
        env = "TRIPTYCH_ALLOWED_ORIGINS",
        value_delimiter = ',',
        alias = "cors-origin"
    )]
    pub allowed_origins: Vec<AllowedOrigin>,
    /// Log a line for each request: `all`, `errors`, a share from 0 to 1 (errors are always logged), or `off`. A line has
    /// ids, counts, times and outcome, no content
    #[arg(
        long,
        value_name = "WHICH",
        env = "TRIPTYCH_REQUEST_LOG",
        default_value_t,
        help_heading = "Logs and traces"
    )]
    pub request_log: RequestLog,
}

impl ApiArgs {
    /// The flags, for a child.
    pub fn to_flags(&self) -> Vec<OsString> {
        let mut flags = vec!["--request-log".into(), self.request_log.to_string().into()];
        for origin in &self.allowed_origins {
            flags.extend(["--allowed-origins".into(), origin.to_string().into()]);
        }
        flags
    }
}
