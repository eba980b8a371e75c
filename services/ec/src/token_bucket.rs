//! Token buckets in Redis, which several processes take from as one.
//!
//! A bucket is a hash of its level and the time of that, by the server's clock, and expires once it is full again. A script reads
//! and changes it, so that two takers never have the same tokens. The rate comes with each take: a changed one holds at once.

use crate::store::redis::{LinkError, RedisLink};
use redis::{Value, cmd};
use std::time::Duration;

/// Returns the milliseconds until there is room; 0: taken. ARGV: tokens a second, most tokens, tokens to take.
const TAKE: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local rate, most, n = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local known = redis.call('HMGET', KEYS[1], 'level', 'at')
local level, at = tonumber(known[1]) or most, tonumber(known[2]) or now
level = math.min(most, level + math.max(0, now - at) * rate / 1000)
local wait = 0
if level >= n then level = level - n else wait = math.ceil((n - level) * 1000 / rate) end
redis.call('HSET', KEYS[1], 'level', tostring(level), 'at', string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(most * 1000 / rate) + 1000)
return wait";

/// Size of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSize {
    /// Tokens that it gains in a second; above 0.
    pub per_second: u32,
    /// Tokens that it holds at most.
    pub most: u32,
}

/// The buckets of a Redis.
pub struct TokenBuckets {
    link: RedisLink,
}

impl TokenBuckets {
    /// The buckets behind a link.
    pub fn new(link: RedisLink) -> Self {
        Self { link }
    }

    /// The servers, without passwords.
    pub fn shown(&self) -> &str {
        self.link.shown()
    }

    /// Takes `n` tokens, not more than the bucket holds. `Some`: nothing was taken, and there is room after this time. A connection
    /// that breaks may have tokens taken twice.
    ///
    /// # Errors
    /// [`LinkError`] without an answer; the caller bounds the time.
    pub async fn take(&self, key: &str, size: BucketSize, n: u32) -> Result<Option<Duration>, LinkError> {
        let mut command = cmd("EVAL");
        command.arg(TAKE).arg(1).arg(key).arg(size.per_second.max(1)).arg(size.most).arg(n.min(size.most));
        match self.link.run(key, &command).await? {
            Value::Int(ms) if ms > 0 => Ok(Some(Duration::from_millis(ms.unsigned_abs()))),
            Value::Int(_) => Ok(None),
            _ => Err(LinkError::WrongType),
        }
    }
}
