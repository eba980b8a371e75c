//! One worker's task: ask it to describe itself, for as long as the proxy runs.
//!
//! A refused connection says at once that a worker is away. Silence says less: a busy machine is slow to answer, so
//! it takes two silences in a row. A connection that stays silent may be wedged by a partition, and is replaced.

use super::catalog::Served;
use super::{Shared, Worker};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use triptych_proto::convert::WireError;
use triptych_proto::v1;
use triptych_proto::v1::encoder_worker_client::EncoderWorkerClient;
use triptych_proto::v1::prefill_decode_worker_client::PrefillDecodeWorkerClient;

use super::catalog::Pool;

/// Between two questions to a worker that answers.
const WHILE_READY: Duration = Duration::from_secs(3);
/// First and longest pause before asking again one that does not.
const WHILE_DOWN: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));
/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Silences in a row after which a worker is down.
const SILENCES: u32 = 2;
/// Failures in a row after which the connection is replaced.
const RECONNECT_AFTER: u32 = 3;

/// Why a worker did not describe itself.
#[derive(Debug, Error)]
enum NoAnswer {
    #[error("no answer within {PATIENCE:?}")]
    Silence,
    #[error("{0}")]
    Refused(Box<tonic::Status>),
    #[error("its description cannot be read: {0}")]
    Unreadable(#[from] WireError),
}

impl From<tonic::Status> for NoAnswer {
    fn from(status: tonic::Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

/// Asks until it is dropped.
pub(super) async fn run(shared: Arc<Shared>, worker: Arc<Worker>) {
    let mut failures = 0u32;
    let mut was_ready = false;
    loop {
        match describe(&worker).await {
            Ok(models) => {
                if !was_ready {
                    tracing::info!(worker = %worker.id, models = models.len(), "worker ready");
                }
                (failures, was_ready) = (0, true);
                shared.set_ready(&worker, models);
            }
            Err(e) => {
                failures = failures.saturating_add(1);
                if !matches!(e, NoAnswer::Silence) || failures >= SILENCES {
                    shared.set_down(&worker);
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
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = worker.ask_again.notified() => was_ready = false,
        }
    }
}

fn backoff(failures: u32) -> Duration {
    let (first, longest) = WHILE_DOWN;
    first.saturating_mul(1 << failures.saturating_sub(1).min(8)).min(longest)
}

async fn describe(worker: &Worker) -> Result<Vec<Served>, NoAnswer> {
    let request = v1::DescribeRequest {};
    let channel = worker.channel();
    let asking = async {
        Ok::<_, NoAnswer>(match worker.pool {
            Pool::Encoder => EncoderWorkerClient::new(channel).describe(request).await?,
            Pool::Pd => PrefillDecodeWorkerClient::new(channel).describe(request).await?,
        })
    };
    let answer = tokio::time::timeout(PATIENCE, asking).await.map_err(|_| NoAnswer::Silence)??;
    let models = answer.into_inner().models.into_iter().map(Served::try_from).collect::<Result<_, _>>()?;
    Ok(models)
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
