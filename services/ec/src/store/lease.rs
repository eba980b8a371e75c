//! The lease of a key: who encodes its item, so that the fleet encodes it once.
//!
//! A lease ends by itself when its holder does not renew it. Each grant of a key has a larger token than the one before
//! (a fencing token: Kleppmann, "How to do distributed locking", 2016), so a holder that was away can neither keep nor
//! give back what is another's by now, and a worker can tell an old job from a new one.

use super::EcStore;
use crate::error::EcError;
use std::collections::HashMap;
use std::future::Future;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use triptych_core::{ContentKey, EncodedItem};

/// The first and the longest pause between two questions of [`wait_by_asking`].
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// A lease that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeLease {
    /// Whose item its holder encodes.
    pub key: ContentKey,
    /// Larger than that of every earlier lease of the key. Never zero.
    pub token: u64,
}

/// What became of asking for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Acquired {
    /// It is the asker's.
    Granted(EncodeLease),
    /// Someone has it, for so long unless it is renewed or given back.
    Held {
        /// Time left.
        left: Duration,
    },
}

/// The leases of a store that lives in one process. The caller has it behind a lock.
#[derive(Debug, Default)]
pub struct LeaseTable {
    held: HashMap<ContentKey, (u64, Instant)>,
    /// One count for all keys: it only grows, so each key's tokens grow too, and nothing is kept of keys that are free.
    last_token: u64,
}

impl LeaseTable {
    /// See [`EcStore::acquire`].
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

    /// See [`EcStore::renew`].
    pub fn renew(&mut self, lease: &EncodeLease, ttl: Duration, now: Instant) -> bool {
        match self.held.get_mut(&lease.key) {
            Some((token, until)) if *token == lease.token && *until > now => {
                *until = now + ttl;
                true
            }
            _ => false,
        }
    }

    /// See [`EcStore::release`].
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

    /// Whether anyone holds the key.
    pub fn is_held(&self, key: &ContentKey, now: Instant) -> bool {
        self.held.get(key).is_some_and(|(_, until)| *until > now)
    }
}

/// [`EcStore::wait`] for stores that cannot be told: asks with growing pauses.
///
/// # Errors
/// Of [`EcStore::heads`].
pub async fn wait_by_asking<S: EcStore + ?Sized>(
    store: &S,
    key: &ContentKey,
    patience: Duration,
) -> Result<Option<EncodedItem>, EcError> {
    ask_again(patience, || store.heads(std::slice::from_ref(key))).await
}

/// Asks for the head of one object with growing pauses, until it is there or patience is over.
///
/// # Errors
/// Of `ask`.
pub(crate) async fn ask_again<F>(
    patience: Duration,
    ask: impl Fn() -> F,
) -> Result<Option<EncodedItem>, EcError>
where
    F: Future<Output = Result<Vec<Option<EncodedItem>>, EcError>>,
{
    let until = Instant::now() + patience;
    let (mut pause, longest) = PAUSES;
    loop {
        if let Some(Some(item)) = ask().await?.pop() {
            return Ok(Some(item));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        sleep(pause.min(left)).await;
        pause = (pause * 2).min(longest);
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
    async fn a_lease_is_one_holders_until_it_ends_and_tokens_grow() {
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
