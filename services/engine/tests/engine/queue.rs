//! Order of admission: priorities, tenants, deadlines, and items that block others or do not.

use crate::bench::{Bench, config, embed, item, with_blocks};
use std::time::Duration;
use triptych_core::clock::Clock;
use triptych_core::{FailureClass, TenantId};
use triptych_engine::{EngineConfig, SequenceId, SequenceRequest};

fn with_priority(arrival: SequenceRequest, priority: i32) -> SequenceRequest {
    SequenceRequest { priority, ..arrival }
}

/// Under another id; the first token is one of the vocabulary.
fn named(arrival: SequenceRequest, id: u64) -> SequenceRequest {
    SequenceRequest { ids: vec![SequenceId(id)], ..arrival }
}

fn one_place() -> EngineConfig {
    EngineConfig { max_sequences: 1, max_waiting: 2000, ..config() }
}

/// Steps to the end; the first tokens of sequences in the order in which they started.
fn order(bench: &mut Bench) -> Vec<u32> {
    bench.settle();
    let log = bench.log();
    let starts = log.steps.iter().flatten().filter(|(_, tokens)| tokens.start == 0);
    starts.map(|(name, _)| *name).collect()
}

#[test]
fn the_smaller_priority_runs_first() {
    let mut bench = Bench::decoder_only(one_place());
    for (id, priority) in [(1, 5), (2, 0), (3, -7), (4, 0)] {
        bench.add(with_priority(bench.sequence(id, 4, 2), priority));
    }
    assert_eq!(order(&mut bench), [3, 2, 4, 1]);
}

#[test]
fn the_least_urgent_is_preempted_first_whenever_it_came() {
    let mut bench = Bench::decoder_only(with_blocks(3, 0));
    bench.add(with_priority(bench.sequence(1, 20, 14), 1));
    bench.add(with_priority(bench.sequence(2, 30, 10), 0));
    bench.step();
    bench.add(with_priority(bench.sequence(3, 30, 10), 0));
    while bench.engine.stats().preemptions == 0 {
        bench.step();
    }
    let still_running = bench.step();
    assert!(still_running.iter().all(|(id, _)| *id != 1), "{still_running:?}");
    bench.settle();
    assert!((1..=3).all(|id| bench.seen(id).end.is_some_and(|end| end.is_ok())));
    bench.assert_books_balance();
}

#[test]
fn a_more_urgent_newcomer_preempts_the_least_urgent() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 2, ..config() });
    bench.add(with_priority(bench.sequence(1, 4, 9), 1));
    bench.add(with_priority(bench.sequence(2, 4, 9), 1));
    bench.step();
    bench.add(with_priority(bench.sequence(3, 4, 3), 1));
    assert_eq!(bench.step(), [(1, 4..5), (2, 4..5)], "as urgent is not more urgent");
    bench.add(with_priority(bench.sequence(4, 4, 3), 0));
    assert_eq!(bench.step(), [(1, 5..6), (4, 0..4)]);
    bench.settle();
    assert!((1..=4).all(|id| bench.seen(id).end.is_some_and(|end| end.is_ok())));
    bench.assert_books_balance();
}

#[test]
fn nothing_is_preempted_when_it_would_not_help() {
    let mut bench = Bench::decoder_only(with_blocks(4, 0));
    bench.add(with_priority(bench.sequence(1, 60, 40), 0));
    bench.add(with_priority(bench.sequence(2, 4, 20), 9));
    bench.step();
    bench.add(with_priority(bench.sequence(3, 90, 2), 1));
    (0..3).for_each(|_| drop(bench.step()));
    assert_eq!(bench.engine.stats().preemptions, 0);
    bench.settle();
    bench.assert_books_balance();
}

#[test]
fn one_tenant_with_many_requests_cannot_starve_another() {
    let mut bench = Bench::decoder_only(one_place());
    for id in 0..1000 {
        bench.add(named(bench.sequence(id % 60, 4, 2), id));
    }
    (0..20).for_each(|_| drop(bench.step()));
    let other = TenantId::of(b"other");
    bench.add(SequenceRequest { tenant: other, ..named(bench.sequence(61, 4, 2), 5000) });
    (0..4).for_each(|_| drop(bench.step()));
    assert_eq!(bench.seen(5000).finished().n_generated, 2);
    assert!(bench.engine.stats().waiting > 900);
}

#[test]
fn tenants_get_like_shares_of_rows_and_not_of_requests() {
    let mut bench = Bench::decoder_only(one_place());
    let tenants = [TenantId::of(b"long"), TenantId::of(b"short")];
    for id in 0..60 {
        let long = SequenceRequest { tenant: tenants[0], ..bench.sequence(id, 30, 2) };
        let short = SequenceRequest { tenant: tenants[1], ..named(bench.sequence(id, 9, 2), 100 + id) };
        bench.add(long);
        bench.add(short);
    }
    (0..60).for_each(|_| drop(bench.step()));
    let ended = |ids: std::ops::Range<u64>| ids.filter(|id| bench.seen(*id).end.is_some()).count();
    let (long, short) = (ended(0..60), ended(100..160));
    assert!((6..9).contains(&long) && (20..25).contains(&short), "{long} long ones, {short} short ones");
}

#[test]
fn a_request_that_cannot_meet_its_deadline_is_refused_before_it_costs_work() {
    let mut bench = Bench::decoder_only(config());
    bench.set_costs(Duration::from_millis(1), Duration::from_millis(10));
    bench.add(bench.sequence(1, 100, 5));
    bench.settle();
    // A row of a prompt took 1.1 ms, a step of one token 11 ms.
    let rows = bench.log().steps.len();
    let within = |bench: &Bench, id: u64, n_generated: u32, ms: u64| SequenceRequest {
        deadline: bench.clock.now() + Duration::from_millis(ms),
        ..bench.sequence(id, 50, n_generated)
    };
    bench.add(within(&bench, 2, 5, 50));
    bench.add(within(&bench, 3, 5, 95));
    for id in [2, 3] {
        assert_eq!(bench.seen(id).failure(), FailureClass::DeadlineExceeded);
    }
    assert_eq!(bench.log().steps.len(), rows);
    bench.add(within(&bench, 4, 5, 130));
    bench.settle();
    assert_eq!(bench.seen(4).finished().n_generated, 5);
    bench.assert_books_balance();
}

#[test]
fn a_request_in_the_queue_is_refused_when_too_little_time_is_left_for_it() {
    let mut bench = Bench::decoder_only(one_place());
    bench.set_costs(Duration::from_millis(1), Duration::from_millis(10));
    bench.add(bench.sequence(1, 100, 500));
    bench.step();
    bench.step();
    let deadline = bench.clock.now() + Duration::from_millis(100);
    bench.add(SequenceRequest { deadline, ..bench.sequence(2, 50, 1) });
    while bench.seen(2).end.is_none() {
        bench.step();
    }
    assert_eq!(bench.seen(2).failure(), FailureClass::DeadlineExceeded);
    assert!(bench.clock.now() < deadline, "as soon as it was clear");
    assert_eq!(bench.seen(1).end, None);
}

#[test]
fn cached_blocks_count_in_favour_of_a_deadline() {
    let mut bench = Bench::decoder_only(config());
    bench.set_costs(Duration::from_millis(1), Duration::ZERO);
    let first = bench.sequence(1, 100, 1);
    bench.add(first.clone());
    bench.settle();
    let deadline = bench.clock.now() + Duration::from_millis(20);
    for (id, n_changed) in [(2, 0), (3, 100)] {
        let mut arrival = SequenceRequest { ids: vec![SequenceId(id)], deadline, ..first.clone() };
        arrival.prepared.tokens.iter_mut().take(n_changed).for_each(|t| *t = (*t + 1) % 61);
        bench.add(arrival);
    }
    bench.settle();
    assert_eq!(bench.seen(2).finished().n_cached, 96);
    assert_eq!(bench.seen(3).failure(), FailureClass::DeadlineExceeded);
}

#[test]
fn a_sequence_that_waits_for_an_item_leaves_its_run_slot_to_others() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 1, ..with_blocks(4, 0) });
    let image = item(1, 6);
    bench.add(embed(bench.sequence(1, 80, 3), &image, 70));
    bench.add(bench.sequence(2, 100, 2));
    assert_eq!(bench.step(), [(1, 0..70)]);
    assert_eq!(bench.step(), [(2, 0..100)], "all blocks are the other's");
    bench.ready(&image);
    bench.settle();
    assert_eq!(bench.seen(2).finished().times.queue, Duration::ZERO);
    let mut alone = Bench::decoder_only(config());
    alone.add(embed(alone.sequence(1, 80, 3), &image, 70));
    alone.ready(&image);
    alone.settle();
    assert_eq!(bench.seen(1).tokens(), alone.seen(1).tokens());
    bench.assert_books_balance();
}

/// A bench that has measured that a row of a prompt takes a millisecond, with 64 rows a step, and prompts of 200 tokens in it.
fn with_long_prompts() -> Bench {
    let mut bench = Bench::decoder_only(EngineConfig { token_budget: 64, ..config() });
    bench.set_costs(Duration::from_millis(1), Duration::ZERO);
    bench.add(bench.sequence(1, 32, 1));
    bench.settle();
    for id in [2, 3, 4] {
        bench.add(bench.sequence(id, 200, 1));
    }
    assert_eq!(bench.step(), [(2, 0..64)]);
    bench
}

#[test]
fn a_short_prompt_does_not_wait_for_long_ones_that_came_before() {
    let mut bench = with_long_prompts();
    bench.add(bench.sequence(5, 4, 1));
    assert_eq!(bench.step(), [(5, 0..4), (2, 64..124)]);
    bench.settle();
    bench.assert_books_balance();
}

#[test]
fn a_long_prompt_ages_until_short_ones_wait_for_it() {
    let mut bench = with_long_prompts();
    // Four times the 200 ms that one takes, less the 64 ms that have passed.
    bench.clock.advance(Duration::from_millis(800));
    bench.add(bench.sequence(5, 4, 1));
    assert_eq!(bench.step(), [(2, 64..128)]);
    bench.settle();
    let log = bench.log();
    let starts = log.steps.iter().flatten().filter(|(_, tokens)| tokens.start == 0);
    assert_eq!(starts.map(|(name, _)| *name).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
}
