//! The store of EC objects: one trait, its contract, and the back ends below it.
//!
//! A store moves framed bytes under content keys. It does not know what a model is, and except for the head
//! that [`EcStore::heads`] reads it does not look inside an object: verifying rows is the reader's part, see
//! [`crate::object::decode`]. One conformance suite, [`crate::conformance`], holds every implementation and
//! every decorator to the contract.

mod access;
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

pub use access::Access;
pub use kind::{Op, Scope, StoreKind};

use crate::error::EcError;
use async_trait::async_trait;
use bytes::Bytes;
use lease::{Acquired, EncodeLease};
use std::fmt;
use std::time::{Duration, SystemTime};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};

/// A store of EC objects.
///
/// **Atomic.** A reader sees a whole object or none, whatever its writer does, dies of, or when it is dropped.
/// **First wins.** Of concurrent writers of one key exactly one gets [`PutOutcome::Stored`], and its bytes stay until
/// they are removed; the others get [`PutOutcome::AlreadyThere`]. A store may lose what it holds at any time
/// (restart, eviction, expiry): then the next read is a miss and the next put is stored.
/// **Ordering.** A read that starts after a put returned sees the object, unless the store lost it since. Operations on
/// different keys are not ordered.
/// **Cancellation.** Every future may be dropped at any await point. The operation then took place as a whole or not at
/// all; partial data is invisible and is cleaned up or expires.
/// **Bounded.** Nothing waits without a limit on time, and no length that a peer chose is allocated before
/// it is checked against the limits. Objects over the limit are [`EcError::TooLarge`].
/// **Concurrent.** Any task of any process may call at any time. Implementations hold no lock across an await.
/// Must be called inside a tokio runtime.
#[async_trait]
pub trait EcStore: Send + Sync {
    /// Kind of the back end; a decorator returns that of the wrapped store.
    fn kind(&self) -> StoreKind;

    /// Description for operators, without passwords.
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
    /// [`EcError::Corrupt`] where the store itself detects that they are no object; [`EcError::Unavailable`],
    /// [`EcError::TimedOut`].
    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError>;

    /// The descriptions of the objects, in the order of the keys, in one round trip. `None` is a miss, or an
    /// object whose head is malformed.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError>;

    /// Removes the object. Returns true if there was one.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError>;

    /// Hides an object that does not verify; a back end may keep it for an operator. Afterwards a put is stored again.
    /// Returns true if there was one.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        self.delete(key).await
    }

    /// Quarantines the copy that a reader received and that does not verify. A store with one copy of a key quarantines
    /// that; one with several copies only those with exactly these bytes, so that the next read finds a good copy
    /// behind a bad one. Returns true if there was one.
    ///
    /// # Errors
    /// As [`Self::quarantine`].
    async fn disown(&self, key: &ContentKey, _object: &Bytes) -> Result<bool, EcError> {
        self.quarantine(key).await
    }

    /// Checks that the store answers, for readiness probes.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn ping(&self) -> Result<(), EcError>;

    /// Acquires the lease of a key, if it is free: its holder encodes the item for everyone. Atomic: of concurrent
    /// callers at most one is granted it. It saves work and is not needed for correctness: any object that verifies
    /// under its key is valid. A lease that is not renewed ends after `ttl`, also if its holder died. A free lease says
    /// nothing about the object: ask [`Self::heads`] after the grant. If the future is dropped, the lease may be held
    /// until `ttl`.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`]; [`EcError::Unsupported`] in a store without leases.
    async fn acquire(&self, _key: &ContentKey, _ttl: Duration) -> Result<Acquired, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::Lease })
    }

    /// Extends a lease to `ttl` from now. False: this holder has lost it.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    async fn renew(&self, _lease: &EncodeLease, _ttl: Duration) -> Result<bool, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::Lease })
    }

    /// Releases a lease, and wakes waiters for its key. False: this holder had lost it.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    async fn release(&self, _lease: &EncodeLease) -> Result<bool, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::Lease })
    }

    /// Waits for the object of a key that another process encodes: until it is stored, the key's lease is free, or
    /// `patience` is over. `None` may come early; the caller then tries to acquire the lease. The default polls; a
    /// store with notifications overrides it.
    ///
    /// # Errors
    /// As [`Self::heads`].
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        poll::poll_head(patience, || self.heads(std::slice::from_ref(key))).await
    }

    /// A page of at most `limit` objects, ordered by the keys' bytes, after `after`; empty at the end. Objects stored
    /// or removed concurrently may or may not be listed.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`]; [`EcError::Unsupported`] in a store without lists.
    async fn list(&self, _after: Option<&ContentKey>, _limit: usize) -> Result<Vec<Listed>, EcError> {
        Err(EcError::Unsupported { store: self.kind(), op: Op::List })
    }

    /// Counts or removes quarantined objects and leftovers of dead writers, for operators. Data of live writers is not
    /// touched.
    ///
    /// # Errors
    /// [`EcError::Unavailable`], [`EcError::TimedOut`].
    async fn leftovers(&self, _tidy: Tidy) -> Result<Leftovers, EcError> {
        Ok(Leftovers::default())
    }

    /// Waits at most `patience` until all pending writes are done, before the process exits. False: some are not; those
    /// objects will be encoded again when needed.
    async fn flush(&self, _patience: Duration) -> bool {
        true
    }
}

/// Action on leftovers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tidy {
    /// Count them.
    Count,
    /// Remove them.
    Remove,
}

/// Counts of quarantined objects and leftovers of dead writers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// Quarantined objects.
    pub quarantined: usize,
    /// Unfinished objects of dead writers.
    pub unfinished: usize,
    /// Bytes of both.
    pub bytes: u64,
}

/// One object of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its key.
    pub key: ContentKey,
    /// Length of the object in bytes.
    pub len: u64,
    /// Time at which it was stored, if known.
    pub stored: Option<SystemTime>,
}

impl fmt::Debug for dyn EcStore + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EcStore({})", self.describe())
    }
}

/// Outcome of a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// These bytes are now the object.
    Stored,
    /// The key had an object; these bytes were dropped.
    AlreadyThere,
}

/// Refuses an object over the limit.
pub(crate) fn check_size(limits: &Limits, actual: usize) -> Result<(), EcError> {
    let limit = limits.max_object_bytes;
    if actual > limit { Err(EcError::TooLarge { limit, actual }) } else { Ok(()) }
}

/// 128 random bits, unique among writers.
pub(crate) fn nonce() -> u128 {
    rand::random()
}
