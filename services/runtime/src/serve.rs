//! A worker's gRPC server from ready to drained: health, reflection and the service, with one order of events.

use crate::admin::Readiness;
use crate::door::Door;
use crate::drain::Drain;
use crate::ending::EndWatchesLayer;
use crate::grpc;
use http::{Request, Response};
use std::convert::Infallible;
use std::fmt;
use std::pin::pin;
use std::sync::Arc;
use thiserror::Error;
use tonic::body::Body;
use tonic::server::NamedService;
use tonic::service::Routes;
use tower::Service;
use triptych_proto::v1;

/// A server that could not start, or ended by itself.
#[derive(Debug, Error)]
pub enum ServeError {
    /// The transport failed.
    #[error("gRPC server: {0}")]
    Transport(#[from] tonic::transport::Error),
    /// The reflection service cannot be built.
    #[error("gRPC reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// Its task died.
    #[error("gRPC server ended early: {0}")]
    Task(#[from] tokio::task::JoinError),
}

/// Services that a process answers at the address of its own one.
#[derive(Default)]
pub struct Beside {
    names: Vec<&'static str>,
    add: Vec<Box<dyn FnOnce(Routes) -> Routes + Send>>,
    load: Option<BesideLoad>,
}

/// How busy what is answered beside is.
pub type BesideLoad = Arc<dyn Fn() -> v1::WorkerLoad + Send + Sync>;

impl Beside {
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

    /// Says how busy it is, for whoever watches the process as a whole.
    pub fn with_load(mut self, load: impl Fn() -> v1::WorkerLoad + Send + Sync + 'static) -> Self {
        self.load = Some(Arc::new(load));
        self
    }

    /// What was said of its load.
    pub fn load(&self) -> Option<BesideLoad> {
        self.load.clone()
    }
}

impl fmt::Debug for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Beside").field(&self.names).finish()
    }
}

/// As [`serve_beside`], with nothing beside.
///
/// # Errors
/// [`ServeError`] if the server ends before it was told to.
pub async fn serve<S>(
    service: S,
    door: impl Into<Door>,
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
    serve_beside(service, Beside::default(), door, readiness, drain).await
}

/// Serves until the process has drained. Health says SERVING from the first moment to the beginning of drain.
///
/// # Errors
/// [`ServeError`] if the server ends before it was told to.
pub async fn serve_beside<S>(
    service: S,
    beside: Beside,
    door: impl Into<Door>,
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
    let (health, health_service) = tonic_health::server::health_reporter();
    let names: Vec<&str> = std::iter::once(S::NAME).chain(beside.names).collect();
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
    let incoming = door.into().incoming();
    let (v1, v1alpha) = grpc::reflection()?;
    let routes = Routes::new(health_service).add_service(v1).add_service(v1alpha).add_service(service);
    let routes = beside.add.into_iter().fold(routes, |routes, add| add(routes));
    let serving = grpc::server()
        .layer(EndWatchesLayer::new(&drain))
        .add_routes(routes)
        .serve_with_incoming_shutdown(incoming, drain.closing());
    let server = drain.tasks().spawn(serving);
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
