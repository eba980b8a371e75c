//! The proxy process: its listeners, its parts, and its drain.

use crate::accounting::Accounting;
use crate::admin::AdminApi;
use crate::admin::access::Access;
use crate::admin::token::AdminToken;
use crate::admission::Admission;
use crate::auth::{Auth, SharedQuotas};
use crate::budget::RetryBudget;
use crate::cache::EncoderCache;
use crate::config::{ProxyConfig, ProxyError};
use crate::encode::{EncodeParts, Encodes};
use crate::fetch::Fetcher;
use crate::fleet::{Fleet, FleetSettings};
use crate::items::Materials;
use crate::items::preparing::Preparing;
use crate::observe::Observer;
use crate::orchestrate::{LoadedAdapters, Orchestrator};
use crate::request_machine::policy::EncodePolicy;
use crate::rows::RowLoader;
use crate::running::RequestTable;
use crate::{admin, grpc, openai};
use futures::future::BoxFuture;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic_health::server::HealthReporter;
use triptych_proto::v1::triptych_server::SERVICE_NAME;
use triptych_runtime::listener::Listener;
use triptych_runtime::serve::ServeError;
use triptych_runtime::{Drain, MetricsRegistry};

/// Runs the proxy until it is drained. It listens at once, and is ready when its workers are. The future is boxed, so
/// that its code is generated in this crate, not in every binary.
///
/// # Errors
/// [`ProxyError`] if it cannot start, or a server fails.
pub fn run(
    config: ProxyConfig,
    drain: Drain,
    metrics: MetricsRegistry,
) -> BoxFuture<'static, Result<(), ProxyError>> {
    Box::pin(run_to_drain(config, drain, metrics))
}

async fn run_to_drain(config: ProxyConfig, drain: Drain, metrics: MetricsRegistry) -> Result<(), ProxyError> {
    let ProxyConfig { limits, client_times: times, .. } = config;
    let (admission, policy) = (Admission::new(config.max_in_flight), config.encodes);
    let auth = Auth::start(config.auth, limits.max_body_bytes, &drain)?;
    let auth = match config.quota_store {
        Some(buckets) => auth.shared(SharedQuotas::new(buckets, &metrics)),
        None => auth,
    };
    let rows = RowLoader::new(Arc::clone(&config.store), &config.dialer, limits.clone());
    let ProxyConfig { encoders, pds, discovery, dialer, seed, encode_slo, roles, .. } = config;
    let fleet = FleetSettings { encoders, pds, discovery, dialer, seed, encode_slo, roles };
    let fleet = Arc::new(Fleet::start(fleet, &metrics)?);
    let cache = EncoderCache::new(config.store, limits.max_object_bytes);
    let accounting = accounting(config.accounting_log, &metrics)?;
    let budget = Arc::new(RetryBudget::new(policy.retries));
    let encodes = Encodes::new(EncodeParts {
        fleet: Arc::clone(&fleet),
        cache: cache.clone(),
        policy: EncodePolicy { max_time: policy.max_time.min(limits.max_request_time), ..policy },
        budget: Arc::clone(&budget),
        drain: &drain,
        metrics: &metrics,
    });
    let orchestrator = Arc::new(Orchestrator {
        encodes,
        budget,
        fleet,
        materials: Materials {
            fetcher: Fetcher::new(config.fetch, limits.clone())?,
            limits: limits.clone(),
            tenant_salt: config.tenant_salt.into(),
            preparing: Preparing::default(),
        },
        rows,
        observer: Observer::new(&metrics),
        drain: drain.clone(),
        request_log: config.request_log,
        bounds: config.bounds,
        table: RequestTable::default(),
        accounting,
        adapters: LoadedAdapters::default(),
    });
    drain.tasks().spawn(Arc::clone(&orchestrator).restore_adapters());
    let grpc_api = grpc::GrpcApi {
        orchestrator: Arc::clone(&orchestrator),
        limits: limits.clone(),
        admission: admission.clone(),
        auth: auth.clone(),
    };
    let grpc = drain.tasks().spawn(serve_grpc(config.grpc, grpc_api, times.head, drain.clone()));
    let parts = openai::HttpApiParts {
        orchestrator,
        limits,
        admission,
        auth,
        times,
        registry: metrics,
        allowed_origins: config.allowed_origins,
        sessions: config.sessions,
    };
    let http_api = openai::HttpApi::new(parts);
    if let Some(listener) = config.admin {
        serve_admin((listener, config.admin_token), http_api.clone(), cache, &drain);
    }
    let routes = openai::routes(http_api);
    let serving = openai::listen::HttpServing { routes, times, bounds: config.connections.checked() };
    drain.tasks().spawn(openai::listen::serve(config.http, serving, drain.clone()));
    drained(&drain, grpc).await
}

/// Serves probes, metrics and the admin API.
fn serve_admin(
    (listener, token): (TcpListener, Option<AdminToken>),
    http_api: openai::HttpApi,
    cache: EncoderCache,
    drain: &Drain,
) {
    let api = AdminApi {
        changes: crate::admin::ModelChanges::default(),
        orchestrator: Arc::clone(&http_api.orchestrator),
        admission: http_api.admission.clone(),
        auth: http_api.auth.clone(),
        cache,
    };
    // An address that is not known is one that others reach.
    let address = listener.local_addr().unwrap_or_else(|_| (Ipv4Addr::UNSPECIFIED, 0).into());
    let routes = openai::admin_routes(http_api).merge(admin::routes(api, Access::new(token, address)));
    triptych_runtime::admin::spawn(listener, routes, drain);
}

/// Opens the accounting log.
fn accounting(log: Option<PathBuf>, metrics: &MetricsRegistry) -> Result<Accounting, ProxyError> {
    let failed = |source| ProxyError::Accounting { path: log.clone().unwrap_or_default(), source };
    Accounting::start(log.as_deref(), metrics).map_err(failed)
}

/// Waits until the process has drained, both APIs.
async fn drained(drain: &Drain, grpc: JoinHandle<Result<(), ProxyError>>) -> Result<(), ProxyError> {
    let mut finish = pin!(drain.finish(drain.times()));
    tokio::select! {
        () = &mut finish => {}
        ended = grpc => {
            ended.map_err(ServeError::from)??;
            // Without gRPC connections its server ends as soon as listeners close; HTTP may still have answers to write.
            if drain.is_stopping() {
                finish.await;
            }
        }
    }
    match drain.n_cut() {
        0 => Ok(()),
        n_cut => Err(ProxyError::Cut { n_cut, grace: drain.times().grace }),
    }
}

async fn serve_grpc(
    door: Listener,
    api: grpc::GrpcApi,
    preface_timeout: Duration,
    drain: Drain,
) -> Result<(), ProxyError> {
    let (health, health_service) = tonic_health::server::health_reporter();
    let watching = watch_health(health, Arc::clone(&api.orchestrator));
    let (v1, v1alpha) = triptych_runtime::grpc::reflection(&[SERVICE_NAME]).map_err(ServeError::from)?;
    let routes = Routes::new(health_service).add_service(v1).add_service(v1alpha).add_service(api.service());
    let peers = triptych_runtime::grpc::Peers::Clients { preface_timeout };
    let serving = triptych_runtime::serve::serve_grpc(routes, door, peers, &drain);
    tokio::select! {
        ended = serving => Ok(ended.map_err(ServeError::from)?),
        () = watching => Ok(()),
        () = drain.connections_end() => Ok(()),
    }
}

/// Sets health to that of the fleet, and to NOT_SERVING when stopping begins. Runs until the server ends.
async fn watch_health(health: HealthReporter, orchestrator: Arc<Orchestrator>) {
    let mut changes = orchestrator.fleet.changes();
    loop {
        let ready = changes.borrow_and_update().is_ready() && !orchestrator.drain.is_stopping();
        triptych_runtime::grpc::set_health(&health, SERVICE_NAME, ready).await;
        tokio::select! {
            // The sender lives as long as the orchestrator.
            _ = changes.changed() => {}
            () = orchestrator.drain.stopping(), if !orchestrator.drain.is_stopping() => {}
        }
    }
}
