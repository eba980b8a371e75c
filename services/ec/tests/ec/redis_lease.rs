//! Leases, waiting and lists in Redis.

use redis::Commands;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use triptych_ec::conformance::{fresh_key, sample_output};
use triptych_ec::object::encode;
use triptych_ec::store::lease::{Acquired, EncodeLease};
use triptych_ec::store::redis::RedisStore;
use triptych_ec::testing::{RedisCluster, RedisSentinel, RedisServer};
use triptych_ec::{EcStore, PutOutcome};

use crate::redis_forms::store;
use crate::{LIMIT, key};

const LONG: Duration = Duration::from_secs(600);

async fn granted(store: &RedisStore, n: u8) -> EncodeLease {
    match store.acquire(&key(n), LONG).await.unwrap() {
        Acquired::Granted(lease) => lease,
        Acquired::Held { left } => panic!("held for {left:?}"),
    }
}

/// In every form, since scripts and their keys are routed differently.
#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_one_holders_and_tokens_grow_in_every_form() {
    let (server, sentinel, cluster) = (
        RedisServer::start(),
        RedisSentinel::start().without_failover(),
        RedisCluster::start().without_failover(),
    );
    for url in [server.url(), sentinel.url(), cluster.url()] {
        let (a, b) = (store(&url), store(&url));
        let first = granted(&a, 1).await;
        let Acquired::Held { left } = b.acquire(&key(1), LONG).await.unwrap() else { panic!("it is held") };
        assert!(left > LONG / 2 && left <= LONG, "{left:?}");
        assert!(a.renew(&first, LONG).await.unwrap());
        assert!(a.release(&first).await.unwrap());
        assert!(!a.renew(&first, LONG).await.unwrap());
        assert!(!a.release(&first).await.unwrap());
        let second = granted(&b, 1).await;
        assert!(second.token > first.token);
        assert!(!a.release(&first).await.unwrap(), "what is another's stays");
        assert!(matches!(a.acquire(&key(1), LONG).await.unwrap(), Acquired::Held { .. }));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_many_concurrent_callers_one_is_granted_the_lease() {
    let cluster = RedisCluster::start().without_failover();
    let store = Arc::new(store(&cluster.url()));
    let mut n_granted = 0;
    let mut askers = Vec::new();
    for _ in 0..16 {
        let store = store.clone();
        askers.push(tokio::spawn(async move { store.acquire(&key(1), LONG).await.unwrap() }));
    }
    for asker in askers {
        n_granted += usize::from(matches!(asker.await.unwrap(), Acquired::Granted(_)));
    }
    assert_eq!(n_granted, 1);
}

#[tokio::test]
async fn a_lease_ends_by_itself_and_the_token_grows_even_if_the_fence_is_lost() {
    let server = RedisServer::start();
    let store = store(&server.url());
    let Acquired::Granted(first) = store.acquire(&key(1), Duration::from_millis(50)).await.unwrap() else {
        panic!("it is free")
    };
    let until = Instant::now() + LIMIT;
    while matches!(store.acquire(&key(1), Duration::from_millis(1)).await.unwrap(), Acquired::Held { .. }) {
        assert!(Instant::now() < until);
        sleep(Duration::from_millis(5)).await;
    }
    assert!(!store.renew(&first, LONG).await.unwrap());
    redis::Client::open(server.url()).unwrap().get_connection().unwrap().flushall::<()>().unwrap();
    assert!(granted(&store, 1).await.token > first.token);
}

#[tokio::test]
async fn values_of_others_under_a_leases_keys_are_overwritten_or_an_error() {
    let server = RedisServer::start();
    let store = store(&server.url());
    let mut by_hand = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let name = RedisStore::manifest_key(&key(1));
    // A lease that never ends would keep its item from being encoded for ever.
    by_hand.set::<_, _, ()>(format!("{name}:lease"), "hello").unwrap();
    by_hand.set::<_, _, ()>(format!("{name}:fence"), "hello").unwrap();
    let lease = granted(&store, 1).await;
    assert!(store.release(&lease).await.unwrap());
    by_hand.set::<_, _, ()>(format!("{name}:fence"), "99999999999999999999999999").unwrap();
    assert!(store.acquire(&key(1), LONG).await.is_err(), "no token is that large");
    let other = RedisStore::manifest_key(&key(2));
    by_hand.rpush::<_, _, ()>(format!("{other}:lease"), "hello").unwrap();
    assert!(store.acquire(&key(2), LONG).await.is_err());
}

/// The waiter's questions are far apart while it is subscribed, so that what wakes it in time is the message.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_woken_by_a_put_and_by_a_release_in_every_topology() {
    let (server, sentinel, cluster) = (
        RedisServer::start(),
        RedisSentinel::start().without_failover(),
        RedisCluster::start().without_failover(),
    );
    for url in [server.url(), sentinel.url(), cluster.url()] {
        let (holder, waiter) = (store(&url), Arc::new(store(&url)));
        let lease = granted(&holder, 1).await;
        let wait = || {
            let waiter = waiter.clone();
            tokio::spawn(async move { waiter.wait(&key(1), LIMIT).await.unwrap() })
        };
        let waiting = wait();
        let output = sample_output(key(1), 5 << 18);
        assert_eq!(holder.put_if_absent(&key(1), encode(&output)).await.unwrap(), PutOutcome::Stored);
        assert_eq!(waiting.await.unwrap().as_ref(), Some(output.item()));
        holder.delete(&key(1)).await.unwrap();
        let waiting = wait();
        assert!(holder.release(&lease).await.unwrap());
        assert_eq!(waiting.await.unwrap(), None);
        assert_eq!(waiter.wait(&key(1), LIMIT).await.unwrap(), None, "nobody makes it");
    }
}

#[tokio::test]
async fn a_waiter_for_a_dead_holder_returns_when_the_lease_expires() {
    let server = RedisServer::start();
    let store = store(&server.url());
    store.acquire(&key(1), Duration::from_millis(200)).await.unwrap();
    let started = Instant::now();
    assert_eq!(store.wait(&key(1), LIMIT).await.unwrap(), None);
    assert!(started.elapsed() < LIMIT / 2);
    store.acquire(&key(1), LONG).await.unwrap();
    assert_eq!(store.wait(&key(1), Duration::from_millis(20)).await.unwrap(), None, "patience is over");
}

#[tokio::test]
async fn a_list_is_in_order_and_of_objects_only() {
    let server = RedisServer::start();
    let store = store(&server.url());
    assert_eq!(store.list(None, 10).await.unwrap(), []);
    let mut keys: Vec<_> = (0..9).map(|_| fresh_key()).collect();
    let mut by_hand = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    for (i, key) in keys.iter().enumerate() {
        let object = encode(&sample_output(*key, i << 18));
        store.put_if_absent(key, object).await.unwrap();
        store.acquire(key, LONG).await.unwrap();
    }
    for name in ["triptych:ec:{nothex}", "triptych:ec:{}", "other"] {
        by_hand.set::<_, _, ()>(name, "hello").unwrap();
    }
    by_hand.set::<_, _, ()>(RedisStore::manifest_key(&key(255)), "no manifest").unwrap();
    by_hand.rpush::<_, _, ()>(RedisStore::manifest_key(&key(254)), "no string").unwrap();
    let lens: std::collections::BTreeMap<_, _> = keys
        .iter()
        .enumerate()
        .map(|(i, key)| (*key, encode(&sample_output(*key, i << 18)).len() as u64))
        .collect();
    keys.sort();
    let first = store.list(None, 4).await.unwrap();
    assert_eq!(first.iter().map(|l| l.key).collect::<Vec<_>>(), keys[..4]);
    let rest = store.list(Some(&keys[3]), 100).await.unwrap();
    assert_eq!(rest.iter().map(|l| l.key).collect::<Vec<_>>(), keys[4..]);
    assert!(first.iter().chain(&rest).all(|l| lens[&l.key] == l.len));
    assert_eq!(store.list(Some(&keys[8]), 100).await.unwrap(), []);
    assert_eq!(store.list(None, 0).await.unwrap(), []);
}
