//! A proxy without listeners, for the simulation under `tests/sim` and the fuzzer under `tests/fuzz`, which bring their
//! own network.
//!
//! The same parts as in [`crate::run`], behind the same admission. It fetches nothing: URLs are refused.

use crate::accounting::Accounting;
use crate::admission::Admission;
use crate::auth::{Auth, AuthConfig};
use crate::bounds::{RequestBounds, SessionBounds};
use crate::budget::RetryBudget;
use crate::cache::EncoderCache;
use crate::config::{ClientTimes, ProxyError};
use crate::encode::{EncodeParts, Encodes};
use crate::fetch::{FetchPolicy, Fetcher, Reach};
use crate::fleet::roles::Roles;
use crate::fleet::{Fleet, FleetSettings};
use crate::grpc::{GrpcApi, admit::Admit};
use crate::items::Materials;
use crate::items::preparing::Preparing;
use crate::observe::Observer;
use crate::openai;
use crate::orchestrate::{LoadedAdapters, Orchestrator};
use crate::request_log::RequestLog;
use crate::request_machine::policy::EncodePolicy;
use crate::rows::RowLoader;
use crate::running::RequestTable;
use axum::Router;
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_ec::EcStore;
use triptych_proto::v1::triptych_server::TriptychServer;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::{Drain, MetricsRegistry};

/// Settings of an embedded proxy.
pub struct EmbeddedConfig {
    /// `host:port` of each encoder worker.
    pub encoders: Vec<String>,
    /// `host:port` of each PD worker.
    pub pds: Vec<String>,
    /// Opens channels to them.
    pub dialer: Dialer,
    /// The EC store that the workers share.
    pub store: Arc<dyn EcStore>,
    /// Limits on requests.
    pub limits: Limits,
    /// Bound on requests in flight.
    pub max_in_flight: usize,
    /// Seed of random choices. `None`: the system's randomness.
    pub seed: Option<u64>,
}

/// A running proxy. Dropping it ends its tasks.
pub struct Embedded {
    api: GrpcApi,
    registry: MetricsRegistry,
}

impl Embedded {
    /// Starts worker discovery. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`ProxyError`] if it cannot start.
    pub fn start(
        config: EmbeddedConfig,
        drain: Drain,
        metrics: &MetricsRegistry,
    ) -> Result<Self, ProxyError> {
        let limits = config.limits;
        let auth = Auth::start(AuthConfig::default(), limits.max_body_bytes, &drain)?;
        let rows = RowLoader::new(Arc::clone(&config.store), &config.dialer, limits.clone());
        let fleet = FleetSettings {
            encoders: config.encoders,
            pds: config.pds,
            discovery: Vec::new(),
            dialer: config.dialer,
            seed: config.seed,
            encode_slo: None,
            roles: Roles::default(),
        };
        let fleet = Arc::new(Fleet::start(fleet, metrics)?);
        let cache = EncoderCache::new(config.store, limits.max_object_bytes);
        let policy = EncodePolicy::default();
        let budget = Arc::new(RetryBudget::new(policy.retries));
        let fetch = FetchPolicy { reach: Reach::Listed, ..FetchPolicy::default() };
        let encodes = Encodes::new(EncodeParts {
            fleet: Arc::clone(&fleet),
            cache,
            budget: Arc::clone(&budget),
            policy,
            drain: &drain,
            metrics,
        });
        let orchestrator = Arc::new(Orchestrator {
            encodes,
            budget,
            fleet,
            materials: Materials {
                fetcher: Fetcher::new(fetch, limits.clone())?,
                limits: limits.clone(),
                tenant_salt: Arc::default(),
                preparing: Preparing::default(),
            },
            rows,
            observer: Observer::new(metrics),
            drain,
            request_log: RequestLog::Off,
            bounds: RequestBounds::default(),
            table: RequestTable::default(),
            accounting: Accounting::start(None, metrics)
                .map_err(|source| ProxyError::Accounting { path: Default::default(), source })?,
            adapters: LoadedAdapters::default(),
        });
        let admission = Admission::new(config.max_in_flight);
        Ok(Self { api: GrpcApi { orchestrator, limits, admission, auth }, registry: metrics.clone() })
    }

    /// The gRPC service, to be added to a server.
    pub fn grpc(&self) -> Admit<TriptychServer<GrpcApi>> {
        self.api.clone().service()
    }

    /// The HTTP routes, to be called or served.
    pub fn http(&self) -> Router {
        let GrpcApi { orchestrator, limits, admission, auth } = self.api.clone();
        let times = ClientTimes::default();
        let registry = self.registry.clone();
        let allowed_origins = Vec::new();
        let parts = openai::HttpApiParts {
            orchestrator,
            limits,
            admission,
            auth,
            times,
            registry,
            allowed_origins,
            sessions: SessionBounds::default(),
        };
        openai::routes(openai::HttpApi::new(parts))
    }

    /// True once an encoder and a PD worker of one model were found.
    pub fn is_ready(&self) -> bool {
        self.api.orchestrator.fleet.catalog().is_ready()
    }

    /// Number of requests in flight.
    pub fn n_running(&self) -> usize {
        self.api.admission.n_inside()
    }
}
