//! Videos of Qwen2-VL, Qwen2.5-VL, Qwen3-VL with and without experts and Qwen3.5: rows, positions, logits and greedy tokens, beside images and other videos.

use crate::case::{Case, assert_bf16_close, assert_int8_close, assert_logits_close, assert_rows_close, cpu};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use std::collections::BTreeMap;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Message, MessagePart, Prompt, Role};
use triptych_core::{ContentKey, DType, EncodedItem, Extent, Fingerprint, ItemIdx, ItemOptions, Modality};
use triptych_kernels::{Backend, Precision};
use triptych_models::Model;
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::image::ImageSize;
use triptych_models::preprocess::{
    EncoderInput, Features, FrameStack, VideoKind, VideoProcessor, VideoSettings,
};

const CASES: [(&str, VideoKind); 6] = [
    ("qwen2_vl_two_images", VideoKind::PerFrame),
    ("qwen2_5_vl_window112", VideoKind::PerFrame),
    ("qwen2_5_vl_untied_nested", VideoKind::PerFrame),
    ("qwen3_vl_wide_heads", VideoKind::OverFrames),
    ("qwen3_vl_moe_dense_layer", VideoKind::OverFrames),
    ("qwen3_5_tied", VideoKind::OverFrames),
];
/// Name of the image beside the videos.
const STILL: &str = "image";

struct Loaded {
    case: Case,
    model: Model,
    /// Videos by name, and the image.
    inputs: BTreeMap<String, EncoderInput>,
}

/// Frames that lie one under the other in an image.
fn frames(case: &Case, video: &serde_json::Value) -> FrameStack {
    let strip =
        image::open(case.dir.join(video["file"].as_str().expect("a file"))).expect("a PNG").into_rgb8();
    let n_frames = video["n_frames"].as_u64().expect("frames") as u32;
    FrameStack {
        size: ImageSize { width: strip.width(), height: strip.height() / n_frames },
        fps: video["fps"].as_f64().expect("a rate"),
        rgb: strip.into_raw(),
    }
}

fn load((name, kind): (&str, VideoKind)) -> Loaded {
    let case = Case::open_part(name, "video");
    let model = case.model();
    let settings = VideoSettings::from_dir(&case.dir.join("model"), kind).expect("settings");
    let processor = VideoProcessor::new(settings);
    let videos = case.json["videos"].as_object().expect("videos by name").iter();
    let mut inputs: BTreeMap<String, EncoderInput> = videos
        .map(|(name, video)| {
            (name.clone(), processor.of_frames(&frames(&case, video)).expect("a golden video fits"))
        })
        .collect();
    let still = std::fs::read(case.dir.join("videos/still.png")).expect("a PNG");
    let options = ItemOptions::default();
    let still = model.preprocess().preprocess(Modality::Image, &still, &options, &Limits::default());
    inputs.insert(STILL.into(), still.expect("a golden image fits"));
    Loaded { case, model, inputs }
}

/// Rows of every video and of the image, all in one batch.
fn encode_all(loaded: &Loaded, encoder: &mut dyn Encoder) -> BTreeMap<String, Vec<f32>> {
    let batch: Vec<&EncoderInput> = loaded.inputs.values().collect();
    let rows = encoder.encode(&batch).expect("golden items fit");
    loaded.inputs.keys().cloned().zip(rows).collect()
}

fn encoded_item(input: &EncoderInput, hidden: usize) -> EncodedItem {
    EncodedItem {
        key: ContentKey::from_bytes([1; 32]),
        fingerprint: Fingerprint::from_bytes([2; 32]),
        modality: if matches!(input.extent, Extent::Video { .. }) {
            Modality::Video
        } else {
            Modality::Image
        },
        n_tokens: input.n_tokens,
        hidden: hidden as u32,
        dtype: DType::F32,
        extent: input.extent.clone(),
        checksum: [0; 32],
    }
}

/// The sequence of prompt `k` as the model's own prompt builder lays it out, which is held to the reference's.
fn sequence(loaded: &Loaded, k: usize, embeds: &BTreeMap<String, Vec<f32>>) -> Sequence {
    let case = &loaded.case;
    let prompt = &case.json["prompts"][k];
    let hidden = loaded.model.spec().encoder.as_ref().expect("an encoder").output_width();
    let names: Vec<String> = serde_json::from_value(prompt["items"].clone()).expect("names");
    let items: Vec<EncodedItem> =
        names.iter().map(|name| encoded_item(&loaded.inputs[name], hidden)).collect();
    let mut parts: Vec<MessagePart> =
        (0..items.len() as u32).map(|i| MessagePart::Item(ItemIdx(i))).collect();
    parts.push(MessagePart::Text(prompt["text"].as_str().expect("a text").to_owned()));
    let chat = Prompt::Chat(vec![Message { role: Role::User, parts }].into());
    let prepared = loaded.model.prompts().prepare(&chat, &items).expect("a golden prompt").remove(0);
    let name = case.dir.display();
    assert_eq!(prepared.tokens, case.ids(&format!("prompt.{k}.input_ids")).1, "{name} {k}");
    let (shape, ids) = case.ids(&format!("prompt.{k}.position_ids"));
    let n = shape[1];
    let positions: Vec<[u32; 3]> = (0..n).map(|i| [ids[i], ids[n + i], ids[2 * n + i]]).collect();
    assert_eq!(prepared.positions, positions, "{name} {k}");
    assert_eq!(u64::from(prepared.next_position), prompt["next_position"].as_u64().expect("a position"));
    let rows = |span: &triptych_models::prompt::ItemSpan| {
        let all = &embeds[&names[span.item.0 as usize]];
        let first = span.first_row as usize * hidden;
        (span.first_token as usize, all[first..first + span.n_tokens as usize * hidden].to_vec())
    };
    Sequence {
        adapter: None,
        embeds: prepared.spans.iter().map(rows).collect(),
        prompt: prepared.tokens,
        positions: prepared.positions,
        next_position: prepared.next_position,
        cross: vec![],
        hidden,
    }
}

/// The logits of every prompt: ours, and the expected ones under each of `names`.
fn known_logits<B: Backend>(
    case: (&str, VideoKind),
    backend: &B,
    names: &[&str],
) -> Vec<(Vec<f32>, Vec<Vec<f32>>)> {
    let loaded = load(case);
    let mut encoder = loaded.model.load_encoder(Modality::Video, backend).expect("encoder weights");
    let mut decoder = loaded.model.load_decoder(backend).expect("decoder weights");
    let embeds = encode_all(&loaded, &mut *encoder);
    let vocab = decoder.info().vocab;
    let n_prompts = loaded.case.json["prompts"].as_array().expect("prompts").len();
    (0..n_prompts)
        .map(|k| {
            let logits = teacher_forced(&mut *decoder, &sequence(&loaded, k, &embeds));
            let (_, rows) = loaded.case.ids(&format!("prompt.{k}.logit_rows"));
            let own = rows.iter().flat_map(|r| &logits[*r as usize * vocab..][..vocab]).copied().collect();
            (own, names.iter().map(|n| loaded.case.values(&format!("prompt.{k}.{n}")).1).collect())
        })
        .collect()
}

#[test]
fn patches_are_those_of_the_reference() {
    for case in CASES {
        let loaded = load(case);
        for (name, video) in loaded.case.json["videos"].as_object().expect("videos") {
            let input = &loaded.inputs[name];
            let grid: [u32; 3] = serde_json::from_value(video["grid_thw"].clone()).expect("a grid");
            assert!(matches!(input.extent, Extent::Video { t, h, w, .. } if [t, h, w] == grid), "{name}");
            let Features::Patches(values) = &input.features else { panic!("{name} has no patches") };
            let (_, sums) = loaded.case.values(&format!("video.{name}.pixel_sums"));
            let of_patch = values.len() / sums.len();
            for (patch, expect) in values.chunks_exact(of_patch).zip(&sums) {
                let sum: f64 = patch.iter().map(|value| f64::from(*value)).sum();
                assert!((sum - f64::from(*expect)).abs() < 1e-2, "{} {name}: {sum} {expect}", case.0);
            }
        }
    }
}

fn matches_reference<B: Backend>(backend: &B) {
    for case in CASES {
        let loaded = load(case);
        let mut encoder = loaded.model.load_encoder(Modality::Video, backend).expect("encoder weights");
        let together = encode_all(&loaded, &mut *encoder);
        for name in loaded.case.json["videos"].as_object().expect("videos").keys() {
            let expected = loaded.case.values(&format!("video.{name}.embeds")).1;
            let alone = encoder.encode(&[&loaded.inputs[name]]).expect("a golden video fits").remove(0);
            assert_rows_close(&format!("{} {} {name}", case.0, backend.name()), &alone, &expected);
            assert_eq!(alone, together[name], "{} {name}: alone and in a batch", case.0);
        }
        for (k, (logits, expected)) in known_logits(case, backend, &["logits"]).iter().enumerate() {
            assert_logits_close(&format!("{} {} {k}", case.0, backend.name()), logits, &expected[0]);
        }
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(backend: &B) {
    for case in CASES {
        for (logits, expected) in known_logits(case, backend, &["logits", "logits_bf16"]) {
            assert_bf16_close(&format!("{} logits", case.0), &logits, &expected[0], &expected[1]);
        }
    }
}

fn greedy_tokens_match<B: Backend>(backend: &B) {
    for case in CASES {
        let loaded = load(case);
        let mut encoder = loaded.model.load_encoder(Modality::Image, backend).expect("encoder weights");
        let mut decoder = loaded.model.load_decoder(backend).expect("decoder weights");
        let embeds = encode_all(&loaded, &mut *encoder);
        let prompts = loaded.case.json["prompts"].as_array().expect("prompts");
        let tokens = |prompt: &serde_json::Value| -> Vec<u32> {
            serde_json::from_value(prompt["greedy_tokens"].clone()).expect("tokens")
        };
        let expected: Vec<Vec<u32>> = prompts.iter().map(tokens).collect();
        let sequences: Vec<Sequence> = (0..expected.len()).map(|k| sequence(&loaded, k, &embeds)).collect();
        // A chunk of 7 cuts prompts in the middle of frames.
        let mix = Mix { stagger: 3, chunk: 7 };
        let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: 2, mix };
        assert_greedy(backend, &mut *decoder, case.0, check);
    }
}

crate::case::tests_on_every_back_end!();

#[test]
fn cpu_in_int8_is_near() {
    for case in CASES {
        for (logits, expected) in known_logits(case, &cpu(Precision::Int8), &["logits"]) {
            assert_int8_close(&format!("{} logits", case.0), &logits, &expected[0]);
        }
    }
}

#[test]
fn greedy_tokens_are_the_same_alone_and_in_a_batch() {
    greedy_tokens_match(&cpu(Precision::F32));
}
