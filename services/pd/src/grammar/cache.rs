//! Outcomes of compilations by the hash of tenant and constraint; the least recently used is evicted first.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use triptych_core::sampling::Constraint;
use triptych_core::{Failure, FailureClass, TenantId};
use triptych_engine::constraint::CompiledConstraint;

/// Most outcomes that are kept, refusals included.
const MAX_ENTRIES: usize = 256;
/// Most bytes of compiled grammars that are kept, as their trials measured them.
const MAX_BYTES: u64 = 256 << 20;

/// Outcome of a compilation, for every request that asks for it.
pub type Outcome = Result<Compiled, Failure>;

/// A compiled constraint, before any token.
#[derive(Clone)]
pub struct Compiled {
    constraint: Arc<Mutex<CompiledConstraint>>,
    /// Memory that it takes, as its trial measured it, in bytes.
    n_bytes: u64,
}

impl Compiled {
    pub fn new(constraint: CompiledConstraint, n_bytes: u64) -> Self {
        Self { constraint: Arc::new(Mutex::new(constraint)), n_bytes }
    }

    /// A copy for one request, which shares nothing with others.
    pub fn fork(&self) -> CompiledConstraint {
        self.constraint.lock().fork()
    }
}

/// BLAKE3 over all that an outcome depends on, and the tenant, who learns nothing of another's constraints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct CacheKey([u8; 32]);

impl CacheKey {
    pub fn new(constraint: &Constraint, tenant: TenantId) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(tenant.as_bytes());
        let mut part = |bytes: &[u8]| {
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(constraint.field().as_bytes());
        match constraint {
            Constraint::JsonObject => {}
            Constraint::JsonSchema(text) | Constraint::Regex(text) | Constraint::Grammar(text) => {
                part(text.as_bytes());
            }
            Constraint::Choice(choices) => choices.iter().for_each(|choice| part(choice.as_bytes())),
        }
        Self(*hash.finalize().as_bytes())
    }
}

struct Entry {
    outcome: Outcome,
    last_used: u64,
}

/// Outcomes within bounds on their number and bytes.
#[derive(Default)]
pub(super) struct OutcomeCache {
    entries: HashMap<CacheKey, Entry>,
    /// Uses so far, as the time of eviction.
    n_uses: u64,
}

impl OutcomeCache {
    /// The outcome of an equal constraint, which is then the most recently used.
    pub fn get(&mut self, key: &CacheKey) -> Option<Outcome> {
        self.n_uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.last_used = self.n_uses;
        Some(entry.outcome.clone())
    }

    /// Adds an outcome, unless it is a failure that says nothing of the constraint.
    pub fn insert(&mut self, key: CacheKey, outcome: &Outcome) {
        if outcome.as_ref().is_err_and(|failure| failure.class != FailureClass::InvalidArgument) {
            return;
        }
        self.n_uses += 1;
        self.entries.insert(key, Entry { outcome: outcome.clone(), last_used: self.n_uses });
        while self.is_over() && self.evict() {}
    }

    fn is_over(&self) -> bool {
        let compiled = self.entries.values().filter_map(|entry| entry.outcome.as_ref().ok());
        let n_bytes = compiled.map(|compiled| compiled.n_bytes).fold(0, u64::saturating_add);
        self.entries.len() > MAX_ENTRIES || n_bytes > MAX_BYTES
    }

    /// False: there is nothing.
    fn evict(&mut self) -> bool {
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_used).map(|(key, _)| *key);
        oldest.and_then(|key| self.entries.remove(&key)).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> CacheKey {
        CacheKey::new(&Constraint::Regex(text.into()), TenantId::SHARED)
    }

    #[test]
    fn a_key_depends_on_tenant_kind_and_every_text() {
        let choice =
            |texts: &[&str]| Constraint::Choice(texts.iter().map(|text| (*text).to_owned()).collect());
        let constraints = [
            Constraint::JsonObject,
            Constraint::Regex("ab".into()),
            Constraint::Grammar("ab".into()),
            choice(&["ab"]),
            choice(&["a", "b"]),
        ];
        let mut keys: Vec<_> = constraints.iter().map(|c| CacheKey::new(c, TenantId::SHARED).0).collect();
        keys.extend(constraints.iter().map(|c| CacheKey::new(c, TenantId::of(b"another")).0));
        keys.sort_unstable();
        keys.dedup();
        assert_eq!(keys.len(), 10);
    }

    #[test]
    fn refusals_are_kept_and_failures_of_the_worker_are_not() {
        let mut cache = OutcomeCache::default();
        cache.insert(key("refused"), &Err(Failure::invalid("too large")));
        cache.insert(key("failed"), &Err(Failure::unavailable("no process")));
        assert!(cache.get(&key("refused")).is_some());
        assert!(cache.get(&key("failed")).is_none());
    }

    #[test]
    fn the_least_recently_used_is_evicted() {
        let mut cache = OutcomeCache::default();
        for i in 0..MAX_ENTRIES {
            cache.insert(key(&i.to_string()), &Err(Failure::invalid("no")));
        }
        assert!(cache.get(&key("0")).is_some());
        cache.insert(key("one more"), &Err(Failure::invalid("no")));
        assert!(cache.get(&key("1")).is_none(), "evicted");
        assert!(cache.get(&key("0")).is_some() && cache.get(&key("one more")).is_some());
        assert_eq!(cache.entries.len(), MAX_ENTRIES);
    }
}
