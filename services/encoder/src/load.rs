//! Load of this worker, and the learned cost of items, as reported to watchers.
//!
//! A [`JobLoad`] stands for one job from admission to its end. Its cost is predicted from its bytes, then from
//! its tokens once they are known; the finished job updates the fit. A watcher gets a message when the load
//! changes by more than about a tenth, every second while there is work, and at most every 50 ms.

use crate::cost::{CostCurve, CostFit, CostSample};
use crate::meters::BacklogMeters;
use crate::order::{JobOrder, JobOwner, JobRank, WaitingJob, ranks};
use futures::stream::{self, BoxStream, StreamExt};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tonic::Status;
use triptych_core::EncoderId;
use triptych_proto::v1;
use triptych_runtime::Drain;

/// Least time between two messages.
pub const MIN_INTERVAL: Duration = Duration::from_millis(50);
/// Time between two messages while there is work.
pub const BUSY_INTERVAL: Duration = Duration::from_secs(1);
/// Relative change that is worth a message.
const MIN_CHANGE: f64 = 0.1;
/// Change of the queue in microseconds that is worth a message.
const MIN_QUEUE_CHANGE_US: f64 = 2_000.0;

/// Cost of a job without samples, besides its bytes. An estimate, as the proxy's own is, but a worker with jobs
/// must not look idle.
const UNMEASURED: Duration = Duration::from_millis(10);
/// Bytes that add a microsecond to it.
const UNMEASURED_BYTES_IN_US: usize = 10;

/// Model of an encoder, and which of the model's it is.
type EncoderKind = (String, EncoderId);

/// Jobs of this worker and their costs. Clones share them.
#[derive(Clone)]
pub struct LoadTracker(Arc<LoadShared>);

struct LoadShared {
    capacity: u32,
    /// `None`: no metrics.
    meters: Option<BacklogMeters>,
    table: Mutex<JobTable>,
    /// Number of changes; watchers wake on it.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct JobTable {
    jobs: HashMap<u64, TrackedJob>,
    next_id: u64,
    costs: BTreeMap<EncoderKind, CostFit>,
    /// Every kind that had a job, so that its gauge returns to zero.
    kinds: BTreeSet<EncoderKind>,
    /// Compute time of all finished jobs.
    computed: Duration,
}

struct TrackedJob {
    kind: EncoderKind,
    owner: JobOwner,
    predicted: Duration,
    /// Output tokens; estimated from the bytes until the item is preprocessed.
    tokens: u32,
    stage: JobStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum JobStage {
    Waiting,
    Running,
}

impl LoadTracker {
    /// A tracker of a worker that admits `capacity` jobs.
    pub fn new(capacity: usize, meters: BacklogMeters) -> Self {
        Self::with(capacity, Some(meters))
    }

    /// A tracker without metrics.
    pub fn unmetered(capacity: usize) -> Self {
        Self::with(capacity, None)
    }

    fn with(capacity: usize, meters: Option<BacklogMeters>) -> Self {
        let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
        let changes = watch::Sender::new(0);
        Self(Arc::new(LoadShared { capacity, meters, table: Mutex::default(), changes }))
    }

    /// Adds an admitted job.
    pub fn admit(
        &self,
        model: &str,
        encoder: impl Into<EncoderId>,
        bytes: usize,
        owner: JobOwner,
    ) -> JobLoad {
        let kind = (model.to_owned(), encoder.into());
        let id = self.change(|table| {
            let id = table.next_id;
            table.next_id += 1;
            let curve = table.curve(&kind);
            let predicted = curve.map_or_else(|| unmeasured(bytes), |c| c.of_bytes(bytes));
            // Saturates: an estimate beyond u32 is as good as the largest value.
            let tokens = curve.map_or(0, |c| (c.tokens_per_byte * bytes as f64) as u32);
            table.kinds.insert(kind.clone());
            table.jobs.insert(id, TrackedJob { kind, owner, predicted, tokens, stage: JobStage::Waiting });
            id
        });
        JobLoad { load: self.clone(), id, bytes }
    }

    /// Predicted time of all queued and running jobs.
    pub fn queued(&self) -> Duration {
        self.table().queued()
    }

    /// Places of the waiting jobs in an order. Items that are not preprocessed yet count as work of their requests.
    pub(crate) fn ranks(&self, order: JobOrder) -> JobRanks {
        let table = self.table();
        let waiting = table.jobs.iter().filter(|(_, job)| job.stage == JobStage::Waiting);
        let job =
            |(id, job): (&u64, &TrackedJob)| WaitingJob { id: *id, owner: job.owner, work: job.predicted };
        let waiting: Vec<_> = waiting.map(job).collect();
        drop(table);
        JobRanks(ranks(order, &waiting))
    }

    /// Load and costs in the wire type.
    pub fn report(&self) -> v1::WorkerLoad {
        let table = self.table();
        let running = table.jobs.values().filter(|job| job.stage == JobStage::Running).count();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let cost = |(kind, fit): (&EncoderKind, &CostFit)| {
            let CostCurve { fixed_us, token_us, tokens_per_byte, p95_ratio } = fit.curve()?;
            Some(v1::EncodeCost {
                model: kind.0.clone(),
                modality: v1::Modality::from(kind.1.modality).into(),
                tower_index: kind.1.tower.0.into(),
                fixed_us: fixed_us as u64,
                token_us,
                tokens_per_byte,
                p95_ratio,
            })
        };
        v1::WorkerLoad {
            running: count(running),
            waiting: count(table.jobs.len() - running),
            capacity: self.0.capacity,
            queued_us: u64::try_from(table.queued().as_micros()).unwrap_or(u64::MAX),
            costs: table.costs.iter().filter_map(cost).collect(),
            computed: Some(v1::ComputedWork {
                encode_us: u64::try_from(table.computed.as_micros()).unwrap_or(u64::MAX),
                ..v1::ComputedWork::default()
            }),
            ..v1::WorkerLoad::default()
        }
    }

    /// Worker state in the wire type.
    pub fn state(&self, draining: bool) -> v1::WorkerState {
        v1::WorkerState { load: Some(self.report()), draining, ..v1::WorkerState::default() }
    }

    /// Stream of states: the present one, then each significant change, until listeners close.
    pub fn watch(&self, drain: Drain) -> BoxStream<'static, Result<v1::WorkerState, Status>> {
        let watcher =
            LoadWatcher { load: self.clone(), changes: self.0.changes.subscribe(), drain, reported: None };
        stream::unfold(watcher, LoadWatcher::next).boxed()
    }

    fn change<T>(&self, change: impl FnOnce(&mut JobTable) -> T) -> T {
        let mut table = self.table();
        let changed = change(&mut table);
        if let Some(meters) = &self.0.meters {
            table.export(meters);
        }
        drop(table);
        self.0.changes.send_modify(|n| *n = n.wrapping_add(1));
        changed
    }

    fn table(&self) -> MutexGuard<'_, JobTable> {
        self.0.table.lock()
    }
}

impl JobTable {
    fn curve(&self, kind: &EncoderKind) -> Option<CostCurve> {
        self.costs.get(kind).and_then(CostFit::curve)
    }

    fn queued(&self) -> Duration {
        self.jobs.values().map(|job| job.predicted).sum()
    }

    fn export(&self, meters: &BacklogMeters) {
        for kind in &self.kinds {
            // Towers that read the same items are one kind in the metrics.
            let is_alike = |other: &EncoderKind| other.0 == kind.0 && other.1.modality == kind.1.modality;
            let jobs = self.jobs.values().filter(|job| is_alike(&job.kind));
            let (tokens, time) = jobs.fold((0, Duration::ZERO), |(tokens, time), job| {
                (tokens + u64::from(job.tokens), time + job.predicted)
            });
            meters.set(&kind.0, kind.1.modality, tokens, time);
        }
    }
}

/// Estimated cost of an item without samples.
fn unmeasured(bytes: usize) -> Duration {
    UNMEASURED.saturating_add(Duration::from_micros((bytes / UNMEASURED_BYTES_IN_US) as u64))
}

/// Places of the jobs that waited at one moment.
pub struct JobRanks(HashMap<u64, JobRank>);

impl JobRanks {
    /// Place of a job; `None` if it did not wait.
    pub fn of(&self, job: &JobLoad) -> Option<JobRank> {
        self.of_id(job.id)
    }

    /// The same by its number.
    pub(crate) fn of_id(&self, id: u64) -> Option<JobRank> {
        self.0.get(&id).copied()
    }
}

/// Times of a finished job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodeTimes {
    /// Its share of the compute time of its forward.
    pub forward: Duration,
    /// Latency of its forward.
    pub encode: Duration,
    /// Its preprocessing, on one thread.
    pub preprocess: Duration,
    /// Publishing of its rows.
    pub publish: Duration,
    /// Threads that preprocess: an item takes one of them from the rest of the worker.
    pub n_threads: u32,
}

/// One job, from admission to its end. Dropping it removes the job.
pub struct JobLoad {
    load: LoadTracker,
    id: u64,
    bytes: usize,
}

impl JobLoad {
    /// Its number: no other job of this worker has it.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// Places of all jobs that wait beside it.
    pub fn ranks(&self, order: JobOrder) -> JobRanks {
        self.load.ranks(order)
    }

    /// Sets the output tokens, which preprocessing determined.
    pub fn sized(&self, tokens: u32) {
        self.load.change(|table| {
            let Some(kind) = table.jobs.get(&self.id).map(|job| job.kind.clone()) else { return };
            let curve = table.curve(&kind);
            let Some(job) = table.jobs.get_mut(&self.id) else { return };
            job.tokens = tokens;
            if let Some(curve) = curve {
                job.predicted = curve.of_tokens(tokens);
            }
        });
    }

    /// Marks the job as running.
    pub fn started(&self) {
        self.load.change(|table| {
            if let Some(job) = table.jobs.get_mut(&self.id) {
                job.stage = JobStage::Running;
            }
        });
    }

    /// Removes the finished job and learns its cost.
    pub fn done(&self, tokens: u32, times: EncodeTimes) {
        let EncodeTimes { forward, encode, preprocess, publish, n_threads } = times;
        let (beside, computed) = (preprocess + publish, forward + preprocess / n_threads.max(1));
        self.load.change(|table| {
            if let Some(job) = table.jobs.remove(&self.id) {
                let (work, took) = (beside + forward, beside + encode);
                let sample = CostSample { bytes: self.bytes, tokens, work, took };
                table.costs.entry(job.kind).or_default().learn(sample);
                table.computed = table.computed.saturating_add(computed);
            }
        });
    }
}

impl Drop for JobLoad {
    fn drop(&mut self) {
        self.load.change(|table| table.jobs.remove(&self.id));
    }
}

/// State of one watcher.
struct LoadWatcher {
    load: LoadTracker,
    changes: watch::Receiver<u64>,
    drain: Drain,
    reported: Option<(v1::WorkerState, Instant)>,
}

impl LoadWatcher {
    async fn next(mut self) -> Option<(Result<v1::WorkerState, Status>, Self)> {
        let mut closing = pin!(self.drain.closing());
        loop {
            if let Some((reported, at)) = &self.reported {
                tokio::select! {
                    () = sleep_until(*at + MIN_INTERVAL) => {}
                    // Draining is reported at once, regardless of the last message.
                    () = self.drain.stopping(), if !reported.draining => {}
                }
            }
            self.changes.borrow_and_update();
            let state = self.load.state(self.drain.is_stopping());
            if self
                .reported
                .as_ref()
                .is_none_or(|(reported, at)| is_worth_reporting(reported, &state, at.elapsed()))
            {
                self.reported = Some((state.clone(), Instant::now()));
                return Some((Ok(state), self));
            }
            let reported = self.reported.as_ref().map_or_else(Instant::now, |(_, at)| *at);
            tokio::select! {
                // The sender lives as long as `load`.
                _ = self.changes.changed() => {}
                () = sleep_until(reported + BUSY_INTERVAL), if is_busy(&state) => {}
                () = self.drain.stopping(), if !state.draining => {}
                () = &mut closing => return None,
            }
        }
    }
}

/// True if there are jobs.
pub fn is_busy(state: &v1::WorkerState) -> bool {
    state.load.as_ref().is_some_and(|load| load.running + load.waiting > 0)
}

/// True if `state` is worth a message `since` after the message `reported`.
pub fn is_worth_reporting(reported: &v1::WorkerState, state: &v1::WorkerState, since: Duration) -> bool {
    let changed = |a: f64, b: f64, small: f64| (a - b).abs() > (a.abs().max(b.abs()) * MIN_CHANGE).max(small);
    let (Some(a), Some(b)) = (&reported.load, &state.load) else { return reported.load != state.load };
    let cost_changed = |(a, b): (&v1::EncodeCost, &v1::EncodeCost)| {
        changed(a.fixed_us as f64, b.fixed_us as f64, 100.0)
            || changed(a.token_us, b.token_us, 1e-3)
            || changed(a.tokens_per_byte, b.tokens_per_byte, 1e-9)
            || changed(a.p95_ratio, b.p95_ratio, 0.1)
    };
    reported.draining != state.draining
        || changed(a.running.into(), b.running.into(), 0.0)
        || changed(a.waiting.into(), b.waiting.into(), 0.0)
        || changed(a.queued_us as f64, b.queued_us as f64, MIN_QUEUE_CHANGE_US)
        || a.costs.len() != b.costs.len()
        || a.costs.iter().zip(&b.costs).any(cost_changed)
        || (is_busy(state) && since >= BUSY_INTERVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::Modality;
    use triptych_runtime::MetricsRegistry;

    const MS: Duration = Duration::from_millis(1);

    fn worker(capacity: usize) -> (LoadTracker, MetricsRegistry) {
        let registry = MetricsRegistry::default();
        (LoadTracker::new(capacity, BacklogMeters::new(&registry)), registry)
    }

    fn load(state: &v1::WorkerState) -> (u32, u32, u64) {
        let load = state.load.as_ref().unwrap();
        (load.running, load.waiting, load.queued_us)
    }

    /// Times of a job that was alone in its forward, without preprocessing.
    fn times(took: Duration) -> EncodeTimes {
        EncodeTimes { forward: took, encode: took, ..EncodeTimes::default() }
    }

    /// A worker that has learned that a token costs a millisecond, and a byte is a token.
    fn trained() -> LoadTracker {
        let (load, _) = worker(8);
        for tokens in [10, 20, 30, 40, 50] {
            let took = tokens * MS;
            load.admit("m", Modality::Image, tokens as usize, JobOwner::default()).done(tokens, times(took));
        }
        load
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_is_counted_from_admission_to_its_end_with_its_predicted_cost() {
        let worker = trained();
        assert_eq!(load(&worker.state(false)), (0, 0, 0));
        let job = worker.admit("m", Modality::Image, 100, JobOwner::default());
        let (_, waiting, queued) = load(&worker.state(false));
        assert!(waiting == 1 && (99_000..=101_000).contains(&queued), "{queued}");
        job.sized(30);
        job.started();
        let (running, _, queued) = load(&worker.state(false));
        assert!(running == 1 && (29_000..=31_000).contains(&queued), "{queued}");
        drop(job);
        assert_eq!((load(&worker.state(false)), worker.queued()), ((0, 0, 0), Duration::ZERO));
        let reported = worker.state(true);
        let cost = &reported.load.unwrap().costs[0];
        assert!((cost.token_us - 1000.0).abs() < 20.0 && (cost.p95_ratio - 1.0).abs() < 0.1, "{cost:?}");
        assert!(reported.draining);
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_has_measured_nothing_does_not_look_idle_with_a_job() {
        let (worker, _) = worker(8);
        let job = worker.admit("m", Modality::Image, 100_000, JobOwner::default());
        assert_eq!(load(&worker.state(false)), (0, 1, 20_000));
        job.sized(30);
        assert_eq!(load(&worker.state(false)).2, 20_000, "its tokens tell nothing yet");
        drop(job);
        assert_eq!(load(&worker.state(false)).2, 0);
    }

    #[test]
    fn the_backlog_is_a_metric_that_goes_back_to_zero() {
        let (load, registry) = worker(8);
        let shows = |tokens: &str| {
            let line = format!("triptych_encode_queued_tokens{{model=\"m\",modality=\"image\"}} {tokens}.0");
            let text = registry.encode();
            assert!(text.contains(&line), "{line} in\n{text}");
        };
        let jobs = [10, 30].map(|tokens| {
            let job = load.admit("m", Modality::Image, 1, JobOwner::default());
            job.sized(tokens);
            job
        });
        shows("40");
        jobs[0].done(10, times(MS));
        shows("30");
        drop(jobs);
        shows("0");
        assert!(
            registry.encode().contains("triptych_encode_backlog_seconds{model=\"m\",modality=\"image\"} 0.0")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_receives_changes_soon_but_not_each() {
        let (worker, drain, began) = (trained(), Drain::new(), Instant::now());
        let mut reported = worker.watch(drain.clone());
        assert_eq!(load(&reported.next().await.unwrap().unwrap()), (0, 0, 0));
        let jobs: Vec<_> =
            (0..5).map(|_| worker.admit("m", Modality::Image, 10, JobOwner::default())).collect();
        assert_eq!(load(&reported.next().await.unwrap().unwrap()).1, 5, "five changes, one message");
        assert_eq!(began.elapsed(), MIN_INTERVAL);
        let again = reported.next().await.unwrap().unwrap();
        assert_eq!((load(&again).1, began.elapsed()), (5, MIN_INTERVAL + BUSY_INTERVAL), "a sign of life");
        drop(jobs);
        assert_eq!(load(&reported.next().await.unwrap().unwrap()), (0, 0, 0));
        assert!(futures::poll!(reported.next()).is_pending(), "nothing happens, nothing is reported");
    }

    #[tokio::test(start_paused = true)]
    async fn draining_is_reported_at_once_and_the_stream_ends_when_listeners_close() {
        let (worker, drain) = (worker(1).0, Drain::new());
        let mut reported = worker.watch(drain.clone());
        assert!(!reported.next().await.unwrap().unwrap().draining);
        let began = Instant::now();
        drain.begin();
        assert!(reported.next().await.unwrap().unwrap().draining);
        assert_eq!(began.elapsed(), Duration::ZERO);
        let stopping = drain.clone();
        let (ended, ()) = futures::join!(reported.next(), stopping.finish(Default::default()));
        assert!(ended.is_none());
    }
}
