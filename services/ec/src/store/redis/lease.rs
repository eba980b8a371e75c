//! Leases in Redis: `triptych:ec:{<hex>}:lease` while the lease is held, `triptych:ec:{<hex>}:fence` with the last
//! token for much longer. A failover may lose either: then two hold the key for a while, which costs an encoding and
//! nothing else, and the later one's token is still the larger.

use super::RedisStore;
use super::scripts;
use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{Op, StoreKind, nonce};
use redis::Value;
use std::time::Duration;
use triptych_core::ContentKey;

/// Time that a fence outlives its lease; later tokens start from the clock.
const FENCE_GRACE: Duration = Duration::from_secs(24 * 3600);

impl RedisStore {
    pub(super) fn lease_key(key: &ContentKey) -> String {
        format!("{}:lease", Self::manifest_key(key))
    }

    pub(super) async fn take_lease(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let (lease, fence) = (Self::lease_key(key), format!("{}:fence", Self::manifest_key(key)));
        let script = scripts::acquire(&lease, &fence, nonce(), ttl, ttl.saturating_add(FENCE_GRACE));
        let strange = || EcError::unavailable(StoreKind::Redis, Op::Lease, "the lease does not read");
        let Value::Array(answer) = self.run(Op::Lease, key, &script).await? else { return Err(strange()) };
        match answer.as_slice() {
            [Value::BulkString(token), Value::Int(left)] if token.is_empty() => {
                Ok(Acquired::Held { left: Duration::from_millis((*left).max(0).unsigned_abs()) })
            }
            [Value::BulkString(token), _] => {
                let token = std::str::from_utf8(token).ok().and_then(|token| token.parse().ok());
                Ok(Acquired::Granted(EncodeLease { key: *key, token: token.ok_or_else(strange)? }))
            }
            _ => Err(strange()),
        }
    }

    pub(super) async fn keep_lease(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        let script = scripts::renew(&Self::lease_key(&lease.key), lease.token, ttl);
        Ok(self.run(Op::Lease, &lease.key, &script).await? == Value::Int(1))
    }

    pub(super) async fn give_lease_back(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        let key = &lease.key;
        let script = scripts::release(&Self::lease_key(key), lease.token, key.as_bytes());
        Ok(self.run(Op::Lease, key, &script).await? == Value::Int(1))
    }
}
