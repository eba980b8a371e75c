//! KV cache groups: what layers with a window give back, how many tokens and sequences that makes room for, and that no token
//! depends on it.

use crate::bench::{Bench, config, embed, item, with_blocks};
use crate::fake::info;
use std::num::NonZeroU32;
use triptych_core::FailureClass;
use triptych_engine::{EngineConfig, NextStep, SequenceRequest};
use triptych_models::decoder::{DecoderInfo, KvCacheGroups};

fn decoder(windows: &[u32]) -> DecoderInfo {
    let windows: Vec<_> = windows.iter().map(|window| NonZeroU32::new(*window)).collect();
    DecoderInfo { kv_groups: KvCacheGroups::of(&windows).unwrap(), ..info(false, 4096) }
}

/// Groups in the proportion of Gemma 3: layers with a window are five times the others.
fn gemma() -> DecoderInfo {
    decoder(&[0, 100, 100, 100, 100, 100])
}

fn kept(info: DecoderInfo) -> DecoderInfo {
    DecoderInfo { kv_groups: info.kv_groups.without_windows(), ..info }
}

fn with_budget(token_budget: usize, n_blocks: usize) -> EngineConfig {
    EngineConfig { token_budget, ..with_blocks(n_blocks, 0) }
}

/// Tokens of a sequence in an engine with room for all, which computes its prompt at once.
fn alone(info: DecoderInfo, arrival: &SequenceRequest) -> Vec<u32> {
    let mut bench = Bench::of(info, with_blocks(400, 0));
    bench.add(arrival.clone());
    bench.settle();
    bench.seen(arrival.ids[0].0).tokens()
}

#[test]
fn a_mixed_model_holds_all_blocks_of_one_group_and_the_window_of_others() {
    // 20 blocks of prompt, 30 in all; a group with a window has 7 at most beside a chunk, and 5 while it decodes.
    let n_needed = 30 + 5 * 7;
    let mut bench = Bench::of(gemma(), with_budget(64, n_needed));
    let arrival = bench.sequence(1, 640, 320);
    bench.add(arrival.clone());
    let mut most = (0, 0);
    while bench.engine.next_step() == NextStep::Now {
        bench.step();
        let stats = bench.engine.stats();
        most.0 = most.0.max(stats.self_used);
        most.1 = most.1.max(if stats.decoding == 1 { stats.self_used } else { 0 });
    }
    assert_eq!(most.1, 30 + 5 * 5, "of 180");
    assert!(most.0 <= n_needed, "{most:?}");
    assert_eq!(bench.seen(1).finished().n_generated, 320);
    assert_eq!(bench.seen(1).tokens(), alone(gemma(), &arrival));
    bench.assert_books_balance();
    // A block less holds a block of tokens less.
    let mut bench = Bench::of(gemma(), with_budget(64, n_needed - 1));
    bench.add(arrival.clone());
    bench.settle();
    assert_eq!(bench.seen(1).finished().n_generated, 320 - 32);
    let mut bench = Bench::of(kept(gemma()), with_budget(64, n_needed));
    bench.add(arrival);
    assert_eq!(bench.seen(1).failure(), FailureClass::TooLarge, "ten blocks are 320 tokens");
}

#[test]
fn more_sequences_run_at_once_on_the_blocks_that_windows_give_back() {
    let most_running = |info: DecoderInfo| {
        let mut bench = Bench::of(info, with_budget(256, 260));
        let arrivals = [1, 2, 3, 4, 5, 6, 7, 8].map(|id| bench.sequence(id, 600, 40));
        arrivals.iter().for_each(|arrival| bench.add(arrival.clone()));
        let mut most = 0;
        while bench.engine.next_step() == NextStep::Now {
            bench.step();
            most = most.max(bench.engine.stats().decoding);
        }
        for arrival in &arrivals {
            assert_eq!(bench.seen(arrival.ids[0].0).tokens(), alone(info, arrival));
        }
        bench.assert_books_balance();
        most
    };
    assert_eq!((most_running(kept(gemma())), most_running(gemma())), (2, 5));
}

#[test]
fn a_prefill_that_finds_no_block_for_its_chunk_preempts_whoever_is_less_urgent() {
    for (priority, preempted) in [(1, 2), (-1, 1)] {
        let info = decoder(&[0, 40, 40]);
        let mut bench = Bench::of(info, with_budget(64, 24));
        let decoding = bench.sequence(1, 100, 200);
        bench.add(decoding.clone());
        bench.step();
        bench.step();
        let prefilling = SequenceRequest { priority, ..bench.sequence(2, 320, 4) };
        bench.add(prefilling.clone());
        while bench.engine.stats().preemptions == 0 {
            bench.step();
        }
        let names: Vec<u32> = bench.step().iter().map(|(name, _)| *name).collect();
        assert_eq!(names, [3 - preempted], "the other one goes on");
        bench.settle();
        for arrival in [decoding, prefilling] {
            assert_eq!(bench.seen(arrival.ids[0].0).tokens(), alone(info, &arrival), "{priority}");
        }
        bench.assert_books_balance();
    }
}

#[test]
fn a_span_that_is_not_cut_has_blocks_for_all_its_rows() {
    let info = DecoderInfo { mutual_items: true, ..decoder(&[0, 20]) };
    let image = item(1, 100);
    let run = |config: EngineConfig| {
        let mut bench = Bench::of(info, config);
        let arrival = embed(bench.sequence(1, 280, 40), &image, 10);
        bench.add(arrival);
        bench.ready(&image);
        bench.settle();
        bench.assert_books_balance();
        bench.seen(1)
    };
    // 100 rows and a window are in 5 blocks; a budget of 16 alone would be in 3.
    let seen = run(EngineConfig { max_sequences: 4, ..with_budget(16, 10 + 5) });
    assert_eq!(seen.finished().n_generated, 40);
    assert_eq!(seen.tokens(), run(config()).tokens());
    let short = run(EngineConfig { max_sequences: 4, ..with_budget(16, 10 + 4) });
    assert_eq!(short.finished().n_generated, 8, "a block of tokens less");
}
