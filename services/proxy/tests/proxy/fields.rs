//! Each field that a table of `API.md` lists, sent as it stands there: honoured, refused by its name, or ignored. The tables
//! have every field of OpenAI's published description.

use crate::fakes::model;
use crate::support::{Cluster, client};
use serde_json::{Value, json};
use std::collections::BTreeSet;
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

#[test]
fn every_field_of_openais_description_is_in_a_table() {
    let mut n_fields = 0;
    for line in include_str!("openai_fields.txt").lines().filter(|line| !line.starts_with('#')) {
        let (route, fields) = line.split_once(": ").unwrap();
        // Translations are told of in the table of transcriptions.
        let section = if route == "translations" { "transcriptions" } else { route };
        let rows = rows(&format!("Fields of {section}"));
        let known: BTreeSet<&str> = rows.iter().map(|(field, ..)| field.trim_end_matches("[]")).collect();
        for field in fields.split(' ') {
            assert!(known.contains(field), "the table of {section} has no {field}");
            n_fields += 1;
        }
    }
    assert!(n_fields > 110, "{n_fields}");
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

#[tokio::test]
async fn each_field_of_completions_is_honoured_refused_or_ignored_as_documented() {
    let table = Table {
        section: "Fields of completions",
        path: "/v1/completions",
        plain: json!({"model": "chat", "prompt": "hi"}),
        answer: "/choices",
        needed: "prompt",
    };
    assert!(check(table).await > 20);
}

#[tokio::test]
async fn each_field_of_embeddings_is_honoured_refused_or_ignored_as_documented() {
    let cluster = Cluster::serving(vec![model("text", Modality::Text, 1)], |_| {}).await;
    let plain = json!({"model": "text", "input": "hi"});
    let (_, whole) = cluster.proxy.post("/v1/embeddings", &plain).await;
    let width = whole["data"][0]["embedding"].as_array().expect("a vector").len();
    let rows = rows("Fields of embeddings");
    for (field, mut value, expect) in rows {
        if field == "dimensions" {
            value = json!(width);
        }
        let mut body = plain.clone();
        body[&field] = value;
        let (status, answer) = cluster.proxy.post("/v1/embeddings", &body).await;
        match &*expect {
            "honoured" => assert_eq!(status, 200, "{field}: {answer}"),
            "ignored" => assert_eq!((status, &answer["data"]), (200, &whole["data"]), "{field}"),
            _ => assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}"),
        }
    }
}

#[tokio::test]
async fn each_field_of_transcriptions_is_honoured_or_refused_as_documented() {
    let cluster = Cluster::serving(vec![model("speech", Modality::Audio, 1)], |_| {}).await;
    for path in ["/v1/audio/transcriptions", "/v1/audio/translations"] {
        for (field, value, expect) in rows("Fields of transcriptions") {
            let part = |name: &str, text: &str| {
                let file = if name == "file" { "; filename=\"a.wav\"" } else { "" };
                let head = format!("Content-Disposition: form-data; name=\"{name}\"{file}");
                format!("--BOUND\r\n{head}\r\n\r\n{text}\r\n")
            };
            let text = value.as_str().expect("fields of a form are texts");
            let others: String =
                [("file", "RIFF"), ("model", "speech")].map(|(name, text)| part(name, text)).concat();
            let body = others + &part(&field, text) + "--BOUND--\r\n";
            let request = client().post(cluster.proxy.url(path));
            let request = request.header("content-type", "multipart/form-data; boundary=BOUND").body(body);
            let response = request.send().await.unwrap();
            let (status, answer) = (response.status().as_u16(), response.text().await.unwrap());
            match &*expect {
                // Times of segments need no format of their own.
                "honoured" => assert_eq!(status, 200, "{field}: {answer}"),
                _ => assert!(status == 400 && answer.contains(&format!("\"{field}\"")), "{field}: {answer}"),
            }
        }
    }
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
