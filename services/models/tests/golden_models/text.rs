//! Text cases: BART and its relatives, T5 and its relatives, BERT and RoBERTa as encoder and decoder.

use crate::case::{Case, assert_bf16_close, assert_logits_close, assert_rows_close, cpu, cuda};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use triptych_core::limits::Limits;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{ContentKey, DType, EncodedItem, Extent, Fingerprint, ItemForm, ItemOptions, Modality};
use triptych_kernels::Backend;
use triptych_kernels::Precision;
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::prompt::PreparedSequence;

const CASES: [&str; 32] = [
    "bart_odd_heads",
    "bart_large_cnn",
    "bart_own_head",
    "mbart_cc25",
    "mbart_50",
    "mbart_odd_heads",
    "nllb_600m",
    "m2m_odd_heads",
    "nllb_forced_language",
    "pegasus_xsum",
    "pegasus_odd_heads",
    "pegasus_odd_width",
    "marian_en_de",
    "marian_two_tables",
    "marian_decoder_table",
    "blenderbot_400m",
    "blenderbot_odd_heads",
    "blenderbot_small",
    "t5_small",
    "t5_odd_heads",
    "t5_wide_heads",
    "t5_v1_1",
    "flan_t5",
    "t5_v1_1_silu",
    "byt5",
    "mt5_small",
    "umt5_small",
    "umt5_odd_heads",
    "umt5_tied",
    "bert2bert",
    "roberta2roberta_projected",
    "bert2bert_own_head",
];

fn input(ids: Vec<u32>) -> EncoderInput {
    EncoderInput { extent: Extent::Tokens, n_tokens: ids.len() as u32, features: Features::Tokens(ids) }
}

/// Token lists under a key of `expected.json`.
fn lists(case: &Case, key: &str) -> Vec<Vec<u32>> {
    serde_json::from_value(case.json[key].clone()).expect("lists of tokens")
}

pub fn inputs(case: &Case) -> Vec<EncoderInput> {
    lists(case, "inputs").into_iter().map(input).collect()
}

fn start(case: &Case) -> u32 {
    case.json["start"].as_u64().expect("a start token") as u32
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

fn encode_all(encoder: &mut dyn Encoder, inputs: &[EncoderInput]) -> Vec<Vec<f32>> {
    encoder.encode(&inputs.iter().collect::<Vec<_>>()).expect("golden tokens fit")
}

/// Teacher-forced logits of a case over its first input.
fn logits<B: Backend>(case: &Case, backend: &B) -> Vec<f32> {
    let model = case.model();
    let mut encoder = model.load_encoder(Modality::Text, backend).expect("encoder weights");
    let mut decoder = model.load_decoder(backend).expect("decoder weights");
    let rows = encode_all(&mut *encoder, &inputs(case)[..1]).remove(0);
    let (_, tokens) = case.ids("decoder_input_ids");
    teacher_forced(&mut *decoder, &sequence(&tokens, rows, encoder.hidden()))
}

/// Rows of all inputs, encoded together, and logits over the first.
fn matches_reference<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let case = Case::open(name);
        let mut encoder = case.model().load_encoder(Modality::Text, backend).expect("encoder weights");
        for (i, rows) in encode_all(&mut *encoder, &inputs(&case)).iter().enumerate() {
            let expected = case.values(&format!("matrix.{i}.rows")).1;
            assert_rows_close(&format!("{name} {} rows {i}", backend.name()), rows, &expected);
        }
        let what = format!("{name} {} logits", backend.name());
        assert_logits_close(&what, &logits(&case, backend), &case.values("logits").1);
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let case = Case::open(name);
        let [exact, bf16] = ["logits", "logits_bf16"].map(|t| case.values(t).1);
        assert_bf16_close(&format!("{name} logits"), &logits(&case, backend), &exact, &bf16);
    }
}

/// All inputs together, and the first `n_alone` one at a time.
fn greedy_tokens_match<B: Backend>(cases: &[&str], backend: &B, n_alone: usize) {
    for &name in cases {
        let case = Case::open(name);
        let model = case.model();
        let mut encoder = model.load_encoder(Modality::Text, backend).expect("encoder weights");
        let mut decoder = model.load_decoder(backend).expect("decoder weights");
        let hidden = encoder.hidden();
        let rows = encode_all(&mut *encoder, &inputs(&case));
        let sequences: Vec<Sequence> =
            rows.into_iter().map(|rows| sequence(&[start(&case)], rows, hidden)).collect();
        let expected = case.greedy_tokens();
        let mix = Mix { stagger: 3, chunk: 2 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone, mix };
        assert_greedy(backend, &mut *decoder, name, check);
    }
}

/// Metadata of an item, as a PD worker gets them.
fn encoded(input: &EncoderInput, hidden: usize) -> EncodedItem {
    EncodedItem {
        key: ContentKey::from_bytes([0; 32]),
        fingerprint: Fingerprint::from_bytes([0; 32]),
        modality: Modality::Text,
        n_tokens: input.n_tokens,
        hidden: hidden as u32,
        dtype: DType::F32,
        extent: input.extent.clone(),
        checksum: [0; 32],
    }
}

/// Greedy tokens under the sequence's own rules, up to and with an end token.
fn ruled(
    decoder: &mut dyn triptych_models::decoder::Decoder,
    prepared: &PreparedSequence,
    rows: &[f32],
    hidden: usize,
    n_most: usize,
) -> Vec<u32> {
    let vocab = decoder.info().vocab;
    let mut generated: Vec<u32> = Vec::new();
    while generated.len() < n_most && !generated.last().is_some_and(|t| prepared.end_tokens.contains(t)) {
        let tokens = [&prepared.tokens[..], &generated].concat();
        let mut logits = teacher_forced(decoder, &sequence(&tokens, rows.to_vec(), hidden));
        let mut last = logits.split_off((tokens.len() - 1) * vocab);
        if generated.len() + 1 < n_most || !prepared.rules.apply_last(&mut last) {
            prepared.rules.apply(&generated, &mut last);
        }
        let best = last.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).expect("logits").0;
        generated.push(best as u32);
    }
    generated
}

/// From the bytes of a text to the tokens of transformers' `generate`, with the model's own settings.
#[test]
fn a_text_becomes_the_tokens_of_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        let model = case.model();
        let backend = cpu(Precision::F32);
        let mut encoder = model.load_encoder(Modality::Text, &backend).expect("encoder weights");
        let mut decoder = model.load_decoder(&backend).expect("decoder weights");
        let processor = model.preprocess();
        let limits = Limits::default();
        let texts: Vec<String> = serde_json::from_value(case.json["texts"].clone()).expect("texts");
        for (text, ids) in texts.iter().zip(lists(&case, "inputs")) {
            let plain = processor
                .preprocess(Modality::Text, text.as_bytes(), &ItemOptions::default(), &limits)
                .expect("a text");
            assert_eq!(plain, input(ids.clone()), "{name} {text}");
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let options = ItemOptions { form: ItemForm::TokenIds, ..ItemOptions::default() };
            let given = processor.preprocess(Modality::Text, &bytes, &options, &limits).expect("token ids");
            assert_eq!(given, plain);
        }
        let first = input(lists(&case, "inputs").swap_remove(0));
        let rows = encode_all(&mut *encoder, std::slice::from_ref(&first)).remove(0);
        let hidden = encoder.hidden();
        let nothing = Prompt::Explicit { encoder: None, decoder: TextOrTokens::Tokens(vec![]) };
        let prepared = model.prompts().prepare(&nothing, &[encoded(&first, hidden)]).expect("a prompt");
        let request = &case.matrix()["requests"][0];
        let n_most = request["max_new_tokens"].as_u64().expect("a number") as usize;
        let expected: Vec<u32> = serde_json::from_value(request["greedy"].clone()).expect("tokens");
        assert_eq!(ruled(&mut *decoder, &prepared[0], &rows, hidden, n_most), expected, "{name}");
    }
}

crate::case::tests_of_many_cases!();

#[test]
fn cpu_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&CASES, &cpu(Precision::F32), 8);
}

#[test]
fn cuda_greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&CASES[..2], &cuda(Precision::F32), 1);
}
