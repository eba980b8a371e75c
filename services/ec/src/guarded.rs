//! A store behind a circuit breaker ([`crate::breaker`]).
//!
//! While the breaker is open, a call is [`EcError::CircuitOpen`] at once: a miss at a probe of the proxy, the next tier
//! at a load. The call that probes asks for one head first, so that a large object never decides whether the store is
//! back. Lookups have a timeout; what they began goes on without them until the store's own timeout, by which its link
//! notices a dead connection.
//!
//! Inside of every other decorator: its timeouts hold for the store alone, and what waits in a queue is refused when its
//! turn comes.

use crate::breaker::{Breaker, BreakerState, BreakerTuning, CallEnd, CallTicket, ProbeTicket, Verdict};
use crate::error::EcError;
use crate::metered::{CacheTier, EcObserver};
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Leftovers, Listed, Op, PutOutcome, StoreKind, Tidy};
use async_trait::async_trait;
use bytes::Bytes;
use futures::FutureExt;
use futures::future::BoxFuture;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};
use triptych_core::{ContentKey, EncodedItem};

/// A guarded store.
pub struct Guarded {
    store: Arc<dyn EcStore>,
    tuning: BreakerTuning,
    breaker: Mutex<Breaker>,
    observer: Arc<dyn EcObserver>,
}

/// A call that goes on after its timeout.
type LateCall<T> = BoxFuture<'static, Result<T, EcError>>;

/// A transfer in progress; one that is dropped late counts as a timeout.
struct Transfer<'a> {
    guarded: &'a Guarded,
    began: Instant,
    call: Option<CallTicket>,
}

/// A probe in progress; dropping it leaves the next call to probe.
struct Probe<'a> {
    guarded: &'a Guarded,
    probe: Option<ProbeTicket>,
}

impl Transfer<'_> {
    fn ended<T>(mut self, result: Result<T, EcError>) -> Result<T, EcError> {
        if let Some(call) = self.call.take() {
            self.guarded.record(call, end_of(&result));
        }
        result
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        let is_late = self.began.elapsed() >= self.guarded.tuning.transfer_timeout;
        if let Some(call) = self.call.take() {
            self.guarded.record(call, if is_late { CallEnd::TimedOut } else { CallEnd::Unknown });
        }
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        if let Some(probe) = self.probe.take() {
            self.guarded.change(|breaker, now| breaker.probed(probe, CallEnd::Unknown, now));
        }
    }
}

/// End of a call for the breaker, from its result.
fn end_of<T>(result: &Result<T, EcError>) -> CallEnd {
    match result {
        Ok(_) | Err(EcError::Corrupt { .. }) => CallEnd::Answered,
        Err(EcError::TimedOut { .. }) => CallEnd::TimedOut,
        Err(EcError::Unavailable { .. }) => CallEnd::Failed,
        Err(_) => CallEnd::Unknown,
    }
}

impl Guarded {
    /// Guards `store`, and reports the breaker's state to `observer`.
    pub fn new(store: Arc<dyn EcStore>, tuning: BreakerTuning, observer: Arc<dyn EcObserver>) -> Self {
        let breaker = Mutex::new(Breaker::new(tuning));
        let guarded = Self { store, tuning, breaker, observer };
        guarded.observer.breaker(guarded.tier(), BreakerState::Closed);
        guarded
    }

    /// State of the breaker.
    pub fn state(&self) -> BreakerState {
        self.breaker.lock().state()
    }

    fn tier(&self) -> CacheTier {
        CacheTier::Store(self.store.kind())
    }

    /// Changes the breaker, and reports a change of its state.
    fn change<T>(&self, change: impl FnOnce(&mut Breaker, Instant) -> T) -> T {
        let mut breaker = self.breaker.lock();
        let before = breaker.state();
        let changed = change(&mut breaker, Instant::now());
        let state = breaker.state();
        if state != before {
            // Under the lock, so that the last report is the last state.
            self.observer.breaker(self.tier(), state);
        }
        drop(breaker);
        match (before, state) {
            (BreakerState::Closed, BreakerState::Open) => {
                tracing::warn!(
                    store = self.store.describe(),
                    "the EC store does not answer; circuit breaker open"
                );
            }
            (BreakerState::HalfOpen, BreakerState::Closed) => {
                tracing::info!(
                    store = self.store.describe(),
                    "the EC store answers again; circuit breaker closed"
                );
            }
            _ => {}
        }
        changed
    }

    fn record(&self, call: CallTicket, end: CallEnd) {
        self.change(|breaker, now| breaker.ended(call, end, now));
    }

    /// Lets a call through, or refuses it. The call that probes asks for the head of `key` first.
    async fn enter(&self, op: Op, key: Option<&ContentKey>) -> Result<CallTicket, EcError> {
        let refused = || EcError::CircuitOpen { store: self.kind(), op };
        match self.change(Breaker::admit) {
            Verdict::Call(call) => return Ok(call),
            Verdict::Refuse => return Err(refused()),
            Verdict::Probe(probe) => self.probe(probe, op, key).await?,
        }
        match self.change(Breaker::admit) {
            Verdict::Call(call) => Ok(call),
            Verdict::Refuse => Err(refused()),
            Verdict::Probe(probe) => {
                drop(Probe { guarded: self, probe: Some(probe) });
                Err(refused())
            }
        }
    }

    async fn probe(&self, probe: ProbeTicket, op: Op, key: Option<&ContentKey>) -> Result<(), EcError> {
        let mut probe = Probe { guarded: self, probe: Some(probe) };
        let (store, key) = (self.store.clone(), key.copied());
        let ask = async move {
            match key {
                Some(key) => store.heads(&[key]).await.map(drop),
                None => store.ping().await,
            }
        };
        let result = self.in_time(op, ask.boxed(), ignore).await;
        let end = match end_of(&result) {
            // A refusal is an answer too.
            CallEnd::Unknown => CallEnd::Answered,
            end => end,
        };
        if let Some(probe) = probe.probe.take() {
            self.change(|breaker, now| breaker.probed(probe, end, now));
        }
        if end == CallEnd::Answered { Ok(()) } else { result }
    }

    /// The result of a call within the timeout. A late call goes on, and `late` takes what comes of it; as many go on as
    /// there were calls before the breaker opened, and one for each probe.
    async fn in_time<T: Send + 'static>(
        &self,
        op: Op,
        mut call: LateCall<T>,
        late: impl FnOnce(LateCall<T>) -> BoxFuture<'static, ()> + Send,
    ) -> Result<T, EcError> {
        let limit = self.tuning.answer_timeout;
        match timeout(limit, &mut call).await {
            Ok(result) => result,
            Err(_) => {
                // Not in a drain's task group: it ends by the store's own timeout, and nobody waits for it.
                tokio::spawn(late(call));
                Err(EcError::TimedOut { store: self.kind(), op, limit })
            }
        }
    }

    async fn lookup<T: Send + 'static>(
        &self,
        (op, key): (Op, Option<&ContentKey>),
        call: LateCall<T>,
        late: impl FnOnce(LateCall<T>) -> BoxFuture<'static, ()> + Send,
    ) -> Result<T, EcError> {
        let ticket = self.enter(op, key).await?;
        let result = self.in_time(op, call, late).await;
        self.record(ticket, end_of(&result));
        result
    }

    /// Begins a transfer, or another call without a timeout here.
    async fn transfer(&self, op: Op, key: Option<&ContentKey>) -> Result<Transfer<'_>, EcError> {
        let call = Some(self.enter(op, key).await?);
        Ok(Transfer { guarded: self, began: Instant::now(), call })
    }
}

/// Lets a late call end.
fn ignore<T: Send + 'static>(late: LateCall<T>) -> BoxFuture<'static, ()> {
    late.map(drop).boxed()
}

#[async_trait]
impl EcStore for Guarded {
    fn kind(&self) -> StoreKind {
        self.store.kind()
    }

    fn describe(&self) -> String {
        self.store.describe()
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        let transfer = self.transfer(Op::Put, Some(key)).await?;
        transfer.ended(self.store.put_if_absent(key, object).await)
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let transfer = self.transfer(Op::Get, Some(key)).await?;
        transfer.ended(self.store.get(key).await)
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let Some(first) = keys.first() else { return Ok(Vec::new()) };
        let (store, all) = (self.store.clone(), keys.to_vec());
        let call = async move { store.heads(&all).await };
        self.lookup((Op::Heads, Some(first)), call.boxed(), ignore).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        let transfer = self.transfer(Op::Delete, Some(key)).await?;
        transfer.ended(self.store.delete(key).await)
    }

    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        let transfer = self.transfer(Op::Quarantine, Some(key)).await?;
        transfer.ended(self.store.quarantine(key).await)
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        let transfer = self.transfer(Op::Quarantine, Some(key)).await?;
        transfer.ended(self.store.disown(key, object).await)
    }

    async fn ping(&self) -> Result<(), EcError> {
        let store = self.store.clone();
        self.lookup((Op::Ping, None), async move { store.ping().await }.boxed(), ignore).await
    }

    /// A lease that is granted too late is released: nobody would encode under it.
    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        let (store, asked) = (self.store.clone(), *key);
        let call = async move { store.acquire(&asked, ttl).await };
        let store = self.store.clone();
        let release = |late: LateCall<Acquired>| {
            async move {
                if let Ok(Acquired::Granted(lease)) = late.await
                    && let Err(e) = store.release(&lease).await
                {
                    tracing::debug!(key = ?lease.key, error = %e, "a lease that came too late is left to end");
                }
            }
            .boxed()
        };
        self.lookup((Op::Lease, Some(key)), call.boxed(), release).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        let (store, asked) = (self.store.clone(), *lease);
        let call = async move { store.renew(&asked, ttl).await };
        self.lookup((Op::Lease, Some(&lease.key)), call.boxed(), ignore).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        let (store, asked) = (self.store.clone(), *lease);
        let call = async move { store.release(&asked).await };
        self.lookup((Op::Lease, Some(&lease.key)), call.boxed(), ignore).await
    }

    /// A wait that is dropped says nothing about the store.
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let call = self.enter(Op::Wait, Some(key)).await?;
        let result = self.store.wait(key, patience).await;
        self.record(call, end_of(&result));
        result
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let transfer = self.transfer(Op::List, None).await?;
        transfer.ended(self.store.list(after, limit).await)
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        self.store.leftovers(tidy).await
    }

    async fn flush(&self, patience: Duration) -> bool {
        self.store.flush(patience).await
    }
}
