//! Cases of decoders of text alone: conversations by their own template and plain prompts to tokens, logits and greedy answers.

use crate::case::{Case, assert_bf16_close, assert_int8_close, assert_logits_close, cpu, cuda};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use triptych_core::prompt::{Message, MessagePart, Prompt, Role, TextOrTokens};
use triptych_core::{DType, Modality};
use triptych_kernels::reference::ReferenceBackend;
use triptych_kernels::{Backend, Precision};
use triptych_models::{Model, ModelError};

pub const CASES: [&str; 18] = [
    "llama_tied",
    "llama_biased",
    "mistral_windowed",
    "mistral_unwindowed",
    "qwen2_tied",
    "qwen3_windowed_layers",
    "qwen3_5_text_tied",
    "qwen3_5_text_listed_layers",
    "qwen3_5_text_biased",
    "mixtral_windowed",
    "qwen2_moe_shared",
    "qwen3_moe_renormalised",
    "gemma3_text_old_keys",
    "gemma3_text_two_ropes",
    "gemma3_text_capped_logits",
    "gemma2_class_caps",
    "gemma2_low_caps",
    "gemma2_uncapped_scores",
];

/// The prompt of an entry of `expected.json`.
fn asked(entry: &serde_json::Value) -> Prompt {
    if let Some(text) = entry["prompt"].as_str() {
        return Prompt::Singleton(TextOrTokens::Text(text.to_owned()));
    }
    let message = |m: &serde_json::Value| Message {
        role: match m["role"].as_str().expect("a role") {
            "system" => Role::System,
            "assistant" => Role::Assistant,
            _ => Role::User,
        },
        parts: vec![MessagePart::Text(m["content"].as_str().expect("a text").to_owned())],
    };
    Prompt::Chat(
        entry["messages"].as_array().expect("messages").iter().map(message).collect::<Vec<_>>().into(),
    )
}

/// The sequences of a case, laid out by its own template and tokenizer.
fn sequences(case: &Case, model: &Model) -> Vec<Sequence> {
    let sequence = |entry: &serde_json::Value| {
        let prepared = model.prompts().prepare(&asked(entry), &[]).expect("a prompt").remove(0);
        let expected: Vec<u32> =
            serde_json::from_value(entry["input_ids"].clone()).expect("tokens of the reference");
        assert_eq!(prepared.tokens, expected, "{} {}", case.dir.display(), entry["rendered"]);
        assert!(prepared.spans.is_empty() && prepared.cross.is_empty());
        Sequence {
            positions: prepared.positions,
            next_position: prepared.next_position,
            prompt: prepared.tokens,
            hidden: model.spec().decoder.stack.hidden,
            ..Sequence::default()
        }
    };
    case.json["prompts"].as_array().expect("prompts").iter().map(sequence).collect()
}

/// The logits of the longest prompt: ours, and the expected ones under each of `names`.
fn known_logits<B: Backend>(name: &str, backend: &B, names: &[&str]) -> (Vec<f32>, Vec<Vec<f32>>) {
    let case = Case::open(name);
    let model = case.model();
    let mut decoder = model.load_decoder(backend).expect("decoder weights");
    let k = case.json["longest_prompt"].as_u64().expect("a prompt") as usize;
    let logits = teacher_forced(&mut *decoder, &sequences(&case, &model)[k]);
    let vocab = decoder.info().vocab;
    let (_, rows) = case.ids(&format!("prompt.{k}.logit_rows"));
    let own = rows.iter().flat_map(|r| &logits[*r as usize * vocab..][..vocab]).copied().collect();
    (own, names.iter().map(|n| case.values(&format!("prompt.{k}.{n}")).1).collect())
}

fn matches_reference<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let (logits, expected) = known_logits(name, backend, &["logits"]);
        assert_logits_close(&format!("{name} {} logits", backend.name()), &logits, &expected[0]);
    }
}

fn greedy_tokens_match<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let case = Case::open(name);
        let model = case.model();
        let mut decoder = model.load_decoder(backend).expect("decoder weights");
        let (sequences, expected) = (sequences(&case, &model), case.greedy_tokens());
        let mix = Mix { stagger: 3, chunk: 7 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: usize::MAX, mix };
        assert_greedy(backend, &mut *decoder, name, check);
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let (logits, expected) = known_logits(name, backend, &["logits", "logits_bf16"]);
        assert_bf16_close(&format!("{name} logits"), &logits, &expected[0], &expected[1]);
    }
}

crate::case::tests_of_many_cases!();

#[test]
fn cpu_in_int8_is_near() {
    for name in CASES {
        let (logits, expected) = known_logits(name, &cpu(Precision::Int8), &["logits"]);
        assert_int8_close(&format!("{name} logits"), &logits, &expected[0]);
    }
}

#[test]
fn cpu_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&CASES, &cpu(Precision::F32));
}

#[test]
fn cuda_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    let cases = [
        "llama_tied",
        "mistral_windowed",
        "qwen2_moe_shared",
        "qwen3_5_text_tied",
        "gemma3_text_two_ropes",
        "gemma2_low_caps",
    ];
    greedy_tokens_match(&cases, &cuda(Precision::F32));
}

#[test]
fn a_model_without_an_encoder_says_so() {
    let model = Case::open("llama_tied").model();
    assert_eq!(model.modalities(), []);
    assert_eq!(model.max_cross_rows(), None);
    for modality in [Modality::Text, Modality::Image, Modality::Audio] {
        let loaded = model.load_encoder(modality, &ReferenceBackend::new()).err().map(drop);
        assert!(loaded.is_some());
        let error = model.fingerprint(modality, DType::F32).expect_err("no encoder");
        assert!(matches!(&error, ModelError::Config { .. }), "{error}");
        assert!(error.to_string().contains(&format!("llama, without an encoder for {modality}")), "{error}");
        let (options, limits) =
            (triptych_core::ItemOptions::default(), triptych_core::limits::Limits::default());
        let refused = model.preprocess().preprocess(modality, b"x", &options, &limits);
        let text = refused.expect_err("no items").to_string();
        assert_eq!(text, format!("this model reads the text of its prompt, no {modality} items"));
    }
    let inventory = model.inventory().expect("an inventory");
    assert!(inventory.encoder.is_none() && inventory.unused.is_empty() && inventory.shared.is_empty());
    assert!(inventory.decoder.n_tensors > 0 && inventory.experts.is_none());
}

#[test]
fn the_inventory_tells_the_parameters_that_a_token_meets() {
    let inventory = Case::open("qwen2_moe_shared").model().inventory().expect("an inventory");
    let experts = inventory.experts.expect("layers with experts");
    assert_eq!((experts.n_layers, experts.n_experts, experts.top_k), (2, 6, 2));
    // Four experts of three matrices of 28 by 60 in each of two layers stay idle.
    assert_eq!(inventory.decoder.n_parameters - experts.n_active, 2 * 4 * 3 * 28 * 60);
}
