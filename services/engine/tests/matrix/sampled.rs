//! Sampling: the distribution is the reference's, and a seed gives the same completions alone and in any batch.

use crate::bench::{Bench, Seen, ahead, cuda, roomy};
use crate::case::{Case, Request, cases};
use triptych_core::sampling::SamplingParams;
use triptych_engine::{EngineConfig, PrefixCache};

/// Draws for one distribution.
const N_DRAWS: u64 = 10_000;

/// Probabilities after temperature, top-k, top-p and min-p, in that order, plainly.
fn probabilities(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|l| f64::from(*l) / f64::from(params.temperature)).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| scaled[*b].total_cmp(&scaled[*a]));
    order.truncate(params.top_k.map_or(logits.len(), |k| k as usize));
    let weight = |i: usize| (scaled[i] - max).exp();
    let total: f64 = order.iter().map(|i| weight(*i)).sum();
    let mut before = 0.0;
    order.retain(|i| {
        let kept = before < f64::from(params.top_p) * total;
        before += weight(*i);
        kept
    });
    order.retain(|i| weight(*i) >= f64::from(params.min_p));
    let total: f64 = order.iter().map(|i| weight(*i)).sum();
    let mut result = vec![0.0; logits.len()];
    order.iter().for_each(|i| result[*i] = weight(*i) / total);
    result
}

/// First tokens of many completions, counted.
fn draw(case: &Case, request: &Request, params: &SamplingParams) -> Vec<u64> {
    let mut bench = Bench::new(case, EngineConfig { prefix_cache: PrefixCache::On, ..roomy() });
    for first in (0..N_DRAWS).step_by(16) {
        let params = SamplingParams { seed: Some(first), n: 16, ..params.clone() };
        bench.add(case.arrival(request, first, params));
        if first % 512 == 0 {
            bench.settle();
        }
    }
    bench.settle();
    let mut counts = vec![0; bench.info.vocab];
    for seen in bench.seen.values() {
        counts[seen.tokens()[0] as usize] += 1;
    }
    counts
}

/// Pearson's statistic beside the value it exceeds once in a hundred thousand, by Wilson and Hilferty. Tokens that
/// are expected less than five times count as one.
fn chi_square(counts: &[u64], probabilities: &[f64]) -> (f64, f64) {
    let n: u64 = counts.iter().sum();
    let (mut statistic, mut n_bins, mut rare) = (0.0, 0.0_f64, (0.0, 0.0));
    for (count, p) in counts.iter().zip(probabilities) {
        let (count, expected) = (*count as f64, p * n as f64);
        if expected < 5.0 {
            rare = (rare.0 + count, rare.1 + expected);
        } else {
            statistic += (count - expected).powi(2) / expected;
            n_bins += 1.0;
        }
    }
    if rare.1 > 0.5 {
        statistic += (rare.0 - rare.1).powi(2) / rare.1;
        n_bins += 1.0;
    }
    let (k, z) = ((n_bins - 1.0).max(1.0), 4.265);
    let a = 2.0 / (9.0 * k);
    (statistic, k * (1.0 - a + z * a.sqrt()).powi(3))
}

#[test]
fn first_tokens_follow_the_references_distribution() {
    let cuts = SamplingParams {
        temperature: 1.3,
        top_k: Some(40),
        top_p: 0.95,
        min_p: 0.005,
        ..SamplingParams::default()
    };
    let hot = SamplingParams { temperature: 2.0, ..SamplingParams::default() };
    // Choices know nothing of the family that computed the logits.
    for (i, case) in cases().iter().step_by(3).enumerate() {
        let request = case.requests.iter().find(|r| r.is_plain()).expect("a request without forced tokens");
        let params = if i % 2 == 0 { &cuts } else { &hot };
        let params = SamplingParams { max_tokens: Some(1), ignore_eos: true, ..params.clone() };
        let expected = probabilities(&case.next_logits(request), &params);
        let counts = draw(case, request, &params);
        let (statistic, allowed) = chi_square(&counts, &expected);
        println!("{}: {statistic:.1}, allowed {allowed:.1}", case.name);
        assert!(statistic < allowed, "{}: {statistic}, allowed {allowed}", case.name);
    }
}

#[test]
fn completions_of_one_seed_are_the_same_alone_together_and_one_by_one() {
    for case in &cases() {
        let params = |request: &Request, n: u32| SamplingParams {
            temperature: 1.0,
            seed: Some(7),
            n,
            max_tokens: Some(20),
            ..request.greedy()
        };
        let mut alone = Bench::new(case, roomy());
        let mut together = Bench::new(case, roomy());
        for (id, request) in case.numbered() {
            together.add(case.arrival(request, 10 * id, params(request, 4)));
            together.step();
        }
        together.settle();
        for (id, request) in case.numbered() {
            for n in 1..=3 {
                alone.alone(case.arrival(request, 1000 * u64::from(n) + 10 * id, params(request, n)));
                let last = u64::from(n) - 1;
                let one = alone.seen[&(1000 * u64::from(n) + 10 * id + last)].tokens();
                let same = together.seen[&(10 * id + last)].tokens();
                assert_eq!(one, same, "{} request {id} completion {last}", case.name);
            }
        }
        let differ = |id: u64| together.seen[&(10 * id)].tokens() != together.seen[&(10 * id + 1)].tokens();
        assert!(case.numbered().any(|(id, _)| differ(id)), "{}: all completions are alike", case.name);
    }
}

/// Penalties, rules, cuts, log-probabilities and forks on the device, beside beams, which have whole rows.
#[test]
fn completions_on_cuda_are_those_of_the_cpu() {
    for case in cases().iter().skip(2).step_by(18) {
        let params = |request: &Request, id: u64| SamplingParams {
            temperature: if id.is_multiple_of(2) { 0.0 } else { 0.8 },
            seed: Some(id),
            n: 1 + (id % 3) as u32,
            top_k: (id % 4 == 1).then_some(20),
            top_p: if id % 4 == 3 { 0.9 } else { 1.0 },
            min_p: 0.01,
            repetition_penalty: 1.2,
            frequency_penalty: 0.3,
            no_repeat_ngram_size: 3,
            logit_bias: vec![(5, 1.5), (7, -2.0)],
            logprobs: (!id.is_multiple_of(3)).then_some(3),
            max_tokens: Some(12),
            min_tokens: 3,
            ..request.greedy()
        };
        let run = |mut bench: Bench<'_>| {
            for (id, request) in case.numbered() {
                bench.add(case.arrival(request, 10 * id, params(request, id)));
                if id == 1 {
                    bench.add(case.arrival(request, 10_000, request.beams()));
                }
                bench.step();
            }
            bench.settle();
            let told = |(id, seen): (&u64, &Seen)| {
                let logprobs = seen.deltas.iter().flat_map(|d| &d.logprobs).map(|l| l.chosen.logprob);
                (*id, seen.tokens(), logprobs.collect::<Vec<f32>>())
            };
            bench.seen.iter().map(told).collect::<Vec<_>>()
        };
        let (on_cuda, on_cpu) = (run(Bench::on(&cuda(), case, ahead())), run(Bench::new(case, roomy())));
        for ((id, tokens, logprobs), (_, expect, expect_logprobs)) in on_cuda.iter().zip(&on_cpu) {
            assert_eq!(tokens, expect, "{} completion {id}", case.name);
            assert_eq!(logprobs.len(), expect_logprobs.len(), "{} completion {id}", case.name);
            for (a, e) in logprobs.iter().zip(expect_logprobs) {
                assert!((a - e).abs() < 5e-3, "{} completion {id}: {a} for {e}", case.name);
            }
        }
    }
}
