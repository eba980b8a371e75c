//! How busy this worker is, and what items cost it: what it tells whoever watches.
//!
//! A [`Ticket`] stands for one job from admission to its end. What a job will cost is predicted from its bytes, better
//! once its tokens are known, and learned from when it is done. A watcher is told at once when that changes by more
//! than about a tenth, every second while there is work, and never more often than every 50 ms.

use crate::cost::{CostFit, Curve, Sample};
use crate::meters::BacklogMeters;
use futures::stream::{self, BoxStream, StreamExt};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tonic::Status;
use triptych_core::Modality;
use triptych_proto::v1;
use triptych_runtime::Drain;

/// Between two messages at least.
pub const AT_LEAST: Duration = Duration::from_millis(50);
/// Between two messages at most, while there is work.
pub const WHILE_BUSY: Duration = Duration::from_secs(1);
/// What changes by less than this share is not worth a message.
const WORTH_TELLING: f64 = 0.1;
/// Nor is a queue that changes by less.
const SMALL_QUEUE_US: f64 = 2_000.0;

/// What a job costs besides its bytes, where nothing was measured yet. Wrong, as the proxy's own guess is, but a worker
/// with jobs must not look idle.
const UNMEASURED: Duration = Duration::from_millis(10);
/// And bytes of it in a microsecond.
const UNMEASURED_BYTES_IN_US: usize = 10;

/// The encoder of one model and kind of item.
type Kind = (String, Modality);

/// The jobs and their costs. Clones share them.
#[derive(Clone)]
pub struct Load(Arc<Shared>);

struct Shared {
    capacity: u32,
    /// `None`: nobody reads them.
    meters: Option<BacklogMeters>,
    book: Mutex<Book>,
    /// Counts changes; whoever watches is woken.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct Book {
    jobs: HashMap<u64, Entry>,
    next_id: u64,
    costs: BTreeMap<Kind, CostFit>,
    /// Every kind that there was a job of, so that a gauge goes back to zero.
    kinds: BTreeSet<Kind>,
}

struct Entry {
    kind: Kind,
    predicted: Duration,
    /// Output tokens; until the item is preprocessed a guess from its bytes.
    tokens: u32,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Running,
}

impl Load {
    /// A worker that admits so many jobs.
    pub fn new(capacity: usize, meters: BacklogMeters) -> Self {
        Self::with(capacity, Some(meters))
    }

    /// The same, without metrics.
    pub fn unmetered(capacity: usize) -> Self {
        Self::with(capacity, None)
    }

    fn with(capacity: usize, meters: Option<BacklogMeters>) -> Self {
        let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
        let changes = watch::Sender::new(0);
        Self(Arc::new(Shared { capacity, meters, book: Mutex::default(), changes }))
    }

    /// A job was admitted.
    pub fn admit(&self, model: &str, modality: Modality, bytes: usize) -> Ticket {
        let kind = (model.to_owned(), modality);
        let id = self.change(|book| {
            let id = book.next_id;
            book.next_id += 1;
            let curve = book.curve(&kind);
            let predicted = curve.map_or_else(|| unmeasured(bytes), |c| c.of_bytes(bytes));
            // Saturates: a guess that fits no u32 is as good as the largest one.
            let tokens = curve.map_or(0, |c| (c.tokens_per_byte * bytes as f64) as u32);
            book.kinds.insert(kind.clone());
            book.jobs.insert(id, Entry { kind, predicted, tokens, stage: Stage::Waiting });
            id
        });
        Ticket { load: self.clone(), id, bytes }
    }

    /// Predicted time of all that is queued or runs.
    pub fn queued(&self) -> Duration {
        self.book().queued()
    }

    /// How busy it is and what items cost, as watchers are told.
    pub fn report(&self) -> v1::WorkerLoad {
        let book = self.book();
        let running = book.jobs.values().filter(|job| job.stage == Stage::Running).count();
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let cost = |(kind, fit): (&Kind, &CostFit)| {
            let Curve { fixed_us, token_us, tokens_per_byte, p95_ratio } = fit.curve()?;
            Some(v1::EncodeCost {
                model: kind.0.clone(),
                modality: v1::Modality::from(kind.1).into(),
                fixed_us: fixed_us as u64,
                token_us,
                tokens_per_byte,
                p95_ratio,
            })
        };
        v1::WorkerLoad {
            running: count(running),
            waiting: count(book.jobs.len() - running),
            capacity: self.0.capacity,
            queued_us: u64::try_from(book.queued().as_micros()).unwrap_or(u64::MAX),
            costs: book.costs.iter().filter_map(cost).collect(),
            ..v1::WorkerLoad::default()
        }
    }

    /// The state as watchers are told.
    pub fn state(&self, draining: bool) -> v1::WorkerState {
        v1::WorkerState { load: Some(self.report()), draining, ..v1::WorkerState::default() }
    }

    /// The state now and whenever it changes enough to matter, until listeners close.
    pub fn watch(&self, drain: Drain) -> BoxStream<'static, Result<v1::WorkerState, Status>> {
        let watcher = Watcher { load: self.clone(), changes: self.0.changes.subscribe(), drain, told: None };
        stream::unfold(watcher, Watcher::next).boxed()
    }

    fn change<T>(&self, change: impl FnOnce(&mut Book) -> T) -> T {
        let mut book = self.book();
        let changed = change(&mut book);
        if let Some(meters) = &self.0.meters {
            book.show(meters);
        }
        drop(book);
        self.0.changes.send_modify(|n| *n = n.wrapping_add(1));
        changed
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn curve(&self, kind: &Kind) -> Option<Curve> {
        self.costs.get(kind).and_then(CostFit::curve)
    }

    fn queued(&self) -> Duration {
        self.jobs.values().map(|job| job.predicted).sum()
    }

    fn show(&self, meters: &BacklogMeters) {
        for kind in &self.kinds {
            let jobs = self.jobs.values().filter(|job| job.kind == *kind);
            let (tokens, time) = jobs.fold((0, Duration::ZERO), |(tokens, time), job| {
                (tokens + u64::from(job.tokens), time + job.predicted)
            });
            meters.set(&kind.0, kind.1, tokens, time);
        }
    }
}

/// A guess.
fn unmeasured(bytes: usize) -> Duration {
    UNMEASURED.saturating_add(Duration::from_micros((bytes / UNMEASURED_BYTES_IN_US) as u64))
}

/// A job, from admission to its end. Dropping it ends it.
pub struct Ticket {
    load: Load,
    id: u64,
    bytes: usize,
}

impl Ticket {
    /// It is preprocessed: so many rows will come of it.
    pub fn sized(&self, tokens: u32) {
        self.load.change(|book| {
            let Some(kind) = book.jobs.get(&self.id).map(|job| job.kind.clone()) else { return };
            let curve = book.curve(&kind);
            let Some(job) = book.jobs.get_mut(&self.id) else { return };
            job.tokens = tokens;
            if let Some(curve) = curve {
                job.predicted = curve.of_tokens(tokens);
            }
        });
    }

    /// Its forward begins.
    pub fn started(&self) {
        self.load.change(|book| {
            if let Some(job) = book.jobs.get_mut(&self.id) {
                job.stage = Stage::Running;
            }
        });
    }

    /// It is done.
    pub fn done(&self, tokens: u32, work: Duration, took: Duration) {
        self.load.change(|book| {
            if let Some(job) = book.jobs.remove(&self.id) {
                let sample = Sample { bytes: self.bytes, tokens, work, took };
                book.costs.entry(job.kind).or_default().learn(sample);
            }
        });
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.load.change(|book| book.jobs.remove(&self.id));
    }
}

/// One who is told.
struct Watcher {
    load: Load,
    changes: watch::Receiver<u64>,
    drain: Drain,
    told: Option<(v1::WorkerState, Instant)>,
}

impl Watcher {
    async fn next(mut self) -> Option<(Result<v1::WorkerState, Status>, Self)> {
        let mut closing = pin!(self.drain.closing());
        loop {
            if let Some((told, at)) = &self.told {
                tokio::select! {
                    () = sleep_until(*at + AT_LEAST) => {}
                    // At once, however lately something else was told.
                    () = self.drain.stopping(), if !told.draining => {}
                }
            }
            self.changes.borrow_and_update();
            let state = self.load.state(self.drain.is_stopping());
            if self.told.as_ref().is_none_or(|(told, at)| is_worth_telling(told, &state, at.elapsed())) {
                self.told = Some((state.clone(), Instant::now()));
                return Some((Ok(state), self));
            }
            let told = self.told.as_ref().map_or_else(Instant::now, |(_, at)| *at);
            tokio::select! {
                // The sender lives as long as `load`.
                _ = self.changes.changed() => {}
                () = sleep_until(told + WHILE_BUSY), if is_busy(&state) => {}
                () = self.drain.stopping(), if !state.draining => {}
                () = &mut closing => return None,
            }
        }
    }
}

/// Whether there is work.
pub fn is_busy(state: &v1::WorkerState) -> bool {
    state.load.as_ref().is_some_and(|load| load.running + load.waiting > 0)
}

/// Whether whoever was told one state so long ago is to be told the other.
pub fn is_worth_telling(told: &v1::WorkerState, state: &v1::WorkerState, since: Duration) -> bool {
    let changed =
        |a: f64, b: f64, small: f64| (a - b).abs() > (a.abs().max(b.abs()) * WORTH_TELLING).max(small);
    let (Some(a), Some(b)) = (&told.load, &state.load) else { return told.load != state.load };
    let cost_changed = |(a, b): (&v1::EncodeCost, &v1::EncodeCost)| {
        changed(a.fixed_us as f64, b.fixed_us as f64, 100.0)
            || changed(a.token_us, b.token_us, 1e-3)
            || changed(a.tokens_per_byte, b.tokens_per_byte, 1e-9)
            || changed(a.p95_ratio, b.p95_ratio, 0.1)
    };
    told.draining != state.draining
        || changed(a.running.into(), b.running.into(), 0.0)
        || changed(a.waiting.into(), b.waiting.into(), 0.0)
        || changed(a.queued_us as f64, b.queued_us as f64, SMALL_QUEUE_US)
        || a.costs.len() != b.costs.len()
        || a.costs.iter().zip(&b.costs).any(cost_changed)
        || (is_busy(state) && since >= WHILE_BUSY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_runtime::MetricsRegistry;

    const MS: Duration = Duration::from_millis(1);

    fn worker(capacity: usize) -> (Load, MetricsRegistry) {
        let registry = MetricsRegistry::default();
        (Load::new(capacity, BacklogMeters::new(&registry)), registry)
    }

    fn load(state: &v1::WorkerState) -> (u32, u32, u64) {
        let load = state.load.as_ref().unwrap();
        (load.running, load.waiting, load.queued_us)
    }

    /// A worker that has learned that a token costs a millisecond, and a byte is a token.
    fn taught() -> Load {
        let (load, _) = worker(8);
        for tokens in [10, 20, 30, 40, 50] {
            let took = tokens * MS;
            load.admit("m", Modality::Image, tokens as usize).done(tokens, took, took);
        }
        load
    }

    #[tokio::test(start_paused = true)]
    async fn a_job_is_counted_from_admission_to_its_end_with_its_predicted_cost() {
        let worker = taught();
        assert_eq!(load(&worker.state(false)), (0, 0, 0));
        let ticket = worker.admit("m", Modality::Image, 100);
        let (_, waiting, queued) = load(&worker.state(false));
        assert!(waiting == 1 && (99_000..=101_000).contains(&queued), "{queued}");
        ticket.sized(30);
        ticket.started();
        let (running, _, queued) = load(&worker.state(false));
        assert!(running == 1 && (29_000..=31_000).contains(&queued), "{queued}");
        drop(ticket);
        assert_eq!((load(&worker.state(false)), worker.queued()), ((0, 0, 0), Duration::ZERO));
        let told = worker.state(true);
        let cost = &told.load.unwrap().costs[0];
        assert!((cost.token_us - 1000.0).abs() < 20.0 && (cost.p95_ratio - 1.0).abs() < 0.1, "{cost:?}");
        assert!(told.draining);
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_has_measured_nothing_does_not_look_idle_with_a_job() {
        let (worker, _) = worker(8);
        let ticket = worker.admit("m", Modality::Image, 100_000);
        assert_eq!(load(&worker.state(false)), (0, 1, 20_000));
        ticket.sized(30);
        assert_eq!(load(&worker.state(false)).2, 20_000, "its tokens tell nothing yet");
        drop(ticket);
        assert_eq!(load(&worker.state(false)).2, 0);
    }

    #[test]
    fn what_is_queued_is_a_metric_that_goes_back_to_zero() {
        let (load, registry) = worker(8);
        let shows = |tokens: &str| {
            let line = format!("triptych_encode_queued_tokens{{model=\"m\",modality=\"image\"}} {tokens}.0");
            let text = registry.encode();
            assert!(text.contains(&line), "{line} in\n{text}");
        };
        let tickets = [10, 30].map(|tokens| {
            let ticket = load.admit("m", Modality::Image, 1);
            ticket.sized(tokens);
            ticket
        });
        shows("40");
        tickets[0].done(10, MS, MS);
        shows("30");
        drop(tickets);
        shows("0");
        assert!(
            registry.encode().contains("triptych_encode_backlog_seconds{model=\"m\",modality=\"image\"} 0.0")
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_is_told_of_changes_soon_but_not_of_each() {
        let (worker, drain, began) = (taught(), Drain::new(), Instant::now());
        let mut told = worker.watch(drain.clone());
        assert_eq!(load(&told.next().await.unwrap().unwrap()), (0, 0, 0));
        let tickets: Vec<_> = (0..5).map(|_| worker.admit("m", Modality::Image, 10)).collect();
        assert_eq!(load(&told.next().await.unwrap().unwrap()).1, 5, "five changes, one message");
        assert_eq!(began.elapsed(), AT_LEAST);
        let again = told.next().await.unwrap().unwrap();
        assert_eq!((load(&again).1, began.elapsed()), (5, AT_LEAST + WHILE_BUSY), "a sign of life");
        drop(tickets);
        assert_eq!(load(&told.next().await.unwrap().unwrap()), (0, 0, 0));
        assert!(futures::poll!(told.next()).is_pending(), "nothing happens, nothing is told");
    }

    #[tokio::test(start_paused = true)]
    async fn draining_is_told_at_once_and_the_stream_ends_when_listeners_close() {
        let (worker, drain) = (worker(1).0, Drain::new());
        let mut told = worker.watch(drain.clone());
        assert!(!told.next().await.unwrap().unwrap().draining);
        let began = Instant::now();
        drain.begin();
        assert!(told.next().await.unwrap().unwrap().draining);
        assert_eq!(began.elapsed(), Duration::ZERO);
        let stopping = drain.clone();
        let (ended, ()) = futures::join!(told.next(), stopping.finish(Default::default()));
        assert!(ended.is_none());
    }
}
