//! Stores one behind the other: the conformance suite over several orders, and what is theirs alone.

use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use triptych_ec::breaker::BreakerTuning;
use triptych_ec::conformance::{self, sample_output, sample_variant};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::guarded::Guarded;
use triptych_ec::metered::NoObserver;
use triptych_ec::object::{decode, encode};
use triptych_ec::store::disk::DiskStore;
use triptych_ec::store::lease::Acquired;
use triptych_ec::store::memory::MemoryStore;
use triptych_ec::store::tiered::{Tier, Tiered, TieredTuning, WriteBehindBounds};
use triptych_ec::store::{EcStore, Op, PutOutcome, Scope, StoreKind};
use triptych_ec::{EcError, EcSetting, open};

use crate::{LIMIT, key};

/// Two tiers of memory that may fail: one as a host shares it, one as hosts do.
struct Bench {
    fast: Arc<MemoryStore>,
    lasting: Arc<MemoryStore>,
    fast_faults: Faults,
    lasting_faults: Faults,
    store: Tiered,
}

fn memory() -> Arc<MemoryStore> {
    Arc::new(MemoryStore::new(64 << 20, &conformance::limits()))
}

impl Bench {
    fn new(tuning: TieredTuning) -> Self {
        let (fast, lasting) = (memory(), memory());
        let (fast_faults, lasting_faults) = (Faults::default(), Faults::default());
        let tier = |store: &Arc<MemoryStore>, faults: &Faults, scope| {
            let faulty = Arc::new(Faulty::new(store.clone(), faults.clone()));
            let store = Arc::new(Guarded::new(faulty, BreakerTuning::default(), Arc::new(NoObserver)));
            Tier { store, scope }
        };
        let tiers =
            vec![tier(&fast, &fast_faults, Scope::Host), tier(&lasting, &lasting_faults, Scope::Cluster)];
        let store = Tiered::new(tiers, tuning, &conformance::limits());
        Self { fast, lasting, fast_faults, lasting_faults, store }
    }

    async fn put(&self, n: u8) -> Bytes {
        let object = encode(&sample_output(key(n), 4096));
        assert_eq!(self.store.put_if_absent(&key(n), object.clone()).await.unwrap(), PutOutcome::Stored);
        object
    }
}

async fn until(what: &str, condition: impl AsyncFn() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    assert!(tokio::time::timeout(LIMIT, wait).await.is_ok(), "never: {what}");
}

async fn has(store: &MemoryStore, n: u8) -> bool {
    store.get(&key(n)).await.unwrap().is_some()
}

#[tokio::test(flavor = "multi_thread")]
async fn tiers_in_any_order_conform() {
    let orders: [Vec<Tier>; 3] = [
        vec![Tier::of(memory()), Tier { store: memory(), scope: Scope::Cluster }],
        vec![Tier { store: memory(), scope: Scope::Host }, Tier { store: memory(), scope: Scope::Cluster }],
        vec![
            Tier::of(memory()),
            Tier { store: memory(), scope: Scope::Host },
            Tier { store: memory(), scope: Scope::Cluster },
        ],
    ];
    for tiers in orders {
        let store = Tiered::new(tiers, TieredTuning::default(), &conformance::limits());
        conformance::run(Arc::new(store)).await;
    }
}

/// No order of events may make a breach of the contract out of a slow tier or of one that loses answers.
#[tokio::test(flavor = "multi_thread")]
async fn tiers_behind_a_slow_and_forgetful_one_conform() {
    let bench = Bench::new(TieredTuning::default());
    for op in [Op::Put, Op::Get] {
        bench.lasting_faults.stand(op, Fault::Latency(Duration::from_millis(2)));
    }
    conformance::run(Arc::new(bench.store)).await;
}

#[tokio::test]
async fn a_setting_of_several_stores_opens_them_in_its_order() {
    let dir = tempfile::tempdir().unwrap();
    let setting: EcSetting = format!("memory:8 disk:{}", dir.path().display()).parse().unwrap();
    let store = open(&setting, &conformance::limits()).await.unwrap();
    assert_eq!(store.kind(), StoreKind::Tiered);
    assert!(store.describe().starts_with("tiers: memory, 8 MiB; "), "{}", store.describe());
    store.put_if_absent(&key(1), encode(&sample_output(key(1), 64))).await.unwrap();
    let alone = DiskStore::open(dir.path(), &conformance::limits()).await.unwrap();
    assert!(alone.get(&key(1)).await.unwrap().is_some(), "a put has reached what others see");
}

#[tokio::test]
async fn a_put_is_answered_by_the_first_tier_and_the_copy_behind_follows() {
    let bench = Bench::new(TieredTuning::default());
    bench.lasting_faults.queue(Op::Put, Fault::Error);
    bench.lasting_faults.queue(Op::Put, Fault::LostAnswer);
    bench.put(1).await;
    assert!(has(&bench.fast, 1).await);
    assert_eq!(bench.store.behind().0, 1);
    assert!(bench.store.flush(LIMIT).await, "it is tried again until it is there");
    assert!(has(&bench.lasting, 1).await);
    assert_eq!(bench.store.behind(), (0, 0));
}

#[tokio::test]
async fn an_object_lost_by_the_fast_tier_is_read_from_the_next_and_promoted() {
    let bench = Bench::new(TieredTuning::default());
    let object = bench.put(1).await;
    assert!(bench.store.flush(LIMIT).await);
    bench.fast.delete(&key(1)).await.unwrap();
    assert!(bench.store.heads(&[key(2), key(1)]).await.unwrap()[1].is_some());
    assert_eq!(bench.store.get(&key(1)).await.unwrap(), Some(object));
    until("the copy is promoted", async || has(&bench.fast, 1).await).await;
    let n = bench.lasting_faults.n_calls(Op::Get);
    bench.store.get(&key(1)).await.unwrap();
    assert_eq!(bench.lasting_faults.n_calls(Op::Get), n, "the fast tier answers by itself");
}

#[tokio::test]
async fn heads_ask_later_tiers_only_for_missing_keys() {
    let bench = Bench::new(TieredTuning::default());
    bench.put(1).await;
    assert!(bench.store.heads(&[key(1)]).await.unwrap()[0].is_some());
    assert_eq!(bench.lasting_faults.n_calls(Op::Heads), 0);
    bench.store.heads(&[key(1), key(2)]).await.unwrap();
    assert_eq!(bench.lasting_faults.n_calls(Op::Heads), 1);
}

/// The process ended before its copies were written, and the fast tier is gone too: a miss, and no error.
#[tokio::test]
async fn an_object_whose_write_behind_failed_is_a_miss() {
    let bench = Bench::new(TieredTuning::default());
    bench.lasting_faults.stand(Op::Put, Fault::Hang);
    bench.put(1).await;
    bench.fast.delete(&key(1)).await.unwrap();
    assert!(!bench.store.flush(Duration::from_millis(10)).await, "it says that something was left");
    let after = Tiered::new(
        vec![Tier { store: bench.lasting.clone(), scope: Scope::Cluster }],
        TieredTuning::default(),
        &conformance::limits(),
    );
    assert_eq!(after.get(&key(1)).await.unwrap(), None);
    assert_eq!(after.heads(&[key(1)]).await.unwrap(), [None]);
}

#[tokio::test]
async fn a_put_waits_for_the_tier_behind_when_there_is_no_room_beside() {
    let behind = WriteBehindBounds { entries: 1, ..WriteBehindBounds::default() };
    let bench = Bench::new(TieredTuning { behind, ..TieredTuning::default() });
    bench.lasting_faults.queue(Op::Put, Fault::Latency(Duration::from_millis(50)));
    bench.put(1).await;
    assert_eq!(bench.store.behind().0, 1);
    bench.put(2).await;
    assert!(has(&bench.lasting, 2).await, "it was written through");
    assert!(bench.store.flush(LIMIT).await);
    let bytes = WriteBehindBounds { bytes: 10, ..WriteBehindBounds::default() };
    let small = Bench::new(TieredTuning { behind: bytes, ..TieredTuning::default() });
    small.put(3).await;
    assert!(has(&small.lasting, 3).await, "more bytes than may wait are written through");
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_dies_is_passed_by_and_left_alone_and_comes_back() {
    let bench = Bench::new(TieredTuning::default());
    let object = bench.put(1).await;
    assert!(bench.store.flush(LIMIT).await);
    for op in [Op::Put, Op::Get, Op::Heads, Op::Quarantine] {
        bench.fast_faults.stand(op, Fault::Error);
    }
    for _ in 0..5 {
        assert_eq!(bench.store.get(&key(1)).await.unwrap(), Some(object.clone()));
    }
    assert_eq!(bench.fast_faults.n_calls(Op::Get), 3, "after three failures it is left alone");
    assert_eq!(bench.store.get(&key(9)).await.unwrap(), None, "a miss is a miss without it");
    bench.put(2).await;
    assert!(has(&bench.lasting, 2).await && !has(&bench.fast, 2).await);
    bench.fast_faults.clear();
    tokio::time::sleep(Duration::from_secs(1)).await;
    bench.put(3).await;
    assert!(has(&bench.fast, 3).await, "it is asked again");
    assert!(bench.store.flush(LIMIT).await);
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_costs_its_time_limit_a_few_times_only() {
    let bench = Bench::new(TieredTuning::default());
    let object = encode(&sample_output(key(1), 4096));
    bench.lasting.put_if_absent(&key(1), object.clone()).await.unwrap();
    bench.fast_faults.stand(Op::Get, Fault::Hang);
    bench.fast_faults.stand(Op::Put, Fault::Hang);
    let start = tokio::time::Instant::now();
    for _ in 0..20 {
        assert_eq!(bench.store.get(&key(1)).await.unwrap(), Some(object.clone()));
    }
    let limit = TieredTuning::default().tier_timeout;
    assert!(start.elapsed() <= limit * 5, "{:?}", start.elapsed());
}

#[tokio::test]
async fn when_no_tier_answers_it_is_unavailable() {
    let bench = Bench::new(TieredTuning::default());
    for faults in [&bench.fast_faults, &bench.lasting_faults] {
        for op in [Op::Put, Op::Get, Op::Heads, Op::Ping] {
            faults.stand(op, Fault::Error);
        }
    }
    let unavailable = |e: EcError| assert!(e.may_pass(), "{e:?}");
    unavailable(bench.store.get(&key(1)).await.unwrap_err());
    unavailable(bench.store.heads(&[key(1)]).await.unwrap_err());
    unavailable(bench.store.ping().await.unwrap_err());
    unavailable(bench.store.put_if_absent(&key(1), Bytes::from_static(b"x")).await.unwrap_err());
}

#[tokio::test]
async fn a_bad_copy_is_taken_out_of_its_own_tier_only() {
    let bench = Bench::new(TieredTuning::default());
    let good = encode(&sample_output(key(1), 4096));
    let mut bad = good.to_vec();
    *bad.last_mut().unwrap() ^= 1;
    bench.fast.put_if_absent(&key(1), bad.into()).await.unwrap();
    bench.lasting.put_if_absent(&key(1), good.clone()).await.unwrap();
    let read = bench.store.get(&key(1)).await.unwrap().unwrap();
    assert!(decode(read.clone(), &key(1), &conformance::limits()).is_err());
    assert!(bench.store.disown(&key(1), &read).await.unwrap());
    assert!(!has(&bench.fast, 1).await && has(&bench.lasting, 1).await);
    assert_eq!(bench.store.get(&key(1)).await.unwrap(), Some(good));
    // Bits that flipped on the way here are nobody's copy.
    assert!(!bench.store.disown(&key(1), &read).await.unwrap());
    assert!(has(&bench.lasting, 1).await);
}

/// An object that does not verify is not promoted.
#[tokio::test]
async fn only_verified_objects_are_promoted() {
    let bench = Bench::new(TieredTuning::default());
    bench.lasting.put_if_absent(&key(1), Bytes::from_static(b"rubbish")).await.unwrap();
    bench.lasting.put_if_absent(&key(2), encode(&sample_output(key(2), 64))).await.unwrap();
    bench.store.get(&key(1)).await.unwrap();
    bench.store.get(&key(2)).await.unwrap();
    until("the good one is promoted", async || has(&bench.fast, 2).await).await;
    assert!(!has(&bench.fast, 1).await);
}

#[tokio::test]
async fn a_deleted_object_is_not_written_again_by_a_copy_on_its_way() {
    let bench = Bench::new(TieredTuning::default());
    bench.lasting_faults.queue(Op::Put, Fault::Latency(Duration::from_millis(50)));
    bench.lasting_faults.queue(Op::Put, Fault::Error);
    bench.put(1).await;
    bench.put(2).await;
    bench.store.delete(&key(1)).await.unwrap();
    bench.store.delete(&key(2)).await.unwrap();
    assert!(bench.store.flush(LIMIT).await);
    assert!(!has(&bench.lasting, 1).await && !has(&bench.lasting, 2).await);
}

#[tokio::test]
async fn leases_live_where_all_hosts_see_them_and_nowhere_else_when_that_is_away() {
    let bench = Bench::new(TieredTuning::default());
    let Acquired::Granted(lease) = bench.store.acquire(&key(1), LIMIT).await.unwrap() else { panic!() };
    let other_host = bench.lasting.acquire(&key(1), LIMIT).await.unwrap();
    assert!(matches!(other_host, Acquired::Held { .. }));
    assert!(bench.store.release(&lease).await.unwrap());
    bench.lasting_faults.stand(Op::Lease, Fault::Error);
    let e = bench.store.acquire(&key(1), LIMIT).await.unwrap_err();
    assert!(matches!(e, EcError::Unavailable { .. }), "{e:?}");
}

/// The fast tier of this host has it before the tier with the leases does.
#[tokio::test]
async fn waiting_ends_with_the_first_tier_that_has_it() {
    let bench = Arc::new(Bench::new(TieredTuning::default()));
    let Acquired::Granted(_) = bench.store.acquire(&key(1), LIMIT).await.unwrap() else { panic!() };
    bench.lasting_faults.stand(Op::Put, Fault::Hang);
    let waiter = tokio::spawn({
        let bench = bench.clone();
        async move { bench.store.wait(&key(1), LIMIT).await.unwrap() }
    });
    tokio::task::yield_now().await;
    bench.put(1).await;
    let item = tokio::time::timeout(LIMIT, waiter).await.expect("it is told").unwrap();
    assert_eq!(item.as_ref(), Some(sample_output(key(1), 4096).item()));
}

#[tokio::test]
async fn the_first_of_two_writers_is_read_whichever_tier_answers() {
    let bench = Bench::new(TieredTuning::default());
    let (first, second) = (sample_variant(key(1), 64, 1), sample_variant(key(1), 64, 2));
    bench.store.put_if_absent(&key(1), encode(&first)).await.unwrap();
    let again = bench.store.put_if_absent(&key(1), encode(&second)).await.unwrap();
    assert_eq!(again, PutOutcome::AlreadyThere);
    assert!(bench.store.flush(LIMIT).await);
    bench.fast.delete(&key(1)).await.unwrap();
    assert_eq!(bench.store.get(&key(1)).await.unwrap(), Some(encode(&first)));
}
