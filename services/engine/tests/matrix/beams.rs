//! Beam search, beside other completions and short of blocks.

use crate::bench::{Bench, roomy};
use crate::case::{Case, cases, without_end};
use triptych_engine::{EngineConfig, KvBudget, Preemption};

/// All requests by beams, with greedy ones in the same batches.
fn searched(case: &Case, config: EngineConfig) -> (Bench<'_>, u64) {
    let mut bench = Bench::new(case, config);
    for (id, request) in case.numbered() {
        bench.add(case.arrival(request, 10 * id, request.beams()));
        bench.add(case.arrival(request, 10 * id + 9, request.greedy()));
        bench.step();
    }
    let stats = bench.settle();
    for (id, request) in case.numbered() {
        bench.assert_golden(10 * id + 9, request);
        for (place, expected) in (0..).zip(&request.beam4.answers) {
            let tokens = bench.seen[&(10 * id + place)].tokens();
            let (expected, _) = without_end(&expected.tokens, &request.end_tokens);
            assert_eq!(tokens, expected, "{} request {id} answer {place}", case.name);
        }
    }
    (bench, stats.preemptions)
}

#[test]
fn beams_are_the_references_beside_greedy_completions() {
    for case in &cases() {
        searched(case, roomy());
    }
}

#[test]
fn beams_that_are_preempted_find_the_same_completions() {
    for case in &cases() {
        let longest = case.requests.iter().map(|r| r.prompt.len()).max().unwrap_or(0);
        // One search with its four beams fits, and little beside it.
        let n_groups = case.model.spec().decoder.kv_groups().groups.n_groups();
        let self_attention = n_groups * (4 * (longest + 32).div_ceil(32) + 1);
        for (preemption, host) in [(Preemption::Recompute, 0), (Preemption::Swap, 64)] {
            let kv = KvBudget::Blocks { self_attention, cross_attention: 256, host };
            searched(case, EngineConfig { kv, preemption, ..roomy() });
        }
    }
}
