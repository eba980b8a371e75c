//! One encode for the fleet: cached items are not encoded, running encodes are shared, slow ones are hedged, and retries
//! in an outage are bounded.

use crate::fakes::{EncodeStep, Encoder, GenerateStep, Pd, Process};
use crate::support::{Cluster, IMAGE, Proxy, ask, eventually, listener, memory, models, question};
use std::sync::Arc;
use std::time::Duration;
use tonic::{Code, Status};
use triptych_core::limits::Limits;
use triptych_core::{ContentKey, Failure};
use triptych_ec::fault::{Fault, Faults, Faulty};
use triptych_ec::store::Op;
use triptych_ec::store::lease::Acquired;
use triptych_ec::{EcSetting, EcStore};
use triptych_proto::v1;
use triptych_proto::v1::ItemSource::{Cached, Encoded, Shared};
use triptych_proxy::{ProxyConfig, RetryPolicy};
use triptych_runtime::status::to_status;

/// Several proxies and encoders around one PD worker and one store.
struct Fleet {
    encoders: Vec<Encoder>,
    processes: Vec<Process>,
    pd: Pd,
    proxies: Vec<Proxy>,
    store: Arc<dyn EcStore>,
}

impl Fleet {
    /// `stores` has one store for each proxy; `behind` is where the encoders write.
    async fn over(
        n_encoders: usize,
        stores: Vec<Arc<dyn EcStore>>,
        behind: Arc<dyn EcStore>,
        change: impl Fn(&mut ProxyConfig),
    ) -> Self {
        let encoders: Vec<_> = (0..n_encoders).map(|_| Encoder::new(models(), Arc::clone(&behind))).collect();
        let mut processes: Vec<_> = encoders.iter().map(Encoder::serve).collect();
        let addresses: Vec<_> = processes.iter().map(|process| process.address).collect();
        let pd = Pd::new(models());
        processes.push(pd.serve());
        let pd_address = processes[n_encoders].address;
        let mut proxies = Vec::new();
        for store in stores {
            let proxy = Proxy::start(&addresses, &[pd_address], store, &change).await;
            proxy.ready().await;
            proxies.push(proxy);
        }
        Self { encoders, processes, pd, proxies, store: behind }
    }

    async fn start(n_proxies: usize, n_encoders: usize, change: impl Fn(&mut ProxyConfig)) -> Self {
        let store = memory().await;
        let stores = (0..n_proxies).map(|_| Arc::clone(&store)).collect();
        Self::over(n_encoders, stores, store, change).await
    }

    fn n_jobs(&self) -> usize {
        self.encoders.iter().map(|encoder| encoder.jobs().len()).sum()
    }

    fn n_cancelled(&self) -> usize {
        self.encoders.iter().map(Encoder::cancelled).sum()
    }

    /// Makes every encoder hold its next job.
    fn hold(&self) {
        self.encoders.iter().for_each(|encoder| encoder.script([EncodeStep::Hold]));
    }

    /// The encoder that holds a job.
    fn busy(&self) -> &Encoder {
        self.encoders.iter().find(|encoder| !encoder.jobs().is_empty()).expect("one has a job")
    }
}

fn unavailable() -> Status {
    to_status(&Failure::unavailable("not now"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn identical_items_at_once_over_three_proxies_and_three_encoders_cost_one_encode() {
    let behind = memory().await;
    let grpc = listener().await;
    let setting: EcSetting = format!("grpc://{}", grpc.local_addr().unwrap()).parse().unwrap();
    let served = Arc::clone(&behind);
    tokio::spawn(async move {
        triptych_ec::server::serve(grpc, served, &Limits::default(), std::future::pending()).await
    });
    let mut stores = Vec::new();
    for _ in 0..3 {
        stores.push(triptych_ec::open(&setting, &Limits::default()).await.unwrap());
    }
    let fleet = Fleet::over(3, stores, behind, |_| {}).await;
    for round in 1..=4_u8 {
        let image = [IMAGE, &[round]].concat();
        fleet.hold();
        let asks = (0..24).map(|i| ask(&fleet.proxies[i % 3], question(&[&image])));
        let release = async {
            eventually("one job is under way", async || fleet.n_jobs() == usize::from(round)).await;
            fleet.encoders.iter().for_each(|encoder| encoder.release(1));
        };
        let (answers, ()) = futures::join!(futures::future::join_all(asks), release);
        for answer in answers {
            assert_eq!(answer.unwrap().text, "hello world");
        }
        assert_eq!(fleet.n_jobs(), usize::from(round));
        assert!(fleet.encoders.iter().all(|encoder| encoder.fences().iter().all(|fence| *fence > 0)));
        // Two of them had no job: their steps and permits are cleared.
        fleet.encoders.iter().for_each(Encoder::clear_script);
    }
    let leases = "triptych_encode_leases_total{outcome=\"granted\"}";
    let mut granted = 0.0;
    for proxy in &fleet.proxies {
        granted += proxy.metric(leases).await;
    }
    // A late request is granted a lease too, and finds the object.
    assert!(granted >= 4.0, "{granted}");
}

#[tokio::test]
async fn an_output_at_a_peer_is_not_encoded_again_before_the_store_has_it() {
    let behind = memory().await;
    let calls = Faults::default();
    let counted: Arc<dyn EcStore> = Arc::new(Faulty::new(Arc::clone(&behind), calls.clone()));
    let fleet = Fleet::over(1, vec![Arc::clone(&behind), counted], behind, |_| {}).await;
    fleet.encoders[0].script([EncodeStep::AnswerFromPeer("127.0.0.1:9")]);
    assert_eq!(ask(&fleet.proxies[0], question(&[IMAGE])).await.unwrap().sources(), [Encoded]);
    assert_eq!(ask(&fleet.proxies[0], question(&[IMAGE])).await.unwrap().sources(), [Cached]);
    let other = ask(&fleet.proxies[1], question(&[IMAGE]));
    let written = async {
        eventually("the other proxy asks for the lease", async || calls.n_calls(Op::Lease) > 0).await;
        fleet.encoders[0].write_behind().await;
    };
    let (other, ()) = futures::join!(other, written);
    assert_eq!((other.unwrap().sources(), fleet.n_jobs()), (vec![Shared], 1));
}

async fn hold_lease(fleet: &Fleet, image: &[u8], ttl: Duration) -> ContentKey {
    // The key is what a first request for the same item was sent with.
    ask(&fleet.proxies[0], question(&[image])).await.unwrap();
    let key = fleet.pd.requests().pop().unwrap().items[0].key.clone();
    let key = triptych_proto::convert::key(&key, "key").unwrap();
    fleet.store.delete(&key).await.unwrap();
    assert!(matches!(fleet.store.acquire(&key, ttl).await.unwrap(), Acquired::Granted(_)));
    key
}

#[tokio::test]
async fn an_encode_of_another_proxy_is_followed_and_taken_over_when_its_lease_expires() {
    let behind = memory().await;
    let calls = Faults::default();
    let counted: Arc<dyn EcStore> = Arc::new(Faulty::new(Arc::clone(&behind), calls.clone()));
    let fleet = Fleet::over(1, vec![Arc::clone(&behind), counted], behind, |_| {}).await;
    hold_lease(&fleet, IMAGE, Duration::from_millis(700)).await;
    // The holder never renews and never publishes.
    let answer = ask(&fleet.proxies[1], question(&[IMAGE])).await.unwrap();
    assert_eq!((answer.sources(), fleet.n_jobs()), (vec![Encoded], 2));
    let outcome = |outcome: &str| format!("triptych_encode_leases_total{{outcome=\"{outcome}\"}}");
    assert_eq!(fleet.proxies[1].metric(&outcome("taken_over")).await, 1.0);

    let key = hold_lease(&fleet, b"another", Duration::from_secs(60)).await;
    let n_before = calls.n_calls(Op::Lease);
    let waits = ask(&fleet.proxies[1], question(&[b"another"]));
    let publishes = async {
        eventually("the other proxy asks for the lease", async || calls.n_calls(Op::Lease) > n_before).await;
        fleet.encoders[0].publish_again(&key).await;
    };
    let (answer, ()) = futures::join!(waits, publishes);
    assert_eq!((answer.unwrap().sources(), fleet.n_jobs()), (vec![Shared], 3));
    assert_eq!(fleet.proxies[1].metric(&outcome("followed")).await, 1.0);
}

#[tokio::test]
async fn an_encode_proceeds_without_a_lease_when_the_lease_store_fails() {
    let behind = memory().await;
    let faults = Faults::default();
    let faulty: Arc<dyn EcStore> = Arc::new(Faulty::new(Arc::clone(&behind), faults.clone()));
    let fleet = Fleet::over(1, vec![faulty], behind, |_| {}).await;
    faults.stand(Op::Lease, Fault::Error);
    assert_eq!(ask(&fleet.proxies[0], question(&[IMAGE])).await.unwrap().sources(), [Encoded]);
    assert_eq!(fleet.encoders[0].fences(), [0]);
}

#[tokio::test]
async fn a_job_with_a_lost_lease_is_sent_again() {
    let cluster = Cluster::start().await;
    let lost_lease = Failure::unavailable("a newer lease").with_param("fence");
    cluster
        .encoder
        .script([EncodeStep::Fail(to_status(&lost_lease)), EncodeStep::Fail(to_status(&lost_lease))]);
    assert_eq!(ask(&cluster.proxy, question(&[IMAGE])).await.unwrap().sources(), [Encoded]);
    let fences = cluster.encoder.fences();
    assert!(fences.len() == 3 && fences[0] > 0, "{fences:?}");
    assert_eq!(fences[2], 0, "an encoder with a newer fence than the store gets no lease");
}

#[tokio::test]
async fn a_slow_job_is_hedged_and_the_loser_is_cancelled() {
    let hedge = |config: &mut ProxyConfig| {
        config.encodes.hedge_after_unknown = Duration::from_millis(50);
        config.encodes.hedge_after_at_least = Duration::from_millis(50);
    };
    let fleet = Fleet::start(1, 2, hedge).await;
    fleet.hold();
    let answer = ask(&fleet.proxies[0], question(&[IMAGE]));
    let second_wins = async {
        eventually("the job is sent", async || fleet.n_jobs() == 1).await;
        let first = fleet.busy().clone();
        eventually("it is hedged", async || fleet.n_jobs() == 2).await;
        let second = fleet.encoders.iter().find(|one| !one.is(&first)).unwrap();
        assert_eq!(second.jobs().len(), 1, "at another encoder");
        second.release(1);
    };
    let (answer, ()) = futures::join!(answer, second_wins);
    assert_eq!(answer.unwrap().sources(), [Encoded]);
    eventually("the loser is cancelled", async || fleet.n_cancelled() == 1).await;
    assert_eq!(fleet.proxies[0].metric("triptych_encode_jobs_total{why=\"hedge\"}").await, 1.0);
    let fences: Vec<_> = fleet.encoders.iter().flat_map(Encoder::fences).collect();
    assert!(fences[0] > 0 && fences[0] == fences[1], "both under one lease: {fences:?}");
}

#[tokio::test]
async fn retries_in_an_outage_are_bounded_by_the_budget() {
    let frugal = |config: &mut ProxyConfig| {
        config.encodes.retries = RetryPolicy { share: 0.2, per_second: 0.1 };
    };
    let fleet = Fleet::start(1, 1, frugal).await;
    fleet.encoders[0].script((0..200).map(|_| EncodeStep::Fail(unavailable())));
    for n in 0..20_u8 {
        let status = ask(&fleet.proxies[0], question(&[&[n]])).await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.metadata().contains_key("retry-after-ms"), "{status:?}");
    }
    // One from the ten seconds of the window, and a fifth of twenty.
    assert_eq!(fleet.n_jobs(), 20 + 1 + 4);
    let exhausted = fleet.proxies[0].metric("triptych_retry_budget_exhausted_total{for=\"retry\"}").await;
    assert!(exhausted > 0.0);
}

#[tokio::test]
async fn encodes_of_a_failed_request_complete_for_the_next_one() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::AnnounceThenHold, EncodeStep::AnnounceThenHold]);
    let asked = ask(&cluster.proxy, question(&[IMAGE, b"another"]));
    let both = eventually("both are under way", async || cluster.encoder.jobs().len() == 2);
    let third = async {
        both.await;
        let cut_off = Failure::invalid("the JPEG is cut off");
        cluster.encoder.script([EncodeStep::Fail(to_status(&cut_off))]);
        // The same two items again, and one that is broken.
        let status = ask(&cluster.proxy, question(&[IMAGE, b"another", b"broken"])).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument);
    };
    // The first client goes away too: only the failed request's encodes remain.
    tokio::select! {
        _ = asked => panic!("it is held"),
        () = third => {}
    }
    cluster.encoder.release(2);
    let again = ask(&cluster.proxy, question(&[IMAGE, b"another"])).await.unwrap();
    assert!(again.sources().iter().all(|source| [Cached, Shared].contains(source)), "{again:?}");
    assert_eq!((cluster.encoder.jobs().len(), cluster.encoder.cancelled()), (3, 0));
}

#[tokio::test]
async fn a_recently_ready_item_is_not_probed_again() {
    let behind = memory().await;
    let faults = Faults::default();
    let counted: Arc<dyn EcStore> = Arc::new(Faulty::new(Arc::clone(&behind), faults.clone()));
    let fleet = Fleet::over(1, vec![counted], behind, |_| {}).await;
    ask(&fleet.proxies[0], question(&[IMAGE])).await.unwrap();
    let n_asked = faults.n_calls(Op::Heads);
    for _ in 0..3 {
        assert_eq!(ask(&fleet.proxies[0], question(&[IMAGE])).await.unwrap().sources(), [Cached]);
    }
    assert_eq!((faults.n_calls(Op::Heads), fleet.n_jobs()), (n_asked, 1));
}

#[tokio::test]
async fn a_job_that_ends_without_output_is_sent_again() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::EndEarly]);
    cluster.pd.script([GenerateStep::SendThenHold(vec![])]);
    // The second job's event reaches the proxy before the answer ends.
    let answered_later = async {
        eventually("the item is known to be encoded", async || {
            let encoded = "triptych_item_source_total{source=\"encoded\",modality=\"image\"}";
            cluster.proxy.metric(encoded).await == 1.0
        })
        .await;
        cluster.pd.release(1);
    };
    let asked = question(&[IMAGE]);
    let (answer, ()) = futures::join!(ask(&cluster.proxy, asked), answered_later);
    assert_eq!(answer.unwrap().sources(), [Encoded]);
    assert_eq!(cluster.encoder.jobs().len(), 2);
}

#[tokio::test]
async fn the_death_of_an_encoder_loses_no_request() {
    let Fleet { encoders, mut processes, proxies, .. } = Fleet::start(1, 2, |_| {}).await;
    encoders.iter().for_each(|encoder| encoder.script([EncodeStep::Hold]));
    let asked = ask(&proxies[0], question(&[IMAGE]));
    let killed = async {
        let with_jobs = || encoders.iter().position(|encoder| !encoder.jobs().is_empty());
        eventually("the job is sent", async || with_jobs().is_some()).await;
        processes[with_jobs().unwrap()].kill();
        encoders.iter().for_each(|encoder| encoder.release(1));
    };
    let (answer, ()) = futures::join!(asked, killed);
    assert_eq!(answer.unwrap().sources(), [Encoded]);
    assert_eq!(encoders.iter().map(|encoder| encoder.jobs().len()).sum::<usize>(), 2);
}

#[tokio::test]
async fn an_item_resident_on_a_pd_worker_is_not_encoded_again_though_the_store_lost_it() {
    let store = memory().await;
    let encoder = Encoder::new(models(), Arc::clone(&store));
    let pds = [Pd::new(models()), Pd::new(models())];
    let p1 = encoder.serve();
    let p2 = pds[0].serve();
    let p3 = pds[1].serve();
    pds.iter().for_each(|pd| pd.report(v1::WorkerState::default()));
    let always_asks = |config: &mut ProxyConfig| config.encodes.believed_for = Duration::ZERO;
    let proxy = Proxy::start(&[p1.address], &[p2.address, p3.address], Arc::clone(&store), always_asks).await;
    proxy.ready().await;
    ask(&proxy, question(&[IMAGE])).await.unwrap();
    let seen = |pd: &Pd| pd.requests().len();
    let holder = usize::from(seen(&pds[0]) == 0);
    let key = pds[holder].requests()[0].items[0].key.clone();
    let load = |waiting| v1::WorkerLoad { running: 50, waiting, capacity: 400, ..v1::WorkerLoad::default() };
    let state = |waiting, resident_added| v1::WorkerState {
        load: Some(load(waiting)),
        resident_added,
        ..v1::WorkerState::default()
    };
    pds[1 - holder].report(state(45, Vec::new()));
    pds[holder].report(state(50, vec![key.clone()]));
    let lost = triptych_proto::convert::key(&key, "key").unwrap();
    store.delete(&lost).await.unwrap();
    // The holder is chosen although the other has less to do: elsewhere the item would have to be encoded.
    eventually("the report has come", async || {
        let answer = ask(&proxy, question(&[IMAGE])).await.unwrap();
        let there = answer.sources() == [Cached];
        store.delete(&lost).await.unwrap();
        there
    })
    .await;
    let n_jobs = encoder.jobs().len();
    let n_here = seen(&pds[holder]);
    for n in 1..=5 {
        assert_eq!(ask(&proxy, question(&[IMAGE])).await.unwrap().sources(), [Cached]);
        assert_eq!((encoder.jobs().len(), seen(&pds[holder])), (n_jobs, n_here + n));
    }
    // With much more to do than the other it is not.
    pds[holder].report(state(150, Vec::new()));
    eventually("the report has come", async || {
        let answer = ask(&proxy, question(&[IMAGE])).await.unwrap();
        store.delete(&lost).await.unwrap();
        answer.sources() == [Encoded]
    })
    .await;
    pds[holder].report(state(50, Vec::new()));
    eventually("the report has come", async || {
        let answer = ask(&proxy, question(&[IMAGE])).await.unwrap();
        store.delete(&lost).await.unwrap();
        answer.sources() == [Cached]
    })
    .await;
    let n_jobs = encoder.jobs().len();
    // The holder evicted it meanwhile and reports that, so the item is encoded.
    let mut gone = unavailable();
    gone.metadata_mut().insert("triptych-missing-item", 0.into());
    pds[holder].script([GenerateStep::Fail(gone)]);
    assert_eq!(ask(&proxy, question(&[IMAGE])).await.unwrap().sources(), [Encoded]);
    assert_eq!(encoder.jobs().len(), n_jobs + 1);
}
