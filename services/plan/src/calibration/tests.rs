//! Factors of made-up processor times.

use super::*;
use crate::curves::{PipeliningSaves, sample};
use crate::planner::{Effort, Residuals};
use crate::simulator::spec::FrontCores;
use triptych_bench::arrivals::Arrivals;
use triptych_bench::slo::Slo;
use triptych_bench::workload::Workload;

fn time(worker: Option<WorkerKind>, compute_ms: u64, all_ms: u64) -> ProcessTime {
    let ms = Duration::from_millis;
    ProcessTime { worker, time: CpuTime { compute: ms(compute_ms), all: ms(all_ms) } }
}

fn simulated() -> Simulation {
    let encoders = PoolUse { preprocess_s: 0.5, encode_s: 2.5, front_s: 0.2, ..PoolUse::default() };
    let pds = PoolUse { step_s: 3.0, front_s: 0.8, n_steps: 1000, ..PoolUse::default() };
    Simulation { pools: vec![encoders, pds], ..Simulation::default() }
}

#[test]
fn each_kind_of_work_has_the_factor_of_its_process() {
    let curves = CostCurves { between_steps_us: 1000.0, ..sample::curves() };
    let cluster = [
        (time(Some(WorkerKind::Encoder), 100, 200), time(Some(WorkerKind::Encoder), 2600, 3700)),
        (time(Some(WorkerKind::Pd), 0, 0), time(Some(WorkerKind::Pd), 6000, 6500)),
        (time(None, 0, 50), time(None, 0, 550)),
    ];
    let client = CpuTime { compute: Duration::ZERO, all: Duration::from_millis(625) };
    let measured = Seconds::measured(&cluster, client);
    assert_eq!(measured, Seconds { encode: 2.5, step: 6.0, both: 0.0, other: 1.0 + 0.5 + 0.5 + 0.625 });
    // Forwards took 2.5 for 2 s, steps and the time between them 6 for 4.
    assert_eq!(measured.compute_factors(&simulated(), &curves), (1.25, 1.5));
}

#[test]
fn workers_that_do_both_have_one_factor() {
    let curves = CostCurves { between_steps_us: 0.0, ..sample::curves() };
    let cluster = [(time(Some(WorkerKind::Both), 0, 0), time(Some(WorkerKind::Both), 6000, 8000))];
    let measured = Seconds::measured(&cluster, CpuTime::default());
    assert_eq!(measured.compute_factors(&simulated(), &curves), (1.2, 1.2));
}

#[test]
fn what_was_not_simulated_has_no_factor() {
    let seconds = Seconds { step: 1.0, ..Seconds::default() };
    assert_eq!(seconds.compute_factors(&Simulation::default(), &sample::curves()), (1.0, 1.0));
}

fn inputs(curves: &Arc<CostCurves>, workload: &str) -> PlanInputs {
    PlanInputs {
        curves: vec![Arc::clone(curves)],
        demand: Named { workload: Workload::parse(workload).expect("a workload"), arrivals: Arrivals::Own },
        slo: Slo { ttft: None, tpot: None, e2el: None },
        frontend: FrontCores::Workers,
        shares_cores: false,
        effort: Effort::QUICK,
        residuals: Arc::new(Residuals::default()),
    }
}

#[test]
fn curves_of_pipelined_steps_are_not_scaled_by_a_timeline() {
    let of = |curves: CostCurves, topology: &str, n_cores: usize| {
        let inputs = inputs(&Arc::new(CostCurves { threads: 1, ..curves }), "epd-short:images=1");
        curves_of(&topology.parse().expect("a topology"), &inputs, n_cores)
            .map(|_| ())
            .map_err(|e| e.to_string())
    };
    let pipelined = || CostCurves { pipelining: Some(PipeliningSaves::default()), ..sample::curves() };
    assert_eq!((of(sample::curves(), "1e1pd", 2), of(pipelined(), "dp2", 2)), (Ok(()), Ok(())));
    let refused = of(pipelined(), "1e1pd", 2).expect_err("pipelined");
    assert!(refused.contains("--topology 1e1pd") && refused.contains("--topology dp2"), "{refused}");
    assert!(of(sample::curves(), "1e1pd", 4).expect_err("2 cores each").contains("2 cores each"));
}

/// Loads that are simulations with curves in service have the factors of those curves.
#[test]
fn factors_of_curves_in_service_are_found_again() {
    let given = ServiceFactors {
        encode: 1.2,
        step: 1.1,
        between_us: Some(50.0),
        prefill: Some(1.4),
        front: 0.8,
        item: Some(3.0),
        at_s: None,
    };
    let curves = Arc::new(CostCurves { threads: 1, between_steps_us: 100.0, ..sample::curves() });
    let topology: Topology = "1e1pd".parse().expect("a topology");
    let load = |simulated: &Simulated<'_>| {
        let (rate, n_requests) = (simulated.rate(0.4).expect("a rate"), 150);
        let run = simulated.with(curves.in_service(given)).simulate(rate, n_requests).expect("simulated");
        let other = front_s(&run) + preprocess_s(&run);
        let sum = |of: fn(&PoolUse) -> f64| run.pools.iter().map(of).sum::<f64>();
        let encode = sum(|pool| pool.encode_s) - preprocess_s(&run);
        let seconds = Seconds { encode, step: sum(|pool| pool.step_s), both: 0.0, other };
        Load { seconds, times: WallTimes::of(&run.spans), rate, n_requests }
    };
    let near = |found: f64, given: f64| (found / given - 1.0).abs() < 0.05;

    let mixed = inputs(&curves, "mixed:with=0.5,images=1-3");
    let simulated = Simulated::new(&topology, &mixed, &curves);
    let text = load(&simulated.without_items().expect("some have no items"));
    let found = simulated.factors(&load(&simulated), Some(&text)).expect("factors");
    assert!(near(found.encode, given.encode) && near(found.step, given.step), "{found:?}");
    assert!(near(found.prefill_steps(), given.prefill_steps()), "{found:?}");
    assert!(near(found.between_us.expect("measured"), 50.0), "{found:?}");
    assert!(near(found.front, given.front) && near(found.items(), given.items()), "{found:?}");

    // The time between steps is found whatever the profile has of it.
    let without = Arc::new(CostCurves { between_steps_us: 0.0, ..(*curves).clone() });
    let from_none = Simulated::new(&topology, &mixed, &without);
    let found = from_none.factors(&load(&simulated), Some(&text)).expect("factors");
    assert!(near(found.between_us.expect("measured"), 50.0), "{found:?}");

    // Where each request has an image they cannot be told apart.
    let images = inputs(&curves, "epd-short:images=1");
    let simulated = Simulated::new(&topology, &images, &curves);
    assert!(simulated.without_items().is_none());
    let found = simulated.factors(&load(&simulated), None).expect("factors");
    assert!(found.item.is_none() && found.front > given.front && found.front < given.items(), "{found:?}");
}
