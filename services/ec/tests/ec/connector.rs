//! The connector: the life of an item through both roles, and every way in which a load ends.

use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use triptych_core::{EncodedItem, EncoderOutput, Extent, Fingerprint, RequestId};
use triptych_ec::conformance::{sample_output, sample_variant};
use triptych_ec::connector::{
    CacheStatus::{Missing, Pending, Ready},
    Completions, ConnectorSettings, EcConnectorMeta, LoadError, LoadOrder, Loaded, SchedulerRole, WorkerRole,
    connect,
};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::metered::NoObserver;
use triptych_ec::object::{decode, encode};
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::redis::{RedisStore, RedisTuning};
use triptych_ec::store::{EcStore, Op, PutOutcome};
use triptych_ec::testing::RedisServer;

use crate::{LIMIT, key};

struct Bench {
    store: Arc<dyn EcStore>,
    faults: Faults,
    scheduler: SchedulerRole,
    worker: WorkerRole,
    loaded: mpsc::UnboundedReceiver<Loaded>,
}

impl Bench {
    fn new(settings: ConnectorSettings) -> Self {
        Self::over(Arc::new(MemoryStore::new(64 << 20, &settings.limits)), settings)
    }

    fn over(store: Arc<dyn EcStore>, settings: ConnectorSettings) -> Self {
        let faults = Faults::default();
        let faulty = Arc::new(Faulty::new(store.clone(), faults.clone()));
        let (sender, loaded) = mpsc::unbounded_channel();
        let callback = Completions::Callback(Arc::new(move |l| drop(sender.send(l))));
        let settings = ConnectorSettings { completions: callback, ..settings };
        let (scheduler, worker) = connect(faulty, Arc::new(NoObserver), settings);
        Self { store, faults, scheduler, worker, loaded }
    }

    async fn publish(&self, output: &EncoderOutput) {
        self.store.put_if_absent(&output.item().key, encode(output)).await.unwrap();
    }

    /// The calls of an engine step for a request that needs the item.
    fn step(&self, request: RequestId, item: &EncodedItem) -> usize {
        self.scheduler.update_state_after_alloc(request, item);
        let meta = self.scheduler.build_connector_meta();
        let n = meta.loads.len();
        self.worker.start_load_caches(meta);
        n
    }

    async fn next(&mut self) -> Loaded {
        tokio::time::timeout(LIMIT, self.loaded.recv()).await.expect("a load ends").unwrap()
    }

    fn status(&self, item: &EncodedItem) -> triptych_ec::connector::CacheStatus {
        self.scheduler.has_caches(std::slice::from_ref(item))[0]
    }
}

fn request(n: u128) -> RequestId {
    RequestId::from_bits(n)
}

/// Keeps nothing that no request holds.
fn no_spare() -> ConnectorSettings {
    ConnectorSettings { local_budget_bytes: 0, ..ConnectorSettings::default() }
}

#[tokio::test]
async fn an_item_goes_from_missing_over_pending_to_ready_and_is_released() {
    let mut bench = Bench::new(no_spare());
    let output = sample_output(key(1), 4096);
    let item = output.item().clone();
    bench.publish(&output).await;
    assert_eq!(bench.status(&item), Missing);
    bench.scheduler.update_state_after_alloc(request(1), &item);
    bench.scheduler.update_state_after_alloc(request(1), &item);
    assert_eq!(bench.status(&item), Pending);
    let meta = bench.scheduler.build_connector_meta();
    assert_eq!(meta.loads, [LoadOrder::from(item.clone())]);
    assert_eq!(bench.scheduler.build_connector_meta(), EcConnectorMeta::default());
    assert_eq!(bench.status(&item), Pending);
    bench.worker.start_load_caches(meta);
    let loaded = bench.next().await;
    assert_eq!(loaded.key, key(1));
    assert_eq!(loaded.result.unwrap().rows(), output.rows());
    assert_eq!(bench.status(&item), Ready);
    assert_eq!(bench.worker.rows(&key(1)).unwrap().rows(), output.rows());
    bench.scheduler.request_finished(request(1));
    bench.scheduler.request_finished(request(1));
    assert_eq!((bench.status(&item), bench.worker.local_bytes()), (Missing, 0));
}

#[tokio::test]
async fn requests_share_one_load_and_hold_its_rows_each() {
    let mut bench = Bench::new(no_spare());
    let output = sample_output(key(1), 4096);
    bench.publish(&output).await;
    bench.faults.queue(Op::Get, Fault::Latency(Duration::from_millis(50)));
    assert_eq!(bench.step(request(1), output.item()), 1);
    assert_eq!(bench.step(request(2), output.item()), 0, "it is on its way");
    // A caller of the worker's role alone shares it too.
    bench.worker.start_load_caches(EcConnectorMeta { loads: vec![output.item().clone().into()] });
    assert!(bench.next().await.result.is_ok());
    assert_eq!(bench.faults.n_calls(Op::Get), 1);
    bench.scheduler.request_finished(request(1));
    assert_eq!(bench.status(output.item()), Ready);
    assert_eq!(bench.step(request(3), output.item()), 0, "it is here");
    bench.scheduler.request_finished(request(2));
    bench.scheduler.request_finished(request(3));
    assert_eq!(bench.status(output.item()), Missing);
    assert!(bench.loaded.try_recv().is_err(), "one load, one end");
}

/// A colocated encoder may be faster than a load: later requests have the rows, and the load still ends.
#[tokio::test]
async fn rows_that_arrive_beside_a_load_do_not_end_it_twice() {
    let mut bench = Bench::new(no_spare());
    let output = sample_output(key(1), 4096);
    bench.publish(&output).await;
    bench.faults.queue(Op::Get, Fault::Latency(Duration::from_millis(100)));
    bench.step(request(1), output.item());
    bench.worker.save_caches(output.clone()).await.unwrap();
    assert_eq!(bench.status(output.item()), Ready);
    bench.worker.start_load_caches(EcConnectorMeta { loads: vec![output.item().clone().into()] });
    for _ in 0..2 {
        assert!(bench.next().await.result.is_ok());
    }
    bench.worker.drain().await;
    assert!(bench.loaded.try_recv().is_err(), "two starts, two ends");
    assert_eq!(bench.faults.n_calls(Op::Get), 1);
}

#[tokio::test]
async fn unheld_rows_stay_within_the_budget_and_are_found_without_the_store() {
    let mut bench =
        Bench::new(ConnectorSettings { local_budget_bytes: 8192, ..ConnectorSettings::default() });
    for n in 1..=3 {
        let output = sample_output(key(n), 4096);
        bench.publish(&output).await;
        bench.step(request(n.into()), output.item());
        assert!(bench.next().await.result.is_ok());
        bench.scheduler.request_finished(request(n.into()));
    }
    assert_eq!(bench.status(sample_output(key(1), 4096).item()), Missing);
    assert_eq!(bench.worker.local_bytes(), 8192);
    let third = sample_output(key(3), 4096);
    bench.worker.start_load_caches(EcConnectorMeta { loads: vec![third.item().clone().into()] });
    let loaded = bench.next().await;
    assert_eq!((loaded.result.is_ok(), loaded.took), (true, Duration::ZERO));
    assert_eq!(bench.faults.n_calls(Op::Get), 3);
}

#[tokio::test]
async fn a_request_that_ends_takes_its_unstarted_loads_along_unless_another_wants_them() {
    let bench = Bench::new(no_spare());
    let (mine, shared) = (sample_output(key(1), 64), sample_output(key(2), 64));
    bench.scheduler.update_state_after_alloc(request(1), mine.item());
    bench.scheduler.update_state_after_alloc(request(1), shared.item());
    bench.scheduler.update_state_after_alloc(request(2), shared.item());
    bench.scheduler.request_finished(request(1));
    assert_eq!(bench.scheduler.has_caches(&[mine.item().clone(), shared.item().clone()]), [Missing, Pending]);
    assert_eq!(bench.scheduler.build_connector_meta().loads, [LoadOrder::from(shared.item().clone())]);
}

#[tokio::test]
async fn every_failure_is_distinguished_and_can_be_retried() {
    let output = sample_output(key(1), 4096);
    let cases = [
        (Fault::Error, "unavailable", true),
        (Fault::Hang, "timed out", true),
        (Fault::Torn, "corrupt", false),
        (Fault::BitFlip, "corrupt", false),
        (Fault::Vanish, "missing", false),
    ];
    for (fault, expect, still_stored) in cases {
        let load_timeout = if fault == Fault::Hang { Duration::from_millis(100) } else { LIMIT };
        let mut bench = Bench::new(ConnectorSettings { load_timeout, ..no_spare() });
        bench.publish(&output).await;
        bench.faults.queue(Op::Get, fault);
        bench.step(request(1), output.item());
        let e = bench.next().await.result.unwrap_err();
        let actual = match &e {
            LoadError::Missing => "missing",
            LoadError::Corrupt { .. } => "corrupt",
            LoadError::Unavailable { .. } => "unavailable",
            LoadError::TimedOut { .. } => "timed out",
        };
        assert_eq!(actual, expect, "{fault:?}: {e:?}");
        assert_eq!(e.needs_encode(), !still_stored);
        assert_eq!(bench.status(output.item()), Missing);
        assert_eq!(bench.store.get(&key(1)).await.unwrap().is_some(), still_stored, "{fault:?}");
        // What an encoder does about it, and the same request again; a busy machine may time out once more.
        bench.publish(&output).await;
        loop {
            assert_eq!(bench.step(request(1), output.item()), 1);
            match bench.next().await.result {
                Ok(_) => break,
                Err(e) => assert!(matches!(e, LoadError::TimedOut { .. }) && fault == Fault::Hang, "{e:?}"),
            }
        }
    }
}

/// An announcement may be wrong where the object is right; only an object of another encoder is removed.
#[tokio::test]
async fn an_object_that_is_not_as_announced_stays_unless_it_is_of_another_encoder() {
    let mut bench = Bench::new(no_spare());
    let output = sample_output(key(1), 4096);
    let item = output.item();
    let others = [
        EncodedItem { n_tokens: item.n_tokens / 2, hidden: item.hidden * 2, ..item.clone() },
        EncodedItem { extent: Extent::Tokens, ..item.clone() },
        // Announced before it was encoded: the checksum is not known.
        EncodedItem { checksum: [0; 32], ..item.clone() },
        // Another encoder's rounding.
        sample_variant(key(1), 4096, 7).item().clone(),
    ];
    bench.publish(&output).await;
    for (n, announced) in others.into_iter().enumerate() {
        bench.step(request(n as u128), &announced);
        assert_eq!(bench.next().await.result.unwrap().item(), item, "it says itself what it is");
        bench.scheduler.request_finished(request(n as u128));
        assert!(bench.store.get(&key(1)).await.unwrap().is_some());
    }
    let fingerprint = Fingerprint::of([b"other".as_slice()]);
    bench.step(request(9), &EncodedItem { fingerprint, ..item.clone() });
    let e = bench.next().await.result.unwrap_err();
    assert!(matches!(e, LoadError::Corrupt { .. }), "{e:?}");
    assert_eq!(bench.store.get(&key(1)).await.unwrap(), None, "quarantined");
}

#[tokio::test]
async fn loads_are_bounded_in_number() {
    let settings = ConnectorSettings { max_pending: 2, max_loads: 1, ..no_spare() };
    let mut bench = Bench::new(settings);
    bench.faults.stand(Op::Get, Fault::Hang);
    let items: Vec<_> = (1..=3).map(|n| sample_output(key(n), 64).item().clone().into()).collect();
    bench.worker.start_load_caches(EcConnectorMeta { loads: items });
    let loaded = bench.next().await;
    assert_eq!(loaded.key, key(3));
    assert!(matches!(loaded.result, Err(LoadError::Unavailable { .. })));
}

#[tokio::test]
async fn an_engine_thread_outside_tokio_may_start_loads_and_collect_their_ends() {
    let store: Arc<dyn EcStore> = Arc::new(MemoryStore::new(64 << 20, &Default::default()));
    let output = sample_output(key(1), 4096);
    store.put_if_absent(&key(1), encode(&output)).await.unwrap();
    let (scheduler, worker) = connect(store, Arc::new(NoObserver), ConnectorSettings::default());
    let engine = std::thread::spawn(move || {
        scheduler.update_state_after_alloc(request(1), output.item());
        worker.start_load_caches(scheduler.build_connector_meta());
        let deadline = std::time::Instant::now() + LIMIT;
        loop {
            match worker.finished().pop() {
                Some(loaded) => return loaded,
                None => assert!(std::time::Instant::now() < deadline),
            }
            std::thread::yield_now();
        }
    });
    let loaded = tokio::task::spawn_blocking(move || engine.join().unwrap()).await.unwrap();
    assert!(loaded.result.is_ok());
}

#[tokio::test]
async fn a_lost_object_is_published_again_and_a_wrong_one_replaced() {
    let bench = Bench::new(ConnectorSettings::default());
    let output = sample_output(key(1), 4096);
    let first = bench.worker.save_caches(output.clone()).await.unwrap();
    assert_eq!((first.outcome, &first.item), (PutOutcome::Stored, output.item()));
    assert_eq!(bench.worker.save_caches(output.clone()).await.unwrap().outcome, PutOutcome::AlreadyThere);
    bench.store.delete(&key(1)).await.unwrap();
    // The worker still has the rows: no second encoding.
    let kept = bench.worker.rows(&key(1)).unwrap();
    assert_eq!(bench.worker.save_caches(kept).await.unwrap().outcome, PutOutcome::Stored);
    for wrong in [
        Bytes::from_static(b"garbage"),
        encode(&sample_output(key(2), 64)),
        encode(&sample_output(key(1), 64)),
    ] {
        bench.store.delete(&key(1)).await.unwrap();
        bench.store.put_if_absent(&key(1), wrong).await.unwrap();
        assert_eq!(bench.worker.save_caches(output.clone()).await.unwrap().outcome, PutOutcome::Stored);
        let stored = bench.store.get(&key(1)).await.unwrap().unwrap();
        assert!(decode(stored, &key(1), &Default::default()).is_ok());
    }
}

#[tokio::test]
async fn a_second_encoder_gets_the_metadata_of_the_stored_object() {
    let bench = Bench::new(ConnectorSettings::default());
    let (theirs, ours) = (sample_variant(key(1), 64, 1), sample_variant(key(1), 64, 2));
    bench.publish(&theirs).await;
    let published = bench.worker.save_caches(ours).await.unwrap();
    assert_eq!((published.outcome, &published.item), (PutOutcome::AlreadyThere, theirs.item()));
}

#[tokio::test]
async fn publishing_continues_after_its_caller_is_cancelled_and_drain_waits_for_it() {
    let bench = Bench::new(ConnectorSettings::default());
    bench.faults.queue(Op::Put, Fault::Latency(Duration::from_millis(100)));
    let output = sample_output(key(1), 64);
    tokio::select! {
        biased;
        _ = bench.worker.save_caches(output.clone()) => panic!("the put takes longer"),
        () = tokio::task::yield_now() => {}
    }
    tokio::time::timeout(LIMIT, bench.worker.drain()).await.expect("drain ends");
    assert!(bench.store.get(&key(1)).await.unwrap().is_some());
    assert!(bench.worker.save_caches(output).await.is_err(), "nothing new after drain");
}

#[tokio::test]
async fn loads_after_drain_are_answered() {
    let mut bench = Bench::new(ConnectorSettings::default());
    bench.worker.drain().await;
    bench.step(request(1), sample_output(key(1), 64).item());
    assert!(matches!(bench.next().await.result, Err(LoadError::Unavailable { .. })));
}

#[tokio::test]
async fn a_redis_that_dies_between_publish_and_load_is_unavailable_then_missing() {
    let mut server = RedisServer::start();
    let tuning = RedisTuning { response_timeout: Duration::from_secs(10), ..RedisTuning::default() };
    let store = Arc::new(RedisStore::new(&server.url(), tuning, &Default::default()).unwrap());
    let mut bench = Bench::over(store, ConnectorSettings { load_timeout: LIMIT, ..no_spare() });
    let output = sample_output(key(1), 3 << 20);
    bench.publish(&output).await;
    server.kill();
    bench.step(request(1), output.item());
    let e = bench.next().await.result.unwrap_err();
    assert!(matches!(e, LoadError::Unavailable { .. }), "{e:?}");
    server.restart();
    let e = loop {
        bench.step(request(1), output.item());
        match bench.next().await.result.unwrap_err() {
            LoadError::Unavailable { .. } => {}
            e => break e,
        }
    };
    assert_eq!(e, LoadError::Missing);
    // Published by another worker, or it would be here already.
    bench.publish(&output).await;
    bench.step(request(1), output.item());
    assert!(bench.next().await.result.is_ok());
}
