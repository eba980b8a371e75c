//! A preempted run equals an undisturbed one, token for token.

use crate::bench::{Bench, roomy};
use crate::case::{Case, LONG, cases};
use triptych_engine::{EngineConfig, KvBudget, Preemption, PrefixCache, RowRetention, Stats};

/// Every request past its end: alone in an engine with room, and all at once in one that is short of blocks and drops rows once
/// they were read.
fn run(case: &Case, preemption: Preemption, prefix_cache: PrefixCache) -> Stats {
    let mut calm = Bench::new(case, roomy());
    let longest = case.requests.iter().map(|r| r.prompt.len()).max().unwrap_or(0);
    let self_attention = calm.info.kv_groups.n_blocks(longest + LONG, roomy().token_budget) + 2;
    let kv = KvBudget::Blocks { self_attention, cross_attention: 256, host: 64 };
    let mut tight = Bench::new(
        case,
        EngineConfig { kv, preemption, prefix_cache, rows: RowRetention::UntilRead, ..roomy() },
    );
    for (id, request) in case.numbered() {
        tight.add(case.arrival(request, id, request.long(&tight.info)));
    }
    let stats = tight.settle();
    for (id, request) in case.numbered() {
        let expected = calm.alone(case.arrival(request, id, request.long(&tight.info)));
        assert_eq!(tight.seen[&id].tokens(), expected, "{} request {id}", case.name);
    }
    let has_items = !case.outputs.is_empty();
    assert_eq!(tight.n_read > 0, has_items, "{}: {} sequences dropped their rows", case.name, tight.n_read);
    assert!(stats.preemptions > 0, "{}: nothing was preempted: {stats:?}", case.name);
    stats
}

#[test]
fn by_computing_again() {
    for case in &cases() {
        let stats = run(case, Preemption::Recompute, PrefixCache::Off);
        assert_eq!(stats.swaps, 0, "{}", case.name);
    }
}

#[test]
fn by_moving_to_the_host_and_back() {
    for case in &cases() {
        let stats = run(case, Preemption::Swap, PrefixCache::Off);
        // A recurrent state is not moved: such a sequence is computed again.
        assert_eq!(stats.swaps > 0, !case.is_recurrent(), "{}: {stats:?}", case.name);
    }
}

#[test]
fn with_blocks_that_are_kept_for_prefixes() {
    for case in cases().iter().step_by(3) {
        run(case, Preemption::Recompute, PrefixCache::On);
        run(case, Preemption::Swap, PrefixCache::On);
    }
}
