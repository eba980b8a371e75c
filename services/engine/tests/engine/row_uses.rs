//! Rows that are dropped once they were read, and asked for again after a preemption.

use crate::bench::{Bench, config, embed, item};
use triptych_engine::{EngineConfig, KvBudget, Preemption, PrefixCache, RowRetention, RowUse};

fn until_read(self_attention: usize) -> EngineConfig {
    let kv = KvBudget::Blocks { self_attention, cross_attention: 4, host: 0 };
    let (rows, preemption) = (RowRetention::UntilRead, Preemption::Recompute);
    EngineConfig { kv, preemption, prefix_cache: PrefixCache::Off, rows, ..config() }
}

/// Steps in which `n` sequences drop their rows.
fn until_dropped(bench: &mut Bench, n: usize) {
    for _ in 0..100 {
        if bench.row_uses.iter().filter(|(_, rows)| *rows == RowUse::Read).count() >= n {
            return;
        }
        bench.step();
    }
    panic!("rows are kept: {:?}", bench.row_uses);
}

#[test]
fn rows_go_with_the_last_chunk_of_the_prompt() {
    let mut bench = Bench::decoder_only(EngineConfig { token_budget: 16, ..until_read(64) });
    let image = item(1, 6);
    bench.add(embed(bench.sequence(1, 40, 5), &image, 8));
    bench.ready(&image);
    bench.step();
    bench.step();
    assert_eq!(
        (bench.engine.stats().items_ready, bench.row_uses.len()),
        (1, 0),
        "the prompt is not computed"
    );
    bench.step();
    assert_eq!((bench.engine.stats().items_ready, &bench.row_uses[..]), (0, &[(1, RowUse::Read)][..]));
    bench.settle();
    assert_eq!(bench.row_uses.len(), 1);
    bench.assert_books_balance();
}

#[test]
fn a_sequence_that_is_computed_again_asks_for_its_rows_and_goes_on_when_they_come() {
    let (image, other) = (item(1, 6), item(2, 6));
    let run = |config: EngineConfig| {
        let mut bench = Bench::decoder_only(config);
        bench.add(embed(bench.sequence(1, 30, 40), &image, 4));
        bench.add(embed(bench.sequence(2, 62, 20), &other, 4));
        bench.ready(&image);
        bench.ready(&other);
        bench
    };
    let mut roomy = run(config());
    roomy.settle();
    assert!(roomy.row_uses.is_empty(), "by default rows stay to the end");

    let mut bench = run(until_read(3));
    until_dropped(&mut bench, 2);
    assert_eq!(bench.engine.stats().items_ready, 0);
    bench.settle();
    assert_eq!(bench.row_uses.last(), Some(&(2, RowUse::Needed)), "the younger one gave way");
    assert!(bench.seen(2).end.is_none(), "it waits for rows");
    bench.ready(&other);
    bench.settle();
    assert_eq!(bench.row_uses.last(), Some(&(2, RowUse::Read)));
    for id in [1, 2] {
        assert_eq!(bench.seen(id).tokens(), roomy.seen(id).tokens());
    }
    bench.assert_books_balance();
}

#[test]
fn a_sequence_that_comes_back_with_blocks_for_a_part_goes_on() {
    // Its rows come while it computes the text before them, for which alone it has a block.
    let mut bench = Bench::decoder_only(until_read(3));
    let image = item(1, 6);
    bench.add(bench.sequence(1, 30, 40));
    bench.add(embed(bench.sequence(2, 20, 60), &image, 8));
    bench.ready(&image);
    for _ in 0..500 {
        let n_uses = bench.row_uses.len();
        bench.step();
        if bench.row_uses[n_uses..].iter().any(|(_, rows)| *rows == RowUse::Needed) {
            bench.ready(&image);
        }
    }
    assert!([1, 2].iter().all(|id| bench.seen(*id).end.is_some()), "{:?}", bench.row_uses);
    bench.assert_books_balance();
}

#[test]
fn forks_read_nothing_once_the_first_has_read_it() {
    let mut bench = Bench::decoder_only(until_read(64));
    let image = item(1, 6);
    let mut request = embed(bench.sequence(1, 40, 5), &image, 8);
    request.ids = [1, 2, 3].map(triptych_engine::SequenceId).to_vec();
    request.sampling.n = 3;
    bench.add(request);
    bench.ready(&image);
    bench.settle();
    assert_eq!(bench.row_uses, [(1, RowUse::Read)]);
    assert!((1..=3).all(|id| bench.seen(id).tokens().len() == 5));
    bench.assert_books_balance();
}
