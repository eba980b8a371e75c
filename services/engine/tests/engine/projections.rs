//! Encoder input on its way into cross-attention blocks: in chunks, together, once, and whole before it is read.

use crate::bench::{Bench, config, item, with_blocks};
use crate::fake::info;
use triptych_core::{EncoderOutput, FailureClass};
use triptych_engine::{EngineConfig, Event, SequenceId, SequenceRequest};
use triptych_models::decoder::DecoderInfo;

/// A step takes 40 rows, and an encoder row costs as much as a token.
fn narrow() -> EngineConfig {
    EngineConfig { token_budget: 40, ..config() }
}

/// A sequence's tokens on an engine that projects everything in one step.
fn alone(arrival: &SequenceRequest, output: &EncoderOutput) -> Vec<u32> {
    let mut bench = Bench::with_cross(config());
    bench.add(arrival.clone());
    bench.ready(output);
    bench.settle();
    bench.seen(arrival.ids[0].0).tokens()
}

#[test]
fn encoder_rows_are_projected_under_the_token_budget_and_those_of_a_step_together() {
    let mut bench = Bench::with_cross(EngineConfig { token_budget: 60, ..config() });
    let clips = [item(1, 70), item(2, 30), item(3, 30), item(4, 10)];
    let arrivals: Vec<_> =
        (1..).zip(&clips).map(|(id, clip)| bench.sequence_with_cross(id, 5, 9, clip)).collect();
    for (arrival, clip) in arrivals.iter().zip(&clips) {
        bench.add(arrival.clone());
        bench.ready(clip);
    }
    assert_eq!(bench.step(), [], "the first clip takes the whole budget");
    assert_eq!(bench.step(), [(1, 0..5), (2, 0..5)]);
    assert_eq!(bench.log().projections, [60, 10 + 30 + 10]);
    assert_eq!(bench.step(), [(1, 5..6), (2, 5..6), (3, 0..5), (4, 0..5)]);
    assert_eq!(bench.log().projections, [60, 50, 20 + 10]);
    bench.settle();
    for (arrival, clip) in arrivals.iter().zip(&clips) {
        assert_eq!(bench.seen(arrival.ids[0].0).tokens(), alone(arrival, clip));
    }
    bench.assert_books_balance();
}

#[test]
fn others_decode_in_every_step_while_a_large_item_is_projected() {
    let mut bench = Bench::with_cross(with_blocks(64, 256));
    let (clip, tiles) = (item(1, 30), item(2, 6404));
    bench.add(bench.sequence_with_cross(1, 4, 40, &clip));
    bench.ready(&clip);
    bench.step();
    bench.add(bench.sequence_with_cross(2, 4, 3, &tiles));
    bench.ready(&tiles);
    // 511 rows beside the one that decodes: 12 steps, and 272 rows in the 13th.
    for i in 0..12 {
        assert_eq!(bench.step(), [(1, 4 + i..5 + i)]);
    }
    assert_eq!(bench.step(), [(1, 16..17), (2, 0..4)]);
    assert!(bench.log().projections.iter().all(|n| *n <= 511));
    assert_eq!(bench.log().projections.iter().sum::<usize>(), 30 + 6404);
    bench.settle();
    bench.assert_books_balance();
}

#[test]
fn rows_are_charged_by_what_they_cost_beside_a_token() {
    let light = DecoderInfo { cross_rows_per_token: 7, ..info(true, 4096) };
    let mut bench = Bench::of(light, narrow());
    let clip = item(1, 300);
    bench.add(bench.sequence_with_cross(1, 4, 2, &clip));
    bench.ready(&clip);
    assert_eq!(bench.step(), []);
    assert_eq!(bench.log().projections, [280]);
    assert_eq!(bench.step(), [(1, 0..4)]);
    assert_eq!(bench.log().projections, [280, 20]);
}

#[test]
fn rows_of_a_step_are_bounded_however_little_they_cost() {
    let light = DecoderInfo { cross_rows_per_token: 100, ..info(true, 4096) };
    let mut bench = Bench::of(light, with_blocks(64, 256));
    let tiles = item(1, 6404);
    bench.add(bench.sequence_with_cross(1, 4, 2, &tiles));
    bench.ready(&tiles);
    bench.settle();
    assert_eq!(bench.log().projections, [4096, 2308]);
}

#[test]
fn a_prompt_of_one_token_waits_for_the_last_row_too() {
    let mut bench = Bench::with_cross(narrow());
    let text = item(1, 100);
    let arrival = bench.sequence_with_cross(1, 1, 5, &text);
    bench.add(arrival.clone());
    bench.ready(&text);
    assert_eq!((bench.step(), bench.step(), bench.step()), (vec![], vec![], vec![(1, 0..1)]));
    assert_eq!(bench.log().order, "ppps");
    bench.settle();
    assert_eq!(bench.seen(1).tokens(), alone(&arrival, &text));
}

#[test]
fn sequences_over_one_input_finish_what_one_that_was_aborted_began() {
    let mut bench = Bench::with_cross(narrow());
    let clip = item(1, 100);
    let [first, second] = [1, 2].map(|id| bench.sequence_with_cross(id, 4, 6, &clip));
    bench.add(first);
    bench.add(second.clone());
    bench.ready(&clip);
    bench.step();
    bench.event(Event::Abort(SequenceId(1)));
    bench.step();
    bench.event(Event::Abort(SequenceId(2)));
    assert_eq!((bench.engine.stats().cross_used, bench.engine.stats().cross_cached), (0, 4));
    // Nobody is left who has the rows: the next one must have them.
    let third = bench.sequence_with_cross(3, 4, 6, &clip);
    bench.add(third.clone());
    assert_eq!(bench.step(), []);
    bench.ready(&clip);
    assert_eq!(bench.step(), [(3, 0..4)]);
    assert_eq!(bench.log().projections, [40, 40, 20], "each row once");
    bench.settle();
    assert_eq!(bench.seen(3).tokens(), alone(&third, &clip));
    bench.assert_books_balance();
}

/// Two sequences hold an input of 6404 rows, 4096 of them projected for the first.
fn two_holders() -> (Bench, SequenceRequest, EncoderOutput) {
    let light = DecoderInfo { cross_rows_per_token: 100, ..info(true, 4096) };
    let mut bench = Bench::of(light, with_blocks(64, 256));
    let tiles = item(1, 6404);
    let [first, second] = [1, 2].map(|id| bench.sequence_with_cross(id, 4, 6, &tiles));
    bench.add(first);
    bench.add(second.clone());
    bench.ready(&tiles);
    assert_eq!((bench.step(), bench.engine.stats().running), (vec![], 2));
    (bench, second, tiles)
}

fn alone_over_tiles(arrival: &SequenceRequest, tiles: &EncoderOutput) -> Vec<u32> {
    let mut bench = Bench::with_cross(EngineConfig { token_budget: 8192, ..with_blocks(64, 256) });
    bench.add(arrival.clone());
    bench.ready(tiles);
    bench.settle();
    bench.seen(arrival.ids[0].0).tokens()
}

#[test]
fn a_sequence_that_waits_beside_the_one_that_is_aborted_goes_on_at_once() {
    let (mut bench, second, tiles) = two_holders();
    bench.event(Event::Abort(SequenceId(1)));
    assert_eq!(bench.step(), [(2, 0..4)]);
    assert_eq!(bench.log().projections, [4096, 2308]);
    bench.settle();
    assert_eq!(bench.seen(2).tokens(), alone_over_tiles(&second, &tiles));
    bench.assert_books_balance();
}

#[test]
fn rows_of_a_step_that_failed_are_projected_again() {
    let (mut bench, second, tiles) = two_holders();
    bench.log().fail_forward = true;
    bench.step();
    assert_eq!(bench.seen(1).failure(), FailureClass::Internal);
    assert_eq!(bench.seen(2).failure(), FailureClass::Internal, "both had tokens in the step");
    let third = SequenceRequest { ids: vec![SequenceId(3)], ..second };
    bench.add(third.clone());
    bench.ready(&tiles);
    bench.settle();
    assert_eq!(bench.log().projections, [4096, 2308, 2308], "what did not run is not read");
    assert_eq!(bench.seen(3).tokens(), alone_over_tiles(&third, &tiles));
    bench.assert_books_balance();
}

#[test]
fn a_sequence_that_is_preempted_before_its_input_is_whole_goes_on_with_it_later() {
    let mut bench = Bench::with_cross(EngineConfig { token_budget: 40, ..with_blocks(2, 8) });
    let (clip, other) = (item(1, 100), item(2, 20));
    let slow = bench.sequence_with_cross(1, 4, 6, &clip);
    bench.add(slow.clone());
    bench.ready(&clip);
    bench.step();
    let urgent = SequenceRequest { priority: -1, ..bench.sequence_with_cross(2, 40, 6, &other) };
    bench.add(urgent.clone());
    bench.ready(&other);
    // The budget goes to the urgent one first.
    assert_eq!((bench.step(), bench.step()), (vec![(2, 0..20)], vec![(2, 20..40)]));
    assert_eq!((bench.engine.stats().preemptions, bench.engine.stats().running), (1, 1));
    bench.settle();
    assert_eq!(bench.log().projections.iter().sum::<usize>(), 120, "each row once");
    assert_eq!(bench.seen(1).tokens(), alone(&slow, &clip));
    assert_eq!(bench.seen(2).tokens(), alone(&urgent, &other));
    bench.assert_books_balance();
}

#[test]
fn blocks_of_a_preempted_projection_serve_the_sequence_that_preempted_it_in_the_same_step() {
    // The urgent sequence needs the blocks that the step has just planned to project into.
    let mut bench = Bench::with_cross(EngineConfig { token_budget: 40, ..with_blocks(2, 4) });
    let (clip, other) = (item(1, 100), item(2, 120));
    let slow = bench.sequence_with_cross(1, 4, 6, &clip);
    bench.add(slow.clone());
    bench.ready(&clip);
    bench.step();
    let urgent = SequenceRequest { priority: -1, ..bench.sequence_with_cross(2, 40, 6, &other) };
    bench.add(urgent.clone());
    bench.ready(&other);
    bench.settle();
    assert_eq!(bench.seen(1).tokens(), alone(&slow, &clip));
    assert_eq!(bench.seen(2).tokens(), alone(&urgent, &other));
    bench.assert_books_balance();
}

#[test]
fn a_step_that_failed_midway_ends_who_asked_and_the_others_project_its_rows_again() {
    let mut bench = Bench::with_cross(narrow());
    let clip = item(1, 100);
    let [first, second] = [1, 2].map(|id| bench.sequence_with_cross(id, 4, 6, &clip));
    bench.add(first);
    bench.add(second.clone());
    bench.ready(&clip);
    bench.step();
    bench.log().fail_projection = true;
    bench.step();
    assert_eq!(bench.seen(1).failure(), FailureClass::Internal);
    bench.settle();
    assert_eq!(bench.log().projections, [40, 40, 20]);
    assert_eq!(bench.seen(2).tokens(), alone(&second, &clip));
    bench.assert_books_balance();
}

#[test]
fn an_input_that_a_reset_cut_short_is_projected_from_its_first_row() {
    let mut bench = Bench::with_cross(narrow());
    let clip = item(1, 100);
    let arrival = bench.sequence_with_cross(1, 4, 6, &clip);
    bench.add(arrival.clone());
    bench.ready(&clip);
    bench.step();
    bench.engine.reset();
    bench.settle();
    assert_eq!(bench.log().projections, [40, 40, 40, 20]);
    assert_eq!(bench.seen(1).tokens(), alone(&arrival, &clip));
    bench.assert_books_balance();
}
