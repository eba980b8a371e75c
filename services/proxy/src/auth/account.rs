//! Quotas of a tenant: requests and bytes a second, requests and bytes at once.
//!
//! A refusal names the quota, and the pause after which it has room. The number of accounts is bounded; idle ones are
//! evicted first. Requests with items leave a part of what may be held at once to the tenant's requests of text alone, which
//! would else be refused for as long as its images wait.

use super::rate::{RateBucket, RateExceeded};
use super::shared::{SharedQuotas, SharedTake};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use triptych_core::{Failure, FailureClass};
use triptych_ec::token_bucket::BucketSize;

/// Longest name of a tenant in bytes.
pub const MAX_TENANT_BYTES: usize = 256;
/// Largest number of accounts at the same time.
const MAX_ACCOUNTS: usize = 10_000;
/// Suggested pause where the time until there is room is unknown.
const SOON: Duration = Duration::from_secs(1);
/// Words for the rate of items that have to be encoded.
const NEW_ITEMS: &str = "KiB of new items a second";
/// Part of the requests and bytes at once that requests with items leave to others: an eighth.
const LEFT_FOR_TEXT: usize = 8;
/// Bytes up to which a request is one of text alone, as far as memory is counted.
const TEXT_BYTES: usize = 1 << 20;
/// Unit of the byte rates.
const KIB: usize = 1 << 10;

/// Limits of a tenant. `None`: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Quota {
    /// Requests started in a second.
    pub requests_per_s: Option<NonZeroU32>,
    /// KiB of items in a second, whether encoded or found.
    pub item_kib_per_s: Option<NonZeroU32>,
    /// KiB of items in a second that have to be encoded. Bounds what a tenant can push into the caches.
    pub encode_kib_per_s: Option<NonZeroU32>,
    /// Requests at once.
    pub in_flight: Option<NonZeroU32>,
    /// MiB of request bodies and fetched items in memory at once.
    pub body_mib: Option<NonZeroU32>,
}

/// Quota and usage of one tenant.
#[derive(Debug)]
pub struct Account {
    quota: Quota,
    requests: Option<RateBucket>,
    items: Option<RateBucket>,
    encodes: Option<RateBucket>,
    /// Rates that all proxies count together, and the tenant's name there; `None`: this proxy counts alone.
    shared: Option<(SharedQuotas, String)>,
    /// KiB of a body at most.
    largest: u32,
    n_in_flight: AtomicUsize,
    n_sessions: AtomicUsize,
    body_bytes: AtomicUsize,
}

impl Account {
    /// An account that has used nothing, of requests of at most `max_body_bytes`.
    pub fn new(quota: Quota, max_body_bytes: usize) -> Self {
        // A second's worth at once, and never less than one body may hold: what fits must not be refused for ever.
        let largest = kib(max_body_bytes);
        let bytes =
            |rate: NonZeroU32| RateBucket::new(rate, rate.max(NonZeroU32::new(largest).unwrap_or(rate)));
        Self {
            quota,
            requests: quota.requests_per_s.map(|rate| RateBucket::new(rate, rate)),
            items: quota.item_kib_per_s.map(bytes),
            encodes: quota.encode_kib_per_s.map(bytes),
            shared: None,
            largest,
            n_in_flight: AtomicUsize::new(0),
            n_sessions: AtomicUsize::new(0),
            body_bytes: AtomicUsize::new(0),
        }
    }

    /// The same with rates that all proxies count together.
    #[must_use]
    pub fn shared(self, quotas: SharedQuotas, tenant: &str) -> Self {
        Self { shared: Some((quotas, SharedQuotas::name_of(tenant))), ..self }
    }

    /// Counts a request in the rate of all proxies. To be asked after [`Self::enter`], or before.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub async fn enter_shared(&self) -> Result<(), Failure> {
        let size = self.quota.requests_per_s.map(|rate| (rate, rate.get()));
        self.take_shared("requests", size, (1, "requests a second")).await
    }

    async fn take_shared(
        &self,
        kind: &str,
        size: Option<(NonZeroU32, u32)>,
        (n, what): (u32, &str),
    ) -> Result<(), Failure> {
        let (Some((quotas, tenant)), Some((rate, most))) = (&self.shared, size) else { return Ok(()) };
        if n == 0 {
            return Ok(());
        }
        match quotas.take((tenant, kind), BucketSize { per_second: rate.get(), most }, n).await {
            SharedTake::Taken | SharedTake::Alone => Ok(()),
            SharedTake::RetryAfter(pause) => Err(over(what, rate.get() as usize, pause)),
        }
    }

    /// True if its rates are counted by all proxies together.
    pub fn is_shared(&self) -> bool {
        self.shared.is_some()
    }

    fn bytes_size(&self, rate: Option<NonZeroU32>) -> Option<(NonZeroU32, u32)> {
        rate.map(|rate| (rate, rate.get().max(self.largest)))
    }

    /// Takes a slot for a request.
    ///
    /// # Errors
    /// Overloaded, with the quota and a pause.
    pub fn enter(self: &Arc<Self>) -> Result<RequestSlot, Failure> {
        take(self.requests.as_ref(), 1, "requests a second", self.quota.requests_per_s)?;
        let limit = self.quota.in_flight.map_or(usize::MAX, |n| n.get() as usize);
        let entered = self
            .n_in_flight
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n.saturating_add(1)));
        match entered {
            Ok(_) => Ok(RequestSlot {
                account: Arc::clone(self),
                bytes: AtomicUsize::new(0),
                may_have_items: AtomicBool::new(false),
            }),
            Err(_) => Err(over("requests at once", limit, SOON)),
        }
    }

    /// Takes a place for a live transcription, of at most `limit` at once.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub fn enter_session(self: &Arc<Self>, limit: usize) -> Result<SessionPlace, Failure> {
        let entered = self
            .n_sessions
            .try_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < limit).then_some(n.saturating_add(1)));
        match entered {
            Ok(_) => Ok(SessionPlace(Arc::clone(self))),
            Err(_) => Err(over("live transcriptions at once", limit, SOON)),
        }
    }

    /// Counts bytes of items.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub async fn take_items(&self, bytes: usize) -> Result<(), Failure> {
        const WHAT: &str = "KiB of items a second";
        let rate = self.quota.item_kib_per_s;
        take(self.items.as_ref(), kib(bytes), WHAT, rate)?;
        self.take_shared("items", self.bytes_size(rate), (kib(bytes), WHAT)).await
    }

    /// Counts bytes of items that are not in the caches and have to be encoded.
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub fn take_encode(&self, bytes: usize) -> Result<(), Failure> {
        take(self.encodes.as_ref(), kib(bytes), NEW_ITEMS, self.quota.encode_kib_per_s)
    }

    /// The same in the rate of all proxies, after [`Self::take_encode`].
    ///
    /// # Errors
    /// As [`Self::enter`].
    pub async fn take_shared_encode(&self, bytes: usize) -> Result<(), Failure> {
        let size = self.bytes_size(self.quota.encode_kib_per_s);
        self.take_shared("encodes", size, (kib(bytes), NEW_ITEMS)).await
    }

    fn is_idle(&self) -> bool {
        self.n_in_flight.load(Ordering::Relaxed) == 0 && self.body_bytes.load(Ordering::Relaxed) == 0
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(KIB)).unwrap_or(u32::MAX)
}

fn take(rate: Option<&RateBucket>, n: u32, what: &str, limit: Option<NonZeroU32>) -> Result<(), Failure> {
    let limit = limit.map_or(0, NonZeroU32::get) as usize;
    match rate.map_or(Ok(()), |rate| rate.take(n)) {
        Ok(()) => Ok(()),
        Err(RateExceeded::RetryAfter(pause)) => Err(over(what, limit, pause)),
        Err(RateExceeded::NeverFits) => {
            let text = format!("{n} are more than this tenant may ever have at once of its {limit} {what}");
            Err(Failure::new(FailureClass::TooLarge, text))
        }
    }
}

fn over(what: &str, limit: usize, pause: Duration) -> Failure {
    let text = format!("this tenant is over its quota of {limit} {what}; try again");
    Failure::new(FailureClass::Overloaded, text).with_retry_after(pause)
}

/// A live transcription's place in its tenant's account. Dropping it gives it back.
#[derive(Debug)]
pub struct SessionPlace(Arc<Account>);

impl Drop for SessionPlace {
    fn drop(&mut self) {
        self.0.n_sessions.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A request's share of its tenant's account: one slot, and the bytes it holds. Dropping it releases both.
#[derive(Debug)]
pub struct RequestSlot {
    account: Arc<Account>,
    bytes: AtomicUsize,
    /// True once it may have items, as it then may to its end.
    may_have_items: AtomicBool,
}

impl RequestSlot {
    /// Asks whether the request may have items, which an encoder has to read.
    ///
    /// # Errors
    /// Overloaded, when only the places of requests without items are left.
    pub fn with_items(&self) -> Result<(), Failure> {
        let Some(limit) = self.account.quota.in_flight.map(|n| n.get() as usize) else { return Ok(()) };
        let most = limit - limit / LEFT_FOR_TEXT;
        let n_in_flight = self.account.n_in_flight.load(Ordering::Relaxed);
        if !self.may_have_items.load(Ordering::Relaxed) && n_in_flight > most {
            return Err(over("requests with images, audio or video at once", most, SOON));
        }
        self.may_have_items.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Counts bytes that the request holds in memory until its end. A large one leaves a part to small ones, unless it is the
    /// only one.
    ///
    /// # Errors
    /// Overloaded, with the quota and a pause.
    pub fn hold_bytes(&self, n: usize) -> Result<(), Failure> {
        let limit_mib = self.account.quota.body_mib.map(|mib| mib.get() as usize);
        let limit = limit_mib.map_or(usize::MAX, |mib| mib.saturating_mul(KIB * KIB));
        let own = self.bytes.load(Ordering::Relaxed);
        let left = if own.saturating_add(n) > TEXT_BYTES { limit / LEFT_FOR_TEXT } else { 0 };
        let held = &self.account.body_bytes;
        let taken = held.try_update(Ordering::Relaxed, Ordering::Relaxed, |held| {
            let most = if held > own { limit - left } else { limit };
            held.checked_add(n).filter(|sum| *sum <= most)
        });
        match taken {
            Ok(_) => {
                self.bytes.fetch_add(n, Ordering::Relaxed);
                Ok(())
            }
            Err(_) => Err(over("MiB in memory", limit_mib.unwrap_or(0), SOON)),
        }
    }
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.account.n_in_flight.fetch_sub(1, Ordering::Relaxed);
        self.account.body_bytes.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

/// The accounts of all tenants, at most [`MAX_ACCOUNTS`].
#[derive(Debug)]
pub struct Accounts {
    by_tenant: Mutex<HashMap<String, Arc<Account>>>,
    max_body_bytes: usize,
    /// Set once, before requests come.
    shared: OnceLock<SharedQuotas>,
}

impl Accounts {
    /// No accounts yet, of requests of at most `max_body_bytes`.
    pub fn new(max_body_bytes: usize) -> Self {
        Self { by_tenant: Mutex::default(), max_body_bytes, shared: OnceLock::new() }
    }

    /// Has all proxies count rates together from here on; later calls have no effect.
    pub fn share(&self, quotas: SharedQuotas) {
        let _ = self.shared.set(quotas);
    }

    /// The tenant's account. A changed quota starts a new one; requests of the old one end under the old quota.
    ///
    /// # Errors
    /// Overloaded if there are too many tenants at once.
    pub fn of(&self, tenant: &str, quota: Quota) -> Result<Arc<Account>, Failure> {
        let mut accounts = self.by_tenant.lock();
        if let Some(account) = accounts.get(tenant).filter(|account| account.quota == quota) {
            return Ok(Arc::clone(account));
        }
        if accounts.len() >= MAX_ACCOUNTS && !accounts.contains_key(tenant) {
            accounts.retain(|_, account| Arc::strong_count(account) > 1 || !account.is_idle());
            if accounts.len() >= MAX_ACCOUNTS {
                let text = format!("the server has {MAX_ACCOUNTS} active tenants, its limit; try again");
                return Err(Failure::new(FailureClass::Overloaded, text));
            }
        }
        let account = Account::new(quota, self.max_body_bytes);
        let account = Arc::new(match self.shared.get() {
            Some(shared) => account.shared(shared.clone(), tenant),
            None => account,
        });
        accounts.insert(tenant.to_owned(), Arc::clone(&account));
        Ok(account)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX_BODY: usize = 64 << 20;

    fn n(n: u32) -> Option<NonZeroU32> {
        NonZeroU32::new(n)
    }

    #[tokio::test(start_paused = true)]
    async fn each_refusal_names_the_quota_and_the_pause_after_which_it_has_room() {
        let quota = Quota { requests_per_s: n(2), in_flight: n(3), body_mib: n(1), ..Quota::default() };
        let account = Arc::new(Account::new(quota, MAX_BODY));
        let first = account.enter().unwrap();
        let _second = account.enter().unwrap();
        let failure = account.enter().unwrap_err();
        assert_eq!(failure.class, FailureClass::Overloaded);
        assert_eq!(failure.retry_after, Some(Duration::from_millis(500)));
        assert!(failure.message.contains("2 requests a second"), "{failure}");
        tokio::time::advance(Duration::from_secs(2)).await;
        let _third = account.enter().unwrap();
        let failure = account.enter().unwrap_err();
        assert!(failure.message.contains("3 requests at once"), "{failure}");
        first.hold_bytes(1 << 20).unwrap();
        assert!(first.hold_bytes(1).unwrap_err().message.contains("1 MiB in memory"));
        drop(first);
        tokio::time::advance(Duration::from_secs(2)).await;
        account.enter().unwrap().hold_bytes(1 << 20).unwrap();
        assert_eq!(account.body_bytes.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn requests_with_items_leave_a_part_to_those_of_text() {
        let quota = Quota { in_flight: n(8), body_mib: n(16), ..Quota::default() };
        let account = Arc::new(Account::new(quota, MAX_BODY));
        let mut slots: Vec<_> = (0..7).map(|_| account.enter().unwrap()).collect();
        slots.iter().for_each(|slot| slot.with_items().unwrap());
        let text = account.enter().unwrap();
        let failure = text.with_items().unwrap_err();
        assert!(failure.message.contains("7 requests with images"), "{failure}");
        assert!(slots[0].with_items().is_ok(), "what it was allowed it stays allowed");
        slots.drain(2..);
        slots[0].hold_bytes(14 << 20).unwrap();
        let failure = slots[1].hold_bytes(2 << 20).unwrap_err();
        assert!(failure.message.contains("16 MiB in memory"), "{failure}");
        text.hold_bytes(1 << 20).unwrap();
        drop((slots.remove(1), text));
        slots[0].hold_bytes(2 << 20).unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn encoded_items_have_a_rate_of_their_own_and_a_full_body_always_fits_once() {
        let account = Account::new(Quota { encode_kib_per_s: n(1024), ..Quota::default() }, MAX_BODY);
        assert!(account.take_items(usize::MAX / 2).await.is_ok());
        account.take_encode(MAX_BODY).unwrap();
        let failure = account.take_encode(2 << 20).unwrap_err();
        let pause = failure.retry_after.unwrap();
        assert!((Duration::from_millis(1999)..=Duration::from_secs(2)).contains(&pause), "{pause:?}");
        assert_eq!(account.take_encode(1 << 30).unwrap_err().class, FailureClass::TooLarge);
    }

    #[tokio::test]
    async fn accounts_are_bounded_and_idle_ones_are_evicted() {
        let accounts = Accounts::new(MAX_BODY);
        let slot = accounts.of("busy", Quota::default()).unwrap().enter().unwrap();
        for i in 1..MAX_ACCOUNTS {
            accounts.of(&format!("t{i}"), Quota::default()).unwrap();
        }
        accounts.of("one more", Quota::default()).unwrap();
        let kept = accounts.by_tenant.lock();
        assert!(kept.contains_key("busy") && kept.contains_key("one more") && kept.len() == 2);
        drop((kept, slot));
    }
}
