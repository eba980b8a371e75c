//! Loading of encoder outputs: the EC connector's two roles, joined to the engines' drivers.

use crate::driver::Driver;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, Failure, RequestId};
use triptych_ec::connector::{
    CacheStatus, Completions, ConnectorSettings, ItemHint, Loaded, SchedulerRole, WorkerRole, connect,
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
    drivers: Arc<OnceLock<Vec<Driver>>>,
    loads_ended: watch::Receiver<()>,
    n_holders: Arc<AtomicU64>,
}

/// A request's hold on its items in the connector, released when dropped.
pub struct ItemHolds {
    holder: RequestId,
    items: Vec<EncodedItem>,
    scheduler: SchedulerRole,
    loads_ended: watch::Receiver<()>,
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
    }
}

impl EcLoads {
    /// Connects to a store, and to the encoder workers that hold outputs in memory. Completions go to the
    /// drivers given to [`Self::attach`].
    pub fn new(
        store: Arc<dyn EcStore>,
        observer: Arc<dyn EcObserver>,
        limits: Limits,
        dialer: &Dialer,
        mac_keys: MacKeys,
    ) -> Self {
        let drivers: Arc<OnceLock<Vec<Driver>>> = Arc::default();
        let listeners = drivers.clone();
        let (ended, loads_ended) = watch::channel(());
        let completions = Completions::Callback(Arc::new(move |loaded: Loaded| {
            for driver in listeners.get().into_iter().flatten() {
                driver.send(event(&loaded));
            }
            ended.send_replace(());
        }));
        let peers = Peers::new(Some(dialer.as_fn()), PeerTuning::default(), &limits);
        let peers = peers.injecting(trace_context::injected);
        let settings = ConnectorSettings {
            limits,
            completions,
            peers: Some(Arc::new(peers)),
            mac_keys,
            ..ConnectorSettings::default()
        };
        let (scheduler, worker) = connect(store, observer, settings);
        Self { scheduler, worker, drivers, loads_ended, n_holders: Arc::default() }
    }

    /// Sets the drivers that receive completions. An engine ignores keys that none of its sequences needs.
    pub fn attach(&self, drivers: Vec<Driver>) {
        // Called once; later calls have no effect.
        let _ = self.drivers.set(drivers);
    }

    /// Requests the items of sequences that `driver` has already. Hints name the location of each item's output,
    /// in the order of items; without a hint it is in the store.
    pub fn start(&self, items: &[EncodedItem], hints: &[ItemHint], driver: &Driver) -> ItemHolds {
        // Not the request's own id: after a retry of the proxy two requests of one id may run here, and the end
        // of one must not release the other's items.
        let holder = RequestId::from_bits(self.n_holders.fetch_add(1, Ordering::Relaxed).into());
        let loads_ended = self.loads_ended.clone();
        let hints = hints.iter().cloned().chain(std::iter::repeat_with(ItemHint::default));
        for (item, hint) in items.iter().zip(hints) {
            self.scheduler.update_state_with_hint(holder, item, &hint);
        }
        self.worker.start_load_caches(self.scheduler.build_connector_meta());
        for item in items {
            if let Some(output) = self.worker.rows(&item.key) {
                driver.send(Event::ItemReady { key: item.key, output });
            }
        }
        ItemHolds { holder, items: items.to_vec(), scheduler: self.scheduler.clone(), loads_ended }
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
