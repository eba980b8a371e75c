//! The scheduler's rules, one scenario each, on sequences without items.

use crate::bench::{Bench, config, embed, item, with_blocks};
use std::time::Duration;
use triptych_core::sampling::FinishReason;
use triptych_core::{Failure, FailureClass, clock::Clock};
use triptych_engine::{EngineConfig, Event, KvBudget, NextStep, SequenceId, SequenceRequest};

#[test]
fn decoding_rows_come_first_and_prompts_share_the_rest_of_the_budget() {
    let mut bench = Bench::decoder_only(EngineConfig { token_budget: 20, ..config() });
    bench.add(bench.sequence(1, 5, 10));
    assert_eq!(bench.step(), [(1, 0..5)]);
    bench.add(bench.sequence(2, 30, 10));
    bench.add(bench.sequence(3, 12, 10));
    assert_eq!(bench.step(), [(1, 5..6), (2, 0..19)]);
    assert_eq!(bench.step(), [(1, 6..7), (2, 19..30), (3, 0..8)]);
    assert_eq!(bench.step(), [(1, 7..8), (2, 30..31), (3, 8..12)]);
    assert_eq!(bench.step(), [(1, 8..9), (2, 31..32), (3, 12..13)]);
}

#[test]
fn after_a_step_that_prefilled_decoding_sequences_get_their_share_of_the_time() {
    let ms = Duration::from_millis;
    let config = EngineConfig { token_budget: 20, decode_share: 50, ..config() };
    let mut bench = Bench::decoder_only(config);
    bench.set_costs(ms(2), ms(1));
    bench.add(bench.sequence(1, 5, 30));
    bench.add(bench.sequence(2, 50, 3));
    // No sequence decodes yet: no decode time is owed.
    assert_eq!(bench.step(), [(1, 0..5), (2, 0..15)]);
    // 41 ms of prefill, then decode-only steps of 3 ms.
    assert_eq!(bench.step(), [(1, 5..6), (2, 15..34)]);
    for n in 6..20 {
        assert_eq!(bench.step(), [(1, n..n + 1)]);
    }
    assert_eq!(bench.step(), [(1, 20..21), (2, 34..50)]);
    // Both decode here.
    assert_eq!(bench.step(), [(1, 21..22), (2, 50..51)]);
    // Without decoding sequences, a prompt is prefilled at once.
    bench.settle();
    bench.add(bench.sequence(3, 30, 1));
    assert_eq!(bench.step(), [(3, 0..20)]);
    assert_eq!(bench.step(), [(3, 20..30)]);
}

/// Decode-only steps between steps that prefill, while one sequence decodes and another has a long prompt.
fn decodes_between_chunks(slo_ms: u64, stall: Duration) -> Vec<usize> {
    let ms = Duration::from_millis;
    let config = EngineConfig { token_budget: 20, decode_share: 25, tpot_slo: Some(ms(slo_ms)), ..config() };
    let mut bench = Bench::decoder_only(config);
    // Chunks take 41 ms beside the other one's row, decode-only steps 3 ms.
    bench.set_costs(ms(2), ms(1));
    bench.add(bench.sequence(1, 5, 600));
    bench.step();
    bench.step();
    bench.clock.advance(stall);
    bench.add(bench.sequence(2, 19 * 8, 3));
    let (mut between, mut n) = (Vec::new(), 0);
    while between.len() < 8 {
        match bench.step().len() {
            1 => n += 1,
            _ => between.push(std::mem::take(&mut n)),
        }
    }
    between
}

#[test]
fn with_a_tpot_slo_prompts_are_read_as_far_as_no_answer_is_late() {
    // 90 ms are aimed at, so that each step adds at least 49 ms to the slack.
    let in_time = decodes_between_chunks(100, Duration::ZERO);
    assert!(in_time[1..].iter().all(|n| *n <= 1), "{in_time:?}");
    // 18 ms are aimed at: a chunk takes 23 ms more, another step 15 ms less.
    let paced = decodes_between_chunks(20, Duration::ZERO);
    let n_steps: usize = paced[1..].iter().sum::<usize>() + paced.len() - 1;
    assert!((15..=21).contains(&n_steps), "{n_steps} steps for 7 chunks: {paced:?}");
    // Late already: half of the time, 14 steps of 3 ms for each chunk of 41 ms.
    let late = decodes_between_chunks(20, Duration::from_secs(10));
    assert_eq!(late[1..], [14; 7], "{late:?}");
    // No order of steps keeps that: a fourth of the time, as without an SLO.
    let hopeless = decodes_between_chunks(3, Duration::ZERO);
    assert_eq!(hopeless[1..], [5; 7], "{hopeless:?}");
}

#[test]
fn decodes_may_wait_as_long_as_no_answer_is_late_and_no_prompt_can_be_read() {
    let ms = Duration::from_millis;
    let slack = |bench: &Bench| bench.engine.decode_slack(bench.clock.now());
    let decoding = |tpot_slo| {
        let mut bench = Bench::decoder_only(EngineConfig { tpot_slo, ..config() });
        bench.set_costs(ms(2), ms(1));
        bench.add(bench.sequence(1, 5, 600));
        assert_eq!((bench.step(), bench.step()), (vec![(1, 0..5)], vec![(1, 5..6)]));
        bench
    };
    assert_eq!(slack(&decoding(None)), ms(0), "without an SLO");
    assert_eq!(slack(&decoding(Some(ms(3)))), ms(0), "an SLO that no order can meet");
    let mut bench = decoding(Some(ms(100)));
    // 90 ms are aimed at; the third token is due after two of them, 3 ms have passed, and its step takes 3.
    assert_eq!(slack(&bench), ms(174));
    bench.clock.advance(ms(50));
    assert_eq!(slack(&bench), ms(124));
    let image = item(1, 6);
    bench.add(embed(bench.sequence(2, 20, 3), &image, 8));
    assert_eq!(slack(&bench), ms(0), "the text before the image can be read");
    assert_eq!(bench.step(), [(1, 6..7), (2, 0..8)]);
    assert!(slack(&bench) > ms(100), "the rest waits for its image");
    bench.ready(&image);
    assert_eq!(slack(&bench), ms(0));
    bench.step();
    assert!(slack(&bench) > ms(0), "both decode");
    // A token of the second answer: 90 ms are aimed at, and 100 ms leave room for a step with eight rows and more.
    let spare = bench.engine.spare_decode_slack(bench.clock.now());
    assert!(spare > ms(60) && spare < slack(&bench), "{spare:?} of {:?}", slack(&bench));
    bench.clock.advance(ms(1000));
    assert_eq!(slack(&bench), ms(0), "late");
    // 100 s are allowed.
    let bench = decoding(Some(ms(60_000)));
    let spare = |bench: &Bench| bench.engine.spare_decode_slack(bench.clock.now());
    bench.clock.advance(ms(49_000));
    assert!(spare(&bench) > ms(0));
    bench.clock.advance(ms(2_000));
    assert!(slack(&bench) > ms(0) && spare(&bench).is_zero(), "its deadline comes first");
}

/// Seconds for which the first token of another sequence has been waited for, up to 13, and the milliseconds that the slack gains
/// then by a token for which 90 ms pass.
fn gains_while_another_waits(max_slo_ms: u64, priority: i32) -> Vec<(f64, f64)> {
    let ms = Duration::from_millis;
    let slos = [100, max_slo_ms].map(|slo| Some(ms(slo)));
    let mut bench =
        Bench::decoder_only(EngineConfig { tpot_slo: slos[0], max_tpot_slo: slos[1], ..config() });
    bench.set_costs(ms(2), ms(1));
    bench.add(bench.sequence(1, 5, 600));
    for _ in 0..100 {
        bench.step();
        bench.clock.advance(ms(87));
    }
    let arrived = bench.clock.now();
    bench.add(SequenceRequest { priority, ..embed(bench.sequence(2, 20, 3), &item(1, 6), 8) });
    assert_eq!(bench.step().len(), 2, "the text before the image");
    let mut gains = Vec::new();
    while bench.clock.now() < arrived + ms(13_000) {
        let now = bench.clock.now();
        let before = bench.engine.decode_slack(now);
        bench.step();
        bench.clock.advance(now + ms(90) - bench.clock.now());
        let after = bench.engine.decode_slack(bench.clock.now());
        assert!(!before.is_zero() && !after.is_zero());
        gains.push(((now - arrived).as_secs_f64(), (after.as_secs_f64() - before.as_secs_f64()) * 1e3));
    }
    gains
}

#[test]
fn a_tpot_slo_gives_way_to_a_first_token_that_is_waited_for_long_and_for_tokens_from_then_on() {
    for (waited, gained) in gains_while_another_waits(300, 0) {
        // Of a 20th of the wait, and no more than 300 ms, nine tenths are aimed at.
        let aim = |waited: f64| (waited / 20.0 * 1e3).clamp(100.0, 300.0) * 0.9;
        // The newest token was allowed as much as the one before it, until the step that it was in is over.
        let expected = 2.0 * aim(waited) - aim(waited - 0.09) - 90.0;
        assert!((gained - expected).abs() < 1e-3, "{gained} ms after {waited} s, {expected} expected");
    }
    let unmoved = |gains: Vec<(f64, f64)>| gains.iter().all(|(_, gained)| gained.abs() < 1e-6);
    assert!(unmoved(gains_while_another_waits(300, 1)), "what is less urgent can wait");
    assert!(unmoved(gains_while_another_waits(50, 0)), "an SLO does not become shorter");
}

#[test]
fn no_more_sequences_run_than_are_allowed() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 2, ..config() });
    for id in 1..=3 {
        bench.add(bench.sequence(id, 4, 2));
    }
    assert_eq!(bench.step(), [(1, 0..4), (2, 0..4)]);
    assert_eq!(bench.step(), [(1, 4..5), (2, 4..5)]);
    assert_eq!(bench.step(), [(3, 0..4)]);
}

#[test]
fn a_sequence_that_waits_for_blocks_is_not_overtaken() {
    let mut bench = Bench::decoder_only(with_blocks(4, 0));
    bench.add(bench.sequence(1, 64, 2));
    bench.add(bench.sequence(2, 80, 1));
    bench.add(bench.sequence(3, 4, 1));
    assert_eq!(bench.step(), [(1, 0..64)]);
    // The first one's new token takes a third block; one is left, which the third in the queue could use.
    assert_eq!(bench.step(), [(1, 64..65)]);
    assert_eq!(bench.step(), [(2, 0..80), (3, 0..4)]);
    bench.assert_books_balance();
}

#[test]
fn preempted_sequence_keeps_its_place_in_the_queue() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 2, ..with_blocks(3, 0) });
    bench.add(bench.sequence(1, 30, 40));
    bench.add(bench.sequence(2, 62, 20));
    bench.add(bench.sequence(3, 4, 3));
    assert_eq!(bench.step(), [(1, 0..30), (2, 0..62)]);
    bench.step();
    assert_eq!(bench.step(), [(1, 31..32), (2, 63..64)]);
    // Both need a block here. The younger is preempted, and no one behind it gets the blocks it left.
    assert_eq!(bench.step(), [(1, 32..33)]);
    assert_eq!(bench.engine.stats().preemptions, 1);
    assert_eq!((bench.engine.stats().running, bench.engine.stats().waiting), (1, 2));
    let step = (0..100).map(|_| bench.step()).find(|s| s.iter().any(|(id, _)| *id != 1)).unwrap();
    // It prefills again: prompt and the three tokens it generated.
    assert_eq!(step[0], (2, 0..65));
    bench.settle();
    let alone = |n_prompt, n_generated, id| {
        let mut bench = Bench::decoder_only(config());
        bench.add(bench.sequence(id, n_prompt, n_generated));
        bench.settle();
        bench.seen(id).tokens()
    };
    assert_eq!(bench.seen(1).tokens(), alone(30, 40, 1));
    assert_eq!(bench.seen(2).tokens(), alone(62, 20, 2));
    bench.assert_books_balance();
}

#[test]
fn a_sequence_alone_fills_the_whole_pool_and_ends_with_length() {
    for (max_context, n_blocks, expect) in [(4096, 2, 64), (50, 8, 50), (5, 8, 5)] {
        let mut bench = Bench::new(with_blocks(n_blocks, 0), false, max_context);
        bench.add(bench.sequence(1, 4, 1000));
        bench.settle();
        let finished = bench.seen(1).finished().clone();
        assert_eq!(finished.reason, FinishReason::Length);
        assert_eq!(finished.n_prompt + finished.n_generated, expect);
        assert_eq!(bench.engine.stats().preemptions, 0);
        bench.assert_books_balance();
    }
}

#[test]
fn what_can_never_fit_is_refused_at_once() {
    let mut bench = Bench::new(with_blocks(2, 0), false, 100);
    let cases =
        [(65, FailureClass::TooLarge), (101, FailureClass::TooLarge), (0, FailureClass::InvalidArgument)];
    for (id, (n_prompt, class)) in (1..).zip(cases) {
        let mut arrival = bench.sequence(id, n_prompt.max(1), 1);
        arrival.prepared.tokens.truncate(n_prompt);
        bench.add(arrival);
        assert_eq!(bench.seen(id).failure(), class, "{n_prompt} tokens");
    }
    let mut strange = bench.sequence(8, 4, 1);
    strange.prepared.tokens[2] = 64;
    bench.add(strange);
    assert_eq!(bench.seen(8).failure(), FailureClass::InvalidArgument);
    bench.add(bench.sequence(9, 64, 5));
    bench.settle();
    assert_eq!(bench.seen(9).finished().n_generated, 1, "a prompt that fills the pool still gets one token");
    bench.assert_books_balance();
}

#[test]
fn full_queue_refuses_as_overloaded_and_takes_the_next_when_it_moved() {
    let mut bench = Bench::decoder_only(EngineConfig { max_waiting: 2, max_sequences: 1, ..config() });
    for id in 1..=3 {
        bench.add(bench.sequence(id, 4, 5));
    }
    assert_eq!(bench.seen(3).failure(), FailureClass::Overloaded);
    bench.step();
    bench.add(bench.sequence(4, 4, 5));
    bench.settle();
    for id in [1, 2, 4] {
        assert_eq!(bench.seen(id).finished().n_generated, 5);
    }
    bench.assert_books_balance();
}

#[test]
fn deadline_ends_a_sequence_wherever_it_is() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 1, ..config() });
    let start = bench.clock.now();
    for (id, after_s) in [(1, 5), (2, 3)] {
        let deadline = start + Duration::from_secs(after_s);
        let arrival = bench.sequence(id, 4, 1000);
        bench.add(triptych_engine::SequenceRequest { deadline, ..arrival });
    }
    bench.step();
    bench.clock.advance(Duration::from_secs(3));
    bench.step();
    assert_eq!(bench.seen(2).failure(), FailureClass::DeadlineExceeded);
    assert_eq!(bench.seen(1).end, None);
    bench.clock.advance(Duration::from_secs(2));
    bench.step();
    assert_eq!(bench.seen(1).failure(), FailureClass::DeadlineExceeded);
    assert_eq!(bench.seen(1).tokens().len(), 2, "what it wrote before was sent");
    bench.assert_books_balance();
}

#[test]
fn an_aborted_sequence_holds_nothing_and_says_nothing() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 1, ..config() });
    bench.add(bench.sequence(1, 40, 10));
    bench.add(bench.sequence(2, 40, 10));
    bench.step();
    let before = bench.seen(1);
    for id in [2, 1, 1, 77] {
        bench.event(Event::Abort(SequenceId(id)));
    }
    assert_eq!(bench.step(), []);
    assert_eq!((bench.seen(1), bench.seen(2).deltas), (before, Vec::new()));
    bench.assert_books_balance();
}

#[test]
fn a_step_that_failed_ends_its_sequences_and_no_others() {
    let mut bench = Bench::decoder_only(EngineConfig { max_sequences: 2, ..config() });
    for id in 1..=3 {
        bench.add(bench.sequence(id, 4, 3));
    }
    bench.step();
    bench.log().fail_forward = true;
    bench.settle();
    for id in [1, 2] {
        assert_eq!(bench.seen(id).failure(), FailureClass::Internal);
    }
    assert_eq!(bench.seen(3).tokens().len(), 3);
    bench.assert_books_balance();
}

#[test]
fn an_id_that_arrives_twice_fails_once_and_leaves_nothing() {
    let mut bench = Bench::decoder_only(config());
    bench.add(bench.sequence(1, 4, 3));
    bench.step();
    bench.add(bench.sequence(1, 4, 3));
    assert_eq!(bench.seen(1).failure(), FailureClass::Internal);
    bench.assert_books_balance();
}

#[test]
fn times_tell_waiting_from_prefill() {
    let mut bench = Bench::decoder_only(EngineConfig { token_budget: 16, ..config() });
    bench.add(bench.sequence(1, 40, 2));
    bench.clock.advance(Duration::from_millis(7));
    while bench.engine.next_step() == NextStep::Now {
        bench.step();
        bench.clock.advance(Duration::from_millis(10));
    }
    let times = bench.seen(1).finished().times;
    assert_eq!(times.queue, Duration::from_millis(7));
    assert_eq!(times.prefill, Duration::from_millis(20), "the third of three chunks began then");
    assert_eq!(times.last_token - times.first_token, Duration::from_millis(10));
}

#[test]
fn settings_that_cannot_work_are_refused() {
    use crate::fake::{FakeDecoder, info};
    let good = config();
    let bytes = |n| KvBudget::Bytes { self_attention: n, cross_attention: 0, host: 0 };
    let cases = [
        (EngineConfig { kv: bytes(99), ..good }, Some("kv.self_attention")),
        (EngineConfig { kv: bytes(100), ..good }, None),
        (EngineConfig { max_sequences: 0, ..good }, Some("max_sequences")),
        (EngineConfig { max_waiting: 0, ..good }, Some("max_waiting")),
        (EngineConfig { token_budget: 15, ..good }, Some("token_budget")),
        (EngineConfig { decode_share: 91, ..good }, Some("decode_share")),
    ];
    for (config, expect) in cases {
        let decoder = Box::new(FakeDecoder { info: info(false, 100), log: Default::default() });
        let got = triptych_engine::Engine::new(decoder, crate::bench::tokenizer(), config);
        match (got.err(), expect) {
            (None, None) => {}
            (Some(e), Some(setting)) => assert!(e.to_string().starts_with(setting), "{e}"),
            (got, expect) => panic!("{got:?}, expected {expect:?}"),
        }
    }
}

#[test]
fn an_item_event_for_nobody_changes_nothing() {
    let mut bench = Bench::decoder_only(config());
    let output = crate::bench::item(1, 3);
    bench.ready(&output);
    bench.event(Event::ItemFailed { key: output.item().key, failure: Failure::unavailable("gone") });
    assert_eq!(bench.step(), []);
    bench.assert_books_balance();
}
