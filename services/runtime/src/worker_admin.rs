//! The gRPC service by which operators change a worker while it runs: its models, and its log's filter.
//!
//! A change goes on when its caller goes away. What a model is, and what it takes to load one, is the worker's ([`ModelHost`]).

use crate::{Drain, status, telemetry};
use futures::future::BoxFuture;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tonic::{Request, Response, Status};
use triptych_core::{Failure, FailureClass};
use triptych_proto::v1;
use triptych_proto::v1::worker_admin_server::{WorkerAdmin as Service, WorkerAdminServer};

/// Most bytes of a model's name.
const MAX_NAME: usize = 256;
/// Longest time for requests to end.
const MAX_DRAIN: Duration = Duration::from_secs(3600);

/// A model to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadOrder {
    /// The name that clients will use.
    pub name: String,
    /// Its directory, as the operator named it.
    pub path: String,
    /// The model that gives way; `None`: none.
    pub replaces: Option<String>,
    /// Time for what runs on that model to end.
    pub drain: Duration,
}

/// A model to drop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnloadOrder {
    /// Its name.
    pub name: String,
    /// Time for what runs on it to end.
    pub drain: Duration,
}

/// A worker whose models change.
pub trait ModelHost: Send + Sync + 'static {
    /// Loads a model and serves it. False: it has no stage for this worker, and nothing was changed.
    fn load_model(self: Arc<Self>, order: LoadOrder) -> BoxFuture<'static, Result<bool, Failure>>;

    /// Refuses new requests for a model, lets those that run end, and gives its memory back.
    fn unload_model(self: Arc<Self>, order: UnloadOrder) -> BoxFuture<'static, Result<(), Failure>>;

    /// Begins to load encoder weights that are not in memory; the number of their encoders. A worker that always holds its
    /// weights has none.
    fn load_encoder_weights(&self) -> usize {
        0
    }
}

/// The service over a worker. A drain waits for changes under way.
pub struct WorkerAdmin<H> {
    host: Arc<H>,
    drain: Drain,
}

impl<H: ModelHost> WorkerAdmin<H> {
    /// The service of a worker, for its server.
    pub fn service(host: Arc<H>, drain: Drain) -> WorkerAdminServer<Self> {
        WorkerAdminServer::new(Self { host, drain })
    }

    /// Runs a change to its end, whether or not its caller waits.
    async fn to_its_end<T: Send + 'static>(
        &self,
        change: BoxFuture<'static, Result<T, Failure>>,
    ) -> Result<T, Status> {
        let ended = self.drain.tasks().spawn(change).await;
        ended
            .unwrap_or_else(|e| Err(status::from_join_error("a change of the worker", &e)))
            .map_err(|failure| status::to_status(&failure))
    }
}

fn drain_of(ms: u64) -> Result<Duration, Status> {
    let drain = Duration::from_millis(ms);
    if drain <= MAX_DRAIN {
        return Ok(drain);
    }
    let text = format!("drain_ms is {ms}, allowed are {} at most", MAX_DRAIN.as_millis());
    Err(status::to_status(&Failure::invalid(text).with_param("drain_ms")))
}

#[tonic::async_trait]
impl<H: ModelHost> Service for WorkerAdmin<H> {
    async fn load_model(
        &self,
        request: Request<v1::LoadModelRequest>,
    ) -> Result<Response<v1::LoadModelResponse>, Status> {
        let v1::LoadModelRequest { name, path, replaces, drain_ms } = request.into_inner();
        let replaces = Some(replaces).filter(|name| !name.is_empty());
        let order = LoadOrder { name, path, replaces, drain: drain_of(drain_ms)? };
        let serves = self.to_its_end(Arc::clone(&self.host).load_model(order)).await?;
        Ok(Response::new(v1::LoadModelResponse { serves }))
    }

    async fn unload_model(
        &self,
        request: Request<v1::UnloadModelRequest>,
    ) -> Result<Response<v1::UnloadModelResponse>, Status> {
        let v1::UnloadModelRequest { name, drain_ms } = request.into_inner();
        let order = UnloadOrder { name, drain: drain_of(drain_ms)? };
        self.to_its_end(Arc::clone(&self.host).unload_model(order)).await?;
        Ok(Response::new(v1::UnloadModelResponse {}))
    }

    async fn load_encoder_weights(
        &self,
        _: Request<v1::LoadEncoderWeightsRequest>,
    ) -> Result<Response<v1::LoadEncoderWeightsResponse>, Status> {
        let n_cold = u32::try_from(self.host.load_encoder_weights()).unwrap_or(u32::MAX);
        Ok(Response::new(v1::LoadEncoderWeightsResponse { n_cold }))
    }

    async fn set_log_filter(
        &self,
        request: Request<v1::SetLogFilterRequest>,
    ) -> Result<Response<v1::SetLogFilterResponse>, Status> {
        let filter = request.into_inner().filter;
        telemetry::set_log_filter(&filter).map_err(|e| {
            let class = match e {
                telemetry::TelemetryError::Filter { .. } => FailureClass::InvalidArgument,
                _ => FailureClass::Unavailable,
            };
            status::to_status(&Failure::new(class, e.to_string()).with_param("filter"))
        })?;
        tracing::info!(filter, "an operator changed the log's filter");
        Ok(Response::new(v1::SetLogFilterResponse { filter: telemetry::log_filter().unwrap_or_default() }))
    }
}

/// The refusal of a worker whose models are those of its start.
pub fn not_allowed() -> Failure {
    Failure::invalid("models are not loaded or unloaded here; --model-updates allows it")
}

/// The name of a model to load.
///
/// # Errors
/// Invalid for one that is empty or too long.
pub fn checked_name(name: &str) -> Result<&str, Failure> {
    match name.len() {
        1..=MAX_NAME => Ok(name),
        n => {
            let text = format!("the model's name has {n} bytes, allowed are 1 to {MAX_NAME}");
            Err(Failure::invalid(text).with_param("model"))
        }
    }
}

/// The directory that an operator names, which lies below `root` whatever links it has.
///
/// # Errors
/// Invalid for one that does not; Internal if the root itself is gone.
pub fn dir_below(root: &Path, named: &str) -> Result<PathBuf, Failure> {
    let root = root.canonicalize().map_err(|e| Failure::internal(format!("--model-updates: {e}")))?;
    let outside = || {
        let text = format!("path {named:?} is no directory below the one of --model-updates");
        Failure::invalid(text).with_param("path")
    };
    let dir = root.join(named).canonicalize().map_err(|_| outside())?;
    if dir.starts_with(&root) && dir.is_dir() { Ok(dir) } else { Err(outside()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_outside_the_allowed_one_are_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let (root, other) = (dir.path().join("root"), dir.path().join("other"));
        for made in [root.join("a/b"), other.clone()] {
            std::fs::create_dir_all(made).expect("a directory");
        }
        std::os::unix::fs::symlink(&other, root.join("link")).expect("a link");
        let inside = root.join("a").display().to_string();
        for (named, is_allowed) in
            [("a", true), ("a/../a/b", true), (&inside, true), ("..", false), ("link", false), ("c", false)]
        {
            assert_eq!(dir_below(&root, named).is_ok(), is_allowed, "{named}");
        }
        assert!(dir_below(&root.join("gone"), "a").is_err());
    }
}
