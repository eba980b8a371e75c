//! Settings of a proxy. Validated where the configuration is read; here they are plain data.

use crate::admin::token::AdminToken;
use crate::auth::{AuthConfig, AuthError};
use crate::bounds::{ConnectionBounds, RequestBounds, SessionBounds};
use crate::fetch::FetchPolicy;
use crate::fleet::roles::Roles;
use crate::openai::cors::AllowedOrigin;
use crate::request_log::RequestLog;
use crate::request_machine::policy::EncodePolicy;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::net::TcpListener;
use triptych_core::limits::Limits;
use triptych_ec::EcStore;
use triptych_ec::token_bucket::TokenBuckets;
use triptych_runtime::discovery::Source;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::listener::Listener;
use triptych_runtime::serve::ServeError;

/// Settings of a proxy.
pub struct ProxyConfig {
    /// Address of the OpenAI API.
    pub http: Listener,
    /// Address of the gRPC API.
    pub grpc: Listener,
    /// An address for operators: `/metrics`, `/healthz` and `/readyz`, and the admin API.
    pub admin: Option<TcpListener>,
    /// The token of the admin API. `None`: it is for callers on this machine, on a loopback address.
    pub admin_token: Option<AdminToken>,
    /// The file that each request's usage is appended to.
    pub accounting_log: Option<PathBuf>,
    /// `host:port` of each encoder worker that is always there. None in all: only text is served.
    pub encoders: Vec<String>,
    /// `host:port` of each PD worker that is always there.
    pub pds: Vec<String>,
    /// Sources of further workers, which come and go.
    pub discovery: Vec<Box<dyn Source>>,
    /// For choices by lot. `None`: the system's randomness; a simulation passes one.
    pub seed: Option<u64>,
    /// The longest wait of a request for its items to be encoded before it is refused on admission, with a pause
    /// after which to come back. `None`: until its deadline.
    pub encode_slo: Option<Duration>,
    /// Division of encodes among the workers that hold encoders.
    pub roles: Roles,
    /// Makes the channels to them.
    pub dialer: Dialer,
    /// The EC store that the workers share; the proxy only asks what it holds.
    pub store: Arc<dyn EcStore>,
    /// Limits of a request.
    pub limits: Limits,
    /// Addresses that the fetcher of item URLs may reach.
    pub fetch: FetchPolicy,
    /// Secret that goes into every content key, so that tenants do not share outputs. Empty: one shared tenant.
    pub tenant_salt: Vec<u8>,
    /// Authentication of clients, and the quota of each tenant. Default: no authentication.
    pub auth: AuthConfig,
    /// Buckets in which all proxies count the rates of tenants together. `None`: each counts alone.
    pub quota_store: Option<TokenBuckets>,
    /// Requests worked on at once, over HTTP and gRPC together; one more is Overloaded.
    pub max_in_flight: usize,
    /// Rules by which items are encoded. Its `max_time` is held to that of a request.
    pub encodes: EncodePolicy,
    /// Patience with clients.
    pub client_times: ClientTimes,
    /// Bounds on what a request may ask for.
    pub bounds: RequestBounds,
    /// Bounds on connections of the HTTP API.
    pub connections: ConnectionBounds,
    /// Origins whose web pages may call the API from a browser. None: no answer has headers of CORS.
    pub allowed_origins: Vec<AllowedOrigin>,
    /// Bounds on live transcriptions.
    pub sessions: SessionBounds,
    /// The requests that are logged.
    pub request_log: RequestLog,
}

/// The longest times of a client. A slower one is cut off, so that slow connections cannot pile up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientTimes {
    /// For the whole head of a request, and so for how long a connection may idle between two; over gRPC, for the
    /// first bytes of a connection. Default 30 s.
    pub head: Duration,
    /// Between two pieces of an HTTP body. Default 10 s. The whole body falls under the request's own time.
    pub body_idle: Duration,
}

impl Default for ClientTimes {
    fn default() -> Self {
        Self { head: Duration::from_secs(30), body_idle: Duration::from_secs(10) }
    }
}

/// A proxy that could not start, or ended by itself.
#[derive(Debug, Error)]
pub enum ProxyError {
    /// There is nobody to send requests to.
    #[error("no PD worker is configured and none can be discovered; name one with --pd")]
    NoPdWorker,
    /// A worker's address is not one.
    #[error("worker address {address:?} is not host:port")]
    WorkerAddress {
        /// As given.
        address: String,
        /// The cause.
        source: tonic::transport::Error,
    },
    /// A file that clients are known by cannot be used.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// The accounting log cannot be written.
    #[error("accounting log {}", path.display())]
    Accounting {
        /// The path given.
        path: PathBuf,
        /// Cause.
        source: std::io::Error,
    },
    /// The fetcher of URLs cannot be built.
    #[error("the fetcher of item URLs cannot be built")]
    Fetcher(#[from] reqwest::Error),
    /// The gRPC server could not start, or a server ended by itself.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// It has drained, and some requests did not end in time.
    #[error(
        "{n_cut} requests were cut: they ran on for longer than --drain-grace ({} s), or a second signal came",
        grace.as_secs_f32()
    )]
    Cut {
        /// Number of requests; each ended with an error.
        n_cut: usize,
        /// Grace period.
        grace: Duration,
    },
}
