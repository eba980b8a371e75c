//! Timeouts and concurrency of a bucket store.

use std::time::Duration;

/// Timeouts and concurrency of a bucket store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketTuning {
    /// How long one request may take, with its body; once it has passed nothing is tried again. Default 10 s.
    pub response_timeout: Duration,
    /// How long one attempt to connect may take. Default 2 s.
    pub connection_timeout: Duration,
    /// How long a put or a get may take with all its requests. Default 30 s.
    pub transfer_timeout: Duration,
    /// How often a request that failed is made again. Default 2.
    pub retries: usize,
    /// Objects above this go in parts. Default 64 MiB: parts side by side are faster than one connection, but the copy
    /// after them takes what that saves until an object is about that long.
    pub whole_bytes: usize,
    /// Length of a part and of a range. Default 8 MiB; S3 takes no parts under 5 MiB.
    pub part_bytes: usize,
    /// Parts or ranges of one object on their way at once. Default 4.
    pub parts_in_flight: usize,
    /// Heads that are read at once. Default 32.
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
