//! Items: gating, sharing, and what becomes of sequences whose items do not come.

use crate::bench::{Bench, Seen, config, cross, embed, item, with_blocks};
use crate::fake::info;
use std::time::Duration;
use triptych_core::{EncoderOutput, Failure, FailureClass};
use triptych_engine::{EngineConfig, Event, NextStep, SequenceRequest};

/// The same request on an engine of its own, with everything ready.
fn alone(arrival: &SequenceRequest, outputs: &[&EncoderOutput]) -> Seen {
    let mut bench = Bench::new(config(), !arrival.prepared.cross.is_empty(), 4096);
    bench.add(arrival.clone());
    outputs.iter().for_each(|o| bench.ready(o));
    bench.settle();
    bench.seen(arrival.ids[0].0)
}

#[test]
fn prefill_stops_before_an_item_that_is_not_loaded_and_goes_on_when_it_is() {
    let mut bench = Bench::decoder_only(EngineConfig { token_budget: 16, ..config() });
    let (first, second) = (item(1, 6), item(2, 4));
    let arrival = embed(embed(bench.sequence(1, 80, 3), &first, 35), &second, 60);
    bench.add(arrival.clone());
    assert_eq!(bench.step(), [(1, 0..16)]);
    assert_eq!(bench.step(), [(1, 16..32)]);
    assert_eq!(bench.step(), [(1, 32..35)]);
    bench.settle();
    assert!(matches!(bench.engine.next_step(), NextStep::At(_)));
    let stats = bench.engine.stats();
    assert_eq!((stats.running, stats.waiting, stats.self_used, stats.self_cached), (0, 1, 0, 1));
    bench.ready(&second);
    assert_eq!(bench.step(), [], "the first item gates, whatever else is here");
    bench.ready(&first);
    assert_eq!(bench.step(), [(1, 32..48)], "the full block it left is still there");
    assert_eq!(bench.step(), [(1, 48..64)], "a chunk may end within an item");
    bench.settle();
    assert_eq!(bench.seen(1).tokens(), alone(&arrival, &[&first, &second]).tokens());
    bench.assert_books_balance();
}

fn mutual(token_budget: usize) -> Bench {
    let info = triptych_models::decoder::DecoderInfo { mutual_items: true, ..info(false, 4096) };
    Bench::of(info, EngineConfig { token_budget, max_sequences: 4, ..config() })
}

#[test]
fn a_chunk_does_not_end_within_rows_that_attend_to_each_other() {
    let mut bench = mutual(16);
    let (first, second) = (item(1, 12), item(2, 20));
    let arrival = embed(embed(bench.sequence(1, 60, 3), &first, 10), &second, 30);
    bench.add(arrival.clone());
    bench.ready(&first);
    bench.ready(&second);
    assert_eq!(bench.step(), [(1, 0..10)]);
    assert_eq!(bench.step(), [(1, 10..26)]);
    assert_eq!(bench.step(), [(1, 26..30)]);
    assert_eq!(bench.step(), [(1, 30..50)], "a span larger than the budget is a step");
    assert_eq!(bench.step(), [(1, 50..60)]);
    bench.settle();
    assert_eq!(bench.seen(1).tokens(), alone(&arrival, &[&first, &second]).tokens());
    bench.assert_books_balance();
}

#[test]
fn a_span_that_does_not_fit_beside_others_waits_and_is_not_starved() {
    let mut bench = mutual(16);
    let image = item(1, 14);
    bench.add(bench.sequence(1, 6, 20));
    let arrivals = [2, 3].map(|id| embed(bench.sequence(id, 20, 2), &image, 2));
    arrivals.iter().for_each(|arrival| bench.add(arrival.clone()));
    bench.ready(&image);
    assert_eq!(bench.step(), [(1, 0..6), (2, 0..2), (3, 0..2)]);
    assert_eq!(bench.step(), [(1, 6..7), (2, 2..17)], "beside a sequence that decodes");
    assert_eq!(bench.step(), [(1, 7..8), (2, 17..20)], "what is left is too little for the third");
    assert_eq!(bench.step(), [(1, 8..9), (2, 20..21), (3, 2..16)]);
    bench.settle();
    for (id, arrival) in [2, 3].into_iter().zip(&arrivals) {
        assert_eq!(bench.seen(id).tokens(), alone(arrival, &[&image]).tokens());
    }
    bench.assert_books_balance();
}

#[test]
fn a_prompt_that_ends_with_rows_that_attend_to_each_other_is_refused() {
    let mut bench = mutual(64);
    bench.add(embed(bench.sequence(1, 20, 2), &item(1, 10), 10));
    assert_eq!(bench.seen(1).failure(), FailureClass::InvalidArgument);
}

#[test]
fn a_sequence_that_waits_for_an_item_is_overtaken_and_holds_nothing() {
    let mut bench = Bench::decoder_only(config());
    let image = item(1, 6);
    bench.add(embed(bench.sequence(1, 10, 2), &image, 0));
    bench.add(bench.sequence(2, 4, 2));
    assert_eq!(bench.step(), [(2, 0..4)]);
    let stats = bench.engine.stats();
    assert_eq!((stats.waiting, stats.self_used, stats.items_pending), (1, 1, 1));
    bench.ready(&image);
    assert_eq!(bench.step(), [(2, 4..5), (0, 0..10)], "its first token is a placeholder");
}

#[test]
fn cross_attention_gates_before_the_first_token() {
    let mut bench = Bench::with_cross(config());
    let audio = item(1, 40);
    bench.add(cross(bench.sequence(1, 4, 2), &audio, 0..40));
    assert_eq!(bench.step(), []);
    bench.ready(&audio);
    assert_eq!(bench.step(), [(1, 0..4)]);
    assert_eq!(bench.log().projections, [40]);
}

#[test]
fn sequences_over_the_same_input_project_it_once_even_after_it_was_idle() {
    let mut bench = Bench::with_cross(config());
    let audio = item(1, 40);
    for id in [1, 2] {
        bench.add(cross(bench.sequence(id, 4, 2), &audio, 0..40));
    }
    bench.ready(&audio);
    bench.settle();
    bench.assert_books_balance();
    assert_eq!(bench.engine.stats().cross_cached, 2);
    // The rows are gone by now, and not needed.
    let third = cross(bench.sequence(3, 4, 2), &audio, 0..40);
    bench.add(third.clone());
    bench.settle();
    assert_eq!(bench.seen(3).tokens(), alone(&third, &[&audio]).tokens());
    bench.add(cross(bench.sequence(4, 4, 2), &audio, 8..40));
    assert_eq!(bench.step(), [], "other rows of it are another input");
    bench.ready(&audio);
    bench.settle();
    assert_eq!(bench.log().projections, [40, 32]);
}

#[test]
fn a_sequence_waits_for_cross_blocks_that_others_hold() {
    let mut bench = Bench::with_cross(with_blocks(8, 3));
    let (first, second) = (item(1, 64), item(2, 64));
    bench.add(cross(bench.sequence(1, 4, 3), &first, 0..64));
    bench.add(cross(bench.sequence(2, 4, 3), &second, 0..64));
    bench.ready(&first);
    bench.ready(&second);
    for _ in 0..3 {
        assert_eq!(bench.step().len(), 1);
    }
    assert_eq!(bench.step(), [(2, 0..4)]);
    bench.settle();
    assert_eq!(bench.seen(2).finished().n_generated, 3);
    bench.assert_books_balance();
}

#[test]
fn a_preempted_sequence_projects_again_what_was_evicted_meanwhile() {
    let mut bench = Bench::with_cross(with_blocks(3, 2));
    let (long, short, other) = (item(1, 32), item(2, 32), item(3, 64));
    let old = cross(bench.sequence(1, 31, 40), &long, 0..32);
    let young = cross(bench.sequence(2, 63, 10), &short, 0..32);
    bench.add(old);
    // Older than the young one, and needs its cross blocks; its item comes while the young one is preempted.
    let waiting = cross(bench.sequence(3, 60, 2), &other, 0..64);
    bench.add(waiting);
    bench.add(young.clone());
    bench.ready(&long);
    bench.ready(&short);
    (0..9).for_each(|_| drop(bench.step()));
    assert_eq!(bench.engine.stats().preemptions, 1);
    bench.ready(&other);
    bench.settle();
    assert_eq!(bench.log().projections, [64, 64, 32], "the first two in one call");
    assert_eq!(bench.seen(2).tokens(), alone(&young, &[&short]).tokens());
    assert_eq!(bench.seen(3).finished().n_generated, 2);
    bench.assert_books_balance();
}

#[test]
fn a_projection_that_failed_is_made_again_for_the_next_sequence() {
    let mut bench = Bench::with_cross(config());
    let audio = item(1, 40);
    bench.add(cross(bench.sequence(1, 4, 2), &audio, 0..40));
    bench.ready(&audio);
    bench.log().fail_projection = true;
    bench.settle();
    assert_eq!(bench.seen(1).failure(), FailureClass::Internal);
    assert_eq!(bench.engine.stats().cross_used, 0);
    bench.add(cross(bench.sequence(2, 4, 2), &audio, 0..40));
    assert_eq!(bench.step(), [], "what was not projected is no stand-in for the rows");
    bench.ready(&audio);
    bench.settle();
    assert_eq!(bench.seen(2).tokens().len(), 2);
}

#[test]
fn a_step_that_failed_does_not_forget_earlier_projections() {
    let mut bench = Bench::with_cross(config());
    let audio = item(1, 40);
    bench.add(cross(bench.sequence(1, 4, 9), &audio, 0..40));
    bench.ready(&audio);
    bench.step();
    bench.log().fail_forward = true;
    bench.settle();
    assert_eq!(bench.seen(1).failure(), FailureClass::Internal);
    assert_eq!(bench.engine.stats().cross_cached, 2);
    bench.assert_books_balance();
}

#[test]
fn an_item_that_failed_ends_those_that_still_need_it() {
    let mut bench = Bench::decoder_only(config());
    let (image, other) = (item(1, 6), item(2, 6));
    bench.add(embed(bench.sequence(1, 20, 4), &image, 5));
    bench.add(embed(bench.sequence(2, 20, 4), &other, 5));
    bench.add(bench.sequence(3, 20, 4));
    bench.step();
    bench.ready(&image);
    let failure = Failure::unavailable("the encoder is gone");
    for output in [&image, &other] {
        bench.event(Event::ItemFailed { key: output.item().key, failure: failure.clone() });
    }
    bench.settle();
    assert_eq!(bench.seen(1).tokens().len(), 4, "it had the rows already");
    assert_eq!(bench.seen(2).end, Some(Err(failure)));
    assert_eq!(bench.seen(3).tokens().len(), 4);
    bench.assert_books_balance();
}

#[test]
fn an_item_that_never_comes_ends_with_the_deadline() {
    let mut bench = Bench::decoder_only(config());
    let image = item(1, 6);
    bench.add(embed(bench.sequence(1, 20, 4), &image, 5));
    bench.settle();
    let NextStep::At(deadline) = bench.engine.next_step() else { panic!("it waits") };
    assert_eq!(bench.engine.stats().self_used, 0, "it holds nothing while it waits");
    bench.clock.advance(Duration::from_secs(100));
    assert!(triptych_core::clock::Clock::now(&*bench.clock) >= deadline);
    bench.step();
    assert_eq!(bench.seen(1).failure(), FailureClass::DeadlineExceeded);
    bench.assert_books_balance();
}

#[test]
fn rows_that_are_not_as_described_end_the_sequence_that_expects_others() {
    let mut bench = Bench::decoder_only(config());
    let (declared, arrived) = (item(1, 7), item(1, 6));
    bench.add(embed(bench.sequence(1, 20, 4), &declared, 5));
    bench.add(embed(bench.sequence(2, 20, 4), &arrived, 5));
    bench.ready(&arrived);
    bench.settle();
    assert_eq!(bench.seen(1).failure(), FailureClass::Mismatch);
    assert_eq!(bench.seen(2).tokens().len(), 4);
    bench.assert_books_balance();
}

#[test]
fn a_layout_that_contradicts_itself_fails_before_it_starts() {
    let image = item(1, 6);
    let base = |bench: &Bench| embed(bench.sequence(1, 20, 4), &image, 5);
    type Spoil = fn(&mut SequenceRequest);
    let cases: [(Spoil, FailureClass); 8] = [
        (|a| a.prepared.spans[0].n_tokens = 5, FailureClass::Internal),
        (|a| a.prepared.spans[0].first_token = 15, FailureClass::Internal),
        (|a| a.prepared.spans[0].item.0 = 1, FailureClass::Internal),
        (|a| a.prepared.spans.push(a.prepared.spans[0]), FailureClass::Internal),
        (|a| a.prepared.spans.clear(), FailureClass::InvalidArgument),
        (|a| a.prepared.positions.truncate(19), FailureClass::Internal),
        (|a| a.items[0].hidden = 3, FailureClass::Mismatch),
        (|a| a.sampling.temperature = 3.0, FailureClass::InvalidArgument),
    ];
    for (i, (spoil, class)) in cases.into_iter().enumerate() {
        let mut bench = Bench::decoder_only(config());
        let mut arrival = base(&bench);
        spoil(&mut arrival);
        bench.add(arrival);
        assert_eq!(bench.seen(1).failure(), class, "case {i}");
        bench.assert_books_balance();
    }
}

#[test]
fn cross_input_that_does_not_fit_fails_before_it_starts() {
    let audio = item(1, 200);
    let check = |cross_attention: bool, rows: Option<std::ops::Range<u32>>, class: FailureClass| {
        let mut bench = Bench::new(with_blocks(8, 4), cross_attention, 4096);
        let plain = bench.sequence(1, 4, 1);
        bench.add(match rows {
            Some(rows) => cross(plain, &audio, rows),
            None => plain,
        });
        assert_eq!(bench.seen(1).failure(), class);
    };
    check(true, None, FailureClass::Internal);
    check(true, Some(0..201), FailureClass::Internal);
    check(true, Some(7..7), FailureClass::Internal);
    check(true, Some(0..129), FailureClass::TooLarge);
    check(false, Some(0..10), FailureClass::Internal);
}
