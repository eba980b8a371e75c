//! Prompts of decoders of text alone: what they take and what they refuse; their tokens are held by `golden_models`.

use super::golden;
use super::{image, item, one, refused, task, text, user};
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Message, Prompt, Role, TextOrTokens};
use triptych_core::{Extent, Modality};
use triptych_models::ModelError;
use triptych_models::prompt::{ChatText, PromptBuilder, PromptLimits};
use triptych_models::tokenization::Tokenizer;

const LIMITS: PromptLimits = PromptLimits { vocab: 336, max_context: 80 };

fn open(dir: &Path) -> Result<ChatText, ModelError> {
    ChatText::from_dir(dir, Arc::new(Tokenizer::from_dir(dir).unwrap()), LIMITS)
}

fn builder(case: &str) -> (ChatText, Tokenizer) {
    let dir = golden::path(&format!("{case}/model"));
    (open(&dir).unwrap(), Tokenizer::from_dir(&dir).unwrap())
}

/// A copy of a model directory whose `tokenizer_config.json` has another template, or none.
pub fn with_template(case: &str, template: Option<&str>) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(golden::path(&format!("{case}/model"))).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, copy.path().join(from.file_name().unwrap())).unwrap();
    }
    let mut json = golden::json(&format!("{case}/model/tokenizer_config.json"));
    let object = json.as_object_mut().unwrap();
    match template {
        Some(template) => object.insert("chat_template".into(), template.into()),
        None => object.remove("chat_template"),
    };
    std::fs::write(copy.path().join("tokenizer_config.json"), json.to_string()).unwrap();
    copy
}

#[test]
fn a_client_that_spells_control_tokens_writes_words() {
    let (builder, tokenizer) = builder("qwen2_tied");
    let end = tokenizer.token_id("<|im_end|>").unwrap();
    let count = |content: &str| {
        let tokens = one(&builder, &user(vec![text(content)]), &[]).tokens;
        tokens.iter().filter(|token| **token == end).count()
    };
    assert_eq!(count("hi"), 2, "of the system text and of the question");
    assert_eq!(count("<|im_end|>"), 2);
}

#[test]
fn parts_of_a_message_are_lines_of_its_text() {
    let (builder, _) = builder("llama_tied");
    let parts = one(&builder, &user(vec![text("a"), text("b")]), &[]).tokens;
    assert_eq!(parts, one(&builder, &user(vec![text("a\nb")]), &[]).tokens);
    assert_ne!(parts, one(&builder, &user(vec![text("ab")]), &[]).tokens);
}

#[test]
fn a_prompt_begins_as_the_tokenizer_has_it_and_ids_are_as_they_are() {
    let (builder, tokenizer) = builder("llama_tied");
    let start = tokenizer.token_id("<|begin_of_text|>").unwrap();
    let written = |prompt: TextOrTokens| one(&builder, &Prompt::Singleton(prompt), &[]);
    let of_text = written(TextOrTokens::Text("the north".into()));
    assert_eq!(of_text.tokens[0], start);
    assert_eq!(of_text.tokens[1..], tokenizer.encode("the north").unwrap());
    assert_eq!(of_text.positions.last(), Some(&[of_text.next_position - 1; 3]));
    let ids = of_text.tokens[1..].to_vec();
    assert_eq!(written(TextOrTokens::Tokens(ids.clone())).tokens, ids);
    let decoder = TextOrTokens::Tokens(ids.clone());
    assert_eq!(one(&builder, &Prompt::Explicit { encoder: None, decoder }, &[]).tokens, ids);
}

#[test]
fn what_is_not_taken_is_refused_in_words() {
    let (builder, _) = builder("mistral_windowed");
    let tokens = |ids: Vec<u32>| Prompt::Singleton(TextOrTokens::Tokens(ids));
    let image_item = item(Modality::Image, Extent::Grid { t: 1, h: 2, w: 2 }, 1);
    let ask = user(vec![text("hi")]);
    refused(
        &builder,
        &ask,
        &[image_item],
        "item 0 is image, this model reads the text of its prompt, no items",
    );
    refused(&builder, &user(vec![text("hi"), image(0)]), &[], "names item 0, the request has 0 items");
    refused(&builder, &tokens(vec![336]), &[], "token 336 is not one of the model's 336");
    refused(&builder, &tokens(vec![]), &[], "the prompt is empty");
    refused(&builder, &tokens(vec![1; 81]), &[], "81");
    let both = Prompt::Explicit {
        encoder: Some(TextOrTokens::Text("a".into())),
        decoder: TextOrTokens::Text("b".into()),
    };
    refused(&builder, &both, &[], "this model has no encoder");
    refused(&builder, &Prompt::Speech(task(None, false)), &[], "reads text, not speech");
    let answered_first = Prompt::Chat(vec![Message { role: Role::Assistant, parts: vec![text("a")] }].into());
    refused(&builder, &answered_first, &[], "roles must alternate");
    refused(&builder, &Prompt::Chat(vec![].into()), &[], "no messages");
}

#[test]
fn a_base_model_takes_prompts_and_no_messages() {
    let dir = with_template("llama_tied", None);
    let builder = open(dir.path()).unwrap();
    assert!(!builder.has_chat_template());
    refused(&builder, &user(vec![text("hi")]), &[], "no chat template: it takes a prompt, not messages");
    assert!(!one(&builder, &Prompt::Singleton(TextOrTokens::Text("hi".into())), &[]).tokens.is_empty());
}

#[test]
fn a_template_that_does_not_compile_is_an_error_at_start() {
    let dir = with_template("llama_tied", Some("{% for m in messages %}"));
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(&error, ModelError::Format { .. }), "{error}");
}
