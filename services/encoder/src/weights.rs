//! Encoder weights that are loaded when a job needs them, and dropped when none does (`--encoder-weights lazy`).
//!
//! [`WeightsState`] decides: it is told the time and the room there is, and has neither clock nor thread. [`LazyWeights`] is what
//! the thread of an encoder and its jobs share. The thread alone loads and drops: jobs that come at a time wait for one load,
//! and nothing is dropped beside a forward. A load that failed is tried again after a pause that grows; until then jobs are
//! refused as by a worker that is full, so that the proxy asks another one and does not take this one for broken.

use crate::meters::{EncoderLabels, EncoderMeters};
use parking_lot::Mutex;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use triptych_core::backoff::Backoff;
use triptych_core::clock::Clock;
use triptych_core::{Failure, FailureClass};
use triptych_models::ModelError;
use triptych_runtime::memory_budget::MemoryBudget;

/// Pauses after loads that failed in a row.
const PAUSES: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Pause after a load for which there was no room.
const ROOM_PAUSE: Duration = Duration::from_secs(1);
/// Time without a job after which weights are dropped where memory is short: not between two jobs of one request.
const SHORT_IDLE: Duration = Duration::from_secs(2);
/// Bytes a second of a load that was not measured yet, from a disk rather than a page cache.
const UNMEASURED_RATE: f64 = (256 << 20) as f64;
/// Part of a load's usual time that is left of one that takes longer, as a divisor.
const LEFT_AT_LEAST: u32 = 10;

/// Presence of encoder weights while the worker serves.
#[derive(Clone, Debug, Default)]
pub enum WeightsPolicy {
    /// Loaded at the start and kept.
    #[default]
    Eager,
    /// Loaded for a job and dropped without one.
    Lazy(LazyRules),
}

/// Rules of weights that come and go.
#[derive(Clone)]
pub struct LazyRules {
    /// Time without a job after which weights are dropped; `None`: only where memory is short.
    pub idle: Option<Duration>,
    /// Memory that a load has to fit into.
    pub memory: MemoryBudget,
    /// Clock of idleness and pauses.
    pub clock: Arc<dyn Clock>,
}

impl fmt::Debug for LazyRules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { idle, memory, .. } = self;
        f.debug_struct("LazyRules").field("idle", idle).field("memory", memory).finish_non_exhaustive()
    }
}

/// Cause of a drop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// No job for a time.
    Idle,
    /// Memory is short, and no job.
    Memory,
}

impl DropReason {
    /// The word in metrics and logs.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Memory => "memory",
        }
    }
}

/// Weights of one encoder, and the jobs that need them.
#[derive(Debug)]
pub struct WeightsState {
    idle: Option<Duration>,
    stage: Stage,
    /// Jobs that wait for the weights or use them.
    n_jobs: usize,
    /// End of the latest job or load.
    used: Instant,
    /// Usual time of a load.
    load_time: Duration,
    n_failures: u32,
}

#[derive(Debug)]
enum Stage {
    Absent,
    Loading { since: Instant },
    Loaded,
    Refused { until: Instant, why: String },
}

impl WeightsState {
    /// Weights of so many bytes that are not loaded.
    pub fn new(n_bytes: u64, idle: Option<Duration>, now: Instant) -> Self {
        let load_time = Duration::from_secs_f64(n_bytes as f64 / UNMEASURED_RATE);
        Self { idle, stage: Stage::Absent, n_jobs: 0, used: now, load_time, n_failures: 0 }
    }

    /// Refusal of a job at this time, after a load that did not succeed.
    pub fn refusal(&self, now: Instant) -> Option<Failure> {
        let Stage::Refused { until, why } = &self.stage else { return None };
        let left = until.saturating_duration_since(now);
        if left.is_zero() {
            return None;
        }
        let text = "encoder weights could not be loaded at this worker; it tries again later";
        Some(Failure::new(FailureClass::Overloaded, text).with_detail(why).with_retry_after(left))
    }

    /// True if a load has to come before a forward.
    pub fn is_absent(&self) -> bool {
        matches!(self.stage, Stage::Absent | Stage::Refused { .. })
    }

    /// Predicted time until the weights are there if a job came now; `None`: they are.
    pub fn cold(&self, now: Instant) -> Option<Duration> {
        match self.stage {
            Stage::Loaded => None,
            Stage::Absent => Some(self.load_time),
            Stage::Loading { since } => {
                let left = self.load_time.saturating_sub(now.saturating_duration_since(since));
                Some(left.max(self.load_time / LEFT_AT_LEAST))
            }
            Stage::Refused { until, .. } => {
                Some(until.saturating_duration_since(now).saturating_add(self.load_time))
            }
        }
    }

    /// A job needs the weights.
    pub fn begin_job(&mut self) {
        self.n_jobs += 1;
    }

    /// A job needs them no more.
    pub fn end_job(&mut self, now: Instant) {
        self.n_jobs = self.n_jobs.saturating_sub(1);
        self.used = now;
    }

    /// A load begins.
    pub fn begin_load(&mut self, now: Instant) {
        self.stage = Stage::Loading { since: now };
    }

    /// A load ended well.
    pub fn loaded(&mut self, now: Instant) {
        if let Stage::Loading { since } = self.stage {
            self.load_time = now.saturating_duration_since(since);
        }
        (self.stage, self.used, self.n_failures) = (Stage::Loaded, now, 0);
    }

    /// A load failed: none is tried for a while.
    pub fn failed(&mut self, now: Instant, why: String) {
        self.n_failures = self.n_failures.saturating_add(1);
        self.stage = Stage::Refused { until: now + PAUSES.after(self.n_failures), why };
    }

    /// There is no room for a load.
    pub fn lacks_room(&mut self, now: Instant, why: String) {
        self.stage = Stage::Refused { until: now + ROOM_PAUSE, why };
    }

    /// Reason to drop the weights at this time; `None`: they stay, or are not there.
    pub fn drop_reason(&self, now: Instant, is_memory_short: bool) -> Option<DropReason> {
        if self.n_jobs > 0 || !matches!(self.stage, Stage::Loaded) {
            return None;
        }
        let unused = now.saturating_duration_since(self.used);
        match self.idle {
            _ if is_memory_short && unused >= SHORT_IDLE => Some(DropReason::Memory),
            Some(idle) if unused >= idle => Some(DropReason::Idle),
            _ => None,
        }
    }

    /// The weights were dropped.
    pub fn dropped(&mut self) {
        self.stage = Stage::Absent;
    }
}

/// Weights of one encoder that come and go: shared by its thread and its jobs.
pub struct LazyWeights {
    rules: LazyRules,
    /// Bytes of the weights and of a forward's activations.
    n_bytes: u64,
    labels: EncoderLabels,
    meters: Arc<EncoderMeters>,
    state: Mutex<WeightsState>,
}

/// A job's hold on the weights: they are not dropped before it.
pub struct WeightsHold(Arc<LazyWeights>);

impl Drop for WeightsHold {
    fn drop(&mut self) {
        self.0.state.lock().end_job(self.0.rules.clock.now());
    }
}

impl LazyWeights {
    /// Weights that are not loaded.
    pub fn new(rules: LazyRules, n_bytes: u64, labels: EncoderLabels, meters: Arc<EncoderMeters>) -> Self {
        meters.weights_absent(&labels);
        let state = Mutex::new(WeightsState::new(n_bytes, rules.idle, rules.clock.now()));
        Self { rules, n_bytes, labels, meters, state }
    }

    /// Holds the weights for a job, whether or not they are there yet.
    ///
    /// # Errors
    /// Overloaded, with a pause, if they could not be loaded a moment ago or would not fit.
    pub fn hold(self: &Arc<Self>) -> Result<WeightsHold, Failure> {
        let mut state = self.state.lock();
        self.check(&mut state)?;
        state.begin_job();
        drop(state);
        Ok(WeightsHold(Arc::clone(self)))
    }

    /// Refuses where a load that has to come would not succeed.
    fn check(&self, state: &mut WeightsState) -> Result<(), Failure> {
        let now = self.rules.clock.now();
        if let Some(refusal) = state.refusal(now) {
            return Err(refusal);
        }
        if !state.is_absent() {
            return Ok(());
        }
        let Err(short) = self.rules.memory.check_room(self.n_bytes) else { return Ok(()) };
        let EncoderLabels { model, encoder } = &self.labels;
        tracing::warn!(%model, %encoder, %short, "no room for encoder weights; jobs go to other workers");
        self.meters.weights_load_ended(&self.labels, "no_memory", None);
        state.lacks_room(now, short.to_string());
        state.refusal(now).map_or(Ok(()), Err)
    }

    /// Predicted time until the weights are there if a job came now; `None`: they are.
    pub fn cold(&self) -> Option<Duration> {
        self.state.lock().cold(self.rules.clock.now())
    }

    /// Loads the weights. For the encoder's thread.
    ///
    /// # Errors
    /// Overloaded, with a pause, if they do not fit, or the load failed or panicked.
    pub fn load<T>(&self, load: impl FnOnce() -> Result<T, ModelError>) -> Result<T, Failure> {
        let began = self.rules.clock.now();
        {
            let mut state = self.state.lock();
            self.check(&mut state)?;
            state.begin_load(began);
        }
        let EncoderLabels { model, encoder } = &self.labels;
        let loaded = catch_unwind(AssertUnwindSafe(load));
        let loaded = loaded.map_err(|_| "it panicked".to_owned()).and_then(|loaded| {
            loaded.map_err(|e| {
                let cause = std::error::Error::source(&e).map(|cause| format!(": {cause}"));
                format!("{e}{}", cause.unwrap_or_default())
            })
        });
        let now = self.rules.clock.now();
        let took = now.saturating_duration_since(began);
        let mut state = self.state.lock();
        match loaded {
            Ok(loaded) => {
                state.loaded(now);
                let mib = self.n_bytes >> 20;
                tracing::info!(%model, %encoder, mib, ?took, "encoder weights loaded");
                self.meters.weights_load_ended(&self.labels, "ok", Some(took));
                self.meters.weights_present(&self.labels);
                Ok(loaded)
            }
            Err(why) => {
                tracing::error!(%model, %encoder, error = %why, "encoder weights could not be loaded");
                self.meters.weights_load_ended(&self.labels, "failed", None);
                state.failed(now, why);
                let refusal = state.refusal(now);
                Err(refusal.unwrap_or_else(|| Failure::internal("a load failed and nothing is refused")))
            }
        }
    }

    /// Drops the weights by `drop_weights` if nobody needs them and it is time. A job that comes meanwhile has them loaded again.
    /// For the encoder's thread.
    pub fn drop_if_due(&self, drop_weights: impl FnOnce()) {
        let is_short = self.rules.memory.is_short();
        let mut state = self.state.lock();
        let Some(reason) = state.drop_reason(self.rules.clock.now(), is_short) else { return };
        state.dropped();
        drop(state);
        drop_weights();
        let (EncoderLabels { model, encoder }, reason) = (&self.labels, reason.as_str());
        tracing::info!(%model, %encoder, reason, "encoder weights dropped");
        self.meters.weights_dropped(&self.labels, reason);
        self.meters.weights_absent(&self.labels);
    }
}

#[cfg(test)]
mod tests;
