//! The OpenAI API over real HTTP.

use base64::Engine;
use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::samples::{ask_images, heldout, text_of};

const SHAPES: &str = "shapes-qwen2-vl";

fn stream_of(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// The `data:` lines of an event stream.
fn events(text: &str) -> Vec<&str> {
    text.lines().filter_map(|l| l.strip_prefix("data: ")).collect()
}

async fn transcribe(cluster: &Cluster, fields: &[(&str, &str)]) -> (u16, String) {
    let boundary = "triptych-test-boundary";
    let mut body = Vec::new();
    for (name, value) in fields {
        body.extend_from_slice(
            format!("--{boundary}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
                .as_bytes(),
        );
    }
    body.extend_from_slice(
        format!(
            "--{boundary}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"digits.wav\"\r\n\r\n"
        )
        .as_bytes(),
    );
    body.extend_from_slice(&heldout("digits.wav"));
    body.extend_from_slice(format!("\r\n--{boundary}--\r\n").as_bytes());
    let response = reqwest_client()
        .post(format!("{}/v1/audio/transcriptions", cluster.http))
        .header("content-type", format!("multipart/form-data; boundary={boundary}"))
        .body(body)
        .send()
        .await
        .expect("the proxy answers");
    (response.status().as_u16(), response.text().await.expect("a body"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chat_completions_have_openais_fields_streamed_and_not() {
    let cluster = Cluster::start(&[]).await;
    let png = heldout("scene.png");
    let body = ask_images(SHAPES, "What is in this picture?", &[&png]);
    let (status, whole) = cluster.chat(body.clone()).await;
    assert_eq!(status, 200, "{whole}");
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["model"], SHAPES);
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let usage = &whole["usage"];
    let count = |key: &str| usage[key].as_u64().expect("a number");
    assert_eq!(count("total_tokens"), count("prompt_tokens") + count("completion_tokens"));

    let response =
        reqwest_client().post(format!("{}/v1/chat/completions", cluster.http)).json(&stream_of(body));
    let text = response.send().await.expect("an answer").text().await.expect("a body");
    let events = events(&text);
    assert_eq!(events.last(), Some(&"[DONE]"));
    let chunks: Vec<Value> =
        events[..events.len() - 1].iter().map(|e| serde_json::from_str(e).expect("JSON")).collect();
    let streamed: String =
        chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, text_of(&whole));
    assert_eq!(chunks.last().expect("chunks")["usage"]["completion_tokens"], usage["completion_tokens"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sampling_parameters_take_effect() {
    let cluster = Cluster::start(&[]).await;
    let png = heldout("scene.png");
    let ask = |extra: Value| {
        let mut body = ask_images(SHAPES, "What is in this picture?", &[&png]);
        for (key, value) in extra.as_object().expect("an object") {
            body[key] = value.clone();
        }
        body
    };
    let (_, n) = cluster.chat(ask(json!({"n": 3, "temperature": 1.5, "seed": 7}))).await;
    assert_eq!(n["choices"].as_array().map(Vec::len), Some(3), "{n}");
    let (_, again) = cluster.chat(ask(json!({"n": 3, "temperature": 1.5, "seed": 7}))).await;
    assert_eq!(n["choices"], again["choices"], "one seed, one answer");
    let (_, short) = cluster.chat(ask(json!({"max_tokens": 2}))).await;
    assert_eq!(short["choices"][0]["finish_reason"], "length");
    assert_eq!(short["usage"]["completion_tokens"], 2);
    let (_, whole) = cluster.chat(ask(json!({}))).await;
    let stop = text_of(&whole).split(' ').nth(1).expect("two words").to_owned();
    let (_, stopped) = cluster.chat(ask(json!({"stop": stop}))).await;
    assert!(!text_of(&stopped).contains(&stop) && text_of(&whole).starts_with(text_of(&stopped)));
    let (_, probable) = cluster.chat(ask(json!({"logprobs": true, "top_logprobs": 2}))).await;
    let tokens = probable["choices"][0]["logprobs"]["content"].as_array().expect("logprobs").clone();
    let joined: String = tokens.iter().map(|t| t["token"].as_str().expect("a token")).collect();
    assert_eq!(joined.trim(), text_of(&probable).trim());
    for token in &tokens {
        assert_eq!(token["top_logprobs"].as_array().map(Vec::len), Some(2));
        assert!(token["logprob"].as_f64().expect("a number") <= 0.0);
    }
    let (_, included) = cluster.chat(ask(json!({"stop": stop, "include_stop_str_in_output": true}))).await;
    assert_eq!(text_of(&included), format!("{}{stop}", text_of(&stopped)));
    let (_, scored) = cluster.chat(ask(json!({"prompt_logprobs": 1}))).await;
    let scores = scored["prompt_logprobs"].as_array().unwrap_or_else(|| panic!("{scored}"));
    assert_eq!(
        (Some(scores.len() as u64), &scores[0]),
        (scored["usage"]["prompt_tokens"].as_u64(), &Value::Null)
    );
    let n_rows = scores.iter().filter(|token| token.is_null()).count();
    assert!(n_rows > 1 && n_rows < scores.len(), "rows of the image have none, words have: {scored}");
    assert_eq!(text_of(&scored), text_of(&whole));
    // Of text alone, the last tokens are kept.
    let long = json!({"model": SHAPES, "messages": [{"role": "user", "content": "What ".repeat(40)}], "max_tokens": 2});
    let mut cut = long.clone();
    cut["truncate_prompt_tokens"] = json!(9);
    let (status, cut) = cluster.chat(cut).await;
    assert_eq!((status, &cut["usage"]["prompt_tokens"]), (200, &json!(9)), "{cut}");
    let (status, refused) = cluster.chat(ask(json!({"truncate_prompt_tokens": 9}))).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("truncate_prompt_tokens")), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transcriptions_come_in_every_format() {
    let cluster = Cluster::start(&[]).await;
    let (status, plain) =
        transcribe(&cluster, &[("model", "digits-whisper"), ("response_format", "text")]).await;
    assert_eq!(status, 200, "{plain}");
    let digits = plain.trim();
    assert!(digits.split(' ').all(|d| d.len() == 1 && d.chars().all(|c| c.is_ascii_digit())), "{plain:?}");

    let (_, json) = transcribe(&cluster, &[("model", "digits-whisper")]).await;
    assert_eq!(
        serde_json::from_str::<Value>(&json).expect("JSON")["text"].as_str().map(str::trim),
        Some(digits)
    );
    let (_, probable) = transcribe(&cluster, &[("model", "digits-whisper"), ("include[]", "logprobs")]).await;
    let probable: Value = serde_json::from_str(&probable).expect("JSON");
    let tokens = probable["logprobs"].as_array().unwrap_or_else(|| panic!("no logprobs in {probable}"));
    let joined: String = tokens.iter().map(|t| t["token"].as_str().expect("a token")).collect();
    assert_eq!(joined.trim(), digits);
    assert!(tokens.iter().all(|t| t["logprob"].as_f64().is_some_and(|p| p <= 0.0)), "{probable}");

    let (_, verbose) =
        transcribe(&cluster, &[("model", "digits-whisper"), ("response_format", "verbose_json")]).await;
    let verbose: Value = serde_json::from_str(&verbose).expect("JSON");
    assert!(verbose["duration"].as_f64().expect("a number") > 0.5, "{verbose}");
    assert_eq!(verbose["language"], "en");
    assert!(!verbose["segments"].as_array().expect("segments").is_empty());
    let (_, srt) = transcribe(&cluster, &[("model", "digits-whisper"), ("response_format", "srt")]).await;
    assert!(srt.starts_with("1\n00:00:0") && srt.contains(" --> "), "{srt}");
    let (_, vtt) = transcribe(&cluster, &[("model", "digits-whisper"), ("response_format", "vtt")]).await;
    assert!(vtt.starts_with("WEBVTT\n\n00:0"), "{vtt}");
    let (_, sse) = transcribe(&cluster, &[("model", "digits-whisper"), ("stream", "true")]).await;
    let last: Value =
        serde_json::from_str(events(&sse).iter().rfind(|e| **e != "[DONE]").expect("events")).expect("JSON");
    assert_eq!(last["type"], "transcript.text.done");
    assert_eq!(last["text"].as_str().map(str::trim), Some(digits));
    let usage = &last["usage"];
    assert_eq!(usage["type"], "tokens");
    assert!(
        usage["output_tokens"].as_u64().expect("a number") >= digits.split(' ').count() as u64,
        "{usage}"
    );
    assert_eq!(live(&cluster).await, digits);
}

/// The transcript of the same audio in pieces of half a second over `/v1/realtime`.
async fn live(cluster: &Cluster) -> String {
    let address = cluster.http.trim_start_matches("http://");
    let stream = tokio::net::TcpStream::connect(address).await.expect("the proxy listens");
    let url = format!("ws://{address}/v1/realtime?intent=transcription&model=digits-whisper");
    let (mut socket, _) = tokio_tungstenite::client_async(url, stream).await.expect("a session");
    let audio = heldout("digits.wav");
    let (rate, samples) = (u32::from_le_bytes(audio[24..28].try_into().expect("four bytes")), &audio[44..]);
    let format = json!({"type": "audio/pcm", "rate": rate});
    let settings = json!({"type": "transcription", "audio": {"input": {"format": format}}});
    let mut sent = vec![json!({"type": "session.update", "session": settings})];
    for piece in samples.chunks(rate as usize) {
        let audio = base64::engine::general_purpose::STANDARD.encode(piece);
        sent.push(json!({"type": "input_audio_buffer.append", "audio": audio}));
    }
    sent.push(json!({"type": "input_audio_buffer.commit"}));
    for event in sent {
        socket.send(Message::text(event.to_string())).await.expect("the session reads");
    }
    let mut joined = String::new();
    loop {
        let message = socket.next().await.expect("the session is open").expect("a message");
        let Ok(text) = message.to_text() else { continue };
        let event: Value = serde_json::from_str(text).expect("an event");
        match event["type"].as_str() {
            Some("conversation.item.input_audio_transcription.delta") => {
                joined.push_str(event["delta"].as_str().expect("a text"));
            }
            Some("conversation.item.input_audio_transcription.completed") => {
                let transcript = event["transcript"].as_str().expect("a text");
                assert_eq!(joined.trim(), transcript);
                return transcript.to_owned();
            }
            Some("error" | "conversation.item.input_audio_transcription.failed") => panic!("{event}"),
            _ => {}
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audio_in_a_chat_is_transcribed_and_models_are_listed() {
    use base64::Engine as _;
    let cluster = Cluster::start(&[]).await;
    let data = base64::engine::general_purpose::STANDARD.encode(heldout("digits.wav"));
    let audio = json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}});
    let body = json!({"model": "digits-whisper", "temperature": 0, "messages": [{"role": "user", "content": [audio]}]});
    let (status, answer) = cluster.chat(body).await;
    assert_eq!(status, 200, "{answer}");
    assert!(text_of(&answer).chars().any(|c| c.is_ascii_digit()), "{answer}");
    let models = reqwest_client().get(format!("{}/v1/models", cluster.http)).send().await.expect("models");
    let models: Value = serde_json::from_str(&models.text().await.expect("a body")).expect("JSON");
    let mut ids: Vec<_> = models["data"].as_array().expect("data").iter().map(|m| m["id"].as_str()).collect();
    ids.sort();
    assert_eq!(ids, [Some("digits-whisper"), Some(SHAPES)]);
}
