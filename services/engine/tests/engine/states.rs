//! Recurrent states: what a sequence begins with, where checkpoints are made and found, and what has no way back. Completions over
//! random schedules are held by `schedules`.

use crate::bench::{Bench, arrival, config, with_blocks};
use crate::fake::info;
use std::num::NonZeroUsize;
use triptych_core::sampling::{BeamParams, EarlyStopping};
use triptych_engine::speculation::prompt_lookup::PromptLookup;
use triptych_engine::{
    EngineConfig, EngineError, Event, KvBudget, Pipelining, PrefixCache, SequenceId, SequenceRequest,
    Speculation, StateBudget,
};
use triptych_models::decoder::DecoderInfo;

/// A decoder whose layers recur.
fn recurrent() -> DecoderInfo {
    DecoderInfo { state_slot_bytes: NonZeroUsize::new(1000), ..info(false, 4096) }
}

fn slots(n: usize) -> EngineConfig {
    EngineConfig { states: StateBudget::Slots(n), ..config() }
}

/// The tokens of a sequence in an engine with nothing else to do that keeps no prefixes.
fn undisturbed(request: &SequenceRequest) -> Vec<u32> {
    let mut bench = Bench::of(recurrent(), EngineConfig { prefix_cache: PrefixCache::Off, ..slots(32) });
    bench.add(request.clone());
    bench.settle();
    bench.seen(request.ids[0].0).tokens()
}

/// A sequence that begins as the one of `id` and is named otherwise.
fn named(bench: &Bench, id: u64, name: u64, n_prompt: usize, n_generated: u32) -> SequenceRequest {
    SequenceRequest { ids: vec![SequenceId(name)], ..bench.sequence(id, n_prompt, n_generated) }
}

/// Runs a request to its end: what it computed first, and how much of its prompt was found.
fn first_range(bench: &mut Bench, request: SequenceRequest) -> (std::ops::Range<usize>, usize) {
    let (id, first, expect) = (request.ids[0].0, request.prepared.tokens[0], undisturbed(&request));
    bench.add(request);
    let steps = bench.step();
    bench.settle();
    assert_eq!(bench.seen(id).tokens(), expect, "sequence {id}");
    let range = steps.into_iter().find(|(name, _)| *name == first).expect("it ran").1;
    (range, bench.seen(id).finished().n_cached)
}

#[test]
fn a_prompt_stops_at_its_last_block_and_is_found_from_there() {
    let mut bench = Bench::of(recurrent(), slots(8));
    let request = named(&bench, 1, 1, 100, 3);
    assert_eq!(first_range(&mut bench, request), (0..96, 0));
    assert_eq!(bench.engine.stats().state_checkpoints, 1);
    let request = named(&bench, 1, 2, 100, 3);
    assert_eq!(first_range(&mut bench, request), (96..100, 96));
    assert_eq!(bench.engine.stats().checkpoint_hits, 1);
    bench.assert_books_balance();
}

#[test]
fn blocks_without_a_checkpoint_are_not_found_and_get_one() {
    let mut bench = Bench::of(recurrent(), slots(8));
    let request = named(&bench, 1, 1, 200, 1);
    first_range(&mut bench, request);
    // The first 64 tokens are those of the one before, whose checkpoint is at 192.
    let fork = |bench: &Bench, name: u64| {
        let mut request = named(bench, 1, name, 120, 2);
        let own = |token: &mut u32| *token = (*token + name as u32) % 61;
        request.prepared.tokens[70..].iter_mut().for_each(own);
        request
    };
    let request = fork(&bench, 2);
    assert_eq!(first_range(&mut bench, request), (0..64, 0));
    let request = fork(&bench, 3);
    assert_eq!(first_range(&mut bench, request), (64..96, 64));
    bench.assert_books_balance();
}

#[test]
fn chunks_that_the_budget_cuts_end_with_blocks() {
    let config = EngineConfig { token_budget: 50, max_sequences: 4, ..slots(8) };
    let mut bench = Bench::of(recurrent(), config);
    let request = named(&bench, 1, 1, 140, 3);
    let expect = undisturbed(&request);
    bench.add(request);
    let ranges: Vec<_> = (0..5).flat_map(|_| bench.step()).map(|(_, range)| range).collect();
    assert_eq!(ranges, [0..32, 32..64, 64..96, 96..128, 128..140]);
    bench.settle();
    assert_eq!(bench.seen(1).tokens(), expect);
    assert_eq!(bench.engine.stats().state_checkpoints, 4);
}

#[test]
fn a_short_prompt_costs_no_step_for_a_checkpoint_and_none_is_made_without_a_prefix_cache() {
    let mut bench = Bench::of(recurrent(), slots(8));
    let request = named(&bench, 1, 1, 32, 3);
    assert_eq!(first_range(&mut bench, request).0, 0..32);
    let mut bench = Bench::of(recurrent(), EngineConfig { prefix_cache: PrefixCache::Off, ..slots(8) });
    let request = named(&bench, 1, 1, 100, 3);
    assert_eq!(first_range(&mut bench, request).0, 0..100);
    assert_eq!(bench.engine.stats().state_checkpoints, 0);
}

#[test]
fn no_more_sequences_run_than_have_slots_and_checkpoints_give_theirs_up() {
    let mut bench = Bench::of(recurrent(), slots(2));
    for id in 1..=4 {
        bench.add(bench.sequence(id, 70, 5));
    }
    let mut most = 0;
    while !bench.engine.is_idle() {
        bench.step();
        let stats = bench.engine.stats();
        assert_eq!(stats.states_used, stats.running);
        most = most.max(stats.running);
    }
    assert_eq!(most, 2);
    for id in 1..=4 {
        assert_eq!(bench.seen(id).tokens(), undisturbed(&arrival(id, 70, 5, bench_start(&bench))));
    }
    bench.assert_books_balance();
}

fn bench_start(bench: &Bench) -> std::time::Instant {
    triptych_core::clock::Clock::now(&*bench.clock)
}

#[test]
fn a_preempted_sequence_is_computed_again_from_its_checkpoint() {
    let config = EngineConfig { states: StateBudget::Slots(8), ..with_blocks(5, 0) };
    let mut bench = Bench::of(recurrent(), config);
    // The second one gives way when the first needs a third block; its first block and the state there are left.
    let requests = [bench.sequence(1, 40, 60), bench.sequence(2, 62, 34)];
    requests.iter().for_each(|request| bench.add(request.clone()));
    bench.settle();
    let stats = bench.engine.stats();
    assert_eq!((stats.preemptions, stats.swaps, stats.checkpoint_hits), (1, 0, 1), "{stats:?}");
    requests.iter().for_each(|r| assert_eq!(bench.seen(r.ids[0].0).tokens(), undisturbed(r)));
    bench.assert_books_balance();
}

#[test]
fn completions_and_beams_begin_with_copies() {
    for pipelining in [Pipelining::Off, Pipelining::On] {
        let mut bench = Bench::of(recurrent(), EngineConfig { pipelining, ..slots(16) });
        bench.log().defers = pipelining == Pipelining::On;
        let mut three = bench.sequence(1, 40, 6);
        three.ids = (1..=3).map(SequenceId).collect();
        (three.sampling.n, three.sampling.temperature) = (3, 0.8);
        let mut beams = bench.sequence(7, 40, 6);
        beams.sampling.beams =
            Some(BeamParams { width: 4, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic });
        bench.add(three.clone());
        bench.add(beams.clone());
        bench.settle();
        assert!(bench.log().state_copies >= 2 + 3);
        let mut alone = Bench::of(recurrent(), slots(16));
        alone.add(three);
        alone.settle();
        (1..=3).for_each(|id| assert_eq!(bench.seen(id).tokens(), alone.seen(id).tokens()));
        assert_eq!(bench.seen(7).tokens(), undisturbed(&beams));
        bench.assert_books_balance();
    }
}

#[test]
fn nothing_that_goes_away_or_fails_keeps_a_slot() {
    for pipelining in [Pipelining::Off, Pipelining::On] {
        let mut bench = Bench::of(recurrent(), EngineConfig { pipelining, ..slots(6) });
        bench.log().defers = pipelining == Pipelining::On;
        for round in 0..12 {
            for id in 1..=6 {
                bench.add(named(&bench, id, 100 * round + id, 40 + 9 * id as usize, 30));
            }
            (0..round % 5).for_each(|_| drop(bench.step()));
            bench.log().fail_forward = round % 3 == 0;
            bench.step();
            (1..=6).for_each(|id| bench.event(Event::Abort(SequenceId(100 * round + id))));
            bench.settle();
            bench.assert_books_balance();
            let stats = bench.engine.stats();
            assert!(stats.state_checkpoints <= stats.states_total);
        }
        // What a failed step was to keep is not found.
        let request = named(&bench, 3, 9999, 67, 4);
        let expect = undisturbed(&request);
        bench.add(request);
        bench.settle();
        assert_eq!(bench.seen(9999).tokens(), expect);
    }
}

#[test]
fn a_reset_forgets_checkpoints() {
    let mut bench = Bench::of(recurrent(), slots(8));
    let request = named(&bench, 1, 1, 100, 3);
    first_range(&mut bench, request);
    bench.engine.reset();
    assert_eq!(bench.engine.stats().state_checkpoints, 0);
    let request = named(&bench, 1, 2, 100, 3);
    assert_eq!(first_range(&mut bench, request), (0..96, 0));
}

#[test]
fn settings_that_cannot_work_are_refused_by_name() {
    let check = |config: EngineConfig, text: &str| {
        assert_eq!(config.check(&recurrent()).expect_err(text).to_string(), text);
    };
    check(slots(0), "states is 0, needed is 1 or more");
    check(EngineConfig { states: StateBudget::Bytes(999), ..config() }, "states is 0, needed is 1 or more");
    let lookup = Speculation::PromptLookup(PromptLookup { n_tokens: 4, max_ngram: 2 });
    check(
        EngineConfig { speculation: lookup, ..slots(4) },
        "speculation does not go with recurrent states, which cannot be rolled back, needed is off",
    );
    assert_eq!(slots(4).check(&recurrent()).unwrap().states, 4);
    let bytes = EngineConfig { states: StateBudget::Bytes(2999), ..config() };
    assert_eq!(bytes.check(&recurrent()).unwrap().states, 2);
    assert_eq!(slots(4).check(&info(false, 64)).unwrap().states, 0);
}

#[test]
fn a_draft_model_with_states_is_refused() {
    let bench = Bench::decoder_only(config());
    let drafts = crate::fake::FakeDecoder { info: recurrent(), log: std::sync::Arc::default() };
    let kv = KvBudget::Blocks { self_attention: 8, cross_attention: 0, host: 0 };
    let refused = bench.engine.with_draft_model(Box::new(drafts), kv).err().expect("refused");
    assert!(matches!(refused, EngineError::Unsupported { .. }), "{refused}");
    assert!(refused.to_string().starts_with("a draft model does not go with"), "{refused}");
}
