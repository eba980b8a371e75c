//! Speculation: the same completions in fewer steps, whatever the drafts.

use crate::bench::{Bench, config, cross, item, tokenizer};
use crate::fake::{FakeDecoder, StepLog, info};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use triptych_engine::speculation::prompt_lookup::PromptLookup;
use triptych_engine::{Engine, EngineConfig, EngineError, KvBudget, Speculation};

const LOOKUP: Speculation = Speculation::PromptLookup(PromptLookup { n_tokens: 4, max_ngram: 2 });
const BY_MODEL: Speculation = Speculation::DraftModel { n_tokens: 3 };

fn with(speculation: Speculation) -> EngineConfig {
    EngineConfig { speculation, ..config() }
}

/// Runs two sequences over one input on a bench; their tokens.
fn run(bench: &mut Bench) -> [Vec<u32>; 2] {
    let audio = item(1, 40);
    bench.add(cross(bench.sequence(1, 40, 50), &audio, 0..40));
    bench.add(cross(bench.sequence(2, 9, 30), &audio, 0..40));
    bench.ready(&audio);
    bench.settle();
    bench.assert_books_balance();
    [1, 2].map(|id| bench.seen(id).tokens())
}

/// An engine with a draft model whose logits are the model's own but for every `wrong_every`th position.
fn drafted(wrong_every: Option<u32>, kv: KvBudget) -> (Bench, Arc<Mutex<StepLog>>) {
    let log = Arc::new(Mutex::new(StepLog::default()));
    log.lock().unwrap().wrong_every = wrong_every;
    let decoder = FakeDecoder { info: info(true, 4096), log: Arc::clone(&log) };
    let bench = Bench::with_cross(with(BY_MODEL));
    let bench = bench.map_engine(|engine| engine.with_draft_model(Box::new(decoder), kv).unwrap());
    (bench, log)
}

const ROOMY: KvBudget = KvBudget::Blocks { self_attention: 32, cross_attention: 4, host: 0 };

#[test]
fn what_repeats_is_written_in_fewer_steps() {
    let mut plain = Bench::with_cross(config());
    plain.log().period = Some(5);
    let mut bench = Bench::with_cross(with(LOOKUP));
    bench.log().period = Some(5);
    assert_eq!(run(&mut bench), run(&mut plain));
    let (steps, plain_steps) = (bench.log().steps.len(), plain.log().steps.len());
    assert!(steps < plain_steps / 2, "{steps} steps against {plain_steps}");
    let finished = bench.seen(1).finished().clone();
    assert!(finished.n_accepted > 20 && finished.n_accepted <= finished.n_drafted, "{finished:?}");
    let stats = bench.engine.stats();
    let other = bench.seen(2).finished().clone();
    assert_eq!(stats.drafted_tokens as usize, finished.n_drafted + other.n_drafted);
    assert_eq!(stats.accepted_tokens as usize, finished.n_accepted + other.n_accepted);
}

#[test]
fn a_draft_model_that_is_right_saves_most_steps() {
    let mut plain = Bench::with_cross(config());
    let (mut bench, log) = drafted(None, ROOMY);
    assert_eq!(run(&mut bench), run(&mut plain));
    let (steps, plain_steps) = (bench.log().steps.len(), plain.log().steps.len());
    assert!(steps <= plain_steps / 4 + 2, "{steps} steps against {plain_steps}");
    assert_eq!(log.lock().unwrap().projections, [40], "the draft model reads the input once too");
}

#[test]
fn steps_that_accept_drafts_may_take_longer_by_the_tpot_slo() {
    let slo_s = |speculation| {
        let log = Arc::<Mutex<StepLog>>::default();
        let decoder = FakeDecoder { info: info(true, 4096), log };
        let tpot_slo = Some(Duration::from_secs(1000));
        let bench = Bench::with_cross(EngineConfig { tpot_slo, ..with(speculation) });
        let mut bench = bench.map_engine(|engine| match speculation {
            Speculation::DraftModel { .. } => engine.with_draft_model(Box::new(decoder), ROOMY).unwrap(),
            _ => engine,
        });
        run(&mut bench);
        Duration::from_micros(bench.engine.stats().step_slo_us).as_secs()
    };
    let (plain, drafted) = (slo_s(Speculation::Off), slo_s(BY_MODEL));
    // Fifty tokens of the longer one, and 900 s for each.
    assert!((43_000..=45_000).contains(&plain), "{plain}");
    assert!((38_000..=47_000).contains(&drafted), "{drafted}");
}

#[test]
fn a_draft_model_that_errs_changes_no_completion() {
    for wrong_every in [1, 2, 3, 7] {
        let mut plain = Bench::with_cross(config());
        let (mut bench, _) = drafted(Some(wrong_every), ROOMY);
        assert_eq!(run(&mut bench), run(&mut plain), "wrong at every {wrong_every}th");
        let finished = bench.seen(1).finished().clone();
        assert_eq!(finished.n_accepted == 0, wrong_every == 1, "{finished:?}");
    }
}

#[test]
fn a_draft_model_short_of_blocks_or_broken_only_drafts_less() {
    let small = KvBudget::Blocks { self_attention: 2, cross_attention: 2, host: 0 };
    let mut plain = Bench::with_cross(config());
    let expect = run(&mut plain);
    let (mut bench, _) = drafted(None, small);
    assert_eq!(run(&mut bench), expect);
    assert!(bench.seen(2).finished().n_accepted > 0, "the short one has room");
    let (mut bench, log) = drafted(None, ROOMY);
    log.lock().unwrap().fail_forward = true;
    log.lock().unwrap().fail_projection = true;
    assert_eq!(run(&mut bench), expect);
}

#[test]
fn sampled_sequences_are_not_drafted() {
    let mut bench = Bench::decoder_only(with(LOOKUP));
    bench.log().period = Some(5);
    let mut arrival = bench.sequence(1, 9, 40);
    arrival.sampling.temperature = 1.0;
    bench.add(arrival);
    bench.settle();
    assert_eq!(bench.engine.stats().drafted_tokens, 0);
}

#[test]
fn a_draft_model_of_another_kind_is_refused() {
    let decoder = |cross| Box::new(FakeDecoder { info: info(cross, 4096), log: Arc::default() });
    let engine = Engine::new(decoder(true), tokenizer(), with(BY_MODEL)).unwrap();
    let refused = engine.with_draft_model(decoder(false), ROOMY).err();
    assert!(matches!(refused, Some(EngineError::Draft { actual: 0, expected: 1, .. })), "{refused:?}");
}
