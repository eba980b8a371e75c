//! A store of several tiers, the fastest first, the most durable last.
//!
//! **Reading** asks tier after tier. An object of a later tier is promoted to the earlier ones in the background, once
//! it verified. A tier that does not answer is skipped; that costs nothing while its circuit breaker is open
//! ([`crate::guarded`]). An object that does not verify is quarantined in its tier, and the next tier is asked. It is a miss if at least one shared
//! tier answered and none had it: encoding again is always possible.
//!
//! **Writing** waits for the first shared tier ([`Scope`]) that takes the object, so that others can read it
//! afterwards. The tiers behind it are written in the background, within bounds; past the bounds the put itself waits
//! for them, so that a slow tier slows its writers rather than filling their memory. Copies that are not written when
//! the process ends are encoded again when needed. The process's own tier (memory) gets its copy before the put
//! returns.
//!
//! **Leases** live in one tier that all processes have: the first shared by hosts, else the first shared on this host.
//!
//! A put, a delete and a copy of one key may run concurrently in several processes: an object deleted here may be
//! written again by another process's pending copy. Objects are equal for their key, so that is never wrong.

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

/// Timeouts and bounds of a tiered store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TieredTuning {
    /// Timeout of one operation in one tier, after which the next is asked. Default 5 s.
    pub tier_timeout: Duration,
    /// Bounds of copies to later tiers.
    pub behind: WriteBehindBounds,
    /// Bounds of copies to earlier tiers. Default: 64 of 256 MiB in total, two concurrent, one attempt each.
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
    /// Visibility of its objects.
    pub scope: Scope,
}

impl Tier {
    /// A tier with the scope of the store's kind.
    pub fn of(store: Arc<dyn EcStore>) -> Self {
        Self { scope: store.kind().scope(), store }
    }
}

/// A store of several tiers.
pub struct Tiered {
    tiers: Vec<Arc<TierState>>,
    /// Index of the first tier that is shared with other processes, or 0.
    first_shared: usize,
    limits: Limits,
    behind: WriteBehind,
    promotion: Arc<WriteBehind>,
}

impl Tiered {
    /// Tiers in the order of reads, at least one; without any, every operation fails.
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

    /// Pending copies to later tiers, and their bytes.
    pub fn behind(&self) -> (usize, usize) {
        self.behind.pending()
    }

    /// Tiers that may hold leases, the widest scope first.
    fn lease_tiers(&self) -> impl Iterator<Item = &Arc<TierState>> {
        let of = |scope| self.tiers.iter().filter(move |tier| tier.scope == scope);
        of(Scope::Cluster).chain(of(Scope::Host)).chain(of(Scope::Process))
    }

    /// The answer of the first tier with leases.
    async fn lease<'a, T, F>(&'a self, ask: impl Fn(&'a dyn EcStore) -> F) -> Result<T, EcError>
    where
        F: Future<Output = Result<T, EcError>>,
    {
        for tier in self.lease_tiers() {
            // No fallback to another tier when this one is unavailable: two callers would hold the lease in different
            // tiers.
            match tier.ask(Op::Lease, ask(&*tier.store)).await {
                Err(EcError::Unsupported { .. }) => {}
                answer => return answer,
            }
        }
        Err(EcError::Unsupported { store: StoreKind::Tiered, op: Op::Lease })
    }

    /// Copies the object to every tier behind `stored`, and to the process's own tiers.
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

    /// Copies an object to tiers that missed it, if it verifies. Failures are ignored.
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
        // Not in a drain's task group: a promotion only saves time, and an aborted one loses nothing.
        tokio::spawn(async move {
            let verified = spawn_blocking(move || object::verify(&object, &key, &limits).map(|_| object));
            if let Ok(Ok(object)) = verified.await {
                for tier in tiers {
                    // Without capacity it is promoted at a later read.
                    let _ = promotion.push(PendingCopy { key, object: object.clone(), tier });
                }
            }
        });
    }

    async fn stop_copies(&self, key: &ContentKey, only: Option<&Bytes>) {
        self.behind.revoke(key, only).await;
        self.promotion.revoke(key, only).await;
    }

    /// The heads in these tiers, each asked only for the keys that the tiers before it missed.
    async fn heads_of(
        &self,
        tiers: &[Arc<TierState>],
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

    /// Removes the object from all tiers: the failures, and true if any tier had it.
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

/// The first failure; must have one.
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
        for tier in self.tiers.iter().skip(self.first_shared) {
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
        for tier in &self.tiers {
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
        self.heads_of(&self.tiers, keys).await
    }

    async fn delete(&self, key: &ContentKey) -> Result<bool, EcError> {
        match self.remove(key, Op::Delete).await {
            (failed, Some(found)) if failed.is_empty() => Ok(found),
            (failed, _) => Err(first(failed, Op::Delete)),
        }
    }

    /// An unavailable tier keeps its copy, which is quarantined when it is read.
    async fn quarantine(&self, key: &ContentKey) -> Result<bool, EcError> {
        let (failed, found) = self.remove(key, Op::Quarantine).await;
        found.ok_or_else(|| first(failed, Op::Quarantine))
    }

    async fn disown(&self, key: &ContentKey, object: &Bytes) -> Result<bool, EcError> {
        self.stop_copies(key, Some(object)).await;
        let (mut failed, mut found) = (Vec::new(), false);
        for tier in &self.tiers {
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

    /// Succeeds if one shared tier answers.
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

    /// Waits in the tier with the leases, and polls the tiers before it, which may have the object first.
    async fn wait(&self, key: &ContentKey, patience: Duration) -> Result<Option<EncodedItem>, EcError> {
        let Some(tier) = self.lease_tiers().next() else { return Ok(None) };
        // Later tiers get copies of it, and polls of some of them are billed.
        let asking = poll::poll_head(patience, || async {
            self.heads_of(&self.tiers[..=tier.tier_idx], std::slice::from_ref(key)).await
        });
        if let Some(Some(item)) = self.heads(std::slice::from_ref(key)).await?.pop() {
            return Ok(Some(item));
        }
        let notified = tier.store.wait(key, patience);
        tokio::pin!(asking);
        tokio::select! {
            found = &mut asking => found,
            answer = notified => match answer {
                Ok(Some(item)) => Ok(Some(item)),
                // The encoder finished or gave up, so the state is final.
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
                "write-behind copies not written in time; their objects are encoded again when needed"
            );
            return false;
        }
        let left = until.saturating_duration_since(Instant::now());
        join_all(self.tiers.iter().map(|tier| tier.store.flush(left))).await.into_iter().all(|done| done)
    }
}
