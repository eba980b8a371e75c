//! Threads for the large parts of requests: what parses, decodes and hashes them leaves the threads that serve connections.
//!
//! As many work at a time as the machine has cores. Of a queue of images more would take the cores from the requests of text
//! alone, which need no such thread.

use std::sync::Arc;
use tokio::sync::Semaphore;
use triptych_core::Failure;

/// The threads. Clones share them.
#[derive(Clone, Debug)]
pub struct Preparing(Arc<Semaphore>);

impl Default for Preparing {
    fn default() -> Self {
        Self::on(std::thread::available_parallelism().map_or(1, usize::from))
    }
}

impl Preparing {
    /// As many threads.
    fn on(n_threads: usize) -> Self {
        Self(Arc::new(Semaphore::new(n_threads)))
    }

    /// Does some work on one of them, in the order of the calls. Work that has begun is brought to its end when the caller goes
    /// away.
    ///
    /// # Errors
    /// Internal, if it panics.
    pub async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Failure> {
        let turn = Arc::clone(&self.0).acquire_owned().await.map_err(Failure::internal)?;
        let done = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            work()
        });
        done.await.map_err(Failure::internal)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    #[tokio::test]
    async fn no_more_work_at_a_time_than_threads_also_when_callers_go_away() {
        let preparing = Preparing::on(1);
        let ((begun, began), (go_on, wait)) = (mpsc::channel(), mpsc::channel::<()>());
        let mut first = Box::pin(preparing.run(move || {
            begun.send(()).expect("the test waits");
            wait.recv().expect("the test goes on");
        }));
        assert!(futures::poll!(&mut first).is_pending());
        began.recv().expect("it begins");
        let has_run = Arc::<AtomicBool>::default();
        let mut second = Box::pin(preparing.run({
            let has_run = Arc::clone(&has_run);
            move || has_run.store(true, Ordering::Release)
        }));
        drop(first);
        assert!(futures::poll!(&mut second).is_pending() && !has_run.load(Ordering::Acquire));
        go_on.send(()).expect("it waits");
        second.await.expect("no panic");
        assert!(has_run.load(Ordering::Acquire));
    }
}
