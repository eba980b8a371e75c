//! Factors of made-up processor times.

use super::*;
use crate::curves::sample;

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
    let factors = measured.over(&simulated(), &curves);
    // Forwards took 2.5 for 2 s, steps and the time between them 6 for 4, and of what is left, preprocessing is 0.625.
    assert_eq!(factors, ServiceFactors { encode: 1.25, step: 1.5, prefill: None, front: 2.0, at_s: None });
}

#[test]
fn workers_that_do_both_have_one_factor() {
    let curves = CostCurves { between_steps_us: 0.0, ..sample::curves() };
    let cluster = [(time(Some(WorkerKind::Both), 0, 0), time(Some(WorkerKind::Both), 6000, 8000))];
    let factors = Seconds::measured(&cluster, CpuTime::default()).over(&simulated(), &curves);
    assert_eq!(factors, ServiceFactors { encode: 1.2, step: 1.2, prefill: None, front: 1.4, at_s: None });
}

#[test]
fn what_was_not_simulated_has_no_factor() {
    let factors = Seconds { step: 1.0, ..Seconds::default() }.over(&Simulation::default(), &sample::curves());
    assert_eq!((factors.encode, factors.step, factors.front), (1.0, 1.0, 1.0));
}
