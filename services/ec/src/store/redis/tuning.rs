//! Timeouts and concurrency of a Redis store.

use std::time::Duration;

/// Timeouts and concurrency of a Redis store. A timeout of zero fails every operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisTuning {
    /// Time to live of an object. Default 1 hour; at least a second.
    pub ttl: Duration,
    /// Timeout of one command. Default 2 s (the library's own is 500 ms, too short for chunks under load).
    pub response_timeout: Duration,
    /// Timeout of one node's answer when the nodes of a cluster are asked for heads; what it has counts as missing
    /// then. Default 400 ms, so that the others' answers arrive within a lookup ([`crate::breaker`]).
    pub head_timeout: Duration,
    /// Timeout of one connection attempt. Default 1 s.
    pub connection_timeout: Duration,
    /// Attempts to connect again before an operation fails. Default 2.
    pub reconnects: usize,
    /// Concurrent chunk transfers of one object. Default 4.
    pub chunks_in_flight: usize,
}

impl Default for RedisTuning {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(3600),
            response_timeout: Duration::from_secs(2),
            head_timeout: Duration::from_millis(400),
            connection_timeout: Duration::from_secs(1),
            reconnects: 2,
            chunks_in_flight: 4,
        }
    }
}
