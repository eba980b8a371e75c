//! The worker's role: transfers, beside compute. One task per load, in a group that drain waits for. How a load goes is
//! in [`super::load`], how publishing does in [`super::save`].

use super::state::LoadState;
use super::types::{
    Completions, ConnectorSettings, EcConnectorMeta, LoadError, LoadOrder, Loaded, Published,
};
use crate::error::EcError;
use crate::metered::{EcObserver, Tier};
use crate::store::{EcStore, Op};
use parking_lot::Mutex;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use triptych_core::{ContentKey, EncoderOutput};

/// How long drain waits for the store to write what it was given.
const FLUSH: Duration = Duration::from_secs(10);

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
    /// Cancelled when nothing new is taken any more.
    pub(super) closing: CancellationToken,
    /// The engine's thread is not tokio's, and may start loads all the same.
    pub(super) runtime: Handle,
    /// With [`Completions::Collected`]. At most `max_pending` of them have rows; past it there are only refusals,
    /// one for each item that the caller started without collecting.
    collected: Mutex<Vec<Loaded>>,
    /// Told of outputs that are made here.
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

    /// At most `limit` keys whose rows are on this worker, those in use first, then the latest used.
    pub fn resident(&self, limit: usize) -> Vec<ContentKey> {
        self.shared.state.lock().local.recent(limit)
    }

    /// Bytes of the rows on this worker.
    pub fn local_bytes(&self) -> usize {
        self.shared.state.lock().local.used_bytes()
    }

    /// The store, as [`EcStore`], observed.
    pub fn store(&self) -> &Arc<dyn EcStore> {
        &self.shared.store
    }

    /// Publishes an output and keeps its rows on this worker. Publishes again whatever the store lost since, and
    /// replaces what it holds under the key if that does not read as this item. Goes on when the caller goes away:
    /// the work of encoding was done, and others wait for it. With [`super::Publish::WriteBehind`] it is done when the output
    /// is on the peer cache, and waits for room there.
    ///
    /// # Errors
    /// The store's; [`EcError::TimedOut`] after `save_timeout`; [`EcError::Unavailable`] when draining.
    pub async fn save_caches(&self, output: EncoderOutput) -> Result<Published, EcError> {
        self.publish(|shared| async move { shared.save(output).await }).await
    }

    /// Publishes again what this worker still holds, unless the store has it. `None`: this worker does not hold it, and
    /// it has to be encoded again.
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
        let task = shared.tasks.spawn_on(work, &shared.runtime);
        task.await.unwrap_or_else(|e| Err(EcError::unavailable(kind, Op::Put, e)))
    }

    /// Takes no new work, and waits for what is under way and for what the store has still to write; each part of it is
    /// bounded in time.
    pub async fn drain(&self) {
        self.shared.closing.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
        self.shared.store.flush(FLUSH).await;
    }

    fn start(&self, LoadOrder { item, hint }: LoadOrder) {
        let shared = &self.shared;
        let mut state = shared.state.lock();
        if let Some(output) = state.local.get(&item.key) {
            state.settle(&item.key);
            drop(state);
            shared.observer.hit(Tier::Local);
            return shared.deliver(Loaded { key: item.key, result: Ok(output), took: Duration::ZERO });
        }
        let full = state.n_loading() + shared.n_collected() >= shared.settings.max_pending;
        let begun = state.begin(item.key);
        state.learn(item.key, &hint);
        if !begun {
            return;
        }
        drop(state);
        shared.observer.miss(Tier::Local);
        let load = Load { shared: shared.clone(), key: item.key, started: Instant::now(), ended: false };
        if full || shared.tasks.is_closed() {
            let detail = if full { "too many loads are pending" } else { "this worker is stopping" };
            return load.end(Err(LoadError::Unavailable { detail: detail.into() }));
        }
        let work = async move {
            let result = load.shared.load(&item).await;
            load.end(result);
        };
        shared.tasks.spawn_on(work, &shared.runtime);
    }
}

/// A load under way. However its task ends (a panic and a runtime that stops included), it is delivered once.
struct Load {
    shared: Arc<WorkerState>,
    key: ContentKey,
    started: Instant,
    ended: bool,
}

impl Load {
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

impl Drop for Load {
    fn drop(&mut self) {
        if !self.ended {
            self.deliver(Err(LoadError::Unavailable { detail: "the load was broken off".into() }));
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
