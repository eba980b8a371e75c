//! Loading of encoder outputs: the EC connector's two roles, joined to the engines' drivers.
//!
//! A request's items are admitted together, by the bytes of their rows, before a load starts: rows that requests hold and rows
//! that are kept for later ones are within one budget. Requests that wait for room are admitted in their order.

use crate::driver::Driver;
use crate::meters::RowMeters;
use parking_lot::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, watch};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, Failure, FailureClass, RequestId};
use triptych_ec::connector::{
    CacheStatus, Completions, ConnectorSettings, HoldOutcome, ItemHint, Loaded, SchedulerRole, WorkerRole,
    connect,
};
use triptych_ec::metered::EcObserver;
use triptych_ec::object::MacKeys;
use triptych_ec::store::EcStore;
use triptych_ec::store::peer::{PeerTuning, Peers};
use triptych_engine::Event;
use triptych_proto::v1;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::trace_context;

/// Both roles of the connector.
#[derive(Clone)]
pub struct EcLoads {
    scheduler: SchedulerRole,
    worker: WorkerRole,
    drivers: Arc<RwLock<Vec<Driver>>>,
    loads_ended: watch::Receiver<()>,
    n_holders: Arc<AtomicU64>,
    /// Held by the request that is the next to have room.
    turn: Arc<Mutex<()>>,
    room: Arc<RowRoom>,
}

/// Use of the budget of rows, told to whoever waits for it and to the metrics.
struct RowRoom {
    worker: OnceLock<WorkerRole>,
    meters: RowMeters,
    /// Changes when a request gives rows back.
    freed: watch::Sender<()>,
}

impl RowRoom {
    fn observe(&self) {
        if let Some(worker) = self.worker.get() {
            let (held, budget) = worker.held_bytes();
            self.meters.observe(held, worker.local_bytes(), budget);
        }
    }
}

/// Items of a request, and the locations of their outputs in the same order; an item without one is in the store.
#[derive(Debug)]
pub struct NeededItems {
    /// The items.
    pub items: Vec<EncodedItem>,
    /// Locations.
    pub hints: Vec<ItemHint>,
}

/// Settings of the loads.
pub struct LoadSettings {
    /// Limits on objects.
    pub limits: Limits,
    /// Keys that verify outputs.
    pub mac_keys: MacKeys,
    /// Bytes of rows on this worker, of requests and kept ones.
    pub cache_bytes: usize,
}

/// A request's hold on its items in the connector, released when dropped.
pub struct ItemHolds {
    holder: RequestId,
    items: Vec<EncodedItem>,
    scheduler: SchedulerRole,
    loads_ended: watch::Receiver<()>,
    room: Arc<RowRoom>,
}

impl ItemHolds {
    /// Completes when all items are loaded, which may be never. Cancel-safe.
    pub async fn all_ready(&mut self) {
        while self.scheduler.has_caches(&self.items).iter().any(|status| *status != CacheStatus::Ready) {
            if self.loads_ended.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

impl Drop for ItemHolds {
    fn drop(&mut self) {
        self.scheduler.request_finished(self.holder);
        self.room.observe();
        self.room.freed.send_replace(());
    }
}

impl EcLoads {
    /// Connects to a store, and to the encoder workers that hold outputs in memory. Completions go to the
    /// drivers of [`Self::attach`].
    pub fn new(
        store: Arc<dyn EcStore>,
        observer: Arc<dyn EcObserver>,
        meters: RowMeters,
        dialer: &Dialer,
        settings: LoadSettings,
    ) -> Self {
        let LoadSettings { limits, mac_keys, cache_bytes } = settings;
        let drivers: Arc<RwLock<Vec<Driver>>> = Arc::default();
        let listeners = drivers.clone();
        let room = Arc::new(RowRoom { worker: OnceLock::new(), meters, freed: watch::Sender::new(()) });
        let observed = room.clone();
        let (ended, loads_ended) = watch::channel(());
        let completions = Completions::Callback(Arc::new(move |loaded: Loaded| {
            listeners.read().iter().for_each(|driver| driver.send(event(&loaded)));
            observed.observe();
            ended.send_replace(());
        }));
        let peers = Peers::new(Some(dialer.as_fn()), PeerTuning::default(), &limits);
        let peers = peers.injecting(trace_context::injected);
        let settings = ConnectorSettings {
            limits,
            completions,
            peers: Some(Arc::new(peers)),
            mac_keys,
            local_budget_bytes: cache_bytes,
            ..ConnectorSettings::default()
        };
        let (scheduler, worker) = connect(store, observer, settings);
        // The only call.
        let _ = room.worker.set(worker.clone());
        room.observe();
        let (n_holders, turn) = (Arc::default(), Arc::default());
        Self { scheduler, worker, drivers, loads_ended, n_holders, turn, room }
    }

    /// Adds a driver that receives completions. An engine ignores keys that none of its sequences needs.
    pub fn attach(&self, driver: &Driver) {
        self.drivers.write().push(driver.clone());
    }

    /// Removes a driver.
    pub fn detach(&self, driver: &Driver) {
        self.drivers.write().retain(|other| !other.is(driver));
    }

    /// Bytes of rows on this worker, at most.
    pub fn budget(&self) -> usize {
        self.worker.held_bytes().1
    }

    /// Requests the items of sequences that `driver` has already, if there is room for their rows and nobody waits for it.
    ///
    /// # Errors
    /// The rows are larger than the budget.
    pub fn try_start(&self, needed: &NeededItems, driver: &Driver) -> Result<Option<ItemHolds>, Failure> {
        let holds = match self.turn.try_lock() {
            Ok(_turn) => self.try_hold(needed)?,
            Err(_) => None,
        };
        match &holds {
            Some(holds) => self.load(holds, needed, driver),
            None => self.room.meters.waits(),
        }
        Ok(holds)
    }

    /// The same once there is room, after all who waited before.
    pub async fn start_when_room(&self, needed: &NeededItems, driver: &Driver) -> ItemHolds {
        let _turn = self.turn.lock().await;
        let mut freed = self.room.freed.subscribe();
        loop {
            // One that is too large was refused when it was first tried.
            if let Ok(Some(holds)) = self.try_hold(needed) {
                self.load(&holds, needed, driver);
                return holds;
            }
            if freed.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }

    fn try_hold(&self, needed: &NeededItems) -> Result<Option<ItemHolds>, Failure> {
        // Not the request's own id: after a retry of the proxy two requests of one id may run here, and the end
        // of one must not release the other's items.
        let holder = RequestId::from_bits(self.n_holders.fetch_add(1, Ordering::Relaxed).into());
        match self.scheduler.try_hold(holder, &needed.items) {
            HoldOutcome::NoRoom => return Ok(None),
            HoldOutcome::TooLarge { bytes, budget } => return Err(too_large(bytes, budget)),
            HoldOutcome::Held => {}
        }
        self.room.observe();
        Ok(Some(ItemHolds {
            holder,
            items: needed.items.clone(),
            scheduler: self.scheduler.clone(),
            loads_ended: self.loads_ended.clone(),
            room: self.room.clone(),
        }))
    }

    /// Starts the loads of what a request holds.
    fn load(&self, holds: &ItemHolds, needed: &NeededItems, driver: &Driver) {
        let hints = needed.hints.iter().cloned().chain(std::iter::repeat_with(ItemHint::default));
        for (item, hint) in needed.items.iter().zip(hints) {
            self.scheduler.update_state_with_hint(holds.holder, item, &hint);
        }
        self.worker.start_load_caches(self.scheduler.build_connector_meta());
        self.deliver(&needed.items, driver);
    }

    /// Hands the rows that are here to an engine.
    pub fn deliver(&self, items: &[EncodedItem], driver: &Driver) {
        for item in items {
            if let Some(output) = self.worker.rows(&item.key) {
                driver.send(Event::ItemReady { key: item.key, output });
            }
        }
    }

    /// Rows of an item, if they are on this worker, as they are while a request holds them.
    pub fn rows(&self, key: &ContentKey) -> Option<EncoderOutput> {
        self.worker.rows(key)
    }

    /// The connector's worker role, for a part of this process that makes rows itself.
    pub fn worker(&self) -> WorkerRole {
        self.worker.clone()
    }

    /// Keys whose rows are on this worker, at most `limit`, most recently used first.
    pub fn resident(&self, limit: usize) -> Vec<ContentKey> {
        self.worker.resident(limit)
    }

    /// Takes no new work, and waits briefly for running loads. No request needs them any more, and a store call
    /// may be dropped at any point.
    pub async fn drain(&self) {
        let _ = tokio::time::timeout(Duration::from_secs(1), self.worker.drain()).await;
    }
}

fn too_large(bytes: usize, budget: usize) -> Failure {
    let [bytes, budget] = [bytes, budget].map(|n| n.div_ceil(1 << 10));
    let text = format!(
        "the encoder outputs of this request have {bytes} KiB, a worker holds {budget} KiB of them (--ec-cache-mib)"
    );
    Failure::new(FailureClass::TooLarge, text).with_param("items")
}

fn event(loaded: &Loaded) -> Event {
    let key = loaded.key;
    match &loaded.result {
        Ok(output) => Event::ItemReady { key, output: output.clone() },
        Err(e) => {
            let failure = Failure::unavailable("an encoder output could not be loaded");
            Event::ItemFailed { key, failure: failure.with_param(item_param(&key)).with_detail(e) }
        }
    }
}

/// Location hint of an item from the wire; a pending item is waited for until the request's deadline.
pub fn hint_from_wire(hint: v1::ItemHint, deadline: Instant) -> ItemHint {
    ItemHint { peers: hint.peers, pending: hint.pending, until: hint.pending.then(|| deadline.into()) }
}

/// Param of a failure that concerns an item, until `generation` replaces it by the item's index.
pub fn item_param(key: &ContentKey) -> String {
    format!("item:{key}")
}
