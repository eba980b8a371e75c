//! Parsers of calls: published forms, malformed ones, and any cut of a text.

use super::*;
use proptest::prelude::*;

/// A whole answer: its text, and its calls with name and arguments.
type Parsed = (String, Vec<(String, String)>);

fn parse_in(syntax: ToolSyntax, cuts: impl Iterator<Item = String>) -> Parsed {
    let mut parser = ToolParser::new(syntax, Arc::from(["f".to_owned(), "get_weather".to_owned()]));
    let mut pieces: Vec<AnswerPiece> = cuts.flat_map(|cut| parser.push(&cut)).collect();
    pieces.extend(parser.finish());
    let (mut text, mut calls) = (String::new(), Vec::<(String, String)>::new());
    for piece in pieces {
        match piece {
            AnswerPiece::Text(more) => text.push_str(&more),
            AnswerPiece::Call { index, name } => {
                assert_eq!(index as usize, calls.len());
                calls.push((name, String::new()));
            }
            AnswerPiece::Arguments { index, text } => calls[index as usize].1.push_str(&text),
            AnswerPiece::Reasoning(text) => panic!("reasoning {text:?}"),
        }
    }
    (text, calls)
}

fn parse(syntax: ToolSyntax, answer: &str) -> Parsed {
    parse_in(syntax, std::iter::once(answer.to_owned()))
}

fn check(syntax: ToolSyntax, answer: &str, text: &str, calls: &[(&str, &str)]) {
    let (found, found_calls) = parse(syntax, answer);
    let found_calls: Vec<(&str, &str)> = found_calls.iter().map(|(n, a)| (&**n, &**a)).collect();
    assert_eq!((&*found, found_calls.as_slice()), (text, calls), "{answer}");
}

#[test]
fn hermes() {
    let check =
        |answer: &str, text: &str, calls: &[(&str, &str)]| check(ToolSyntax::Hermes, answer, text, calls);
    let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}{\\\"\"}}\n</tool_call>";
    check(call, "", &[("f", r#"{"a": "}{\""}"#)]);
    check(&format!("\n\n{call}\n{call}\n"), "", &[("f", r#"{"a": "}{\""}"#); 2]);
    check(&format!("Let me. {call} Done."), "Let me.  Done.", &[("f", r#"{"a": "}{\""}"#)]);
    check("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"other\"}", "", &[("other", r#"{"a": 1}"#)]);
    check("<tool_call>{\"name\": \"f\"}</tool_call>", "", &[("f", "{}")]);
    check("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", "", &[("f", "{\"a\": 1")]);
    check("<tool_call>{\"name\": \"f\", \"arguments\": {oops}}</tool_call>", "", &[("f", "{oops}")]);
    let twice = "<tool_call>{\"name\": \"f\", \"arguments\": {}, \"id\": 3}</tool_call>x";
    check(twice, "x", &[("f", "{}")]);
}

#[test]
fn llama() {
    let check =
        |answer: &str, text: &str, calls: &[(&str, &str)]| check(ToolSyntax::Llama3Json, answer, text, calls);
    check(r#"{"name": "f", "parameters": {"a": 1}}"#, "", &[("f", r#"{"a": 1}"#)]);
    check(r#"<|python_tag|>{"name": "g", "arguments": {}}"#, "", &[("g", "{}")]);
    let two =
        "\n{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"get_weather\", \"parameters\": {\"c\": []}}\n";
    check(two, "", &[("f", "{}"), ("get_weather", r#"{"c": []}"#)]);
    for answer in [
        r#"{"name": "Bob", "parameters": {"age": 3}}"#,
        "Sure: {\"name\": \"f\", \"parameters\": {}}",
        "<|python_tag|>brave_search.call(query=\"x\")",
        r#"{"a": {"name": "f", "parameters": {}}}"#,
        "<|python",
    ] {
        check(answer, answer, &[]);
    }
}

#[test]
fn mistral() {
    let check =
        |answer: &str, text: &str, calls: &[(&str, &str)]| check(ToolSyntax::Mistral, answer, text, calls);
    let list =
        r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}, "id": "x"}]"#;
    check(list, "", &[("f", r#"{"a": [1]}"#), ("g", "{}")]);
    check(&format!("Well.{list}  "), "Well.", &[("f", r#"{"a": [1]}"#), ("g", "{}")]);
    let named = "[TOOL_CALLS]f[ARGS]{\"a\": {}}[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS]{}";
    check(named, "", &[("f", r#"{"a": {}}"#), ("g", "{}")]);
    check("[TOOL_CALLS]f{\"a\": 1} and", " and", &[("f", r#"{"a": 1}"#)]);
    check("[TOOL_CALLS]{\"name\": \"f\", \"arguments\": {}}", "", &[("f", "{}")]);
}

#[test]
fn malformed_calls_are_text_to_the_last_byte() {
    for (syntax, answer) in [
        (ToolSyntax::Hermes, "<tool_call>oops</tool_call>"),
        (ToolSyntax::Hermes, "<tool_call>{\"nam\": \"f\", \"arguments\": {}}</tool_call>"),
        (ToolSyntax::Hermes, "\n <tool_call>\n{\"name\": \"f\", \"argu"),
        (ToolSyntax::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}"),
        (ToolSyntax::Hermes, "a < b <tool"),
        (ToolSyntax::Hermes, " \n "),
        (ToolSyntax::Mistral, "[TOOL_CALLS][]"),
        (ToolSyntax::Mistral, "[TOOL_CALLS]f[ARG]{}"),
        (ToolSyntax::Mistral, "[TOOL_CALLS]f g[ARGS]{}"),
    ] {
        assert_eq!(parse(syntax, answer), (answer.to_owned(), vec![]), "{answer}");
    }
    let again = "<tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    check(ToolSyntax::Hermes, again, "<tool_call>", &[("f", "{}")]);
    check(ToolSyntax::Hermes, &again[11..again.len() - 1], "</tool_call", &[("f", "{}")]);
}

#[test]
fn what_is_held_is_bounded() {
    let mut parser = ToolParser::new(ToolSyntax::Hermes, Arc::from([]));
    parser.push("<tool_call>{\"a\": \"");
    let mut n_text = 0;
    for _ in 0..100_000 {
        n_text += parser.push("xyz").len();
        assert!(parser.held.len() <= MAX_HELD && parser.held.capacity() <= 4 * MAX_HELD);
    }
    assert!(n_text > 0);
    let mut parser = ToolParser::new(ToolSyntax::Hermes, Arc::from([]));
    parser.push("<tool_call>{\"name\": \"f\", \"arguments\": {}");
    for _ in 0..100_000 {
        parser.push(" , ");
        assert!(parser.held.len() <= MAX_HELD);
    }
}

/// Fragments that make calls, halves of calls, and nothing at all.
fn answer() -> impl Strategy<Value = String> {
    let fragment = prop::sample::select(vec![
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "{\"name\": \"f\"",
        ", \"arguments\": {",
        "\"parameters\": {",
        "}",
        "}}",
        "{",
        "[",
        "]",
        ",",
        ";",
        " ",
        "\n",
        "\"",
        "\\",
        "é🦀",
        "f",
        "\"a\": 1",
        "<",
        "text",
        "{\"name\": \"f\", \"arguments\": {\"a\": \"b\"}}",
    ]);
    prop::collection::vec(fragment, 0..24).prop_map(|fragments| fragments.concat())
}

proptest! {
    #[test]
    fn any_cut_of_a_text_gives_the_same(
        answer in answer(),
        sizes in prop::collection::vec(1_usize..9, 1..64),
        syntax in prop::sample::select(ToolSyntax::ALL.to_vec()),
    ) {
        let mut chars = answer.chars();
        let mut sizes = sizes.iter().cycle();
        let cuts = std::iter::from_fn(move || {
            let cut: String = chars.by_ref().take(*sizes.next()?).collect();
            (!cut.is_empty()).then_some(cut)
        });
        let (text, calls) = parse_in(syntax, cuts);
        prop_assert_eq!((&text, &calls), (&parse(syntax, &answer).0, &parse(syntax, &answer).1));
        if calls.is_empty() {
            prop_assert_eq!(text, answer);
        }
    }
}
