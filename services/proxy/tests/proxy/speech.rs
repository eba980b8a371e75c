//! `/v1/audio/transcriptions` and `/translations`: the form, and every response format.

use crate::fakes::{GenerateStep, delta, hello, summary, text};
use crate::support::{Cluster, client};
use serde_json::{Value, json};
use triptych_core::Failure;
use triptych_proto::v1;
use triptych_runtime::status::to_status;

/// A form with these fields, as a client's library would write it.
fn form(fields: &[(&str, &str)]) -> (String, Vec<u8>) {
    let mut body = String::new();
    for (name, value) in fields {
        let file = if *name == "file" { "; filename=\"a.wav\"\r\nContent-Type: audio/wav" } else { "" };
        body +=
            &format!("--BOUND\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{value}\r\n");
    }
    (("multipart/form-data; boundary=BOUND").to_owned(), (body + "--BOUND--\r\n").into_bytes())
}

async fn post(cluster: &Cluster, path: &str, fields: &[(&str, &str)]) -> (u16, String, String) {
    let (content_type, body) = form(fields);
    let request = client().post(cluster.proxy.url(path)).header("content-type", content_type).body(body);
    let response = request.send().await.unwrap();
    let status = response.status().as_u16();
    let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
    (status, kind, response.text().await.unwrap())
}

type Fields<'a> = Vec<(&'a str, &'a str)>;

const TRANSCRIBE: &str = "/v1/audio/transcriptions";
const TRANSLATE: &str = "/v1/audio/translations";

/// Speech in two segments.
fn spoken() -> Vec<v1::PdGenerateResponse> {
    let piece = |text: &str, start_s, end_s| {
        let segment = v1::Segment {
            start_s,
            end_s,
            text: text.into(),
            token_ids: vec![5, 6],
            avg_logprob: -0.25,
            no_speech_prob: 0.5,
            window_start_ms: if start_s > 0.0 { 31_000 } else { 0 },
            ..v1::Segment::default()
        };
        delta(v1::Delta { text: text.into(), segments: vec![segment], ..v1::Delta::default() })
    };
    let end = v1::Summary { language: "en".into(), duration_s: 33.5, ..v1::Summary::default() };
    vec![piece(" one two", 0.0, 1.5), piece(" three", 31.25, 33.5), summary(end)]
}

#[tokio::test]
async fn every_response_format_has_its_fields() {
    let cluster = Cluster::start().await;
    let cases = [
        ("text", "text/plain", "one two three\n"),
        (
            "srt",
            "application/x-subrip",
            "1\n00:00:00,000 --> 00:00:01,500\none two\n\n2\n00:00:31,250 --> 00:00:33,500\nthree\n\n",
        ),
        (
            "vtt",
            "text/vtt",
            "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\none two\n\n00:00:31.250 --> 00:00:33.500\nthree\n\n",
        ),
    ];
    for (format, kind, expect) in cases {
        cluster.pd.script([GenerateStep::Send(spoken())]);
        let (status, found_kind, body) =
            post(&cluster, TRANSCRIBE, &[("file", "audio"), ("response_format", format)]).await;
        assert_eq!((status, body.as_str()), (200, expect));
        assert!(found_kind.starts_with(kind), "{found_kind}");
    }
    cluster.pd.script([GenerateStep::Send(spoken()), GenerateStep::Send(spoken())]);
    let (_, _, body) = post(&cluster, TRANSCRIBE, &[("file", "audio")]).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body, json!({"text": "one two three", "usage": {"type": "duration", "seconds": 33.5}}));
    let fields =
        [("file", "audio"), ("response_format", "verbose_json"), ("timestamp_granularities[]", "segment")];
    let (_, _, body) = post(&cluster, TRANSLATE, &fields).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(
        (&body["task"], &body["language"], &body["duration"]),
        (&json!("translate"), &json!("en"), &json!(33.5))
    );
    assert_eq!(body["text"], "one two three");
    let mut second = body["segments"][1].clone();
    assert!(second["compression_ratio"].as_f64().unwrap() > 0.0);
    second.as_object_mut().unwrap().remove("compression_ratio");
    assert_eq!(
        second,
        json!({
            "id": 1, "seek": 3100, "start": 31.25, "end": 33.5, "text": " three", "tokens": [5, 6],
            "temperature": 0.0, "avg_logprob": -0.25, "no_speech_prob": 0.5,
        })
    );
}

#[tokio::test]
async fn the_form_becomes_a_speech_task() {
    let cluster = Cluster::start().await;
    let fields = [
        ("model", "asr"),
        ("language", "de"),
        ("prompt", "Grüße"),
        ("temperature", "0.5"),
        ("something", "else"),
        ("file", "audio"),
        ("response_format", "srt"),
    ];
    for path in [TRANSCRIBE, TRANSLATE] {
        assert_eq!(post(&cluster, path, &fields).await.0, 200);
    }
    assert_eq!(cluster.encoder.jobs(), [&b"audio"[..]]);
    let kinds = [v1::SpeechKind::Transcribe, v1::SpeechKind::Translate];
    for (request, kind) in cluster.pd.requests().into_iter().zip(kinds) {
        let task = v1::SpeechTask {
            kind: kind.into(),
            language: Some("de".into()),
            prompt: Some("Grüße".into()),
            timestamps: true,
            long_form: v1::LongForm::Parallel.into(),
            ..v1::SpeechTask::default()
        };
        assert_eq!(request.prompt.unwrap().kind, Some(v1::prompt::Kind::Speech(task)));
        assert_eq!((request.model.as_str(), request.sampling.unwrap().temperature), ("asr", Some(0.5)));
    }
}

#[tokio::test]
async fn a_stream_is_deltas_and_done() {
    let cluster = Cluster::start().await;
    let away = || to_status(&Failure::unavailable("not now"));
    cluster.pd.script([GenerateStep::Send(hello()), GenerateStep::SendThenFail(vec![text("hel")], away())]);
    // No other worker can resume it.
    cluster.pd.script((0..4).map(|_| GenerateStep::Fail(away())));
    let (_, kind, body) = post(&cluster, TRANSCRIBE, &[("file", "audio"), ("stream", "true")]).await;
    assert!(kind.starts_with("text/event-stream"));
    let read = |body: &str| -> Vec<Value> {
        body.trim_end()
            .split("\n\n")
            .map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap())
            .collect()
    };
    assert_eq!(
        read(&body),
        [
            json!({"type": "transcript.text.delta", "delta": "hello"}),
            json!({"type": "transcript.text.delta", "delta": " world"}),
            json!({
                "type": "transcript.text.done",
                "text": "hello world",
                "usage": {"type": "tokens", "input_tokens": 7, "output_tokens": 2, "total_tokens": 9},
            }),
        ]
    );
    let (_, _, body) = post(&cluster, TRANSCRIBE, &[("file", "audio"), ("stream", "true")]).await;
    let events = read(&body);
    assert_eq!((events.len(), &events[1]["error"]["type"]), (2, &json!("server_error")));
}

#[tokio::test]
async fn an_invalid_form_is_refused_by_field() {
    let cluster = Cluster::start().await;
    let audio = ("file", "audio");
    let long = "x".repeat(70_000);
    let cases: Vec<(Fields<'_>, u16, &str, &str)> = vec![
        (vec![], 400, "file", "no file"),
        (vec![("file", "")], 400, "file", "0 bytes"),
        (vec![audio, ("response_format", "xml")], 400, "response_format", "\"xml\", allowed are json"),
        (vec![audio, ("temperature", "warm")], 400, "temperature", "\"warm\""),
        (vec![audio, ("temperature", "9")], 400, "temperature", "allowed is 0 to 2"),
        (vec![audio, ("stream", "maybe")], 400, "stream", "\"maybe\""),
        (vec![audio, ("timestamp_granularities[]", "page")], 400, "timestamp_granularities[]", "\"page\""),
        (vec![audio, ("timestamp_granularities[]", "word")], 400, "response_format", "verbose_json"),
        (vec![audio, ("long_form", "both")], 400, "long_form", "parallel and sequential"),
        (vec![audio, ("chunking_strategy", "no")], 400, "chunking_strategy", "server_vad"),
        (vec![audio, ("no_speech_threshold", "low")], 400, "no_speech_threshold", "a number"),
        (vec![audio, ("stream", "true"), ("response_format", "srt")], 400, "response_format", "json or text"),
        (vec![audio, ("model", "vl")], 400, "file", "reads image, the request has audio"),
        (vec![audio, ("model", "whisper-1")], 404, "model", "not served"),
        (vec![audio, ("prompt", &long)], 400, "prompt", "the limit is 65536"),
    ];
    for (fields, status, param, expect) in cases {
        let (found, _, body) = post(&cluster, TRANSCRIBE, &fields).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((found, &body["error"]["param"]), (status, &json!(param)), "{body}");
        assert!(body["error"]["message"].as_str().unwrap().contains(expect), "{body}");
    }
    let (status, _) = cluster.proxy.post(TRANSCRIBE, &json!({"file": "x"})).await;
    assert_eq!(status, 400);
    assert!(cluster.pd.requests().is_empty());
}

#[tokio::test]
async fn sequential_long_form_is_one_job_and_one_call_per_window() {
    let cluster = Cluster::start().await;
    let window = |text: &str, next: Option<u32>| {
        let end = delta(v1::Delta {
            text: text.into(),
            finish_reason: v1::FinishReason::Stop.into(),
            ..v1::Delta::default()
        });
        let next =
            next.map(|start_ms| v1::SpeechResume { start_ms, previous: vec![start_ms], conditioned: true });
        let usage = Some(v1::Usage { completion_tokens: 2, ..v1::Usage::default() });
        let last =
            v1::Summary { language: "de".into(), duration_s: 50.0, next, usage, ..v1::Summary::default() };
        GenerateStep::Send(vec![end, summary(last)])
    };
    cluster.pd.script([window(" one", Some(20_000)), window(" two", Some(41_000)), window(" three", None)]);
    let fields = [
        ("file", "audio"),
        ("long_form", "sequential"),
        ("condition_on_previous_text", "true"),
        ("response_format", "verbose_json"),
    ];
    let (status, _, body) = post(&cluster, TRANSCRIBE, &fields).await;
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &body["text"], &body["language"]), (200, &json!("one two three"), &json!("de")));
    assert_eq!(cluster.encoder.jobs().len(), 3, "each window is encoded");
    let tasks: Vec<v1::SpeechTask> = cluster
        .pd
        .requests()
        .into_iter()
        .map(|r| match r.prompt.unwrap().kind {
            Some(v1::prompt::Kind::Speech(task)) => task,
            other => panic!("{other:?}"),
        })
        .collect();
    let starts: Vec<Option<u32>> = tasks.iter().map(|t| t.resume.as_ref().map(|r| r.start_ms)).collect();
    assert_eq!(starts, [None, Some(20_000), Some(41_000)]);
    let languages: Vec<Option<&str>> = tasks.iter().map(|t| t.language.as_deref()).collect();
    assert_eq!(languages, [None, Some("de"), Some("de")], "found once");
    let keys = || -> std::collections::BTreeSet<_> {
        cluster.pd.requests().into_iter().map(|r| r.items[0].key.clone()).collect()
    };
    assert_eq!(keys().len(), 3, "a window's start is in its key");

    cluster.pd.script([window(" one", Some(20_000)), window(" two", None)]);
    let (content_type, form) = form(&fields);
    let asked = client().post(cluster.proxy.url(TRANSCRIBE)).header("content-type", content_type).body(form);
    assert_eq!(asked.header("x-triptych-tenant", "a").send().await.unwrap().status(), 200);
    assert_eq!(keys().len(), 5, "and so is whose it is");
}

#[tokio::test]
async fn a_window_that_does_not_advance_ends_the_request() {
    let cluster = Cluster::start().await;
    let next = Some(v1::SpeechResume::default());
    cluster.pd.script([GenerateStep::Send(vec![
        text("a"),
        summary(v1::Summary { next, ..v1::Summary::default() }),
    ])]);
    let (status, ..) = post(&cluster, TRANSCRIBE, &[("file", "audio"), ("long_form", "sequential")]).await;
    assert_eq!(status, 500);
}

#[tokio::test]
async fn log_probabilities_are_those_of_the_tokens_whole_and_streamed() {
    let cluster = Cluster::start().await;
    let piece = |text: &str, token: &str, logprob| {
        let chosen = v1::TokenLogprob { text: token.into(), logprob, ..v1::TokenLogprob::default() };
        let token = v1::ChosenToken { chosen: Some(chosen), top: Vec::new() };
        delta(v1::Delta { text: text.into(), logprobs: vec![token], ..v1::Delta::default() })
    };
    // The second token has no text of its own yet.
    let spoken = || {
        let pieces = [
            piece("", "<|en|>", -0.1),
            piece(" one", " one", -0.5),
            piece("", " t", -1.0),
            piece(" two", "wo", -2.0),
        ];
        GenerateStep::Send(pieces.into_iter().chain([summary(v1::Summary::default())]).collect())
    };
    cluster.pd.script([spoken(), spoken(), spoken()]);
    let fields = [("file", "RIFF"), ("model", "asr"), ("include[]", "logprobs")];
    let (status, _, body) = post(&cluster, TRANSCRIBE, &fields).await;
    assert_eq!(status, 200, "{body}");
    let expect = json!([
        {"token": " one", "logprob": -0.5, "bytes": b" one"},
        {"token": " t", "logprob": -1.0, "bytes": b" t"},
        {"token": "wo", "logprob": -2.0, "bytes": b"wo"},
    ]);
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!((&body["text"], &body["logprobs"]), (&json!("one two"), &expect));
    assert_eq!(cluster.pd.requests().pop().unwrap().sampling.unwrap().logprobs, Some(0));
    let (_, _, events) = post(&cluster, TRANSCRIBE, &[&fields[..], &[("stream", "true")]].concat()).await;
    let events: Vec<Value> = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let n_logprobs: Vec<usize> = events.iter().map(|e| e["logprobs"].as_array().unwrap().len()).collect();
    assert_eq!(n_logprobs, [1, 2, 3]);
    assert_eq!((&events[2]["type"], &events[2]["logprobs"]), (&json!("transcript.text.done"), &expect));
    let (_, _, body) = post(&cluster, TRANSCRIBE, &fields[..2]).await;
    assert_eq!(serde_json::from_str::<Value>(&body).unwrap().get("logprobs"), None);
    for (more, param) in
        [(("include[]", "usage"), "include[]"), (("response_format", "srt"), "response_format")]
    {
        let (status, _, body) = post(&cluster, TRANSCRIBE, &[&fields[..], &[more]].concat()).await;
        let body: Value = serde_json::from_str(&body).unwrap();
        assert_eq!((status, &body["error"]["param"]), (400, &json!(param)), "{body}");
    }
}
