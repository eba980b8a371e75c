//! Stores behind a circuit breaker: the conformance suite, a Redis that hangs, and calls that end late.

use bytes::Bytes;
use futures::future::join_all;
use std::sync::Arc;
use std::time::Duration;
use triptych_core::Backoff;
use triptych_ec::breaker::{BreakerState, BreakerTuning};
use triptych_ec::conformance::{self, fresh_key, limits, sample_output};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::guarded::Guarded;
use triptych_ec::metered::NoObserver;
use triptych_ec::object::encode;
use triptych_ec::store::Op;
use triptych_ec::store::lease::Acquired;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::redis::{RedisStore, RedisTuning};
use triptych_ec::testing::RedisServer;
use triptych_ec::{EcError, EcStore};

use crate::{LIMIT, key};

/// Callers at the same time.
const N_CALLERS: usize = 64;
const HOUR: Duration = Duration::from_secs(3600);

/// A guarded store that counts the calls which reach it.
fn guarded(store: Arc<dyn EcStore>, tuning: BreakerTuning) -> (Guarded, Faults) {
    let faults = Faults::default();
    let counted = Arc::new(Faulty::new(store, faults.clone()));
    (Guarded::new(counted, tuning, Arc::new(NoObserver)), faults)
}

fn memory() -> Arc<dyn EcStore> {
    Arc::new(MemoryStore::new(64 << 20, &limits()))
}

/// Redis behind a breaker that stays open for `open`, once it answered.
async fn redis(server: &RedisServer, open: Duration) -> (Guarded, Faults) {
    let redis = Arc::new(RedisStore::new(&server.url(), RedisTuning::default(), &limits()).unwrap());
    redis.put_if_absent(&key(1), encode(&sample_output(key(1), 64))).await.unwrap();
    let open = Backoff::new(open, open);
    let tuning = BreakerTuning { open, answer_timeout: Duration::from_secs(2), ..BreakerTuning::default() };
    let (store, calls) = guarded(redis, tuning);
    store.heads(&[key(1)]).await.unwrap();
    (store, calls)
}

fn n_calls(calls: &Faults) -> usize {
    [Op::Put, Op::Get, Op::Heads, Op::Ping, Op::Lease, Op::Wait].map(|op| calls.n_calls(op)).iter().sum()
}

fn is_refused<T>(result: Result<T, EcError>) -> bool {
    matches!(result, Err(EcError::CircuitOpen { .. }))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guarded_store_conforms() {
    conformance::run(Arc::new(guarded(memory(), BreakerTuning::default()).0)).await;
}

#[tokio::test]
async fn a_redis_that_hangs_costs_one_timeout_and_then_every_call_is_refused_at_once() {
    let server = RedisServer::start();
    let (store, calls) = redis(&server, HOUR).await;
    server.pause();
    let first = store.heads(&[key(1)]).await;
    assert!(matches!(first, Err(EcError::TimedOut { .. })), "{first:?}");
    assert_eq!(store.state(), BreakerState::Open);
    let before = n_calls(&calls);
    let object = encode(&sample_output(key(2), 64));
    for _ in 0..N_CALLERS {
        assert!(is_refused(store.heads(&[key(1)]).await));
        assert!(is_refused(store.get(&key(1)).await));
        assert!(is_refused(store.put_if_absent(&key(2), object.clone()).await));
        assert!(is_refused(store.acquire(&key(2), HOUR).await));
        assert!(is_refused(store.wait(&key(2), HOUR).await));
        assert!(is_refused(store.ping().await));
    }
    assert_eq!(n_calls(&calls), before, "none of them reached the store");
    server.resume();
}

#[tokio::test]
async fn of_concurrent_calls_to_a_redis_that_hangs_one_probes_and_it_is_found_back_within_three() {
    let server = RedisServer::start();
    let (store, calls) = redis(&server, Duration::ZERO).await;
    server.pause();
    store.heads(&[key(1)]).await.unwrap_err();
    for _ in 0..2 {
        let before = n_calls(&calls);
        let keys = [key(1)];
        let ends = join_all((0..N_CALLERS).map(|_| store.heads(&keys))).await;
        let n_refused =
            ends.into_iter().filter(|end| matches!(end, Err(EcError::CircuitOpen { .. }))).count();
        assert_eq!(n_refused, N_CALLERS - 1, "all but the one that probes");
        assert_eq!(n_calls(&calls), before + 1);
    }
    server.resume();
    let before = n_calls(&calls);
    let found = async { while store.heads(&[key(1)]).await.is_err() {} };
    tokio::time::timeout(LIMIT, found).await.expect("it answers again");
    assert_eq!(store.state(), BreakerState::Closed);
    // The last one is the call itself.
    assert!(n_calls(&calls) - before <= 3 + 1, "{} calls", n_calls(&calls) - before);
}

#[tokio::test(start_paused = true)]
async fn a_lease_that_is_granted_too_late_is_released() {
    let (store, faults) = guarded(memory(), BreakerTuning::default());
    faults.queue(Op::Lease, Fault::Latency(Duration::from_secs(1)));
    let e = store.acquire(&key(1), HOUR).await.unwrap_err();
    assert!(matches!(e, EcError::TimedOut { .. }), "{e:?}");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(matches!(store.acquire(&key(1), HOUR).await.unwrap(), Acquired::Granted(_)));
}

#[tokio::test(start_paused = true)]
async fn a_large_object_that_takes_long_opens_nothing_and_one_given_up_on_a_silent_store_does() {
    let (store, faults) = guarded(memory(), BreakerTuning::default());
    let object: Bytes = encode(&sample_output(key(1), 64));
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    faults.queue(Op::Get, Fault::Latency(Duration::from_secs(20)));
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object));
    for (patience, state) in [(1, BreakerState::Closed), (3, BreakerState::Open)] {
        faults.queue(Op::Get, Fault::Hang);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let given_up = tokio::time::timeout(Duration::from_secs(patience), store.get(&key(1))).await;
        assert!(given_up.is_err());
        assert_eq!(store.state(), state, "after {patience} s");
    }
}

/// A probe asks for one head, whatever the call is.
#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_lists_is_found_back_by_a_lookup() {
    let (store, faults) = guarded(memory(), BreakerTuning::default());
    faults.stand(Op::Ping, Fault::Error);
    for _ in 0..3 {
        store.ping().await.unwrap_err();
    }
    assert_eq!(store.state(), BreakerState::Open);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(store.get(&fresh_key()).await.unwrap(), None);
    assert_eq!(store.state(), BreakerState::Closed);
    assert_eq!((faults.n_calls(Op::Heads), faults.n_calls(Op::Get)), (1, 1));
}
