//! The store of EC objects: one trait, its contract, and the back ends below it.
//!
//! A store moves framed bytes under content keys. It does not know what a model is, and except for the head
//! that [`EcStore::heads`] reads it does not look inside an object: verifying rows is the reader's part, see
//! [`crate::object::decode`]. One conformance suite, [`crate::conformance`], holds every implementation and
//! every decorator to the contract.

pub mod bucket;
pub mod disk;
pub mod kind;
pub mod lease;
pub mod memory;
pub mod peer;
mod poll;
pub mod redis;
pub mod remote;
pub mod shm;
pub mod tiered;

pub use kind::{Op, Scope, StoreKind};

use crate::error::EcError;
use async_trait::async_trait;
use bytes::Bytes;
use lease::{Acquired, EncodeLease};
use std::fmt;
use std::time::{Duration, SystemTime};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// A shared place for EC objects.
///
/// **Atomic.** A reader sees a whole object or none, whatever its writer does, dies of, or when it is dropped.
/// **First wins.** Of writers of one key exactly one is told [`PutOutcome::Stored`], and its bytes stay until
/// they are removed; the others are told [`PutOutcome::AlreadyThere`]. A store may lose what it holds at any time
/// (restart, eviction, expiry): then the next read is a miss and the next put is stored.
/// **Cancellation.** Every future may be dropped at any await point. The operation then took place or did not;
/// what a half-done one leaves behind is invisible and is cleaned up or expires.
/// **Bounded.** Nothing waits without a limit on time, and nothing allocates a length that a peer chose before
/// that length was held against the limits. Objects over the limit are [`EcError::TooLarge`].
/// **Concurrent.** Any task of any process may call at any time. Implementations hold no lock across an await.
/// Must be called inside a tokio runtime.
#[async_trait]
pub trait EcStore: Send + Sync {
    /// Which back end this is; decorators answer for what they wrap.
    fn kind(&self) -> StoreKind;

    /// The store as an operator knows it. No passwords.
    fn describe(&self) -> String;

    /// Stores the object unless the key has one.
    ///
    /// # Errors
    /// [`EcError::TooLarge`], [`EcError::Unavailable`], [`EcError::TimedOut`]; after the latter two the object
    /// may be there, and putting it again is safe.
    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError>;

    /// The bytes under the key; `None` is a miss. They are not verified.
    ///
    /// # Errors
    /// [`EcError::Corrupt`] where the store itself can tell that they are no object; [`EcError::Unavailable`],
    /// [`EcError::TimedOut`].
    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError>;

    /// The descriptions of the objects, in the order of the keys, in one round trip. `None` is a miss, or an
    /// object whose head does not read: as good as a miss to whoever asks.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError>;

    /// Removes the object. Whether there was one.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError>;

    /// Takes an object that does not verify out of view; a back end may keep it aside for an operator. After it
    /// a put is stored again. Whether there was one.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.delete(key).await
    }

    /// Takes out of view the copy that a reader was given and that does not verify. A store with one copy of a key
    /// quarantines that; one with several only those with these very bytes, so that a good one behind a bad one is
    /// found by the next read. Whether there was one.
    ///
    /// # Errors
    /// As [`Self::quarantine`].
    async fn disown(&self, key: &ContentKey, _object: &Bytes) -> Result<bool, EcError> {
        self.quarantine(key).await
    }

    /// Asks the store for a sign of life, for readiness probes.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn ping(&self) -> Result<(), EcError>;

    /// Takes the lease of a key, if nobody holds it: its holder encodes the item for everyone. It is for saving work,
    /// not for safety: an object is whatever verifies under its key, whoever stored it. A lease that is not renewed
    /// ends after `ttl`, and so does one whose holder died. Says nothing of whether the object is there: ask
    /// [`Self::heads`] after it was granted.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`]; [`EcError::Unsupported`] where a store cannot be shared.
    async fn acquire(&self, _key: &ContentKey, _ttl: Duration) -> Result<Acquired, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::Lease })
    }

    /// Keeps a lease for `ttl` from now on. False: it is not this holder's any more.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    async fn renew(&self, _lease: &EncodeLease, _ttl: Duration) -> Result<bool, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::Lease })
    }

    /// Gives a lease back, and wakes who waits for its key. False: it was not this holder's any more.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    async fn release(&self, _lease: &EncodeLease) -> Result<bool, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::Lease })
    }

    /// Waits for the object of a key that someone else is making: until it is there, or nobody holds the key's lease
    /// any more, or `patience` is over. `None` may come early; the caller then tries to take the lease. This one asks
    /// again and again; a store that is told better does better.
    ///
    /// # Errors
    /// As [`Self::heads`].
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        poll::poll_head(patience, || self.heads(std::slice::from_ref(key))).await
    }

    /// A page of what is there, in the order of the keys' bytes, after `after`; empty when there is no more. What is
    /// stored or removed meanwhile may or may not be listed.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`]; [`EcError::Unsupported`] where a store does not know.
    async fn list(&self, _after: Option<&ContentKey>, _limit: usize) -> Result<Vec<Listed>, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::List })
    }

    /// Counts what the store holds besides objects, or removes it: for an operator, who looks at what was quarantined
    /// first. Nothing that a living writer is at.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn leftovers(&self, _tidy: Tidy) -> Result<Leftovers, EcError> {
        Ok(Leftovers::default())
    }

    /// Waits, but not longer than `patience`, until everything that was put is where it is to stay, before the process
    /// ends. False: something is not, and will be encoded again when it is wanted.
    async fn flush(&self, _patience: Duration) -> bool {
        true
    }
}

/// What to do with leftovers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tidy {
    /// Say what is there.
    Count,
    /// Remove it.
    Remove,
}

/// What a store holds besides objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Objects that did not verify and were kept aside.
    pub quarantined: usize,
    /// What writers died over.
    pub unfinished: usize,
    /// Bytes of all that.
    pub bytes: u64,
}

/// One object of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: ContentKey,
    /// Length of the object in bytes.
    pub len: u64,
    /// When it was stored, where the store knows.
    pub stored: Option<SystemTime>,
}

impl fmt::Debug for dyn EcStore + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EcStore({})", self.describe())
    }
}

/// What became of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// These bytes are now the object.
    Stored,
    /// The key had an object; these bytes were dropped.
    AlreadyThere,
}

/// Refuses an object that the store would not give back.
pub(crate) fn check_size(limits: &Limits, actual: usize) -> Result<(), EcError> {
    let limit = limits.max_object_bytes;
    if actual > limit { Err(EcError::TooLarge { limit, actual }) } else { Ok(()) }
}

/// 128 random bits, unique among writers.
pub(crate) fn nonce() -> u128 {
    rand::random()
}
