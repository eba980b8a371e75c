//! CogAgent cases: two towers of one image, each an encoder of its own; rows of the one among the tokens, of the other by
//! cross-attention.

use crate::case::{
    Case, assert_bf16_close, assert_int8_close, assert_logits_close, assert_within, cpu, cuda, max_error,
};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use crate::pipeline::encoded;
use serde_json::Value;
use std::collections::BTreeSet;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Message, MessagePart, Prompt, Role, TextOrTokens};
use triptych_core::{DType, EncodedItem, EncoderId, ItemIdx, ItemOptions, Modality, TowerIdx};
use triptych_kernels::reference::ReferenceBackend;
use triptych_kernels::{Backend, Precision};
use triptych_models::decoder::Decoder;
use triptych_models::model::StageInventory;
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::prompt::PreparedSequence;

const CASES: [&str; 3] = ["cogagent_chat", "cogagent_vqa", "cogagent_equal_widths"];

/// Prompts whose logits are in the files.
const LOGITS_OF: [usize; 2] = [0, 3];

/// A value that is a step of 255 away, after the least standard deviation of the processor.
const PIXEL_TOLERANCE: f32 = 1.01 / 255.0 / 0.26;

/// An image for each tower, or its rows.
type Both<T> = [T; 2];

/// The two towers.
const TOWERS: Both<EncoderId> = [tower(0), tower(1)];

const fn tower(n: u8) -> EncoderId {
    EncoderId { modality: Modality::Image, tower: TowerIdx(n) }
}

/// Encoder inputs that the processors make of the images of a case.
fn images(case: &Case) -> Vec<Both<EncoderInput>> {
    let model = case.model();
    let processors: Vec<_> = model.encoders().map(|(_, processor)| processor).collect();
    let prepare = |image: &Value| {
        let file = case.dir.join(image["file"].as_str().expect("a file"));
        let bytes = std::fs::read(file).expect("an image");
        let options = ItemOptions::default();
        [0, 1].map(|tower: usize| {
            let input = processors[tower].preprocess(Modality::Image, &bytes, &options, &Limits::default());
            input.expect("a PNG")
        })
    };
    case.json["images"].as_object().expect("images").values().map(prepare).collect()
}

fn values(input: &mut EncoderInput) -> &mut Vec<f32> {
    match &mut input.features {
        Features::Patches(values) | Features::Tiles { patches: values, .. } => values,
        other => panic!("{other:?} are no patches"),
    }
}

/// Patches of image `i` by the reference's processor, for each tower.
fn exact_patches(case: &Case, i: usize) -> Both<Vec<f32>> {
    let model = case.model();
    let first = model.spec().encoder.as_ref().expect("an encoder");
    let towers: Vec<_> = first.towers().collect();
    [0, 1].map(|tower: usize| {
        let name = towers[tower].tower_name();
        crate::planes::patches(&case.values(&format!("image.{i}.{name}_pixels")), towers[tower])
    })
}

/// The images as the reference resized them: a byte of ours that differs by 1 would show in the rows.
fn exact_images(case: &Case) -> Vec<Both<EncoderInput>> {
    let mut images = images(case);
    for (i, image) in images.iter_mut().enumerate() {
        let exact = exact_patches(case, i);
        image.iter_mut().zip(exact).for_each(|(own, exact)| *values(own) = exact);
    }
    images
}

/// Rows of all images by each tower.
fn encode<B: Backend>(case: &Case, backend: &B) -> Vec<Both<Vec<f32>>> {
    let images = exact_images(case);
    let by = |id: EncoderId| {
        let of_tower: Vec<_> = images.iter().map(|image| &image[usize::from(id.tower.0)]).collect();
        let mut encoder = case.model().load_encoder(id, backend).expect("encoder weights");
        let all = encoder.encode(&of_tower).expect("own inputs fit");
        assert_eq!(
            encoder.encode(&[of_tower[1]]).expect("own inputs fit")[0],
            all[1],
            "alone and in a batch"
        );
        all
    };
    let [low, high] = TOWERS.map(by);
    low.into_iter().zip(high).map(|(low, high)| [low, high]).collect()
}

/// Widths of the towers' rows.
fn widths(case: &Case) -> Both<usize> {
    let model = case.model();
    let widths: Vec<_> = model.spec().encoder.iter().flat_map(|first| first.towers()).collect();
    [0, 1].map(|tower: usize| widths[tower].output_width())
}

/// The outputs of an image.
fn outputs(case: &Case, image: &Both<EncoderInput>) -> Both<EncodedItem> {
    let widths = widths(case);
    [0, 1].map(|tower: usize| encoded(&image[tower], Modality::Image, widths[tower]))
}

/// A prompt of the reference, laid out by us.
fn lay_out(case: &Case, prompt: &Value, images: &[Both<EncoderInput>]) -> PreparedSequence {
    let image = prompt["image"].as_u64().expect("a number") as usize;
    let text = |role, text: &Value| {
        let text = MessagePart::Text(text.as_str().expect("a text").to_owned());
        Message { role, parts: vec![text] }
    };
    let mut messages = Vec::new();
    for turn in prompt["history"].as_array().expect("turns") {
        messages.extend([text(Role::User, &turn[0]), text(Role::Assistant, &turn[1])]);
    }
    messages.push(text(Role::User, &prompt["text"]));
    messages[0].parts.insert(0, MessagePart::Item(ItemIdx(0)));
    let items = outputs(case, &images[image]);
    case.model().prompts().prepare(&Prompt::Chat(messages.into()), &items).expect("a prompt").remove(0)
}

/// Sequences of all prompts, over the rows of their images.
fn sequences(case: &Case, rows: &[Both<Vec<f32>>]) -> Vec<Sequence> {
    let [_, hidden] = widths(case);
    let images = images(case);
    let prompts = case.json["prompts"].as_array().expect("prompts");
    let sequence = |prompt: &Value| {
        let prepared = lay_out(case, prompt, &images);
        let [low, high] = &rows[prompt["image"].as_u64().expect("a number") as usize];
        let [cross] = prepared.cross[..] else { panic!("rows to cross-attend to") };
        assert_eq!(high.len(), cross.n_rows as usize * hidden, "{prompt}");
        assert_eq!([prepared.spans[0].item, cross.item], [0, 1].map(ItemIdx), "{prompt}");
        Sequence {
            adapter: None,
            embeds: vec![(prepared.spans[0].first_token as usize, low.clone())],
            positions: prepared.positions,
            next_position: prepared.next_position,
            prompt: prepared.tokens,
            cross: high.clone(),
            hidden,
        }
    };
    prompts.iter().map(sequence).collect()
}

fn load<B: Backend>(case: &Case, backend: &B) -> (Box<dyn Decoder>, Vec<Sequence>) {
    let decoder = case.model().load_decoder(backend).expect("decoder weights");
    let sequences = sequences(case, &encode(case, backend));
    (decoder, sequences)
}

/// Logits of the rows that the files have: ours, and those under each of `names`.
fn known_logits<B: Backend>(case: &Case, backend: &B, names: &[&str]) -> Vec<(Vec<f32>, Vec<Vec<f32>>)> {
    let (mut decoder, sequences) = load(case, backend);
    let vocab = decoder.info().vocab;
    let of_prompt = |k: usize| {
        let logits = teacher_forced(&mut *decoder, &sequences[k]);
        let rows = case.ids(&format!("prompt.{k}.logit_rows")).1;
        let own = rows.iter().flat_map(|r| &logits[*r as usize * vocab..][..vocab]).copied().collect();
        (own, names.iter().map(|name| case.values(&format!("prompt.{k}.{name}")).1).collect())
    };
    LOGITS_OF.map(of_prompt).into()
}

fn matches_reference<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        for (i, rows) in encode(&case, backend).iter().enumerate() {
            for (rows, tower) in rows.iter().zip(["low", "high"]) {
                let expected = case.values(&format!("image.{i}.{tower}_rows")).1;
                assert_logits_close(&format!("{name} {} image {i} {tower}", backend.name()), rows, &expected);
            }
        }
        for (own, expected) in known_logits(&case, backend, &["logits"]) {
            assert_logits_close(&format!("{name} {} logits", backend.name()), &own, &expected[0]);
        }
    }
}

fn bf16_is_as_near_as_the_references<B: Backend>(backend: &B) {
    for name in CASES {
        let case = Case::open(name);
        for (own, expected) in known_logits(&case, backend, &["logits", "logits_bf16"]) {
            assert_bf16_close(&format!("{name} logits"), &own, &expected[0], &expected[1]);
        }
    }
}

crate::case::tests_on_every_back_end!();

#[test]
fn cpu_in_int8_is_near() {
    for name in CASES {
        for (own, expected) in known_logits(&Case::open(name), &cpu(Precision::Int8), &["logits"]) {
            assert_int8_close(&format!("{name} logits"), &own, &expected[0]);
        }
    }
}

/// In chunks that end inside an image, before its last row and behind it.
fn greedy_tokens_match<B: Backend>(cases: &[&str], backend: &B) {
    for &name in cases {
        let case = Case::open(name);
        let (mut decoder, sequences) = load(&case, backend);
        let expected = case.greedy_tokens();
        for chunk in [5, 6] {
            let mix = Mix { stagger: 2, chunk };
            let check = GreedyCheck { sequences: &sequences, expected: &expected, n_alone: 2, mix };
            assert_greedy(backend, &mut *decoder, name, check);
        }
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
fn images_become_the_pixels_of_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        for (i, image) in images(&case).iter_mut().enumerate() {
            for (own, (tower, width)) in image.iter().zip(["low", "high"].into_iter().zip(widths(&case))) {
                let shape = case.values(&format!("image.{i}.{tower}_rows")).0;
                assert_eq!(shape, [own.n_tokens as usize, width], "{name} image {i} {tower}");
            }
            for (own, exact) in image.iter_mut().zip(exact_patches(&case, i)) {
                assert_within(&format!("{name} image {i}"), max_error(values(own), &exact), PIXEL_TOLERANCE);
            }
        }
    }
}

#[test]
fn prompts_become_the_tokens_and_positions_of_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        let images = images(&case);
        for (k, prompt) in case.json["prompts"].as_array().expect("prompts").iter().enumerate() {
            let prepared = lay_out(&case, prompt, &images);
            let expected: Vec<u32> = serde_json::from_value(prompt["input_ids"].clone()).expect("tokens");
            assert_eq!(prepared.tokens, expected, "{name} {prompt}");
            let (shape, ids) = case.ids(&format!("prompt.{k}.position_ids"));
            let positions: Vec<[u32; 3]> = ids[..shape[1]].iter().map(|p| [*p; 3]).collect();
            assert_eq!(prepared.positions, positions, "{name} {prompt}");
            assert_eq!(Some(u64::from(prepared.next_position)), prompt["next_position"].as_u64(), "{name}");
        }
    }
}

#[test]
fn prompts_that_the_published_code_does_not_know_are_refused() {
    let case = Case::open("cogagent_vqa");
    let prompts = case.model().prompts();
    let image = images(&case).remove(0);
    let item = outputs(&case, &image);
    let message = |role, parts| Message { role, parts };
    let text = |text: &str| MessagePart::Text(text.to_owned());
    let shown = || MessagePart::Item(ItemIdx(0));
    let check = |prompt: Prompt, n_items: usize, expect: &str| {
        let items = vec![item.clone(); n_items].concat();
        let error = prompts.prepare(&prompt, &items).expect_err(expect).to_string();
        assert!(error.contains(expect), "{error}");
    };
    let ask = || message(Role::User, vec![shown(), text("Why?")]);
    let chat = |messages: Vec<Message>| Prompt::Chat(messages.into());
    check(chat(vec![ask()]), 0, "0 items, this model reads one image with every prompt");
    check(chat(vec![ask()]), 2, "2 items, this model reads one image");
    check(chat(vec![message(Role::User, vec![text("Why?")])]), 1, "messages name 0 items");
    check(chat(vec![message(Role::System, vec![text("Be kind.")]), ask()]), 1, "answers one question");
    let far = TextOrTokens::Tokens(vec![5000]);
    check(Prompt::Singleton(far), 1, "token 5000");
    let [low, high] = item;
    let known = [low.n_tokens, high.n_tokens];
    let items = [low, EncodedItem { n_tokens: 7, ..high }];
    let error = prompts.prepare(&chat(vec![ask()]), &items).expect_err("other rows").to_string();
    let expected =
        format!("item 0 has [{}, 7] rows of its towers, an image of this model has {known:?}", known[0]);
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_prompt_of_tokens_has_the_image_behind_its_start() {
    let case = Case::open("cogagent_chat");
    let items = outputs(&case, &images(&case)[0]);
    let prompts = case.model().prompts();
    let start = case.json["prompts"][0]["input_ids"][0].as_u64().expect("a token") as u32;
    for tokens in [vec![40, 41], vec![start, 40, 41]] {
        let prompt = Prompt::Singleton(TextOrTokens::Tokens(tokens));
        let prepared = prompts.prepare(&prompt, &items).expect("a prompt").remove(0);
        assert_eq!(prepared.tokens.len(), 1 + 18 + 2);
        assert_eq!([prepared.tokens[0], prepared.tokens[19], prepared.tokens[20]], [start, 40, 41]);
        assert_eq!([prepared.positions[19], prepared.positions[20]], [[4; 3], [5; 3]]);
    }
}

/// The purpose of narrow cross-attention: its cache is smaller than self-attention's by the widths of their heads.
#[test]
fn the_cross_cache_is_as_narrow_as_its_heads() {
    for (name, parts) in [("cogagent_chat", 2), ("cogagent_equal_widths", 1)] {
        let info = Case::open(name).model().load_decoder(&ReferenceBackend::new()).expect("weights").info();
        assert_eq!(info.self_block_bytes, info.cross_block_bytes * parts, "{name}");
        assert_eq!(info.embedded_hidden, info.encoder_hidden * parts, "{name}");
    }
}

#[test]
fn towers_have_fingerprints_of_their_own() {
    let models = CASES.map(Case::open);
    let of = |case: &Case, id: EncoderId| case.model().fingerprint(id, DType::F32).expect("weights");
    let all: BTreeSet<_> = models.iter().flat_map(|case| TOWERS.map(|id| of(case, id))).collect();
    assert_eq!(all.len(), 2 * CASES.len());
    let third = models[0].model().fingerprint(tower(2), DType::F32).expect_err("two towers").to_string();
    assert!(third.contains("an encoder for image (tower 2)"), "{third}");
}

#[test]
fn each_tower_has_its_own_share_of_the_memory() {
    let encoder =
        Case::open("cogagent_chat").model().inventory().expect("headers").encoder.expect("an encoder");
    assert_eq!(encoder.towers.iter().map(|tower| tower.name).collect::<Vec<_>>(), ["low", "high"]);
    let sum =
        |of: fn(&StageInventory) -> usize| encoder.towers.iter().map(|tower| of(&tower.stage)).sum::<usize>();
    assert_eq!(sum(|stage| stage.n_tensors), encoder.stage.n_tensors);
    assert_eq!(sum(|stage| stage.loaded.bf16), encoder.stage.loaded.bf16);
    assert_eq!(encoder.towers.iter().map(|tower| tower.n_rows).sum::<usize>(), encoder.example.n_rows);
    assert_eq!(encoder.towers[1].n_rows, encoder.example.n_cross_rows);
}
