//! Stopping without losing a request: refuse new work, let running work end, then leave.
//!
//! The order is a lame duck's: readiness goes first, then a pause so that routers notice, then the listener,
//! then the work itself, which gets a bounded time. Every task that must end before the process does is
//! spawned on [`Drain::tasks`].

use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// How long each part of stopping may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainTimes {
    /// Between saying "not ready" and refusing connections. Default 200 ms.
    pub lame_duck: Duration,
    /// For running work to end. Default 20 s; then it is cancelled.
    pub grace: Duration,
}

impl Default for DrainTimes {
    fn default() -> Self {
        Self { lame_duck: Duration::from_millis(200), grace: Duration::from_secs(20) }
    }
}

/// The state of stopping, shared by all parts of a process.
#[derive(Clone, Debug, Default)]
pub struct Drain {
    times: DrainTimes,
    /// Cancelled when everything is loaded and listeners are open.
    ready: CancellationToken,
    /// Cancelled when stopping begins: readiness goes.
    stopping: CancellationToken,
    /// Cancelled when listeners close.
    closing: CancellationToken,
    /// Cancelled when the grace is over.
    abort: CancellationToken,
    tasks: TaskTracker,
}

impl Drain {
    /// A process that is not stopping.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same, which stops in other times than usual.
    pub fn with_times(times: DrainTimes) -> Self {
        Self { times, ..Self::default() }
    }

    /// How long each part of stopping may take here.
    pub fn times(&self) -> DrainTimes {
        self.times
    }

    /// The process takes work from now on.
    pub fn set_ready(&self) {
        self.ready.cancel();
    }

    /// Ends when the process takes work.
    pub async fn ready(&self) {
        self.ready.cancelled().await;
    }

    /// Begins stopping. Called again, it does nothing.
    pub fn begin(&self) {
        self.stopping.cancel();
    }

    /// Whether stopping has begun.
    pub fn is_stopping(&self) -> bool {
        self.stopping.is_cancelled()
    }

    /// Ends when stopping begins.
    pub async fn stopping(&self) {
        self.stopping.cancelled().await;
    }

    /// Ends when listeners must close; for `serve_with_shutdown`.
    pub fn closing(&self) -> impl Future<Output = ()> + Send + 'static {
        self.closing.clone().cancelled_owned()
    }

    /// Cancelled when running work must give up.
    pub fn abort_token(&self) -> CancellationToken {
        self.abort.clone()
    }

    /// The tasks that stopping waits for.
    pub fn tasks(&self) -> &TaskTracker {
        &self.tasks
    }

    /// Begins stopping on SIGTERM or SIGINT. A second signal gives up on running work.
    ///
    /// # Errors
    /// If the process may not watch signals.
    pub fn on_signals(&self) -> std::io::Result<()> {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let drain = self.clone();
        tokio::spawn(async move {
            for second in [false, true] {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                }
                if second { drain.abort.cancel() } else { drain.begin() }
            }
        });
        Ok(())
    }

    /// Runs the stop to its end: waits for its beginning, then lame duck, close, grace, abort.
    pub async fn finish(&self, times: DrainTimes) {
        self.stopping().await;
        tracing::info!("draining");
        tokio::time::sleep(times.lame_duck).await;
        self.closing.cancel();
        self.tasks.close();
        tokio::select! {
            () = self.tasks.wait() => {}
            () = tokio::time::sleep(times.grace) => {
                tracing::warn!(grace_s = times.grace.as_secs(), tasks = self.tasks.len(), "grace is over, cancelling what still runs");
            }
            () = self.abort.cancelled() => {}
        }
        self.abort.cancel();
        // What honours the abort ends at once; what does not is left to the end of the process.
        let _ = tokio::time::timeout(Duration::from_secs(2), self.tasks.wait()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn running_work_ends_before_the_process_and_stuck_work_is_cancelled() {
        let drain = Drain::new();
        let (done, mut was_done) = tokio::sync::oneshot::channel();
        drain.tasks().spawn(async move {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let _ = done.send(());
        });
        let abort = drain.abort_token();
        drain.tasks().spawn(async move { abort.cancelled().await });
        drain.begin();
        drain.finish(DrainTimes { lame_duck: Duration::ZERO, grace: Duration::from_secs(1) }).await;
        assert!(was_done.try_recv().is_ok());
        assert!(drain.tasks().is_empty());
    }
}
