//! The steps that a server does as one, as scripts. Each may run twice: the second time it finds what the first one did
//! and gives the same answer, so that a connection that broke before the answer came costs nothing.
//!
//! All keys of a script are in one slot. A message to waiters is published if the user has the permission (`pcall`):
//! nobody depends on it.

use redis::{Cmd, cmd};
use std::time::Duration;

/// Channel of notifications that a key's object was stored or its lease released; the message is the key's bytes.
pub(super) const CHANNEL: &str = "triptych:ec:events";

/// 1: the manifest is this one. An empty string under the key is no manifest and gives way.
const PUBLISH: &str = "
local is_set = redis.call('SET', KEYS[1], ARGV[1], 'NX', 'EX', ARGV[2])
if not is_set and redis.pcall('STRLEN', KEYS[1]) == 0 then
  is_set = redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
if is_set then
  redis.pcall('PUBLISH', ARGV[3], ARGV[4])
  return 1
end
local n = tonumber(ARGV[5])
if redis.pcall('GETRANGE', KEYS[1], 0, n - 1) == string.sub(ARGV[1], 1, n) then return 1 end
return 0";

/// Removes a key while it still starts with what was read from it: what another writer put there since stays.
const REMOVE_IF_SAME: &str = "
if redis.call('GETRANGE', KEYS[1], 0, string.len(ARGV[1]) - 1) == ARGV[1] then return redis.call('UNLINK', KEYS[1]) end
return 0";

/// The token, or `''` and the milliseconds that are left to another holder. A lease is `token:asker`; one that would
/// never end counts as free. Tokens grow by one, and are never below the server's clock: a fence that was lost (a
/// failover, an eviction) starts again above every token that it had given.
const ACQUIRE: &str = "
local held, left = redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])
if held and left > 0 then
  local token, asker = string.match(held, '^(%d+):(%x+)$')
  if asker == ARGV[1] then return {token, 0} end
  return {'', left}
end
local time = redis.call('TIME')
local next = (tonumber(redis.call('GET', KEYS[2])) or 0) + 1
local token = string.format('%.0f', math.max(next, time[1] * 1000 + math.floor(time[2] / 1000)))
redis.call('SET', KEYS[2], token, 'EX', ARGV[3])
redis.call('SET', KEYS[1], token .. ':' .. ARGV[1], 'PX', ARGV[2])
return {token, 0}";

const RENEW: &str = "
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^(%d+):') == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 0";

const RELEASE: &str = "
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, '^(%d+):') ~= ARGV[1] then return 0 end
redis.call('UNLINK', KEYS[1])
redis.pcall('PUBLISH', ARGV[2], ARGV[3])
return 1";

/// Puts the manifest unless there is one; the first `own_bytes` of it are no other writer's.
pub(super) fn publish(name: &str, manifest: &[u8], own_bytes: usize, ttl: Duration, key: &[u8]) -> Cmd {
    let mut script = eval(PUBLISH, &[name]);
    script.arg(manifest).arg(ttl.as_secs()).arg(CHANNEL).arg(key).arg(own_bytes);
    script
}

pub(super) fn remove_if_same(name: &str, start: &[u8]) -> Cmd {
    let mut script = eval(REMOVE_IF_SAME, &[name]);
    script.arg(start);
    script
}

pub(super) fn acquire(lease: &str, fence: &str, asker: u128, ttl: Duration, fence_ttl: Duration) -> Cmd {
    let mut script = eval(ACQUIRE, &[lease, fence]);
    script.arg(format!("{asker:032x}")).arg(millis(ttl)).arg(fence_ttl.as_secs().max(1));
    script
}

pub(super) fn renew(lease: &str, token: u64, ttl: Duration) -> Cmd {
    let mut script = eval(RENEW, &[lease]);
    script.arg(token.to_string()).arg(millis(ttl));
    script
}

pub(super) fn release(lease: &str, token: u64, key: &[u8]) -> Cmd {
    let mut script = eval(RELEASE, &[lease]);
    script.arg(token.to_string()).arg(CHANNEL).arg(key);
    script
}

fn eval(script: &str, keys: &[&str]) -> Cmd {
    let mut eval = cmd("EVAL");
    eval.arg(script).arg(keys.len()).arg(keys);
    eval
}

/// At least one millisecond, as `PX` requires, and at most a year, so that a server's clock does not overflow.
fn millis(ttl: Duration) -> u64 {
    u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).clamp(1, 365 * 24 * 3600 * 1000)
}
