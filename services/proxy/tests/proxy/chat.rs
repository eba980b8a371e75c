//! `/v1/chat/completions` in the format of OpenAI's clients.

use crate::fakes::{GenerateStep, delta, hello, summary, text};
use crate::support::{Cluster, client};
use serde_json::{Value, json};
use triptych_core::Failure;
use triptych_proto::v1;
use triptych_runtime::status::to_status;

const PATH: &str = "/v1/chat/completions";

fn ask(fields: Value) -> Value {
    let mut body = json!({"model": "vl", "messages": [{"role": "user", "content": "hi"}]});
    for (key, value) in fields.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// The data of every event.
async fn events(cluster: &Cluster, body: Value) -> Vec<String> {
    let response = client().post(cluster.proxy.url(PATH)).json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let text = response.text().await.unwrap();
    assert!(text.ends_with("\n\n"));
    text.trim_end().split("\n\n").map(|e| e.strip_prefix("data: ").unwrap().to_owned()).collect()
}

fn parse(events: &[String]) -> Vec<Value> {
    events.iter().map(|e| serde_json::from_str(e).unwrap()).collect()
}

#[tokio::test]
async fn a_whole_answer_has_openais_fields() {
    let cluster = Cluster::start().await;
    let (status, body) = cluster.proxy.post(PATH, &ask(json!({}))).await;
    assert_eq!(status, 200);
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(body["created"].is_u64());
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("vl")));
    assert_eq!(
        body["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }])
    );
    let usage = json!({
        "prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
    });
    assert_eq!(body["usage"], usage);
}

#[tokio::test]
async fn a_stream_is_chunks_usage_and_done() {
    let cluster = Cluster::start().await;
    let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
    let events = events(&cluster, ask(stream)).await;
    assert_eq!(events.last().unwrap(), "[DONE]");
    let chunks = parse(&events[..events.len() - 1]);
    let choices: Vec<_> = chunks.iter().map(|c| c["choices"].clone()).collect();
    assert_eq!(
        choices,
        [
            json!([{"index": 0, "delta": {"role": "assistant", "content": "hello"}, "logprobs": null, "finish_reason": null}]),
            json!([{"index": 0, "delta": {"content": " world"}, "logprobs": null, "finish_reason": "stop"}]),
            json!([]),
        ]
    );
    assert_eq!(chunks[0]["usage"], Value::Null);
    assert_eq!(chunks[2]["usage"]["total_tokens"], 9);
    assert!(chunks.iter().all(|c| c["object"] == "chat.completion.chunk" && c["id"] == chunks[0]["id"]));
}

#[tokio::test]
async fn usage_is_absent_unless_asked_for() {
    let cluster = Cluster::start().await;
    let events = events(&cluster, ask(json!({"stream": true, "stream_options": null}))).await;
    assert_eq!(events.len(), 3);
    assert!(parse(&events[..2]).iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn choices_and_their_log_probabilities_are_separate() {
    let cluster = Cluster::start().await;
    let token = |text: &str, logprob| v1::TokenLogprob {
        token_id: 1,
        text: text.into(),
        logprob,
        ..v1::TokenLogprob::default()
    };
    // The first byte of a character.
    let part = v1::TokenLogprob { bytes: vec![0xC3].into(), ..token("\u{FFFD}", -3.0) };
    let piece = |choice, text: &str| {
        delta(v1::Delta {
            choice,
            text: text.into(),
            logprobs: vec![v1::ChosenToken {
                chosen: Some(token(text, -0.5)),
                top: vec![token(text, -0.5), token("é", f32::NEG_INFINITY), part.clone()],
            }],
            finish_reason: v1::FinishReason::Length.into(),
            ..v1::Delta::default()
        })
    };
    cluster.pd.script([GenerateStep::Send(vec![
        piece(1, "b"),
        piece(0, "a"),
        summary(v1::Summary::default()),
    ])]);
    let fields = json!({"n": 2, "logprobs": true, "top_logprobs": 2});
    let (_, body) = cluster.proxy.post(PATH, &ask(fields)).await;
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 2);
    for (choice, text) in choices.iter().zip(["a", "b"]) {
        assert_eq!(
            (&choice["message"]["content"], &choice["finish_reason"]),
            (&json!(text), &json!("length"))
        );
        let token = &choice["logprobs"]["content"][0];
        assert_eq!((&token["token"], &token["bytes"]), (&json!(text), &json!(text.as_bytes())));
        assert_eq!(token["top_logprobs"][1]["logprob"], -9999.0);
        assert_eq!(token["top_logprobs"][1]["bytes"], json!("é".as_bytes()));
        let part = &token["top_logprobs"][2];
        assert_eq!((&part["token"], &part["bytes"]), (&json!("\u{FFFD}"), &json!([0xC3])));
    }
    let sampling = cluster.pd.requests()[0].sampling.clone().unwrap();
    assert_eq!((sampling.n, sampling.logprobs), (Some(2), Some(2)));
}

#[tokio::test]
async fn settings_are_passed_on_nulls_are_absent_and_unknown_fields_are_ignored() {
    let cluster = Cluster::start().await;
    let given = json!({
        "temperature": 0.5, "top_p": 0.9, "top_k": 4, "seed": -1, "stop": "x",
        "max_tokens": 5, "max_completion_tokens": 6, "ignore_eos": true,
        "user": "me", "service_tier": {"a": [1]}, "metadata": null, "tools": [], "modalities": ["text"],
        "frequency_penalty": 0, "response_format": {"type": "text"},
    });
    let nulls = json!({
        "temperature": null, "top_p": null, "seed": null, "stop": null, "max_tokens": null, "n": null,
        "stream": null, "logprobs": null, "top_logprobs": null, "tools": null, "model": null,
    });
    for fields in [given, nulls, json!({"stop": ["a", "b"]})] {
        let (status, body) = cluster.proxy.post(PATH, &ask(fields)).await;
        assert_eq!(status, 200, "{body}");
    }
    let sampling: Vec<_> = cluster.pd.requests().into_iter().map(|r| r.sampling.unwrap()).collect();
    assert_eq!(
        sampling,
        [
            v1::Sampling {
                max_tokens: Some(6),
                temperature: Some(0.5),
                top_p: Some(0.9),
                top_k: Some(4),
                seed: Some(u64::MAX),
                stop: vec!["x".into()],
                ignore_eos: true,
                ..v1::Sampling::default()
            },
            v1::Sampling::default(),
            v1::Sampling { stop: vec!["a".into(), "b".into()], ..v1::Sampling::default() },
        ]
    );
}

#[tokio::test]
async fn parts_become_items_in_order() {
    let cluster = Cluster::start().await;
    let content = json!([
        {"type": "text", "text": "look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8=", "detail": "auto"}},
        {"type": "text", "text": "well?"},
    ]);
    let messages =
        json!([{"role": "developer", "content": "be brief"}, {"role": "user", "content": content}]);
    let (status, _) = cluster.proxy.post(PATH, &ask(json!({"messages": messages}))).await;
    assert_eq!(status, 200);
    assert_eq!(cluster.encoder.jobs(), [&b"hello"[..]]);
    let request = cluster.pd.requests().remove(0);
    let Some(v1::prompt::Kind::Chat(chat)) = request.prompt.unwrap().kind else { panic!() };
    let kinds = |m: &v1::Message| m.parts.iter().map(|p| p.kind.clone().unwrap()).collect::<Vec<_>>();
    use v1::part::Kind::{Item, Text};
    assert_eq!(chat.messages[0].role(), v1::Role::System);
    assert_eq!(kinds(&chat.messages[1]), [Text("look:".into()), Item(0), Text("well?".into())]);

    let audio = json!([{"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}]);
    let body = json!({"messages": [{"role": "user", "content": audio}]});
    let (_, body) = cluster.proxy.post(PATH, &body).await;
    // The only model that reads audio.
    assert_eq!(body["model"], "asr");
}

#[tokio::test]
async fn a_failure_has_a_status_before_the_first_text_and_is_an_event_after_it() {
    let cluster = Cluster::start().await;
    let too_long =
        || to_status(&Failure::invalid("5000 tokens, the context holds 4096").with_param("messages"));
    for stream in [false, true] {
        cluster.pd.script([GenerateStep::Fail(too_long())]);
        let (status, body) = cluster.proxy.post(PATH, &ask(json!({"stream": stream}))).await;
        assert_eq!(status, 400);
        assert_eq!(
            body["error"],
            json!({
                "message": "5000 tokens, the context holds 4096",
                "type": "invalid_request_error",
                "param": "messages",
                "code": null,
            })
        );
    }
    let away = || to_status(&Failure::unavailable("not now"));
    cluster.pd.script([GenerateStep::SendThenFail(vec![text("hel")], away())]);
    // No other worker can resume it.
    cluster.pd.script((0..4).map(|_| GenerateStep::Fail(away())));
    let events = events(&cluster, ask(json!({"stream": true}))).await;
    let chunks = parse(&events);
    assert_eq!(chunks.len(), 2);
    assert_eq!(chunks[0]["choices"][0]["delta"]["content"], "hel");
    assert_eq!(chunks[1]["error"]["code"], "unavailable");
}

#[tokio::test]
async fn every_response_has_a_request_id() {
    let cluster = Cluster::start().await;
    cluster.pd.script([GenerateStep::Send(hello())]);
    for (path, body) in [(PATH, ask(json!({}))), (PATH, json!({})), ("/nowhere", json!({}))] {
        let response = client().post(cluster.proxy.url(path)).json(&body).send().await.unwrap();
        let id = response.headers()["x-request-id"].to_str().unwrap().to_owned();
        assert!(triptych_core::RequestId::parse(&id).is_some(), "{id}");
        let answer: Value = response.json().await.unwrap();
        if let Some(chat_id) = answer["id"].as_str() {
            assert_eq!(chat_id.strip_prefix("chatcmpl-"), id.strip_prefix("req-"));
            assert_eq!(cluster.pd.requests()[0].request_id, id);
        }
    }
}
