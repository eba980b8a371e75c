//! Computation shared by sequences: prefixes, prompts of several completions, beams, and encoder inputs.

use crate::bench::{Bench, config, cross, embed, item, with_blocks};
use crate::fake::info;
use std::num::NonZeroU32;
use triptych_core::TenantId;
use triptych_core::sampling::{BeamParams, EarlyStopping};
use triptych_engine::{EngineConfig, KvBudget, NextStep, PrefixCache, SequenceId, SequenceRequest};
use triptych_models::decoder::{DecoderInfo, KvCacheGroups};

/// The prompt of another sequence, under the id `id`.
fn like(arrival: &SequenceRequest, id: u64) -> SequenceRequest {
    SequenceRequest { ids: vec![SequenceId(id)], ..arrival.clone() }
}

/// The tokens of a request on an engine that keeps nothing.
fn computed_whole(arrival: &SequenceRequest, outputs: &[&triptych_core::EncoderOutput]) -> Vec<u32> {
    let plain = EngineConfig { prefix_cache: PrefixCache::Off, ..config() };
    let mut bench = Bench::new(plain, !arrival.prepared.cross.is_empty(), 4096);
    bench.add(arrival.clone());
    outputs.iter().for_each(|o| bench.ready(o));
    bench.settle();
    bench.seen(arrival.ids[0].0).tokens()
}

#[test]
fn a_prompt_is_computed_from_where_it_differs_from_an_earlier_one() {
    let mut bench = Bench::decoder_only(config());
    let first = bench.sequence(1, 80, 2);
    bench.add(first.clone());
    bench.settle();
    let mut second = like(&first, 2);
    second.prepared.tokens[70] += 1;
    bench.add(second.clone());
    assert_eq!(bench.step(), [(1, 64..80)]);
    let mut third = like(&first, 3);
    third.prepared.tokens[40] += 1;
    bench.add(third);
    assert_eq!(bench.step(), [(1, 80..81), (1, 32..80)]);
    bench.settle();
    assert_eq!(bench.seen(2).tokens(), computed_whole(&second, &[]));
    let cached: Vec<usize> = (1..=3).map(|id| bench.seen(id).finished().n_cached).collect();
    assert_eq!(cached, [0, 64, 32]);
    let stats = bench.engine.stats();
    assert_eq!((stats.prompt_tokens, stats.cached_tokens), (240, 96));
    bench.assert_books_balance();
}

#[test]
fn the_last_token_of_a_known_prompt_is_computed_all_the_same() {
    let mut bench = Bench::decoder_only(config());
    let first = bench.sequence(1, 64, 2);
    bench.add(first.clone());
    bench.settle();
    bench.add(like(&first, 2));
    assert_eq!(bench.step(), [(1, 32..64)]);
    bench.settle();
    assert_eq!(bench.seen(2).tokens(), bench.seen(1).tokens());
}

#[test]
fn what_was_written_is_known_to_the_next_turn() {
    let mut bench = Bench::decoder_only(config());
    let first = bench.sequence(1, 20, 30);
    bench.add(first.clone());
    bench.settle();
    let mut second = bench.sequence(1, 53, 2);
    second.ids = vec![SequenceId(2)];
    second.prepared.tokens[..20].copy_from_slice(&first.prepared.tokens);
    second.prepared.tokens[20..50].copy_from_slice(&bench.seen(1).tokens());
    bench.add(second.clone());
    bench.settle();
    assert_eq!(bench.seen(2).finished().n_cached, 32);
    assert_eq!(bench.seen(2).tokens(), computed_whole(&second, &[]));
}

#[test]
fn a_sequence_gives_back_the_blocks_that_no_layer_sees_and_is_found_by_those_that_it_does() {
    let window = NonZeroU32::new(20);
    let mixed = KvCacheGroups::of(&[None, window]).unwrap();
    for (kv_groups, n_used) in [(KvCacheGroups::one(window), 2), (mixed, 15 + 2)] {
        let windowed = DecoderInfo { kv_groups, ..info(false, 4096) };
        let mut bench = Bench::of(windowed, with_blocks(40, 0));
        let first = bench.sequence(1, 160, 300);
        bench.add(first.clone());
        let mut most_used = 0;
        while bench.engine.next_step() == NextStep::Now {
            bench.step();
            if bench.engine.stats().decoding == 1 {
                most_used = most_used.max(bench.engine.stats().self_used);
            }
        }
        assert_eq!(most_used, n_used, "of 15 blocks of each group");
        // Others take the blocks that were given back first.
        bench.add(bench.sequence(2, 160, 1));
        bench.settle();
        let mut next = bench.sequence(1, 480, 2);
        next.ids = vec![SequenceId(3)];
        next.prepared.tokens[..160].copy_from_slice(&first.prepared.tokens);
        next.prepared.tokens[160..460].copy_from_slice(&bench.seen(1).tokens());
        bench.add(next.clone());
        bench.settle();
        assert_eq!(bench.seen(3).finished().n_cached, 448);
        let mut alone = Bench::of(windowed, with_blocks(40, 0));
        alone.add(next);
        alone.settle();
        assert_eq!(bench.seen(3).tokens(), alone.seen(3).tokens());
    }
}

#[test]
fn blocks_of_another_tenant_item_input_or_position_are_not_found() {
    let (image, other) = (item(1, 6), item(2, 6));
    let check = |change: &dyn Fn(&SequenceRequest) -> SequenceRequest, n_cached: usize| {
        let mut bench = Bench::decoder_only(config());
        let first = embed(bench.sequence(1, 80, 2), &image, 5);
        bench.add(first.clone());
        bench.ready(&image);
        bench.settle();
        bench.add(change(&like(&first, 2)));
        bench.ready(&other);
        bench.ready(&image);
        bench.settle();
        assert_eq!(bench.seen(2).finished().n_cached, n_cached);
    };
    check(&SequenceRequest::clone, 64);
    check(&|a| SequenceRequest { tenant: TenantId::of(b"another"), ..a.clone() }, 0);
    check(&|a| SequenceRequest { items: vec![other.item().clone()], ..a.clone() }, 0);
    let moved = |a: &SequenceRequest| {
        let mut a = a.clone();
        a.prepared.positions[40] = [99; 3];
        a
    };
    check(&moved, 32);
    let audio = item(3, 40);
    let mut bench = Bench::with_cross(config());
    for (id, rows, n_cached) in [(1, 0..40, 0), (2, 0..40, 64), (3, 0..39, 0)] {
        bench.add(cross(like(&bench.sequence(1, 80, 2), id), &audio, rows));
        bench.ready(&audio);
        bench.settle();
        assert_eq!(bench.seen(id).finished().n_cached, n_cached);
    }
}

#[test]
fn known_blocks_stand_in_for_the_rows_of_an_item() {
    let image = item(1, 20);
    let mut bench = Bench::decoder_only(config());
    let first = embed(bench.sequence(1, 80, 2), &image, 5);
    bench.add(first.clone());
    bench.ready(&image);
    bench.settle();
    bench.add(like(&first, 2));
    assert_eq!(bench.step(), [(1, 64..80)], "its rows never came a second time");
    bench.settle();
    assert_eq!(bench.seen(2).tokens(), bench.seen(1).tokens());
}

#[test]
fn completions_share_one_prefill_and_copy_only_the_block_they_write() {
    let mut bench = Bench::with_cross(config());
    let audio = item(1, 40);
    let mut arrival = cross(bench.sequence(1, 70, 5), &audio, 0..40);
    arrival.ids = (1..=4).map(SequenceId).collect();
    arrival.sampling.n = 4;
    arrival.sampling.temperature = 1.0;
    bench.add(arrival.clone());
    bench.ready(&audio);
    assert_eq!(bench.step(), [(1, 0..70)]);
    assert_eq!((bench.engine.stats().running, bench.engine.stats().self_used), (4, 3));
    assert_eq!(bench.step().len(), 4);
    let stats = bench.engine.stats();
    assert_eq!((stats.self_used, stats.cross_used), (2 + 4, 2));
    assert_eq!(bench.log().moves, [3, 0, 0], "the last of them writes where it was");
    assert_eq!(bench.log().projections, [40]);
    bench.settle();
    for (choice, id) in (1..=4).enumerate() {
        let mut alone = Bench::with_cross(config());
        // The others are asked for too, since a draw depends on the completion's number.
        alone.add(arrival.clone());
        (1..=4).filter(|other| *other != id).for_each(|other| {
            alone.event(triptych_engine::Event::Abort(SequenceId(other)));
        });
        alone.ready(&audio);
        alone.settle();
        assert_eq!(bench.seen(id).tokens(), alone.seen(id).tokens(), "completion {choice}");
    }
    bench.assert_books_balance();
}

#[test]
fn completions_without_a_run_slot_wait_and_find_their_prompt_again() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 2, ..config() });
    let mut arrival = bench.sequence(1, 70, 5);
    arrival.ids = (1..=5).map(SequenceId).collect();
    arrival.sampling.n = 5;
    bench.add(arrival.clone());
    bench.step();
    assert_eq!((bench.engine.stats().running, bench.engine.stats().waiting), (2, 3));
    bench.settle();
    let computed: usize = bench.log().steps.iter().flatten().map(|(_, tokens)| tokens.len()).sum();
    assert!(
        computed < 70 + 3 * (70 - 64 + 1) + 5 * 5,
        "{computed} rows: the prompt's full blocks are read once"
    );
    for id in 2..=5 {
        assert_eq!(bench.seen(id).tokens(), bench.seen(1).tokens(), "greedy completions are the same");
    }
    bench.assert_books_balance();
}

#[test]
fn beams_share_their_prompt_and_one_projection() {
    let mut bench = Bench::with_cross(config());
    let audio = item(1, 40);
    let mut arrival = cross(bench.sequence(1, 70, 6), &audio, 0..40);
    arrival.ids = vec![SequenceId(1), SequenceId(2)];
    arrival.sampling.n = 2;
    arrival.sampling.beams =
        Some(BeamParams { width: 4, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic });
    bench.add(arrival);
    bench.ready(&audio);
    bench.step();
    assert_eq!(bench.step().len(), 4);
    let stats = bench.engine.stats();
    assert_eq!((stats.running, stats.cross_used), (4, 2));
    assert!(stats.self_used <= 2 + 4, "{stats:?}");
    assert_eq!(bench.log().moves, [3, 0, 0]);
    assert_eq!(bench.seen(1).deltas, [], "any beam may still win");
    bench.settle();
    assert_eq!(bench.log().projections, [40]);
    assert_eq!(bench.seen(1).tokens().len(), 6);
    assert_ne!(bench.seen(1).tokens(), bench.seen(2).tokens());
    bench.assert_books_balance();
}

#[test]
fn thirty_two_requests_on_one_clip_use_the_cross_memory_of_one() {
    let kv = KvBudget::Blocks { self_attention: 64, cross_attention: 2 * 47, host: 0 };
    let (max_sequences, max_waiting) = (32, 32);
    let token_budget = 2048;
    let config = EngineConfig { kv, token_budget, max_sequences, max_waiting, ..config() };
    let mut bench = Bench::with_cross(config);
    let clip = item(1, 1500);
    for id in 1..=32 {
        bench.add(cross(bench.sequence(id, 4, 8), &clip, 0..1500));
    }
    bench.ready(&clip);
    assert_eq!(bench.step().len(), 32);
    assert_eq!(bench.engine.stats().cross_used, 1500usize.div_ceil(32));
    bench.settle();
    assert_eq!(bench.log().projections, [1500]);
    bench.assert_books_balance();
}

#[test]
fn nothing_kept_is_found_after_a_reset() {
    let mut bench = Bench::with_cross(with_blocks(16, 4));
    let audio = item(1, 40);
    let first = cross(bench.sequence(1, 80, 2), &audio, 0..40);
    bench.add(first.clone());
    bench.ready(&audio);
    bench.settle();
    bench.engine.reset();
    let stats = bench.engine.stats();
    assert_eq!((stats.self_cached, stats.cross_cached), (0, 0));
    bench.add(like(&first, 2));
    bench.ready(&audio);
    bench.settle();
    assert_eq!(bench.seen(2).finished().n_cached, 0);
    assert_eq!(bench.log().projections, [40, 40]);
}
