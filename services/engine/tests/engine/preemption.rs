//! Preemption: to the host or by computing again, one sequence or all its beams, and moves that fail.

use crate::bench::{Bench, Seen, config, cross, item};
use std::time::Duration;
use triptych_core::sampling::{BeamParams, EarlyStopping};
use triptych_engine::{EngineConfig, KvBudget, Preemption, PrefixCache, SequenceId, SequenceRequest};

fn with(preemption: Preemption, own: usize, host: usize) -> EngineConfig {
    let kv = KvBudget::Blocks { self_attention: own, cross_attention: 4, host };
    EngineConfig { kv, preemption, prefix_cache: PrefixCache::Off, ..config() }
}

/// Two sequences that do not fit together; the younger one is preempted at its 66th token.
fn crowd(bench: &mut Bench) {
    bench.add(bench.sequence(1, 30, 40));
    bench.add(bench.sequence(2, 62, 20));
}

fn alone(id: u64, n_prompt: usize, n_generated: u32) -> Seen {
    let mut bench = Bench::decoder_only(config());
    bench.add(bench.sequence(id, n_prompt, n_generated));
    bench.settle();
    bench.seen(id)
}

/// First range of tokens that the second sequence computed after its preemption, and the engine at the end.
fn comeback(config: EngineConfig) -> (std::ops::Range<usize>, Bench) {
    let mut bench = Bench::decoder_only(config);
    bench.set_costs(Duration::from_millis(1), Duration::ZERO);
    crowd(&mut bench);
    while bench.engine.stats().preemptions == 0 {
        bench.step();
    }
    let steps = (0..100).map(|_| bench.step());
    let (_, tokens) = steps.flatten().find(|(id, _)| *id == 2).expect("it comes back");
    bench.settle();
    assert_eq!(bench.seen(1).tokens(), alone(1, 30, 40).tokens());
    assert_eq!(bench.seen(2).tokens(), alone(2, 62, 20).tokens());
    bench.assert_books_balance();
    (tokens, bench)
}

#[test]
fn a_sequence_from_the_host_goes_on_where_it_was() {
    let (tokens, bench) = comeback(with(Preemption::Swap, 3, 2));
    assert_eq!(tokens, 64..65);
    assert_eq!(bench.log().moves, [0, 2, 2]);
    assert_eq!((bench.engine.stats().preemptions, bench.engine.stats().swaps), (1, 1));
}

#[test]
fn without_room_on_the_host_it_is_computed_again() {
    for config in [with(Preemption::Swap, 3, 1), with(Preemption::Recompute, 3, 9)] {
        let (tokens, bench) = comeback(config);
        assert_eq!(tokens, 0..65);
        assert_eq!((bench.log().moves, bench.engine.stats().swaps), ([0; 3], 0));
    }
}

#[test]
fn it_is_moved_or_computed_again_whichever_takes_less_time() {
    // Two blocks of 100 bytes there and back, against 64 rows of 1 ms.
    for (swap_bytes_per_s, swaps) in [(7_000, 1), (6_000, 0)] {
        let (_, bench) = comeback(with(Preemption::Cheapest { swap_bytes_per_s }, 3, 4));
        assert_eq!(bench.engine.stats().swaps, swaps, "{swap_bytes_per_s} bytes a second");
    }
}

#[test]
fn beams_are_preempted_together_and_find_the_same_completions() {
    let audio = item(1, 40);
    let run = |config: EngineConfig| {
        let mut bench = Bench::with_cross(config);
        bench.add(bench.sequence_with_cross(1, 90, 40, &audio));
        let mut beams = cross(bench.sequence(2, 40, 30), &audio, 0..40);
        beams.ids = vec![SequenceId(2), SequenceId(3)];
        beams.sampling.n = 2;
        beams.sampling.beams =
            Some(BeamParams { width: 3, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic });
        bench.add(beams);
        bench.ready(&audio);
        bench.settle();
        bench.assert_books_balance();
        bench
    };
    let roomy = run(config());
    for preemption in [Preemption::Swap, Preemption::Recompute] {
        for prefix_cache in [PrefixCache::On, PrefixCache::Off] {
            let bench = run(EngineConfig { prefix_cache, ..with(preemption, 7, 8) });
            let stats = bench.engine.stats();
            assert!(stats.preemptions > 0, "{stats:?}");
            assert_eq!(stats.swaps > 0, preemption == Preemption::Swap);
            assert_eq!(bench.log().projections, [40], "the encoder's input survives");
            for id in 1..=3 {
                assert_eq!(bench.seen(id).tokens(), roomy.seen(id).tokens(), "{preemption:?} {id}");
            }
        }
    }
}

#[test]
fn what_was_to_be_moved_in_a_step_that_failed_is_computed_again() {
    let mut bench = Bench::decoder_only(with(Preemption::Swap, 3, 4));
    crowd(&mut bench);
    (0..3).for_each(|_| drop(bench.step()));
    bench.log().fail_forward = true;
    bench.step();
    assert_eq!(bench.engine.stats().swaps, 1);
    assert_eq!(bench.engine.stats().host_used, 0, "its copy is not to be trusted");
    bench.settle();
    assert_eq!(bench.seen(2).tokens(), alone(2, 62, 20).tokens());
    assert!(bench.seen(1).end.is_some_and(|end| end.is_err()));
    bench.assert_books_balance();
}

#[test]
fn a_sequence_on_the_host_can_be_aborted_and_run_out_of_time() {
    for abort in [true, false] {
        let mut bench = Bench::decoder_only(with(Preemption::Swap, 3, 4));
        let start = triptych_core::clock::Clock::now(&*bench.clock);
        bench.add(bench.sequence(1, 30, 40));
        let deadline = start + Duration::from_secs(5);
        bench.add(SequenceRequest { deadline, ..bench.sequence(2, 62, 20) });
        while bench.engine.stats().swaps == 0 {
            bench.step();
        }
        assert_eq!(bench.engine.stats().host_used, 2);
        match abort {
            true => bench.event(triptych_engine::Event::Abort(SequenceId(2))),
            false => bench.clock.advance(Duration::from_secs(6)),
        }
        bench.step();
        assert_eq!(bench.engine.stats().host_used, 0);
        bench.settle();
        bench.assert_books_balance();
    }
}
