//! Steps that are planned while the one before computes: what is submitted when, and what is waited for first. Completions are
//! held by `schedules` and by `tests/matrix`.

use crate::bench::{Bench, config};
use std::time::Duration;
use triptych_core::clock::Clock;
use triptych_core::sampling::SamplingParams;
use triptych_engine::{EngineConfig, Event, Pipelining, SequenceId, SequenceRequest};

/// An engine over a device that computes beside it.
fn bench() -> Bench {
    let bench = Bench::decoder_only(EngineConfig { pipelining: Pipelining::On, ..config() });
    bench.log().defers = true;
    bench
}

/// Submissions and waits of an engine that generates these sequences.
fn order(sequences: impl Fn(&Bench) -> Vec<SequenceRequest>) -> String {
    let mut bench = bench();
    for sequence in sequences(&bench) {
        bench.add(sequence);
    }
    bench.settle();
    bench.assert_books_balance();
    bench.log().order.clone()
}

fn with(mut sequence: SequenceRequest, change: impl FnOnce(&mut SamplingParams)) -> SequenceRequest {
    change(&mut sequence.sampling);
    sequence
}

#[test]
fn a_step_is_submitted_before_the_one_before_has_ended() {
    assert_eq!(order(|bench| vec![bench.sequence(1, 5, 4)]), "sswswsww");
    // The end is known by the count: no row is computed in vain.
    let mut bench = bench();
    bench.add(bench.sequence(1, 5, 4));
    bench.settle();
    assert_eq!(bench.engine.stats().computed_tokens, 5 + 3);
}

#[test]
fn a_step_is_planned_shortly_before_the_one_under_way_can_end() {
    let ms = Duration::from_millis;
    let mut bench = bench();
    let start = bench.clock.now();
    let planned_at = |bench: &Bench| bench.engine.next_plan().map(|at| at - start);
    bench.add(bench.sequence(1, 5, 20));
    assert_eq!(planned_at(&bench), None, "no step is under way");
    bench.step();
    assert_eq!(planned_at(&bench), None, "it is not known what a step takes");
    bench.clock.advance(ms(50));
    bench.step();
    assert_eq!(planned_at(&bench), None, "nor by a prompt alone");
    bench.clock.advance(ms(30));
    bench.step();
    // Four fifths of 30 ms, less one for the host.
    assert_eq!(planned_at(&bench), Some(ms(80 + 23)));
    bench.clock.advance(ms(23));
    // What came until then is in the next step.
    bench.add(bench.sequence(2, 5, 20));
    assert_eq!(bench.step().len(), 2);
    // The step before took 23 ms, as far as is known.
    assert_eq!(planned_at(&bench), Some(ms(103) + ms(23).mul_f64(0.8) - ms(1)));
    bench.settle();
    bench.assert_books_balance();
    assert_eq!(planned_at(&bench), None);
}

#[test]
fn the_token_under_way_counts_for_the_slack() {
    let config =
        EngineConfig { pipelining: Pipelining::On, tpot_slo: Some(Duration::from_millis(100)), ..config() };
    let mut bench = Bench::decoder_only(config);
    bench.log().defers = true;
    bench.add(bench.sequence(1, 5, 20));
    bench.step();
    bench.step();
    // The first token is there and the second is under way; 90 ms are aimed at for each after the first.
    assert_eq!(bench.engine.decode_slack(bench.clock.now()), Duration::from_millis(180));
    assert!(bench.engine.spare_decode_slack(bench.clock.now()).is_zero(), "the second would wait too");
}

#[test]
fn settings_that_do_not_read_tokens_are_asked_for_ahead() {
    let sampled = |sampling: &mut SamplingParams| {
        sampling.temperature = 0.8;
        sampling.min_tokens = 3;
        sampling.logit_bias = vec![(5, 1.0)];
        sampling.logprobs = Some(2);
    };
    assert_eq!(order(|bench| vec![with(bench.sequence(1, 5, 4), sampled)]), "sswswsww");
}

#[test]
fn a_token_that_settings_read_is_waited_for_and_nobody_sits_out_a_step() {
    let penalised = |sampling: &mut SamplingParams| sampling.frequency_penalty = 0.5;
    assert_eq!(order(|bench| vec![with(bench.sequence(1, 5, 4), penalised)]), "swswswsw");
    // Beside one that could be ahead, both have a token in each step.
    let both = |bench: &Bench| vec![with(bench.sequence(1, 5, 4), penalised), bench.sequence(2, 5, 4)];
    assert_eq!(order(both), "swswswsw");
}

#[test]
fn several_completions_are_ahead_once_they_are_apart() {
    let three = |bench: &Bench| {
        let mut sequence = with(bench.sequence(1, 5, 4), |sampling| sampling.n = 3);
        sequence.ids = (1..=3).map(SequenceId).collect();
        vec![sequence]
    };
    assert_eq!(order(three), "swsswsww");
}

#[test]
fn a_row_computed_in_vain_is_dropped_with_its_sequence() {
    let mut plain = Bench::decoder_only(config());
    plain.add(plain.sequence(1, 5, 8));
    plain.settle();
    let tokens = plain.seen(1).tokens();
    let mut bench = bench();
    bench.add(with(bench.sequence(1, 5, 8), |sampling| sampling.stop_token_ids = vec![tokens[3]]));
    bench.settle();
    assert_eq!(bench.seen(1).tokens(), tokens[..3]);
    // Its end shows when the step after it was submitted.
    assert_eq!(bench.engine.stats().computed_tokens, 5 + 4);
    bench.assert_books_balance();
}

#[test]
fn an_aborted_sequence_leaves_the_step_under_way_to_the_others() {
    let mut bench = bench();
    bench.add(bench.sequence(1, 5, 8));
    bench.add(bench.sequence(2, 5, 8));
    bench.step();
    bench.step();
    bench.event(Event::Abort(SequenceId(1)));
    bench.settle();
    bench.assert_books_balance();
    let mut alone = Bench::decoder_only(config());
    alone.add(alone.sequence(2, 5, 8));
    alone.settle();
    assert_eq!(bench.seen(2).tokens(), alone.seen(2).tokens());
    assert!(bench.seen(1).end.is_none());
}
