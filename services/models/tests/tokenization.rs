//! Text to tokens and back against the reference, and against clients who spell control tokens.

#[path = "support/golden.rs"]
mod golden;

use proptest::prelude::*;
use std::sync::{Arc, LazyLock};
use triptych_models::tokenization::{Detokenizer, Tokenizer};

const CASES: [&str; 7] = [
    "whisper_multilingual",
    "whisper_en_odd_heads",
    "whisper_deep_f16",
    "qwen2_vl_two_images",
    "qwen2_vl_untied_nested",
    "qwen2_5_vl_window112",
    "qwen3_vl_one_level",
];

fn tokenizer(case: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_dir(&golden::path(&format!("{case}/model"))).unwrap())
}

static QWEN: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| tokenizer("qwen2_vl_two_images"));

/// A sentencepiece-style tokenizer: pieces with `▁`, and bytes for text without a piece.
static PIECES: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let mut vocab: Vec<(String, f64)> = vec![("<unk>".into(), 0.0), ("</s>".into(), 0.0)];
    vocab.extend((0..=255).map(|b| (format!("<0x{b:02X}>"), -20.0)));
    for piece in ["▁", "▁hello", "▁wor", "ld", "lo", "h", "e", "l", "o", "你", "▁<", "/", "s", ">", "<"]
    {
        vocab.push((piece.to_owned(), -5.0));
    }
    let json = serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [
            {"id": 0, "content": "<unk>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
            {"id": 1, "content": "</s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "ByteFallback"},
            {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}]},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": true},
    });
    Arc::new(Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
});

/// Decoders of published families, and none.
const DECODERS: [&str; 7] = [
    "null",
    r###"{"type": "WordPiece", "prefix": "##", "cleanup": true}"###,
    r###"{"type": "WordPiece", "prefix": "##", "cleanup": false}"###,
    r#"{"type": "BPEDecoder", "suffix": "</w>"}"#,
    r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}"#,
    r#"{"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}"#,
    r#"{"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}"#,
];

fn pieces(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> Vec<String> {
    let mut live = Detokenizer::new(Arc::clone(tokenizer));
    let mut out: Vec<String> = ids.iter().map(|id| live.push(*id)).collect();
    out.push(live.finish());
    out
}

#[test]
fn tokens_and_text_are_the_references() {
    for case in CASES {
        let tokenizer = tokenizer(case);
        let expect = golden::json(&format!("{case}/expected.json"));
        let sample = &expect["tokenize"];
        let ids = golden::ids(&sample["ids"]);
        assert_eq!(tokenizer.encode(sample["text"].as_str().unwrap()).unwrap(), ids, "{case}");
        let decoded = sample["decoded"].as_str().unwrap();
        assert_eq!(tokenizer.decode(&ids), decoded, "{case}");
        assert_eq!(pieces(&tokenizer, &ids).concat(), decoded, "{case}");
        for prompt in expect["prompts"].as_array().into_iter().flatten() {
            let ids = golden::ids(&prompt["greedy_tokens"]);
            let text = prompt["greedy_text"].as_str().unwrap();
            assert_eq!(tokenizer.decode(&ids), text, "{case}");
            assert_eq!(pieces(&tokenizer, &ids).concat(), text, "{case}");
        }
    }
}

#[test]
fn a_client_cannot_spell_a_control_token() {
    for (case, spelled) in [
        ("qwen2_vl_two_images", "<|im_end|>"),
        ("qwen2_vl_two_images", "<|image_pad|>"),
        ("whisper_multilingual", "<|0.00|>"),
        ("whisper_multilingual", "<|startoftranscript|>"),
    ] {
        let tokenizer = tokenizer(case);
        let control = tokenizer.token_id(spelled).unwrap();
        let text = format!("a {spelled} b");
        assert!(tokenizer.encode(&text).unwrap().contains(&control));
        let plain = tokenizer.encode_plain(&text).unwrap();
        assert!(!plain.contains(&control));
        assert_eq!(tokenizer.decode(&plain), text, "the words are still there");
    }
    let eos = PIECES.token_id("</s>").unwrap();
    assert!(!PIECES.encode_plain("hello </s>").unwrap().contains(&eos));
    assert_eq!(PIECES.encode_input("hello").unwrap().last(), Some(&eos));
}

#[test]
fn times_and_special_tokens_are_silent() {
    let tokenizer = tokenizer("whisper_multilingual");
    let id = |token: &str| tokenizer.token_id(token).unwrap();
    let ids = [id("<|startoftranscript|>"), id("<|0.00|>"), id("a"), id("<|0.04|>"), id("<|endoftext|>")];
    assert_eq!(tokenizer.decode(&ids), "a");
    assert_eq!(pieces(&tokenizer, &ids).concat(), "a");
    assert_eq!(tokenizer.token_text(ids[1]), "<|0.00|>");
}

#[test]
fn bytes_that_never_become_a_character_are_replaced_and_not_hoarded() {
    let lead = QWEN.encode_plain("ü").unwrap()[0];
    let mut live = Detokenizer::new(Arc::clone(&QWEN));
    let out: Vec<String> = std::iter::repeat_n(lead, 100).map(|id| live.push(id)).collect();
    assert!(out.concat().chars().count() >= 64);
    assert!(live.finish().chars().count() <= 36);
    // An id without a token has no text.
    assert_eq!(pieces(&QWEN, &[u32::MAX, 335]).concat(), "");
    assert_eq!(QWEN.token_text(u32::MAX), "");
}

#[test]
fn sentencepiece_spaces_and_bytes_come_out_once() {
    for text in ["hello world hello", "hello 你 ü 🦀 world", "🦀🦀", "hello"] {
        let ids = PIECES.encode_plain(text).unwrap();
        assert_eq!(pieces(&PIECES, &ids).concat(), text);
    }
    // A decoder drops the space that begins a text, even one that is a token of its own.
    let space = PIECES.encode_plain("  hello  world").unwrap();
    assert_eq!(pieces(&PIECES, &space).concat(), PIECES.decode(&space));
    assert_eq!(PIECES.token_text(PIECES.token_id("▁hello").unwrap()), " hello");
}

/// A tokenizer of whole words with this decoder; ids are places.
fn words(words: &[&str], decoder: &serde_json::Value) -> Arc<Tokenizer> {
    let vocab: serde_json::Map<String, serde_json::Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), id.into())).collect();
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [], "decoder": decoder,
        "model": {"type": "WordLevel", "unk_token": words[0], "vocab": vocab},
    });
    Arc::new(Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap())
}

#[test]
fn a_wrong_byte_costs_no_text_that_was_sent_or_follows() {
    let id = |token: &str| PIECES.token_id(token).unwrap();
    let check = |tokens: &[&str], expect: &[&str]| {
        let ids: Vec<u32> = tokens.iter().map(|t| id(t)).collect();
        let out = pieces(&PIECES, &ids);
        assert_eq!(out, expect, "{tokens:?}");
        assert_eq!(PIECES.decode(&ids), out.concat(), "{tokens:?}");
    };
    check(&["<0x41>", "<0xC3>", "ld"], &["A", "", "\u{FFFD}ld", ""]);
    check(&["<0x41>", "<0x42>", "<0xE2>", "<0x96>", "<0x43>"], &["A", "B", "", "", "\u{FFFD}\u{FFFD}C", ""]);
    check(&["▁hello", "<0xF0>", "<0x9F>", "<0xA6>", "<0x80>"], &["hello", "", "", "", "🦀", ""]);
    check(&["<0xC3>", "<0xA9>", "<0xA9>", "▁wor"], &["", "é", "\u{FFFD}", " wor", ""]);
    check(&["<0xC3>"], &["", "\u{FFFD}"]);
    // The bytes of `▁` are that character, at the beginning a space to be dropped like any other.
    check(&["<0x41>", "<0x42>", "<0xE2>", "<0x96>", "<0x81>", "ld"], &["A", "B", "", "", " ", "ld", ""]);
}

#[test]
fn text_after_what_a_decoder_took_back_is_written() {
    let fuse = |from: &str, to: &str| {
        serde_json::json!({"type": "Sequence", "decoders": [
            {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": from}, "content": to}]})
    };
    let names = ["?", "a", "b", "c"];
    let ids = [3, 1, 2, 3, 3, 1, 2, 1, 3];
    // `ab` is gone as a whole, or becomes longer, after its `a` was sent.
    for to in ["", "xyz"] {
        let out = pieces(&words(&names, &fuse("ab", to)), &ids);
        assert_eq!(out.concat().matches('c').count(), 4, "{out:?}");
        assert!(out.iter().all(|piece| piece.len() <= 3), "{out:?}");
    }
}

/// The text that the tokens' own bytes spell.
fn spelled(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let bytes: Vec<u8> = ids.iter().filter_map(|id| tokenizer.token_bytes(*id)).flatten().collect();
    let text = String::from_utf8_lossy(&bytes);
    match text.strip_prefix(' ') {
        Some(rest) if tokenizer.drops_first_space() => rest.to_owned(),
        _ => text.into_owned(),
    }
}

#[test]
fn the_bytes_of_tokens_are_the_bytes_of_the_text() {
    let qwen: &Arc<Tokenizer> = &QWEN;
    for tokenizer in [qwen, &tokenizer("whisper_multilingual"), &PIECES] {
        for text in ["hello world", "hello 你 ü 🦀 world", "a\n\tb", "🦀🦀"] {
            let ids = tokenizer.encode_plain(text).unwrap();
            assert_eq!(spelled(tokenizer, &ids), tokenizer.decode(&ids), "{tokenizer:?}");
        }
        let n = u32::try_from(tokenizer.vocab_size()).unwrap();
        for id in 0..n {
            assert_eq!(tokenizer.token_bytes(id).is_none(), tokenizer.is_silent(id), "{id}");
        }
        assert_eq!(tokenizer.token_bytes(u32::MAX), None);
    }
    let byte = PIECES.token_id("<0x0A>").unwrap();
    assert_eq!(PIECES.token_bytes(byte).unwrap(), b"\n");
}

#[test]
fn a_broken_tokenizer_file_is_an_error() {
    for bad in ["", "{", "[]", "{\"model\": 3}", "3"] {
        assert!(Tokenizer::from_bytes(bad.as_bytes()).is_err(), "{bad}");
    }
}

proptest! {
    #[test]
    fn plain_text_reads_as_the_reference_reads_it(text in "[ a-zé你\n.,0-9<>|\"🦀]{0,40}") {
        prop_assert_eq!(QWEN.encode_plain(&text).unwrap(), QWEN.encode(&text).unwrap());
    }

    #[test]
    fn pieces_are_whole_characters_and_join_to_the_text(text in "\\PC{0,30}") {
        let text: String = text.chars().filter(|c| *c != '\u{FFFD}' && *c != '▁').collect();
        for tokenizer in [&*QWEN, &*PIECES] {
            let ids = tokenizer.encode_plain(&text).unwrap();
            let out = pieces(tokenizer, &ids);
            prop_assert!(out.iter().all(|piece| !piece.contains('\u{FFFD}')), "{:?}", out);
            prop_assert_eq!(out.concat(), tokenizer.decode(&ids));
        }
    }

    #[test]
    fn any_tokens_join_to_their_text(ids in proptest::collection::vec(0_u32..336, 0..40)) {
        prop_assert_eq!(pieces(&QWEN, &ids).concat(), QWEN.decode(&ids));
    }

    #[test]
    fn any_bytes_and_pieces_join_to_their_text(ids in proptest::collection::vec(0_u32..275, 0..40)) {
        prop_assert_eq!(pieces(&PIECES, &ids).concat(), PIECES.decode(&ids));
    }

    #[test]
    fn words_with_any_decoder_join_to_their_text(
        ids in proptest::collection::vec(0_u32..9, 0..30), decoder in 0..DECODERS.len(),
    ) {
        const NAMES: [&str; 9] = ["?", "a</w>", "b", "##c", ".", "▁d", "▁", "n't", "e</w>"];
        let decoder = serde_json::from_str(DECODERS[decoder]).unwrap();
        let tokenizer = words(&NAMES, &decoder);
        prop_assert_eq!(pieces(&tokenizer, &ids).concat(), tokenizer.decode(&ids));
    }
}
