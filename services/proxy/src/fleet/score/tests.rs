//! Tables of loads and what is chosen of them, and what must hold of any.

use super::*;
use proptest::prelude::*;
use rand::SeedableRng;
use rand::rngs::StdRng;

fn ids(n: usize) -> Vec<WorkerId> {
    (0..n).map(|i| WorkerId::new(format!("encoder@10.0.0.{i}:7001"))).collect()
}

fn key(n: u32) -> ContentKey {
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&n.to_le_bytes());
    ContentKey::from_bytes(bytes)
}

fn encoders<'a>(ids: &'a [WorkerId], queued_us: &[u64]) -> Vec<EncoderLoad<'a>> {
    let load = |(id, &queued_us)| EncoderLoad {
        id,
        queued_us,
        cost_us: 1000,
        cold_us: 0,
        is_full: false,
        engine: None,
    };
    ids.iter().zip(queued_us).map(load).collect()
}

fn favourite(ids: &[WorkerId], key: &ContentKey) -> usize {
    (0..ids.len()).max_by_key(|i| weight(key, &ids[*i])).unwrap()
}

#[test]
fn the_favourite_is_taken_while_waiting_for_it_costs_less_than_an_encode() {
    let ids = ids(2);
    let key = key(1);
    let favourite = favourite(&ids, &key);
    let rng = &mut StdRng::seed_from_u64(1);
    for (ahead_us, expect) in [(0, true), (1000, true), (1001, false), (50_000, false)] {
        let mut queued = [500, 500];
        queued[favourite] += ahead_us;
        let choice = choose_encoder(&encoders(&ids, &queued), Some(&key), rng).unwrap();
        assert_eq!(choice.index == favourite, expect, "{ahead_us}");
        assert_eq!(choice.reason, if expect { Reason::Favourite } else { Reason::Best }, "{ahead_us}");
    }
}

#[test]
fn who_is_full_is_not_asked_unless_all_are() {
    let ids = ids(3);
    let rng = &mut StdRng::seed_from_u64(2);
    for n in 0..100 {
        let key = key(n);
        let mut loads = encoders(&ids, &[0, 0, 9_000_000]);
        loads[0].is_full = true;
        loads[1].is_full = true;
        assert_eq!(choose_encoder(&loads, Some(&key), rng), Some(Choice { index: 2, reason: Reason::Only }));
        loads[2].is_full = true;
        assert_ne!(choose_encoder(&loads, Some(&key), rng).unwrap().index, 2);
    }
    assert_eq!(choose_encoder(&[], None, rng), None);
    assert_eq!(choose_pd(&[], rng), None);
}

const IDLE: PdLoad = PdLoad {
    kv_usage: 0.0,
    running: 0,
    waiting: 0,
    waiting_tokens: 0,
    own_tokens: 400,
    prefill: PrefillTime::UNMEASURED,
    own_bytes: 4 << 20,
    encode_us: 0,
    is_full: false,
};

#[test]
fn a_pd_worker_that_holds_what_is_needed_is_chosen_until_it_is_too_busy() {
    let rng = &mut StdRng::seed_from_u64(3);
    let holder = PdLoad { own_bytes: 0, own_tokens: 100, ..IDLE };
    let cases = [
        (holder, IDLE, Reason::Favourite),
        (PdLoad { running: 5, ..holder }, IDLE, Reason::Favourite),
        (PdLoad { running: 20, ..holder }, IDLE, Reason::Best),
        (PdLoad { waiting: 20, ..holder }, IDLE, Reason::Best),
        (PdLoad { kv_usage: 0.95, ..holder }, IDLE, Reason::Best),
        (PdLoad { waiting_tokens: 1000, ..holder }, IDLE, Reason::Best),
        (
            PdLoad { waiting_tokens: 1000, prefill: PrefillTime::of_workers([Some(1.0)]), ..holder },
            IDLE,
            Reason::Favourite,
        ),
        (PdLoad { is_full: true, ..holder }, IDLE, Reason::Only),
        // Both are busy: the one that holds is less so.
        (PdLoad { kv_usage: 0.95, ..holder }, PdLoad { kv_usage: 0.97, ..IDLE }, Reason::Favourite),
    ];
    for (i, (holder, other, expect)) in cases.into_iter().enumerate() {
        let choice = choose_pd(&[holder, other], rng).unwrap();
        assert_eq!((choice.index == 0, choice.reason), (expect == Reason::Favourite, expect), "case {i}");
    }
}

#[test]
fn a_holder_is_preferred_until_it_has_a_quarter_more_than_the_others() {
    // Seven workers with 70 requests: ten each, and at most thirteen at a holder.
    for (own, expect) in [(0, true), (10, true), (13, true), (14, false), (70, false)] {
        assert_eq!(is_within_bound(own, (70, 7)), expect, "{own}");
    }
    assert!(is_within_bound(1, (1, 7)), "an idle pool's first request");
    assert!(!is_within_bound(2, (2, 7)));
    assert!(is_within_bound(5, (5, 1)) && is_within_bound(0, (0, 0)));
    assert!(is_within_bound(u64::MAX / 1000, (u64::MAX, 1)));
}

#[test]
fn in_a_large_pool_the_one_that_holds_is_always_compared() {
    let rng = &mut StdRng::seed_from_u64(4);
    let mut loads = vec![IDLE; 100];
    loads[57].own_bytes = 0;
    for _ in 0..100 {
        assert_eq!(choose_pd(&loads, rng), Some(Choice { index: 57, reason: Reason::Favourite }));
    }
}

/// The share of each of `n` workers among many choices.
fn shares(n: usize, mut choose: impl FnMut(u32) -> usize) -> Vec<f64> {
    let n_choices = 20_000;
    let mut counts = vec![0u32; n];
    for i in 0..n_choices {
        counts[choose(i)] += 1;
    }
    counts.into_iter().map(|c| f64::from(c) / f64::from(n_choices)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn equal_workers_have_equal_shares(n in 1usize..20, seed: u64, queued: u32) {
        let rng = &mut StdRng::seed_from_u64(seed);
        let ids = ids(n);
        let loads = encoders(&ids, &vec![u64::from(queued); n]);
        let pds = vec![IDLE; n];
        let all = [
            shares(n, |i| choose_encoder(&loads, Some(&key(i)), rng).unwrap().index),
            shares(n, |_| choose_encoder(&loads, None, rng).unwrap().index),
            shares(n, |_| choose_pd(&pds, rng).unwrap().index),
        ];
        for share in all.into_iter().flatten() {
            prop_assert!((share * n as f64 - 1.0).abs() < 0.2, "{share} of {n}");
        }
    }

    #[test]
    fn the_busiest_is_never_chosen_without_a_favourite(queued in prop::collection::vec(0u64..1 << 40, 2..20), seed: u64) {
        let rng = &mut StdRng::seed_from_u64(seed);
        let ids = ids(queued.len());
        let loads = encoders(&ids, &queued);
        let worst = queued.iter().max().unwrap();
        prop_assume!(queued.iter().filter(|q| *q == worst).count() == 1);
        for _ in 0..20 {
            let choice = choose_encoder(&loads, None, rng).unwrap();
            prop_assert!(queued[choice.index] < *worst);
        }
    }

    #[test]
    fn a_worker_that_comes_takes_keys_and_moves_no_other(n in 1usize..12, keys in 1u32..200) {
        let (before, after) = (ids(n), ids(n + 1));
        for key in (0..keys).map(key) {
            let (old, new) = (favourite(&before, &key), favourite(&after, &key));
            prop_assert!(new == old || new == n);
        }
    }

    #[test]
    fn no_load_overflows(own in any::<u64>(), waiting in any::<u64>(), kv in -1.0f64..2.0) {
        let load = PdLoad { kv_usage: kv, running: own, waiting, waiting_tokens: own, own_tokens: own, prefill: PrefillTime::UNMEASURED, own_bytes: own, encode_us: own, is_full: false };
        let encoder = EncoderLoad { id: &WorkerId::new("e"), queued_us: own, cost_us: waiting, cold_us: own, is_full: false, engine: Some(EngineLoad { running: own, waiting_us: own, ..EngineLoad::default() }) };
        prop_assert!(load.score_us() >= load.own_us());
        prop_assert!(encoder.total_us() >= encoder.completion_us() && encoder.completion_us() >= own);
    }
}
