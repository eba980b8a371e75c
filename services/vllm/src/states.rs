//! The state of a vLLM server as a stream, as workers of ours tell theirs. A server that stops answering ends it.

use crate::failure::CallError;
use crate::metrics::Load;
use crate::server::VllmServer;
use futures::stream::{self, BoxStream, StreamExt};
use std::time::Duration;
use tokio::time::sleep;
use tonic::Status;
use triptych_proto::v1;

/// Between two scrapes.
const INTERVAL: Duration = Duration::from_secs(1);
/// Scrapes in a row that fail before the stream ends.
const FAILURES: u32 = 2;

/// States of a worker.
pub(crate) type States = BoxStream<'static, Result<v1::WorkerState, Status>>;

/// The states of a server, from now on.
///
/// # Errors
/// Unimplemented, of a server without metrics; Unavailable, of one that does not answer.
pub(crate) async fn watch(server: VllmServer) -> Result<States, Status> {
    let first = match server.load().await {
        Ok(Some(load)) => load,
        Ok(None) => return Err(Status::unimplemented("this vLLM server has no metrics")),
        Err(e) => return Err(e.into_status()),
    };
    let capacity = server.address.capacity;
    let rest = stream::unfold(Some(server), |server| async move {
        let server = server?;
        match next(&server).await {
            Ok(load) => Some((Ok(load), Some(server))),
            Err(e) => Some((Err(e.into_status()), None)),
        }
    });
    let loads = stream::iter([Ok(first)]).chain(rest);
    Ok(loads.map(move |load| load.map(|load| state(load, capacity))).boxed())
}

/// The load after a pause.
async fn next(server: &VllmServer) -> Result<Load, CallError> {
    let mut n_failures = 0;
    loop {
        sleep(INTERVAL).await;
        match server.load().await {
            Ok(load) => return Ok(load.unwrap_or_default()),
            Err(e) => {
                n_failures += 1;
                if n_failures == FAILURES {
                    return Err(e);
                }
            }
        }
    }
}

fn state(load: Load, capacity: u32) -> v1::WorkerState {
    let load = v1::WorkerLoad {
        running: load.running,
        waiting: load.waiting,
        capacity,
        kv_usage: load.kv_usage,
        ..v1::WorkerLoad::default()
    };
    v1::WorkerState { load: Some(load), ..v1::WorkerState::default() }
}
