//! CPU work of requests on blocking threads.

use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::TaskTracker;
use triptych_core::Failure;
use triptych_runtime::status::from_join_error;
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
        task.await.map_err(|e| from_join_error(name, &e))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::runtime::Runtime;
    use tokio::sync::Semaphore;
    use triptych_core::FailureClass;

    #[tokio::test]
    async fn work_of_a_process_that_ends_can_be_tried_elsewhere() {
        let permit = Arc::new(Semaphore::new(1)).acquire_owned().await.expect("a permit");
        let work = BlockingWork {
            permit: Arc::new(permit),
            tasks: TaskTracker::new(),
            watchdog: Watchdog::default(),
        };
        assert_eq!(work.run("work", || Ok(42)).await, Ok(42));
        let ending = Runtime::new().expect("a runtime");
        let handle = ending.handle().clone();
        ending.shutdown_background();
        let _entered = handle.enter();
        let failure = work.run("work", || Ok(42)).await.expect_err("nothing runs any more");
        assert_eq!(failure.class, FailureClass::Unavailable, "{failure:?}");
    }
}
