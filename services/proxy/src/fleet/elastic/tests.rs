//! Tables of loads, and who encodes.

use super::*;
use crate::fleet::score::EngineLoad;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;
use triptych_core::WorkerId;

const COST_US: u64 = 1000;

fn ids(n: usize) -> Vec<WorkerId> {
    (0..n).map(|i| WorkerId::new(format!("worker-{i}"))).collect()
}

/// An encoder worker with so much to do.
fn encoder(id: &WorkerId, queued_us: u64) -> EncoderLoad<'_> {
    EncoderLoad { id, queued_us, cost_us: COST_US, cold_us: 0, is_full: false, engine: None }
}

/// A PD worker with encoders.
fn pd(id: &WorkerId, queued_us: u64, running: u64) -> EncoderLoad<'_> {
    EncoderLoad { engine: Some(EngineLoad { running, ..EngineLoad::default() }), ..encoder(id, queued_us) }
}

fn choose(loads: &[EncoderLoad<'_>], home: Option<usize>) -> (usize, Reason) {
    let choice = choose_elastic(loads, home, None, &mut StdRng::seed_from_u64(1)).unwrap();
    (choice.index, choice.reason)
}

#[test]
fn encodes_spill_to_a_pd_worker_when_that_ends_sooner_by_more_than_the_margin() {
    let ids = ids(2);
    // Queue of the encoder worker, that of the PD worker, requests that run there, and who encodes.
    for (queued, beside, running, expect) in [
        (0, 0, 0, 0),
        (COST_US, 0, 0, 0),
        (COST_US + 1, 0, 0, 1),
        // Running requests take half of the cores, and each is delayed by the item.
        (2 * COST_US, 0, 1, 0),
        (3 * COST_US + 1, 0, 1, 1),
        (9 * COST_US, 0, 8, 0),
        (2 * COST_US, 2 * COST_US, 0, 0),
    ] {
        let loads = [encoder(&ids[0], queued), pd(&ids[1], beside, running)];
        let reason = if expect == 1 { Reason::Spill } else { Reason::Only };
        assert_eq!(choose(&loads, None), (expect, reason), "{queued} {beside} {running}");
    }
}

#[test]
fn items_are_encoded_where_their_request_is_placed_while_all_workers_do_both() {
    let ids = ids(2);
    // Queue of the placement, requests that run there and at the other worker, and whether that one takes the item.
    for (queued, running, beside, spills) in [
        (0, 0, 0, false),
        (0, 8, 1, false),
        (20 * COST_US, 8, 1, false),
        // Nothing is disturbed.
        (COST_US, 0, 0, false),
        (2 * COST_US, 0, 0, true),
        (0, 8, 0, true),
    ] {
        let loads = [pd(&ids[0], queued, running), pd(&ids[1], 0, beside)];
        let expect = if spills { (1, Reason::Spill) } else { (0, Reason::Favourite) };
        assert_eq!(choose(&loads, Some(0)), expect, "{queued} {running} {beside}");
    }
    let waiting = EngineLoad { waiting_us: 1, ..EngineLoad::default() };
    let loads = [pd(&ids[0], 20 * COST_US, 0), EncoderLoad { engine: Some(waiting), ..pd(&ids[1], 0, 0) }];
    assert_eq!(choose(&loads, Some(0)), (0, Reason::Favourite), "a prompt waits there");
    // A placement that is full takes nothing, and nobody else does if all are.
    let mut full = [pd(&ids[0], 0, 0), pd(&ids[1], 2 * COST_US, 0)];
    full[0].is_full = true;
    assert_eq!(choose(&full, Some(0)), (1, Reason::Spill));
    full[1].is_full = true;
    assert_eq!(choose(&full, Some(0)).0, 0);
}

#[test]
fn a_placement_relieves_an_encoder_that_still_answers() {
    let ids = ids(3);
    let with_role = |load: EncoderLoad<'static>, role| {
        let engine = load.engine.map(|engine| EngineLoad { role, ..engine });
        EncoderLoad { engine, ..load }
    };
    let ids: &'static [WorkerId] = Box::leak(ids.into_boxed_slice());
    // Queue of the worker that is left to encodes, requests that it still answers, queue of the placement, and who encodes.
    for (queued, running, beside, expect) in [
        (0, 0, 0, 2),
        (8 * COST_US, 0, 0, 2),
        (8 * COST_US, 3, 0, 1),
        (8 * COST_US, 3, 7 * COST_US, 1),
        (8 * COST_US, 3, 8 * COST_US, 2),
        (0, 3, 0, 2),
    ] {
        let others = [pd(&ids[0], 0, 8), pd(&ids[1], beside, 8)];
        let [a, b] = others.map(|load| with_role(load, ElasticRole::Pd));
        let loads = [a, b, with_role(pd(&ids[2], queued, running), ElasticRole::Encoder)];
        assert_eq!(choose(&loads, Some(1)).0, expect, "{queued} {running} {beside}");
        let full = loads.map(|load| EncoderLoad { is_full: load.id == &ids[1], ..load });
        assert_eq!(choose(&full, Some(1)).0, 2, "a placement that is full takes nothing");
    }
}

#[test]
fn a_placement_whose_encoder_weights_are_away_encodes_when_the_load_is_shorter_than_the_queue_elsewhere() {
    let ids = ids(2);
    let cold = |queued| [EncoderLoad { cold_us: 5 * COST_US, ..pd(&ids[0], 0, 0) }, pd(&ids[1], queued, 0)];
    assert_eq!(choose(&cold(0), Some(0)), (1, Reason::Spill));
    assert_eq!(choose(&cold(3 * COST_US), Some(0)), (1, Reason::Spill));
    assert_eq!(choose(&cold(9 * COST_US), Some(0)), (0, Reason::Favourite));
    assert_eq!(
        choose(&cold(9 * COST_US), Some(1)),
        (0, Reason::Spill),
        "a cold worker that has nothing to do helps out"
    );
}

#[test]
fn waiting_prompts_take_half_of_the_cores_until_they_are_read() {
    let id = WorkerId::new("w");
    let with = |waiting_us| EncoderLoad {
        engine: Some(EngineLoad { waiting_us, ..EngineLoad::default() }),
        ..encoder(&id, 0)
    };
    assert_eq!([0, 300, 5000].map(|us| with(us).total_us()), [1000, 1300, 2000]);
}

#[test]
fn nobody_encodes_where_nobody_can() {
    assert_eq!(choose_elastic(&[], None, None, &mut StdRng::seed_from_u64(1)), None);
    let id = WorkerId::new("w");
    assert_eq!(
        choose(&[encoder(&id, 0)], Some(7)),
        (0, Reason::Only),
        "a placement that is not able counts for nothing"
    );
}

proptest! {
    #[test]
    fn what_spills_is_done_sooner_by_more_than_its_cost(
        queued in prop::collection::vec((0u64..20_000, 0u64..10), 2..6),
    ) {
        let ids = ids(queued.len());
        let mut loads: Vec<_> = queued.iter().zip(&ids).map(|((us, n), id)| pd(id, *us, *n)).collect();
        loads[0].engine = None;
        let (index, reason) = choose(&loads, None);
        let best = loads.iter().skip(1).map(EncoderLoad::total_us).min().unwrap();
        prop_assert_eq!(reason == Reason::Spill, best + COST_US < loads[0].total_us());
        prop_assert_eq!(loads[index].total_us(), if index == 0 { loads[0].total_us() } else { best });
    }
}

fn with_role(id: &WorkerId, queued_us: u64, role: ElasticRole) -> EncoderLoad<'_> {
    EncoderLoad { engine: Some(EngineLoad { role, ..EngineLoad::default() }), ..encoder(id, queued_us) }
}

#[test]
fn as_many_workers_are_left_to_encodes_as_they_keep_busy_and_one_always_answers() {
    use ElasticRole::{Both, Encoder, Pd};
    let cases: [(&[ElasticRole], usize, &[ElasticRole]); 9] = [
        (&[], 3, &[]),
        (&[Both], 3, &[Both]),
        (&[Both, Both], 0, &[Both, Both]),
        (&[Both, Both], 1, &[Pd, Encoder]),
        (&[Both, Both], 9, &[Pd, Encoder]),
        (&[Both, Both, Both, Both], 2, &[Pd, Pd, Encoder, Encoder]),
        (&[Encoder, Both, Both], 1, &[Encoder, Pd, Pd]),
        (&[Encoder, Both, Both], 2, &[Encoder, Pd, Encoder]),
        (&[Both, Both, Pd], 2, &[Encoder, Encoder, Pd]),
    ];
    for (assigned, n, expect) in cases {
        assert_eq!(divide(assigned, n), expect, "{assigned:?} {n}");
    }
}

#[test]
fn items_go_to_workers_that_are_left_to_encodes_before_any_that_answers() {
    use ElasticRole::{Encoder, Pd};
    let ids = ids(3);
    let loads = |queued: [u64; 3]| {
        [
            with_role(&ids[0], queued[0], Pd),
            with_role(&ids[1], queued[1], Encoder),
            with_role(&ids[2], queued[2], Encoder),
        ]
    };
    assert_ne!(choose(&loads([0, 0, 0]), Some(0)).0, 0, "the placement is no home");
    assert_eq!(choose(&loads([0, 7 * COST_US, 0]), Some(0)).0, 2);
    assert_ne!(choose(&loads([0, 8 * COST_US, 8 * COST_US]), Some(0)).0, 0);
    assert_eq!(
        choose(&loads([0, 10 * COST_US, 10 * COST_US]), Some(0)),
        (0, Reason::Spill),
        "a floor, no wall"
    );
}

#[test]
fn requests_are_placed_at_workers_that_answer() {
    let ids = ids(2);
    let site = |i: usize, answer_us, role| PlacementSite {
        answer_us,
        encode: with_role(&ids[i], 0, role),
        n_held: 0,
    };
    let place = |roles: [ElasticRole; 2]| {
        let sites = [site(0, 1000, roles[0]), site(1, 0, roles[1])];
        place_elastic(&sites, &mut StdRng::seed_from_u64(1))
    };
    assert_eq!(place([ElasticRole::Both, ElasticRole::Both]), Some(1));
    // Who does both encodes what is placed there; who is left to requests does not.
    let with_encode = |role: ElasticRole| {
        let mut sites = [site(0, 0, role), site(1, COST_US, role), site(1, 0, ElasticRole::Encoder)];
        sites[0].encode.cost_us = 3 * COST_US;
        let n = if role == ElasticRole::Both { 2 } else { 3 };
        place_elastic(&sites[..n], &mut StdRng::seed_from_u64(1))
    };
    assert_eq!(with_encode(ElasticRole::Both), Some(1));
    assert_eq!(with_encode(ElasticRole::Pd), Some(0));
    assert_eq!(place([ElasticRole::Pd, ElasticRole::Encoder]), Some(0));
    assert!(place([ElasticRole::Encoder, ElasticRole::Encoder]).is_some(), "rather than none");
    assert_eq!(place_elastic(&[], &mut StdRng::seed_from_u64(1)), None);
}
