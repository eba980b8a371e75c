//! The workers: who is there, what they serve, how busy this proxy keeps them.
//!
//! One task per worker asks it to describe itself (`poll`); what they say becomes one [`Catalog`], which changes as a
//! whole. A piece of work takes a [`Lease`] on the least loaded worker that can do it, and waits while there is none.
//! A worker that restarts at its address is found again by its task.

pub mod catalog;
mod poll;

use crate::config::ProxyError;
use catalog::{Catalog, Health, Known, Pool, Served, Want};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tonic::transport::Channel;
use triptych_core::WorkerId;
use triptych_runtime::grpc::Dialer;

/// Up to this many candidates all are compared; above it two are drawn and the better one is taken.
const COMPARE_ALL: usize = 8;

/// All workers. Dropping it ends their tasks.
pub struct Fleet {
    shared: Arc<Shared>,
    _polls: JoinSet<()>,
}

struct Shared {
    workers: Vec<Arc<Worker>>,
    catalog: watch::Sender<Arc<Catalog>>,
}

/// One worker and the connection to it.
struct Worker {
    place: usize,
    id: WorkerId,
    address: String,
    dialer: Dialer,
    pool: Pool,
    /// Replaced when the old one may be wedged. Held only to clone or replace it.
    channel: Mutex<Channel>,
    /// Work this proxy has given it and that is not done: bytes for encoders, requests for PD workers.
    load: AtomicU64,
    /// Wakes its task before its time.
    ask_again: Notify,
}

impl Fleet {
    /// Starts asking. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// [`ProxyError`] if there is no PD worker, or an address is not one.
    pub fn start(encoders: &[String], pds: &[String], dialer: &Dialer) -> Result<Self, ProxyError> {
        if pds.is_empty() {
            return Err(ProxyError::NoPdWorker);
        }
        let addresses = encoders.iter().map(|a| (Pool::Encoder, a)).chain(pds.iter().map(|a| (Pool::Pd, a)));
        let mut workers = Vec::new();
        for (place, (pool, address)) in addresses.enumerate() {
            workers.push(Arc::new(Worker::new(place, pool, address, dialer.clone())?));
        }
        let known = |w: &Arc<Worker>| Known {
            id: w.id.clone(),
            pool: w.pool,
            health: Health::Down,
            models: Vec::new(),
        };
        let catalog = Catalog { workers: workers.iter().map(known).collect() };
        let shared = Arc::new(Shared { workers, catalog: watch::Sender::new(Arc::new(catalog)) });
        let mut polls = JoinSet::new();
        for worker in &shared.workers {
            polls.spawn(poll::run(Arc::clone(&shared), Arc::clone(worker)));
        }
        Ok(Self { shared, _polls: polls })
    }

    /// The workers as they are.
    pub fn catalog(&self) -> Arc<Catalog> {
        self.shared.catalog.borrow().clone()
    }

    /// The workers as they change.
    pub fn changes(&self) -> watch::Receiver<Arc<Catalog>> {
        self.shared.catalog.subscribe()
    }

    /// The least loaded worker that can do the work, `tried` ones last. Waits while there is none: the caller bounds
    /// the time.
    pub async fn lease(&self, want: &Want, cost: u64, tried: &[WorkerId]) -> Lease {
        let mut changes = self.changes();
        loop {
            let catalog = changes.borrow_and_update().clone();
            if let Some(worker) = self.pick(&catalog, want, tried) {
                return Lease::new(Arc::clone(&self.shared), worker, cost);
            }
            // The sender lives as long as `self`.
            let _ = changes.changed().await;
        }
    }

    fn pick(&self, catalog: &Catalog, want: &Want, tried: &[WorkerId]) -> Option<Arc<Worker>> {
        let able = self.shared.workers.iter().filter(|w| catalog.can_do(w.place, want));
        let (fresh, again): (Vec<_>, Vec<_>) = able.partition(|w| !tried.contains(&w.id));
        let candidates = if fresh.is_empty() { again } else { fresh };
        least_loaded(&candidates).map(Arc::clone)
    }
}

/// The least loaded, ties broken by lot. Power of two choices when there are many.
fn least_loaded<'a>(candidates: &[&'a Arc<Worker>]) -> Option<&'a Arc<Worker>> {
    let draws = if candidates.len() <= COMPARE_ALL { candidates.len() } else { 2 };
    let sample = rand::seq::index::sample(&mut rand::rng(), candidates.len(), draws);
    sample.iter().filter_map(|i| candidates.get(i).copied()).min_by_key(|w| w.load.load(Ordering::Relaxed))
}

impl Worker {
    fn new(place: usize, pool: Pool, address: &str, dialer: Dialer) -> Result<Self, ProxyError> {
        let connect = dialer.dial(address);
        let channel =
            connect.map_err(|source| ProxyError::WorkerAddress { address: address.to_owned(), source })?;
        let role = match pool {
            Pool::Encoder => "encoder",
            Pool::Pd => "pd",
        };
        Ok(Self {
            place,
            id: WorkerId::new(format!("{role}@{address}")),
            address: address.to_owned(),
            dialer,
            pool,
            channel: Mutex::new(channel),
            load: AtomicU64::new(0),
            ask_again: Notify::new(),
        })
    }

    fn channel(&self) -> Channel {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Drops the connection; the next use makes a new one.
    fn reconnect(&self) {
        // The address was accepted when the worker was made.
        if let Ok(channel) = self.dialer.dial(&self.address) {
            *self.channel.lock().unwrap_or_else(PoisonError::into_inner) = channel;
        }
    }
}

impl Shared {
    fn set_ready(&self, worker: &Worker, models: Vec<Served>) {
        self.change(worker, |known| {
            known.health = Health::Ready;
            known.models = models;
        });
    }

    fn set_down(&self, worker: &Worker) {
        self.change(worker, |known| known.health = Health::Down);
    }

    /// Changes what is known of one worker, and tells of pairs that began to disagree.
    fn change(&self, worker: &Worker, change: impl FnOnce(&mut Known)) {
        let mut new_disagreements = BTreeSet::new();
        self.catalog.send_if_modified(|current| {
            let mut next = Catalog::clone(current);
            if let Some(known) = next.workers.get_mut(worker.place) {
                change(known);
            }
            let changed = next != **current;
            if changed {
                new_disagreements = &next.disagreements() - &current.disagreements();
                *current = Arc::new(next);
            }
            changed
        });
        for d in new_disagreements {
            tracing::error!(
                model = %d.model,
                modality = %d.modality,
                encoder = %d.encoder.0,
                encoder_fingerprint = %d.encoder.1,
                pd = %d.pd.0,
                pd_fingerprint = %d.pd.1,
                "encoder and PD worker serve different encoders under one name; the pair is refused"
            );
        }
    }
}

/// A worker that has been given a piece of work. Dropping it takes the work off its load.
pub struct Lease {
    shared: Arc<Shared>,
    worker: Arc<Worker>,
    cost: u64,
}

impl Lease {
    fn new(shared: Arc<Shared>, worker: Arc<Worker>, cost: u64) -> Self {
        worker.load.fetch_add(cost, Ordering::Relaxed);
        Self { shared, worker, cost }
    }

    /// Which worker.
    pub fn id(&self) -> &WorkerId {
        &self.worker.id
    }

    /// The connection to it.
    pub fn channel(&self) -> Channel {
        self.worker.channel()
    }

    /// It went away: nothing more is sent until it has described itself again.
    pub fn report_broken(&self) {
        self.shared.set_down(&self.worker);
        self.worker.ask_again.notify_one();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.worker.load.fetch_sub(self.cost, Ordering::Relaxed);
    }
}
