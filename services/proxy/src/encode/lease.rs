//! The lease of a key, held while its encode runs.
//!
//! It is renewed by a task for as long as its [`HeldLease`] lives. At the end it is given back, but not before the store
//! has the object: a worker answers as soon as it holds the rows in memory and writes the durable copy behind, and
//! a look in between would find neither object nor holder.

use crate::cache::EncoderCache;
use crate::request_machine::action::LeaseOutcome;
use crate::request_machine::output::Wanted;
use crate::request_machine::policy::PAUSES;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;
use tracing::Instrument;
use triptych_core::timeline::STORE;
use triptych_ec::store::lease::{Acquired, EncodeLease};

/// Time for which a lease is kept for a durable copy that is written behind.
const WRITE_BEHIND: Duration = Duration::from_secs(10);

/// The store's leases.
#[derive(Clone)]
pub(super) struct Leases {
    pub(super) cache: EncoderCache,
    pub(super) tasks: TaskTracker,
    /// Leases are given back from wherever they are dropped.
    pub(super) runtime: Handle,
    pub(super) count: Arc<dyn Fn(LeaseOutcome) + Send + Sync>,
}

impl Leases {
    /// Asks for the lease of a key; `None` if the store has none or does not answer.
    pub(super) async fn acquire(
        &self,
        wanted: &Wanted,
        ttl: Duration,
    ) -> Option<Result<HeldLease, Duration>> {
        match self.cache.acquire(&wanted.key, ttl).await? {
            Acquired::Granted(lease) => Some(Ok(HeldLease::new(self, *wanted, lease, ttl))),
            Acquired::Held { left } => Some(Err(left)),
        }
    }
}

/// A lease that is held and renewed. Dropping it gives it back at once.
pub(super) struct HeldLease {
    leases: Leases,
    wanted: Wanted,
    lease: EncodeLease,
    ttl: Duration,
    lost: Arc<AtomicBool>,
    renewing: AbortHandle,
    given_back: bool,
}

impl HeldLease {
    fn new(leases: &Leases, wanted: Wanted, lease: EncodeLease, ttl: Duration) -> Self {
        let lost = Arc::new(AtomicBool::new(false));
        let renew = renew(leases.clone(), lease, ttl, Arc::clone(&lost));
        let renewing = leases.tasks.spawn_on(renew, &leases.runtime).abort_handle();
        Self { leases: leases.clone(), wanted, lease, ttl, lost, renewing, given_back: false }
    }

    /// The fencing token.
    pub(super) fn fence(&self) -> u64 {
        self.lease.token
    }

    /// True if another may hold it by now.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Gives it back once the store has the object, or when that was waited for long enough.
    pub(super) fn give_back_when_stored(mut self) {
        self.given_back = true;
        let (leases, wanted, lost) = (self.leases.clone(), self.wanted, Arc::clone(&self.lost));
        let (tasks, runtime) = (leases.tasks.clone(), leases.runtime.clone());
        let wait = async move {
            let end = Instant::now() + WRITE_BEHIND;
            let mut pause = PAUSES.0;
            while !lost.load(Ordering::Relaxed) && Instant::now() < end {
                // The holder itself asks in short turns: a store may end a wait early only for a key that is free.
                let found = leases.cache.probe(&[wanted]).await;
                if found.iter().any(Option::is_some) {
                    break;
                }
                sleep(pause).await;
                pause = (pause * 2).min(PAUSES.1);
            }
            self.given_back = false;
            drop(self);
        };
        // Part of the request's trace, though the request does not wait for it.
        let span = tracing::info_span!(target: STORE, "ec", otel.name = "ec hold lease until stored");
        tasks.spawn_on(wait.instrument(span), &runtime);
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.renewing.abort();
        if self.given_back {
            return;
        }
        let (cache, lease) = (self.leases.cache.clone(), self.lease);
        tracing::trace!(key = ?lease.key, token = lease.token, ttl = ?self.ttl, "encode lease given back");
        let release = async move { cache.release(&lease).await };
        self.leases.tasks.spawn_on(release.in_current_span(), &self.leases.runtime);
    }
}

/// Renews a lease until it is another's.
async fn renew(leases: Leases, lease: EncodeLease, ttl: Duration, lost: Arc<AtomicBool>) {
    let mut valid_until = Instant::now() + ttl;
    loop {
        sleep(ttl / 3).await;
        let asked = Instant::now();
        match leases.cache.renew(&lease, ttl).await {
            Some(true) => valid_until = asked + ttl,
            // A store that does not answer may still have it.
            None if Instant::now() < valid_until => {}
            Some(false) | None => {
                lost.store(true, Ordering::Relaxed);
                (leases.count)(LeaseOutcome::Lost);
                tracing::warn!(key = ?lease.key, token = lease.token, "encode lease lost while its job ran");
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests;
