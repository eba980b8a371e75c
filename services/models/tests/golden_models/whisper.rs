//! Whisper cases.

use crate::case::{
    Case, assert_bf16_close, assert_int4_close, assert_int8_close, assert_logits_close, assert_rows_close,
    cpu, cuda,
};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use triptych_core::{Extent, Modality};
use triptych_kernels::Backend;
use triptych_kernels::Precision;
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::{EncoderInput, Features};

const CASES: [&str; 3] = ["whisper_en_odd_heads", "whisper_multilingual", "whisper_deep_f16"];

fn input(mel: Vec<f32>, n_windows: u32, n_positions: usize) -> EncoderInput {
    EncoderInput {
        extent: Extent::windows(n_windows, 0),
        n_tokens: n_windows * n_positions as u32,
        features: Features::Mel(mel),
    }
}

/// The features of the eight inputs of a case, each `[n_mels, n_frames]`, and the positions they make.
fn batch_features(case: &Case) -> (Vec<Vec<f32>>, usize) {
    let (shape, values) = case.values("batch_input_features_u8");
    let one = shape[1] * shape[2];
    (values.chunks_exact(one).map(|c| c.iter().map(|q| q / 64.0 - 2.0).collect()).collect(), shape[2] / 2)
}

/// The eight inputs of a case.
pub fn batch_inputs(case: &Case) -> Vec<EncoderInput> {
    let (features, n_positions) = batch_features(case);
    features.into_iter().map(|mel| input(mel, 1, n_positions)).collect()
}

/// The features the encoder state of a case was made from.
fn features(case: &Case, name: &str) -> EncoderInput {
    if name == "whisper_deep_f16" {
        let (mut batch, n_positions) = batch_features(case);
        return input(batch.swap_remove(0), 1, n_positions);
    }
    let (shape, mel) = case.values("input_features");
    input(mel, 1, shape[1] / 2)
}

fn sequence(prompt: &[u32], cross: Vec<f32>, hidden: usize) -> Sequence {
    Sequence {
        positions: (0..prompt.len() as u32).map(|i| [i; 3]).collect(),
        next_position: prompt.len() as u32,
        prompt: prompt.to_vec(),
        cross,
        hidden,
        adapter: None,
        embeds: vec![],
    }
}

fn encode(encoder: &mut dyn Encoder, input: &EncoderInput) -> Vec<f32> {
    encoder.encode(&[input]).expect("golden features fit").remove(0)
}

/// Encoder states and teacher-forced logits of a case.
fn states_and_logits<B: Backend>(case: &Case, name: &str, backend: &B) -> (Vec<f32>, Vec<f32>) {
    let model = case.model();
    let mut encoder = model.load_encoder(Modality::Audio, backend).expect("encoder weights");
    let mut decoder = model.load_decoder(backend).expect("decoder weights");
    let states = encode(&mut *encoder, &features(case, name));
    let (_, tokens) = case.ids("decoder_input_ids");
    let logits = teacher_forced(&mut *decoder, &sequence(&tokens, states.clone(), encoder.hidden()));
    (states, logits)
}

fn matches_reference<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        let (states, logits) = states_and_logits(&case, name, backend);
        let what = |part: &str| format!("{name} {} {part}", backend.name());
        assert_rows_close(&what("states"), &states, &case.values("encoder_last_hidden_state").1);
        assert_logits_close(&what("logits"), &logits, &case.values("logits").1);
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        let (_, logits) = states_and_logits(&case, name, backend);
        let [exact, bf16] = ["logits", "logits_bf16"].map(|t| case.values(t).1);
        assert_bf16_close(&format!("{name} logits"), &logits, &exact, &bf16);
    }
}

fn greedy_tokens_match<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let case = Case::open(name);
        let model = case.model();
        let mut encoder = model.load_encoder(Modality::Audio, backend).expect("encoder weights");
        let mut decoder = model.load_decoder(backend).expect("decoder weights");
        let prompt: Vec<u32> = serde_json::from_value(case.json["prompt"].clone()).expect("a prompt");
        let (features, n_positions) = batch_features(&case);
        let sequences: Vec<Sequence> = features
            .into_iter()
            .map(|mel| {
                let rows = encode(&mut *encoder, &input(mel, 1, n_positions));
                sequence(&prompt, rows, encoder.hidden())
            })
            .collect();
        let expected = case.greedy_tokens();
        let mix = Mix { stagger: 3, chunk: 2 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: usize::MAX, mix };
        assert_greedy(backend, &mut *decoder, name, check);
    }
}

/// An item of several windows gives what its windows give alone, whatever is encoded beside it.
fn windows_are_independent<B: Backend>(backend: &B) {
    let case = Case::open(CASES[1]);
    let mut encoder = case.model().load_encoder(Modality::Audio, backend).expect("encoder weights");
    let (features, n) = batch_features(&case);
    let alone: Vec<f32> =
        features[..3].iter().flat_map(|mel| encode(&mut *encoder, &input(mel.clone(), 1, n))).collect();
    let long = input(features[..3].concat(), 3, n);
    let other = input(features[3].clone(), 1, n);
    let rows = encoder.encode(&[&other, &long]).expect("golden features fit");
    assert_eq!(rows[1], alone);
}

crate::case::tests_on_every_back_end!();

#[test]
fn cpu_in_int8_is_near() {
    for name in CASES {
        let case = Case::open(name);
        let (states, logits) = states_and_logits(&case, name, &cpu(Precision::Int8));
        assert_int8_close(&format!("{name} states"), &states, &case.values("encoder_last_hidden_state").1);
        assert_int8_close(&format!("{name} logits"), &logits, &case.values("logits").1);
    }
}

#[test]
fn cpu_with_a_decoder_in_int4_is_near() {
    for name in CASES {
        let case = Case::open(name);
        let (states, logits) = states_and_logits(&case, name, &cpu(Precision::Int4));
        let (states8, logits8) = states_and_logits(&case, name, &cpu(Precision::Int8));
        assert_eq!(states, states8, "encoders compute in int8");
        assert_ne!(logits, logits8);
        assert_int4_close(&format!("{name} logits"), &logits, &case.values("logits").1);
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

#[test]
fn windows_of_a_long_sound_are_independent() {
    windows_are_independent(&cpu(Precision::F32));
    windows_are_independent(&cpu(Precision::Bf16));
    windows_are_independent(&cpu(Precision::Int8));
}
