//! Images that tokens attend to from theirs on, one or several in a prompt, for a decoder that can do without.

use crate::bench::{Bench, config, cross, item, seen_from, with_blocks};
use crate::fake::info;
use triptych_core::{EncoderOutput, FailureClass};
use triptych_engine::{EngineConfig, PrefixCache, SequenceId, SequenceRequest};
use triptych_models::decoder::DecoderInfo;

fn optional() -> DecoderInfo {
    DecoderInfo { cross_optional: true, ..info(true, 4096) }
}

/// The tokens of a request on an engine that keeps nothing.
fn alone(arrival: &SequenceRequest, outputs: &[&EncoderOutput]) -> Vec<u32> {
    let mut bench = Bench::of(optional(), EngineConfig { prefix_cache: PrefixCache::Off, ..config() });
    bench.add(arrival.clone());
    outputs.iter().for_each(|output| bench.ready(output));
    bench.settle();
    bench.seen(arrival.ids[0].0).tokens()
}

#[test]
fn where_encoder_input_is_optional_a_sequence_without_it_runs_beside_one_that_sees_it_late() {
    let mut bench = Bench::of(optional(), config());
    let image = item(1, 40);
    bench.add(seen_from(bench.sequence(1, 9, 3), 4, &image));
    bench.add(bench.sequence(2, 6, 3));
    bench.ready(&image);
    assert_eq!(bench.step(), [(1, 0..9), (2, 0..6)]);
    assert_eq!(bench.log().cross_rows, Some(vec![4, 5, 6, 7, 8]));
    bench.settle();
    let mut text_only = Bench::of(optional(), with_blocks(8, 0));
    text_only.add(text_only.sequence(2, 6, 3));
    text_only.settle();
    assert_eq!(bench.seen(2).tokens(), text_only.seen(2).tokens());
    text_only.add(cross(text_only.sequence(3, 6, 3), &image, 0..40));
    assert_eq!(
        text_only.seen(3).failure(),
        FailureClass::TooLarge,
        "a pool without blocks serves text alone"
    );
    bench.assert_books_balance();
}

/// Images at tokens 2 and 3, which are seen together, and one at token 20.
fn three(bench: &Bench, id: u64, images: [&EncoderOutput; 3]) -> SequenceRequest {
    let places = [2, 3, 20];
    let plain = bench.sequence(id, 40, 4);
    places.into_iter().zip(images).fold(plain, |arrival, (place, image)| seen_from(arrival, place, image))
}

#[test]
fn tokens_see_the_images_before_them_back_to_the_last_text_and_chunks_see_the_same() {
    let images = [item(1, 40), item(2, 10), item(3, 33)];
    let [a, b, c] = [&images[0], &images[1], &images[2]];
    let mut bench = Bench::of(optional(), EngineConfig { token_budget: 17, ..config() });
    let arrival = three(&bench, 1, [a, b, c]);
    bench.add(arrival.clone());
    [a, b].into_iter().for_each(|image| bench.ready(image));
    assert_eq!(bench.step(), [], "an image is missing");
    bench.ready(c);
    bench.settle();
    assert_eq!(bench.log().projections.iter().sum::<usize>(), 83);
    let expected = alone(&arrival, &[a, b, c]);
    assert_eq!(bench.seen(1).tokens(), expected);
    let others = [[c, b, a], [a, b, b]].map(|images| three(&bench, 1, images));
    for other in others {
        assert_ne!(alone(&other, &[a, b, c]), expected, "the last image counts");
    }
    // One block of 40 rows would be full with the first image; the second lies behind it in the same entry.
    bench.add(SequenceRequest { ids: vec![SequenceId(3)], ..arrival });
    bench.step();
    assert_eq!(bench.engine.stats().cross_used, 2 + 2);
    bench.settle();
    assert_eq!(bench.seen(3).tokens(), expected);
    bench.assert_books_balance();
}

#[test]
fn the_next_turn_finds_the_tokens_and_the_image_of_the_one_before() {
    let (first, second) = (item(1, 40), item(2, 50));
    let mut bench = Bench::of(optional(), config());
    let one = seen_from(bench.sequence(1, 70, 4), 3, &first);
    bench.add(one.clone());
    bench.ready(&first);
    bench.settle();
    let mut two = seen_from(seen_from(bench.sequence(2, 120, 4), 3, &first), 80, &second);
    two.prepared.tokens[..70].copy_from_slice(&one.prepared.tokens);
    bench.add(two.clone());
    // The first image is needed no more: its projection is cached.
    bench.ready(&second);
    bench.settle();
    assert_eq!(bench.seen(2).finished().n_cached, 64);
    assert_eq!(bench.log().projections, [40, 50]);
    assert_eq!(bench.seen(2).tokens(), alone(&two, &[&first, &second]));
    // Text before an image does not depend on it, tokens after it do.
    let other = item(3, 40);
    for (id, place, n_cached) in [(3, 3, 0), (4, 40, 32)] {
        let mut with = [&first, &other].map(|image| seen_from(bench.sequence(id, 70, 2), place, image));
        with[1].ids = vec![SequenceId(10 + id)];
        for (arrival, image) in with.iter().zip([&first, &other]) {
            bench.add(arrival.clone());
            bench.ready(image);
            bench.settle();
            assert_eq!(bench.seen(arrival.ids[0].0).tokens(), alone(arrival, &[image]));
        }
        assert_eq!(bench.seen(10 + id).finished().n_cached, n_cached, "an image at token {place}");
    }
    bench.assert_books_balance();
}

#[test]
fn images_out_of_order_and_more_rows_than_the_cache_holds_are_refused() {
    let check = |places: [u32; 2], n_rows: u32, class: FailureClass| {
        let mut bench = Bench::of(optional(), with_blocks(8, 4));
        let (first, second) = (item(1, n_rows), item(2, n_rows));
        let arrival = seen_from(bench.sequence(1, 9, 1), places[0], &first);
        bench.add(seen_from(arrival, places[1], &second));
        assert_eq!(bench.seen(1).failure(), class, "{places:?}, {n_rows} rows");
    };
    check([4, 4], 10, FailureClass::Internal);
    check([4, 2], 10, FailureClass::Internal);
    check([4, 9], 10, FailureClass::Internal);
    // Apart they take three blocks each, together five.
    check([4, 6], 65, FailureClass::TooLarge);
    check([4, 5], 65, FailureClass::TooLarge);
}
