//! Age and end of leases by this process's clock.

use crate::store::lease::EncodeLease;
use object_store::ObjectMeta;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;
use triptych_core::ContentKey;

/// Allowed difference of the service's clock and ours, including HTTP's resolution of a second.
const ALLOWANCE: Duration = Duration::from_secs(3);
/// Number of observations above which old ones are dropped.
const MAX_SEEN: usize = 4096;
/// Longest lease.
pub(super) const MAX_TTL: Duration = Duration::from_secs(3600);

/// Observations of leases, by this process's clock.
#[derive(Debug, Default)]
pub(super) struct LeaseClock(Mutex<Observations>);

#[derive(Debug, Default)]
struct Observations {
    /// Entity tag of each observed lease, and the time of its first observation.
    seen: HashMap<ContentKey, (Option<String>, Instant)>,
    /// Token and end of the leases granted to this process.
    granted: HashMap<ContentKey, (u64, Instant)>,
}

impl LeaseClock {
    fn observations(&self) -> MutexGuard<'_, Observations> {
        self.0.lock()
    }

    /// Minimum age of the current version of a key's lease.
    pub(super) fn age(&self, key: &ContentKey, meta: &ObjectMeta) -> Duration {
        let now = Instant::now();
        let mut observed = self.observations();
        if observed.seen.len() > MAX_SEEN {
            observed.seen.retain(|_, (_, since)| now.duration_since(*since) < MAX_TTL);
        }
        let (tag, since) = observed.seen.entry(*key).or_insert_with(|| (meta.e_tag.clone(), now));
        if *tag != meta.e_tag {
            (*tag, *since) = (meta.e_tag.clone(), now);
        }
        let by_service = SystemTime::now().duration_since(meta.last_modified.into()).unwrap_or_default();
        now.duration_since(*since).max(by_service.saturating_sub(ALLOWANCE))
    }

    pub(super) fn forget(&self, key: &ContentKey) {
        let mut observed = self.observations();
        observed.seen.remove(key);
        observed.granted.remove(key);
    }

    pub(super) fn granted(&self, lease: &EncodeLease, until: Instant) {
        let mut observed = self.observations();
        if observed.granted.len() > MAX_SEEN {
            let now = Instant::now();
            observed.granted.retain(|_, (_, until)| *until > now);
        }
        observed.granted.insert(lease.key, (lease.token, until));
    }

    /// True if a lease granted to this process has ended. Leases of other processes are checked at the service.
    pub(super) fn has_ended(&self, lease: &EncodeLease) -> bool {
        let granted = self.observations().granted.get(&lease.key).copied();
        granted.is_some_and(|(token, until)| token == lease.token && until <= Instant::now())
    }
}
