//! The memory store, and each decorator: the conformance suite, and what each adds.

use std::sync::{Arc, Mutex};
use std::time::Duration;
use triptych_core::limits::Limits;
use triptych_core::{Failure, FailureClass};
use triptych_ec::conformance::{self, sample_output};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::limit::{Bounds, Limited};
use triptych_ec::metered::{CacheTier, EcObserver, Metered, NoObserver, Operation};
use triptych_ec::object::{decode, encode};
use triptych_ec::retry::{RetryBudget, RetryPolicy, Retrying};
use triptych_ec::store::lease::Acquired;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::{Op, StoreKind};
use triptych_ec::{EcError, EcStore, PutOutcome};

use crate::key;

fn memory() -> Arc<dyn EcStore> {
    Arc::new(MemoryStore::new(64 << 20, &conformance::limits()))
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_conforms() {
    conformance::run(memory()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_decorator_conforms() {
    conformance::run(Arc::new(Metered::new(memory(), Arc::new(NoObserver)))).await;
    conformance::run(Arc::new(Retrying::new(memory(), RetryPolicy::default()))).await;
    conformance::run(Arc::new(Faulty::new(memory(), Faults::default()))).await;
    conformance::run(Arc::new(Limited::new(memory(), Bounds::default()))).await;
    let tight = Bounds { in_flight: 1, bytes: 1 << 20, read_bytes: 1 << 20, waiting: 64 };
    conformance::run(Arc::new(Limited::new(memory(), tight))).await;
}

/// As a role stacks them.
#[tokio::test(flavor = "multi_thread")]
async fn decorators_on_one_another_conform() {
    let limited = Arc::new(Limited::new(memory(), Bounds::default()));
    let retrying = Arc::new(Retrying::new(limited, RetryPolicy::default()));
    conformance::run(Arc::new(Metered::new(retrying, Arc::new(NoObserver)))).await;
}

#[tokio::test]
async fn operations_past_the_queue_are_refused_at_once_until_others_end() {
    let faults = Faults::default();
    let bounds = Bounds { in_flight: 1, waiting: 1, ..Bounds::default() };
    let store = Arc::new(Limited::new(Arc::new(Faulty::new(memory(), faults.clone())), bounds));
    faults.queue(Op::Get, Fault::Hang);
    let spawn = || {
        let store = store.clone();
        tokio::spawn(async move { store.get(&key(1)).await })
    };
    let (running, waiting) = (spawn(), spawn());
    while faults.n_calls(Op::Get) == 0 || store.get(&key(1)).await.is_ok() {
        tokio::task::yield_now().await;
    }
    let e = store.get(&key(1)).await.unwrap_err();
    assert!(matches!(e, EcError::Overloaded { limit: 1, op: Op::Get, .. }), "{e:?}");
    assert_eq!(Failure::from(&e).class, FailureClass::Overloaded);
    assert!(store.wait(&key(1), Duration::ZERO).await.is_ok(), "waiting is never held up");
    running.abort();
    assert_eq!(waiting.await.unwrap().unwrap(), None);
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn bytes_under_way_are_bounded_and_the_largest_still_passes() {
    let faults = Faults::default();
    faults.stand(Op::Put, Fault::Latency(Duration::from_secs(1)));
    let bounds = Bounds { bytes: 1 << 20, ..Bounds::default() };
    let store = Limited::new(Arc::new(Faulty::new(memory(), faults.clone())), bounds);
    let keys = [key(1), key(2), key(3)];
    let put = |n: u8, bytes: usize| store.put_if_absent(&keys[usize::from(n)], vec![n; bytes].into());
    let start = tokio::time::Instant::now();
    let (small, same, large) = tokio::join!(put(0, 600 << 10), put(1, 400 << 10), put(2, 3 << 20));
    assert!(small.is_ok() && same.is_ok() && large.is_ok());
    assert_eq!(start.elapsed(), Duration::from_secs(2), "two fit together, the third takes everything");
}

#[tokio::test]
async fn retries_are_a_fifth_of_the_operations_however_often_they_fail() {
    let faults = Faults::default();
    faults.stand(Op::Get, Fault::Error);
    let policy = RetryPolicy { first_pause: Duration::ZERO, ..RetryPolicy::default() };
    let store = Retrying::with_budget(
        Arc::new(Faulty::new(memory(), faults.clone())),
        policy,
        RetryBudget::new(10, 20),
    );
    for _ in 0..1000 {
        store.get(&key(1)).await.unwrap_err();
    }
    let retries = faults.n_calls(Op::Get) - 1000;
    assert!((200..=210).contains(&retries), "{retries} retries of 1000 operations, and ten at once");
}

/// Latency is no breach of the contract, and neither are failures behind retries.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_store_and_one_that_loses_answers_conform() {
    let faults = Faults::default();
    for op in [Op::Put, Op::Get, Op::Heads] {
        faults.stand(op, Fault::Latency(Duration::from_millis(1)));
    }
    conformance::run(Arc::new(Faulty::new(memory(), faults.clone()))).await;
    faults.clear();
    for op in [Op::Get, Op::Heads] {
        (0..5).for_each(|_| faults.queue(op, Fault::LostAnswer));
    }
    let policy = RetryPolicy { attempts: 6, first_pause: Duration::ZERO, ..RetryPolicy::default() };
    conformance::run(Arc::new(Retrying::new(Arc::new(Faulty::new(memory(), faults)), policy))).await;
}

#[tokio::test]
async fn memory_drops_the_least_recently_used_within_its_budget() {
    let store = MemoryStore::new(3 << 20, &Limits::default());
    for n in 1..=4 {
        if n == 4 {
            assert!(store.get(&key(1)).await.unwrap().is_some());
        }
        let outcome = store.put_if_absent(&key(n), encode(&sample_output(key(n), 1_000_000))).await;
        assert_eq!(outcome.unwrap(), PutOutcome::Stored);
    }
    assert_eq!(store.n_objects(), 3);
    assert!(store.used_bytes() <= 3 << 20);
    let there: Vec<bool> =
        store.heads(&[key(1), key(2), key(3), key(4)]).await.unwrap().iter().map(Option::is_some).collect();
    assert_eq!(there, [true, false, true, true]);
    let over = store.put_if_absent(&key(5), vec![0; (3 << 20) + 1].into()).await.unwrap_err();
    assert!(matches!(over, EcError::TooLarge { limit: 3_145_728, .. }));
    assert_eq!(Failure::from(over).class, FailureClass::TooLarge);
}

#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Notes {
    fn add(&self, note: String) {
        self.0.lock().unwrap().push(note);
    }
}

impl EcObserver for Notes {
    fn hit(&self, tier: CacheTier) {
        self.add(format!("hit {}", tier.as_str()));
    }
    fn miss(&self, tier: CacheTier) {
        self.add(format!("miss {}", tier.as_str()));
    }
    fn corrupt(&self, tier: CacheTier) {
        self.add(format!("corrupt {}", tier.as_str()));
    }
    fn published(&self, bytes: usize, _: Duration) {
        self.add(format!("published {bytes}"));
    }
    fn loaded(&self, bytes: usize, _: Duration) {
        self.add(format!("loaded {bytes}"));
    }
}

#[tokio::test]
async fn the_observer_receives_the_events() {
    let notes = Arc::new(Notes::default());
    let store = Metered::new(memory(), notes.clone());
    let object = encode(&sample_output(key(1), 64));
    store.get(&key(1)).await.unwrap();
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    store.heads(&[key(2), key(1)]).await.unwrap();
    store.get(&key(1)).await.unwrap();
    store.quarantine(&key(1)).await.unwrap();
    let n = object.len();
    let expect = [
        "miss memory".into(),
        format!("published {n}"),
        "miss memory".into(),
        "hit memory".into(),
        "hit memory".into(),
        format!("loaded {n}"),
        "corrupt memory".into(),
    ];
    assert_eq!(*notes.0.lock().unwrap(), expect);
}

#[tokio::test]
async fn retries_are_bounded_and_only_for_retryable_errors() {
    let cases = [
        // (faults queued for get, tries allowed, calls seen, ends well)
        (vec![], 3, 1, true),
        (vec![Fault::Error], 3, 2, true),
        (vec![Fault::Error, Fault::LostAnswer], 3, 3, true),
        (vec![Fault::Error; 3], 3, 3, false),
        (vec![Fault::Error], 0, 1, false),
        (vec![Fault::Hang], 2, 2, true),
    ];
    for (queued, attempts, calls, ends_well) in cases {
        let faults = Faults::default();
        queued.iter().for_each(|fault| faults.queue(Op::Get, *fault));
        let attempt_timeout =
            Duration::from_millis(if queued.contains(&Fault::Hang) { 1000 } else { 30_000 });
        let policy =
            RetryPolicy { attempts, attempt_timeout, first_pause: Duration::ZERO, ..RetryPolicy::default() };
        let store = Retrying::new(Arc::new(Faulty::new(memory(), faults.clone())), policy);
        assert_eq!(store.get(&key(1)).await.is_ok(), ends_well, "{queued:?} of {attempts}");
        assert_eq!(faults.n_calls(Op::Get), calls, "{queued:?} of {attempts}");
    }
    let faults = Faults::default();
    let store = Retrying::new(Arc::new(Faulty::new(memory(), faults.clone())), RetryPolicy::default());
    let over = conformance::limits().max_object_bytes + 1;
    store.put_if_absent(&key(1), vec![0; over].into()).await.unwrap_err();
    assert_eq!(faults.n_calls(Op::Put), 1, "an object over the limit is over it again");
}

#[tokio::test]
async fn faults_take_effect() {
    let faults = Faults::default();
    let store = Faulty::new(memory(), faults.clone());
    let object = encode(&sample_output(key(1), 64));
    faults.queue(Op::Put, Fault::LostAnswer);
    assert!(matches!(
        store.put_if_absent(&key(1), object.clone()).await,
        Err(EcError::Unavailable { store: StoreKind::Memory, op: Op::Put, .. })
    ));
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::AlreadyThere);
    for fault in [Fault::Torn, Fault::Truncated, Fault::BitFlip] {
        faults.queue(Op::Get, fault);
        let spoiled = store.get(&key(1)).await.unwrap().unwrap();
        assert!(decode(spoiled, &key(1), &Limits::default()).is_err(), "{fault:?}");
    }
    assert_eq!(store.get(&key(1)).await.unwrap(), Some(object.clone()));
    faults.queue(Op::Get, Fault::Vanish);
    assert!(store.heads(&[key(1)]).await.unwrap()[0].is_some());
    assert_eq!(store.get(&key(1)).await.unwrap(), None);
    faults.queue(Op::Put, Fault::DuplicateWriter);
    assert_eq!(store.put_if_absent(&key(1), object.clone()).await.unwrap(), PutOutcome::AlreadyThere);
    faults.queue(Op::Delete, Fault::Stall);
    let stalled = tokio::time::timeout(Duration::from_millis(50), store.delete(&key(1))).await;
    assert!(
        stalled.is_err() && store.get(&key(1)).await.unwrap().is_none(),
        "it took place, and never said so"
    );
}

#[derive(Default)]
struct Operations(Mutex<Vec<String>>);

impl EcObserver for Operations {
    fn hit(&self, _: CacheTier) {}
    fn miss(&self, _: CacheTier) {}
    fn corrupt(&self, _: CacheTier) {}
    fn published(&self, _: usize, _: Duration) {}
    fn loaded(&self, _: usize, _: Duration) {}
    fn operation(&self, o: Operation) {
        let text = format!("{} {} {} {}", o.tier.as_str(), o.op, o.outcome.as_str(), o.bytes);
        self.0.lock().unwrap().push(text);
    }
}

#[tokio::test]
async fn every_operation_is_observed_with_its_outcome_and_bytes() {
    let (told, faults) = (Arc::new(Operations::default()), Faults::default());
    let store = Metered::new(Arc::new(Faulty::new(memory(), faults.clone())), told.clone());
    let object = encode(&sample_output(key(1), 64));
    store.get(&key(1)).await.unwrap();
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    store.put_if_absent(&key(1), object.clone()).await.unwrap();
    store.get(&key(1)).await.unwrap();
    faults.queue(Op::Heads, Fault::Error);
    store.heads(&[key(1)]).await.unwrap_err();
    faults.queue(Op::Get, Fault::Hang);
    let _ = tokio::time::timeout(Duration::from_millis(1), store.get(&key(1))).await;
    let Acquired::Granted(lease) = store.acquire(&key(1), Duration::from_secs(9)).await.unwrap() else {
        panic!()
    };
    store.acquire(&key(1), Duration::from_secs(9)).await.unwrap();
    store.release(&lease).await.unwrap();
    store.put_if_absent(&key(2), vec![0; (4 << 20) + 1].into()).await.unwrap_err();
    let n = object.len();
    let expect = [
        "memory get miss 0".into(),
        format!("memory put ok {n}"),
        "memory put already_there 0".into(),
        format!("memory get ok {n}"),
        "memory heads unavailable 0".into(),
        "memory get dropped 0".into(),
        "memory lease ok 0".into(),
        "memory lease held 0".into(),
        "memory lease ok 0".into(),
        "memory put refused 0".into(),
    ];
    assert_eq!(*told.0.lock().unwrap(), expect);
}

#[tokio::test]
async fn a_failure_for_the_client_names_nothing_of_the_inside() {
    for e in [
        EcError::unavailable(StoreKind::Redis, Op::Get, "connection refused by 10.0.0.7"),
        EcError::TimedOut { store: StoreKind::Redis, op: Op::Get, limit: Duration::from_secs(2) },
    ] {
        let failure = Failure::from(&e);
        assert_eq!(failure.class, FailureClass::Unavailable);
        assert!(!failure.message.contains("redis") && !failure.message.contains("10.0"));
        assert!(failure.detail.unwrap().contains("redis store: get"));
    }
}
