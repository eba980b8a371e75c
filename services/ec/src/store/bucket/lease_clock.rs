//! Age and end of leases by this process's clock.

use crate::store::lease::EncodeLease;
use object_store::ObjectMeta;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::time::{Duration, SystemTime};
use tokio::time::Instant;
use triptych_core::ContentKey;

/// How far the service's clock and ours may be apart, with the second that HTTP rounds its times to.
const ALLOWANCE: Duration = Duration::from_secs(3);
/// Above this many, what was seen of leases long ago is forgotten.
const MAX_SEEN: usize = 4096;
/// No lease is taken for longer.
pub(super) const MAX_TTL: Duration = Duration::from_secs(3600);

/// What this process remembers of leases, by its own clock.
#[derive(Debug, Default)]
pub(super) struct LeaseClock(Mutex<Observations>);

#[derive(Debug, Default)]
struct Observations {
    /// The entity tag of each lease that was seen, and since when it is that.
    seen: HashMap<ContentKey, (Option<String>, Instant)>,
    /// Until when the leases that were granted here last.
    granted: HashMap<ContentKey, (u64, Instant)>,
}

impl LeaseClock {
    fn observations(&self) -> MutexGuard<'_, Observations> {
        self.0.lock()
    }

    /// For how long the lease of a key has certainly been as it is.
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

    /// Whether a lease that was granted here has ended; one of another process is asked for at the service only.
    pub(super) fn has_ended(&self, lease: &EncodeLease) -> bool {
        let granted = self.observations().granted.get(&lease.key).copied();
        granted.is_some_and(|(token, until)| token == lease.token && until <= Instant::now())
    }
}
