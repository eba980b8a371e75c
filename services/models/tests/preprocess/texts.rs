//! Encoder text: tokens of the model's own post-processor, token ids as they are, limits that name both sides.

use super::golden;
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemForm, ItemOptions, Modality};
use triptych_models::ItemError;
use triptych_models::preprocess::{EncoderInput, Features, Preprocess, TextProcessor};
use triptych_models::tokenization::Tokenizer;

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
    let expect = format!("the text is {n} tokens, the limit is {} tokens", n - 1);
    assert_eq!(refusal.to_string(), expect);
    let ids = as_bytes(&vec![5; n]);
    assert_eq!(read(&small, &ids, ItemForm::TokenIds).expect_err("too long").to_string(), expect);
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
    assert_eq!(refused.to_string(), "this model does not take the item option vad, it takes tokens");
}
