//! Grammars of calls, as texts and as the grammar library reads them.

use super::super::AnswerPiece;
use super::super::parser::ToolParser;
use super::*;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::ApproximateTokEnv;
use llguidance::{Matcher, ParserFactory};
use std::sync::Arc;

#[test]
fn a_grammar_has_each_tool_in_the_syntax_of_the_model() {
    let tool = |name: &str, is_strict| Tool { name: name.into(), is_strict, ..Tool::default() };
    let (f, g) = (tool("f", true), tool("g", false));
    let format =
        |tool_syntax, has_named_args| ChatFormat { tool_syntax, has_named_args, ..ChatFormat::default() };
    let hermes = call_grammar(format(Some(ToolSyntax::Hermes), false), &[&f, &g], false);
    for line in [
        r#"start: "<tool_call>\n" call ("\n</tool_call>\n<tool_call>\n" call){0,15} "\n</tool_call>""#,
        "call: call_0 | call_1",
        r#"call_1: "{\"name\": \"g\", \"arguments\": " arguments_1 "}""#,
        r#"arguments_0: %json {"type":"object","additionalProperties":false,"x-guidance":{"whitespace_pattern":" ?"}}"#,
    ] {
        assert!(hermes.lines().any(|found| found == line), "{hermes}");
    }
    assert!(hermes.contains(r#""lenient":true"#));
    let named = call_grammar(format(Some(ToolSyntax::Mistral), true), &[&f], true);
    assert!(named.contains(r#"start: "[TOOL_CALLS]" call """#), "{named}");
    assert!(named.contains(r#"call_0: "f[ARGS]" arguments_0 """#), "{named}");
    let strict = strict_grammar(format(Some(ToolSyntax::Hermes), false), &[&f]);
    for line in [
        "start: segment* REST",
        r"segment: opening WS call END",
        r"opening[lazy]: /(?s:.*)<tool_call>/",
        r"END: /\s{0,2}<\/tool_call>/",
    ] {
        assert!(strict.lines().any(|found| found == line), "{strict}");
    }
    let bare = call_grammar(format(None, false), &[&f], true);
    assert!(bare.contains(r#"call_0: "{\"name\": \"f\", \"parameters\": " arguments_0 "}""#), "{bare}");
}

fn format(tool_syntax: ToolSyntax, has_named_args: bool) -> ChatFormat {
    ChatFormat { tool_syntax: Some(tool_syntax), has_named_args, ..ChatFormat::default() }
}

/// Bytes of a text that fit a grammar, and whether it may end there.
fn fits(grammar: &str, text: &str) -> (usize, bool) {
    let bytes = ApproximateTokEnv::single_byte_env();
    let factory = ParserFactory::new_simple(&bytes).unwrap();
    let grammar = TopLevelGrammar::from_lark(grammar.to_owned());
    let mut matcher = Matcher::new(factory.create_parser(grammar));
    let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
    let n = matcher.try_consume_tokens(&tokens).unwrap();
    (n, matcher.is_accepting().unwrap())
}

/// The arguments of every call that the parser reads.
fn parsed(syntax: ToolSyntax, text: &str) -> Vec<String> {
    let mut parser = ToolParser::new(syntax, Arc::from(["f".to_owned()]));
    let mut calls = Vec::new();
    for piece in parser.push(text).into_iter().chain(parser.finish()) {
        match piece {
            AnswerPiece::Call { .. } => calls.push(String::new()),
            AnswerPiece::Arguments { text, .. } => calls.last_mut().unwrap().push_str(&text),
            AnswerPiece::Text(_) | AnswerPiece::Reasoning(_) => {}
        }
    }
    calls
}

fn tool() -> Tool {
    let parameters = r#"{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false}"#;
    Tool { name: "f".into(), parameters: Some(parameters.into()), is_strict: true, ..Tool::default() }
}

/// Each syntax with one call and with two.
const CALLS: [(ToolSyntax, bool, [&str; 2]); 4] = [
    (
        ToolSyntax::Hermes,
        false,
        [
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 2}}\n</tool_call>",
        ],
    ),
    (
        ToolSyntax::Llama3Json,
        false,
        [
            "{\"name\": \"f\", \"parameters\": {\"a\": 1}}",
            "{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"name\": \"f\", \"parameters\": {\"a\": 2}}",
        ],
    ),
    (
        ToolSyntax::Mistral,
        false,
        [
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}}]",
            "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"f\", \"arguments\": {\"a\": 2}}]",
        ],
    ),
    (
        ToolSyntax::Mistral,
        true,
        ["[TOOL_CALLS]f[ARGS]{\"a\": 1}", "[TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]f[ARGS]{\"a\": 2}"],
    ),
];

#[test]
fn calls_that_must_be_made_fit_and_are_read_again() {
    let tool = tool();
    for (syntax, has_named_args, [one, two]) in CALLS {
        let format = format(syntax, has_named_args);
        let single = call_grammar(format, &[&tool], true);
        let several = call_grammar(format, &[&tool], false);
        assert_eq!(fits(&single, one), (one.len(), true), "{single}");
        assert_eq!(fits(&several, two), (two.len(), true), "{several}");
        assert!(fits(&single, two).0 < two.len(), "{single}");
        assert_eq!((parsed(syntax, one).len(), parsed(syntax, two).len()), (1, 2));
        for (grammar, wrong) in [(&single, one.replace('1', "x")), (&several, one.replace("\"a\"", "\"b\""))]
        {
            assert!(fits(grammar, &wrong).0 < wrong.len(), "{wrong}");
        }
        assert_eq!(fits(&several, "Let me see.").0, 0);
    }
}

#[test]
fn an_answer_is_json_of_its_schema_or_calls_and_nothing_else() {
    let tool = tool();
    let schema = json!({"type": "object", "properties": {"sky": {"type": "boolean"}}, "required": ["sky"],
        "additionalProperties": false});
    let marked = CALLS.into_iter().filter(|(syntax, ..)| *syntax != ToolSyntax::Llama3Json);
    for (syntax, has_named_args, [one, two]) in marked {
        let format = format(syntax, has_named_args);
        let grammar = calls_or_json_grammar(format, &[&tool], false, &schema);
        for text in [one, two, "{\"sky\": true}"] {
            assert_eq!(fits(&grammar, text), (text.len(), true), "{text}: {grammar}");
        }
        for wrong in [one.replace('1', "x"), "{\"sky\": 1}".to_owned(), "Let me see.".to_owned()] {
            assert!(fits(&grammar, &wrong).0 < wrong.len(), "{wrong}: {grammar}");
        }
        let single = calls_or_json_grammar(format, &[&tool], true, &schema);
        assert!(fits(&single, two).0 < two.len(), "{single}");
    }
}

#[test]
fn strict_calls_fit_their_schema_and_text_is_free() {
    let tool = tool();
    for (syntax, has_named_args, [one, two]) in CALLS {
        let grammar = strict_grammar(format(syntax, has_named_args), &[&tool]);
        for text in ["", "Let me see.", "a < b [x] <tool", one, two] {
            assert_eq!(fits(&grammar, text), (text.len(), true), "{text}: {grammar}");
        }
        let wrong = one.replace('1', "x");
        assert!(fits(&grammar, &wrong).0 < wrong.len(), "{wrong}: {grammar}");
        if syntax != ToolSyntax::Llama3Json {
            let beside = format!("Let me see. {one} Done.");
            assert_eq!(fits(&grammar, &beside), (beside.len(), true), "{grammar}");
        }
    }
    let tagged = format!("<|python_tag|>{}", CALLS[1].2[0]);
    let grammar = strict_grammar(format(ToolSyntax::Llama3Json, false), &[&tool]);
    assert_eq!(fits(&grammar, &tagged), (tagged.len(), true));
    assert!(fits(&grammar, "<|python_tag|>{\"x\"").0 < 17);
}
