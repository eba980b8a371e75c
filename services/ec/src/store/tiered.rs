//! Several stores, one behind the other: the fastest first, the one that lasts at the end.
//!
//! **Reading** asks tier after tier. What a later one has is copied into the earlier ones beside the answer, once it
//! verified. A tier that does not answer is passed by, and after several failures left alone for a moment; an object
//! that does not verify is quarantined where it lies, and the next tier is asked. It is a miss when any tier said so
//! and none had it: encoding again is always possible.
//!
//! **Writing** waits for the first tier that others see ([`Scope`]) and that takes the object; who is told that it is
//! stored can have it read. The tiers behind that one get it beside the answer, within bounds; past the bounds the put
//! waits for them itself, so that a slow tier slows its writers rather than filling their memory. Copies that were not
//! written when the process ends are missing, and what is missing is encoded again. A tier of the process's own (memory)
//! gets its copy on the way.
//!
//! **Leases** live in one tier that all parties have: the first that hosts share, else the first that this host shares.
//!
//! A put, a delete and a copy of one key may run at once in several processes: what is deleted here may be written again
//! by another process whose copy was on its way. Objects are equal for their key, so that is never wrong.

mod breaker;
mod tier;
mod write_behind;

pub use write_behind::WriteBehindBounds;

use super::lease::{Acquired, EncodeLease};
use super::poll;
use super::{EcStore, Leftovers, Listed, Op, PutOutcome, Scope, StoreKind, Tidy};
use crate::error::{EcError, chain};
use crate::object;
use async_trait::async_trait;
use bytes::Bytes;
use futures::future::join_all;
use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;
use tier::TierState;
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, EncodedItem};
use write_behind::{PendingCopy, WriteBehind};

/// Times and bounds of a tiered store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TieredTuning {
    /// How long one tier may take for one operation before the next one is asked. Default 5 s.
    pub tier_timeout: Duration,
    /// Copies to the tiers behind.
    pub behind: WriteBehindBounds,
    /// Copies to the tiers before. Default: 64 of 256 MiB together, two at once, one try each.
    pub promotion: WriteBehindBounds,
}

impl Default for TieredTuning {
    fn default() -> Self {
        let promotion =
            WriteBehindBounds { entries: 64, bytes: 256 << 20, at_once: 2, keep_trying: Duration::ZERO };
        Self { tier_timeout: Duration::from_secs(5), behind: WriteBehindBounds::default(), promotion }
    }
}

/// One tier.
#[derive(Clone)]
pub struct Tier {
    /// The store.
    pub store: Arc<dyn EcStore>,
    /// Who sees what it holds.
    pub scope: Scope,
}

impl Tier {
    /// A store as its kind is seen.
    pub fn of(store: Arc<dyn EcStore>) -> Self {
        Self { scope: store.kind().scope(), store }
    }
}

/// The store.
pub struct Tiered {
    tiers: Vec<Arc<TierState>>,
    /// Who asks for nothing else sees objects from here on: the first tier that is not the process's own, or the first.
    first_shared: usize,
    limits: Limits,
    behind: WriteBehind,
    promotion: Arc<WriteBehind>,
}

impl Tiered {
    /// Stores in the order in which they are asked. Must be called with one at least; without any, nothing is ever
    /// found and nothing is taken.
    pub fn new(tiers: Vec<Tier>, tuning: TieredTuning, limits: &Limits) -> Self {
        let timeout = tuning.tier_timeout;
        let state =
            |(tier_idx, Tier { store, scope })| Arc::new(TierState::new(store, scope, tier_idx, timeout));
        let tiers: Vec<_> = tiers.into_iter().enumerate().map(state).collect();
        let first_shared = tiers.iter().position(|tier| tier.scope > Scope::Process).unwrap_or(0);
        let (behind, promotion) =
            (WriteBehind::new(tuning.behind), Arc::new(WriteBehind::new(tuning.promotion)));
        Self { tiers, first_shared, limits: limits.clone(), behind, promotion }
    }

    /// Copies that are not yet written to the tiers behind, and their bytes.
    pub fn behind(&self) -> (usize, usize) {
        self.behind.pending()
    }

    /// The tiers that are worth asking now; all of them when none seems to be.
    fn awake(&self) -> Vec<&Arc<TierState>> {
        let now = Instant::now();
        let awake: Vec<_> = self.tiers.iter().filter(|tier| tier.breaker.allows(now)).collect();
        if awake.iter().any(|tier| tier.tier_idx >= self.first_shared) {
            awake
        } else {
            self.tiers.iter().collect()
        }
    }

    /// The tiers in which leases may live, the best first.
    fn lease_tiers(&self) -> impl Iterator<Item = &Arc<TierState>> {
        let of = |scope| self.tiers.iter().filter(move |tier| tier.scope == scope);
        of(Scope::Cluster).chain(of(Scope::Host)).chain(of(Scope::Process))
    }

    /// The answer of the first tier that has leases.
    async fn lease<'a, T, F>(&'a self, ask: impl Fn(&'a dyn EcStore) -> F) -> Result<T, EcError>
    where
        F: Future<Output = Result<T, EcError>>,
    {
        for tier in self.lease_tiers() {
            // Not another tier when this one is away: whoever asks that other one would hold the key beside.
            match tier.ask(Op::Lease, ask(&*tier.store)).await {
                Err(EcError::Unsupported { .. }) => {}
                answer => return answer,
            }
        }
        Err(EcError::Unsupported { store: StoreKind::Tiered, op: Op::Lease })
    }

    /// Gives every tier behind `stored` a copy, and the process's own tiers too.
    async fn spread(&self, stored: usize, key: &ContentKey, object: Bytes) {
        let mut waits = Vec::new();
        for tier in self.tiers.iter().skip(stored + 1) {
            let copy = PendingCopy { key: *key, object: object.clone(), tier: tier.clone() };
            waits.extend(self.behind.push(copy).err());
        }
        let own = self.tiers.iter().take(self.first_shared).filter(|tier| tier.tier_idx != stored);
        let own = own.map(|tier| PendingCopy { key: *key, object: object.clone(), tier: tier.clone() });
        let written = waits.into_iter().chain(own).map(|copy| async move {
            let put = copy.tier.ask(Op::Put, copy.tier.store.put_if_absent(&copy.key, copy.object));
            if let Err(e) = put.await {
                tracing::debug!(key = ?copy.key, error = %chain(&e), "a tier did not take a copy");
            }
        });
        join_all(written).await;
    }

    /// Copies what was found into tiers that did not have it, if it verifies. No failure of it is anybody's failure.
    fn promote(&self, tiers: Vec<Arc<TierState>>, key: &ContentKey, object: &Bytes) {
        if tiers.is_empty() {
            return;
        }
        let (promotion, limits, key, object) =
            (self.promotion.clone(), self.limits.clone(), *key, object.clone());
        if promotion.pending().1.saturating_add(object.len()) > self.limits.max_object_bytes.saturating_mul(4)
        {
            return;
        }
        tokio::spawn(async move {
            let verified = spawn_blocking(move || object::verify(&object, &key, &limits).map(|_| object));
            if let Ok(Ok(object)) = verified.await {
                for tier in tiers {
                    // No room: it will be promoted when it is read again.
                    let _ = promotion.push(PendingCopy { key, object: object.clone(), tier });
                }
            }
        });
    }

    async fn stop_copies(&self, key: &ContentKey, only: Option<&Bytes>) {
        self.behind.revoke(key, only).await;
        self.promotion.revoke(key, only).await;
    }

    /// The heads that these tiers have, each asked only for what the ones before it do not have.
    async fn heads_of(
        &self,
        tiers: &[&Arc<TierState>],
        keys: &[ContentKey],
    ) -> Result<Vec<Option<EncodedItem>>, EcError> {
        let mut found = vec![None; keys.len()];
        let (mut failed, mut answered) = (Vec::new(), keys.is_empty());
        for tier in tiers {
            let missing: Vec<usize> = (0..keys.len()).filter(|i| found[*i].is_none()).collect();
            if missing.is_empty() {
                break;
            }
            let asked: Vec<ContentKey> = missing.iter().map(|i| keys[*i]).collect();
            match tier.ask(Op::Heads, tier.store.heads(&asked)).await {
                Ok(heads) => {
                    answered |= tier.tier_idx >= self.first_shared;
                    missing.into_iter().zip(heads).for_each(|(i, head)| found[i] = head);
                }
                Err(e) => failed.push(e),
            }
        }
        if answered || found.iter().any(Option::is_some) { Ok(found) } else { Err(first(failed, Op::Heads)) }
    }

    /// What all tiers say of a removal: what failed, if any did, and whether any had it.
    async fn remove(&self, key: &ContentKey, op: Op) -> (Vec<EcError>, Option<bool>) {
        self.stop_copies(key, None).await;
        let removed = join_all(self.tiers.iter().map(|tier| {
            tier.ask(op, async move {
                match op {
                    Op::Delete => tier.store.delete(key).await,
                    _ => tier.store.quarantine(key).await,
                }
            })
        }));
        let (mut failed, mut found) = (Vec::new(), None);
        for answer in removed.await {
            match answer {
                Ok(had) => found = Some(had || found == Some(true)),
                Err(e) => failed.push(e),
            }
        }
        (failed, found)
    }
}

/// The first failure, where there has to be one.
fn first(failed: Vec<EcError>, op: Op) -> EcError {
    let none = || EcError::Unsupported { store: StoreKind::Tiered, op };
    failed.into_iter().next().unwrap_or_else(none)
}

#[async_trait]
impl EcStore for Tiered {
    fn kind(&self) -> StoreKind {
        StoreKind::Tiered
    }

    fn describe(&self) -> String {
        let tiers: Vec<_> = self.tiers.iter().map(|tier| tier.store.describe()).collect();
        format!("tiers: {}", tiers.join("; "))
    }

    async fn put_if_absent(&self, key: &ContentKey, object: Bytes) -> Result<PutOutcome, EcError> {
        let mut failed = Vec::new();
        for tier in self.awake().into_iter().skip_while(|tier| tier.tier_idx < self.first_shared) {
            match tier.ask(Op::Put, tier.store.put_if_absent(key, object.clone())).await {
                Ok(PutOutcome::Stored) => {
                    self.spread(tier.tier_idx, key, object).await;
                    return Ok(PutOutcome::Stored);
                }
                Ok(PutOutcome::AlreadyThere) => return Ok(PutOutcome::AlreadyThere),
                Err(e) => failed.push(e),
            }
        }
        Err(first(failed, Op::Put))
    }

    async fn get(&self, key: &ContentKey) -> Result<Option<Bytes>, EcError> {
        let (mut failed, mut missed) = (Vec::new(), Vec::new());
        for tier in self.awake() {
            match tier.ask(Op::Get, tier.store.get(key)).await {
                Ok(Some(object)) => {
                    self.promote(missed, key, &object);
                    return Ok(Some(object));
                }
                Ok(None) => missed.push(tier.clone()),
                Err(e @ EcError::Corrupt { .. }) => {
                    tracing::warn!(?key, tier = tier.store.describe(), error = %chain(&e), "quarantining a copy");
                    match tier.ask(Op::Quarantine, tier.store.quarantine(key)).await {
                        Ok(_) => missed.push(tier.clone()),
                        Err(e) => failed.push(e),
                    }
                }
                Err(e) => failed.push(e),
            }
        }
        if missed.iter().any(|tier| tier.tier_idx >= self.first_shared) {
            Ok(None)
        } else {
            Err(first(failed, Op::Get))
        }
    }

    async fn heads(&self, keys: &[ContentKey]) -> Result<Vec<Option<EncodedItem>>, EcError> {
        self.heads_of(&self.awake(), keys).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        match self.remove(key, Op::Delete).await {
            (failed, Some(found)) if failed.is_empty() => Ok(found),
            (failed, _) => Err(first(failed, Op::Delete)),
        }
    }

    /// A tier that is away keeps its copy, which is quarantined when it is read.
    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        let (failed, found) = self.remove(key, Op::Quarantine).await;
        found.ok_or_else(|| first(failed, Op::Quarantine))
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        self.stop_copies(key, Some(object)).await;
        let (mut failed, mut found) = (Vec::new(), false);
        for tier in self.awake() {
            let same = match tier.ask(Op::Get, tier.store.get(key)).await {
                Ok(copy) => copy.is_some_and(|copy| copy == *object),
                Err(EcError::Corrupt { .. }) => true,
                Err(e) => {
                    failed.push(e);
                    continue;
                }
            };
            if same {
                match tier.ask(Op::Quarantine, tier.store.disown(key, object)).await {
                    Ok(had) => found |= had,
                    Err(e) => failed.push(e),
                }
            }
        }
        if found || failed.is_empty() { Ok(found) } else { Err(first(failed, Op::Quarantine)) }
    }

    /// One tier that others see is enough.
    async fn ping(&self) -> Result<(), EcError> {
        let shared = &self.tiers[self.first_shared.min(self.tiers.len())..];
        let answers = join_all(shared.iter().map(|tier| tier.ask(Op::Ping, tier.store.ping()))).await;
        if answers.iter().any(Result::is_ok) {
            return Ok(());
        }
        Err(first(answers.into_iter().filter_map(Result::err).collect(), Op::Ping))
    }

    async fn acquire(&self, key: &ContentKey, ttl: Duration) -> Result<Acquired, EcError> {
        self.lease(|store| store.acquire(key, ttl)).await
    }

    async fn renew(&self, lease: &EncodeLease, ttl: Duration) -> Result<bool, EcError> {
        self.lease(|store| store.renew(lease, ttl)).await
    }

    async fn release(&self, lease: &EncodeLease) -> Result<bool, EcError> {
        self.lease(|store| store.release(lease)).await
    }

    /// The tier with the leases is told when something happens there; another may have the object before it does.
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let Some(tier) = self.lease_tiers().next() else { return Ok(None) };
        // The tiers behind it get what it has, and some of them count what they are asked for.
        let asking = poll::poll_head(patience, || async {
            let before: Vec<_> = self.awake().into_iter().filter(|t| t.tier_idx <= tier.tier_idx).collect();
            self.heads_of(&before, std::slice::from_ref(key)).await
        });
        if let Some(Some(item)) = self.heads(std::slice::from_ref(key)).await?.pop() {
            return Ok(Some(item));
        }
        let told = tier.store.wait(key, patience);
        tokio::pin!(asking);
        tokio::select! {
            found = &mut asking => found,
            told = told => match told {
                Ok(Some(item)) => Ok(Some(item)),
                // Its maker is done or gave up: whatever there is, is there.
                Ok(None) => Ok(self.heads(std::slice::from_ref(key)).await?.pop().flatten()),
                Err(_) => asking.await,
            },
        }
    }

    async fn list(&self, after: Option<&ContentKey>, limit: usize) -> Result<Vec<Listed>, EcError> {
        let pages = join_all(self.tiers.iter().map(|tier| tier.ask(Op::List, tier.store.list(after, limit))));
        let (mut merged, mut failed, mut answered) = (BTreeMap::new(), Vec::new(), false);
        for page in pages.await {
            match page {
                Ok(page) => {
                    answered = true;
                    for listed in page {
                        merged.entry(listed.key).or_insert(listed);
                    }
                }
                Err(e) => failed.push(e),
            }
        }
        // Each page is the first of its tier's keys, so the first of all of them are the first of all keys.
        if answered { Ok(merged.into_values().take(limit).collect()) } else { Err(first(failed, Op::List)) }
    }

    async fn leftovers(&self, tidy: Tidy) -> Result<Leftovers, EcError> {
        let mut sum = Leftovers::default();
        for tier in &self.tiers {
            let Leftovers { quarantined, unfinished, bytes } = tier.store.leftovers(tidy).await?;
            sum.quarantined += quarantined;
            sum.unfinished += unfinished;
            sum.bytes += bytes;
        }
        Ok(sum)
    }

    async fn flush(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        if !self.behind.flush(until).await {
            let (n, bytes) = self.behind.pending();
            tracing::warn!(
                n,
                bytes,
                "copies were not written behind in time; what is missed is encoded again"
            );
            return false;
        }
        let left = until.saturating_duration_since(Instant::now());
        join_all(self.tiers.iter().map(|tier| tier.store.flush(left))).await.into_iter().all(|done| done)
    }
}
