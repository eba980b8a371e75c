//! Random schedules: whatever arrives, goes away, comes late or fails, and however it is batched, chunked and
//! preempted, every completion is the one of an engine with nothing else to do, and the accounting balances at the end.

use crate::bench::{Bench, Seen, arrival, config, cross, embed, item};
use crate::fake::info;
use proptest::prelude::*;
use std::num::{NonZeroU32, NonZeroUsize};
use std::time::{Duration, Instant};
use triptych_core::sampling::{BeamParams, EarlyStopping};
use triptych_core::{EncoderOutput, Failure, FailureClass, TenantId};
use triptych_engine::speculation::prompt_lookup::PromptLookup;
use triptych_engine::{
    EngineConfig, Event, KvBudget, Pipelining, Preemption, PrefixCache, RowRetention, SequenceId,
    SequenceRequest, Speculation, StateBudget,
};
use triptych_models::decoder::{DecoderInfo, KvCacheGroups};

/// Items that the schedules draw from; their sizes straddle a block.
const ITEM_SIZES: [u32; 4] = [1, 31, 32, 45];

fn outputs() -> Vec<EncoderOutput> {
    (1..).zip(ITEM_SIZES).map(|(n, size)| item(n, size)).collect()
}

#[derive(Clone, Debug)]
struct Shape {
    n_prompt: usize,
    n_generated: u32,
    items: Vec<usize>,
    sampled: bool,
    ends: bool,
    /// Completions, and beams beside them.
    n: u32,
    beams: Option<u32>,
    priority: i32,
    tenant: u8,
    /// Prompts of one kind begin alike.
    kind: u64,
}

#[derive(Clone, Debug)]
enum Move {
    Arrive(Shape),
    Ready(usize),
    Fail(usize),
    Abort(u64),
    Late,
    Step,
}

#[derive(Clone, Debug)]
struct Schedule {
    cross_attention: bool,
    /// Keys that a query sees at most, in each group of layers.
    groups: KvCacheGroups,
    /// True if layers keep recurrent states.
    recurrent: bool,
    config: EngineConfig,
    moves: Vec<Move>,
}

impl Schedule {
    fn decoder(&self) -> DecoderInfo {
        // The slots of an undisturbed engine are 64.
        let state_slot_bytes = NonZeroUsize::new(1 << 24).filter(|_| self.recurrent);
        DecoderInfo { kv_groups: self.groups, state_slot_bytes, ..info(self.cross_attention, 4096) }
    }
}

fn shape() -> impl Strategy<Value = Shape> {
    let items = prop::collection::vec(0..ITEM_SIZES.len(), 0..3);
    let own = (1usize..70, 1u32..80, items, any::<bool>(), any::<bool>());
    let shared = (1u32..4, prop::option::weighted(0.2, 0u32..3), -1i32..2, 0u8..3, 0u64..3);
    (own, shared).prop_map(
        |((n_prompt, n_generated, items, sampled, ends), (n, beams, priority, tenant, kind))| Shape {
            n_prompt,
            n_generated,
            items,
            sampled,
            ends,
            n,
            beams,
            priority,
            tenant,
            kind,
        },
    )
}

fn preemption() -> impl Strategy<Value = Preemption> {
    prop_oneof![Just(Preemption::Swap), Just(Preemption::Recompute), Just(Preemption::default())]
}

fn speculation() -> impl Strategy<Value = Speculation> {
    let lookup = PromptLookup { n_tokens: 4, max_ngram: 2 };
    prop_oneof![Just(Speculation::Off), Just(Speculation::PromptLookup(lookup))]
}

fn one_move() -> impl Strategy<Value = Move> {
    prop_oneof![
        4 => shape().prop_map(Move::Arrive),
        4 => (0..ITEM_SIZES.len()).prop_map(Move::Ready),
        1 => (0..ITEM_SIZES.len()).prop_map(Move::Fail),
        1 => (1u64..40).prop_map(Move::Abort),
        1 => Just(Move::Late),
        12 => Just(Move::Step),
    ]
}

fn groups() -> impl Strategy<Value = KvCacheGroups> {
    let windows = prop::collection::vec(prop_oneof![Just(0), 1u32..80], 1..4);
    let groups = windows.prop_map(|windows| windows.into_iter().map(NonZeroU32::new).collect::<Vec<_>>());
    prop_oneof![1 => Just(KvCacheGroups::FULL), 4 => groups.prop_map(|all| KvCacheGroups::of(&all).expect("few"))]
}

fn schedule() -> impl Strategy<Value = Schedule> {
    let config = (5usize..16, 2usize..6, 0usize..12, 1usize..8, 0usize..100, 4usize..20);
    let policies = (preemption(), speculation(), prop_oneof![Just(PrefixCache::On), Just(PrefixCache::Off)]);
    let decode_share = prop_oneof![Just(0_u8), 1_u8..=90];
    let slo = || prop::option::of((1_u64..100).prop_map(Duration::from_millis));
    let rows = prop_oneof![Just(RowRetention::UntilEnd), Just(RowRetention::UntilRead)];
    let pipelining = prop_oneof![Just(Pipelining::Off), Just(Pipelining::On)];
    (
        (any::<bool>(), groups(), prop::option::of(1usize..12)),
        config,
        policies,
        (decode_share, [slo(), slo()], pipelining, rows),
        prop::collection::vec(one_move(), 1..120),
    )
        .prop_map(
            |(
                (cross_attention, groups, states),
                config,
                (preemption, speculation, prefix_cache),
                (decode_share, [tpot_slo, max_tpot_slo], pipelining, rows),
                moves,
            )| {
                let (self_attention, cross_blocks, host, max_sequences, extra, max_waiting) = config;
                let groups = if states.is_some() { KvCacheGroups::FULL } else { groups };
                let [self_attention, host] = [self_attention, host].map(|n| n * groups.n_groups());
                let config = EngineConfig {
                    kv: KvBudget::Blocks { self_attention, cross_attention: cross_blocks, host },
                    states: StateBudget::Slots(states.unwrap_or(0)),
                    token_budget: max_sequences + extra,
                    decode_share,
                    tpot_slo,
                    max_tpot_slo,
                    max_loras: 4,
                    max_sequences,
                    max_waiting,
                    prefix_cache,
                    preemption,
                    speculation: if states.is_some() { Speculation::Off } else { speculation },
                    pipelining,
                    rows,
                };
                Schedule { cross_attention, groups, recurrent: states.is_some(), config, moves }
            },
        )
}

fn make(first_id: u64, shape: &Shape, cross_attention: bool, now: Instant) -> SequenceRequest {
    let id = shape.kind;
    let outputs = outputs();
    let n_rows: usize = shape.items.iter().map(|i| ITEM_SIZES[*i] as usize).sum();
    let mut made = match cross_attention {
        true => {
            let n = shape.items.first().copied().unwrap_or(0);
            let first = if shape.sampled { ITEM_SIZES[n] / 2 } else { 0 };
            cross(arrival(id, shape.n_prompt, shape.n_generated, now), &outputs[n], first..ITEM_SIZES[n])
        }
        false => {
            let mut made = arrival(id, shape.n_prompt + n_rows + 1, shape.n_generated, now);
            let mut place = 1 + shape.n_prompt / 2;
            for n in &shape.items {
                made = embed(made, &outputs[*n], place as u32);
                place += ITEM_SIZES[*n] as usize;
            }
            made
        }
    };
    made.ids = (first_id..first_id + u64::from(shape.n)).map(SequenceId).collect();
    made.priority = shape.priority;
    made.tenant = TenantId::from_bytes([shape.tenant; 32]);
    made.sampling.seed = Some(first_id);
    made.sampling.n = shape.n;
    made.sampling.beams = shape.beams.map(|more| BeamParams {
        width: shape.n + more,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::Heuristic,
    });
    made.sampling.temperature = if shape.sampled { 0.8 } else { 0.0 };
    made.sampling.top_p = 0.9;
    made.sampling.ignore_eos = !shape.ends;
    made
}

/// The completions of an engine with room for all, and nothing else to do; its context is as long as the schedule's.
fn undisturbed(arrival: &SequenceRequest, schedule: &Schedule) -> Bench {
    let KvBudget::Blocks { self_attention, .. } = schedule.config.kv else { panic!("made of blocks") };
    let kv = KvBudget::Blocks { self_attention, cross_attention: 16, host: 0 };
    // Windows bound what a chunk needs, and so the context.
    let EngineConfig { token_budget, max_sequences, .. } = schedule.config;
    let config = EngineConfig { kv, token_budget, max_sequences, ..config() };
    let mut bench = Bench::of(schedule.decoder(), config);
    bench.add(SequenceRequest { deadline: bench.sequence(0, 1, 1).deadline, ..arrival.clone() });
    outputs().iter().for_each(|o| bench.ready(o));
    bench.settle();
    bench
}

fn play(schedule: &Schedule) -> (Bench, Vec<SequenceRequest>) {
    let mut bench = Bench::of(schedule.decoder(), schedule.config);
    // Steps take time, or no decode time would be owed.
    bench.set_costs(Duration::from_micros(3), Duration::from_micros(5));
    let (mut arrivals, outputs, mut next_id) = (Vec::new(), outputs(), 1);
    for next in &schedule.moves {
        match next {
            Move::Arrive(shape) => {
                let now = triptych_core::clock::Clock::now(&*bench.clock);
                let made = make(next_id, shape, schedule.cross_attention, now);
                next_id += u64::from(shape.n);
                arrivals.push(made.clone());
                bench.add(made);
            }
            Move::Ready(n) => bench.ready(&outputs[*n]),
            Move::Fail(n) => {
                let failure = Failure::unavailable("gone");
                bench.event(Event::ItemFailed { key: outputs[*n].item().key, failure });
            }
            Move::Abort(id) => bench.event(Event::Abort(SequenceId(*id))),
            Move::Late => bench.clock.advance(Duration::from_secs(40)),
            Move::Step => drop(bench.step()),
        }
        let stats = bench.engine.stats();
        assert!(stats.running <= schedule.config.max_sequences);
        assert!(stats.cross_used + stats.cross_cached <= stats.cross_total);
        assert!(stats.states_used + stats.state_checkpoints <= stats.states_total);
        assert!(!schedule.recurrent || stats.running == stats.states_used);
    }
    // Whoever is computed again may ask for its rows once more.
    loop {
        let n_uses = bench.row_uses.len();
        outputs.iter().for_each(|o| bench.ready(o));
        bench.settle();
        if bench.row_uses.len() == n_uses {
            return (bench, arrivals);
        }
    }
}

fn check(schedule: &Schedule) {
    let (bench, arrivals) = play(schedule);
    bench.assert_books_balance();
    let aborted = |id: &u64| schedule.moves.iter().any(|m| matches!(m, Move::Abort(a) if a == id));
    for arrival in &arrivals {
        let expect = undisturbed(arrival, schedule);
        arrival
            .ids
            .iter()
            .for_each(|id| check_completion(id.0, &bench.seen(id.0), &expect.seen(id.0), &aborted));
    }
}

fn check_completion(id: u64, seen: &Seen, expect: &Seen, aborted: &dyn Fn(&u64) -> bool) {
    match &seen.end {
        Some(Ok(finished)) => {
            assert_eq!((seen.tokens(), seen.text()), (expect.tokens(), expect.text()), "completion {id}");
            let how = |f: &triptych_engine::Finished| (f.reason, f.n_prompt, f.n_generated);
            assert_eq!(how(finished), how(expect.finished()));
        }
        Some(Err(failure)) => {
            assert_ne!(failure.class, FailureClass::Internal, "{failure}");
            assert!(expect.tokens().starts_with(&seen.tokens()));
        }
        None => assert!(aborted(&id), "completion {id} was not given"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn every_completion_is_the_undisturbed_one_and_the_accounting_balances(schedule in schedule()) {
        check(&schedule);
    }
}

#[test]
fn a_crowd_on_few_blocks_is_preempted_often_and_completions_the_same() {
    for cross_attention in [false, true] {
        // Short prompts let many in; long completions then fight for blocks.
        let shape = |i: usize| Shape {
            n_prompt: 2 + 5 * (i % 4),
            n_generated: 90,
            items: vec![i % ITEM_SIZES.len()],
            sampled: i.is_multiple_of(2),
            ends: false,
            n: 1 + i as u32 % 3,
            beams: (i % 5 == 4).then_some(1),
            priority: 0,
            tenant: i as u8 % 2,
            kind: i as u64,
        };
        let kv = KvBudget::Blocks { self_attention: 9, cross_attention: 4, host: 5 };
        let config = EngineConfig { kv, token_budget: 24, max_sequences: 6, max_waiting: 120, ..config() };
        let ready = (0..ITEM_SIZES.len()).map(Move::Ready);
        let moves: Vec<Move> = (0..48).map(|i| Move::Arrive(shape(i))).chain(ready).collect();
        let ways = [Preemption::Swap, Preemption::Recompute]
            .map(|way| [(way, Pipelining::Off), (way, Pipelining::On)]);
        for (preemption, pipelining) in ways.into_iter().flatten() {
            let config = EngineConfig { preemption, pipelining, ..config };
            let moves = moves.clone();
            let schedule =
                Schedule { cross_attention, groups: KvCacheGroups::FULL, recurrent: false, config, moves };
            check(&schedule);
            let stats = play(&schedule).0.engine.stats();
            assert!(stats.preemptions >= 8, "{stats:?}");
            assert_eq!(stats.swaps > 0, preemption == Preemption::Swap, "{stats:?}");
        }
    }
}
