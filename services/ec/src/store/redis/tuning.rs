//! Times and widths of a Redis store.

use std::time::Duration;

/// Times and widths of a Redis store. Zero for a time means no time, so nothing would ever be answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisTuning {
    /// How long an object lives. Default 1 hour; at least a second.
    pub ttl: Duration,
    /// How long one command may take. Default 2 s (the library's own is 500 ms, too short for chunks under load).
    pub response_timeout: Duration,
    /// How long one attempt to connect to a server may take. Default 1 s.
    pub connection_timeout: Duration,
    /// Attempts to connect again before an operation fails. Default 2.
    pub reconnects: usize,
    /// Chunks of one object on their way at once. Default 4.
    pub chunks_in_flight: usize,
}

impl Default for RedisTuning {
    fn default() -> Self {
        Self {
            ttl: Duration::from_secs(3600),
            response_timeout: Duration::from_secs(2),
            connection_timeout: Duration::from_secs(1),
            reconnects: 2,
            chunks_in_flight: 4,
        }
    }
}
