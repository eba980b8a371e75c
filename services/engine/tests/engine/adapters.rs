//! Adapters: what is shared and what is not, how many run at once, and their coming and going.

use crate::bench::{Bench, config, item};
use std::path::PathBuf;
use triptych_core::{AdapterId, FailureClass};
use triptych_engine::{EngineConfig, Event, SequenceId, SequenceRequest};
use triptych_models::lora::LoraAdapter;

/// Three adapters, loaded.
fn loaded(bench: &mut Bench) -> [AdapterId; 3] {
    ["attention", "everything", "feed_forward"].map(|name| {
        let adapter = open(name);
        bench.engine.load_adapter(&adapter).expect("an adapter");
        adapter.id()
    })
}

fn open(name: &str) -> LoraAdapter {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/lora_llama").join(name);
    LoraAdapter::open(&dir, 16).expect("an adapter")
}

/// The prompt of another sequence, under the id `id` and with an adapter.
fn like(arrival: &SequenceRequest, id: u64, adapter: Option<AdapterId>) -> SequenceRequest {
    SequenceRequest { ids: vec![SequenceId(id)], adapter, ..arrival.clone() }
}

#[test]
fn blocks_of_one_adapter_are_found_by_no_other() {
    let mut bench = Bench::decoder_only(config());
    let [a, b, _] = loaded(&mut bench);
    let base = bench.sequence(1, 80, 4);
    for (id, adapter) in [(1, None), (2, Some(a)), (3, Some(b)), (4, Some(a)), (5, None)] {
        bench.add(like(&base, id, adapter));
        bench.settle();
    }
    let cached: Vec<usize> = (1..=5).map(|id| bench.seen(id).finished().n_cached).collect();
    assert_eq!(cached, [0, 0, 0, 64, 64]);
    let tokens: Vec<Vec<u32>> = (1..=5).map(|id| bench.seen(id).tokens()).collect();
    assert_eq!((&tokens[3], &tokens[4]), (&tokens[1], &tokens[0]));
    assert!(tokens[0] != tokens[1] && tokens[1] != tokens[2] && tokens[0] != tokens[2]);
    bench.assert_books_balance();
}

#[test]
fn encoder_rows_are_projected_once_for_each_adapter() {
    let mut bench = Bench::with_cross(config());
    let [a, ..] = loaded(&mut bench);
    let output = item(9, 8);
    for (id, adapter) in [(1, None), (2, Some(a)), (3, Some(a)), (4, None)] {
        let request = bench.sequence_with_cross(id, 4, 3, &output);
        bench.add(SequenceRequest { adapter, ..request });
    }
    bench.ready(&output);
    bench.settle();
    assert_eq!(bench.log().projections, [8, 8]);
    bench.assert_books_balance();
}

#[test]
fn more_adapters_than_may_run_take_turns_and_none_is_passed_over() {
    let mut bench = Bench::decoder_only(EngineConfig { max_loras: 2, ..config() });
    let [a, b, c] = loaded(&mut bench);
    let order = [(1, Some(a)), (2, Some(b)), (3, Some(c)), (4, Some(a)), (5, None), (6, Some(b))];
    for (id, adapter) in order {
        let request = bench.sequence(id, 4, if id == 1 { 6 } else { 12 });
        bench.add(SequenceRequest { adapter, ..request });
    }
    let first_tokens = |step: Vec<(u32, std::ops::Range<usize>)>| -> Vec<u32> {
        step.into_iter().map(|(token, _)| token).collect()
    };
    // The third waits for a place, and later ones with adapters behind it; one without overtakes.
    assert_eq!(first_tokens(bench.step()), [1, 2, 5]);
    for _ in 0..5 {
        assert_eq!(first_tokens(bench.step()), [1, 2, 5]);
    }
    // The first has ended: the third takes its place, the fourth would be one adapter too many.
    assert_eq!(first_tokens(bench.step()), [2, 5, 3]);
    bench.settle();
    assert!(bench.log().adapters.iter().all(|n| *n <= 2));
    assert!((1..=6).all(|id| bench.seen(id).finished().n_generated > 0));
    bench.assert_books_balance();
}

#[test]
fn an_adapter_goes_when_its_last_sequence_has_ended_and_refuses_new_ones_at_once() {
    let mut bench = Bench::decoder_only(config());
    let [a, b, _] = loaded(&mut bench);
    let base = bench.sequence(1, 4, 6);
    bench.add(like(&base, 1, Some(a)));
    bench.step();
    bench.engine.unload_adapter(a);
    bench.engine.unload_adapter(b);
    assert!(bench.log().loaded.contains(&a) && !bench.log().loaded.contains(&b));
    bench.add(like(&base, 2, Some(a)));
    assert_eq!(bench.seen(2).failure(), FailureClass::NotFound);
    bench.add(like(&base, 3, Some(b)));
    assert_eq!(bench.seen(3).failure(), FailureClass::NotFound);
    bench.settle();
    assert_eq!(bench.seen(1).finished().n_generated, 6);
    assert!(!bench.log().loaded.contains(&a));
    bench.engine.load_adapter(&open("attention")).expect("an adapter");
    bench.add(like(&base, 4, Some(a)));
    bench.step();
    bench.engine.unload_adapter(a);
    bench.event(Event::Abort(SequenceId(4)));
    bench.settle();
    bench.step();
    assert!(!bench.log().loaded.contains(&a), "nobody waits for it any more");
    bench.assert_books_balance();
}

#[test]
fn an_adapter_that_comes_back_before_it_went_stays() {
    let mut bench = Bench::decoder_only(config());
    let [a, ..] = loaded(&mut bench);
    bench.add(SequenceRequest { adapter: Some(a), ..bench.sequence(1, 4, 3) });
    bench.step();
    bench.engine.unload_adapter(a);
    bench.engine.load_adapter(&open("attention")).expect("an adapter");
    bench.settle();
    assert!(bench.log().loaded.contains(&a));
    let load = bench.engine.adapter_loads().into_iter().find(|(id, _)| *id == a).expect("it is loaded").1;
    assert_eq!((load.running, load.waiting), (0, 0));
}
