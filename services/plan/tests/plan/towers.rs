//! Models in which several towers read the same item: each has a job of its own, with its own cost, bytes and worker.

use crate::made::{FAST, Load, Prices, SLOW, curves, image, one};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::offered::Offered;
use triptych_bench::outcome::End;
use triptych_core::TowerIdx;
use triptych_plan::curves::{CostCurves, Interference, Stage, StageInterference, TowerCurves};
use triptych_plan::simulator::result::LeftOver;
use triptych_plan::simulator::spec::{
    ClusterSpec, EncoderSpec, FrontCores, PdSpec, PoolRole, PoolSpec, SpecError,
};
use triptych_plan::simulator::{Simulation, simulate};
use triptych_proxy::Roles;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// Curves of the towers `low` and `high`; the second takes half the time, and its rows are a quarter as wide.
fn two_towers(prices: Prices) -> Arc<CostCurves> {
    let low = curves(prices);
    let half = low.slowed(0.5);
    let high = TowerCurves {
        name: "high".into(),
        encode: half.encode,
        encode_parts: low.encode_parts,
        preprocess: low.preprocess.clone(),
        items: low.items.clone(),
        row_bytes: low.row_bytes / 4,
        is_cross_attended: false,
    };
    Arc::new(CostCurves { tower: "low".into(), more_towers: vec![high], ..low })
}

fn pool(name: &str, role: PoolRole, curves: &Arc<CostCurves>) -> PoolSpec {
    PoolSpec { name: name.into(), workers: 1, role, curves: Arc::clone(curves), lent: None }
}

fn encoder(tower: Option<u8>) -> PoolRole {
    PoolRole::Encoder(EncoderSpec { tower: tower.map(TowerIdx), ..EncoderSpec::default() })
}

/// An encoder worker for each of these, with one tower or all, and a PD worker.
fn split(encoders: &[(&str, Option<u8>)], prices: Prices) -> ClusterSpec {
    let curves = two_towers(prices);
    let encoders = encoders.iter().map(|(name, tower)| pool(name, encoder(*tower), &curves));
    ClusterSpec::new(encoders.chain([pool("pd", PoolRole::Pd(PdSpec::default()), &curves)]).collect())
}

fn run(cluster: &ClusterSpec, offered: Vec<Offered>) -> Simulation {
    let run = simulate(cluster, offered.into_iter(), 1).unwrap();
    assert!(run.outcomes.iter().all(|outcome| outcome.end == End::Whole), "{:?}", run.outcomes);
    assert_eq!(run.left, LeftOver::default());
    run
}

fn n_encoded(run: &Simulation) -> Vec<u64> {
    run.pools.iter().map(|pool| pool.n_encoded).collect()
}

const APART: [(&str, Option<u8>); 2] = [("low", Some(0)), ("high", Some(1))];
const TOGETHER: [(&str, Option<u8>); 1] = [("encoder", None)];

#[test]
fn towers_of_one_worker_share_its_core_and_those_of_two_do_not() {
    let encode = |encoders: &[(&str, Option<u8>)]| {
        run(&split(encoders, SLOW), vec![one(0, 0, 10, vec![image(1, 500)])]).stages[0].encode
    };
    // Half a second of the one and a quarter of the other: both at once on one core are done after 750 ms.
    for (found, expect) in [(encode(&APART), 500), (encode(&TOGETHER), 750)] {
        let expect = Duration::from_millis(expect);
        assert!(found.abs_diff(expect) < Duration::from_millis(10), "{found:?}, not {expect:?}");
    }
}

#[test]
fn an_item_has_an_output_of_each_tower_and_requests_share_both() {
    let offered = || (0..2).map(|i| one(i, 0, 10, vec![image(7, 100)])).collect();
    let apart = run(&split(&APART, SLOW), offered());
    assert_eq!(n_encoded(&apart), [1, 1, 0]);
    assert_eq!((apart.items.n(), apart.items.encoded, apart.items.shared), (2, 1, 1), "an item counts once");
    assert_eq!(
        apart.outcomes.iter().map(|o| (o.items.n, o.items.n_found)).collect::<Vec<_>>(),
        [(1, 0), (1, 1)]
    );
    assert_eq!(n_encoded(&run(&split(&TOGETHER, SLOW), offered())), [2, 0]);
}

#[test]
fn each_tower_is_slowed_by_what_was_measured_of_it() {
    let takes = |of_high: Option<f64>| {
        let mut cluster = split(&APART, SLOW);
        (cluster.proxy.cores, cluster.records_spans) = (FrontCores::Workers, true);
        for pool in &mut cluster.pools {
            let mut curves = (*pool.curves).clone();
            let beside =
                |us| StageInterference { beside_compute_us: Some(us), ..StageInterference::of_alone(1.0) };
            let mut interference = Interference { neighbour_cores: 1, ..Interference::default() };
            interference.set(Stage::Encode(TowerIdx(0)), beside(1.2));
            if let Some(us) = of_high {
                interference.set(Stage::Encode(TowerIdx(1)), beside(us));
            }
            curves.interference = Some(interference);
            pool.curves = Arc::new(curves);
        }
        let run = run(&cluster, vec![one(0, 0, 10, vec![image(1, 500)])]);
        let span = run.spans.iter().find(|span| span.stage == Stage::Encode(TowerIdx(1))).expect("a forward");
        (span.ended - span.began).as_secs_f64()
    };
    // A quarter of a second alone, all the while beside the other tower's half.
    for (of_high, expect) in [(Some(1.8), 0.45), (Some(1.0), 0.25), (None, 0.3)] {
        assert!((takes(of_high) - expect).abs() < 0.01, "{of_high:?}: {} s, not {expect}", takes(of_high));
    }
}

#[test]
fn the_store_counts_the_bytes_of_each_tower() {
    // Two images of 100 rows, of 1000 and 250 bytes: 250 kB in all. No worker keeps rows.
    let encoded = |capacity_bytes| {
        let mut cluster = split(&APART, SLOW);
        cluster.store.capacity_bytes = capacity_bytes;
        for pool in &mut cluster.pools {
            match &mut pool.role {
                PoolRole::Pd(pd) => pd.rows_budget_bytes = 0,
                PoolRole::Encoder(encoder) | PoolRole::Both { encoder, .. } => encoder.rows_budget_bytes = 0,
            }
        }
        let offered = (0..6).map(|i| one(i, i * 5000, 10, vec![image(i % 2, 100)])).collect();
        n_encoded(&run(&cluster, offered)).iter().sum::<u64>()
    };
    assert_eq!(encoded(260_000), 4);
    assert!(encoded(200_000) > 4);
}

#[test]
fn books_balance_whoever_has_the_towers() {
    let load = Load { rate: 10.0, n: 60, text: 60, output: 12, images: 2, image_tokens: 100, pool: Some(20) };
    let check = |case: &str, cluster: &ClusterSpec| {
        let run = simulate(cluster, load.requests(1), 7).unwrap();
        assert!(run.outcomes.iter().all(|outcome| outcome.end == End::Whole), "{case}");
        assert_eq!(run.left, LeftOver::default(), "{case}");
        assert_eq!(run.items.n(), load.n * load.images, "{case}: {:?}", run.items);
    };
    check("apart", &split(&APART, FAST));
    check("together", &split(&TOGETHER, FAST));
    check("one more of one", &split(&[APART[0], APART[1], TOGETHER[0]], FAST));
    let curves = two_towers(FAST);
    let (pd, encoder) = (PdSpec::default(), EncoderSpec::default());
    let both = PoolRole::Both { pd, encoder, encoder_budget: EncoderBudget::Automatic };
    let pool = PoolSpec { workers: 2, ..pool("both", both, &curves) };
    let mut colocated = ClusterSpec::new(vec![pool]);
    check("colocated", &colocated);
    colocated.proxy.roles = Roles::Auto;
    check("elastic", &colocated);
    // Rows of the second tower beside the tokens, as CogAgent reads them.
    let sample = Arc::new(triptych_plan::curves::sample::two_towers());
    let mut cross = split(&APART, FAST);
    cross.pools.iter_mut().for_each(|pool| pool.curves = Arc::clone(&sample));
    let offered = (0..20).map(|i| one(i, i * 400, 20, vec![image(i % 8, 100)])).collect();
    assert_eq!(run(&cross, offered).items.n(), 20);
}

#[test]
fn a_tower_that_nobody_holds_is_named() {
    let alone = simulate(&split(&APART[..1], SLOW), std::iter::empty(), 1);
    assert_eq!(alone, Err(SpecError::NoTower { tower: "high".into() }));
    let mut mixed = split(&APART, SLOW);
    mixed.pools[0].curves = Arc::new(curves(SLOW));
    assert!(matches!(simulate(&mixed, std::iter::empty(), 1), Err(SpecError::Curves { .. })));
}

#[test]
fn named_outputs_are_not_encoded_and_do_not_fill_the_worker_that_answers() {
    let load = Load { rate: 4.0, n: 40, text: 60, output: 8, images: 2, image_tokens: 500, pool: None };
    let curves = Arc::new(curves(SLOW));
    let (pd, encoder) = (PdSpec::default(), EncoderSpec::default());
    let both = PoolRole::Both { pd, encoder, encoder_budget: EncoderBudget::Automatic };
    let mut cluster = ClusterSpec::new(vec![PoolSpec { workers: 4, ..pool("both", both, &curves) }]);
    cluster.request_time = Duration::from_secs(1000);
    cluster.patience = Duration::from_secs(1000);
    for roles in [Roles::Fixed, Roles::Auto] {
        (cluster.proxy.roles, cluster.store.named) = (roles, 1.0);
        let stored = run(&cluster, load.requests(1).collect());
        assert_eq!((n_encoded(&stored), stored.items.stored), (vec![0], 80), "{roles:?}");
        cluster.store.named = 0.5;
        let half = run(&cluster, load.requests(1).collect());
        assert_eq!(half.items.encoded + half.items.stored, 80, "{:?}", half.items);
        assert!((20..60).contains(&half.items.stored), "{:?}", half.items);
    }
}
