//! CogAgent cases: two towers of one image, rows of the one among the tokens, of the other by cross-attention.

use crate::case::{
    Case, assert_bf16_close, assert_int8_close, assert_logits_close, assert_within, cpu, cuda, max_error,
};
use crate::greedy::{GreedyCheck, Mix, Sequence, assert_greedy, teacher_forced};
use crate::pipeline::encoded;
use serde_json::Value;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Message, MessagePart, Prompt, Role, TextOrTokens};
use triptych_core::{ItemIdx, ItemOptions, Modality};
use triptych_kernels::reference::ReferenceBackend;
use triptych_kernels::{Backend, Precision};
use triptych_models::decoder::Decoder;
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::prompt::PreparedSequence;
use triptych_models::spec::EncoderSpec;

const CASES: [&str; 3] = ["cogagent_chat", "cogagent_vqa", "cogagent_equal_widths"];

/// Prompts whose logits are in the files.
const LOGITS_OF: [usize; 2] = [0, 3];

/// A value that is a step of 255 away, after the least standard deviation of the processor.
const PIXEL_TOLERANCE: f32 = 1.01 / 255.0 / 0.26;

/// Encoder inputs that the processor makes of the images of a case.
fn images(case: &Case) -> Vec<EncoderInput> {
    let processor = case.model().preprocess();
    let prepare = |image: &Value| {
        let file = case.dir.join(image["file"].as_str().expect("a file"));
        let bytes = std::fs::read(file).expect("an image");
        let options = ItemOptions::default();
        processor.preprocess(Modality::Image, &bytes, &options, &Limits::default()).expect("a PNG")
    };
    case.json["images"].as_object().expect("images").values().map(prepare).collect()
}

fn towers(input: &mut EncoderInput) -> [&mut Vec<f32>; 2] {
    let Features::Towers(inputs) = &mut input.features else { panic!("inputs of two towers") };
    inputs.each_mut().map(|input| match &mut input.features {
        Features::Patches(values) | Features::Tiles { patches: values, .. } => values,
        other => panic!("{other:?} are no patches"),
    })
}

/// Patches of image `i` by the reference's processor, for each tower.
fn exact_patches(case: &Case, i: usize) -> [Vec<f32>; 2] {
    let model = case.model();
    let first = model.spec().encoder.as_ref().expect("an encoder");
    let second = first.extras.second.as_deref().expect("a second tower");
    let of = |name: &str, spec: &EncoderSpec| {
        crate::towers::patches(&case.values(&format!("image.{i}.{name}_pixels")), spec)
    };
    [of("low", first), of("high", second)]
}

/// The images as the reference resized them: a byte of ours that differs by 1 would show in the rows.
fn exact_images(case: &Case) -> Vec<EncoderInput> {
    let mut images = images(case);
    for (i, image) in images.iter_mut().enumerate() {
        let exact = exact_patches(case, i);
        towers(image).into_iter().zip(exact).for_each(|(own, exact)| *own = exact);
    }
    images
}

fn encode<B: Backend>(case: &Case, backend: &B) -> Vec<Vec<f32>> {
    let mut encoder = case.model().load_encoder(Modality::Image, backend).expect("encoder weights");
    let images = exact_images(case);
    let all = encoder.encode(&images.iter().collect::<Vec<_>>()).expect("own inputs fit");
    assert_eq!(encoder.encode(&[&images[1]]).expect("own inputs fit")[0], all[1], "alone and in a batch");
    all
}

/// A prompt of the reference, laid out by us.
fn lay_out(case: &Case, prompt: &Value, images: &[EncoderInput], hidden: usize) -> PreparedSequence {
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
    let items = [encoded(&images[image], Modality::Image, hidden)];
    case.model().prompts().prepare(&Prompt::Chat(messages.into()), &items).expect("a prompt").remove(0)
}

/// Sequences of all prompts, over the rows of their images.
fn sequences(case: &Case, rows: &[Vec<f32>], hidden: usize) -> Vec<Sequence> {
    let images = images(case);
    let prompts = case.json["prompts"].as_array().expect("prompts");
    let sequence = |prompt: &Value| {
        let prepared = lay_out(case, prompt, &images, hidden);
        let rows = &rows[prompt["image"].as_u64().expect("a number") as usize];
        let [cross] = prepared.cross[..] else { panic!("rows to cross-attend to") };
        let (low, high) = rows.split_at(cross.first_row as usize * hidden);
        assert_eq!(high.len(), cross.n_rows as usize * hidden, "{prompt}");
        Sequence {
            adapter: None,
            embeds: vec![(prepared.spans[0].first_token as usize, low.to_vec())],
            positions: prepared.positions,
            next_position: prepared.next_position,
            prompt: prepared.tokens,
            cross: high.to_vec(),
            hidden,
        }
    };
    prompts.iter().map(sequence).collect()
}

fn load<B: Backend>(case: &Case, backend: &B) -> (Box<dyn Decoder>, Vec<Sequence>) {
    let decoder = case.model().load_decoder(backend).expect("decoder weights");
    let sequences = sequences(case, &encode(case, backend), decoder.info().encoder_hidden);
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
            let expected = case.values(&format!("image.{i}.rows")).1;
            assert_logits_close(&format!("{name} {} image {i}", backend.name()), rows, &expected);
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
            assert_greedy(&mut *decoder, name, check);
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
            let n_rows = case.values(&format!("image.{i}.rows")).0[0];
            assert_eq!(image.n_tokens as usize, n_rows, "{name} image {i}");
            for (own, exact) in towers(image).into_iter().zip(exact_patches(&case, i)) {
                assert_within(&format!("{name} image {i}"), max_error(own, &exact), PIXEL_TOLERANCE);
            }
        }
    }
}

#[test]
fn prompts_become_the_tokens_and_positions_of_the_reference() {
    for name in CASES {
        let case = Case::open(name);
        let images = images(&case);
        let hidden = case.model().spec().encoder.as_ref().expect("an encoder").output_width();
        for (k, prompt) in case.json["prompts"].as_array().expect("prompts").iter().enumerate() {
            let prepared = lay_out(&case, prompt, &images, hidden);
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
    let item = encoded(&images(&case)[0], Modality::Image, 20);
    let message = |role, parts| Message { role, parts };
    let text = |text: &str| MessagePart::Text(text.to_owned());
    let image = || MessagePart::Item(ItemIdx(0));
    let check = |prompt: Prompt, n_items: usize, expect: &str| {
        let items = vec![item.clone(); n_items];
        let error = prompts.prepare(&prompt, &items).expect_err(expect).to_string();
        assert!(error.contains(expect), "{error}");
    };
    let ask = || message(Role::User, vec![image(), text("Why?")]);
    let chat = |messages: Vec<Message>| Prompt::Chat(messages.into());
    check(chat(vec![ask()]), 0, "0 items, this model reads one image with every prompt");
    check(chat(vec![ask()]), 2, "2 items, this model reads one image");
    check(chat(vec![message(Role::User, vec![text("Why?")])]), 1, "messages name 0 items");
    check(chat(vec![message(Role::System, vec![text("Be kind.")]), ask()]), 1, "answers one question");
    let far = TextOrTokens::Tokens(vec![5000]);
    check(Prompt::Singleton(far), 1, "token 5000");
    let short = EncoderInput { n_tokens: 7, ..images(&case)[0].clone() };
    let items = [encoded(&short, Modality::Image, 20)];
    let error = prompts.prepare(&chat(vec![ask()]), &items).expect_err("other rows").to_string();
    assert!(error.contains("item 0 has 7 rows, an image of this model has 71"), "{error}");
}

#[test]
fn a_prompt_of_tokens_has_the_image_behind_its_start() {
    let case = Case::open("cogagent_chat");
    let items = [encoded(&images(&case)[0], Modality::Image, 16)];
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
        assert_eq!(info.row_parts.get(), parts, "{name}");
    }
}
