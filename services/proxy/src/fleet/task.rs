//! One worker's task: ask it to describe itself, and watch it, for as long as it belongs to the fleet.
//!
//! A refused connection says at once that a worker is away. Silence says less: a busy machine is slow to answer, so
//! it takes two silences in a row. A connection that stays silent may be wedged by a partition, and is replaced. A
//! worker that cannot be watched is asked all the same; it only tells less.

use super::catalog::Served;
use super::description::Description;
use super::state::FleetState;
use super::worker::Worker;
use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::time::{Instant, sleep, timeout};
use tonic::{Code, Status, Streaming};
use triptych_core::RequestId;
use triptych_proto::convert::WireError;
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;
use triptych_proto::v1::worker_admin_client::WorkerAdminClient;
use triptych_runtime::discovery::Role;

/// Between two questions to a worker that answers.
const WHILE_READY: Duration = Duration::from_secs(3);
/// First and longest pause before asking again one that does not.
const WHILE_DOWN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// The longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Silences in a row after which a worker is down.
const SILENCES: u32 = 2;
/// Failures in a row after which the connection is replaced.
const RECONNECT_AFTER: u32 = 3;
/// Before a worker that cannot be watched is tried again: it may have been replaced by one that can.
const UNWATCHED: Duration = Duration::from_secs(60);
/// Requests that a process was starting when it died, at most.
const MAX_SUSPECTS: usize = 1024;
/// Largest message of a watch: the keys of the first, and room.
const MAX_MESSAGE: usize = 4 << 20;

/// The reason for which a worker did not describe itself.
#[derive(Debug, Error)]
enum NoAnswer {
    #[error("no answer within {PATIENCE:?}")]
    Silence,
    #[error("{0}")]
    Refused(Box<Status>),
    #[error("its description cannot be read: {0}")]
    Unreadable(#[from] WireError),
}

impl NoAnswer {
    /// True if the connection was refused: a network that fails is silent, and so is a frozen process.
    fn nobody_listens(&self) -> bool {
        let Self::Refused(status) = self else { return false };
        let causes = std::iter::successors(status.source(), |cause| (*cause).source());
        let mut causes = causes.filter_map(|cause| cause.downcast_ref::<io::Error>());
        causes.any(|cause| cause.kind() == io::ErrorKind::ConnectionRefused)
    }
}

impl From<Status> for NoAnswer {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

/// Follows the worker until it has left and is idle.
pub(super) async fn run(shared: Arc<FleetState>, worker: Arc<Worker>) {
    tokio::select! {
        () = worker.gone() => tracing::info!(worker = %worker.id, "worker gone"),
        () = ask(&shared, &worker) => {}
        () = watch(&shared, &worker) => {}
        () = prepare(&worker) => {}
    }
}

/// Has its encoder weights loaded whenever it is given the role of an encoder, so that its first item need not wait for them.
async fn prepare(worker: &Worker) {
    loop {
        worker.encodes_next.notified().await;
        let mut admin = WorkerAdminClient::new(worker.channel());
        let asking = admin.load_encoder_weights(v1::LoadEncoderWeightsRequest {});
        match timeout(PATIENCE, asking).await {
            Ok(Ok(answer)) => {
                let n_cold = answer.into_inner().n_cold;
                tracing::debug!(worker = %worker.id, n_cold, "asked a worker to load its encoder weights");
            }
            // The first item has them loaded.
            Ok(Err(status)) => {
                tracing::debug!(worker = %worker.id, code = %status.code(), "encoder weights are not loaded ahead");
            }
            Err(_) => tracing::debug!(worker = %worker.id, "no answer about encoder weights"),
        }
    }
}

/// Asks it to describe itself, again and again.
async fn ask(shared: &FleetState, worker: &Worker) {
    let mut failures = 0u32;
    let mut was_ready = false;
    loop {
        let asked = Instant::now();
        match describe(worker).await {
            Ok(description) => {
                if !was_ready {
                    tracing::info!(worker = %worker.id, models = description.models.len(), "worker ready");
                    worker.came_up.notify_one();
                }
                (failures, was_ready) = (0, true);
                shared.set_up(worker, description, asked);
            }
            Err(e) => {
                failures = failures.saturating_add(1);
                if e.nobody_listens() {
                    shared.note_death(worker);
                }
                if !matches!(e, NoAnswer::Silence) || failures >= SILENCES {
                    shared.set_down(worker);
                    if was_ready {
                        tracing::warn!(worker = %worker.id, error = %e, "worker down");
                    }
                    was_ready = false;
                }
                if failures.is_multiple_of(RECONNECT_AFTER) {
                    worker.reconnect();
                }
            }
        }
        let pause = if failures == 0 { WHILE_READY } else { backoff(failures) };
        let pause = shared.until_probe(worker, Instant::now()).map_or(pause, |until| until.min(pause));
        tokio::select! {
            () = sleep(pause) => {}
            () = worker.ask_again.notified() => was_ready = false,
        }
        shared.half_open(worker, Instant::now());
    }
}

fn backoff(failures: u32) -> Duration {
    let (first, longest) = WHILE_DOWN;
    first.saturating_mul(1 << failures.saturating_sub(1).min(8)).min(longest)
}

async fn describe(worker: &Worker) -> Result<Description, NoAnswer> {
    let request = v1::DescribeRequest {};
    let channel = worker.channel();
    let asking = async {
        Ok::<_, NoAnswer>(match worker.role() {
            Role::Encoder => EncoderWorkerClient::new(channel).describe(request).await?,
            Role::Pd => PrefillDecodeWorkerClient::new(channel).describe(request).await?,
        })
    };
    let mut answer = timeout(PATIENCE, asking).await.map_err(|_| NoAnswer::Silence)??.into_inner();
    if !is_of_another_engine(worker) {
        answer.models.iter_mut().for_each(|model| model.foreign_encoders = None);
    }
    let models = answer.models.into_iter().map(Served::try_from).collect::<Result<_, _>>()?;
    let suspects = answer.suspects.iter().take(MAX_SUSPECTS);
    let suspects =
        suspects.filter_map(|id| Some(RequestId::from_bits(u128::from_be_bytes(id[..].try_into().ok()?))));
    let suspects = suspects.collect();
    Ok(Description { models, encodes: answer.encodes, instance: answer.instance, suspects })
}

/// True if the worker's service is in this process, behind an address with a scheme: it may be given item bytes, which no worker
/// of ours that prefills and decodes ever is, whatever it says.
fn is_of_another_engine(worker: &Worker) -> bool {
    worker.endpoint.address.contains("://")
}

/// Watches it whenever it is there.
async fn watch(shared: &FleetState, worker: &Worker) {
    let mut failures = 0u32;
    loop {
        let pause = match open(worker).await {
            Ok(stream) => {
                failures = 0;
                let ended = read(shared, worker, stream).await;
                shared.end_reports(worker);
                if let Ended::Broken(why) = ended {
                    // It may be gone, and a host that is gone refuses nothing: no work for it until it answers again.
                    tracing::debug!(worker = %worker.id, why, "watch ended");
                    shared.set_down(worker);
                    worker.ask_again.notify_one();
                }
                WHILE_DOWN.0
            }
            Err(NoAnswer::Refused(status)) if status.code() == Code::Unimplemented => UNWATCHED,
            Err(_) => {
                failures = failures.saturating_add(1);
                backoff(failures)
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = worker.came_up.notified() => {}
            () = worker.redialed.notified() => {}
        }
    }
}

async fn open(worker: &Worker) -> Result<Streaming<v1::WorkerState>, NoAnswer> {
    let request = v1::WatchRequest {};
    let channel = worker.channel();
    let opening = async {
        Ok::<_, NoAnswer>(match worker.role() {
            Role::Encoder => {
                EncoderWorkerClient::new(channel)
                    .max_decoding_message_size(MAX_MESSAGE)
                    .watch(request)
                    .await?
            }
            Role::Pd => {
                let mut client =
                    PrefillDecodeWorkerClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
                client.watch(request).await?
            }
        })
    };
    Ok(timeout(PATIENCE, opening).await.map_err(|_| NoAnswer::Silence)??.into_inner())
}

/// The reason for which reports ended.
enum Ended {
    /// Its connection was replaced: the stream was on the old one.
    Redialed,
    /// The worker or the connection to it went away.
    Broken(String),
}

/// Takes its reports, to their end.
async fn read(shared: &FleetState, worker: &Worker, mut stream: Streaming<v1::WorkerState>) -> Ended {
    let mut first = true;
    loop {
        let state = tokio::select! {
            state = stream.message() => state,
            () = worker.redialed.notified() => return Ended::Redialed,
        };
        match state {
            Ok(Some(state)) => shared.report(worker, state, first),
            Ok(None) => return Ended::Broken("its end".into()),
            Err(status) => return Ended::Broken(status.to_string()),
        }
        first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let ms = [1, 2, 3, 4, 5, 100].map(|n| backoff(n).as_millis());
        assert_eq!(ms, [50, 100, 200, 400, 500, 500]);
    }
}
