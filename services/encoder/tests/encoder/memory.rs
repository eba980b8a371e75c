//! A worker whose memory is stated: it divides it before it loads, refuses what does not fit, and serves the rest.

use crate::support::{TowersOf, golden, source, start_within};
use tonic::Code;
use triptych_core::TowerIdx;
use triptych_encoder::EncoderError;
use triptych_models::compute::Precision;
use triptych_models::{LoadFormat, Model, ModelSource};
use triptych_proto::v1;

const MIB: usize = 1 << 20;

fn cogagent() -> ModelSource {
    source("cogagent_chat", "towers")
}

/// MiB of memory that a start with too little asks for, and the whole text.
async fn needed(model: ModelSource, towers: &TowersOf) -> (usize, String) {
    let refused = start_within(MIB, model, towers.clone()).await.running.await.expect("no panic");
    let Err(EncoderError::Memory(text)) = refused else { panic!("{refused:?}") };
    let needed = text.split("; ").nth(1).and_then(|rest| rest.split(' ').next()).expect("a number");
    (needed.parse().expect("a number"), text)
}

#[tokio::test]
async fn a_worker_with_too_little_memory_says_what_it_needs_and_starts_with_that() {
    let [both, low] = ["", "low"].map(TowersOf::named);
    let (of_both, text) = needed(cogagent(), &both).await;
    for part in [
        "--memory-mib 1: weights take ",
        "activations of an image",
        "what 2 threads keep 128",
        "(--rows-mib) 16",
    ] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
    let (of_low, text) = needed(cogagent(), &low).await;
    assert!(of_low < of_both && text.contains("what 1 threads keep 64"), "{text}");
    let worker = start_within(of_low * MIB, cogagent(), low).await;
    let job = worker.job("towers", 1).await;
    worker.encode(job).await.expect("a plain item fits");
    let text = start_within((of_both - 1) * MIB, cogagent(), both).await.running.await.expect("no panic");
    assert!(text.expect_err("a MiB less").to_string().contains(&format!("{of_both} or more are needed")));
}

/// A BMP file, black: 24 bits a pixel. Rows need no padding.
fn bitmap(side: u32) -> Vec<u8> {
    const HEADERS: u32 = 14 + 40;
    assert!(side.is_multiple_of(4));
    let mut file = b"BM".to_vec();
    for field in [HEADERS + side * side * 3, 0, HEADERS, 40, side, side] {
        file.extend(field.to_le_bytes());
    }
    file.extend([1, 0, 24, 0]);
    file.resize(file.len() + 24, 0);
    file.resize(file.len() + (side * side * 3) as usize, 0);
    file
}

#[tokio::test]
async fn an_item_that_does_not_fit_is_refused_with_both_numbers_and_the_next_is_encoded() {
    let (model, towers) = (|| source("qwen2_vl_two_images", "vl"), TowersOf::named(""));
    let (needed, _) = needed(model(), &towers).await;
    let worker = start_within(needed * MIB, model(), towers).await;
    // Four times the pixels of the plain item.
    let large = v1::EncodeRequest { item: bitmap(1776).into(), ..worker.job("vl", 1).await };
    let refused = worker.encode(large).await.expect_err("too large");
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
    assert!(refused.message().contains("MiB of memory, this encoder has room for"), "{refused}");
    for seed in 2..6 {
        worker.encode(worker.job("vl", seed).await).await.expect("a small image");
    }
}

#[tokio::test]
async fn what_is_foretold_of_a_tower_is_kept_for_items_of_its_shape() {
    let dir = golden("cogagent_chat").join("model");
    let source = ModelSource { dir, name: None, format: LoadFormat::Safetensors, packed: None };
    let model = Model::open(&source).expect("a model");
    let of = |tower| {
        let tower = TowerIdx(tower);
        let mut forecast = model.memory_forecast(tower, Precision::F32).expect("weights").expect("a tower");
        let (text, input) = model.example_input(tower).expect("an example");
        assert_eq!(text, "an image of 1024 x 768");
        let [first, again] = [(); 2].map(|()| forecast.item_bytes(&input).expect("a forward"));
        assert_eq!((first, forecast.batch_bytes(&[&input]).expect("a forward")), (again, first));
        // A batch has no more than its items, and more than one.
        let two = forecast.batch_bytes(&[&input, &input]).expect("a forward");
        assert!((first + first / 2..=2 * first).contains(&two), "{first} and {two}");
        first
    };
    assert!(of(1) > of(0), "the second tower reads more patches");
    assert!(model.memory_forecast(TowerIdx(2), Precision::F32).expect("weights").is_none());
}
