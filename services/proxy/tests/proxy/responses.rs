//! `/v1/responses`: what a PD worker is asked, and the objects and events that are made of its answer.

use crate::fakes::{GenerateStep, delta, model, summary, text};
use crate::support::{Cluster, client};
use base64::Engine;
use serde_json::{Value, json};
use triptych_core::{Failure, Modality};
use triptych_proto::v1;
use triptych_runtime::status::to_status;

const PATH: &str = "/v1/responses";

async fn cluster() -> Cluster {
    let format = v1::ChatFormat {
        reads_tools: true,
        tool_syntax: v1::ToolSyntax::Hermes.into(),
        reasoning: v1::ReasoningSyntax::ThinkTags.into(),
        ..v1::ChatFormat::default()
    };
    let served = v1::WorkerModel { chat: Some(format), ..model("agent", Modality::Image, 1) };
    Cluster::serving(vec![served], |_| {}).await
}

/// An answer in these pieces.
fn answer(pieces: &[&str], finish: v1::FinishReason) -> GenerateStep {
    let end = v1::Delta { finish_reason: finish.into(), ..v1::Delta::default() };
    let usage =
        v1::Usage { prompt_tokens: 7, completion_tokens: 9, cached_tokens: 3, ..v1::Usage::default() };
    let end = [delta(end), summary(v1::Summary { usage: Some(usage), ..v1::Summary::default() })];
    GenerateStep::Send(pieces.iter().map(|piece| text(piece)).chain(end).collect())
}

const CALLING: [&str; 5] = [
    "<think>the weather",
    "?</think>Let me ",
    "look.<tool_call>\n{\"name\": \"weather\", \"argu",
    "ments\": {\"a\"",
    ": 1}}\n</tool_call>",
];

fn ask(fields: Value) -> Value {
    let tool = json!({"type": "function", "name": "weather", "parameters": {"type": "object"}});
    let mut body = json!({"model": "agent", "input": "cold?", "tools": [tool]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// Names and data of the events of a stream.
async fn streamed(cluster: &Cluster, body: Value) -> Vec<(String, Value)> {
    let response = client().post(cluster.proxy.url(PATH)).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    };
    text.split("\n\n").filter(|event| !event.is_empty()).map(event).collect()
}

#[tokio::test]
async fn the_output_has_reasoning_text_and_calls_as_items() {
    let cluster = cluster().await;
    cluster.pd.script([answer(&CALLING, v1::FinishReason::Stop)]);
    let (status, body) = cluster.proxy.post(PATH, &ask(json!({"instructions": "Be brief."}))).await;
    assert_eq!(status, 200, "{body}");
    assert!(body["id"].as_str().unwrap().starts_with("resp_"));
    assert_eq!((&body["object"], &body["status"]), (&json!("response"), &json!("completed")));
    assert_eq!((&body["store"], &body["previous_response_id"]), (&json!(false), &Value::Null));
    assert_eq!(body["tools"][0]["name"], "weather");
    let output = body["output"].as_array().unwrap();
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call"]);
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "the weather?"}]));
    let text = json!([{"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}]);
    assert_eq!((&output[1]["content"], &output[1]["role"]), (&text, &json!("assistant")));
    assert_eq!((&output[2]["name"], &output[2]["arguments"]), (&json!("weather"), &json!("{\"a\": 1}")));
    assert!(output.iter().all(|item| item["status"] == "completed"));
    let usage = json!({
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0}, "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 16,
    });
    assert_eq!(body["usage"], usage);
    let Some(v1::prompt::Kind::Chat(chat)) = cluster.pd.requests().remove(0).prompt.unwrap().kind else {
        panic!()
    };
    assert_eq!(
        chat.messages.iter().map(|m| m.role()).collect::<Vec<_>>(),
        [v1::Role::System, v1::Role::User]
    );
    assert_eq!(chat.tools[0].name, "weather");
}

#[tokio::test]
async fn a_stream_has_the_events_of_each_item_in_order_and_ends_with_the_whole_response() {
    let cluster = cluster().await;
    cluster.pd.script([answer(&CALLING, v1::FinishReason::Stop), answer(&CALLING, v1::FinishReason::Stop)]);
    let events = streamed(&cluster, ask(json!({"stream": true}))).await;
    let names: Vec<&str> = events.iter().map(|(name, _)| &**name).collect();
    let expect = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(names, expect);
    for (i, (name, event)) in events.iter().enumerate() {
        assert_eq!((&event["sequence_number"], &event["type"]), (&json!(i), &json!(name)));
    }
    assert_eq!(events[0].1["response"]["status"], "in_progress");
    assert_eq!(events[2].1["item"]["content"], json!([]));
    assert_eq!((&events[13].1["text"], &events[13].1["output_index"]), (&json!("Let me look."), &json!(1)));
    assert_eq!(events[13].1["item_id"], events[9].1["item"]["id"]);
    assert_eq!(events[19].1["arguments"], "{\"a\": 1}");
    // The last event has what the whole object would have been, ids and times aside.
    let (_, whole) = cluster.proxy.post(PATH, &ask(json!({}))).await;
    let last = &events.last().unwrap().1["response"];
    assert_eq!((&last["usage"], &last["status"]), (&whole["usage"], &whole["status"]));
    let bare = |output: &Value| {
        let mut output = output.clone();
        for item in output.as_array_mut().unwrap() {
            item["id"] = Value::Null;
            item["call_id"] = Value::Null;
        }
        output
    };
    assert_eq!(bare(&last["output"]), bare(&whole["output"]));
    let done: Vec<&Value> =
        events.iter().filter(|(name, _)| name.ends_with("item.done")).map(|(_, e)| &e["item"]).collect();
    assert_eq!(done, last["output"].as_array().unwrap().iter().collect::<Vec<_>>());
}

#[tokio::test]
async fn a_cut_answer_is_incomplete_and_one_without_text_an_empty_message() {
    let cluster = cluster().await;
    cluster.pd.script([answer(&["he"], v1::FinishReason::Length), answer(&[], v1::FinishReason::Stop)]);
    let (_, body) = cluster.proxy.post(PATH, &ask(json!({"max_output_tokens": 1}))).await;
    assert_eq!(body["status"], "incomplete");
    assert_eq!(body["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(body["output"][0]["status"], "incomplete");
    assert_eq!(cluster.pd.requests().pop().unwrap().sampling.unwrap().max_tokens, Some(1));
    let events = streamed(&cluster, ask(json!({"stream": true}))).await;
    let (name, last) = events.last().unwrap();
    assert_eq!(
        (&**name, &last["response"]["output"][0]["content"][0]["text"]),
        ("response.completed", &json!(""))
    );
    assert_eq!(events.len(), 8);
}

#[tokio::test]
async fn a_failure_in_the_middle_is_the_last_event() {
    let cluster = cluster().await;
    let status = |message: &str| to_status(&Failure::invalid(message));
    let failed = GenerateStep::SendThenFail(vec![text("he")], status("no more"));
    cluster.pd.script([failed, GenerateStep::Fail(status("nothing"))]);
    let events = streamed(&cluster, ask(json!({"stream": true}))).await;
    let (name, last) = events.last().unwrap();
    assert_eq!((&**name, &last["response"]["status"]), ("response.failed", &json!("failed")));
    assert_eq!(last["response"]["error"], json!({"code": "invalid_prompt", "message": "no more"}));
    // Before the first piece, the status says it.
    let (status, body) = cluster.proxy.post(PATH, &ask(json!({"stream": true}))).await;
    assert_eq!((status, &body["error"]["message"]), (400, &json!("nothing")));
}

#[tokio::test]
async fn log_probabilities_come_with_the_text_and_not_with_reasoning() {
    let cluster = cluster().await;
    let piece = |text: &str| {
        let chosen =
            v1::TokenLogprob { token_id: 5, text: text.into(), logprob: -0.5, bytes: Vec::new().into() };
        let token = v1::ChosenToken { chosen: Some(chosen.clone()), top: vec![chosen] };
        delta(v1::Delta { text: text.into(), logprobs: vec![token], ..v1::Delta::default() })
    };
    let pieces = vec![piece("<think>a"), piece("</think>"), piece("b"), summary(v1::Summary::default())];
    cluster.pd.script([GenerateStep::Send(pieces)]);
    let body = ask(json!({"include": ["message.output_text.logprobs"], "top_logprobs": 1}));
    let (_, body) = cluster.proxy.post(PATH, &body).await;
    assert_eq!(cluster.pd.requests().pop().unwrap().sampling.unwrap().logprobs, Some(1));
    let part = &body["output"][1]["content"][0];
    assert_eq!(part["text"], "b");
    let logprobs = part["logprobs"].as_array().unwrap();
    assert_eq!(logprobs.last().unwrap()["token"], "b");
    assert_eq!(logprobs.last().unwrap()["top_logprobs"][0]["logprob"], -0.5);
    assert!(logprobs.iter().all(|token| token["token"] != "<think>a"), "{part}");
}

#[tokio::test]
async fn images_formats_and_choices_of_tools_go_where_those_of_chat_go() {
    let cluster = cluster().await;
    let url =
        format!("data:image/png;base64,{}", base64::prelude::BASE64_STANDARD.encode(crate::support::IMAGE));
    let content = json!([{"type": "input_text", "text": "what?"}, {"type": "input_image", "image_url": url, "detail": "auto"}]);
    let schema = json!({"type": "object", "properties": {"z": {}, "a": {}}});
    let format = json!({"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": true}});
    let body = json!({
        "model": "agent", "input": [{"type": "message", "role": "user", "content": content}], "text": format,
    });
    let (status, found) = cluster.proxy.post(PATH, &body).await;
    assert_eq!(status, 200, "{found}");
    assert_eq!(found["text"], format);
    let asked = cluster.pd.requests().pop().unwrap();
    assert_eq!(asked.items.len(), 1);
    let kind = asked.sampling.unwrap().constraint.unwrap().kind;
    assert_eq!(kind, Some(v1::constraint::Kind::JsonSchema(schema.to_string())));
    let body = ask(json!({"tool_choice": {"type": "function", "name": "weather"}}));
    let (status, found) = cluster.proxy.post(PATH, &body).await;
    assert_eq!(status, 200, "{found}");
    assert!(cluster.pd.requests().pop().unwrap().sampling.unwrap().constraint.is_some());
}

#[tokio::test]
async fn what_cannot_be_honoured_is_refused_by_name() {
    let cluster = cluster().await;
    for (fields, param, expect) in [
        (json!({"input": null}), "input", "missing"),
        (json!({"input": []}), "input", "empty"),
        (json!({"max_output_tokens": 0}), "max_output_tokens", "max_tokens is 0"),
        (json!({"include": ["file_search_call.results"]}), "include", "allowed are"),
        (json!({"top_logprobs": 3}), "top_logprobs", "include"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type", "allowed is function"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name", "missing"),
        (json!({"tools": [{"type": "function", "name": "a b"}]}), "tools[0].name", "allowed are 1 to 64"),
        (json!({"tool_choice": {"type": "mcp"}}), "tool_choice", "\"mcp\""),
        (json!({"text": {"format": {"type": "grammar"}}}), "text.format.type", "\"grammar\""),
        (json!({"text": {"format": {"type": "json_schema"}}}), "text.format.schema", "needs schema"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}),
            "input[0].content[0].image_url",
            "needs image_url",
        ),
    ] {
        let (status, body) = cluster.proxy.post(PATH, &ask(fields.clone())).await;
        assert_eq!((status, &body["error"]["param"]), (400, &json!(param)), "{fields}: {body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(expect), "{body}");
    }
    let (status, _) = cluster.proxy.get("/v1/responses/resp_1").await;
    assert_eq!(status, 404);
}
