//! Graceful shutdown: refuse new work, let running work end, then exit.
//!
//! In order: not ready, a lame-duck pause so that load balancers notice, listeners close, running work ends within the
//! grace period, the rest is cancelled. Every task that must end before the process does is spawned on
//! [`Drain::tasks`]; one that serves until the very end, on [`Drain::background`].

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Time for tasks to end after they were cancelled.
const AFTER_ABORT: Duration = Duration::from_secs(2);
/// Time after the abort in which requests that were cut send their errors, before their connections close. Less than
/// [`AFTER_ABORT`].
const ERROR_TIME: Duration = Duration::from_secs(1);

/// Durations of the phases of a drain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainTimes {
    /// From "not ready" to the close of listeners. Default 200 ms.
    pub lame_duck: Duration,
    /// Grace period for running work. Default 20 s; then it is cancelled.
    pub grace: Duration,
}

impl Default for DrainTimes {
    fn default() -> Self {
        Self { lame_duck: Duration::from_millis(200), grace: Duration::from_secs(20) }
    }
}

/// The drain of a process. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    times: DrainTimes,
    /// Cancelled when everything is loaded and the listeners are open.
    ready: CancellationToken,
    /// Cancelled when the drain begins; the process is no longer ready.
    stopping: CancellationToken,
    /// Cancelled when listeners close.
    closing: CancellationToken,
    /// Cancelled at the end of the grace period.
    abort: CancellationToken,
    tasks: TaskTracker,
    /// Tasks that run until `abort`.
    background: TaskTracker,
    /// Requests that ended because of `abort`.
    n_cut: Arc<AtomicUsize>,
}

impl Drain {
    /// A drain that has not begun.
    pub fn new() -> Self {
        Self::default()
    }

    /// A drain with these durations.
    pub fn with_times(times: DrainTimes) -> Self {
        Self { times, ..Self::default() }
    }

    /// Durations of its phases.
    pub fn times(&self) -> DrainTimes {
        self.times
    }

    /// Marks the process ready for work.
    pub fn set_ready(&self) {
        self.ready.cancel();
    }

    /// Completes when the process is ready.
    pub async fn ready(&self) {
        self.ready.cancelled().await;
    }

    /// Begins the drain. Idempotent.
    pub fn begin(&self) {
        self.stopping.cancel();
    }

    /// True once the drain has begun.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// Completes when the drain begins.
    pub async fn stopping(&self) {
        self.stopping.cancelled().await;
    }

    /// Completes when listeners must close; for `serve_with_shutdown`.
    pub fn closing(&self) -> impl Future<Output = ()> + Send + 'static {
        self.closing.clone().cancelled_owned()
    }

    /// Token that is cancelled when running work must stop.
    pub fn abort_token(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// Completes when connections must close: running work was cancelled, and had time to report that to its clients.
    pub fn connections_end(&self) -> impl Future<Output = ()> + Send + 'static {
        let abort = self.abort.clone();
        async move {
            abort.cancelled().await;
            tokio::time::sleep(ERROR_TIME).await;
        }
    }

    /// Counts a request that was ended by [`Self::abort_token`] and not by itself.
    pub fn count_cut(&self) {
        self.n_cut.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of requests that the end of the grace period, or a second signal, has cut.
    pub fn n_cut(&self) -> usize {
        self.n_cut.load(Ordering::Relaxed)
    }

    /// Tasks that [`Self::finish`] waits for within the grace period.
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Tasks that serve until [`Self::abort_token`] is cancelled and end then: metrics, for instance, which are read
    /// while the process drains. [`Self::finish`] waits for them last.
    pub fn background(&self) -> &TaskTracker {
        &self.background
    }

    /// Begins the drain on SIGTERM or SIGINT. A second signal cancels running work.
    ///
    /// # Errors
    /// If signal handlers cannot be installed.
    pub fn on_signals(&self) -> std::io::Result<()> {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let drain = self.clone();
        self.background.spawn(async move {
            for second in [false, true] {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                    () = drain.abort.cancelled() => return,
                }
                if second { drain.abort.cancel() } else { drain.begin() }
            }
        });
        Ok(())
    }

    /// Waits for the drain to begin and runs it to its end: lame duck, close, grace period, abort.
    pub async fn finish(&self, times: DrainTimes) {
        self.stopping().await;
        tracing::info!("draining");
        tokio::time::sleep(times.lame_duck).await;
        self.closing.cancel();
        self.tasks.close();
        tokio::select! {
            () = self.tasks.wait() => {}
            () = tokio::time::sleep(times.grace) => {
                tracing::warn!(grace_s = times.grace.as_secs(), tasks = self.tasks.len(), "grace period over, cancelling running tasks");
            }
            () = self.abort.cancelled() => {}
        }
        self.abort.cancel();
        // A task that ignores the abort ends with the process.
        let _ = tokio::time::timeout(AFTER_ABORT, self.tasks.wait()).await;
        self.background.close();
        let _ = tokio::time::timeout(AFTER_ABORT, self.background.wait()).await;
        match self.n_cut() {
            0 => tracing::info!("drained"),
            requests => tracing::warn!(requests, "drained; these requests were cut, each with an error"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_drain_waits_for_tasks_cancels_stuck_ones_and_ends_background_tasks_last() {
        let drain = Drain::new();
        let (done, mut was_done) = tokio::sync::oneshot::channel();
        drain.tasks().spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let _ = done.send(());
        });
        let abort = drain.abort_token();
        drain.tasks().spawn(async move { abort.cancelled().await });
        let (abort, tasks) = (drain.abort_token(), drain.tasks().clone());
        let last = drain.background().spawn(async move {
            abort.cancelled().await;
            tasks.wait().await;
        });
        drain.begin();
        drain.finish(DrainTimes { lame_duck: Duration::ZERO, grace: Duration::from_secs(1) }).await;
        assert!(was_done.try_recv().is_ok());
        assert!(drain.tasks().is_empty() && drain.background().is_empty());
        assert!(last.is_finished());
    }
}
