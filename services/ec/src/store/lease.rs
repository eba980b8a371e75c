//! The lease of a key, whose holder encodes the item, so that the fleet encodes it once.
//!
//! A lease ends by itself when its holder does not renew it. Each grant of a key has a larger token than the one before
//! (a fencing token: Kleppmann, "How to do distributed locking", 2016), so a holder that lost its lease can neither
//! renew nor release that of another, and a worker can distinguish an old job from a new one.

use std::collections::HashMap;
use std::time::Duration;
use tokio::time::Instant;
use triptych_core::ContentKey;

/// A lease that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeLease {
    /// Key of the item.
    pub key: ContentKey,
    /// Larger than that of every earlier lease of the key. Never zero.
    pub token: u64,
}

/// Outcome of a lease request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// Granted to the caller.
    Granted(EncodeLease),
    /// Held by another, unless it is released early or renewed.
    Held {
        /// Time left.
        left: Duration,
    },
}

/// The leases of an in-process store. The caller holds it behind a lock.
#[derive(Debug, Default)]
pub struct LeaseTable {
    held: HashMap<ContentKey, (u64, Instant)>,
    /// One counter for all keys. It only grows, so each key's tokens grow, and free keys need no state.
    last_token: u64,
}

impl LeaseTable {
    /// See [`super::EcStore::acquire`].
    pub fn acquire(&mut self, key: &ContentKey, ttl: Duration, now: Instant) -> Acquired {
        if let Some((_, until)) = self.held.get(key)
            && *until > now
        {
            return Acquired::Held { left: *until - now };
        }
        self.held.retain(|_, (_, until)| *until > now);
        self.last_token += 1;
        self.held.insert(*key, (self.last_token, now + ttl));
        Acquired::Granted(EncodeLease { key: *key, token: self.last_token })
    }

    /// See [`super::EcStore::renew`].
    pub fn renew(&mut self, lease: &EncodeLease, ttl: Duration, now: Instant) -> bool {
        match self.held.get_mut(&lease.key) {
            Some((token, until)) if *token == lease.token && *until > now => {
                *until = now + ttl;
                true
            }
            _ => false,
        }
    }

    /// See [`super::EcStore::release`].
    pub fn release(&mut self, lease: &EncodeLease, now: Instant) -> bool {
        match self.held.get(&lease.key) {
            Some((token, until)) if *token == lease.token => {
                let held = *until > now;
                self.held.remove(&lease.key);
                held
            }
            _ => false,
        }
    }

    /// True if the key's lease is held.
    pub fn is_held(&self, key: &ContentKey, now: Instant) -> bool {
        self.held.get(key).is_some_and(|(_, until)| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(10);

    fn granted(acquired: Acquired) -> EncodeLease {
        match acquired {
            Acquired::Granted(lease) => lease,
            Acquired::Held { left } => panic!("held for {left:?}"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_has_one_holder_until_it_ends_and_tokens_grow() {
        let (mut table, key, now) = (LeaseTable::default(), ContentKey::from_bytes([1; 32]), Instant::now());
        let first = granted(table.acquire(&key, TTL, now));
        assert_eq!(table.acquire(&key, TTL, now + TTL / 2), Acquired::Held { left: TTL / 2 });
        assert!(table.renew(&first, TTL, now + TTL / 2));
        assert!(matches!(table.acquire(&key, TTL, now + TTL), Acquired::Held { .. }));
        let second = granted(table.acquire(&key, TTL, now + 2 * TTL));
        assert!(second.token > first.token);
        assert!(!table.renew(&first, TTL, now + 2 * TTL), "the first holder was away too long");
        assert!(!table.release(&first, now + 2 * TTL));
        assert!(table.is_held(&key, now + 2 * TTL));
        assert!(table.release(&second, now + 2 * TTL));
        assert!(!table.is_held(&key, now + 2 * TTL));
    }
}
