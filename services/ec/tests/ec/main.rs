//! The EC stores, their decorators and the connector from outside. One binary, so that it links once.

mod access;
mod bucket;
mod connector;
mod decorators;
mod disk;
mod guarded;
mod object;
mod peer;
mod redis;
mod redis_failover;
mod redis_forms;
mod redis_hostile;
mod redis_lease;
mod redis_resp;
mod remote;
mod shm;
mod tiered;
mod traced;

use std::time::Duration;
use triptych_core::ContentKey;

/// Generous: no test waits this long unless something hangs.
const LIMIT: Duration = Duration::from_secs(60);

fn key(n: u8) -> ContentKey {
    ContentKey::from_bytes([n; 32])
}
