//! Encode leases in a slab; needs the lock. A lease also ends with its holder's process.
//!
//! A key's lease is in one of sixteen slots that its hash selects, so no slot is moved or marked when one becomes free.
//! Words: key (4), token, end in milliseconds, the holder's process.

use super::layout::{Field, LEASE_WAYS};
use super::object_table::IsAlive;
use super::words::Words;
use triptych_core::ContentKey;

const TOKEN: usize = 4;
const UNTIL: usize = 5;
const OWNER: usize = 6;

/// A lease request: process, time and duration.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asker {
    pub(super) owner: u64,
    pub(super) now_ms: u64,
    pub(super) ttl_ms: u64,
}

/// Outcome of a lease request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Grant {
    Granted {
        token: u64,
    },
    Held {
        left_ms: u64,
    },
    /// All slots of this key are in use by other keys.
    Full,
}

impl Words<'_> {
    pub(super) fn acquire_lease(&self, key: &ContentKey, asker: &Asker, is_alive: IsAlive<'_>) -> Grant {
        if let Some(at) = self.lease_of(key)
            && let Some(left_ms) = self.time_left(at, asker.now_ms, is_alive)
        {
            return Grant::Held { left_ms };
        }
        let own =
            self.lease_of(key).or_else(|| self.lease_places(key).find(|at| self.is_over(*at, asker.now_ms)));
        let is_dead = |at: &usize| self.time_left(*at, asker.now_ms, is_alive).is_none();
        let Some(at) = own.or_else(|| self.lease_places(key).find(is_dead)) else { return Grant::Full };
        // The time of day in microseconds is ahead of any count, so tokens grow across a recreated slab.
        let token = self.field(Field::Token).saturating_add(1).max(asker.now_ms.saturating_mul(1000));
        self.set(Field::Token, token);
        self.store(at + UNTIL, 0);
        self.set_key(at, key);
        self.store(at + TOKEN, token);
        self.store(at + OWNER, asker.owner);
        self.store(at + UNTIL, asker.now_ms.saturating_add(asker.ttl_ms));
        Grant::Granted { token }
    }

    pub(super) fn renew_lease(&self, key: &ContentKey, token: u64, now_ms: u64, ttl_ms: u64) -> bool {
        let held =
            self.lease_of(key).filter(|at| self.load(at + TOKEN) == token && !self.is_over(*at, now_ms));
        if let Some(at) = held {
            self.store(at + UNTIL, now_ms.saturating_add(ttl_ms));
        }
        held.is_some()
    }

    pub(super) fn release_lease(&self, key: &ContentKey, token: u64, now_ms: u64) -> bool {
        let Some(at) = self.lease_of(key).filter(|at| self.load(at + TOKEN) == token) else { return false };
        let was_held = !self.is_over(at, now_ms);
        self.store(at + UNTIL, 0);
        self.bump(Field::Events);
        was_held
    }

    pub(super) fn is_leased(&self, key: &ContentKey, now_ms: u64, is_alive: IsAlive<'_>) -> bool {
        self.lease_of(key).is_some_and(|at| self.time_left(at, now_ms, is_alive).is_some())
    }

    fn lease_of(&self, key: &ContentKey) -> Option<usize> {
        self.lease_places(key).find(|at| self.load(at + UNTIL) != 0 && self.key(*at) == *key)
    }

    fn lease_places(&self, key: &ContentKey) -> impl Iterator<Item = usize> {
        let geometry = self.geometry;
        let set = Self::hash(key) & (geometry.n_leases / LEASE_WAYS - 1);
        (0..LEASE_WAYS).map(move |way| geometry.lease(set * LEASE_WAYS + way))
    }

    fn is_over(&self, at: usize, now_ms: u64) -> bool {
        self.load(at + UNTIL) <= now_ms
    }

    fn time_left(&self, at: usize, now_ms: u64, is_alive: IsAlive<'_>) -> Option<u64> {
        let left_ms = self.load(at + UNTIL).checked_sub(now_ms).filter(|left| *left > 0)?;
        is_alive(self.load(at + OWNER)).then_some(left_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::super::layout::{Geometry, MIN_BYTES};
    use super::*;
    use std::sync::atomic::AtomicU64;

    fn asker(owner: u64, now_ms: u64) -> Asker {
        Asker { owner, now_ms, ttl_ms: 100 }
    }

    fn token(grant: Grant) -> u64 {
        match grant {
            Grant::Granted { token } => token,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_lease_ends_with_its_time_its_holder_or_when_it_is_given_back_and_tokens_grow() {
        let geometry = Geometry::of_bytes(MIN_BYTES);
        let memory: Vec<_> = (0..geometry.n_words().unwrap()).map(|_| AtomicU64::new(0)).collect();
        let words = Words::new(&memory, geometry);
        let key = ContentKey::from_bytes([1; 32]);
        let all = |_: u64| true;
        let first = token(words.acquire_lease(&key, &asker(1, 1000), &all));
        assert_eq!(words.acquire_lease(&key, &asker(2, 1050), &all), Grant::Held { left_ms: 50 });
        assert!(words.renew_lease(&key, first, 1050, 100) && words.is_leased(&key, 1149, &all));
        assert!(!words.is_leased(&key, 1150, &all));
        let second = token(words.acquire_lease(&key, &asker(2, 1200), &all));
        assert!(second > first && !words.renew_lease(&key, first, 1200, 100));
        assert!(!words.release_lease(&key, first, 1200) && words.is_leased(&key, 1201, &all));
        let third = token(words.acquire_lease(&key, &asker(1, 1201), &|owner| owner != 2));
        assert!(third > second, "its holder died");
        assert!(words.release_lease(&key, third, 1202) && !words.is_leased(&key, 1202, &all));
    }

    #[test]
    fn places_that_are_all_held_are_full_until_one_ends() {
        let geometry = Geometry { n_leases: LEASE_WAYS, ..Geometry::of_bytes(MIN_BYTES) };
        let memory: Vec<_> = (0..geometry.n_words().unwrap()).map(|_| AtomicU64::new(0)).collect();
        let words = Words::new(&memory, geometry);
        for n in 0..LEASE_WAYS as u8 {
            token(words.acquire_lease(&ContentKey::from_bytes([n; 32]), &asker(n.into(), 1), &|_| true));
        }
        let one_more = ContentKey::from_bytes([99; 32]);
        assert_eq!(words.acquire_lease(&one_more, &asker(1, 2), &|_| true), Grant::Full);
        token(words.acquire_lease(&one_more, &asker(1, 2), &|owner| owner != 3));
        assert_eq!(words.acquire_lease(&one_more, &asker(1, 3), &|_| true), Grant::Held { left_ms: 99 });
    }
}
