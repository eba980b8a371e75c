//! Encoder outputs on their way to the engines: the EC connector's two roles, joined to the drivers.

use crate::driver::Driver;
use std::sync::{Arc, OnceLock};
use triptych_core::limits::Limits;
use triptych_core::{EncodedItem, Failure, RequestId};
use triptych_ec::connector::{Completions, ConnectorSettings, Loaded, SchedulerRole, WorkerRole, connect};
use triptych_ec::metered::EcObserver;
use triptych_ec::store::EcStore;
use triptych_engine::Event;

/// Both roles of the connector.
#[derive(Clone)]
pub struct Loads {
    scheduler: SchedulerRole,
    worker: WorkerRole,
    drivers: Arc<OnceLock<Vec<Driver>>>,
}

/// What a request holds of the connector until it is dropped.
pub struct HeldItems {
    request: RequestId,
    scheduler: SchedulerRole,
}

impl Drop for HeldItems {
    fn drop(&mut self) {
        self.scheduler.request_finished(self.request);
    }
}

impl Loads {
    /// Connects to a store. Completions go to the drivers given to [`Self::attach`].
    pub fn new(store: Arc<dyn EcStore>, observer: Arc<dyn EcObserver>, limits: Limits) -> Self {
        let drivers: Arc<OnceLock<Vec<Driver>>> = Arc::default();
        let listeners = drivers.clone();
        let completions = Completions::Callback(Arc::new(move |loaded: Loaded| {
            for driver in listeners.get().into_iter().flatten() {
                driver.tell(event(&loaded));
            }
        }));
        let settings = ConnectorSettings { limits, completions, ..ConnectorSettings::default() };
        let (scheduler, worker) = connect(store, observer, settings);
        Self { scheduler, worker, drivers }
    }

    /// Says who hears of completions. An engine ignores keys that none of its sequences needs.
    pub fn attach(&self, drivers: Vec<Driver>) {
        // Only the first call counts; there is one.
        let _ = self.drivers.set(drivers);
    }

    /// Asks for the items of a request whose sequences `driver` has been given already.
    pub fn start(&self, request: RequestId, items: &[EncodedItem], driver: &Driver) -> HeldItems {
        for item in items {
            self.scheduler.update_state_after_alloc(request, item);
        }
        self.worker.start_load_caches(self.scheduler.build_connector_meta());
        for item in items {
            if let Some(output) = self.worker.rows(&item.key) {
                driver.tell(Event::ItemReady { key: item.key, output });
            }
        }
        HeldItems { request, scheduler: self.scheduler.clone() }
    }

    /// Waits for what is under way.
    pub async fn drain(&self) {
        self.worker.drain().await;
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

/// How a failure names the item it is about, until `answer` knows its place in the request.
pub fn item_param(key: &triptych_core::ContentKey) -> String {
    format!("item:{key}")
}
