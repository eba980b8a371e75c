//! Prompts of models that read audio among their tokens: conversations, transcriptions, layouts of the client's own.

use crate::case::Case;
use crate::pipeline::encoded;
use serde_json::Value;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Message, MessagePart, Prompt, Role, SpeechKind, SpeechTask, TextOrTokens};
use triptych_core::{EncodedItem, ItemOptions, Modality};
use triptych_models::Model;

const QWEN_ASR: [&str; 3] = ["qwen3_asr_odd_heads", "qwen3_asr_three_layers", "qwen3_asr_original"];
const VOXTRAL: [&str; 3] = ["voxtral_odd_heads", "voxtral_three_layers", "voxtral_long_window"];

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("token ids")
}

/// Metadata of a case's audio.
fn item(case: &Case, model: &Model, audio: &str) -> EncodedItem {
    let file = case.json["audios"][audio]["file"].as_str().expect("a file");
    let bytes = std::fs::read(case.dir.join(file)).expect("a WAV");
    let input =
        model.preprocess().preprocess(Modality::Audio, &bytes, &ItemOptions::default(), &Limits::default());
    let encoder = model.spec().encoder.as_ref().expect("an encoder");
    encoded(&input.expect("an audio"), Modality::Audio, encoder.output_width())
}

#[test]
fn transcriptions_are_laid_out_as_published() {
    for name in QWEN_ASR.into_iter().chain(VOXTRAL) {
        let case = Case::open(name);
        let model = case.model();
        assert!(model.prompts().transcribes());
        for expected in case.json["transcriptions"].as_array().expect("transcriptions") {
            let audio = expected["audio"].as_str().expect("a name");
            let items = [item(&case, &model, audio)];
            let language = expected["language"].as_str().map(str::to_owned);
            let prompt = expected["prompt"].as_str().map(|text| TextOrTokens::Text(text.to_owned()));
            let task = SpeechTask { language, prompt, ..SpeechTask::default() };
            let prepared =
                model.prompts().prepare(&Prompt::Speech(task), &items).expect("a prompt").remove(0);
            assert_eq!(prepared.tokens, ids(&expected["input_ids"]), "{name} {expected}");
            assert_eq!(prepared.spans.len(), 1);
            assert_eq!(prepared.spans[0].n_tokens, items[0].n_tokens);
        }
    }
}

#[test]
fn what_a_transcription_cannot_be_is_refused_by_name() {
    let case = Case::open(VOXTRAL[0]);
    let model = case.model();
    let items = [item(&case, &model, "5121")];
    let check = |task: SpeechTask, items: &[EncodedItem], expect: &str| {
        let refusal = model.prompts().prepare(&Prompt::Speech(task), items).unwrap_err().to_string();
        assert!(refusal.contains(expect), "{refusal}");
    };
    let plain = SpeechTask::default;
    check(SpeechTask { kind: SpeechKind::Translate, ..plain() }, &items, "translations");
    check(SpeechTask { timestamps: true, ..plain() }, &items, "writes no times");
    check(SpeechTask { language: Some("[INST]".into()), ..plain() }, &items, "a code of two letters");
    check(plain(), &[items[0].clone(), items[0].clone()], "1 audio placeholders, the request 2 audio items");
    let words = || Some(TextOrTokens::Text("Ada".into()));
    check(SpeechTask { prompt: words(), ..plain() }, &items, "reads no prompt with a transcription");
    let case = Case::open("qwen2_audio_odd_heads");
    let model = case.model();
    let refusal = model.prompts().prepare(&Prompt::Speech(plain()), &items).unwrap_err().to_string();
    assert!(refusal.contains("has no prompt of its own for transcripts"), "{refusal}");
    assert!(!model.prompts().transcribes());
}

#[test]
fn a_transcription_by_a_conversation_knows_its_languages_and_writes_no_control_tokens_of_a_client() {
    let case = Case::open(QWEN_ASR[0]);
    let model = case.model();
    let items = [item(&case, &model, "5121")];
    let prepare = |task: SpeechTask| model.prompts().prepare(&Prompt::Speech(task), &items);
    let plain = SpeechTask::default;
    let check = |task: SpeechTask, expect: &str| {
        let refusal = prepare(task).unwrap_err().to_string();
        assert!(refusal.contains(expect), "{refusal}");
    };
    check(SpeechTask { language: Some("tlh".into()), ..plain() }, "language is \"tlh\", allowed are ar, cs,");
    let ids = Some(TextOrTokens::Tokens(vec![1]));
    check(SpeechTask { prompt: ids, ..plain() }, "as text, not as tokens");
    check(SpeechTask { timestamps: true, ..plain() }, "writes no times");
    let words = Some(TextOrTokens::Text("a<|im_end|>b".into()));
    let tokens = prepare(SpeechTask { prompt: words, ..plain() }).expect("a prompt").remove(0).tokens;
    let end = model.tokenizer().token_id("<|im_end|>").expect("a token");
    assert_eq!(tokens.iter().filter(|id| **id == end).count(), 2);
}

#[test]
fn tekken_reads_texts_and_conversations_as_mistrals_own_code() {
    for name in VOXTRAL {
        let case = Case::open(name);
        let model = case.model();
        for text in case.json["texts"].as_array().expect("texts") {
            let words = text["text"].as_str().expect("a text");
            let found = model.tokenizer().encode_plain(words).expect("tokens");
            assert_eq!(found, ids(&text["ids"]), "{name} {words:?}");
            assert_eq!(model.tokenizer().decode(&found), words, "{name}");
        }
        let expected = &case.json["conversation"];
        let messages = expected["messages"].as_array().expect("messages").iter().map(|message| Message {
            role: match message["role"].as_str() {
                Some("system") => Role::System,
                Some("user") => Role::User,
                _ => Role::Assistant,
            },
            parts: message["parts"]
                .as_array()
                .expect("parts")
                .iter()
                .map(|part| MessagePart::Text(part.as_str().expect("a text").to_owned()))
                .collect(),
        });
        let chat = Prompt::Chat(messages.collect::<Vec<_>>().into());
        let prepared = model.prompts().prepare(&chat, &[]).expect("a prompt").remove(0);
        assert_eq!(prepared.tokens, ids(&expected["input_ids"]), "{name}");
    }
}

#[test]
fn an_audio_without_a_placeholder_stands_before_the_text_between_its_marks() {
    let case = Case::open("qwen2_audio_odd_heads");
    let model = case.model();
    let items = [item(&case, &model, "5121")];
    let token = |text: &str| model.tokenizer().token_id(text).expect("a token");
    let [bos, audio, eos] = ["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"].map(token);
    let prepare = |text: &str| {
        let prompt = Prompt::Singleton(TextOrTokens::Text(text.into()));
        model.prompts().prepare(&prompt, &items).expect("a prompt").remove(0).tokens
    };
    let rows = vec![audio; items[0].n_tokens as usize];
    let words = model.tokenizer().encode_plain("hi").expect("tokens");
    assert_eq!(prepare("hi"), [vec![bos], rows.clone(), vec![eos], words.clone()].concat());
    assert_eq!(prepare("<|AUDIO|>hi"), [rows, words].concat());
}
