//! The fleet without a network: workers that describe themselves by hand, and a clock that is paused.

use super::catalog::Health;
use super::outlier::Outcome;
use super::worker::Worker;
use super::*;
use crate::fleet::catalog::Served;
use crate::fleet::score::Reason;
use std::collections::BTreeSet;
use std::collections::HashSet;
use triptych_core::{Fingerprint, Modality, ModelName};
use triptych_proto::v1;
use triptych_runtime::discovery::{Endpoint, EndpointSet};

mod spills;

fn shared(n_encoders: usize, n_pds: usize) -> Arc<FleetState> {
    with_roles(Roles::Fixed, n_encoders, n_pds)
}

fn with_roles(roles: Roles, n_encoders: usize, n_pds: usize) -> Arc<FleetState> {
    let shared = Arc::new(FleetState {
        workers: Mutex::default(),
        catalog: watch::Sender::default(),
        prefixes: Mutex::default(),
        rng: Mutex::new(StdRng::seed_from_u64(7)),
        deaths: Mutex::new(Deaths::new([0; 32])),
        dialer: Dialer::default(),
        encode_slo: Mutex::new(None),
        roles,
        work: Mutex::default(),
        meters: FleetMeters::new(&MetricsRegistry::default()),
    });
    shared.follow(&present(n_encoders, n_pds));
    for worker in all(&shared) {
        shared.set_up(&worker, describe(false), Instant::now());
    }
    shared
}

fn present(n_encoders: usize, n_pds: usize) -> EndpointSet {
    let of = |role, n| (0..n).map(move |i| Endpoint { role, address: format!("10.0.0.{i}:1") });
    Arc::new(of(Role::Encoder, n_encoders).chain(of(Role::Pd, n_pds)).collect())
}

fn all(shared: &FleetState) -> Vec<Arc<Worker>> {
    shared.workers().values().cloned().collect()
}

fn describe(encodes: bool) -> description::Description {
    let served = Served {
        name: ModelName::new("vl"),
        family: "f".into(),
        edition: edition(),
        tower_names: Default::default(),
        own: edition(),
        towers: Default::default(),
        prompted: BTreeSet::new(),
        max_context: 10,
        max_items: None,
        created_s: 1,
        reads_encoder_prompt: false,
        chat: None,
        adapter: None,
        adapts_encoder: false,
        foreign: None,
        is_resumable: true,
    };
    let (instance, suspects) = (Default::default(), Vec::new());
    description::Description { models: vec![served], encodes, instance, suspects }
}

fn edition() -> catalog::Edition {
    [(Modality::Image.into(), Fingerprint::from_bytes([1; 32]))].into()
}

fn encode() -> Want {
    Want::Encoder {
        model: ModelName::new("vl"),
        encoder: Modality::Image.into(),
        fingerprint: Fingerprint::from_bytes([1; 32]),
    }
}

fn decode() -> Want {
    Want::Pd { model: ModelName::new("vl"), edition: edition(), adapter: None, is_foreign: false }
}

fn lease(shared: &Arc<FleetState>, want: &Want, size: impl Into<Size>, tried: &[WorkerId]) -> Option<Lease> {
    let catalog = shared.catalog.borrow().clone();
    let (worker, given) = shared.choose(&catalog, want, &size.into(), tried)?;
    Some(Lease::new(Arc::clone(shared), worker, given))
}

fn healths(shared: &FleetState) -> Vec<Health> {
    shared.catalog.borrow().workers.iter().map(|w| w.health).collect()
}

/// Reports a measured cost of 1 ms and this queue.
fn measured(queued_us: u64) -> v1::WorkerState {
    let cost = v1::EncodeCost {
        model: "vl".into(),
        modality: v1::Modality::Image.into(),
        fixed_us: 1000,
        p95_ratio: 2.0,
        ..Default::default()
    };
    let load = v1::WorkerLoad { queued_us, costs: vec![cost], ..Default::default() };
    v1::WorkerState { load: Some(load), ..Default::default() }
}

#[tokio::test(start_paused = true)]
async fn work_spreads_by_what_was_sent_since_the_reports() {
    let shared = shared(2, 0);
    let leases: Vec<_> = (0..10).map(|_| lease(&shared, &encode(), 1000, &[]).unwrap()).collect();
    for worker in all(&shared) {
        assert_eq!(leases.iter().filter(|l| *l.id() == worker.id).count(), 5);
    }
    drop(leases);
    assert!(all(&shared).iter().all(|w| w.view().queued_us(Instant::now().into_std()) == 0));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_had_the_work_is_last_and_one_that_drains_gets_none() {
    let shared = shared(2, 0);
    let [one, two] = <[_; 2]>::try_from(all(&shared)).ok().unwrap();
    for _ in 0..10 {
        assert_eq!(*lease(&shared, &encode(), 1, std::slice::from_ref(&one.id)).unwrap().id(), two.id);
    }
    shared.report(&two, v1::WorkerState { draining: true, ..Default::default() }, true);
    assert_eq!(healths(&shared), [Health::Ready, Health::Draining]);
    assert_eq!(*lease(&shared, &encode(), 1, std::slice::from_ref(&one.id)).unwrap().id(), one.id);
    shared.report(&one, v1::WorkerState { draining: true, ..Default::default() }, true);
    assert!(lease(&shared, &encode(), 1, &[]).is_none());
    // Its watch ends before it does. Its successor is another process.
    shared.end_reports(&one);
    assert_eq!(healths(&shared), [Health::Draining; 2]);
    shared.set_down(&one);
    shared.set_up(&one, describe(false), Instant::now());
    assert_eq!(healths(&shared), [Health::Ready, Health::Draining]);
}

#[tokio::test(start_paused = true)]
async fn a_pd_worker_with_encoders_is_the_last_resort_or_the_first_where_there_is_no_encoder() {
    let shared = shared(1, 2);
    let [encoder, pd, plain] = <[_; 3]>::try_from(all(&shared)).ok().unwrap();
    shared.set_up(&pd, describe(true), Instant::now());
    let picked = |tried: &[WorkerId]| lease(&shared, &encode(), 1, tried).unwrap().id().clone();
    assert_eq!(picked(&[]), encoder.id);
    assert_eq!(picked(std::slice::from_ref(&encoder.id)), pd.id);
    shared.set_down(&encoder);
    assert_eq!(picked(&[]), pd.id);
    assert!(shared.catalog.borrow().is_ready());
    assert!(!shared.catalog.borrow().workers.iter().find(|w| w.id == plain.id).unwrap().can_do(&encode()));
    let catalog = shared.catalog.borrow().clone();
    assert_eq!(shared.able(&catalog, &encode(), &[]).unwrap().1, Some(Reason::LastResort));
    shared.follow(&present(0, 2));
    let catalog = shared.catalog.borrow().clone();
    assert_eq!(shared.able(&catalog, &encode(), &[]).unwrap().1, None);
}

/// As [`placement::UnplacedItem`], of a key whose first byte is given.
fn unplaced(key: u8) -> placement::UnplacedItem {
    placement::UnplacedItem { key: ContentKey::from_bytes([key; 32]), want: encode(), bytes: Some(1000) }
}

#[tokio::test(start_paused = true)]
async fn items_that_only_pd_workers_encode_go_where_the_request_will() {
    let shared = shared(0, 2);
    let workers = all(&shared);
    workers.iter().for_each(|worker| shared.set_up(worker, describe(true), Instant::now()));
    let catalog = || shared.catalog.borrow().clone();
    let place = |keys: &[u8]| {
        let items: Vec<_> = keys.iter().map(|key| unplaced(*key)).collect();
        shared.place(&catalog(), &decode(), &items).map(|placed| placed.id().clone())
    };
    assert_eq!(place(&[]), None, "a text has no placement");
    // Four items are given to the first, which makes the second one the placement of what comes next.
    let first = place(&[1, 2, 3, 4]).unwrap();
    let size = || Size::Item { key: None, bytes: 1000, placement: Some(first.clone()) };
    let given: Vec<_> = (0..4).map(|_| lease(&shared, &encode(), size(), &[]).unwrap()).collect();
    assert!(
        given.iter().all(|lease| *lease.id() == first),
        "all items of a request are encoded at its placement"
    );
    let second = place(&[5]).unwrap();
    assert_ne!(second, first);
    let request = Size::Request { items: vec![], prompt: Prefixes::default(), holders: vec![first.clone()] };
    assert_eq!(*lease(&shared, &decode(), request, &[]).unwrap().id(), first, "and it is answered there");
    // What a worker holds costs nothing there.
    drop(given);
    let holder = workers.iter().find(|worker| worker.id == first).unwrap();
    holder.view().resident.insert(ContentKey::from_bytes([6; 32]));
    assert!((0..10).all(|_| place(&[6]).as_ref() == Some(&first)));
    // A placement that was tried is left; one that is down is none.
    let other = lease(&shared, &encode(), size(), std::slice::from_ref(&first)).unwrap();
    assert_eq!(*other.id(), second);
    shared.set_down(holder);
    assert_eq!(place(&[6]), Some(second));
}

#[tokio::test(start_paused = true)]
async fn where_there_are_encoder_workers_a_request_has_no_home() {
    let shared = shared(1, 2);
    all(&shared).iter().for_each(|worker| shared.set_up(worker, describe(true), Instant::now()));
    let catalog = shared.catalog.borrow().clone();
    assert!(shared.place(&catalog, &decode(), &[unplaced(1)]).is_none());
}

#[tokio::test(start_paused = true)]
async fn outputs_that_the_store_has_cost_no_encode_where_the_request_is_placed() {
    let shared = shared(0, 2);
    let workers = all(&shared);
    for worker in &workers {
        shared.set_up(worker, describe(true), Instant::now());
        worker.view().take_report(measured(0), true, Instant::now().into_std());
    }
    let catalog = shared.catalog.borrow().clone();
    let stored = |key| placement::UnplacedItem { bytes: None, ..unplaced(key) };
    let place = |items: &[placement::UnplacedItem]| shared.place(&catalog, &decode(), items);
    assert!(place(&[stored(1), stored(2)]).is_none(), "nothing is encoded");
    let reserved = || workers.iter().map(|worker| worker.view().reserved_us).sum::<u64>();
    let one = place(&[unplaced(1)]).map(|placed| (reserved(), placed));
    let alone = one.expect("a placement").0;
    let mixed = place(&[stored(2), unplaced(3), stored(4)]).expect("a placement");
    assert!(alone > 0);
    assert_eq!(reserved(), alone, "that of the one item that is encoded");
    drop(mixed);
    // Of two equal workers the one that holds such an output is better.
    let holder = &workers[1];
    holder.view().resident.insert(ContentKey::from_bytes([9; 32]));
    assert_eq!(*place(&[stored(9), unplaced(5)]).expect("a placement").id(), holder.id);
}

#[tokio::test(start_paused = true)]
async fn requests_that_arrive_together_live_apart() {
    let shared = shared(0, 4);
    let workers = all(&shared);
    workers.iter().for_each(|worker| shared.set_up(worker, describe(true), Instant::now()));
    // One is a little faster than the others, and all are idle.
    for worker in &workers {
        worker.view().take_report(measured(0), true, Instant::now().into_std());
    }
    let load = workers[2].view().report.as_mut().map(|report| report.load.costs[0].fixed_us -= 100);
    assert!(load.is_some());
    let catalog = shared.catalog.borrow().clone();
    let place = |key| shared.place(&catalog, &decode(), &[unplaced(key), unplaced(key + 1)]).unwrap();
    let placements = [1, 3, 5, 7].map(place);
    assert_eq!(*placements[0].id(), workers[2].id, "the fastest is first");
    let different: HashSet<_> = placements.iter().map(|placed| placed.id().clone()).collect();
    assert_eq!(different.len(), 4, "before any job was sent: {placements:?}");
    // A report does not end what is reserved; being given does, and so does the end of the request.
    let reserved = |worker: &Arc<Worker>| worker.view().reserved_us;
    workers[2].view().take_report(measured(0), false, Instant::now().into_std());
    assert_eq!(reserved(&workers[2]), 1800);
    placements[0].given(&ContentKey::from_bytes([1; 32]));
    placements[0].given(&ContentKey::from_bytes([1; 32]));
    assert_eq!(reserved(&workers[2]), 900);
    placements[1].settle();
    placements[1].settle();
    drop(placements);
    assert!(workers.iter().all(|worker| reserved(worker) == 0));
}

#[test]
fn a_large_pool_is_not_led_by_the_one_that_looks_best() {
    let mut rng = StdRng::seed_from_u64(1);
    let mut loads = vec![score::PlacementLoad { score_us: 1000, n_held: 0 }; 100];
    loads[40].score_us = 1;
    let chosen: HashSet<_> = (0..50).filter_map(|_| score::choose_placement(&loads, &mut rng)).collect();
    assert!(chosen.len() > 25, "{chosen:?}");
    // Who holds the items is always among those that are compared.
    loads[70] = score::PlacementLoad { score_us: 10, n_held: 2 };
    let chosen: HashSet<_> = (0..50).filter_map(|_| score::choose_placement(&loads, &mut rng)).collect();
    assert!(chosen.contains(&70) && chosen.is_subset(&HashSet::from([40, 70])), "{chosen:?}");
    assert_eq!(score::choose_placement(&[], &mut rng), None);
}

#[tokio::test(start_paused = true)]
async fn never_more_than_half_are_ejected_and_one_probe_brings_a_worker_back() {
    let shared = shared(3, 0);
    let workers = all(&shared);
    let fail = |worker: &Arc<Worker>| {
        for _ in 0..5 {
            shared.count(worker, Outcome::Failed);
        }
    };
    workers.iter().for_each(fail);
    assert_eq!(healths(&shared), [Health::Ejected, Health::Ready, Health::Ready]);
    assert!((0..20).all(|_| *lease(&shared, &encode(), 1, &[]).unwrap().id() != workers[0].id));
    tokio::time::advance(Duration::from_secs(5)).await;
    shared.half_open(&workers[0], Instant::now());
    let probe = lease(&shared, &encode(), 1, &[]).unwrap();
    assert_eq!(*probe.id(), workers[0].id);
    assert_ne!(*lease(&shared, &encode(), 1, &[]).unwrap().id(), workers[0].id);
    // Without an outcome the next one is a probe; with a good one all is well.
    drop(probe);
    lease(&shared, &encode(), 1, &[]).unwrap().report_ok();
    assert_eq!(healths(&shared), [Health::Ready; 3]);
    // The only one that serves a model is never ejected.
    let alone = self::shared(1, 1);
    all(&alone).iter().for_each(|worker| {
        for _ in 0..20 {
            alone.count(worker, Outcome::Failed);
        }
    });
    assert_eq!(healths(&alone), [Health::Ready; 2]);
}

#[tokio::test(start_paused = true)]
async fn a_success_rate_far_below_the_others_ejects() {
    let shared = shared(3, 0);
    let workers = all(&shared);
    for i in 0..30 {
        for worker in &workers[1..] {
            shared.count(worker, Outcome::Good);
        }
        shared.count(&workers[0], if i % 2 == 0 { Outcome::Failed } else { Outcome::Good });
    }
    shared.compare_rates(Instant::now());
    assert_eq!(healths(&shared), [Health::Ejected, Health::Ready, Health::Ready]);
}

#[tokio::test(start_paused = true)]
async fn a_forecast_needs_measured_costs_of_all_and_is_the_best_ones() {
    let shared = shared(2, 0);
    let workers = all(&shared);
    let forecast = || shared.forecast(&shared.catalog.borrow().clone(), &encode(), 100);
    assert_eq!(forecast(), None);
    shared.report(&workers[0], measured(9000), true);
    assert_eq!(forecast(), None);
    shared.report(&workers[1], measured(4000), true);
    let best = forecast().unwrap();
    assert_eq!(best.end(), Duration::from_micros(5000));
    assert_eq!(best.p95, Duration::from_micros(2000));
    tokio::time::advance(Duration::from_millis(2)).await;
    assert_eq!(forecast().unwrap().queue, Duration::from_millis(2));
}

#[tokio::test(start_paused = true)]
async fn a_request_goes_where_its_items_and_its_prompt_are() {
    let shared = shared(0, 3);
    let workers = all(&shared);
    let key = ContentKey::from_bytes([5; 32]);
    let resident = v1::WorkerState { resident_added: vec![vec![5; 32].into()], ..Default::default() };
    shared.report(&workers[1], resident, true);
    let text = |text: &str| triptych_core::prompt::TextOrTokens::Text(text.repeat(200));
    let prompt = |s: &str| {
        let prompt = triptych_core::prompt::Prompt::Singleton(text(s));
        Prefixes::of(b"t", &prompt, &[])
    };
    let size = |items: &[(ContentKey, u64)], s: &str| Size::Request {
        items: items.to_vec(),
        prompt: prompt(s),
        holders: Vec::new(),
    };
    for _ in 0..10 {
        let picked = lease(&shared, &decode(), size(&[(key, 64 << 20)], "short "), &[]).unwrap();
        assert_eq!(*picked.id(), workers[1].id);
    }
    for worker in &workers {
        let only_there =
            Size::Request { items: Vec::new(), prompt: prompt(""), holders: vec![worker.id.clone()] };
        assert_eq!(*lease(&shared, &decode(), only_there.clone(), &[]).unwrap().id(), worker.id);
        let elsewhere = lease(&shared, &decode(), only_there, std::slice::from_ref(&worker.id)).unwrap();
        assert_ne!(*elsewhere.id(), worker.id, "it was there, and failed");
    }
    let first = lease(&shared, &decode(), size(&[], "a long story "), &[]).unwrap().id().clone();
    for _ in 0..10 {
        assert_eq!(*lease(&shared, &decode(), size(&[], "a long story "), &[]).unwrap().id(), first);
    }
}

/// One worker has 200 prompt tokens to read, the other a request that runs, which is worth 10 ms.
#[tokio::test(start_paused = true)]
async fn tokens_that_wait_weigh_what_workers_measured() {
    let shared = shared(0, 2);
    let workers = all(&shared);
    let cases: [([Option<f64>; 2], usize); 4] = [
        ([None, None], 1),
        ([Some(30.0), None], 0),
        ([Some(30.0), Some(30.0)], 0),
        ([Some(90.0), Some(90.0)], 1),
    ];
    for (token_us, expect) in cases {
        for (i, worker) in workers.iter().enumerate() {
            let cost = |token_us| v1::PrefillCost { model: "vl".into(), token_us };
            let load = v1::WorkerLoad {
                waiting_tokens: if i == 0 { 200 } else { 0 },
                running: i as u32,
                prefill_costs: token_us[i].map(cost).into_iter().collect(),
                ..Default::default()
            };
            shared.report(worker, v1::WorkerState { load: Some(load), ..Default::default() }, true);
        }
        let size = Size::Request { items: Vec::new(), prompt: Prefixes::default(), holders: Vec::new() };
        let picked = lease(&shared, &decode(), size, &[]).unwrap();
        assert_eq!(*picked.id(), workers[expect].id, "{token_us:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_leaves_discovery_is_forgotten_at_once_and_gone_when_idle() {
    let shared = shared(2, 1);
    let leaving = all(&shared).remove(0);
    let work = shared.choose(
        &shared.catalog.borrow().clone(),
        &encode(),
        &Size::from(1),
        &[all(&shared)[1].id.clone()],
    );
    let (worker, given) = work.unwrap();
    assert_eq!(worker.id, leaving.id);
    let work = Lease::new(Arc::clone(&shared), worker, given);
    let rest: EndpointSet =
        Arc::new(present(2, 1).iter().filter(|e| **e != leaving.endpoint).cloned().collect());
    assert!(shared.follow(&rest).is_empty());
    assert_eq!(shared.catalog.borrow().workers.len(), 2);
    // What its task says late changes nothing.
    shared.set_up(&leaving, describe(false), Instant::now());
    assert_eq!(shared.catalog.borrow().workers.len(), 2);
    let mut gone = std::pin::pin!(leaving.gone());
    assert!(futures::poll!(&mut gone).is_pending());
    drop(work);
    gone.await;
    // It may come back as another.
    assert_eq!(shared.follow(&present(2, 1)).len(), 1);
}
