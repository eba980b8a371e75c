//! Preprocessing on a CPU pool beside compute, behind the bound on admitted jobs. Jobs have the pool's threads in the order of
//! [`crate::order`], as they have forwards.

use crate::load::{JobLoad, LoadTracker};
use crate::meters::EncoderMeters;
use crate::order::{JobOrder, JobOwner};
use crate::room::{ByteRoom, TakenBytes};
use crate::thread_turns::ThreadTurns;
use bytes::Bytes;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::task::TaskTracker;
use triptych_core::limits::Limits;
use triptych_core::timeline::COMPUTE;
use triptych_core::{EncoderId, Failure, FailureClass, ItemOptions, Modality, RequestId};
use triptych_models::error::ItemError;
use triptych_models::preprocess::{EncoderInput, Preprocess};
use triptych_runtime::status::from_join_error;
use triptych_runtime::watchdog::Watchdog;

/// Bounds of the retry-after time when all permits are taken.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));

/// CPU pool and bound on jobs.
pub struct PreprocessPool {
    threads: ThreadTurns,
    n_threads: u32,
    jobs: Arc<Semaphore>,
    max_jobs: usize,
    limits: Arc<Limits>,
    /// Room for jobs, and the most bytes that one has taken so far.
    room: Option<(ByteRoom, AtomicUsize)>,
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
#[derive(Default)]
pub struct PoolConfig {
    /// Items preprocessed at once; 0: the machine's cores.
    pub threads: usize,
    /// Jobs admitted at once; one more is Overloaded.
    pub max_jobs: usize,
    /// Order in which jobs have the threads.
    pub order: JobOrder,
    /// Limits on items.
    pub limits: Limits,
    /// Room for jobs whose items are preprocessed; `None`: as much as they take.
    pub room: Option<ByteRoom>,
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
    /// Its part of the room for jobs, from preprocessing on.
    room: Mutex<Option<TakenBytes>>,
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
        let PoolConfig { threads, max_jobs, order, limits, room, watchdog, fault } = config;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads };
        let load = LoadTracker::new(max_jobs, meters.backlog());
        Self {
            threads: ThreadTurns::new(threads, order, load.clone()),
            n_threads: u32::try_from(threads).unwrap_or(u32::MAX),
            jobs: Arc::new(Semaphore::new(max_jobs.min(Semaphore::MAX_PERMITS))),
            max_jobs,
            limits: Arc::new(limits),
            room: room.map(|room| (room, AtomicUsize::new(0))),
            load,
            began: Instant::now(),
            meters,
            tasks,
            watchdog,
            fault,
        }
    }

    /// Items preprocessed at once.
    pub fn n_threads(&self) -> u32 {
        self.n_threads
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
        Ok(Arc::new(JobPermit { _permit: permit, meters: self.meters.clone(), load, room: Mutex::default() }))
    }

    /// Preprocesses the item of a job; returns the input and the time of the work itself.
    ///
    /// # Errors
    /// The item's own fault, or Internal if the preprocessor panicked.
    pub async fn preprocess(
        &self,
        permit: &JobPermit,
        with: Arc<dyn Preprocess>,
        item: RawItem,
    ) -> Result<(EncoderInput, Duration), Failure> {
        let RawItem { modality, bytes, options } = item;
        let read = move |item: &[u8], limits: &Limits| with.preprocess(modality, item, &options, limits);
        self.read(permit, bytes, read).await
    }

    /// Says what a job takes once its item is known: so much of the room is its own until its output is published.
    ///
    /// # Errors
    /// TooLarge for one that there is no room for.
    pub fn sized(&self, permit: &JobPermit, n_bytes: usize) -> Result<(), Failure> {
        let Some((room, most)) = &self.room else { return Ok(()) };
        let capacity = room.capacity();
        if n_bytes > capacity {
            let [needs, has] = [n_bytes, capacity].map(|bytes| bytes.div_ceil(1 << 20));
            let text =
                format!("the item and its rows take {needs} MiB of memory, this encoder has room for {has}");
            let detail = "larger items need more --memory-mib, or less --rows-mib";
            return Err(Failure::new(FailureClass::TooLarge, text).with_detail(detail));
        }
        most.fetch_max(n_bytes, Ordering::Relaxed);
        if let Some(taken) = &mut *permit.room.lock() {
            taken.resize(n_bytes);
        }
        Ok(())
    }

    /// Waits until there is room for another job. How large its item becomes is not known yet: it is taken to be the largest so far.
    async fn wait_for_room(&self, permit: &JobPermit) {
        let Some((room, most)) = &self.room else { return };
        let expected = most.load(Ordering::Relaxed).min(room.capacity());
        let taken = room.take(expected).await;
        *permit.room.lock() = Some(taken);
    }

    /// Reads the item of a job on a thread of the pool, when it is its turn; returns what was read and the time of the work
    /// itself.
    ///
    /// # Errors
    /// As [`Self::preprocess`].
    pub async fn read<T: Send + 'static>(
        &self,
        permit: &JobPermit,
        item: Bytes,
        read: impl FnOnce(&[u8], &Limits) -> Result<T, ItemError> + Send + 'static,
    ) -> Result<(T, Duration), Failure> {
        let turn = self.threads.take(&permit.load).await?;
        // In the order of the turns: the next job needs as much room.
        self.wait_for_room(permit).await;
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
        work.await.unwrap_or_else(|e| Err(from_join_error("preprocessing", &e)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use triptych_runtime::MetricsRegistry;

    fn pool(room: usize) -> PreprocessPool {
        let meters = Arc::new(EncoderMeters::new(&MetricsRegistry::default()));
        let config =
            PoolConfig { threads: 4, max_jobs: 4, room: Some(ByteRoom::new(room)), ..PoolConfig::default() };
        PreprocessPool::new(config, meters, TaskTracker::new())
    }

    fn admit(pool: &PreprocessPool) -> Arc<JobPermit> {
        pool.admit("m", Modality::Image, 1, JobOwner::default()).unwrap()
    }

    /// A job waits before it is preprocessed, and its room is free with its permit: when its output is published.
    #[tokio::test]
    async fn jobs_are_preprocessed_while_there_is_room_for_one_as_large_as_the_largest() {
        let pool = pool(100);
        let [first, second, third] = [(); 3].map(|()| admit(&pool));
        pool.wait_for_room(&first).now_or_never().expect("nothing is known yet");
        pool.sized(&first, 60).unwrap();
        assert!(pool.wait_for_room(&second).now_or_never().is_none(), "60 more would be too much");
        pool.sized(&first, 40).unwrap();
        pool.wait_for_room(&second).now_or_never().expect("60 of the 60 that are left");
        pool.sized(&second, 10).unwrap();
        assert!(pool.wait_for_room(&third).now_or_never().is_none());
        drop(first);
        pool.wait_for_room(&third).now_or_never().expect("room of a job that is done");
        let refused = pool.sized(&third, 200 << 20).unwrap_err();
        assert_eq!(refused.class, FailureClass::TooLarge);
        assert!(
            refused.message.contains("take 200 MiB of memory, this encoder has room for 1"),
            "{refused:?}"
        );
    }
}
