//! Compute curves of the sample models, measured once each: that they are there, grow where they must, and can be used.

use std::cell::RefCell;
use std::path::Path;
use triptych_models::compute::{ComputeConfig, TimedForwards};
use triptych_models::{LoadFormat, Model, ModelSource};
use triptych_plan::curves::ItemsAt;
use triptych_plan::curves::sample::curves;
use triptych_plan::curves::timed::CurveTimes;
use triptych_plan::profile::{Extent, ProfileError, ProfileSettings, Profiled, Rounds, measure};

fn settings(kv_bytes: usize) -> ProfileSettings {
    let compute = ComputeConfig { threads: 1, ..ComputeConfig::default() };
    ProfileSettings { compute, rounds: Rounds::new(2), extent: Extent::Quick, kv_bytes }
}

fn model(name: &str, format: LoadFormat) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/models").join(name);
    Model::open(&ModelSource { dir, name: None, format, packed: None }).expect("a sample model")
}

fn profiled(name: &str, format: LoadFormat) -> Profiled {
    measure(&model(name, format), &settings(256 << 20), &|_, _, _| {}).expect("a profile")
}

#[test]
fn a_model_with_images_is_measured_and_progress_is_reported() {
    let told = RefCell::new(Vec::new());
    let progress = |part: &'static str, done: usize, of: usize| {
        assert!(done <= of, "{part}: {done} of {of}");
        told.borrow_mut().push(part);
    };
    let model = model("shapes-qwen2-vl", LoadFormat::Safetensors);
    let found = measure(&model, &settings(256 << 20), &progress).expect("a profile");
    for part in ["preprocess", "encode", "steps", "engine"] {
        assert!(told.borrow().contains(&part), "{part} was not told");
    }
    assert_eq!(found.items.len(), 2);
    assert!(found.items[0].tokens < found.items[1].tokens && found.items[0].bytes < found.items[1].bytes);
    assert!(found.encode.iter().any(|p| p.items == 2 && p.squares * 2 == p.tokens * p.tokens));
    assert!(found.step.iter().all(|p| p.p50_us > 0.0 && p.p95_us >= p.p50_us && p.projected_rows == 0));
    assert!(found.step.iter().any(|p| p.prefill_tokens > 0 && p.decodes > 0));
    assert!(found.kv.token_bytes > 0 && found.kv.cross_row_bytes == 0);
    assert!(found.colocated.encode >= 1.0 && found.colocated.step >= 1.0);
}

#[test]
fn steps_are_measured_pipelined_where_they_have_a_device() {
    let model = model("digits-whisper", LoadFormat::Dummy { seed: 0 });
    let measured = |timed: Option<TimedForwards>| {
        let told = RefCell::new(0);
        let settings = settings(256 << 20);
        let settings = ProfileSettings { compute: ComputeConfig { timed, ..settings.compute }, ..settings };
        let count = |part: &'static str, _, _| *told.borrow_mut() += usize::from(part == "pipelined engine");
        let found = measure(&model, &settings, &count).expect("a profile");
        (found.pipelining, told.into_inner())
    };
    assert_eq!(measured(None), (None, 0), "of a processor");
    let times: &'static CurveTimes = Box::leak(Box::new(CurveTimes::new(&curves(), 1)));
    let (saves, told) = measured(Some(TimedForwards(times)));
    let saves = saves.expect("of a device");
    assert!(saves.fixed_us >= 0.0 && saves.each_us >= 0.0 && told > 0, "{saves:?}");
}

#[test]
fn a_model_with_cross_attention_projects_rows_and_random_weights_do_as_well() {
    let found = profiled("digits-whisper", LoadFormat::Dummy { seed: 0 });
    assert!(found.step.iter().any(|p| p.projected_rows > 0));
    // Every sequence attends to the whole encoder output, beside its own tokens.
    let rows = u64::from(found.items.iter().map(|i| i.tokens).max().expect("items"));
    assert!(found.step.iter().all(|p| p.decode_context >= u64::from(p.decodes) * rows));
    assert!(found.kv.cross_row_bytes > 0);
}

#[test]
fn a_decoder_by_itself_has_steps_and_no_items() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/llama_tied/model");
    let source = ModelSource { dir, name: None, format: LoadFormat::Safetensors, packed: None };
    let model = Model::open(&source).expect("a golden model");
    let found = measure(&model, &settings(256 << 20), &|_, _, _| {}).expect("a profile");
    assert!(found.items.is_empty() && found.encode.is_empty() && found.preprocess.is_empty());
    assert_eq!((found.encode_parts, found.hidden), (1, 48));
    assert!(found.step.iter().any(|p| p.prefill_tokens > 0) && found.step.iter().any(|p| p.decodes > 0));
    assert!(found.kv.token_bytes > 0 && found.kv.cross_row_bytes == 0);
    assert!(found.prompt.before > 0 && found.prompt.after > 0, "{:?}", found.prompt);
}

#[test]
fn memory_that_holds_no_sequence_is_told_with_both_numbers() {
    let model = model("shapes-qwen2-vl", LoadFormat::Safetensors);
    let refused = measure(&model, &settings(1000), &|_, _, _| {}).expect_err("too little");
    assert!(matches!(refused, ProfileError::Memory { needed, given: 1000 } if needed > 1000), "{refused}");
}

#[test]
fn each_tower_of_a_model_is_measured() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/cogagent_chat/model");
    let source = ModelSource { dir, name: None, format: LoadFormat::Safetensors, packed: None };
    let model = Model::open(&source).expect("a golden model");
    let found = measure(&model, &settings(256 << 20), &|_, _, _| {}).expect("a profile");
    let [high] = &found.more_towers[..] else { panic!("{:?}", found.more_towers) };
    assert_eq!((found.tower.as_str(), high.name.as_str()), ("low", "high"));
    // The first tower's rows stand among the tokens; the second's, of a larger image, are cross-attended to.
    assert!(high.is_cross_attended && found.prompt.items == ItemsAt::Front, "{:?}", found.prompt);
    assert!(found.encode.iter().chain(&high.encode).all(|p| p.p50_us > 0.0));
    assert!(high.items[0].tokens > found.items[0].tokens);
    assert_ne!(high.hidden, found.hidden);
    assert!(
        found.kv.cross_row_bytes > 0 && found.step.iter().any(|p| p.projected_rows == high.items[0].tokens)
    );
}
