//! Results of queueing theory.

use crate::made::{FAST, Load, Prices, SLOW, apart};
use std::time::Duration;
use triptych_encoder::BatchLimits;
use triptych_plan::simulator::result::Simulation;
use triptych_plan::simulator::simulate;
use triptych_plan::simulator::spec::{PoolRole, PromptSpec};

fn mean(times: impl Iterator<Item = Duration>) -> f64 {
    let (sum, n) = times.fold((0.0, 0), |(sum, n), t| (sum + t.as_secs_f64(), n + 1));
    sum / f64::from(n)
}

fn mean_ttft(run: &Simulation) -> f64 {
    mean(run.outcomes.iter().filter_map(|o| Some(*o.tokens.first()? - o.due)))
}

#[test]
fn one_encoder_alone_is_a_queue_with_one_server_and_equal_jobs() {
    // A job takes ten milliseconds, whatever follows next to nothing.
    let prices = Prices { encode_token: 100.0, step: 1.0, prefill_token: 0.001, decode: 0.001, spread: 1.0 };
    let mut cluster = apart(1, 1, prices);
    if let PoolRole::Encoder(encoder) = &mut cluster.pools[0].role {
        encoder.batch = BatchLimits { max_items: 1, ..BatchLimits::default() };
        encoder.max_jobs = 100_000;
    }
    cluster.proxy.max_in_flight = 100_000;
    let (service, rho) = (0.01, 0.6);
    let load =
        Load { rate: rho / service, n: 8_000, text: 1, output: 1, images: 1, image_tokens: 100, pool: None };
    let run = simulate(&cluster, load.requests(5), 1).unwrap();
    let waited = mean(run.stages.iter().map(|stages| stages.encode_queue));
    // Pollaczek and Khinchin.
    let expect = rho * service / (2.0 * (1.0 - rho));
    assert!((waited / expect - 1.0).abs() < 0.07, "{waited} s, by the formula {expect} s");
    let used = run.pools[0].utilisation;
    assert!((used / rho - 1.0).abs() < 0.03, "{used}");
    assert_eq!(run.pools[0].n_batches, 8_000);
}

#[test]
fn as_many_are_in_the_system_as_come_in_the_time_that_one_stays() {
    let load = Load { rate: 15.0, n: 600, text: 100, output: 20, images: 1, image_tokens: 200, pool: None };
    let mut cluster = apart(2, 2, FAST);
    cluster.sample_every = Duration::from_millis(10);
    let run = simulate(&cluster, load.requests(2), 2).unwrap();
    let last = run.outcomes.last().unwrap().due;
    let inside: Vec<_> = run.timeline.iter().filter(|m| m.at <= last).collect();
    let seen = inside.iter().map(|m| m.in_flight as f64).sum::<f64>() / inside.len() as f64;
    let stay = mean(run.outcomes.iter().map(|o| o.ended - o.due));
    let expect = load.n as f64 / last.as_secs_f64() * stay;
    assert!((seen / expect - 1.0).abs() < 0.05, "{seen} inside, {expect} by the law");
}

#[test]
fn more_workers_are_never_worse_and_more_load_never_better() {
    let load = Load { rate: 12.0, n: 150, text: 200, output: 10, images: 1, image_tokens: 500, pool: None };
    let at = |encoders, pds, rate| {
        mean_ttft(&simulate(&apart(encoders, pds, FAST), Load { rate, ..load }.requests(4), 4).unwrap())
    };
    let noise = 1.02;
    for (fewer, more) in [((1, 1), (2, 1)), ((2, 1), (2, 2)), ((2, 2), (4, 4))] {
        let (fewer, more) = (at(fewer.0, fewer.1, 12.0), at(more.0, more.1, 12.0));
        assert!(more <= fewer * noise, "{fewer} s, with more workers {more} s");
    }
    assert!(at(1, 1, 2.0) <= at(1, 1, 8.0) * noise && at(1, 1, 8.0) <= at(1, 1, 16.0) * noise);
}

#[test]
fn an_answer_alone_takes_the_sum_of_its_stages() {
    let load = Load { rate: 0.1, n: 1, text: 479, output: 5, images: 1, image_tokens: 500, pool: None };
    let mut cluster = apart(1, 1, SLOW);
    // Nothing stands before the image that could be read meanwhile.
    cluster.prompt = PromptSpec { before: 0, around_item: 0, after: 21, ..PromptSpec::default() };
    let run = simulate(&cluster, load.requests(1), 1).unwrap();
    let outcome = &run.outcomes[0];
    let ttft = (outcome.tokens[0] - outcome.due).as_secs_f64();
    // 0.5 s of encoding; 1000 tokens in two steps.
    assert!((ttft - (0.5 + 1.0 + 0.02)).abs() < 0.03, "{ttft}");
    let tpot = (outcome.tokens[4] - outcome.tokens[0]).as_secs_f64() / 4.0;
    assert!((tpot - 0.012).abs() < 0.001, "{tpot}");
    let stages = run.stages[0];
    assert!(
        (stages.encode.as_secs_f64() - 0.5).abs() < 0.01
            && (stages.prefill.as_secs_f64() - 1.02).abs() < 0.03,
        "{stages:?}"
    );
}
