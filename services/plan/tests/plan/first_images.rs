//! Order of a queue of images: what waiting requests gain by it, that nobody starves, and that text passes.

use crate::made::{FAST, Load, Prices, apart, curves, image, one, pool};
use std::sync::Arc;
use triptych_bench::offered::Offered;
use triptych_bench::outcome::Outcome;
use triptych_encoder::order::{JobOrder, WORK_WEIGHT};
use triptych_engine::scheduler::AdmissionOrder;
use triptych_plan::curves::{CostCurves, Point};
use triptych_plan::simulator::result::Simulation;
use triptych_plan::simulator::simulate;
use triptych_plan::simulator::spec::{ClusterSpec, EncoderSpec, PdSpec, PoolRole};
use triptych_runtime::compute_arbiter::EncoderBudget;

/// A cluster whose encoders and engines take what waits in these orders.
fn ordered(mut cluster: ClusterSpec, (jobs, prefills): (JobOrder, AdmissionOrder)) -> ClusterSpec {
    for pool in &mut cluster.pools {
        if let PoolRole::Encoder(encoder) | PoolRole::Both { encoder, .. } = &mut pool.role {
            encoder.batch.order = jobs;
        }
        if let PoolRole::Pd(pd) | PoolRole::Both { pd, .. } = &mut pool.role {
            pd.order = prefills;
        }
    }
    cluster
}

/// A request of new images at a moment.
fn images(index: u64, at_ms: u64, n: u64) -> Offered {
    one(index, at_ms, 20, (0..n).map(|i| image(index * 100 + i, 500)).collect())
}

/// Times to the first token, by request.
fn ttfts(run: &Simulation) -> Vec<f64> {
    let mut outcomes: Vec<&Outcome> = run.outcomes.iter().collect();
    outcomes.sort_by_key(|outcome| outcome.index);
    outcomes.into_iter().map(|o| (o.tokens[0] - o.due).as_secs_f64()).collect()
}

/// Mean and median.
fn mean_and_median(mut ttfts: Vec<f64>) -> (f64, f64) {
    ttfts.sort_by(f64::total_cmp);
    let middle = ttfts.len() / 2;
    (ttfts.iter().sum::<f64>() / ttfts.len() as f64, (ttfts[middle - 1] + ttfts[middle]) / 2.0)
}

/// Time to the first token of each request, in arrival order and by the least work left.
fn both_orders(cluster: &ClusterSpec, offered: &[Offered]) -> [Vec<f64>; 2] {
    [(JobOrder::Arrival, AdmissionOrder::Arrival), (JobOrder::LeastWorkLeft, AdmissionOrder::LeastWorkLeft)]
        .map(|order| ttfts(&simulate(&ordered(cluster.clone(), order), offered.iter().cloned(), 1).unwrap()))
}

/// Prints a row of `benches/results/first_images.md`.
fn print_row(what: &str, [before, after]: [(f64, f64); 2]) {
    let ms = |s: f64| (s * 1e3).round();
    println!("| {what} | {} | {} | {} | {} |", ms(before.0), ms(after.0), ms(before.1), ms(after.1));
}

#[test]
fn of_eight_that_wait_the_short_ones_do_not_wait_for_the_long_ones() {
    // Images of each request, and the least share by which the mean falls.
    let cases: [(&str, [u64; 8], f64); 4] = [
        ("8 of one image", [1; 8], 0.0),
        ("8 of two images", [2; 8], 0.0),
        ("4, 4, 3, 3, 2, 2, 1 and 1 images", [4, 4, 3, 3, 2, 2, 1, 1], 0.25),
        ("8 images, then seven of one", [8, 1, 1, 1, 1, 1, 1, 1], 0.4),
    ];
    for (what, sizes, gain) in cases {
        let offered: Vec<_> = sizes.iter().zip(0..).map(|(n, i)| images(i, i, *n)).collect();
        let [before, after] = both_orders(&apart(1, 1, FAST), &offered).map(mean_and_median);
        print_row(what, [before, after]);
        assert!(after.0 <= before.0 * (1.0 - gain) + 1e-9, "{what}: {before:?}, {after:?}");
        assert!(after.1 <= before.1 + 1e-9, "{what}: {before:?}, {after:?}");
    }
}

/// Large photos for a small encoder: what waits, waits for a thread that preprocesses.
#[test]
fn items_are_preprocessed_in_the_same_order() {
    let prices = Prices { encode_token: 2.0, prefill_token: 2.0, spread: 1.0, ..FAST };
    let point = |of: f64| Point { of, p50_us: 50_000.0, p95_us: 50_000.0 };
    let preprocess = vec![point(1e4), point(1e6)];
    let mut cluster = apart(1, 1, prices);
    for pool in &mut cluster.pools {
        pool.curves = Arc::new(CostCurves { preprocess: preprocess.clone(), ..curves(prices) });
    }
    let sizes = [8, 1, 1, 1, 1, 1, 1, 1];
    let offered: Vec<_> = sizes.iter().zip(0..).map(|(n, i)| images(i, i, *n)).collect();
    let [before, after] = both_orders(&cluster, &offered).map(mean_and_median);
    print_row("8 images, then seven of one, 50 ms to preprocess and 1 ms to encode", [before, after]);
    assert!(after.0 < before.0 * 0.6, "{before:?}, {after:?}");
}

/// Requests of 1 to 4 images at 70 % of what the encoder can do: the mean falls, and the slowest do not pay for it.
#[test]
fn under_a_steady_load_short_requests_gain_and_the_tail_stays() {
    let offered: Vec<_> =
        Load { rate: 5.6, n: 800, text: 20, output: 1, images: 1, image_tokens: 500, pool: None }
            .requests(3)
            .map(|request| {
                let of = images(request.index, 0, 1 + request.index * 7 % 4);
                Offered { items: of.items, ..request }
            })
            .collect();
    let [before, after] = both_orders(&apart(1, 3, FAST), &offered);
    print_row(
        "800 of 1 to 4 images, at 70 % load",
        [mean_and_median(before.clone()), mean_and_median(after.clone())],
    );
    let p95 = |mut ttfts: Vec<f64>| {
        ttfts.sort_by(f64::total_cmp);
        ttfts[ttfts.len() * 95 / 100]
    };
    let mean = |ttfts: &[f64]| ttfts.iter().sum::<f64>() / ttfts.len() as f64;
    assert!(mean(&after) < 0.97 * mean(&before), "{} s, {} s", mean(&before), mean(&after));
    let (slow, slow_after) = (p95(before), p95(after));
    assert!(slow_after < 1.1 * slow, "p95 {slow} s, {slow_after} s");
}

/// A request of eight images, in a stream of single ones that alone takes nine tenths of the encoder.
#[test]
fn a_long_request_does_not_starve() {
    let mut offered: Vec<_> = (0..400).map(|i| images(i, i * 55, 1)).collect();
    offered[40] = images(40, 40 * 55, 8);
    let [before, after] = both_orders(&apart(1, 3, FAST), &offered);
    // Eight images take 0.4 s; others pass for four times that, and every one of them costs 50 of 55 ms.
    let bound = before[40] + f64::from(WORK_WEIGHT) * 0.4 + 0.4;
    assert!(after[40] < bound, "{} s, in arrival order {} s", after[40], before[40]);
}

/// Text passes a queue of images, with encoders of their own and beside an engine on the same cores.
#[test]
fn text_does_not_wait_for_a_queue_of_images() {
    let both = PoolRole::Both {
        pd: PdSpec::default(),
        encoder: EncoderSpec::default(),
        encoder_budget: EncoderBudget::Automatic,
    };
    let colocated = ClusterSpec::new(vec![pool("both", 1, both, FAST)]);
    // The queue takes 1.4 s. A forward, and a step of 512 rows, take 50 ms each: the text waits for the step that runs, and on shared
    // cores for a forward too.
    for (what, cluster, limit) in [("apart", apart(1, 1, FAST), 0.11), ("colocated", colocated, 0.22)] {
        let mut offered: Vec<_> = (0..24).map(|i| images(i, i, 1)).collect();
        offered.push(one(24, 100, 20, Vec::new()));
        let run = simulate(&cluster, offered.into_iter(), 1).unwrap();
        let found = ttfts(&run)[24];
        assert!(found < limit, "{what}: the text waits {found} s");
        let answer = run.outcomes.iter().find(|outcome| outcome.index == 24).expect("it was offered");
        let gaps = answer.tokens.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64());
        let slowest = gaps.fold(0.0, f64::max);
        assert!(slowest < limit, "{what}: its decoding stands still for {slowest} s");
    }
}
