//! A proxy without listeners, for whoever brings a network of their own: the simulation under `tests/sim`, the fuzzer
//! under `tests/fuzz`.
//!
//! The same parts as [`crate::run`] puts together, behind the same admission. It fetches nothing: URLs are refused.

use crate::admission::Admission;
use crate::auth::{Auth, AuthConfig};
use crate::budget::RetryBudget;
use crate::cache::EncoderCache;
use crate::config::{ClientTimes, ProxyError};
use crate::encode::{EncodeParts, Encodes};
use crate::fetch::{FetchPolicy, Fetcher, Reach};
use crate::fleet::{Fleet, FleetSettings};
use crate::grpc::{Face, admit::Admit};
use crate::items::Materials;
use crate::machine::policy::EncodePolicy;
use crate::observe::Observer;
use crate::openai;
use crate::orchestrate::Orchestrator;
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
    /// Makes the channels to them.
    pub dialer: Dialer,
    /// The EC store that the workers share.
    pub store: Arc<dyn EcStore>,
    /// What a request may ask.
    pub limits: Limits,
    /// Requests worked on at once.
    pub max_in_flight: usize,
    /// For choices by lot. `None`: the system's randomness.
    pub seed: Option<u64>,
}

/// A running proxy. Dropping it ends its tasks.
pub struct Embedded {
    face: Face,
    registry: MetricsRegistry,
}

impl Embedded {
    /// Starts looking for its workers. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`ProxyError`] if it cannot start.
    pub fn start(
        config: EmbeddedConfig,
        drain: Drain,
        metrics: &MetricsRegistry,
    ) -> Result<Self, ProxyError> {
        let limits = config.limits;
        let auth = Auth::start(AuthConfig::default(), &drain)?;
        let fleet = FleetSettings {
            encoders: config.encoders,
            pds: config.pds,
            discovery: Vec::new(),
            dialer: config.dialer,
            seed: config.seed,
            encode_slo: None,
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
            },
            observer: Observer::new(metrics),
            drain,
        });
        let admission = Admission::new(config.max_in_flight);
        Ok(Self { face: Face { orchestrator, limits, admission, auth }, registry: metrics.clone() })
    }

    /// The gRPC face, to be added to a server.
    pub fn grpc(&self) -> Admit<TriptychServer<Face>> {
        self.face.clone().service()
    }

    /// The HTTP face, to be called or served.
    pub fn http(&self) -> Router {
        let Face { orchestrator, limits, admission, auth } = self.face.clone();
        let (times, registry) = (ClientTimes::default(), self.registry.clone());
        openai::Face::new(openai::Parts { orchestrator, limits, admission, auth, times, registry }).routes()
    }

    /// Whether a pair of workers was found that serves a model.
    pub fn is_ready(&self) -> bool {
        self.face.orchestrator.fleet.catalog().is_ready()
    }

    /// Requests that are being worked on.
    pub fn n_running(&self) -> usize {
        self.face.admission.n_inside()
    }
}
