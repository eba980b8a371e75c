//! Directories without a `tokenizer.json`, held against the code that the families were trained with.

#[path = "support/golden.rs"]
mod golden;

use proptest::prelude::*;
use std::sync::{Arc, LazyLock};
use triptych_models::tokenization::{Detokenizer, Tokenizer};

const CASES: [&str; 16] = [
    "t5",
    "mt5_bytes",
    "pegasus",
    "mbart",
    "mbart50",
    "xlm_roberta",
    "llama",
    "marian",
    "marian_separate",
    "bart",
    "blenderbot",
    "whisper",
    "qwen2",
    "byt5",
    "blenderbot_small",
    "bert",
];

fn open(case: &str) -> Arc<Tokenizer> {
    Arc::new(Tokenizer::from_dir(&golden::path(&format!("tokenizers/{case}/model"))).unwrap())
}

/// `check(tokenizer, record, "case: text")` for every text of every case.
fn each(mut check: impl FnMut(&Arc<Tokenizer>, &serde_json::Value, &str)) {
    for case in CASES {
        let tokenizer = open(case);
        let expect = golden::json(&format!("tokenizers/{case}/expected.json"));
        let texts = expect["texts"].as_array().unwrap();
        assert!(texts.len() >= 20);
        for record in texts {
            check(&tokenizer, record, &format!("{case}: {:?}", record["text"]));
        }
    }
}

#[test]
fn texts_become_the_references_tokens() {
    let mut wrong = Vec::new();
    each(|tokenizer, record, at| {
        let text = record["text"].as_str().unwrap();
        for (what, found) in [("ids", tokenizer.encode(text)), ("input", tokenizer.encode_input(text))] {
            let found = found.unwrap();
            let expect = golden::ids(&record[what]);
            if found != expect {
                let names =
                    |ids: &[u32]| ids.iter().filter_map(|id| tokenizer.token(*id)).collect::<Vec<_>>();
                wrong.push(format!("{at} {what}\n {:?}\n {:?}", names(&found), names(&expect)));
            }
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn tokens_become_the_references_text_at_once_and_one_by_one() {
    let mut wrong = Vec::new();
    each(|tokenizer, record, at| {
        let ids = golden::ids(&record["ids"]);
        let expect = record["decoded"].as_str().unwrap();
        let mut live = Detokenizer::new(Arc::clone(tokenizer));
        let mut one_by_one: String = ids.iter().map(|id| live.push(*id)).collect();
        one_by_one.push_str(&live.finish());
        for found in [tokenizer.decode(&ids), one_by_one] {
            if found != expect {
                wrong.push(format!("{at}\n {found:?}\n {expect:?}"));
            }
        }
    });
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn pieces(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> Vec<String> {
    let mut live = Detokenizer::new(Arc::clone(tokenizer));
    let mut out: Vec<String> = ids.iter().map(|id| live.push(*id)).collect();
    out.push(live.finish());
    out
}

#[test]
fn byt5_leaves_out_bytes_of_no_character_as_the_reference() {
    let byt5 = open("byt5");
    let broken = golden::json("tokenizers/byt5/expected.json")["broken"].clone();
    assert!(broken.as_array().unwrap().len() > 80);
    for record in broken.as_array().unwrap() {
        let ids = golden::ids(&record["ids"]);
        let expect = record["decoded"].as_str().unwrap();
        assert_eq!(byt5.decode(&ids), expect, "{ids:?}");
        assert_eq!(pieces(&byt5, &ids).concat(), expect, "{ids:?}");
    }
    // U+FFFD that the model wrote is text.
    let written = byt5.encode("a\u{FFFD}b").unwrap();
    assert_eq!(pieces(&byt5, &written).concat(), "a\u{FFFD}b");
    assert_eq!(byt5.token_text(3 + 0xC3), "\u{FFFD}");
}

#[test]
fn the_bytes_of_tokens_are_the_bytes_of_the_text() {
    each(|tokenizer, record, at| {
        let ids = golden::ids(&record["ids"]);
        let bytes: Vec<u8> = ids.iter().filter_map(|id| tokenizer.token_bytes(*id)).flatten().collect();
        let spelled = String::from_utf8_lossy(&bytes).into_owned();
        let text = tokenizer.decode(&ids);
        // A word's end is spelled with the word, also at the end of a text.
        let spelled = spelled.trim_end_matches(' ');
        let text = text.trim_end_matches(' ');
        let first = if tokenizer.drops_first_space() { spelled.trim_start_matches(' ') } else { spelled };
        assert_eq!(
            first,
            text.trim_start_matches(if tokenizer.drops_first_space() { ' ' } else { '\0' }),
            "{at}"
        );
    });
    for case in CASES {
        let tokenizer = open(case);
        let n = u32::try_from(tokenizer.vocab_size()).unwrap();
        for id in 0..n {
            let expect = tokenizer.token(id).is_some() && !tokenizer.is_silent(id);
            assert_eq!(tokenizer.token_bytes(id).is_some(), expect, "{case} {id}");
        }
        assert_eq!(tokenizer.token_bytes(n), None);
    }
}

#[test]
fn a_clients_control_token_is_read_as_the_characters_it_is() {
    for (case, spelled) in [
        ("t5", "</s>"),
        ("t5", "<extra_id_0>"),
        ("pegasus", "<mask_1>"),
        ("mbart", "</s>"),
        ("xlm_roberta", "<s>"),
        ("llama", "</s>"),
        ("marian", ">>deu<<"),
        ("bart", "<mask>"),
        ("whisper", "<|en|>"),
        ("byt5", "</s>"),
        ("bert", "[MASK]"),
    ] {
        let tokenizer = open(case);
        let control = tokenizer.token_id(spelled).unwrap();
        let text = format!("a {spelled} b");
        assert!(tokenizer.encode(&text).unwrap().contains(&control), "{case} {spelled}");
        let plain = tokenizer.encode_plain(&text).unwrap();
        assert!(!plain.contains(&control), "{case} {spelled}");
        assert!(plain.len() >= 4, "{case} {spelled}: {plain:?}");
    }
}

#[test]
fn a_tokens_text_has_its_space_and_its_spelling() {
    let pegasus = open("pegasus");
    let the = pegasus.token_id("▁the").unwrap();
    assert_eq!(pegasus.token_text(the), " the");
    assert_eq!(pegasus.token_text(pegasus.token_id("<mask_1>").unwrap()), "<mask_1>");
    let byt5 = open("byt5");
    assert_eq!(byt5.token_text(byt5.encode("a").unwrap()[0]), "a");
    assert_eq!(byt5.token_bytes(3 + 0xC3), Some(vec![0xC3]));
    let small = open("blenderbot_small");
    let ids = small.encode("the").unwrap();
    assert_eq!(small.decode(&ids), "the");
}

#[test]
fn a_tokenizers_digest_is_that_of_what_a_text_becomes() {
    let t5 = |config: &[u8]| {
        let dir = directory(&[("t5", "spiece.model")], &[("tokenizer_config.json", config)]);
        Tokenizer::from_dir(dir.path()).unwrap().digest()
    };
    let plain = t5(b"{\"tokenizer_class\": \"T5Tokenizer\"}");
    assert_eq!(plain, t5(b"{\"tokenizer_class\": \"T5TokenizerFast\", \"model_max_length\": 9}"));
    assert_ne!(plain, t5(b"{\"tokenizer_class\": \"T5Tokenizer\", \"extra_ids\": 3}"));
    let mut all: Vec<_> = CASES.iter().map(|case| open(case).digest().to_hex()).collect();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), CASES.len());
    assert!(open("marian").controls().any(|(name, _)| name == ">>deu<<"));
}

/// A directory with what is in `files`, taken from golden directories, and `more`.
fn directory(files: &[(&str, &str)], more: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (case, file) in files {
        std::fs::copy(golden::path(&format!("tokenizers/{case}/model/{file}")), dir.path().join(file))
            .unwrap();
    }
    for (file, bytes) in more {
        std::fs::write(dir.path().join(file), bytes).unwrap();
    }
    dir
}

fn refusal(files: &[(&str, &str)], more: &[(&str, &[u8])]) -> String {
    let dir = directory(files, more);
    Tokenizer::from_dir(dir.path()).expect_err("must be refused").to_string()
}

#[test]
fn a_directory_that_cannot_be_read_says_why() {
    let nothing = refusal(&[], &[]);
    for file in ["tokenizer.json", "spiece.model", "source.spm", "merges.txt", "vocab.txt", "ByT5Tokenizer"] {
        assert!(nothing.contains(file), "{nothing}");
    }
    let vocabulary = ("bart", "vocab.json");
    for (message, expect) in [
        (refusal(&[vocabulary], &[("merges.txt", b"#version\na b c\n")]), "merges.txt: line 2"),
        (refusal(&[vocabulary], &[("merges.txt", b"Q Q\n")]), "\"QQ\" is not in vocab.json"),
        (refusal(&[], &[("merges.txt", b""), ("vocab.json", b"{\"a\": 99999999999}")]), "the id of \"a\""),
        (refusal(&[], &[("merges.txt", b""), ("vocab.json", b"{\"a\": 1, \"b\": 1}")]), "both have the id 1"),
        (refusal(&[], &[("merges.txt", b""), ("vocab.json", b"{}")]), "has no entry"),
        (refusal(&[], &[("spiece.model", b"\xFF\xFF")]), "is no sentencepiece model"),
        (refusal(&[], &[("spiece.model", b"")]), "has no piece for unknown text"),
        (refusal(&[], &[("vocab.txt", b"a\nb\n")]), "[UNK]"),
        (
            refusal(
                &[("bart", "vocab.json"), ("bart", "merges.txt")],
                &[("added_tokens.json", b"{\"x\": -1}")],
            ),
            "added_tokens.json: the id of \"x\"",
        ),
        (
            refusal(
                &[("mbart", "sentencepiece.bpe.model")],
                &[(
                    "tokenizer_config.json",
                    b"{\"tokenizer_class\": \"MBartTokenizer\", \"src_lang\": \"xx\"}",
                )],
            ),
            "src_lang is \"xx\", expected one of ar_AR",
        ),
        (
            refusal(
                &[],
                &[(
                    "tokenizer_config.json",
                    b"{\"tokenizer_class\": \"ByT5Tokenizer\", \"extra_ids\": 99999}",
                )],
            ),
            "extra_ids is 99999",
        ),
    ] {
        assert!(message.contains(expect), "{message}");
    }
}

#[test]
fn the_files_of_a_directory_name_its_special_tokens() {
    let config =
        br#"{"tokenizer_class": "T5TokenizerFast", "extra_ids": 2, "additional_special_tokens": ["<new>"],
        "added_tokens_decoder": {"900": {"content": "<far>", "special": true}}}"#;
    let dir = directory(&[("t5", "spiece.model")], &[("tokenizer_config.json", config)]);
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let first = tokenizer.token_id("<extra_id_1>").unwrap();
    assert_eq!(tokenizer.token_id("<extra_id_0>"), Some(first + 1));
    assert_eq!(tokenizer.token_id("<far>"), Some(900));
    assert_eq!(tokenizer.token_id("<new>"), Some(901));
    assert_eq!(tokenizer.vocab_size(), 902);
    assert_eq!(tokenizer.token(800), None);
    assert_eq!(tokenizer.encode("<far><new>").unwrap(), [900, 901]);
    assert_eq!(tokenizer.decode(&[900, 901, 800]), "");
}

#[test]
fn only_tokens_that_are_called_special_are_silent() {
    let added = br#"{"<s_menu>": 600, "<|en|>": 601, "<sep/>": 602}"#;
    let map = br#"{"additional_special_tokens": ["<sep/>"]}"#;
    let dir = directory(
        &[("bart", "vocab.json"), ("bart", "merges.txt"), ("bart", "config.json")],
        &[("added_tokens.json", added), ("special_tokens_map.json", map)],
    );
    let tokenizer = Tokenizer::from_dir(dir.path()).unwrap();
    let silent = [600, 601, 602].map(|id| tokenizer.is_silent(id));
    assert_eq!(silent, [false, true, true]);
    let a = tokenizer.encode("a").unwrap()[0];
    assert_eq!(tokenizer.decode(&[600, a, 601, 602]), "<s_menu>a");
    assert!(!tokenizer.encode_plain("<s_menu>").unwrap().contains(&600));
}

#[test]
fn a_llama_directory_says_what_stands_around_an_input() {
    let around = |config: &[u8]| {
        let dir = directory(&[("llama", "tokenizer.model")], &[("tokenizer_config.json", config)]);
        let ids = Tokenizer::from_dir(dir.path()).unwrap().encode_input("hello").unwrap();
        (ids.first() == Some(&1), ids.last() == Some(&2))
    };
    assert_eq!(around(br#"{"tokenizer_class": "LlamaTokenizer"}"#), (true, false));
    let both = br#"{"tokenizer_class": "LlamaTokenizer", "add_bos_token": false, "add_eos_token": true}"#;
    assert_eq!(around(both), (false, true));
}

/// Every tokenizer, and its tokens of one byte.
static ALL: LazyLock<Vec<(Arc<Tokenizer>, Vec<u32>)>> = LazyLock::new(|| {
    let with_bytes = |case: &&str| {
        let tokenizer = open(case);
        let n = u32::try_from(tokenizer.vocab_size()).unwrap();
        let one = |id: &u32| tokenizer.token_bytes(*id).is_some_and(|bytes| bytes.len() == 1);
        let bytes = (0..n).filter(one).collect();
        (tokenizer, bytes)
    };
    CASES.iter().map(with_bytes).collect()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn any_tokens_of_any_tokenizer_join_to_their_text(
        case in 0..CASES.len(),
        drawn in proptest::collection::vec((any::<bool>(), any::<u32>()), 0..60),
    ) {
        let (tokenizer, bytes) = &ALL[case];
        let n = u32::try_from(tokenizer.vocab_size()).unwrap();
        let id = |(byte, at): &(bool, u32)| match *byte && !bytes.is_empty() {
            true => bytes[*at as usize % bytes.len()],
            false => at % n,
        };
        let ids: Vec<u32> = drawn.iter().map(id).collect();
        let mut live = Detokenizer::new(Arc::clone(tokenizer));
        let mut text = String::new();
        for (i, id) in ids.iter().enumerate() {
            text.push_str(&live.push(*id));
            let whole = tokenizer.decode(&ids[..=i]);
            // What is held back stands for three bytes of a character at most.
            let held = whole.strip_prefix(&text);
            prop_assert!(held.is_some_and(|h| h.chars().count() <= 3), "{} {:?} {:?}", CASES[case], text, whole);
        }
        text.push_str(&live.finish());
        prop_assert_eq!(text, tokenizer.decode(&ids));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn a_damaged_sentencepiece_model_is_an_error_or_a_tokenizer(at in 0..20_000_usize, byte: u8, cut: bool) {
        let mut bytes = golden::bytes("tokenizers/mt5_bytes/model/spiece.model");
        let at = at % bytes.len();
        bytes[at] = byte;
        if cut {
            bytes.truncate(at);
        }
        let config = br#"{"tokenizer_class": "T5Tokenizer"}"#;
        let dir = directory(&[], &[("spiece.model", &bytes), ("tokenizer_config.json", config)]);
        if let Ok(tokenizer) = Tokenizer::from_dir(dir.path()) {
            let ids = tokenizer.encode_input("Ｄie Straße\tist ﬁne 你 e\u{301} <extra_id_0>").unwrap();
            tokenizer.decode(&ids);
        }
    }
}
