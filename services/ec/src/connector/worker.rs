//! The worker's role: transfers, beside compute. One task per load, in a group that drain waits for. Loading is
//! in [`super::load`], publishing in [`super::save`].

use super::state::LoadState;
use super::types::{
    Completions, ConnectorSettings, EcConnectorMeta, LoadError, LoadOrder, Loaded, Published,
};
use crate::error::EcError;
use crate::metered::{CacheTier, EcObserver};
use crate::store::{EcStore, Op};
use crate::traced::beside;
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use triptych_core::{ContentKey, EncoderOutput};

/// Timeout of the store's flush in a drain.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// The worker's side of a connector. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct WorkerRole {
    shared: Arc<WorkerState>,
}

pub(super) struct WorkerState {
    pub(super) state: Arc<Mutex<LoadState>>,
    pub(super) store: Arc<dyn EcStore>,
    pub(super) observer: Arc<dyn EcObserver>,
    pub(super) settings: ConnectorSettings,
    pub(super) turns: Semaphore,
    pub(super) tasks: TaskTracker,
    /// Cancelled when the role takes no new work.
    pub(super) closing: CancellationToken,
    /// Runtime of the transfers: the engine's thread, which starts loads, is not tokio's.
    pub(super) runtime: Handle,
    /// With [`Completions::Collected`]. At most `max_pending` of them have rows; past it there are only refusals,
    /// one for each item that the caller started without collecting.
    collected: Mutex<Vec<Loaded>>,
    /// Notified of outputs that are encoded in this process.
    pub(super) saved: Notify,
}

impl WorkerRole {
    pub(super) fn new(
        state: Arc<Mutex<LoadState>>,
        store: Arc<dyn EcStore>,
        observer: Arc<dyn EcObserver>,
        settings: ConnectorSettings,
    ) -> Self {
        let turns = Semaphore::new(settings.max_loads.max(1));
        let (tasks, closing, runtime) = (TaskTracker::new(), CancellationToken::new(), Handle::current());
        let collected = Mutex::default();
        let saved = Notify::new();
        let shared = WorkerState {
            state,
            store,
            observer,
            settings,
            turns,
            tasks,
            closing,
            runtime,
            collected,
            saved,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Starts loading; returns at once, from any thread. Each item ends in one [`Loaded`], except that an item
    /// which is being loaded already shares the end of that load.
    pub fn start_load_caches(&self, meta: EcConnectorMeta) {
        for order in meta.loads {
            self.start(order);
        }
    }

    /// The loads that ended since the last call; always empty with [`Completions::Callback`].
    pub fn finished(&self) -> Vec<Loaded> {
        std::mem::take(&mut *self.shared.collected.lock())
    }

    /// The rows, if they are on this worker.
    pub fn rows(&self, key: &ContentKey) -> Option<EncoderOutput> {
        self.shared.state.lock().local.get(key)
    }

    /// At most `limit` keys whose rows are on this worker, held ones first, then the most recently used.
    pub fn resident(&self, limit: usize) -> Vec<ContentKey> {
        self.shared.state.lock().local.recent(limit)
    }

    /// Bytes of the rows on this worker.
    pub fn local_bytes(&self) -> usize {
        self.shared.state.lock().local.used_bytes()
    }

    /// Bytes of the rows that admitted requests hold or wait for, and the budget of all rows.
    pub fn held_bytes(&self) -> (usize, usize) {
        let state = self.shared.state.lock();
        (state.local.held_bytes(), state.local.budget_bytes())
    }

    /// The store, as [`EcStore`], observed.
    pub fn store(&self) -> &Arc<dyn EcStore> {
        &self.shared.store
    }

    /// Publishes an output and keeps its rows on this worker. Publishes again whatever the store lost since, and
    /// replaces what it holds under the key if that does not read as this item. Continues when
    /// the caller is cancelled: others wait for the output. With [`super::Publish::WriteBehind`] it completes when the
    /// output is in the peer cache, and waits for room there.
    ///
    /// # Errors
    /// The store's; [`EcError::TimedOut`] after `save_timeout`; [`EcError::Unavailable`] when draining.
    pub async fn save_caches(&self, output: EncoderOutput) -> Result<Published, EcError> {
        self.publish(|shared| async move { shared.save(output).await }).await
    }

    /// Publishes an output again that this worker still holds, unless the store has it. `None`: this worker does not
    /// hold it, and it must be encoded again.
    ///
    /// # Errors
    /// As [`Self::save_caches`].
    pub async fn ensure_published(&self, key: &ContentKey) -> Result<Option<Published>, EcError> {
        let key = *key;
        self.publish(|shared| async move { shared.save_again(&key).await }).await
    }

    async fn publish<T, F>(&self, work: impl FnOnce(Arc<WorkerState>) -> F) -> Result<T, EcError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, EcError>> + Send + 'static,
    {
        let shared = &self.shared;
        let kind = shared.store.kind();
        if shared.tasks.is_closed() {
            return Err(EcError::unavailable(kind, Op::Put, "this worker is stopping"));
        }
        let limit = shared.settings.save_timeout;
        let work = work(shared.clone());
        let work = async move {
            let ended = timeout(limit, work).await;
            ended.unwrap_or(Err(EcError::TimedOut { store: kind, op: Op::Put, limit }))
        };
        let task = shared.tasks.spawn_on(work.in_current_span(), &shared.runtime);
        task.await.unwrap_or_else(|e| Err(EcError::unavailable(kind, Op::Put, e)))
    }

    /// Stops taking work, and waits for transfers in flight and for the store's pending writes; each phase has a
    /// timeout.
    pub async fn drain(&self) {
        self.shared.closing.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        self.shared.store.flush(FLUSH_TIMEOUT).await;
    }

    fn start(&self, LoadOrder { item, hint }: LoadOrder) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        if let Some(output) = state.local.get(&item.key) {
            state.settle(&item.key);
            drop(state);
            shared.observer.hit(CacheTier::Local);
            return shared.deliver(Loaded { key: item.key, result: Ok(output), took: Duration::ZERO });
        }
        let full = state.n_loading() + shared.n_collected() >= shared.settings.max_pending;
        let begun = state.begin(item.key);
        state.learn(item.key, &hint);
        if !begun {
            return;
        }
        drop(state);
        shared.observer.miss(CacheTier::Local);
        let load = LoadTask { shared: shared.clone(), key: item.key, started: Instant::now(), ended: false };
        if full || shared.tasks.is_closed() {
            let detail = if full { "too many loads are pending" } else { "this worker is stopping" };
            return load.end(Err(LoadError::Unavailable { detail: detail.into() }));
        }
        let work = async move {
            let result = load.shared.load(&item).await;
            load.end(result);
        };
        shared.tasks.spawn_on(work.instrument(beside("ec load")), &shared.runtime);
    }
}

/// A load in flight. It is delivered exactly once, also if its task panics or is cancelled.
struct LoadTask {
    shared: Arc<WorkerState>,
    key: ContentKey,
    started: Instant,
    ended: bool,
}

impl LoadTask {
    fn end(mut self, result: Result<EncoderOutput, LoadError>) {
        self.deliver(result);
    }

    fn deliver(&mut self, result: Result<EncoderOutput, LoadError>) {
        self.ended = true;
        let mut state = self.shared.state.lock();
        state.end(&self.key);
        if let Ok(output) = &result {
            state.local.insert(output.clone());
        }
        drop(state);
        self.shared.deliver(Loaded { key: self.key, result, took: self.started.elapsed() });
    }
}

impl Drop for LoadTask {
    fn drop(&mut self) {
        if !self.ended {
            self.deliver(Err(LoadError::Unavailable { detail: "the load was cancelled".into() }));
        }
    }
}

impl WorkerState {
    fn n_collected(&self) -> usize {
        self.collected.lock().len()
    }

    fn deliver(&self, loaded: Loaded) {
        match &self.settings.completions {
            Completions::Callback(callback) => callback(loaded),
            Completions::Collected => {
                self.collected.lock().push(loaded);
            }
        }
    }
}
