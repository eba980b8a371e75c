//! Encoder text: tokens of the model's own post-processor, token ids as they are, limits that name both sides.

use super::golden;
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{Extent, Failure, FailureClass, ItemForm, ItemOptions, Modality};
use triptych_models::preprocess::{EncoderInput, Features, Preprocess, TextProcessor};
use triptych_models::tokenization::Tokenizer;
use triptych_models::{ItemError, PromptError};

fn processor(case: &str, max_tokens: usize) -> (Arc<Tokenizer>, TextProcessor) {
    let tokenizer = Tokenizer::from_dir(&golden::path(&format!("{case}/model"))).expect("a tokenizer");
    let tokenizer = Arc::new(tokenizer);
    let vocab = tokenizer.vocab_size();
    (tokenizer.clone(), TextProcessor::new(tokenizer, vocab, max_tokens))
}

fn read(with: &TextProcessor, bytes: &[u8], form: ItemForm) -> Result<EncoderInput, ItemError> {
    let options = ItemOptions { form, ..ItemOptions::default() };
    with.preprocess(Modality::Text, bytes, &options, &Limits::default())
}

fn as_bytes(ids: &[u32]) -> Vec<u8> {
    ids.iter().flat_map(|id| id.to_le_bytes()).collect()
}

#[test]
fn a_text_gets_what_the_post_processor_adds_and_token_ids_nothing() {
    for case in ["bart_large_cnn", "mbart_50", "pegasus_xsum"] {
        let (_, with) = processor(case, 64);
        let expected = golden::json(&format!("{case}/expected.json"));
        for (text, ids) in expected["texts"]
            .as_array()
            .expect("texts")
            .iter()
            .zip(expected["inputs"].as_array().expect("inputs"))
        {
            let ids = golden::ids(ids);
            let input =
                read(&with, text.as_str().expect("a text").as_bytes(), ItemForm::Plain).expect("a text");
            assert_eq!(input.extent, Extent::Tokens);
            assert_eq!(input.n_tokens as usize, ids.len());
            assert_eq!(input.features, Features::Tokens(ids.clone()));
            let bare = &ids[..ids.len() - 1];
            let given = read(&with, &as_bytes(bare), ItemForm::TokenIds).expect("token ids");
            assert_eq!(given.features, Features::Tokens(bare.to_vec()));
        }
    }
}

#[test]
fn a_text_of_the_whole_context_fits_and_one_token_more_is_refused() {
    let (tokenizer, _) = processor("bart_large_cnn", 1);
    let n = tokenizer.encode_input("How many people are there?").expect("a text").len();
    let (_, fits) = processor("bart_large_cnn", n);
    assert!(read(&fits, b"How many people are there?", ItemForm::Plain).is_ok());
    let (_, small) = processor("bart_large_cnn", n - 1);
    let refusal = read(&small, b"How many people are there?", ItemForm::Plain).expect_err("too long");
    let expect = format!("the text has {n} tokens, the encoder's context holds {}", n - 1);
    assert_eq!(refusal.to_string(), expect);
    // One class on both sides, so one status.
    let prompt = PromptError::TooLong { actual: n, limit: n - 1 };
    for failure in [Failure::from(refusal), Failure::from(prompt)] {
        assert_eq!((failure.class, failure.param.as_deref()), (FailureClass::TooLarge, Some("prompt")));
    }
    let ids = as_bytes(&vec![5; n]);
    assert_eq!(read(&small, &ids, ItemForm::TokenIds).expect_err("too long").to_string(), expect);
}

#[test]
fn a_request_names_the_language_of_its_text() {
    let asked = |with: &TextProcessor, code: &str, form| {
        let options = ItemOptions { form, src_lang: Some(code.into()), ..ItemOptions::default() };
        with.preprocess(Modality::Text, b"hello", &options, &Limits::default())
    };
    // mBART has the language behind the end, mBART-50 before the text; both from their files and from a tokenizer.json.
    for (case, first) in
        [("mbart_cc25", false), ("mbart_50", true), ("tokenizers/mbart", false), ("tokenizers/mbart50", true)]
    {
        let (tokenizer, with) = processor(case, 64);
        let Features::Tokens(default) = read(&with, b"hello", ItemForm::Plain).expect("a text").features
        else {
            panic!("tokens")
        };
        let place = if first { 0 } else { default.len() - 1 };
        let known = tokenizer.token(default[place]).expect("a language");
        let other = if known == "en_XX" { "de_DE" } else { "en_XX" };
        let mut expect = default.clone();
        expect[place] = tokenizer.token_id(other).expect("a language");
        let got = asked(&with, other, ItemForm::Plain).expect("a text");
        assert_eq!(got.features, Features::Tokens(expect), "{case}");
        let same = asked(&with, &known, ItemForm::Plain).expect("a text");
        assert_eq!(same.features, Features::Tokens(default), "{case}");
        let refused = asked(&with, "xx_XX", ItemForm::Plain).expect_err("a refusal").to_string();
        assert!(refused.starts_with("src_lang is \"xx_XX\", allowed are "), "{refused}");
        assert!(refused.contains(other) && !refused.contains("</s>"), "{refused}");
        let ids = asked(&with, other, ItemForm::TokenIds).expect_err("a refusal").to_string();
        assert!(ids.contains("token ids are read as they are"), "{ids}");
    }
    let (_, with) = processor("bart_large_cnn", 64);
    let refused = asked(&with, "en_XX", ItemForm::Plain).expect_err("a refusal").to_string();
    assert_eq!(refused, "this model's encoder is told no language, so it takes no src_lang");
}

#[test]
fn translators_are_told_the_language_of_a_text_by_its_code() {
    for (case, code, spelling) in [("nllb_600m", "deu_Latn", "deu_Latn"), ("m2m_odd_heads", "zh", "__zh__")] {
        let (tokenizer, with) = processor(case, 64);
        let options = ItemOptions { src_lang: Some(code.into()), ..ItemOptions::default() };
        let input =
            with.preprocess(Modality::Text, b"the dog", &options, &Limits::default()).expect("a text");
        let Features::Tokens(ids) = input.features else { panic!("tokens") };
        assert_eq!(ids[0], tokenizer.token_id(spelling).expect("a language"), "{case}");
        assert_eq!(ids[1..ids.len() - 1], tokenizer.encode("the dog").expect("tokens"), "{case}");
    }
}

#[test]
fn input_that_is_no_text_is_refused() {
    let (tokenizer, with) = processor("bart_large_cnn", 64);
    let vocab = tokenizer.vocab_size();
    let check = |bytes: &[u8], form, expect: &str| {
        assert_eq!(read(&with, bytes, form).expect_err("a refusal").to_string(), expect);
    };
    check(b"", ItemForm::Plain, "the text has no bytes");
    check(b"ab\xff", ItemForm::Plain, "the text is no UTF-8 after 2 bytes");
    check(&[1, 0, 0], ItemForm::TokenIds, "token ids are 4 bytes each, the item has 3");
    check(
        &as_bytes(&[vocab as u32]),
        ItemForm::TokenIds,
        &format!("token {vocab} is not one of the encoder's {vocab}"),
    );
    let limits = Limits::default();
    let image = with.preprocess(Modality::Image, b"x", &ItemOptions::default(), &limits);
    assert_eq!(image.expect_err("a refusal").to_string(), "this model reads text items, not image");
    let options = ItemOptions { vad: true, ..ItemOptions::default() };
    let refused = with.preprocess(Modality::Text, b"x", &options, &limits).expect_err("a refusal");
    assert_eq!(
        refused.to_string(),
        "this model does not take the item option vad, it takes tokens, src_lang"
    );
}
