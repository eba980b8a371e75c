//! Interference: steps are longer for as long as other workers of the host compute.

use crate::made::{SLOW, apart, image, one};
use std::sync::Arc;
use std::time::Duration;
use triptych_bench::offered::Offered;
use triptych_plan::curves::{CostCurves, Interference, PipeliningSaves, Stage, StageInterference};
use triptych_plan::simulator::spec::{ClusterSpec, EncoderSpec, FrontCores, PdSpec, PoolRole};
use triptych_plan::simulator::{simulate, trace};
use triptych_runtime::compute_arbiter::EncoderBudget;

fn cluster(cores: FrontCores, change: impl Fn(&mut CostCurves)) -> ClusterSpec {
    let mut cluster = apart(1, 1, SLOW);
    cluster.proxy.cores = cores;
    for pool in &mut cluster.pools {
        let mut curves = (*pool.curves).clone();
        change(&mut curves);
        pool.curves = Arc::new(curves);
    }
    cluster
}

/// Steps that take half as long again beside a core that computes.
fn interfered(curves: &mut CostCurves) {
    let times = StageInterference { beside_compute_us: Some(1.5), ..StageInterference::of_alone(1.0) };
    curves.interference = Some(Interference {
        neighbour_cores: 1,
        decode: Some(times),
        prefill: Some(times),
        ..Interference::default()
    });
}

/// Seconds until the answer of a text is written, which comes a tenth of a second after the others.
fn text_takes(cluster: &ClusterSpec, others: impl Iterator<Item = Offered>) -> f64 {
    let text = one(1, 100, 400, Vec::new());
    let run = simulate(cluster, others.chain(std::iter::once(text)), 1).unwrap();
    let outcome = run.outcomes.last().expect("the text");
    (*outcome.tokens.last().expect("an answer") - outcome.due).as_secs_f64()
}

/// A request whose image is encoded for a second, beside the other's text.
fn encoding() -> impl Iterator<Item = Offered> {
    std::iter::once(one(0, 0, 1, vec![image(1, 1000)]))
}

#[test]
fn steps_are_longer_beside_an_encode_on_the_same_host() {
    let on = |cores, change: fn(&mut CostCurves)| text_takes(&cluster(cores, change), encoding());
    let plain = on(FrontCores::Workers, |_| {});
    let slowed = on(FrontCores::Workers, interfered);
    assert!((slowed / plain - 1.5).abs() < 0.02, "{plain} s alone, {slowed} s beside");
    assert_eq!(on(FrontCores::Own, interfered), on(FrontCores::Own, |_| {}), "on hosts of their own");
    let alone =
        |change: fn(&mut CostCurves)| text_takes(&cluster(FrontCores::Workers, change), std::iter::empty());
    assert_eq!(alone(interfered), alone(|_| {}), "beside a worker that is idle");
}

#[test]
fn the_time_between_steps_is_added_to_each() {
    let takes = |us: f64| {
        let cluster = cluster(FrontCores::Own, |curves| curves.between_steps_us = us);
        text_takes(&cluster, std::iter::empty())
    };
    // Four tokens: the first at the end of the prompt's step, then three more steps.
    let added = takes(100_000.0) - takes(0.0);
    assert!((added - 0.3).abs() < 0.01, "{added}");
}

#[test]
fn a_pipelined_step_is_shorter_and_follows_the_one_before_at_once() {
    let takes = |pipelining, role: Option<PoolRole>| {
        let mut cluster = cluster(FrontCores::Own, |curves| {
            curves.between_steps_us = 100_000.0;
            curves.pipelining = pipelining;
        });
        if let Some(role) = role {
            cluster.pools[1].role = role;
        }
        text_takes(&cluster, std::iter::empty())
    };
    let saves = Some(PipeliningSaves { fixed_us: 3000.0, each_us: 2000.0 });
    // Four steps of one sequence, and the time between them.
    let saved = takes(None, None) - takes(saves, None);
    assert!((saved - 0.3 - 4.0 * 0.005).abs() < 0.001, "{saved}");
    // An encoder in the same process may need the device between two steps.
    let (pd, encoder) = (PdSpec::default(), EncoderSpec::default());
    let both = || Some(PoolRole::Both { pd, encoder, encoder_budget: EncoderBudget::default() });
    assert_eq!(takes(saves, both()), takes(None, both()));
}

#[test]
fn work_of_the_frontend_that_is_misplaced_slows_a_worker_although_the_other_is_free() {
    let takes = |misplaced: f64| {
        let cluster = cluster(FrontCores::Workers, |curves| {
            curves.front.message_us = 300_000.0;
            curves.front.misplaced = misplaced;
        });
        text_takes(&cluster, std::iter::empty())
    };
    assert!(takes(1.0) > takes(0.0), "{} and {}", takes(1.0), takes(0.0));
    assert_eq!(takes(1.0), takes(1.0), "one seed is one run");
}

#[test]
fn a_worker_that_computes_alone_has_the_cores_of_all() {
    let takes = |is_lent: bool, others: fn() -> Vec<Offered>| {
        let mut cluster = cluster(FrontCores::Workers, |_| {});
        let wide = CostCurves { threads: 2, ..cluster.pools[1].curves.slowed(0.5) };
        cluster.pools[1].lent = is_lent.then(|| Arc::new(wide));
        text_takes(&cluster, others().into_iter())
    };
    let alone = takes(true, Vec::new) / takes(false, Vec::new);
    assert!((alone - 0.5).abs() < 0.02, "{alone} of the time");
    let beside = || encoding().collect();
    assert_eq!(takes(true, beside), takes(false, beside), "the encoder computes all the while");
}

#[test]
fn answers_that_are_ahead_of_their_slo_leave_the_cores_of_the_host_to_an_encode() {
    let outcomes = |tpot_slo, is_lent: bool| {
        let mut cluster = cluster(FrontCores::Workers, |_| {});
        let wide = CostCurves { threads: 2, ..cluster.pools[1].curves.slowed(0.5) };
        cluster.pools[1].lent = is_lent.then(|| Arc::new(wide));
        let PoolRole::Pd(pd) = &mut cluster.pools[1].role else { unreachable!("a PD pool") };
        pd.engine.tpot_slo = tpot_slo;
        let text = |index, at_ms| Offered { output_tokens: 13, ..one(index, at_ms, 40, Vec::new()) };
        let offered = [one(0, 0, 1, vec![image(1, 4000)]), text(1, 100), text(2, 500)];
        let run = simulate(&cluster, offered.into_iter(), 1).unwrap();
        let tokens = &run.outcomes[1].tokens;
        ((tokens[12] - tokens[0]) / 12, run.pools[1].n_steps)
    };
    let ms = Duration::from_millis;
    let (plain, ahead) = (outcomes(Some(ms(200)), false), outcomes(Some(ms(200)), true));
    assert_eq!(outcomes(None, true), outcomes(None, false), "without an SLO");
    assert!(ahead.0 > ms(100) && ahead.0 < ms(200) && ahead.0 > plain.0 * 2, "{ahead:?} {plain:?}");
    assert!(ahead.1 + 6 < plain.1, "steps are shared: {ahead:?} {plain:?}");
}

#[test]
fn a_trace_has_a_span_for_each_step_and_forward_and_only_where_it_is_asked_for() {
    let mut cluster = cluster(FrontCores::Own, |_| {});
    let requests = || (0..3).map(|i| one(i, i * 50, 20, vec![image(i, 500)]));
    assert!(simulate(&cluster, requests(), 1).unwrap().spans.is_empty());
    cluster.records_spans = true;
    let run = simulate(&cluster, requests(), 1).unwrap();
    let n =
        |wanted: &dyn Fn(Stage) -> bool| run.spans.iter().filter(|span| wanted(span.stage)).count() as u64;
    let is_step = |stage| matches!(stage, Stage::Prefill | Stage::Decode);
    assert_eq!(n(&is_step), run.pools[1].n_steps);
    assert_eq!(n(&|stage| matches!(stage, Stage::Encode(_))), run.pools[0].n_batches);
    assert_eq!(n(&|stage| matches!(stage, Stage::Preprocess(_))), 3);
    let text = trace::text(trace::events(&cluster, &run));
    let lines: Vec<serde_json::Value> =
        text.lines().skip(1).map(|line| serde_json::from_str(line.trim_end_matches(',')).unwrap()).collect();
    assert_eq!(lines.len(), 2 + run.spans.len());
    assert_eq!(lines[0]["args"]["name"], "encoder-0");
    assert!(lines.iter().any(|line| line["name"] == "step" && line["args"]["sequences"] == 1));
}
