//! A primary dies, or hangs, under load: every operation ends in time, what is lost is a miss, and afterwards objects
//! can be put and read again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};
use triptych_ec::conformance::{fresh_key, limits, sample_output};
use triptych_ec::error::chain;
use triptych_ec::object::{decode, encode};
use triptych_ec::store::redis::{RedisStore, RedisTuning};
use triptych_ec::testing::{RedisCluster, RedisSentinel};
use triptych_ec::{EcError, EcStore, PutOutcome};

use crate::LIMIT;

/// No operation takes longer with the default settings, and a busy machine.
const OPERATION_LIMIT: Duration = Duration::from_secs(40);
const N_CALLERS: usize = 4;

fn store(url: &str) -> Arc<RedisStore> {
    Arc::new(RedisStore::new(url, RedisTuning::default(), &limits()).unwrap())
}

async fn in_time<T>(op: impl Future<Output = Result<T, EcError>>) -> Option<T> {
    let outcome = timeout(OPERATION_LIMIT, op).await.expect("every operation ends in time");
    outcome.map_err(|e| assert!(e.is_retryable(), "{}", chain(&e))).ok()
}

/// Puts, looks and reads until it is told to stop; counts the rounds in which everything worked.
async fn call(store: Arc<RedisStore>, stop: Arc<AtomicBool>, n_whole: Arc<AtomicUsize>) {
    while !stop.load(Ordering::Relaxed) {
        let output = sample_output(fresh_key(), 5 << 18);
        let key = output.item().key;
        let put = in_time(store.put_if_absent(&key, encode(&output))).await;
        let heads = in_time(store.heads(&[key, fresh_key()])).await;
        let got = in_time(store.get(&key)).await;
        if let Some(Some(object)) = &got {
            decode(object.clone(), &key, &limits()).expect("what is read is whole");
        }
        let is_there = heads.is_some_and(|heads| heads[0].is_some() && heads[1].is_none());
        if put == Some(PutOutcome::Stored) && is_there && matches!(got, Some(Some(_))) {
            n_whole.fetch_add(1, Ordering::Relaxed);
        } else {
            // Without it, refused connections make a loop that keeps the machine from failing over.
            sleep(Duration::from_millis(20)).await;
        }
        in_time(store.delete(&key)).await;
    }
}

async fn until_rounds(n_whole: &AtomicUsize, n: usize, when: &str) {
    let until = Instant::now() + LIMIT;
    while n_whole.load(Ordering::Relaxed) < n {
        assert!(Instant::now() < until, "{when}: {} rounds of {n}", n_whole.load(Ordering::Relaxed));
        sleep(Duration::from_millis(10)).await;
    }
}

/// Breaks something under load, and waits until everything works again.
async fn survives<T: Send + 'static>(
    mut servers: T,
    url: &str,
    break_it: impl FnOnce(&mut T) + Send + 'static,
) {
    let (store, stop, n_whole) =
        (store(url), Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let kept = sample_output(fresh_key(), 5 << 18);
    let key = kept.item().key;
    store.put_if_absent(&key, encode(&kept)).await.unwrap();
    let mut callers = JoinSet::new();
    for _ in 0..N_CALLERS {
        callers.spawn(call(store.clone(), stop.clone(), n_whole.clone()));
    }
    until_rounds(&n_whole, 8, "before").await;
    let servers = tokio::task::spawn_blocking(move || {
        break_it(&mut servers);
        servers
    });
    let servers = servers.await.unwrap();
    let before = n_whole.load(Ordering::Relaxed);
    // More than were on their way: some of these rounds began after it.
    until_rounds(&n_whole, before + 4 * N_CALLERS, "after").await;
    stop.store(true, Ordering::Relaxed);
    while let Some(caller) = callers.join_next().await {
        caller.expect("no caller sees anything but a miss or a retryable error");
    }
    if let Some(Some(object)) = in_time(store.get(&key)).await {
        decode(object, &key, &limits()).expect("what outlived it is whole");
    }
    drop(servers);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_behind_sentinels_is_killed() {
    let sentinel = RedisSentinel::start();
    let url = sentinel.url();
    survives(sentinel, &url, |sentinel| {
        let dead = sentinel.kill_primary();
        sentinel.wait_for_another_than(dead);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_behind_sentinels_hangs_and_comes_back_as_a_replica() {
    let sentinel = RedisSentinel::start();
    let url = sentinel.url();
    survives(sentinel, &url, |sentinel| {
        let hung = sentinel.primary();
        sentinel.server(hung).pause();
        sentinel.wait_for_another_than(hung);
        sentinel.server(hung).resume();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_of_a_cluster_is_killed() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    survives(cluster, &url, |cluster| {
        let dead = cluster.kill_primary();
        cluster.wait_for_another_than(dead);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_primary_of_a_cluster_hangs_for_good() {
    let cluster = RedisCluster::start();
    let url = cluster.url();
    survives(cluster, &url, |cluster| {
        let hung = cluster.primary_of("");
        cluster.node(hung).pause();
        cluster.wait_for_another_than(hung);
    })
    .await;
}

/// Primary and replica: nobody takes over.
#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_that_lost_a_node_answers_for_the_others_or_is_unavailable() {
    let mut cluster = RedisCluster::start();
    let store = store(&cluster.url());
    let keys: Vec<_> = (0..24).map(|_| fresh_key()).collect();
    for key in &keys {
        store.put_if_absent(key, encode(&sample_output(*key, 64))).await.unwrap();
    }
    cluster.kill_with_replica(&RedisStore::manifest_key(&keys[0]));
    let started = Instant::now();
    for _ in 0..3 {
        if let Some(heads) = in_time(store.heads(&keys)).await {
            assert!(heads[0].is_none(), "nobody has it any more");
        }
        assert!(in_time(store.get(&keys[0])).await.flatten().is_none());
    }
    assert!(started.elapsed() < LIMIT);
}

/// The nodes that are well answer in their usual time while another one hangs.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_hangs_does_not_hold_up_the_others() {
    let mut cluster = RedisCluster::start().without_failover();
    let tuning = RedisTuning { response_timeout: Duration::from_secs(20), ..RedisTuning::default() };
    let store = Arc::new(RedisStore::new(&cluster.url(), tuning, &limits()).unwrap());
    let keys: Vec<_> = (0..24).map(|_| fresh_key()).collect();
    for key in &keys {
        store.put_if_absent(key, encode(&sample_output(*key, 64))).await.unwrap();
    }
    let hung = cluster.primary_of(&RedisStore::manifest_key(&keys[0]));
    cluster.node(hung).pause();
    let waiting = tokio::spawn({
        let (store, key) = (store.clone(), keys[0]);
        async move { store.get(&key).await }
    });
    let mut n_well = 0;
    for key in keys.iter().filter(|key| cluster.primary_of(&RedisStore::manifest_key(key)) != hung) {
        assert!(store.get(key).await.unwrap().is_some());
        n_well += 1;
    }
    assert!(n_well > 0 && !waiting.is_finished(), "{n_well} were read while one waited for the hung node");
    cluster.node(hung).resume();
    assert!(waiting.await.unwrap().unwrap().is_some());
}
