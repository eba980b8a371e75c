//! Nothing is lost, nothing is made up, and the same seed gives the same run.

use crate::made::{FAST, Load, Prices, apart, pool};
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::outcome::End;
use triptych_models::decoder::KvCacheGroups;
use triptych_pd::EngineSettings;
use triptych_plan::curves::{CostCurves, FrontCost, KvSizes};
use triptych_plan::simulator::result::{LeftOver, Simulation};
use triptych_plan::simulator::simulate;
use triptych_plan::simulator::spec::{
    ClusterSpec, EncoderSpec, FrontCores, ItemsAt, PdSpec, PoolRole, ProxySpec,
};
use triptych_runtime::compute_arbiter::EncoderBudget;

const LOAD: Load =
    Load { rate: 20.0, n: 150, text: 60, output: 12, images: 2, image_tokens: 100, pool: Some(40) };

fn both(workers: usize, encoder_budget: EncoderBudget) -> ClusterSpec {
    let (pd, encoder) = (PdSpec::default(), EncoderSpec::default());
    ClusterSpec::new(vec![pool("both", workers, PoolRole::Both { pd, encoder, encoder_budget }, FAST)])
}

fn check(case: &str, cluster: &ClusterSpec, load: Load) -> Simulation {
    let run = simulate(cluster, load.requests(1), 7).unwrap();
    assert_eq!(run.outcomes.len() as u64, load.n, "{case}");
    for (i, outcome) in run.outcomes.iter().enumerate() {
        assert_eq!(outcome.index, i as u64, "{case}");
        assert_ne!(outcome.end, End::Unended, "{case}: {outcome:?}");
        assert!(
            outcome.tokens.is_sorted() && outcome.tokens.first().is_none_or(|t| *t > outcome.due),
            "{case}"
        );
        assert!(outcome.tokens.last().is_none_or(|t| *t <= outcome.ended), "{case}: {outcome:?}");
        let n = outcome.tokens.len();
        assert_eq!(outcome.end == End::Whole, n == load.output as usize, "{case}: {n} {:?}", outcome.end);
    }
    assert_eq!(run.left, LeftOver::default(), "{case}");
    assert_eq!(run.items.n(), load.n * load.images, "{case}: {:?}", run.items);
    for pool in &run.pools {
        let most = pool.cores as f64 * run.span.as_secs_f64();
        assert!(pool.busy_s <= most * (1.0 + 1e-9), "{case}: {pool:?} in {:?}", run.span);
        let parts = pool.encode_s + pool.step_s + pool.front_s;
        assert!(pool.busy_s <= parts * 1.0001 + 1e-6, "{case}: busy without work: {pool:?}");
    }
    run
}

#[test]
fn every_request_ends_once_and_every_book_balances() {
    check("apart", &apart(2, 2, FAST), LOAD);
    check("no items", &apart(1, 1, FAST), Load { images: 0, ..LOAD });
    check("turns", &both(2, EncoderBudget::Automatic), LOAD);
    check("unlimited turns", &both(1, EncoderBudget::Unlimited), LOAD);
    // Ten times what it can do: some are refused, some too late, and none is lost.
    let mut small = apart(1, 1, FAST);
    small.proxy = ProxySpec { max_in_flight: 20, ..ProxySpec::default() };
    small.request_time = std::time::Duration::from_millis(300);
    let crowd = check("crowd", &small, Load { rate: 300.0, ..LOAD });
    let refused = crowd.outcomes.iter().filter(|o| o.end == End::Refused).count();
    let late = crowd.outcomes.iter().filter(|o| matches!(o.end, End::Failed(_))).count();
    assert!(refused > 10 && late > 0, "{refused} refused, {late} too late");
    // Little room for keys and values: sequences give way, and still end.
    let mut tight = apart(1, 1, FAST);
    if let PoolRole::Pd(pd) = &mut tight.pools[1].role {
        pd.engine.self_kv_bytes = Some(17 * 32 * 10_000);
        pd.engine.host_kv_bytes = 0;
    }
    let tight = check("tight", &tight, Load { rate: 100.0, text: 20, output: 60, ..LOAD });
    assert!(tight.preemptions > 0);
    // A store that holds next to nothing, and shares its line.
    let mut forgetful = apart(2, 2, FAST);
    forgetful.store.parallel = 1.0;
    for capacity_bytes in [100_000, 200_000, 300_000, 400_000] {
        forgetful.store.capacity_bytes = capacity_bytes;
        check("forgetful", &forgetful, LOAD);
    }
    let mut cached = apart(2, 1, FAST);
    if let PoolRole::Encoder(encoder) = &mut cached.pools[0].role {
        encoder.advertise = true;
    }
    check("cached", &cached, LOAD);
    // A decoder that cross-attends to one image each.
    let mut cross = apart(1, 1, FAST);
    let mut curves = (*cross.pools[1].curves).clone();
    curves.kv.cross_row_bytes = 1000;
    let projects = triptych_plan::curves::StepPoint {
        projected_rows: 100,
        p50_us: 8000.0,
        p95_us: 9000.0,
        ..curves.step[0]
    };
    curves.step.push(projects);
    cross.pools[1].curves = curves.into();
    cross.prompt.items = ItemsAt::Cross;
    check("cross", &cross, Load { images: 1, ..LOAD });
}

/// The load on one PD worker with these caches; text alone.
fn with_caches(case: &str, change: impl FnOnce(&mut KvSizes, &mut PdSpec), load: Load) -> Simulation {
    let mut cluster = apart(1, 1, FAST);
    let mut curves = (*cluster.pools[1].curves).clone();
    let PoolRole::Pd(pd) = &mut cluster.pools[1].role else { panic!("a PD worker") };
    pd.engine.host_kv_bytes = 0;
    change(&mut curves.kv, pd);
    cluster.pools[1].curves = curves.into();
    check(case, &cluster, Load { images: 0, ..load })
}

/// Most sequences that ran at once.
fn most_running(run: &Simulation) -> usize {
    run.timeline.iter().map(|moment| moment.running).max().unwrap_or(0)
}

/// Bytes of a token's keys and values in accounted sizes, as `made::curves` has them.
const TOKEN_BYTES: usize = 10_000;

#[test]
fn layers_with_a_window_give_back_what_is_behind_it() {
    // Room for three sequences at their ends, if nothing is given back.
    let load = Load { rate: 100.0, n: 30, text: 300, output: 300, ..LOAD };
    let room = 3 * 640 * TOKEN_BYTES;
    let run = |case: &str, groups: &[u32]| {
        let windows: Vec<_> = groups.iter().map(|window| NonZeroU32::new(*window)).collect();
        let groups = KvCacheGroups::of(&windows).expect("as many as fit");
        let change = |kv: &mut KvSizes, pd: &mut PdSpec| {
            kv.groups = groups;
            pd.engine.self_kv_bytes = Some(room);
        };
        most_running(&with_caches(case, change, load))
    };
    // As in Gemma 3: five layers of six see 64 tokens.
    let (whole, windowed) = (run("whole", &[0; 6]), run("windowed", &[64, 64, 64, 64, 64, 0]));
    assert!((2..=6).contains(&whole), "{whole} at once");
    assert!(windowed >= 2 * whole, "{windowed} at once with windows, {whole} without");
}

#[test]
fn no_more_sequences_run_than_have_a_state() {
    let load = Load { rate: 200.0, text: 20, output: 40, ..LOAD };
    let run = |slots: usize| {
        let change = |kv: &mut KvSizes, pd: &mut PdSpec| {
            kv.state_slot_bytes = NonZeroUsize::new(1000);
            pd.engine.state_bytes = Some(1000 * slots);
        };
        most_running(&with_caches("states", change, load))
    };
    assert_eq!(run(3), 3);
    assert!(run(64) > 6);
}

#[test]
fn the_same_seed_gives_the_same_run_and_another_seed_another() {
    let cluster = apart(2, 2, FAST);
    let run = |seed| simulate(&cluster, LOAD.requests(1), seed).unwrap();
    assert_eq!(run(3), run(3));
    assert_ne!(run(3).outcomes, run(4).outcomes);
}

#[test]
fn the_proxy_on_the_workers_cores_makes_everything_slower_by_what_it_takes() {
    let mut cluster = apart(1, 1, FAST);
    let mut curves = (*cluster.pools[0].curves).clone();
    curves.front.request_us = 20_000.0;
    curves.front.message_us = 500.0;
    cluster.pools.iter_mut().for_each(|pool| pool.curves = curves.clone().into());
    // A message for each token.
    let engine = EngineSettings { stream_interval: Duration::ZERO, ..EngineSettings::default() };
    cluster.pools[1].role = PoolRole::Pd(PdSpec { engine, ..PdSpec::default() });
    let own = check("own", &cluster, LOAD);
    cluster.proxy.cores = FrontCores::Workers;
    let shared = check("shared", &cluster, LOAD);
    let front: f64 = shared.pools.iter().map(|pool| pool.front_s).sum();
    let all = LOAD.n as f64 * (0.02 + 12.0 * 0.0005);
    // But for what is still to be done for the last token.
    assert!((front / all - 1.0).abs() < 1e-3, "{front} of {all}");
    assert!(own.pools.iter().all(|pool| pool.front_s == 0.0));
    let mean = |run: &Simulation| {
        run.outcomes.iter().map(|o| (o.ended - o.due).as_secs_f64()).sum::<f64>() / run.outcomes.len() as f64
    };
    assert!(mean(&shared) > mean(&own), "{} {}", mean(&shared), mean(&own));
}

/// One worker for each half, whose streams have messages at an interval, and clients on its cores or not.
fn streams(interval: Duration, cores: FrontCores) -> Simulation {
    let mut cluster = apart(1, 1, Prices { spread: 1.0, ..FAST });
    let curves = CostCurves {
        front: FrontCost { write_us: 20.0, message_us: 50.0, ..FrontCost::default() },
        ..(*cluster.pools[1].curves).clone()
    };
    cluster.pools[1].curves = Arc::new(curves);
    let engine = EngineSettings { stream_interval: interval, ..EngineSettings::default() };
    cluster.pools[1].role = PoolRole::Pd(PdSpec { engine, ..PdSpec::default() });
    cluster.proxy.cores = cores;
    check("streams", &cluster, Load { output: 40, images: 0, ..LOAD })
}

#[test]
fn tokens_between_two_ticks_share_a_message_and_neither_the_first_nor_the_last_waits() {
    const INTERVAL: Duration = Duration::from_millis(10);
    let (each, held) = (streams(Duration::ZERO, FrontCores::Own), streams(INTERVAL, FrontCores::Own));
    let (mut n_each, mut n_held) = (0, 0);
    for (each, held) in each.outcomes.iter().zip(&held.outcomes) {
        assert_eq!((each.tokens.first(), each.tokens.last()), (held.tokens.first(), held.tokens.last()));
        let waits = each.tokens.iter().zip(&held.tokens).map(|(each, held)| *held - *each);
        assert!(waits.max().unwrap() <= INTERVAL);
        n_each += 1 + each.tokens.windows(2).filter(|pair| pair[0] < pair[1]).count();
        n_held += 1 + held.tokens.windows(2).filter(|pair| pair[0] < pair[1]).count();
    }
    assert!(n_held * 3 < n_each, "{n_held} messages of {n_each} tokens");
    // Each message costs client and proxy something, on whatever cores they are.
    let front =
        |interval| streams(interval, FrontCores::Workers).pools.iter().map(|pool| pool.front_s).sum::<f64>();
    let (each, held) = (front(Duration::ZERO), front(INTERVAL));
    assert!(held * 2.5 < each, "{held} of {each} s");
}
