//! Decoder prompts of text models: start tokens, forced tokens, languages, refusals, defaults of generation.

use super::golden;
use std::sync::Arc;
use triptych_core::prompt::{Message, MessagePart, Prompt, Role, SpeechTask, TextOrTokens};
use triptych_core::sampling::{BeamParams, EarlyStopping};
use triptych_core::{ContentKey, DType, EncodedItem, Extent, Fingerprint, ItemIdx, Modality};
use triptych_models::prompt::{
    AnswerLength, CrossInput, OutputKind, PreparedSequence, PromptBuilder, SamplingDefaults,
};
use triptych_models::{LoadFormat, Model, ModelError, ModelSource, PromptError};

fn source(dir: std::path::PathBuf) -> ModelSource {
    ModelSource { dir, name: None, format: LoadFormat::Safetensors, packed: None }
}

fn builder(case: &str) -> (Model, Arc<dyn PromptBuilder>) {
    let model = Model::open(&source(golden::path(&format!("{case}/model")))).expect("a golden model");
    let prompts = model.prompts();
    (model, prompts)
}

fn text_item(n_tokens: u32) -> EncodedItem {
    EncodedItem {
        key: ContentKey::from_bytes([1; 32]),
        fingerprint: Fingerprint::from_bytes([2; 32]),
        modality: Modality::Text,
        n_tokens,
        hidden: 32,
        dtype: DType::F32,
        extent: Extent::Tokens,
        checksum: [0; 32],
    }
}

fn tokens(ids: &[u32]) -> TextOrTokens {
    TextOrTokens::Tokens(ids.to_vec())
}

fn decoder(prompt: TextOrTokens) -> Prompt {
    Prompt::Explicit { encoder: None, decoder: prompt }
}

fn prepare(prompts: &dyn PromptBuilder, prompt: &Prompt) -> PreparedSequence {
    let mut all = prompts.prepare(prompt, &[text_item(9)]).expect("a prompt");
    assert_eq!(all.len(), 1);
    all.remove(0)
}

#[test]
fn an_empty_decoder_prompt_is_the_start_token_and_the_forced_first_one() {
    let (_, prompts) = builder("bart_large_cnn");
    for prompt in [decoder(tokens(&[])), Prompt::Singleton(tokens(&[])), decoder(tokens(&[2]))] {
        let sequence = prepare(&*prompts, &prompt);
        assert_eq!(sequence.tokens, [2]);
        assert_eq!(sequence.positions, [[0; 3]]);
        assert_eq!(sequence.next_position, 1);
        let cross = CrossInput { item: ItemIdx(0), first_row: 0, n_rows: 9, first_token: 0 };
        assert_eq!(sequence.cross, [cross]);
        assert_eq!(sequence.rules.steps, [[0].into()]);
        assert_eq!(*sequence.rules.last, [2]);
        assert_eq!(sequence.end_tokens, [2]);
        assert_eq!(sequence.output, OutputKind::Text);
    }
}

#[test]
fn the_start_token_is_prepended_unless_it_is_there_and_then_nothing_is_forced_first() {
    let (model, prompts) = builder("bart_large_cnn");
    let words = model.tokenizer().encode(" fox").expect("words");
    let expect: Vec<u32> = std::iter::once(2).chain(words.iter().copied()).collect();
    let given =
        [decoder(TextOrTokens::Text(" fox".into())), decoder(tokens(&words)), decoder(tokens(&expect))];
    for prompt in given {
        let sequence = prepare(&*prompts, &prompt);
        assert_eq!(sequence.tokens, expect);
        assert!(sequence.rules.steps.is_empty());
    }
}

#[test]
fn a_language_begins_an_answer_where_the_model_starts_with_one() {
    let (model, prompts) = builder("mbart_cc25");
    let [german, romanian] =
        ["de_DE", "ro_RO"].map(|code| model.tokenizer().token_id(code).expect("a language"));
    assert_eq!(prepare(&*prompts, &decoder(tokens(&[]))).tokens, [romanian]);
    assert_eq!(prepare(&*prompts, &decoder(TextOrTokens::Text("de_DE".into()))).tokens, [german]);
    assert_eq!(prompts.language(german), Some("de_DE"));
    assert_eq!(prompts.language(7), None);

    // mBART-50 starts with the end token, and the language follows.
    let (model, prompts) = builder("mbart_50");
    let [german, romanian] =
        ["de_DE", "ro_RO"].map(|code| model.tokenizer().token_id(code).expect("a language"));
    let default = prepare(&*prompts, &decoder(tokens(&[])));
    assert_eq!((default.tokens, default.rules.steps), (vec![2], vec![[german].into()]));
    let other = prepare(&*prompts, &decoder(TextOrTokens::Text("ro_RO".into())));
    assert_eq!(other.tokens, [2, romanian]);
    assert!(other.rules.steps.is_empty());
}

#[test]
fn a_translation_begins_with_the_language_that_is_asked_for() {
    for (case, spelling, code) in [("nllb_600m", "fra_Latn", "fra_Latn"), ("m2m_odd_heads", "__de__", "de")] {
        let (model, prompts) = builder(case);
        let language = model.tokenizer().token_id(spelling).expect("a language");
        let asked = prepare(&*prompts, &decoder(TextOrTokens::Text(spelling.into())));
        assert_eq!(asked.tokens, [2, language], "{case}");
        assert_eq!(prompts.language(language), Some(code), "{case}");
        let open = prepare(&*prompts, &decoder(tokens(&[])));
        assert_eq!((open.tokens, open.rules.steps), (vec![2], vec![]), "{case}");
    }
    let (model, prompts) = builder("nllb_forced_language");
    let german = model.tokenizer().token_id("deu_Latn").expect("a language");
    assert_eq!(prepare(&*prompts, &decoder(tokens(&[]))).rules.steps, [[german].into()]);
}

#[test]
fn a_padding_token_starts_and_is_never_written() {
    let (_, prompts) = builder("marian_en_de");
    let sequence = prepare(&*prompts, &decoder(tokens(&[])));
    assert_eq!(*sequence.rules.suppress, sequence.tokens[..]);
}

#[test]
fn refusals_of_the_decoder_name_the_supported_prompts() {
    let (model, prompts) = builder("bart_large_cnn");
    let vocab = model.spec().decoder.vocab;
    let image = EncodedItem { modality: Modality::Image, ..text_item(4) };
    let message = Message { role: Role::User, parts: vec![MessagePart::Text("hello".into())] };
    let both = Prompt::Explicit { encoder: Some(tokens(&[4])), decoder: tokens(&[]) };
    let long = decoder(tokens(&[4; 64]));
    let plain = decoder(tokens(&[]));
    let cases = [
        (plain.clone(), vec![], "the request has 0 items, this model's encoder reads one text item"),
        (
            plain.clone(),
            vec![text_item(1), text_item(1)],
            "the request has 2 items, this model's encoder reads one text item",
        ),
        (plain.clone(), vec![image], "item 0 is image, this model's encoder reads one text item"),
        (plain, vec![text_item(0)], "item 0 has no rows"),
        (long, vec![text_item(1)], "the prompt has 65 tokens, the model's context holds 64"),
        (
            Prompt::Chat(vec![message].into()),
            vec![text_item(1)],
            "this model has no chat template: it takes a prompt, not messages",
        ),
        (
            Prompt::Speech(SpeechTask::default()),
            vec![text_item(1)],
            "this model reads no speech: it takes a prompt, not a speech task",
        ),
        (
            both,
            vec![text_item(1)],
            "the encoder prompt must come as an item, since the encoder runs on another worker",
        ),
    ];
    for (prompt, items, expect) in cases {
        let refusal: PromptError = prompts.prepare(&prompt, &items).expect_err("a refusal");
        assert_eq!(refusal.to_string(), expect);
    }
    let alien = decoder(tokens(&[vocab as u32]));
    let refusal = prompts.prepare(&alien, &[text_item(1)]).expect_err("a refusal");
    assert_eq!(refusal.to_string(), format!("token {vocab} is not one of the model's {vocab}"));
}

#[test]
fn defaults_are_those_of_the_file() {
    let (_, prompts) = builder("bart_large_cnn");
    let beams = BeamParams { width: 4, length_penalty: 2.0, early_stopping: EarlyStopping::Immediately };
    let expect = SamplingDefaults {
        beams: Some(beams),
        no_repeat_ngram_size: Some(3),
        max_length: Some(AnswerLength::WithPrompt(60)),
        min_length: Some(AnswerLength::WithPrompt(5)),
        ..SamplingDefaults::default()
    };
    assert_eq!(prompts.sampling_defaults(), expect);
    assert_eq!(AnswerLength::WithPrompt(60).after(1), 59);
    assert_eq!(AnswerLength::WithPrompt(60).after(61), 0);
    assert_eq!(AnswerLength::New(60).after(1), 60);
    let (_, prompts) = builder("bart_odd_heads");
    assert_eq!(prompts.sampling_defaults(), SamplingDefaults::default());
}

/// A golden directory with another `generation_config.json`; `None`: without one, and its keys in `config.json`.
fn with_generation(case: &str, key: &str, value: serde_json::Value, in_config: bool) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(golden::path(&format!("{case}/model"))).expect("a golden directory") {
        let from = entry.expect("an entry").path();
        std::fs::copy(&from, copy.path().join(from.file_name().expect("a file"))).expect("a copy");
    }
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(copy.path().join(name)).expect("a file")).expect("JSON")
    };
    let mut generation = read("generation_config.json");
    generation[key] = value;
    if in_config {
        let mut config = read("config.json");
        let more = generation.as_object().expect("an object").clone();
        config.as_object_mut().expect("an object").extend(more);
        std::fs::write(copy.path().join("config.json"), config.to_string()).expect("a written file");
        std::fs::remove_file(copy.path().join("generation_config.json")).expect("the file was there");
    } else {
        std::fs::write(copy.path().join("generation_config.json"), generation.to_string())
            .expect("a written file");
    }
    copy
}

#[test]
fn models_from_before_the_generation_file_say_the_same_in_their_configuration() {
    let copy = with_generation("bart_large_cnn", "num_beams", 3.into(), true);
    let model = Model::open(&source(copy.path().to_owned())).expect("a model");
    assert_eq!(model.prompts().sampling_defaults().beams.map(|b| b.width), Some(3));
    assert_eq!(prepare(&*model.prompts(), &decoder(tokens(&[]))).rules.steps, [[0].into()]);
}

#[test]
fn settings_that_are_not_served_are_named() {
    let check = |key: &str, value: serde_json::Value, expect: &str| {
        let copy = with_generation("bart_large_cnn", key, value, false);
        let refusal: ModelError = Model::open(&source(copy.path().to_owned())).expect_err("a refusal");
        assert_eq!(refusal.to_string(), expect);
    };
    check("num_beams", 33.into(), "generation_config.json: num_beams is 33, expected at most 32");
    check(
        "early_stopping",
        "soon".into(),
        "generation_config.json: early_stopping is \"soon\", expected true, false or \"never\"",
    );
    check(
        "bad_words_ids",
        serde_json::json!([[]]),
        "generation_config.json: bad_words_ids is [[]], expected lists of token ids",
    );
    check(
        "decoder_start_token_id",
        9999.into(),
        "generation_config.json: decoder_start_token_id is 9999, expected a token below vocab_size 281",
    );
}

#[test]
fn bad_words_of_several_tokens_are_runs() {
    let copy = with_generation("marian_en_de", "bad_words_ids", serde_json::json!([[5], [6, 7]]), false);
    let model = Model::open(&source(copy.path().to_owned())).expect("a model");
    let rules = prepare(&*model.prompts(), &decoder(tokens(&[]))).rules;
    assert_eq!((&*rules.suppress, &*rules.bad_words), (&[5][..], &[vec![6, 7]][..]));
}
