//! Timeouts and concurrency of a bucket store.

use std::time::Duration;

/// Timeouts and concurrency of a bucket store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketTuning {
    /// Timeout of one request with its body and its retries. Default 10 s.
    pub response_timeout: Duration,
    /// Timeout of one connection attempt. Default 2 s.
    pub connection_timeout: Duration,
    /// Timeout of a put or a get with all its requests. Default 30 s.
    pub transfer_timeout: Duration,
    /// Retries of a failed request. Default 2.
    pub retries: usize,
    /// Size in bytes above which objects are uploaded in parts. Default 64 MiB: concurrent parts are faster than one
    /// connection, but below that size the copy afterwards costs as much.
    pub whole_bytes: usize,
    /// Length of a part and of a range. Default 8 MiB; S3 takes no parts under 5 MiB.
    pub part_bytes: usize,
    /// Concurrent part or range transfers of one object. Default 4.
    pub parts_in_flight: usize,
    /// Concurrent reads of heads. Default 32.
    pub heads_in_flight: usize,
}

impl Default for BucketTuning {
    fn default() -> Self {
        Self {
            response_timeout: Duration::from_secs(10),
            connection_timeout: Duration::from_secs(2),
            transfer_timeout: Duration::from_secs(30),
            retries: 2,
            whole_bytes: 64 << 20,
            part_bytes: 8 << 20,
            parts_in_flight: 4,
            heads_in_flight: 32,
        }
    }
}
