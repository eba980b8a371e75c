//! Alignments between steps: a layer at a time, in order, and gone when nobody waits for them.

use crate::bench::{Bench, config, item};
use triptych_engine::{AlignJob, Event, NextStep, SequenceId};

/// A pass of `n_layers` layers over tokens that begin with `id`.
fn job(id: u64, n_layers: u32) -> Box<AlignJob> {
    Box::new(AlignJob {
        id: SequenceId(id),
        tokens: vec![id as u32, 1, 2],
        output: item(9, 8),
        first_row: 0,
        n_rows: 8,
        heads: [(0, 0), (n_layers - 1, 1)].into(),
        adapter: None,
    })
}

#[test]
fn a_decoding_sequence_writes_a_token_for_each_layer_of_an_alignment() {
    let mut bench = Bench::decoder_only(config());
    bench.add(bench.sequence(1, 4, 8));
    bench.step();
    bench.event(Event::Align(job(50, 3)));
    bench.event(Event::Align(job(51, 2)));
    assert_eq!(bench.log().order, "s", "nothing is computed where the event is handled");
    for _ in 0..5 {
        bench.step();
    }
    assert_eq!(bench.log().order, "ssasasasasa");
    assert_eq!(bench.aligned, [(50, vec![50.0]), (51, vec![51.0])]);
    bench.settle();
    assert_eq!(bench.seen(1).finished().n_generated, 8);
}

#[test]
fn an_engine_without_sequences_has_work_until_the_last_layer() {
    let mut bench = Bench::decoder_only(config());
    bench.event(Event::Align(job(50, 3)));
    assert_eq!((bench.engine.next_step(), bench.engine.is_idle()), (NextStep::Now, false));
    bench.settle();
    assert_eq!(bench.log().order, "aaa");
    assert_eq!(bench.aligned, [(50, vec![50.0])]);
    assert_eq!((bench.engine.next_step(), bench.engine.is_idle()), (NextStep::OnEvent, true));
}

#[test]
fn an_alignment_that_nobody_waits_for_computes_no_further_layer() {
    let mut bench = Bench::decoder_only(config());
    for id in 50..53 {
        bench.event(Event::Align(job(id, 3)));
    }
    bench.step();
    bench.event(Event::Abort(SequenceId(50)));
    bench.event(Event::Abort(SequenceId(51)));
    bench.settle();
    assert_eq!(bench.log().order, "aaaa", "one layer of the first, none of the second");
    assert_eq!(bench.aligned, [(52, vec![52.0])]);
}
