//! Encoder outputs on their way to the engines: the EC connector's two roles, joined to the drivers.

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

/// Both roles of the connector.
#[derive(Clone)]
pub struct Loads {
    scheduler: SchedulerRole,
    worker: WorkerRole,
    drivers: Arc<OnceLock<Vec<Driver>>>,
    loads_ended: watch::Receiver<()>,
    n_holders: Arc<AtomicU64>,
}

/// What a request holds of the connector until it is dropped.
pub struct HeldItems {
    holder: RequestId,
    items: Vec<EncodedItem>,
    scheduler: SchedulerRole,
    loads_ended: watch::Receiver<()>,
}

impl HeldItems {
    /// Ends when all items are on this worker, which may be never. Loses nothing when it is dropped.
    pub async fn all_here(&mut self) {
        while self.scheduler.has_caches(&self.items).iter().any(|status| *status != CacheStatus::Ready) {
            if self.loads_ended.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

impl Drop for HeldItems {
    fn drop(&mut self) {
        self.scheduler.request_finished(self.holder);
    }
}

impl Loads {
    /// Connects to a store, and to the encoder workers that hold outputs in memory. Completions go to the drivers given
    /// to [`Self::attach`].
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
                driver.tell(event(&loaded));
            }
            ended.send_replace(());
        }));
        let peers = Peers::new(Some(dialer.as_fn()), PeerTuning::default(), &limits);
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

    /// Says who hears of completions. An engine ignores keys that none of its sequences needs.
    pub fn attach(&self, drivers: Vec<Driver>) {
        // Only the first call counts; there is one.
        let _ = self.drivers.set(drivers);
    }

    /// Asks for the items of a request whose sequences `driver` has been given already. Hints say where each item's
    /// output is, in their order; without one it is in the store.
    pub fn start(&self, items: &[EncodedItem], hints: &[ItemHint], driver: &Driver) -> HeldItems {
        // Not the request's own id: a proxy that tries again may have two of one id here, and the end of one must
        // not take the other's items.
        let holder = RequestId::from_bits(self.n_holders.fetch_add(1, Ordering::Relaxed).into());
        let loads_ended = self.loads_ended.clone();
        let hints = hints.iter().cloned().chain(std::iter::repeat_with(ItemHint::default));
        for (item, hint) in items.iter().zip(hints) {
            self.scheduler.update_state_with_hint(holder, item, &hint);
        }
        self.worker.start_load_caches(self.scheduler.build_connector_meta());
        for item in items {
            if let Some(output) = self.worker.rows(&item.key) {
                driver.tell(Event::ItemReady { key: item.key, output });
            }
        }
        HeldItems { holder, items: items.to_vec(), scheduler: self.scheduler.clone(), loads_ended }
    }

    /// The rows of an item, if they are on this worker; they are while a request holds it.
    pub fn rows(&self, key: &ContentKey) -> Option<EncoderOutput> {
        self.worker.rows(key)
    }

    /// The connector's worker side, for a part of this process that makes rows itself.
    pub fn worker(&self) -> WorkerRole {
        self.worker.clone()
    }

    /// At most `limit` keys whose rows are on this worker, the latest used first.
    pub fn resident(&self, limit: usize) -> Vec<ContentKey> {
        self.worker.resident(limit)
    }

    /// Takes no new work, and waits a little for what is under way: no request is left that wants it, and a store
    /// may be dropped in the middle of any call.
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

/// What a request says of where an item's output is; a pending one is waited for until the request's deadline.
pub fn hint_from_wire(hint: v1::ItemHint, deadline: Instant) -> ItemHint {
    ItemHint { peers: hint.peers, pending: hint.pending, until: hint.pending.then(|| deadline.into()) }
}

/// How a failure names the item it is about, until `answer` knows its place in the request.
pub fn item_param(key: &ContentKey) -> String {
    format!("item:{key}")
}
