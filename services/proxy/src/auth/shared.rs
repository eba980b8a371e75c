//! Rates of tenants that all proxies count together, in Redis.
//!
//! An answer is waited for briefly. Without one, each proxy counts alone for a while, by its own buckets, which are charged in any
//! case; then one request asks again. The log and a metric say which holds. Tenants are hashes there.

use parking_lot::Mutex;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use triptych_core::metrics;
use triptych_ec::token_bucket::{BucketSize, TokenBuckets};
use triptych_runtime::MetricsRegistry;
use triptych_runtime::metrics::{Counters, Gauges, Labels};

/// Longest wait for an answer.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Time for which a proxy counts alone after a failure.
const PAUSE: Duration = Duration::from_secs(1);

/// Buckets that several proxies share. Clones share the state.
#[derive(Clone)]
pub struct SharedQuotas(Arc<Shared>);

struct Shared {
    buckets: TokenBuckets,
    /// Until then nobody asks; `None`: the last answer came.
    away_until: Mutex<Option<Instant>>,
    up: Gauges,
    alone: Counters,
}

/// Result of a take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SharedTake {
    /// All proxies together have room.
    Taken,
    /// They have after this time.
    RetryAfter(Duration),
    /// Nobody answers: this proxy's own buckets count.
    Alone,
}

impl SharedQuotas {
    /// Quotas over these buckets.
    pub fn new(buckets: TokenBuckets, registry: &MetricsRegistry) -> Self {
        let up = registry.gauges(metrics::QUOTA_STORE_UP);
        up.get_or_create(&Labels::new()).set(1.0);
        let alone = registry.counters(metrics::QUOTAS_COUNTED_ALONE);
        Self(Arc::new(Shared { buckets, away_until: Mutex::default(), up, alone }))
    }

    /// The name of a tenant in Redis.
    pub(super) fn name_of(tenant: &str) -> String {
        blake3::hash(tenant.as_bytes()).to_hex()[..32].to_owned()
    }

    /// Takes `n` of what a tenant may have of a kind.
    pub(super) async fn take(&self, (tenant, kind): (&str, &str), size: BucketSize, n: u32) -> SharedTake {
        if !self.asks() {
            self.0.alone.get_or_create(&Labels::new()).inc();
            return SharedTake::Alone;
        }
        let key = format!("triptych:quota:{{{tenant}}}:{kind}");
        let answer = match timeout(TIMEOUT, self.0.buckets.take(&key, size, n)).await {
            Ok(answer) => answer.map_err(|e| e.to_string()),
            Err(_) => Err(format!("no answer within {TIMEOUT:?}")),
        };
        match answer {
            Ok(wait) => {
                self.came_back();
                wait.map_or(SharedTake::Taken, SharedTake::RetryAfter)
            }
            Err(why) => {
                self.went_away(&why);
                SharedTake::Alone
            }
        }
    }

    /// True if this request may ask: always while answers come, else one in a while.
    fn asks(&self) -> bool {
        let mut away = self.0.away_until.lock();
        match *away {
            Some(until) if Instant::now() < until => false,
            Some(_) => {
                *away = Some(Instant::now() + PAUSE);
                true
            }
            None => true,
        }
    }

    fn came_back(&self) {
        if self.0.away_until.lock().take().is_some() {
            tracing::info!(
                store = self.0.buckets.shown(),
                "quotas are counted by all proxies together again"
            );
            self.0.up.get_or_create(&Labels::new()).set(1.0);
        }
    }

    fn went_away(&self, why: &str) {
        self.0.alone.get_or_create(&Labels::new()).inc();
        if self.0.away_until.lock().replace(Instant::now() + PAUSE).is_none() {
            let store = self.0.buckets.shown();
            tracing::warn!(store, why, "the quota store is away: each proxy counts quotas alone");
            self.0.up.get_or_create(&Labels::new()).set(0.0);
        }
    }
}

impl fmt::Debug for SharedQuotas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SharedQuotas").field(&self.0.buckets.shown()).finish()
    }
}
