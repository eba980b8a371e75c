//! Cases of models with a tower, a projector and a text decoder (LLaVA, Pixtral, LightOnOCR, Idefics3, SmolVLM, InternVL, Gemma 3,
//! DeepSeek-OCR-2, Step3, GLM-OCR, Qwen2-Audio, Qwen3-ASR, Voxtral): images or audio to rows by the model's own processor, rows and prompts
//! to tokens.

use crate::case::{Case, assert_bf16_close, assert_int8_close, assert_logits_close, cpu, cuda, max_error};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use crate::pipeline::encoded;
use crate::planes::patches;
use std::collections::BTreeMap;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Message, MessagePart, Prompt, Role};
use triptych_core::{EncodedItem, ItemIdx, ItemOptions, Modality};
use triptych_kernels::Backend;
use triptych_kernels::Precision;
use triptych_models::Model;
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::prompt::ItemSpan;
use triptych_models::spec::EncoderSpec;

pub const CASES: [&str; 46] = [
    "llava_clip_llama",
    "llava_siglip_qwen2",
    "llava_class_row_mistral",
    "llava_next_mistral",
    "llava_next_llama3",
    "llava_next_siglip_qwen2",
    "llava_onevision_reduced",
    "llava_onevision_whole",
    "llava_onevision_one_tile",
    "smolvlm_split",
    "smolvlm_whole",
    "idefics3_odd_tiles",
    "internvl_qwen2",
    "internvl_rms_qwen3",
    "internvl_normed_llama",
    "internvl_row_norms",
    "internvl_chat_qwen2",
    "internvl_chat_row_norms",
    "internvl_chat_internlm2",
    "gemma3_old_keys",
    "gemma3_pan_and_scan",
    "gemma3_narrow_window",
    "qwen2_audio_odd_heads",
    "qwen2_audio_three_layers",
    "qwen2_audio_long_window",
    "qwen3_asr_odd_heads",
    "qwen3_asr_three_layers",
    "qwen3_asr_original",
    "voxtral_odd_heads",
    "voxtral_three_layers",
    "voxtral_long_window",
    "deepseek_ocr2_windows",
    "deepseek_ocr2_scaled",
    "deepseek_ocr2_wide_windows",
    "step3_dense_first",
    "step3_renormalised",
    "step3_wide_queries",
    "pixtral_silu",
    "mistral3_merged",
    "mistral3_gelu_biased",
    "lighton_ocr_qwen3",
    "lighton_ocr_untied",
    "lighton_ocr_three_layers",
    "glm_ocr_mrope",
    "glm_ocr_odd_heads",
    "glm_ocr_unbiased_tied",
];

/// A value of a pixel that is a step of 255 away, after the least standard deviation of a processor.
const PIXEL_TOLERANCE: f32 = 1.01 / 255.0 / 0.26;

/// Distance of a log-mel from the reference's, which computes in f32.
const MEL_TOLERANCE: f32 = 1e-4;

struct Loaded {
    case: Case,
    model: Model,
    items: BTreeMap<String, EncoderInput>,
}

impl Loaded {
    fn modality(&self) -> Modality {
        self.encoder().modality
    }

    /// Key of the list of items in the case's files.
    fn list(&self) -> &'static str {
        match self.modality() {
            Modality::Audio => "audios",
            _ => "images",
        }
    }

    /// Values of an item by the reference's processor, as the stem reads them.
    fn exact_values(&self, item: &str) -> Vec<f32> {
        match self.encoder().stem.patch_side() {
            Some(_) => {
                let of = |planes: &str| {
                    patches(&self.case.values(&format!("image.{item}.{planes}")), self.encoder())
                };
                // Parts of another size than the whole are stored by themselves, and come first.
                let has_parts = match &self.items[item].features {
                    Features::Views { sides, .. } => sides.len() > 1,
                    _ => false,
                };
                let parts = if has_parts { of("parts") } else { Vec::new() };
                [parts, of("pixel_values")].concat()
            }
            None => self.case.values(&format!("audio.{item}.input_features")).1,
        }
    }
}

/// Values of an item as the stem reads them.
fn values(features: &mut Features) -> &mut Vec<f32> {
    match features {
        Features::Patches(values)
        | Features::Tiles { patches: values, .. }
        | Features::Views { patches: values, .. } => values,
        Features::Mel(values) | Features::MaskedMel { mel: values, .. } => values,
        other => panic!("{other:?} are not values"),
    }
}

impl Loaded {
    fn encoder(&self) -> &EncoderSpec {
        self.model.spec().encoder.as_ref().expect("an encoder")
    }
}

fn load(name: &str) -> Loaded {
    let case = Case::open(name);
    let model = case.model();
    let mut loaded = Loaded { model, items: BTreeMap::new(), case };
    let processor = loaded.model.preprocess();
    let items = loaded.case.json[loaded.list()].as_object().expect("items by name").iter();
    let items = items.map(|(name, item)| {
        let file = loaded.case.dir.join(item["file"].as_str().expect("a file"));
        let bytes = std::fs::read(file).expect("an item");
        let options = ItemOptions::default();
        let input = processor.preprocess(loaded.modality(), &bytes, &options, &Limits::default());
        (name.clone(), input.expect("an item"))
    });
    loaded.items = items.collect();
    loaded
}

#[test]
fn inputs_and_numbers_of_rows_are_the_references() {
    for name in CASES {
        let loaded = load(name);
        let tolerance = match loaded.modality() {
            Modality::Audio => MEL_TOLERANCE,
            // Its processor resizes values, and so do we.
            _ if name.starts_with("step3") => 1e-5,
            _ => PIXEL_TOLERANCE,
        };
        for (item, input) in &loaded.items {
            let mut input = input.clone();
            let error = max_error(values(&mut input.features), &loaded.exact_values(item));
            assert!(error <= tolerance, "{name} {item}: max error {error}");
            let n_tokens = loaded.case.json[loaded.list()][item]["n_tokens"].as_u64().expect("a number");
            assert_eq!(u64::from(input.n_tokens), n_tokens, "{name} {item}");
        }
    }
}

/// The input of an item with the reference's values, which a resize may have put a step away.
fn exact(loaded: &Loaded, item: &str) -> EncoderInput {
    let mut input = loaded.items[item].clone();
    *values(&mut input.features) = loaded.exact_values(item);
    input
}

/// Rows of items, by their names.
type Rows = BTreeMap<String, Vec<f32>>;

fn encode<B: Backend>(loaded: &Loaded, backend: &B, items: &[&str]) -> Rows {
    let mut encoder = loaded.model.load_encoder(loaded.modality(), backend).expect("encoder weights");
    let inputs: Vec<EncoderInput> = items.iter().map(|item| exact(loaded, item)).collect();
    let rows = encoder.encode(&inputs.iter().collect::<Vec<_>>()).expect("golden items fit");
    items.iter().map(|item| (*item).to_owned()).zip(rows).collect()
}

fn encode_all<B: Backend>(loaded: &Loaded, backend: &B) -> Rows {
    encode(loaded, backend, &loaded.items.keys().map(String::as_str).collect::<Vec<_>>())
}

/// Names of the items of prompt `k`.
fn items_of(loaded: &Loaded, k: usize) -> Vec<&str> {
    let names = loaded.case.json["prompts"][k][loaded.list()].as_array().expect("items");
    names.iter().map(|n| n.as_str().expect("a name")).collect()
}

/// The sequence of a prompt, laid out by the model's own template and tokenizer.
fn sequence(loaded: &Loaded, k: usize, embeds: &Rows) -> Sequence {
    let prompt = &loaded.case.json["prompts"][k];
    let hidden = loaded.encoder().output_width();
    let names = items_of(loaded, k);
    let items: Vec<EncodedItem> =
        names.iter().map(|name| encoded(&loaded.items[*name], loaded.modality(), hidden)).collect();
    let text = MessagePart::Text(prompt["text"].as_str().expect("a text").to_owned());
    let parts = (0..items.len() as u32).map(|i| MessagePart::Item(ItemIdx(i))).chain([text]).collect();
    let chat = Prompt::Chat(vec![Message { role: Role::User, parts }].into());
    let prepared = loaded.model.prompts().prepare(&chat, &items).expect("a prompt").remove(0);
    let expected = loaded.case.ids(&format!("prompt.{k}.input_ids")).1;
    assert_eq!(prepared.tokens, expected, "{}", prompt["rendered"]);
    let (shape, positions) = loaded.case.ids(&format!("prompt.{k}.position_ids"));
    let n = shape[1];
    let positions: Vec<[u32; 3]> = (0..n).map(|i| [0, 1, 2].map(|part| positions[part * n + i])).collect();
    assert_eq!(prepared.positions, positions, "{}", prompt["rendered"]);
    let delta = prompt["rope_delta"].as_i64().unwrap_or(0);
    assert_eq!(i64::from(prepared.next_position), n as i64 + delta, "{}", prompt["rendered"]);
    let rows = |span: &ItemSpan| {
        let first = span.first_row as usize * hidden;
        embeds[names[span.item.0 as usize]][first..][..span.n_tokens as usize * hidden].to_vec()
    };
    Sequence {
        adapter: None,
        embeds: prepared.spans.iter().map(|span| (span.first_token as usize, rows(span))).collect(),
        positions: prepared.positions,
        next_position: prepared.next_position,
        prompt: prepared.tokens,
        cross: vec![],
        hidden,
    }
}

/// The prompt whose logits are stored.
fn known_prompt(loaded: &Loaded) -> usize {
    loaded.case.json["many_rows_prompt"].as_u64().expect("a prompt") as usize
}

/// The logits of the prompt whose rows are stored: ours, and the expected ones under each of `names`.
fn known_logits<B: Backend>(name: &str, backend: &B, names: &[&str]) -> (Vec<f32>, Vec<Vec<f32>>) {
    let loaded = load(name);
    let embeds = encode(&loaded, backend, &items_of(&loaded, known_prompt(&loaded)));
    logits_over(&loaded, backend, &embeds, names)
}

/// The same over rows that are encoded.
fn logits_over<B: Backend>(
    loaded: &Loaded,
    backend: &B,
    embeds: &Rows,
    names: &[&str],
) -> (Vec<f32>, Vec<Vec<f32>>) {
    let k = known_prompt(loaded);
    let mut decoder = loaded.model.load_decoder(backend).expect("decoder weights");
    let logits = teacher_forced(&mut *decoder, &sequence(loaded, k, embeds));
    let vocab = decoder.info().vocab;
    let (_, rows) = loaded.case.ids(&format!("prompt.{k}.logit_rows"));
    let own = rows.iter().flat_map(|r| &logits[*r as usize * vocab..][..vocab]).copied().collect();
    (own, names.iter().map(|n| loaded.case.values(&format!("prompt.{k}.{n}")).1).collect())
}

fn matches_reference<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let loaded = load(name);
        let embeds = encode_all(&loaded, backend);
        for (item, rows) in &embeds {
            let expected = loaded.case.values(&format!("{}.{item}.embeds", loaded.modality())).1;
            // Rows have a root mean square of 11 to 25, so their error is in units of it, as that of logits.
            assert_logits_close(&format!("{name} {} {item}", backend.name()), rows, &expected);
        }
        let (logits, expected) = logits_over(&loaded, backend, &embeds, &["logits"]);
        assert_logits_close(&format!("{name} {} logits", backend.name()), &logits, &expected[0]);
    }
}

fn greedy_tokens_match<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let loaded = load(name);
        let mut decoder = loaded.model.load_decoder(backend).expect("decoder weights");
        let embeds = encode_all(&loaded, backend);
        let expected = loaded.case.greedy_tokens();
        let sequences: Vec<Sequence> = (0..expected.len()).map(|k| sequence(&loaded, k, &embeds)).collect();
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
    greedy_tokens_match(&["llava_clip_llama", "gemma3_narrow_window"], &cuda(Precision::F32));
}
