//! Each field that a table of `API.md` lists, sent as it stands there: honoured, refused by its name, or ignored.

use crate::fakes::model;
use crate::support::Cluster;
use serde_json::{Value, json};
use triptych_core::Modality;
use triptych_proto::v1;

/// Field, value and what becomes of it, from the table of a section.
fn rows(section: &str) -> Vec<(String, Value, String)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/API.md");
    let text = std::fs::read_to_string(path).expect("API.md is in the repository");
    let section = text.split(&format!("\n## {section}\n")).nth(1).expect("API.md has the section");
    let section = section.split("\n## ").next().unwrap();
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split(" | ");
        let field = cells.next()?.trim_end_matches('`').to_owned();
        let value = cells.next()?.trim_matches('`');
        let value = serde_json::from_str(value).unwrap_or_else(|e| panic!("{field}: {value}: {e}"));
        Some((field, value, cells.next()?.to_owned()))
    };
    section.lines().filter_map(row).collect()
}

/// A route with a table of its fields.
struct Table {
    section: &'static str,
    path: &'static str,
    /// A request without settings.
    plain: Value,
    /// Part of the answer that no ignored field changes.
    answer: &'static str,
    /// Field that cannot be null.
    needed: &'static str,
}

#[tokio::test]
async fn each_field_of_chat_is_honoured_refused_or_ignored_as_documented() {
    let table = Table {
        section: "Fields of chat",
        path: "/v1/chat/completions",
        plain: json!({"model": "chat", "messages": [{"role": "user", "content": "hi"}]}),
        answer: "/choices",
        needed: "messages",
    };
    assert!(check(table).await > 70);
}

#[tokio::test]
async fn each_field_of_responses_is_honoured_refused_or_ignored_as_documented() {
    let table = Table {
        section: "Fields of responses",
        path: "/v1/responses",
        plain: json!({"model": "chat", "input": "hi"}),
        answer: "/output/0/content",
        needed: "input",
    };
    assert!(check(table).await > 40);
}

/// Sends each field of a table; the number of rows.
async fn check(table: Table) -> usize {
    let chat = v1::ChatFormat {
        reads_tools: true,
        reads_documents: true,
        tool_syntax: v1::ToolSyntax::Hermes.into(),
        ..v1::ChatFormat::default()
    };
    let served = v1::WorkerModel { chat: Some(chat), ..model("chat", Modality::Image, 1) };
    let cluster = Cluster::serving(vec![served], |_| {}).await;
    let sent = |fields: Value| {
        let mut body = table.plain.clone();
        for (key, value) in fields.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    };
    let (_, whole) = cluster.proxy.post(table.path, &table.plain).await;
    let unchanged = cluster.pd.requests().pop().unwrap();
    let rows = rows(table.section);
    for (field, value, expect) in &rows {
        let body = match (&**field, table.path) {
            ("top_logprobs", "/v1/responses") => {
                sent(json!({"top_logprobs": value, "include": ["message.output_text.logprobs"]}))
            }
            ("top_logprobs", _) => sent(json!({"top_logprobs": value, "logprobs": true})),
            ("tool_choice", _) => {
                let tool = json!([{"type": "function", "name": "f", "function": {"name": "f"}}]);
                sent(json!({"tool_choice": value, "tools": tool}))
            }
            _ => sent(json!({field.clone(): value})),
        };
        let (status, answer) = cluster.proxy.post(table.path, &body).await;
        match &**expect {
            "honoured" => assert_eq!(status, 200, "{field}: {answer}"),
            "ignored" => {
                assert_eq!(status, 200, "{field}: {answer}");
                assert_eq!(answer.pointer(table.answer), whole.pointer(table.answer), "{field}");
                let asked = cluster.pd.requests().pop().unwrap();
                assert_eq!(
                    (asked.sampling, asked.prompt),
                    (unchanged.sampling.clone(), unchanged.prompt.clone())
                );
            }
            "refused" => {
                assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}");
            }
            other => panic!("{field}: {other:?} is none of honoured, refused and ignored"),
        }
        // A null is no value.
        let (status, answer) = cluster.proxy.post(table.path, &sent(json!({field.clone(): null}))).await;
        assert!(status == 200 || table.needed == field, "{field}: {answer}");
    }
    rows.len()
}
