//! A step that is planned while the one before computes changes nothing that anyone sees.

use crate::bench::{Bench, Seen, cpu, cuda, roomy};
use crate::case::{Case, LONG, Request, cases};
use triptych_core::sampling::SamplingParams;
use triptych_engine::{EngineConfig, KvBudget, Pipelining, Preemption, PrefixCache};
use triptych_models::compute::Compute;

/// Every kind of request: greedy ones past their ends and up to them, draws, forks, beams, settings that read the last
/// token, and some that do not.
fn sampling(request: &Request, id: u64, bench: &Bench<'_>) -> SamplingParams {
    let draws = SamplingParams { temperature: 0.9, seed: Some(id), max_tokens: Some(20), ..request.greedy() };
    match id % 7 {
        0 => request.greedy(),
        1 => request.long(&bench.info),
        2 => draws,
        3 => SamplingParams { n: 3, logprobs: Some(2), ..draws },
        4 => request.beams(),
        5 => SamplingParams { frequency_penalty: 0.4, no_repeat_ngram_size: 3, ..draws },
        _ => SamplingParams {
            min_tokens: 5,
            logit_bias: vec![(3, 2.0)],
            logprobs: Some(3),
            ..request.greedy()
        },
    }
}

/// Requests that arrive in the middle of others, each twice, on few blocks.
fn run<'a>(compute: &Compute, case: &'a Case, pipelining: Pipelining, preemption: Preemption) -> Bench<'a> {
    let longest = case.requests.iter().map(|r| r.prompt.len()).max().unwrap_or(0);
    let n_groups = case.model.spec().decoder.kv_groups().groups.n_groups();
    let self_attention = 4 * n_groups * ((longest + LONG).div_ceil(32) + 1);
    let kv = KvBudget::Blocks { self_attention, cross_attention: 256, host: 64 };
    let config = EngineConfig { kv, pipelining, preemption, prefix_cache: PrefixCache::On, ..roomy() };
    let mut bench = Bench::on(compute, case, config);
    for round in 0..2 {
        for (i, request) in case.numbered() {
            let params = sampling(request, i + round * 3, &bench);
            bench.add(case.arrival(request, 100 * round + 10 * i, params));
            bench.step();
        }
    }
    bench.settle();
    bench
}

fn check(compute: &Compute, case: &Case, preemption: Preemption) {
    let told = |seen: &Seen| {
        (seen.tokens(), seen.finished().reason, seen.finished().n_generated, seen.deltas.clone())
    };
    let [off, on] =
        [Pipelining::Off, Pipelining::On].map(|pipelining| run(compute, case, pipelining, preemption));
    assert_eq!(off.seen.len(), on.seen.len(), "{}", case.name);
    for (id, seen) in &off.seen {
        assert_eq!(told(&on.seen[id]), told(seen), "{} completion {id}", case.name);
    }
}

#[test]
fn completions_are_the_same_on_the_cpu() {
    for case in &cases() {
        check(&cpu(), case, Preemption::Swap);
    }
    for case in cases().iter().step_by(3) {
        check(&cpu(), case, Preemption::Recompute);
    }
}

#[test]
fn completions_are_the_same_on_cuda() {
    // Other cases are completed step ahead by step on CUDA in `generated` and `sampled`.
    check(&cuda(), &Case::open("bart_odd_heads"), Preemption::Swap);
}
