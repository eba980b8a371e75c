//! Preprocessing on a CPU pool beside compute, behind the bound on admitted jobs. Jobs have the pool's threads in the order of
//! [`crate::order`], as they have forwards.

use crate::load::{JobLoad, LoadTracker};
use crate::meters::EncoderMeters;
use crate::order::{JobOrder, JobOwner};
use crate::thread_turns::ThreadTurns;
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;
use triptych_core::limits::Limits;
use triptych_core::timeline::COMPUTE;
use triptych_core::{EncoderId, Failure, FailureClass, ItemOptions, Modality, RequestId};
use triptych_models::error::ItemError;
use triptych_models::preprocess::{EncoderInput, Preprocess};
use triptych_runtime::watchdog::Watchdog;

/// Bounds of the retry-after time when all permits are taken.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));

/// CPU pool and bound on jobs.
pub struct PreprocessPool {
    threads: ThreadTurns,
    jobs: Arc<Semaphore>,
    max_jobs: usize,
    limits: Arc<Limits>,
    meters: Arc<EncoderMeters>,
    load: LoadTracker,
    /// The start, from which arrivals of jobs count.
    began: Instant,
    /// Task group that drain waits for.
    tasks: TaskTracker,
    watchdog: Watchdog,
    fault: Option<ItemHook>,
}

/// Sizes of the pool, and the bound on jobs.
pub struct PoolConfig {
    /// Items preprocessed at once; 0: the machine's cores.
    pub threads: usize,
    /// Jobs admitted at once; one more is Overloaded.
    pub max_jobs: usize,
    /// Order in which jobs have the threads.
    pub order: JobOrder,
    /// Limits on items.
    pub limits: Limits,
    /// Watches the threads.
    pub watchdog: Watchdog,
    /// Called on a thread of the pool with each item. `None` outside tests, which plant faults with it.
    pub fault: Option<ItemHook>,
}

/// An item as the client sent it.
pub struct RawItem {
    /// Its kind.
    pub modality: Modality,
    /// Its bytes.
    pub bytes: Bytes,
    /// Its processing options.
    pub options: ItemOptions,
}

/// Seam by which tests plant faults into the preprocessing of an item.
pub type ItemHook = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Permit of one job. Released when dropped.
pub struct JobPermit {
    _permit: OwnedSemaphorePermit,
    meters: Arc<EncoderMeters>,
    load: JobLoad,
}

impl JobPermit {
    /// The job's entry in the load.
    pub fn load(&self) -> &JobLoad {
        &self.load
    }
}

impl Drop for JobPermit {
    fn drop(&mut self) {
        self.meters.left();
    }
}

impl PreprocessPool {
    /// A pool of `threads` threads behind a bound of `max_jobs` jobs.
    pub fn new(config: PoolConfig, meters: Arc<EncoderMeters>, tasks: TaskTracker) -> Self {
        let PoolConfig { threads, max_jobs, order, limits, watchdog, fault } = config;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads };
        let load = LoadTracker::new(max_jobs, meters.backlog());
        Self {
            threads: ThreadTurns::new(threads, order, load.clone()),
            jobs: Arc::new(Semaphore::new(max_jobs.min(Semaphore::MAX_PERMITS))),
            max_jobs,
            limits: Arc::new(limits),
            load,
            began: Instant::now(),
            meters,
            tasks,
            watchdog,
            fault,
        }
    }

    /// Load of the admitted jobs.
    pub fn load(&self) -> &LoadTracker {
        &self.load
    }

    /// The owner of a job that arrives now.
    pub fn owner(&self, request: Option<RequestId>, priority: i32) -> JobOwner {
        JobOwner { request, priority, arrived: self.began.elapsed() }
    }

    /// A permit for one job of `bytes` bytes, held until its output is published.
    ///
    /// # Errors
    /// Overloaded when all permits are taken, with the predicted time of half the queue as retry-after.
    pub fn admit(
        &self,
        model: &str,
        encoder: impl Into<EncoderId>,
        bytes: usize,
        owner: JobOwner,
    ) -> Result<Arc<JobPermit>, Failure> {
        let full = |_| {
            let message = format!("the encoder has {} jobs already, its limit", self.max_jobs);
            let pause = (self.load.queued() / 2).clamp(RETRY_AFTER.0, RETRY_AFTER.1);
            Failure::new(FailureClass::Overloaded, message).with_retry_after(pause)
        };
        let permit = self.jobs.clone().try_acquire_owned().map_err(full)?;
        self.meters.admitted();
        let load = self.load.admit(model, encoder, bytes, owner);
        Ok(Arc::new(JobPermit { _permit: permit, meters: self.meters.clone(), load }))
    }

    /// Preprocesses the item of a job; returns the input and the time of the work itself.
    ///
    /// # Errors
    /// The item's own fault, or Internal if the preprocessor panicked.
    pub async fn preprocess(
        &self,
        with: Arc<dyn Preprocess>,
        item: RawItem,
        job: &JobLoad,
    ) -> Result<(EncoderInput, Duration), Failure> {
        let RawItem { modality, bytes, options } = item;
        let read = move |item: &[u8], limits: &Limits| with.preprocess(modality, item, &options, limits);
        self.read(bytes, job, read).await
    }

    /// Reads the item of a job on a thread of the pool, when it is its turn; returns what was read and the time of the work
    /// itself.
    ///
    /// # Errors
    /// As [`Self::preprocess`].
    pub async fn read<T: Send + 'static>(
        &self,
        item: Bytes,
        job: &JobLoad,
        read: impl FnOnce(&[u8], &Limits) -> Result<T, ItemError> + Send + 'static,
    ) -> Result<(T, Duration), Failure> {
        let turn = self.threads.take(job).await?;
        let (limits, watchdog, fault) = (self.limits.clone(), self.watchdog.clone(), self.fault.clone());
        let work = self.tasks.spawn_blocking(move || {
            let (_turn, _watched) = (turn, watchdog.begin("the preprocessing of an item"));
            if let Some(fault) = fault {
                fault(&item);
            }
            let _span = tracing::trace_span!(target: COMPUTE, "preprocess").entered();
            let start = Instant::now();
            let input = read(&item, &limits)?;
            Ok((input, start.elapsed()))
        });
        work.await.unwrap_or_else(|e| Err(Failure::internal(format!("preprocessing: {e}"))))
    }
}
