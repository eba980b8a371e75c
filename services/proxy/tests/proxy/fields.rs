//! Each field of chat that `API.md` lists, sent as it stands there: honoured, refused by its name, or ignored.

use crate::fakes::model;
use crate::support::Cluster;
use serde_json::{Value, json};
use triptych_core::Modality;
use triptych_proto::v1;

/// Field, value and what becomes of it, from the table.
fn rows() -> Vec<(String, Value, String)> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/API.md");
    let text = std::fs::read_to_string(path).expect("API.md is in the repository");
    let section = text.split("\n## Fields of chat\n").nth(1).expect("API.md has `## Fields of chat`");
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

#[tokio::test]
async fn each_field_is_honoured_refused_or_ignored_as_documented() {
    let chat = v1::ChatFormat {
        reads_tools: true,
        reads_documents: true,
        tool_syntax: v1::ToolSyntax::Hermes.into(),
        ..v1::ChatFormat::default()
    };
    let served = v1::WorkerModel { chat: Some(chat), ..model("chat", Modality::Image, 1) };
    let cluster = Cluster::serving(vec![served], |_| {}).await;
    let plain = json!({"model": "chat", "messages": [{"role": "user", "content": "hi"}]});
    let sent = |fields: Value| {
        let mut body = plain.clone();
        for (key, value) in fields.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    };
    let (_, whole) = cluster.proxy.post("/v1/chat/completions", &plain).await;
    let unchanged = cluster.pd.requests().pop().unwrap();
    let rows = rows();
    assert!(rows.len() > 70, "{} rows", rows.len());
    for (field, value, expect) in rows {
        let body = match &*field {
            "top_logprobs" => sent(json!({"top_logprobs": value, "logprobs": true})),
            "tool_choice" => sent(json!({"tool_choice": value, "tools": [{"function": {"name": "f"}}]})),
            _ => sent(json!({field.clone(): value})),
        };
        let (status, answer) = cluster.proxy.post("/v1/chat/completions", &body).await;
        match &*expect {
            "honoured" => assert_eq!(status, 200, "{field}: {answer}"),
            "ignored" => {
                assert_eq!(status, 200, "{field}: {answer}");
                assert_eq!(answer["choices"], whole["choices"], "{field}");
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
        let (status, answer) =
            cluster.proxy.post("/v1/chat/completions", &sent(json!({field.clone(): null}))).await;
        assert!(status == 200 || ["messages"].contains(&&*field), "{field}: {answer}");
    }
}
