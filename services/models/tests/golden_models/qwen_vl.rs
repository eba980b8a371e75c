//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 cases.

use crate::case::{
    Case, assert_bf16_close, assert_int4_close, assert_int8_close, assert_logits_close,
    assert_routed_int8_close, assert_rows_close, cpu, cuda,
};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use std::collections::BTreeMap;
use triptych_core::{Extent, Modality};
use triptych_kernels::Backend;
use triptych_kernels::Precision;
use triptych_models::Model;
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::{EncoderInput, Features};

pub const CASES: [&str; 18] = [
    "qwen2_vl_odd_heads",
    "qwen2_vl_two_images",
    "qwen2_vl_untied_nested",
    "qwen2_5_vl_window112",
    "qwen2_5_vl_window56",
    "qwen2_5_vl_untied_nested",
    "qwen3_vl_wide_heads",
    "qwen3_vl_one_level",
    "qwen3_vl_untied",
    "qwen3_vl_moe_wide_heads",
    "qwen3_vl_moe_dense_layer",
    "qwen3_vl_moe_one_expert",
    "qwen3_5_tied",
    "qwen3_5_listed_layers",
    "qwen3_5_untied",
    "qwen3_5_moe_wide_shared",
    "qwen3_5_moe_listed_layers",
    "qwen3_5_moe_separate_experts",
];

/// Images of a case by name.
fn images(case: &Case, model_dir_config: &serde_json::Value) -> BTreeMap<String, EncoderInput> {
    let numbers = |key: &str| -> Vec<f32> {
        serde_json::from_value(model_dir_config[key].clone()).expect("three numbers")
    };
    let mean = numbers("image_mean");
    let std = numbers("image_std");
    let images = case.json["images"].as_object().expect("images by name");
    images
        .iter()
        .map(|(name, image)| {
            let [t, h, w]: [u32; 3] = serde_json::from_value(image["grid_thw"].clone()).expect("a grid");
            let (shape, pixels) = case.values(&format!("image.{name}.pixels"));
            let plane = shape[2] * shape[3];
            let mut patches = Vec::with_capacity(2 * pixels.len());
            for (i, plane) in pixels.chunks_exact(plane).enumerate() {
                let channel = i % shape[1];
                let values = plane.iter().map(|p| (p / 255.0 - mean[channel]) / std[channel]);
                // A still image is its own next frame.
                patches.extend(values.clone().chain(values));
            }
            let extent = Extent::Grid { t, h, w };
            let n_tokens = t * h * w / 4;
            (name.clone(), EncoderInput { extent, n_tokens, features: Features::Patches(patches) })
        })
        .collect()
}

pub struct Loaded {
    case: Case,
    model: Model,
    pub images: BTreeMap<String, EncoderInput>,
}

pub fn load(name: &str) -> Loaded {
    let case = Case::open(name);
    let config = std::fs::read(case.dir.join("model/preprocessor_config.json")).expect("processor config");
    let images = images(&case, &serde_json::from_slice(&config).expect("JSON"));
    Loaded { model: case.model(), images, case }
}

/// The sequence of prompt `k`.
pub fn sequence(loaded: &Loaded, k: usize, embeds: &BTreeMap<String, Vec<f32>>) -> Sequence {
    let case = &loaded.case;
    let prompt = &case.json["prompts"][k];
    let config = std::fs::read(case.dir.join("model/config.json")).expect("config");
    let config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    let pad = config["image_token_id"].as_u64().expect("an image token") as u32;
    let (_, tokens) = case.ids(&format!("prompt.{k}.input_ids"));
    let (shape, ids) = case.ids(&format!("prompt.{k}.position_ids"));
    let n = shape[1];
    let delta = prompt["rope_delta"].as_i64().expect("a delta");
    let hidden = loaded.model.spec().encoder.as_ref().expect("an encoder").output_width();
    let names = prompt["images"].as_array().expect("images").iter();
    let mut spans = Vec::new();
    let mut at = 0;
    for name in names {
        let rows = embeds[name.as_str().expect("a name")].clone();
        at += tokens[at..].iter().position(|t| *t == pad).expect("a placeholder");
        let n_rows = rows.len() / hidden;
        spans.push((at, rows));
        at += n_rows;
    }
    Sequence {
        positions: (0..n).map(|i| [ids[i], ids[n + i], ids[2 * n + i]]).collect(),
        next_position: (n as i64 + delta) as u32,
        prompt: tokens,
        adapter: None,
        embeds: spans,
        cross: vec![],
        hidden,
    }
}

/// Rows of every image, all in one batch.
fn encode_all(loaded: &Loaded, encoder: &mut dyn Encoder) -> BTreeMap<String, Vec<f32>> {
    let batch: Vec<&EncoderInput> = loaded.images.values().collect();
    let rows = encoder.encode(&batch).expect("golden images fit");
    loaded.images.keys().cloned().zip(rows).collect()
}

/// The logits of the prompt whose rows are stored: ours, and the expected ones under each of `names`.
fn known_logits<B: Backend>(name: &str, backend: &B, names: &[&str]) -> (Vec<f32>, Vec<Vec<f32>>) {
    let loaded = load(name);
    let mut encoder = loaded.model.load_encoder(Modality::Image, backend).expect("encoder weights");
    let mut decoder = loaded.model.load_decoder(backend).expect("decoder weights");
    let embeds = encode_all(&loaded, &mut *encoder);
    let k = loaded.case.json["many_rows_prompt"].as_u64().expect("a prompt") as usize;
    let logits = teacher_forced(&mut *decoder, &sequence(&loaded, k, &embeds));
    let vocab = decoder.info().vocab;
    let (_, rows) = loaded.case.ids(&format!("prompt.{k}.logit_rows"));
    let own = rows.iter().flat_map(|r| &logits[*r as usize * vocab..][..vocab]).copied().collect();
    (own, names.iter().map(|n| loaded.case.values(&format!("prompt.{k}.{n}")).1).collect())
}

fn matches_reference<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let loaded = load(name);
        let mut encoder = loaded.model.load_encoder(Modality::Image, backend).expect("encoder weights");
        let together = encode_all(&loaded, &mut *encoder);
        for (image, input) in &loaded.images {
            let expected = loaded.case.values(&format!("image.{image}.embeds")).1;
            let alone = encoder.encode(&[input]).expect("a golden image fits").remove(0);
            assert_rows_close(&format!("{name} {} {image}", backend.name()), &alone, &expected);
            assert_eq!(alone, together[image], "{name} {image}: alone and in a batch");
        }
        let (logits, expected) = known_logits(name, backend, &["logits"]);
        assert_logits_close(&format!("{name} {} logits", backend.name()), &logits, &expected[0]);
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let (logits, expected) = known_logits(name, backend, &["logits", "logits_bf16"]);
        assert_bf16_close(&format!("{name} logits"), &logits, &expected[0], &expected[1]);
    }
}

fn greedy_tokens_match<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let loaded = load(name);
        let mut encoder = loaded.model.load_encoder(Modality::Image, backend).expect("encoder weights");
        let mut decoder = loaded.model.load_decoder(backend).expect("decoder weights");
        let embeds = encode_all(&loaded, &mut *encoder);
        let expected = loaded.case.greedy_tokens();
        let sequences: Vec<Sequence> = (0..expected.len()).map(|k| sequence(&loaded, k, &embeds)).collect();
        // A chunk of 7 cuts prompts in the middle of images.
        let mix = Mix { stagger: 3, chunk: 7 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: usize::MAX, mix };
        assert_greedy(backend, &mut *decoder, name, check);
    }
}

crate::case::tests_of_many_cases!();

#[test]
fn cpu_in_int8_is_near() {
    for name in CASES {
        let (logits, expected) = known_logits(name, &cpu(Precision::Int8), &["logits"]);
        let what = format!("{name} logits");
        match name.contains("_moe_") {
            true => {
                assert_routed_int8_close(&what, &logits, &expected[0], load(name).model.spec().decoder.vocab)
            }
            false => assert_int8_close(&what, &logits, &expected[0]),
        }
    }
}

#[test]
fn cpu_with_a_decoder_in_int4_is_near() {
    for name in CASES {
        let (logits, expected) = known_logits(name, &cpu(Precision::Int4), &["logits"]);
        assert_int4_close(&format!("{name} logits"), &logits, &expected[0]);
    }
}

#[test]
fn cpu_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&CASES, &cpu(Precision::F32));
}

#[test]
fn cuda_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&CASES[..1], &cuda(Precision::F32));
}
