//! A worker's gRPC server, from ready to drained: health, reflection, its service and colocated services.

use crate::admin::Readiness;
use crate::drain::Drain;
use crate::grpc::{self, Peers};
use crate::listener::Listener;
use crate::listener::preface::PrefaceTimeout;
use crate::server_spans::ServerSpansLayer;
use crate::watch_shutdown::WatchShutdownLayer;
use futures::TryStreamExt as _;
use futures::future::BoxFuture;
use http::{Request, Response};
use std::convert::Infallible;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use thiserror::Error;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tonic_health::server::HealthReporter;
use tower::Service;
use triptych_proto::v1;

/// A server that could not start, or ended early.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("gRPC server: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The reflection service cannot be built.
    #[error("gRPC reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// Its task panicked.
    #[error("gRPC server ended early: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// Services of a colocated role, served at the address of the process's own service.
#[derive(Default)]
pub struct ColocatedServices {
    names: Vec<&'static str>,
    add: Vec<Box<dyn FnOnce(Routes) -> Routes + Send>>,
    load: Option<ColocatedLoad>,
    weights: Option<ColocatedWeights>,
}

/// Reads the load of the colocated services.
pub type ColocatedLoad = Arc<dyn Fn() -> v1::WorkerLoad + Send + Sync>;

/// Begins to load weights of the colocated services that are not in memory; how many there are.
pub type ColocatedWeights = Arc<dyn Fn() -> usize + Send + Sync>;

impl ColocatedServices {
    /// Adds a service.
    pub fn with<S>(mut self, service: S) -> Self
    where
        S: Service<Request<Body>, Error = Infallible> + NamedService + Clone + Send + Sync + 'static,
        S::Response: axum::response::IntoResponse,
        S::Future: Send + 'static,
    {
        self.names.push(S::NAME);
        self.add.push(Box::new(move |routes| routes.add_service(service)));
        self
    }

    /// Sets the source of their load, for watchers of the whole process.
    pub fn with_load(mut self, load: impl Fn() -> v1::WorkerLoad + Send + Sync + 'static) -> Self {
        self.load = Some(Arc::new(load));
        self
    }

    /// Sets the loader of their weights.
    pub fn with_weights(mut self, begin: impl Fn() -> usize + Send + Sync + 'static) -> Self {
        self.weights = Some(Arc::new(begin));
        self
    }

    /// The loader of their weights.
    pub fn weights(&self) -> Option<ColocatedWeights> {
        self.weights.clone()
    }

    /// The source of their load.
    pub fn load(&self) -> Option<ColocatedLoad> {
        self.load.clone()
    }
}

impl fmt::Debug for ColocatedServices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ColocatedServices").field(&self.names).finish()
    }
}

/// As [`serve_colocated`], without colocated services.
///
/// # Errors
/// [`ServeError`] if the server ends before the drain.
pub async fn serve<S>(
    service: S,
    listener: impl Into<Listener>,
    readiness: Readiness,
    drain: Drain,
) -> Result<(), ServeError>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    serve_colocated(service, ColocatedServices::default(), listener, readiness, drain).await
}

/// Serves until the process has drained. Health is SERVING from the start to the beginning of the drain.
///
/// # Errors
/// [`ServeError`] if the server ends before the drain.
pub async fn serve_colocated<S>(
    service: S,
    colocated: ColocatedServices,
    listener: impl Into<Listener>,
    readiness: Readiness,
    drain: Drain,
) -> Result<(), ServeError>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>
        + NamedService
        + Clone
        + Send
        + Sync
        + 'static,
    S::Future: Send + 'static,
{
    let ColocatedServices { names, add, .. } = colocated;
    let names: Vec<&str> = std::iter::once(S::NAME).chain(names).collect();
    let (health, health_service) = tonic_health::server::health_reporter();
    let (v1, v1alpha) = grpc::reflection(&names)?;
    let routes = Routes::new(health_service).add_service(v1).add_service(v1alpha).add_service(service);
    let routes = add.into_iter().fold(routes, |routes, add| add(routes));
    let served = Served { routes, names, health };
    serve_routes(served, listener.into(), readiness, drain).await
}

/// Serves routes to `peers` until the drain closes listeners, with spans, and an end for watches. Boxed, so that the code of a
/// server is generated here, once.
pub fn serve_grpc(
    routes: Routes,
    listener: Listener,
    peers: Peers,
    drain: &Drain,
) -> BoxFuture<'static, Result<(), tonic::transport::Error>> {
    let incoming =
        listener.incoming().map_ok(move |stream| PrefaceTimeout::new(stream, peers.preface_timeout()));
    let serving = grpc::server(peers)
        .layer(ServerSpansLayer)
        .layer(WatchShutdownLayer::new(drain))
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, drain.closing());
    Box::pin(serving)
}

/// Routes of a server, the services that its health names, and the reporter of that.
struct Served {
    routes: Routes,
    names: Vec<&'static str>,
    health: HealthReporter,
}

/// The part of [`serve_colocated`] that is the same for every service: boxed, so that its code is generated here.
fn serve_routes(
    served: Served,
    listener: Listener,
    readiness: Readiness,
    drain: Drain,
) -> BoxFuture<'static, Result<(), ServeError>> {
    Box::pin(serve_to_drain(served, listener, readiness, drain))
}

async fn serve_to_drain(
    served: Served,
    listener: Listener,
    readiness: Readiness,
    drain: Drain,
) -> Result<(), ServeError> {
    let Served { routes, names, health } = served;
    for name in &names {
        grpc::set_health(&health, name, !drain.is_stopping()).await;
    }
    readiness.set_loaded();
    let stopping = drain.clone();
    drain.tasks().spawn(async move {
        stopping.stopping().await;
        for name in names {
            grpc::set_health(&health, name, false).await;
        }
    });
    let server = drain.tasks().spawn(serve_grpc(routes, listener, Peers::Cluster, &drain));
    let mut finish = pin!(drain.finish(drain.times()));
    tokio::select! {
        () = &mut finish => return Ok(()),
        ended = server => ended??,
    }
    // The last connection may end before the last task does.
    if drain.is_stopping() {
        finish.await;
    }
    Ok(())
}
