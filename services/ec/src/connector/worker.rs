//! The worker's role: transfers, beside compute. One task per load, in a group that drain waits for.

use super::state::{State, lock};
use super::{Completions, ConnectorSettings, EcConnectorMeta, LoadError, Loaded, Published};
use crate::error::{EcError, chain};
use crate::metered::{EcObserver, Tier};
use crate::object::{self, ObjectError};
use crate::store::{EcStore, Op, PutOutcome};
use bytes::Bytes;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore};
use tokio::task::spawn_blocking;
use tokio::time::{Instant as Waiting, timeout};
use tokio_util::task::TaskTracker;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput};

/// How long the store is asked to wait for a pending item at once, and the pause before it is asked again.
const WAIT_AT_ONCE: Duration = Duration::from_secs(1);
const WAIT_PAUSE: Duration = Duration::from_millis(20);
/// How long nobody may seem to be at a pending item before it is looked for, and missed.
const NOBODY_AT_IT: Duration = Duration::from_secs(5);

/// The worker's side of a connector. Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct WorkerRole {
    shared: Arc<Shared>,
}

struct Shared {
    state: Arc<Mutex<State>>,
    store: Arc<dyn EcStore>,
    observer: Arc<dyn EcObserver>,
    settings: ConnectorSettings,
    turns: Semaphore,
    tasks: TaskTracker,
    /// The engine's thread is not tokio's, and may start loads all the same.
    runtime: Handle,
    /// With [`Completions::Collected`]. At most `max_pending` of them have rows; past it there are only refusals,
    /// one for each item that the caller started without collecting.
    collected: Mutex<Vec<Loaded>>,
    /// Told of outputs that are made here.
    saved: Notify,
}

impl WorkerRole {
    pub(super) fn new(
        state: Arc<Mutex<State>>,
        store: Arc<dyn EcStore>,
        observer: Arc<dyn EcObserver>,
        settings: ConnectorSettings,
    ) -> Self {
        let turns = Semaphore::new(settings.max_loads.max(1));
        let (tasks, runtime) = (TaskTracker::new(), Handle::current());
        let collected = Mutex::default();
        let saved = Notify::new();
        let shared = Shared { state, store, observer, settings, turns, tasks, runtime, collected, saved };
        Self { shared: Arc::new(shared) }
    }

    /// Starts loading; returns at once, from any thread. Each item ends in one [`Loaded`], except that an item
    /// which is being loaded already shares the end of that load.
    pub fn start_load_caches(&self, meta: EcConnectorMeta) {
        for item in meta.loads {
            self.start(item);
        }
    }

    /// The loads that ended since the last call; always empty with [`Completions::Callback`].
    pub fn finished(&self) -> Vec<Loaded> {
        std::mem::take(&mut *self.shared.collected.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The rows, if they are on this worker.
    pub fn rows(&self, key: &ContentKey) -> Option<EncoderOutput> {
        lock(&self.shared.state).local.get(key)
    }

    /// At most `limit` keys whose rows are on this worker, those in use first, then the latest used.
    pub fn resident(&self, limit: usize) -> Vec<ContentKey> {
        lock(&self.shared.state).local.recent(limit)
    }

    /// Bytes of the rows on this worker.
    pub fn local_bytes(&self) -> usize {
        lock(&self.shared.state).local.used_bytes()
    }

    /// The store, as [`EcStore`], observed.
    pub fn store(&self) -> &Arc<dyn EcStore> {
        &self.shared.store
    }

    /// Publishes an output and keeps its rows on this worker. Publishes again whatever the store lost since, and
    /// replaces what it holds under the key if that does not read as this item. Goes on when the caller goes away:
    /// the work of encoding was done, and others wait for it.
    ///
    /// # Errors
    /// The store's; [`EcError::TimedOut`] after `save_timeout`; [`EcError::Unavailable`] when draining.
    pub async fn save_caches(&self, output: EncoderOutput) -> Result<Published, EcError> {
        let shared = self.shared.clone();
        if shared.tasks.is_closed() {
            return Err(EcError::unavailable(shared.store.kind(), Op::Put, "this worker is stopping"));
        }
        let kind = shared.store.kind();
        let limit = shared.settings.save_timeout;
        let work = async move {
            let ended = timeout(limit, shared.save(output)).await;
            ended.unwrap_or(Err(EcError::TimedOut { store: kind, op: Op::Put, limit }))
        };
        let task = self.shared.tasks.spawn_on(work, &self.shared.runtime);
        task.await.unwrap_or_else(|e| Err(EcError::unavailable(kind, Op::Put, e)))
    }

    /// Takes no new work, and waits for what is under way; each part of it is bounded in time.
    pub async fn drain(&self) {
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    fn start(&self, item: EncodedItem) {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        if let Some(output) = state.local.get(&item.key) {
            state.settle(&item.key);
            drop(state);
            shared.observer.hit(Tier::Local);
            return shared.deliver(Loaded { key: item.key, result: Ok(output), took: Duration::ZERO });
        }
        let full = state.n_loading() + shared.n_collected() >= shared.settings.max_pending;
        if !state.begin(item.key) {
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
    shared: Arc<Shared>,
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
        let mut state = lock(&self.shared.state);
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

impl Shared {
    fn n_collected(&self) -> usize {
        self.collected.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn deliver(&self, loaded: Loaded) {
        match &self.settings.completions {
            Completions::Callback(callback) => callback(loaded),
            Completions::Collected => {
                self.collected.lock().unwrap_or_else(PoisonError::into_inner).push(loaded);
            }
        }
    }

    /// Waits for an item that is being encoded, for as long as anyone needs it here and someone seems to be at it.
    /// Says nothing: the load that follows finds it or does not. Holds no turn.
    async fn wait_for(&self, item: &EncodedItem) {
        let end = Waiting::now() + self.settings.pending_timeout;
        let wanted = || {
            let local = &lock(&self.state).local;
            local.is_held(&item.key) && !local.contains(&item.key) && !self.tasks.is_closed()
        };
        let mut nobody_since = None;
        while wanted() && Waiting::now() < end {
            let encoded_here = self.saved.notified();
            if !wanted() {
                return;
            }
            let asked = Waiting::now();
            // In parts, so that a wait that nobody needs any more ends soon.
            let found = tokio::select! {
                biased;
                () = encoded_here => continue,
                found = self.store.wait(&item.key, WAIT_AT_ONCE) => found,
            };
            match found {
                Ok(Some(_)) => return,
                Ok(None) if asked.elapsed() >= WAIT_AT_ONCE => nobody_since = None,
                // An early no: nobody has its lease, or the store is away. It may have been made and lost.
                Ok(None) | Err(_) => {
                    if nobody_since.get_or_insert(asked).elapsed() >= NOBODY_AT_IT {
                        return;
                    }
                    tokio::time::sleep(WAIT_PAUSE).await;
                }
            }
        }
    }

    async fn load(&self, item: &EncodedItem) -> Result<EncoderOutput, LoadError> {
        if item.is_pending() {
            self.wait_for(item).await;
            if let Some(output) = lock(&self.state).local.get(&item.key) {
                // It was encoded on this worker.
                return Ok(output);
            }
        }
        let limit = self.settings.load_timeout;
        let result = match timeout(limit, self.fetch(item)).await {
            Err(_) => return Err(LoadError::TimedOut { limit }),
            Ok(result) => result,
        };
        if let Err(LoadError::Corrupt { detail }) = &result {
            tracing::warn!(key = ?item.key, %detail, "quarantining an encoder output");
            match timeout(limit, self.store.quarantine(&item.key)).await {
                Ok(Ok(_)) => {}
                Ok(Err(e)) => tracing::warn!(key = ?item.key, error = %chain(&e), "could not quarantine"),
                Err(_) => tracing::warn!(key = ?item.key, "could not quarantine in time"),
            }
        }
        result
    }

    /// Gets and verifies. The turn is held through both, since both hold the object's bytes.
    async fn fetch(&self, item: &EncodedItem) -> Result<EncoderOutput, LoadError> {
        let unavailable = |detail: String| LoadError::Unavailable { detail };
        let _turn = self.turns.acquire().await.map_err(|e| unavailable(e.to_string()))?;
        let object = match self.store.get(&item.key).await {
            Ok(Some(object)) => object,
            Ok(None) => return Err(LoadError::Missing),
            Err(EcError::TimedOut { limit, .. }) => return Err(LoadError::TimedOut { limit }),
            Err(e @ EcError::Corrupt { .. }) => return Err(LoadError::Corrupt { detail: chain(&e) }),
            Err(e) => return Err(unavailable(chain(&e))),
        };
        let (announced, limits) = (item.clone(), self.settings.limits.clone());
        let mac_keys = self.settings.mac_keys.clone();
        let decoded = spawn_blocking(move || {
            let output = object::decode_signed(object, &announced.key, &limits, &mac_keys)?;
            check_as_announced(&announced, output.item())?;
            Ok::<_, ObjectError>(output)
        });
        let decoded = decoded.await.map_err(|e| unavailable(e.to_string()))?;
        decoded.map_err(|e| LoadError::Corrupt { detail: chain(&e) })
    }

    async fn save(&self, output: EncoderOutput) -> Result<Published, EcError> {
        let started = Instant::now();
        let item = output.item().clone();
        lock(&self.state).local.insert(output.clone());
        self.saved.notify_waiters();
        let failed = |e| EcError::unavailable(self.store.kind(), Op::Put, e);
        let mac_keys = self.settings.mac_keys.clone();
        let object =
            spawn_blocking(move || object::encode_signed(&output, &mac_keys)).await.map_err(failed)?;
        let bytes = object.len();
        let (item, outcome) = self.put(item, object).await?;
        Ok(Published { item, outcome, bytes, took: started.elapsed() })
    }

    /// Puts the object; what is there instead must read as the same item, or makes room for it.
    async fn put(&self, item: EncodedItem, object: Bytes) -> Result<(EncodedItem, PutOutcome), EcError> {
        const ATTEMPTS: u32 = 3;
        for _ in 0..ATTEMPTS {
            if self.store.put_if_absent(&item.key, object.clone()).await? == PutOutcome::Stored {
                return Ok((item, PutOutcome::Stored));
            }
            if let Some(Some(found)) = self.store.heads(&[item.key]).await?.pop()
                && check_as_announced(&item, &found).is_ok()
            {
                return Ok((found, PutOutcome::AlreadyThere));
            }
            tracing::warn!(key = ?item.key, "what the store holds is not this item; replacing it");
            self.store.quarantine(&item.key).await?;
        }
        let source = ObjectError::Frame { reason: "something else takes its place again and again" };
        Err(EcError::Corrupt { key: item.key, source })
    }
}

/// Everything but the checksum: two encoders may round differently, and each object verifies by itself.
fn check_as_announced(announced: &EncodedItem, found: &EncodedItem) -> Result<(), ObjectError> {
    let checks = [
        ("key", announced.key == found.key),
        ("fingerprint", announced.fingerprint == found.fingerprint),
        ("modality", announced.modality == found.modality),
        ("shape", (announced.n_tokens, announced.hidden) == (found.n_tokens, found.hidden)),
        ("dtype", announced.dtype == found.dtype),
        ("extent", announced.extent == found.extent),
    ];
    match checks.into_iter().find(|(_, same)| !same) {
        Some((field, _)) => Err(ObjectError::NotAsAnnounced { field }),
        None => Ok(()),
    }
}
