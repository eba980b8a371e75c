//! CPU work of requests on blocking threads.

use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;
use triptych_core::Failure;
use triptych_runtime::watchdog::Watchdog;

/// Runs the CPU work of one request on blocking threads, beside the async workers.
///
/// The work belongs to the tasks that drain waits for. It holds the request's permit to its end, also when the caller
/// goes away meanwhile, so that the bound on requests bounds this work too.
pub(crate) struct BlockingWork {
    pub(crate) permit: Arc<OwnedSemaphorePermit>,
    pub(crate) tasks: TaskTracker,
    pub(crate) watchdog: Watchdog,
}

impl BlockingWork {
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        let (permit, watchdog) = (Arc::clone(&self.permit), self.watchdog.clone());
        let task = self.tasks.spawn_blocking(move || {
            let (_permit, _watched) = (permit, watchdog.begin(name));
            work()
        });
        task.await.map_err(|e| Failure::internal(format!("{name}: {e}")))?
    }
}
