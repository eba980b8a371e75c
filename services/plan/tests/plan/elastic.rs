//! Elastic roles in the simulator: the router's own choices.

use crate::made::{FAST, Load, Prices, SLOW, image, one, pool};
use std::time::Duration;
use triptych_bench::outcome::{End, Outcome};
use triptych_plan::simulator::spec::{ClusterSpec, EncoderSpec, PdSpec, PoolRole, PoolSpec};
use triptych_plan::simulator::{Simulation, simulate};
use triptych_proxy::Roles;
use triptych_runtime::compute_arbiter::EncoderBudget;

/// PD workers with encoders, one item in a batch.
fn both(workers: usize, prices: Prices) -> PoolSpec {
    let mut encoder = EncoderSpec::default();
    encoder.batch.max_items = 1;
    let role = PoolRole::Both { pd: PdSpec::default(), encoder, encoder_budget: EncoderBudget::Automatic };
    pool("both", workers, role, prices)
}

fn cluster(pools: Vec<PoolSpec>, roles: Roles) -> ClusterSpec {
    let mut cluster = ClusterSpec::new(pools);
    cluster.proxy.roles = roles;
    cluster
}

fn ttft(outcome: &Outcome) -> Duration {
    *outcome.tokens.first().expect("an answer") - outcome.due
}

/// Mean time to the first token, after all have ended.
fn mean_ttft(run: &Simulation) -> Duration {
    assert!(run.outcomes.iter().all(|outcome| outcome.end == End::Whole));
    run.outcomes.iter().map(ttft).sum::<Duration>() / run.outcomes.len() as u32
}

#[test]
fn images_of_one_request_are_encoded_by_both_workers_if_neither_does_anything_else() {
    let of = |roles| {
        let images = (0..4).map(|i| image(i, 500)).collect();
        let run = simulate(&cluster(vec![both(2, SLOW)], roles), std::iter::once(one(0, 0, 10, images)), 1)
            .unwrap();
        (ttft(&run.outcomes[0]), run.items.loads)
    };
    // Two seconds of encodes by one worker. The answer's worker loads what the other has made.
    let ((fixed, no_loads), (elastic, loads)) = (of(Roles::Fixed), of(Roles::Auto));
    assert!(elastic + Duration::from_millis(400) < fixed, "{elastic:?} {fixed:?}");
    assert_eq!(no_loads, 0);
    assert!((1..=3).contains(&loads), "{loads}");
}

#[test]
fn a_single_image_is_encoded_where_it_is_read() {
    let load = Load { rate: 0.5, n: 40, text: 50, output: 8, images: 1, image_tokens: 200, pool: None };
    let run = simulate(&cluster(vec![both(2, FAST)], Roles::Auto), load.requests(1), 1).unwrap();
    assert_eq!(run.items.loads, 0, "nothing crosses while workers have nothing else: {:?}", run.items);
}

#[test]
fn a_burst_at_an_encoder_worker_spills_to_a_pd_worker_that_holds_encoders() {
    // Prompts are read in a tenth of the time that their images take to encode.
    let prices = Prices { prefill_token: 100.0, ..SLOW };
    let of = |roles| {
        let mut encoder = EncoderSpec::default();
        encoder.batch.max_items = 1;
        let pools = vec![pool("encoder", 1, PoolRole::Encoder(encoder), prices), both(1, prices)];
        let burst = (0..8).map(|i| one(i, 0, 5, vec![image(i, 400)]));
        let run = simulate(&cluster(pools, roles), burst, 1).unwrap();
        (mean_ttft(&run), run.pools[1].n_encoded)
    };
    let ((fixed, none), (elastic, spilled)) = (of(Roles::Fixed), of(Roles::Auto));
    assert_eq!(none, 0, "fixed roles: a last resort alone");
    assert!((1..=4).contains(&spilled), "{spilled}");
    assert!(elastic < fixed, "{elastic:?} {fixed:?}");
}

#[test]
fn encodes_get_a_worker_for_themselves_where_the_other_answers_as_long() {
    let prices = Prices { prefill_token: 100.0, ..SLOW };
    let loads = |image_tokens, text| {
        let load = Load { rate: 1.8, n: 150, text, output: 4, images: 1, image_tokens, pool: None };
        simulate(&cluster(vec![both(2, prices)], Roles::Auto), load.requests(1), 1).unwrap().items.loads
    };
    // As long for each as for its prompt, at 1.8 a second: 0.8 of a worker twice. One answers, and loads what it reads.
    assert!(loads(430, 4000) > 75, "{}", loads(430, 4000));
    assert!(loads(50, 4000) < 15, "0.09 of a worker is none: {}", loads(50, 4000));
}
