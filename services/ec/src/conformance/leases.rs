//! The cases about leases and waiting.

use super::samples::{fresh_key, put, sample_output};
use crate::error::EcError;
use crate::store::lease::{Acquired, EncodeLease};
use crate::store::{EcStore, Op};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Outlives any case.
const LONG: Duration = Duration::from_secs(300);
/// Ends while a case waits.
const SHORT: Duration = Duration::from_millis(250);
/// Two clocks, of the store and of this process, may round differently.
const ROUNDING: Duration = Duration::from_millis(20);

async fn granted(store: &dyn EcStore, key: &triptych_core::ContentKey, ttl: Duration) -> EncodeLease {
    match store.acquire(key, ttl).await.expect("a store with leases answers") {
        Acquired::Granted(lease) => {
            assert_eq!(lease.key, *key);
            assert_ne!(lease.token, 0);
            lease
        }
        Acquired::Held { left } => panic!("held for {left:?}, though nobody has it"),
    }
}

pub(super) async fn unsupported(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    let lease = EncodeLease { key, token: 1 };
    let refused = |result: Result<(), EcError>| {
        let e = result.expect_err("it has no leases");
        assert!(matches!(e, EcError::Unsupported { op: Op::Lease, .. }), "{e:?}");
    };
    refused(store.acquire(&key, LONG).await.map(drop));
    refused(store.renew(&lease, LONG).await.map(drop));
    refused(store.release(&lease).await.map(drop));
}

pub(super) async fn one_holder(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    let mut askers = JoinSet::new();
    for _ in 0..16 {
        let store = store.clone();
        askers.spawn(async move { store.acquire(&key, LONG).await.expect("it answers") });
    }
    let mut leases = Vec::new();
    while let Some(asked) = askers.join_next().await {
        match asked.expect("no asker panics") {
            Acquired::Granted(lease) => leases.push(lease),
            Acquired::Held { left } => assert!(!left.is_zero() && left <= LONG, "held for {left:?}"),
        }
    }
    assert_eq!(leases.len(), 1, "one of sixteen holds the key");
    let other = granted(&*store, &fresh_key(), LONG).await;
    assert!(store.release(&other).await.unwrap(), "another key is another lease");
    let stranger = EncodeLease { token: leases[0].token + 1, ..leases[0] };
    assert!(!store.renew(&stranger, LONG).await.unwrap());
    assert!(!store.release(&stranger).await.unwrap());
    assert!(matches!(store.acquire(&key, LONG).await.unwrap(), Acquired::Held { .. }));
    assert!(store.release(&leases[0]).await.unwrap());
    assert!(!store.release(&leases[0]).await.unwrap(), "it was given back");
    assert!(!store.renew(&leases[0], LONG).await.unwrap());
    let next = granted(&*store, &key, LONG).await;
    assert!(next.token > leases[0].token, "{} after {}", next.token, leases[0].token);
    assert!(store.release(&next).await.unwrap());
}

pub(super) async fn expiry(store: Arc<dyn EcStore>) {
    let (key, start) = (fresh_key(), Instant::now());
    let first = granted(&*store, &key, SHORT).await;
    let second = loop {
        match store.acquire(&key, LONG).await.unwrap() {
            Acquired::Granted(lease) => break lease,
            Acquired::Held { left } => {
                assert!(left <= SHORT + ROUNDING, "held for {left:?} of {SHORT:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    assert!(start.elapsed() + ROUNDING >= SHORT, "it ended after {:?} of {SHORT:?}", start.elapsed());
    assert!(second.token > first.token, "{} after {}", second.token, first.token);
    assert!(!store.renew(&first, LONG).await.unwrap(), "what ended cannot be kept");
    assert!(!store.release(&first).await.unwrap(), "what is another's cannot be given back");
    assert!(matches!(store.acquire(&key, LONG).await.unwrap(), Acquired::Held { .. }));
    assert!(store.release(&second).await.unwrap());
}

pub(super) async fn renewal(store: Arc<dyn EcStore>) {
    let key = fresh_key();
    // A machine that is busy for longer than the lease lasts makes it end before it is kept; then once more.
    let lease = loop {
        let lease = granted(&*store, &key, SHORT).await;
        if store.renew(&lease, LONG).await.unwrap() {
            break lease;
        }
    };
    tokio::time::sleep(SHORT + ROUNDING).await;
    match store.acquire(&key, LONG).await.unwrap() {
        Acquired::Held { left } => assert!(left > SHORT, "{left:?} left of {LONG:?}"),
        Acquired::Granted(lease) => panic!("{lease:?} was granted while another was kept"),
    }
    assert!(store.release(&lease).await.unwrap());
}

pub(super) async fn waiting(store: Arc<dyn EcStore>, leases: bool) {
    let output = sample_output(fresh_key(), 3 << 10);
    let key = output.item().key;
    let lease = if leases { Some(granted(&*store, &key, LONG).await) } else { None };
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move { store.wait(&key, LONG).await.expect("waiting is no failure") })
        })
        .collect();
    tokio::task::yield_now().await;
    put(&*store, &output).await;
    for waiter in waiters {
        let answer = waiter.await.expect("no waiter panics");
        if leases {
            assert_eq!(answer.as_ref(), Some(output.item()), "a put wakes who waits");
        }
    }
    let answer = store.wait(&key, LONG).await.unwrap();
    assert_eq!(answer.as_ref(), Some(output.item()), "what is there is not waited for");
    if let Some(lease) = lease {
        assert!(store.release(&lease).await.unwrap());
    }
}

/// A wait ends with `patience` if nobody encodes the item; `None` may come early when the encoder gives up.
pub(super) async fn patience(store: Arc<dyn EcStore>, leases: bool) {
    let key = fresh_key();
    assert_eq!(store.wait(&key, SHORT).await.unwrap(), None);
    if leases {
        let lease = granted(&*store, &key, LONG).await;
        assert_eq!(store.wait(&key, SHORT).await.unwrap(), None);
        let waiter = {
            let store = store.clone();
            tokio::spawn(async move { store.wait(&key, 4 * SHORT).await.expect("waiting is no failure") })
        };
        tokio::task::yield_now().await;
        assert!(store.release(&lease).await.unwrap());
        assert_eq!(waiter.await.expect("no waiter panics"), None, "who gives up wakes who waits");
    }
}
