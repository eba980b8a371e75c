//! Preprocessing on a CPU pool beside compute, behind the bound on admitted jobs.

use crate::load::{Load, Ticket};
use crate::meters::Meters;
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use triptych_core::limits::Limits;
use triptych_core::timeline::COMPUTE;
use triptych_core::{Failure, FailureClass, ItemOptions, Modality};
use triptych_models::preprocess::{EncoderInput, Preprocess};

/// The shortest and the longest pause that a caller is told when all places are taken.
const COME_BACK: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));

/// The pool and the bound.
pub struct PreprocessPool {
    threads: Arc<Semaphore>,
    jobs: Arc<Semaphore>,
    max_jobs: usize,
    limits: Arc<Limits>,
    meters: Arc<Meters>,
    load: Load,
}

/// One job's place. Dropping it gives the place back.
pub struct Place {
    _permit: OwnedSemaphorePermit,
    meters: Arc<Meters>,
    ticket: Ticket,
}

impl Place {
    /// The job in the worker's load.
    pub fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.meters.left();
    }
}

impl PreprocessPool {
    /// A pool of `threads` (0: the machine's cores) behind a bound of `max_jobs`.
    pub fn new(threads: usize, max_jobs: usize, limits: Limits, meters: Arc<Meters>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = if threads == 0 { cores } else { threads };
        Self {
            threads: Arc::new(Semaphore::new(threads.min(Semaphore::MAX_PERMITS))),
            jobs: Arc::new(Semaphore::new(max_jobs.min(Semaphore::MAX_PERMITS))),
            max_jobs,
            limits: Arc::new(limits),
            load: Load::new(max_jobs, meters.backlog()),
            meters,
        }
    }

    /// The jobs that have places, as watchers see them.
    pub fn load(&self) -> &Load {
        &self.load
    }

    /// A place for one job of so many bytes, held until it is published.
    ///
    /// # Errors
    /// Overloaded when all places are taken, with the time after which half of the queue should be done.
    pub fn admit(&self, model: &str, modality: Modality, bytes: usize) -> Result<Arc<Place>, Failure> {
        let full = |_| {
            let message = format!("the encoder has {} jobs already, its limit", self.max_jobs);
            let pause = (self.load.queued() / 2).clamp(COME_BACK.0, COME_BACK.1);
            Failure::new(FailureClass::Overloaded, message).with_retry_after(pause)
        };
        let permit = self.jobs.clone().try_acquire_owned().map_err(full)?;
        self.meters.admitted();
        let ticket = self.load.admit(model, modality, bytes);
        Ok(Arc::new(Place { _permit: permit, meters: self.meters.clone(), ticket }))
    }

    /// Preprocesses one item; returns how long the work itself took.
    ///
    /// # Errors
    /// The item's own fault, or Internal if the preprocessor panicked.
    pub async fn preprocess(
        &self,
        with: Arc<dyn Preprocess>,
        modality: Modality,
        item: Bytes,
        options: ItemOptions,
    ) -> Result<(EncoderInput, Duration), Failure> {
        let threads = self.threads.clone().acquire_owned().await;
        let permit = threads.map_err(|_| Failure::unavailable("the encoder is stopping"))?;
        let limits = self.limits.clone();
        let work = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            let _span = tracing::trace_span!(target: COMPUTE, "preprocess").entered();
            let start = Instant::now();
            let input = with.preprocess(modality, &item, &options, &limits)?;
            Ok((input, start.elapsed()))
        });
        work.await.unwrap_or_else(|e| Err(Failure::internal(format!("preprocessing: {e}"))))
    }
}
