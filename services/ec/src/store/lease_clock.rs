//! Age and end of leases by the monotonic clock of the process that looks, for stores whose users share no clock.
//!
//! The holder of a lease changes its record with every renewal. A lease whose record did not change for its time to
//! live, counted from when this process first saw that record, is over. So no clocks of hosts are compared: a holder that
//! lives is never taken for dead, and one that died is noticed a time to live after somebody looked. A record that is
//! [`FORGOTTEN`] by the medium's own times is over at the first look.
//!
//! A holder counts from before its request, so for it the lease ends before it does for anyone else.

use crate::store::lease::EncodeLease;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;
use triptych_core::ContentKey;

/// Age by the medium's times after which a record counts as over at the first look; clocks differ by less.
pub(super) const FORGOTTEN: Duration = Duration::from_secs(2 * 3600);
/// Number of observations above which old ones are dropped.
const MAX_SEEN: usize = 4096;
/// Longest lease.
pub(super) const MAX_TTL: Duration = Duration::from_secs(3600);

/// Observations of leases. `V` is what changes with every renewal.
#[derive(Debug)]
pub(super) struct LeaseClock<V>(Mutex<Observations<V>>);

#[derive(Debug)]
struct Observations<V> {
    /// Version of each observed lease, and the time of its first observation.
    seen: HashMap<ContentKey, (V, Instant)>,
    /// Token and end of the leases granted to this process.
    granted: HashMap<ContentKey, (u64, Instant)>,
}

impl<V> Default for LeaseClock<V> {
    fn default() -> Self {
        Self(Mutex::new(Observations { seen: HashMap::new(), granted: HashMap::new() }))
    }
}

impl<V: PartialEq> LeaseClock<V> {
    fn observations(&self) -> MutexGuard<'_, Observations<V>> {
        self.0.lock()
    }

    /// Minimum age of a version of a key's lease that was read before `now`. `by_medium`: its age by the times of the
    /// medium and of this host.
    pub(super) fn age(&self, key: &ContentKey, version: V, by_medium: Duration, now: Instant) -> Duration {
        let mut observed = self.observations();
        if observed.seen.len() > MAX_SEEN {
            observed.seen.retain(|_, (_, since)| now.duration_since(*since) < MAX_TTL);
        }
        let since = match observed.seen.get(key) {
            Some((seen, since)) if *seen == version => *since,
            _ => {
                observed.seen.insert(*key, (version, now));
                now
            }
        };
        now.duration_since(since).max(by_medium.saturating_sub(FORGOTTEN))
    }

    pub(super) fn forget(&self, key: &ContentKey) {
        let mut observed = self.observations();
        observed.seen.remove(key);
        observed.granted.remove(key);
    }

    /// Records a lease that was granted to this process, or renewed.
    pub(super) fn granted(&self, lease: &EncodeLease, until: Instant, now: Instant) {
        let mut observed = self.observations();
        if observed.granted.len() > MAX_SEEN {
            observed.granted.retain(|_, (_, until)| *until > now);
        }
        observed.granted.insert(lease.key, (lease.token, until));
    }

    /// True if a lease granted to this process has ended. Leases of other processes are checked at the store.
    pub(super) fn has_ended(&self, lease: &EncodeLease, now: Instant) -> bool {
        let granted = self.observations().granted.get(&lease.key).copied();
        granted.is_some_and(|(token, until)| token == lease.token && until <= now)
    }
}
