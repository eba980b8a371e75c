//! Structured output: whatever the logits, the text fits; whatever the constraint, the failure names it.

use crate::golden::repo;
use std::sync::Arc;
use triptych_core::sampling::Constraint;
use triptych_core::{Failure, FailureClass};
use triptych_engine::constraint::{Constraints, GrammarMatcher};
use triptych_engine::sampler::Sampler;
use triptych_models::tokenization::Tokenizer;

/// Tokens past the tokenizer's that the logits have, as published models do.
const PADDING: usize = 6;

/// A byte-level vocabulary, and one of pieces whose texts begin with a space.
fn vocabularies() -> Vec<Arc<Tokenizer>> {
    let levels =
        std::fs::read(repo("tests/golden/qwen2_vl_two_images/model/tokenizer.json")).expect("golden");
    let bytes = (0..=255).map(|b| format!("\"<0x{b:02X}>\": {b}"));
    let pieces =
        ["▁", "a", "b", "▁{", "}", "\\\"", ":", "▁ab", "{\\\"", "12", "3", ",", "▁\\\"", "true", "."];
    let pieces = pieces.iter().enumerate().map(|(i, p)| format!("\"{p}\": {}", 256 + i));
    let vocab: Vec<String> = bytes.chain(pieces).collect();
    let sentence = format!(
        r#"{{"version": "1.0", "added_tokens": [], "model": {{"type": "BPE", "byte_fallback": true, "merges": [],
            "vocab": {{{}}}}}, "decoder": {{"type": "Sequence", "decoders": [
            {{"type": "Replace", "pattern": {{"String": "▁"}}, "content": " "}}, {{"type": "ByteFallback"}},
            {{"type": "Fuse"}}, {{"type": "Strip", "content": " ", "start": 1, "stop": 0}}]}}}}"#,
        vocab.join(",")
    );
    let read = |bytes: &[u8]| Arc::new(Tokenizer::from_bytes(bytes).expect("a tokenizer"));
    vec![read(&levels), read(sentence.as_bytes())]
}

fn constraints(tokenizer: &Arc<Tokenizer>) -> Constraints {
    Constraints::new(Arc::clone(tokenizer), tokenizer.vocab_size() + PADDING)
}

/// The draws of seed `seed` from even logits within a constraint: the text, once it is complete or may end.
fn write(tokenizer: &Arc<Tokenizer>, constraint: &Constraint, seed: u64) -> String {
    let vocab = tokenizer.vocab_size() + PADDING;
    // A padding token ends: an end token has no text.
    let end = vocab as u32 - 1;
    let mut follower = GrammarMatcher::new(constraints(tokenizer).compile(constraint).expect("a constraint"));
    let params = triptych_core::sampling::SamplingParams { seed: Some(seed), ..Default::default() };
    let (sampler, mut tokens) = (Sampler::new(&params, 0), Vec::new());
    for _ in 0..400 {
        let mut logits = vec![0.0; vocab];
        // What ends comes gladly, so that texts stay short.
        logits[end as usize] = 4.0;
        for closing in ["\"", "}", "]"] {
            if let [token] = tokenizer.encode_plain(closing).expect("tokens")[..] {
                logits[token as usize] = 3.0;
            }
        }
        follower.mask(&tokens).expect("within limits").apply(&[end], &mut logits);
        let token = sampler.choose(&logits, tokens.len()).expect("a way on");
        if token == end {
            break;
        }
        tokens.push(token);
        if follower.is_complete(&tokens).expect("within limits") {
            break;
        }
    }
    tokenizer.decode(&tokens)
}

fn schema() -> Constraint {
    Constraint::JsonSchema(
        r##"{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "tags":
            {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2}}, "required": ["name"],
            "additionalProperties": false, "$defs": {"tag": {"enum": ["a", "b"]}}}"##
            .to_owned(),
    )
}

#[test]
fn texts_fit_their_constraint_for_every_vocabulary_and_seed() {
    type Fits = fn(&str) -> bool;
    let cases: [(Constraint, Fits); 5] = [
        (Constraint::Choice(vec!["yes".into(), "no (at all)".into(), "a.b".into(), "ü\n".into()]), |text| {
            ["yes", "no (at all)", "a.b", "ü\n"].contains(&text)
        }),
        (Constraint::Regex(r"[0-9]{2}/[0-9]{2}\.".into()), |text| {
            let bytes = text.as_bytes();
            bytes.len() == 6
                && bytes[2] == b'/'
                && bytes[5] == b'.'
                && text.matches(char::is_numeric).count() == 4
        }),
        (Constraint::Grammar("start: sum\nsum: N (\"+\" N)*\nN: /[0-9]{1,3}/\n".into()), |text| {
            text.split('+').all(|n| (1..=3).contains(&n.len()) && n.bytes().all(|b| b.is_ascii_digit()))
        }),
        (schema(), |text| {
            let value: serde_json::Value = serde_json::from_str(text).unwrap_or_default();
            let tag = |t: &serde_json::Value| t == "a" || t == "b";
            value["name"].as_str().is_some_and(|n| n.chars().count() <= 8)
                && value["tags"].as_array().is_none_or(|t| t.len() <= 2 && t.iter().all(tag))
        }),
        (Constraint::JsonObject, |text| serde_json::from_str::<serde_json::Map<_, _>>(text).is_ok()),
    ];
    for tokenizer in vocabularies() {
        for (constraint, fits) in &cases {
            for seed in 0..6 {
                let text = write(&tokenizer, constraint, seed);
                assert!(fits(&text), "{constraint:?} with seed {seed}: {text:?}");
            }
        }
    }
}

#[test]
fn a_matcher_follows_the_tokens_back_and_forth() {
    let tokenizer = &vocabularies()[0];
    let vocab = tokenizer.vocab_size() + PADDING;
    let compiled = constraints(tokenizer).compile(&schema()).expect("a schema");
    let tokens = tokenizer.encode_plain(r#"{"name": "ab", "tags": ["a"]}"#).expect("tokens");
    let allowed = |follower: &mut GrammarMatcher, n: usize| {
        let mut logits = vec![0.0; vocab];
        follower.mask(&tokens[..n]).expect("within limits").apply(&[vocab as u32 - 1], &mut logits);
        logits
    };
    let mut kept = GrammarMatcher::new(compiled.clone());
    let n = tokens.len();
    for place in [0, 1, 2, n, 3, n - 1, 0, n, 5, 4] {
        let fresh = allowed(&mut GrammarMatcher::new(compiled.clone()), place);
        assert_eq!(allowed(&mut kept, place), fresh, "{place} of {n}");
    }
    let mut fork = kept.clone();
    assert_eq!(allowed(&mut fork, n), allowed(&mut kept, n));
    assert!(kept.is_complete(&tokens).expect("within limits"));
}

/// The text of a model that writes white space wherever it may; `None` if it does not end.
fn write_spaces(tokenizer: &Arc<Tokenizer>, constraint: &Constraint) -> Option<String> {
    let vocab = tokenizer.vocab_size() + PADDING;
    let end = vocab as u32 - 1;
    let is_space = |token: &u32| {
        let bytes = tokenizer.token_bytes(*token).unwrap_or_default();
        !bytes.is_empty() && bytes.iter().all(u8::is_ascii_whitespace)
    };
    let spaces: Vec<u32> = (0..end).filter(is_space).collect();
    let mut matcher = GrammarMatcher::new(constraints(tokenizer).compile(constraint).expect("a constraint"));
    let mut tokens = Vec::new();
    for _ in 0..400 {
        let mut logits = vec![0.0; vocab];
        matcher.mask(&tokens).expect("within limits").apply(&[end], &mut logits);
        let may = |token: &u32| logits[*token as usize].is_finite();
        let token = spaces.iter().copied().find(may).or_else(|| (0..=end).rev().find(may)).expect("a way on");
        if token == end {
            return Some(tokenizer.decode(&tokens));
        }
        tokens.push(token);
        if matcher.is_complete(&tokens).expect("within limits") {
            return Some(tokenizer.decode(&tokens));
        }
    }
    None
}

#[test]
fn white_space_between_the_parts_of_json_is_bounded() {
    let object = |options: &str| {
        let schema = r#""type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "array", "items":
            {"type": "boolean"}, "maxItems": 2}}, "required": ["a", "b"], "additionalProperties": false"#;
        Constraint::JsonSchema(format!("{{{schema}{options}}}"))
    };
    let longest =
        |text: &str| text.split(|c: char| !c.is_whitespace()).map(str::len).max().unwrap_or_default();
    for tokenizer in &vocabularies() {
        let text = write_spaces(tokenizer, &object("")).expect("an end");
        assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok_and(|v| v["a"].is_u64()), "{text:?}");
        assert!((1..=22).contains(&longest(&text)), "{text:?}");
        let compact = object(r#", "x-guidance": {"whitespace_flexible": false}"#);
        let text = write_spaces(tokenizer, &compact).expect("an end");
        assert!(text.starts_with("{\"a\":") && !text.contains(char::is_whitespace), "{text:?}");
        let own = object(r#", "x-guidance": {"whitespace_pattern": "\\t"}"#);
        let text = write_spaces(tokenizer, &own).expect("an end");
        assert!(text.contains("\"a\"\t:\t"), "{text:?}");
    }
}

fn refusal(constraint: Constraint) -> Failure {
    let field = constraint.field();
    let tokenizer = &vocabularies()[0];
    let failure = constraints(tokenizer).compile(&constraint).expect_err("a refusal");
    assert_eq!(failure.class, FailureClass::InvalidArgument, "{failure}");
    assert_eq!(failure.param.as_deref(), Some(field), "{failure}");
    assert!(failure.message.contains(field) && failure.message.lines().count() == 1, "{failure}");
    failure
}

#[test]
fn what_is_no_constraint_is_refused_by_its_name_and_reason() {
    let check_refusal = |constraint: Constraint, word: &str| {
        let failure = refusal(constraint);
        assert!(failure.message.contains(word), "{word}: {failure}");
    };
    check_refusal(Constraint::JsonSchema("{".into()), "JSON");
    check_refusal(Constraint::JsonSchema("[1]".into()), "object");
    check_refusal(Constraint::JsonSchema(r#"{"type": "nonsense"}"#.into()), "nonsense");
    check_refusal(
        Constraint::JsonSchema(r#"{"type": "string", "minLength": 5, "maxLength": 2}"#.into()),
        "ength",
    );
    check_refusal(Constraint::Regex("(a".into()), "(");
    check_refusal(Constraint::Regex("a(?=b)".into()), "look");
    check_refusal(Constraint::Grammar("begin: \"a\"".into()), "start");
    check_refusal(Constraint::Grammar("start: nothing".into()), "nothing");
    check_refusal(Constraint::Grammar(String::new()), "");
}

#[test]
fn what_is_nested_too_deeply_is_refused_before_anything_recurses() {
    refusal(Constraint::Regex("(".repeat(100_000)));
    refusal(Constraint::Regex("[".repeat(100_000)));
    refusal(Constraint::Grammar(format!("start: {}\"a\"{}", "(".repeat(50_000), ")".repeat(50_000))));
    refusal(Constraint::JsonSchema(format!("{}1{}", "[".repeat(50_000), "]".repeat(50_000))));
}

/// The library may refuse it at once, on the way or not at all. The contract is that it returns, and that any
/// failure is the client's.
#[test]
fn work_is_bounded_whatever_the_constraint() {
    let consts: Vec<String> = (0..300).map(|i| format!(r#"{{"const": "{i}x{i}"}}"#)).collect();
    let wide = format!(r#"{{"allOf": [{{"anyOf": [{0}]}}, {{"anyOf": [{0}]}}]}}"#, consts.join(","));
    let many: Vec<String> = (0..1000).map(|i| format!("choice number {i}")).collect();
    let tokenizer = &vocabularies()[0];
    for constraint in [
        Constraint::Regex("(a{1,900}){1,900}b{1,9000}".into()),
        Constraint::Regex("(.*a.*b){1,50}[^a]{1,400}(x|xy|xyz){1,800}".into()),
        Constraint::JsonSchema(wide),
        Constraint::JsonSchema(r#"{"type": "string", "minLength": 10, "maxLength": 200000}"#.into()),
        Constraint::Grammar("start: start start | \"a\"?".into()),
        Constraint::Choice(many),
    ] {
        let compiled = constraints(tokenizer).compile(&constraint);
        let followed = compiled.and_then(|compiled| {
            let mut follower = GrammarMatcher::new(compiled);
            let mut tokens = Vec::new();
            for _ in 0..60 {
                let mut logits = vec![0.0; tokenizer.vocab_size() + PADDING];
                follower.mask(&tokens)?.apply(&[], &mut logits);
                let Some(token) = logits.iter().position(|l| l.is_finite()) else { break };
                tokens.push(token as u32);
            }
            Ok(())
        });
        if let Err(failure) = followed {
            assert_eq!(failure.class, FailureClass::InvalidArgument, "{failure}");
        }
    }
}
