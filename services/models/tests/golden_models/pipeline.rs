//! All four stages as [`Model`] hands them out: from the bytes of an item to tokens.

use crate::case::{Case, assert_within, cpu, max_error};
use crate::greedy::{Mix, Sequence, greedy};
use crate::qwen_vl;
use crate::vision;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Message, MessagePart, Prompt, Role, TextOrTokens};
use triptych_core::{ContentKey, DType, EncodedItem, Fingerprint, ItemIdx, ItemOptions, Modality};
use triptych_kernels::Precision;
use triptych_models::preprocess::EncoderInput;

/// Mels of the processor differ from the reference's by up to 1e-5 or so, and the encoder passes that on.
const STATES_FROM_AUDIO: f32 = 1e-3;

/// Metadata of an item, as a PD worker gets them.
pub fn encoded(input: &EncoderInput, modality: Modality, hidden: usize) -> EncodedItem {
    EncodedItem {
        key: ContentKey::from_bytes([0; 32]),
        fingerprint: Fingerprint::from_bytes([0; 32]),
        modality,
        n_tokens: input.n_tokens,
        hidden: hidden as u32,
        dtype: DType::F32,
        extent: input.extent.clone(),
        checksum: [0; 32],
    }
}

#[test]
fn images_and_messages_become_the_tokens_of_the_reference() {
    for name in qwen_vl::CASES {
        let case = Case::open(name);
        let model = case.model();
        let backend = cpu(Precision::F32);
        let mut encoder = model.load_encoder(Modality::Image, &backend).expect("encoder weights");
        let mut decoder = model.load_decoder(&backend).expect("decoder weights");
        let processor = model.preprocess();
        let prompts = model.prompts();
        let expected = case.greedy_tokens();
        let mut sequences = Vec::new();
        for prompt in case.json["prompts"].as_array().expect("prompts") {
            let inputs: Vec<EncoderInput> = prompt["images"]
                .as_array()
                .expect("images")
                .iter()
                .map(|image| {
                    let file = case.json["images"][image.as_str().expect("a name")]["file"].as_str();
                    let bytes = std::fs::read(case.dir.join(file.expect("a file"))).expect("an image");
                    processor
                        .preprocess(Modality::Image, &bytes, &ItemOptions::default(), &Limits::default())
                        .expect("a PNG")
                })
                .collect();
            let rows = encoder.encode(&inputs.iter().collect::<Vec<_>>()).expect("own inputs fit");
            let items: Vec<EncodedItem> =
                inputs.iter().map(|i| encoded(i, Modality::Image, encoder.hidden())).collect();
            let text = prompt["text"].as_str().expect("a text").to_owned();
            let mut parts: Vec<MessagePart> =
                (0..items.len() as u32).map(|i| MessagePart::Item(ItemIdx(i))).collect();
            parts.push(MessagePart::Text(text));
            let message = Message { role: Role::User, parts };
            let prepared = prompts.prepare(&Prompt::Chat(vec![message].into()), &items).expect("a prompt");
            let prepared = &prepared[0];
            let embeds = prepared.spans.iter();
            sequences.push(Sequence {
                prompt: prepared.tokens.clone(),
                positions: prepared.positions.clone(),
                next_position: prepared.next_position,
                adapter: None,
                embeds: embeds.map(|s| (s.first_token as usize, rows[s.item.0 as usize].clone())).collect(),
                cross: vec![],
                hidden: encoder.hidden(),
            });
        }
        let mix = Mix { stagger: 1, chunk: 16 };
        assert_eq!(greedy(&mut *decoder, &sequences, expected[0].len(), mix), expected, "{name}");
    }
}

#[test]
fn an_image_and_a_decoder_prompt_become_the_tokens_of_the_reference() {
    for name in vision::CASES {
        let case = Case::open(name);
        let model = case.model();
        let backend = cpu(Precision::F32);
        let mut encoder = model.load_encoder(Modality::Image, &backend).expect("encoder weights");
        let mut decoder = model.load_decoder(&backend).expect("decoder weights");
        let processor = model.preprocess();
        let prompts = model.prompts();
        let mut n_exact = 0;
        let golden_images = vision::golden_images(&case);
        for (golden, exact) in golden_images.iter().zip(vision::exact_inputs(&case, &golden_images)) {
            let input = vision::prepare(&*processor, &golden.bytes, golden.asked.as_ref());
            let rows = encoder.encode(&[&input]).expect("own input fits").remove(0);
            let items = [encoded(&input, Modality::Image, encoder.hidden())];
            let prepare = |prompt| prompts.prepare(&prompt, &items).expect("a prompt").remove(0);
            let text = TextOrTokens::Text(golden.prompt_text.clone());
            let prepared = prepare(Prompt::Singleton(text.clone()));
            assert_eq!(prepared.tokens, golden.prompt, "{name} {}", golden.name);
            assert_eq!(prepared, prepare(Prompt::Explicit { encoder: None, decoder: text }), "{name}");
            let ids = TextOrTokens::Tokens(golden.prompt.clone());
            assert_eq!(prepared, prepare(Prompt::Singleton(ids)), "{name}");
            // Nothing at all is the model's own start, which is that of the first golden.
            let nothing = prepare(Prompt::Singleton(TextOrTokens::Tokens(vec![])));
            assert_eq!(nothing.tokens, golden_images[0].prompt, "{name}");
            // A resize may be a step of 255 away from the reference's in some pixels, which random weights may
            // turn into another token.
            if max_error(vision::patches(&input), vision::patches(&exact)) > 1e-6 {
                continue;
            }
            n_exact += 1;
            let sequence = vision::sequence(&prepared.tokens, rows, encoder.hidden());
            let n_steps = golden.greedy_tokens.len();
            let tokens = greedy(&mut *decoder, &[sequence], n_steps, Mix::PLAIN).remove(0);
            assert_eq!(tokens, golden.greedy_tokens, "{name} {}", golden.name);
        }
        println!("{name}: {n_exact} of {} resized to the bit", golden_images.len());
        assert!(n_exact > 0, "{name}: no golden is resized to the bit");
    }
}

#[test]
fn a_sound_becomes_the_states_of_the_reference() {
    for name in ["whisper_en_odd_heads", "whisper_multilingual"] {
        let case = Case::open(name);
        let model = case.model();
        let wav = wav(&case.values("waveform").1);
        let input = model
            .preprocess()
            .preprocess(Modality::Audio, &wav, &ItemOptions::default(), &Limits::default())
            .expect("a WAV");
        let backend = cpu(Precision::F32);
        let mut encoder = model.load_encoder(Modality::Audio, &backend).expect("encoder weights");
        let rows = encoder.encode(&[&input]).expect("own input fits").remove(0);
        assert_eq!(rows.len(), input.n_tokens as usize * encoder.hidden());
        let expected = case.values("encoder_last_hidden_state").1;
        assert_within(&format!("{name} states"), max_error(&rows, &expected), STATES_FROM_AUDIO);
    }
}

/// A WAV file of one f32 channel at 16 kHz.
pub fn wav(samples: &[f32]) -> Vec<u8> {
    let n_bytes = 4 * samples.len() as u32;
    let mut wav = b"RIFF".to_vec();
    wav.extend((36 + n_bytes).to_le_bytes());
    wav.extend(b"WAVEfmt ");
    wav.extend(16u32.to_le_bytes());
    for half in [3u16, 1] {
        wav.extend(half.to_le_bytes());
    }
    for word in [16_000u32, 64_000] {
        wav.extend(word.to_le_bytes());
    }
    for half in [4u16, 32] {
        wav.extend(half.to_le_bytes());
    }
    wav.extend(b"data");
    wav.extend(n_bytes.to_le_bytes());
    wav.extend(samples.iter().flat_map(|s| s.to_le_bytes()));
    wav
}
