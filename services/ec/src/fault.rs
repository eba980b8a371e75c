//! Fault injection: a store that fails on command, for tests of any crate. Never in a serving path.
//!
//! Faults are either queued, each for the next operation of a kind, or standing, for all of them until cleared.

use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Leftovers, Listed, Op, PutOutcome, StoreKind, Tidy};
use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use triptych_core::{ContentKey, EncodedItem};

/// An injected fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The operation takes this much longer.
    Latency(Duration),
    /// The operation never ends; only a timeout does.
    Hang,
    /// The operation fails with `Unavailable` and does not take place.
    Error,
    /// The operation takes place, and its answer is lost: `Unavailable`.
    LostAnswer,
    /// An object is read without its last byte. Other operations are not touched.
    Torn,
    /// An object is read as its first half. Other operations are not touched.
    Truncated,
    /// An object is read with the lowest bit of its last byte flipped. Other operations are not touched.
    BitFlip,
    /// An object is gone, though `heads` may just have shown it: it is deleted before it is read. For `heads`,
    /// all are misses. Other operations are not touched.
    Vanish,
    /// The operation takes place, and its answer never comes: it stalls in the middle.
    Stall,
    /// Another writer puts the same object a moment before. Other operations are not touched.
    DuplicateWriter,
}

/// The faults of a [`Faulty`] store. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Mutex<FaultPlan>>);

#[derive(Debug, Default)]
struct FaultPlan {
    queued: HashMap<Op, VecDeque<Fault>>,
    standing: HashMap<Op, Fault>,
    n_calls: HashMap<Op, usize>,
}

impl Faults {
    /// The next `op` without a queued fault gets this one, once.
    pub fn queue(&self, op: Op, fault: Fault) {
        self.plan().queued.entry(op).or_default().push_back(fault);
    }

    /// Every `op` gets this fault when none is queued.
    pub fn stand(&self, op: Op, fault: Fault) {
        self.plan().standing.insert(op, fault);
    }

    /// Ends all faults.
    pub fn clear(&self) {
        let mut plan = self.plan();
        plan.queued.clear();
        plan.standing.clear();
    }

    /// Number of calls of `op`, including faulty ones.
    pub fn n_calls(&self, op: Op) -> usize {
        self.plan().n_calls.get(&op).copied().unwrap_or(0)
    }

    fn next(&self, op: Op) -> Option<Fault> {
        let mut plan = self.plan();
        *plan.n_calls.entry(op).or_default() += 1;
        let queued = plan.queued.get_mut(&op).and_then(VecDeque::pop_front);
        queued.or_else(|| plan.standing.get(&op).copied())
    }

    fn plan(&self) -> MutexGuard<'_, FaultPlan> {
        self.0.lock()
    }
}

/// A store with faults.
pub struct Faulty {
    store: Arc<dyn EcStore>,
    faults: Faults,
}

impl Faulty {
    /// Wraps `store` with injected faults.
    pub fn new(store: Arc<dyn EcStore>, faults: Faults) -> Self {
        Self { store, faults }
    }

    /// Takes the next fault, and applies it if it comes before the operation.
    async fn before(&self, op: Op) -> Result<Option<Fault>, EcError> {
        let fault = self.faults.next(op);
        match fault {
            Some(Fault::Latency(time)) => tokio::time::sleep(time).await,
            Some(Fault::Hang) => std::future::pending::<()>().await,
            Some(Fault::Error) => return Err(self.failure(op)),
            _ => {}
        }
        Ok(fault)
    }

    /// Applies a fault that comes after the operation.
    async fn after<T>(&self, op: Op, fault: Option<Fault>, answer: T) -> Result<T, EcError> {
        match fault {
            Some(Fault::LostAnswer) => Err(self.failure(op)),
            Some(Fault::Stall) => std::future::pending().await,
            _ => Ok(answer),
        }
    }

    fn failure(&self, op: Op) -> EcError {
        EcError::unavailable(self.kind(), op, "injected fault")
    }
}

#[async_trait]
impl EcStore for Faulty {
    fn kind(&self) -> StoreKind {
        self.store.kind()
    }

    fn describe(&self) -> String {
        format!("{} with injected faults", self.store.describe())
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        let fault = self.before(Op::Put).await?;
        if fault == Some(Fault::DuplicateWriter) {
            self.store.put_if_absent(key, object.clone()).await?;
        }
        self.after(Op::Put, fault, self.store.put_if_absent(key, object).await?).await
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let fault = self.before(Op::Get).await?;
        if fault == Some(Fault::Vanish) {
            self.store.delete(key).await?;
        }
        let object = self.store.get(key).await?.map(|object| spoil(object, fault));
        self.after(Op::Get, fault, object).await
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let fault = self.before(Op::Heads).await?;
        if fault == Some(Fault::Vanish) {
            return Ok(vec![None; keys.len()]);
        }
        self.after(Op::Heads, fault, self.store.heads(keys).await?).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        let fault = self.before(Op::Delete).await?;
        self.after(Op::Delete, fault, self.store.delete(key).await?).await
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        let fault = self.before(Op::Quarantine).await?;
        self.after(Op::Quarantine, fault, self.store.quarantine(key).await?).await
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        let fault = self.before(Op::Quarantine).await?;
        self.after(Op::Quarantine, fault, self.store.disown(key, object).await?).await
    }

    async fn ping(&self) -> Result<(), EcError> {
        let fault = self.before(Op::Ping).await?;
        self.after(Op::Ping, fault, self.store.ping().await?).await
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let fault = self.before(Op::Lease).await?;
        self.after(Op::Lease, fault, self.store.acquire(key, ttl).await?).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        let fault = self.before(Op::Lease).await?;
        self.after(Op::Lease, fault, self.store.renew(lease, ttl).await?).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        let fault = self.before(Op::Lease).await?;
        self.after(Op::Lease, fault, self.store.release(lease).await?).await
    }

    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let fault = self.before(Op::Wait).await?;
        self.after(Op::Wait, fault, self.store.wait(key, patience).await?).await
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let fault = self.before(Op::List).await?;
        self.after(Op::List, fault, self.store.list(after, limit).await?).await
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        self.store.leftovers(tidy).await
    }

    async fn flush(&self, patience: Duration) -> bool {
        self.store.flush(patience).await
    }
}

fn spoil(object: Bytes, fault: Option<Fault>) -> Bytes {
    match fault {
        Some(Fault::Truncated) => object.slice(..object.len() / 2),
        Some(Fault::Torn) => object.slice(..object.len().saturating_sub(1)),
        Some(Fault::BitFlip) => {
            let mut bytes = BytesMut::from(object.as_ref());
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
            }
            bytes.freeze()
        }
        _ => object,
    }
}
