//! One encode for the fleet: the lease of a key, held while its job runs, and the wait of those who do not have it.
//!
//! A lease saves work and guards nothing: whoever cannot ask for one encodes without. It is renewed by a task for as long
//! as its [`Holding`] lives. At the end it is given back, but not before the store has the object: a worker answers as
//! soon as it holds the rows in memory and writes the durable copy behind, and whoever looks in between would find
//! neither object nor holder.

use crate::cache::{EncoderCache, Wanted};
use crate::encode::Origin;
use crate::encode::meters::LeaseOutcome;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep};
use tokio_util::task::TaskTracker;
use triptych_core::EncodedItem;
use triptych_ec::store::lease::{Acquired, EncodeLease};

/// A lease lasts for so many times the predicted cost of its job, within [`TTL`]. It is renewed after a third of it.
const TTL_OF_COST: u32 = 4;
/// The shortest and the longest: long enough for a busy machine to renew it, short enough to be taken over from the
/// dead within a request's time.
const TTL: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(15));
/// The longest single wait for another's job.
const SLICE: Duration = Duration::from_secs(2);
/// The first and the longest pause after a wait that ended at once though the key is held.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));
/// How long a lease is kept for a durable copy that is written behind.
const WRITE_BEHIND: Duration = Duration::from_secs(10);

/// Whose job it is.
pub(super) enum Turn {
    /// This proxy's; nobody else begins it meanwhile.
    Ours(Holding, Followed),
    /// The store has no leases, or does not answer: encode, and perhaps not alone.
    Anyones,
    /// It was somebody else's, and it is done.
    Done(EncodedItem),
}

/// Whether another had the lease before, and so may have left the object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Followed(pub(super) bool);

/// Asks for leases.
#[derive(Clone)]
pub(super) struct Leases {
    pub(super) cache: EncoderCache,
    pub(super) tasks: TaskTracker,
    /// Leases are given back from wherever they are dropped.
    pub(super) runtime: Handle,
    pub(super) count: Arc<dyn Fn(LeaseOutcome) + Send + Sync>,
}

impl Leases {
    /// Waits until it is this proxy's turn to encode, or until somebody else has. The caller bounds the time.
    pub(super) async fn turn(&self, wanted: &Wanted, origin: Origin, cost: Duration) -> Turn {
        let ttl = (cost * TTL_OF_COST).clamp(TTL.0, TTL.1);
        let mut pause = PAUSES.0;
        let mut followed = false;
        loop {
            let left = match self.cache.acquire(&wanted.key, ttl).await {
                None => {
                    (self.count)(LeaseOutcome::Without);
                    return Turn::Anyones;
                }
                Some(Acquired::Granted(lease)) => {
                    let outcome = if followed { LeaseOutcome::TakenOver } else { LeaseOutcome::Granted };
                    (self.count)(outcome);
                    return Turn::Ours(Holding::new(self, *wanted, lease, ttl), Followed(followed));
                }
                Some(Acquired::Held { left }) => left,
            };
            followed = true;
            let asked = Instant::now();
            let found = match origin {
                // A little longer than the lease lasts: it is free by then if nobody renews it.
                Origin::Any => self.cache.wait(wanted, (left + PAUSES.0).min(SLICE)).await,
                // What the store shows may be what was found to be bad: only the lease tells when that is over.
                Origin::Fresh => Some(None),
            };
            match found {
                None => {
                    (self.count)(LeaseOutcome::Without);
                    return Turn::Anyones;
                }
                Some(Some(item)) => {
                    (self.count)(LeaseOutcome::Followed);
                    return Turn::Done(item);
                }
                // Its holder gave up or died, or the wait was short: try to take it.
                Some(None) if asked.elapsed() >= pause => pause = PAUSES.0,
                Some(None) => {
                    sleep(pause).await;
                    pause = (pause * 2).min(PAUSES.1);
                }
            }
        }
    }
}

/// A lease that is held and renewed. Dropping it gives it back at once.
pub(super) struct Holding {
    leases: Leases,
    wanted: Wanted,
    lease: EncodeLease,
    ttl: Duration,
    lost: Arc<AtomicBool>,
    renewing: AbortHandle,
    given_back: bool,
}

impl Holding {
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

    /// Whether another may hold it by now.
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
        tasks.spawn_on(wait, &runtime);
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.renewing.abort();
        if self.given_back {
            return;
        }
        let (cache, lease) = (self.leases.cache.clone(), self.lease);
        tracing::trace!(key = ?lease.key, token = lease.token, ttl = ?self.ttl, "encode lease given back");
        self.leases.tasks.spawn_on(async move { cache.release(&lease).await }, &self.leases.runtime);
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
