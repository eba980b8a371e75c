//! Decoders of text alone through the whole cluster, without an encoder worker: the words are those of transformers.
//!
//! The models are the golden ones, with small random weights; `tests/golden/README.md` describes how they are made.

use serde_json::{Value, json};
use std::path::PathBuf;
use triptych_proto::v1;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::samples::data_url;

const CASES: [&str; 10] = [
    "llama_tied",
    "mistral_windowed",
    "qwen2_tied",
    "qwen3_windowed_layers",
    "qwen3_5_text_tied",
    "qwen3_5_text_listed_layers",
    "qwen2_moe_shared",
    "mixtral_windowed",
    "gemma3_text_old_keys",
    "gemma2_low_caps",
];

fn golden(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(path)
}

fn read(path: &str) -> Value {
    let text = std::fs::read(golden(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    serde_json::from_slice(&text).expect("JSON")
}

async fn cluster_of(cases: &[&str]) -> Cluster {
    let models = cases.iter().map(|case| format!("{case}={}", golden(case).join("model").display()));
    let args: Vec<String> = models.flat_map(|model| ["--model".to_owned(), model]).collect();
    Cluster::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).await
}

async fn post(cluster: &Cluster, path: &str, body: &Value) -> (u16, String) {
    let response = reqwest_client().post(format!("{}{path}", cluster.http)).json(body).send().await;
    let response = response.expect("the proxy answers");
    (response.status().as_u16(), response.text().await.expect("a body"))
}

async fn answer(cluster: &Cluster, path: &str, body: &Value) -> Value {
    let (status, text) = post(cluster, path, body).await;
    assert_eq!(status, 200, "{body}: {text}");
    serde_json::from_str(&text).expect("JSON")
}

/// Path and body of an entry of `expected.json`, greedy and as long as the reference's answer.
fn asked(case: &str, entry: &Value) -> (&'static str, Value) {
    let n = entry["greedy_tokens"].as_array().expect("ids").len();
    let mut body = json!({"model": case, "temperature": 0, "max_tokens": n});
    match entry.get("messages") {
        Some(messages) => {
            body["messages"] = messages.clone();
            ("/v1/chat/completions", body)
        }
        None => {
            body["prompt"] = entry["prompt"].clone();
            ("/v1/completions", body)
        }
    }
}

/// The text of the pieces of a stream.
fn streamed(events: &str, is_chat: bool) -> String {
    let events = events.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|d| *d != "[DONE]");
    let piece = |event: &str| {
        let event: Value = serde_json::from_str(event).expect("JSON");
        let choice = &event["choices"][0];
        let text = if is_chat { &choice["delta"]["content"] } else { &choice["text"] };
        text.as_str().unwrap_or_default().to_owned()
    };
    events.map(piece).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn conversations_and_prompts_answer_as_transformers_without_an_encoder_worker() {
    let cluster = cluster_of(&CASES).await;
    assert!(cluster.pids("encoder").is_empty(), "no model has an encoder");
    for case in CASES {
        let expected = read(&format!("{case}/expected.json"));
        for entry in expected["prompts"].as_array().expect("prompts") {
            let (path, mut body) = asked(case, entry);
            let is_chat = body.get("messages").is_some();
            let whole = answer(&cluster, path, &body).await;
            let choice = &whole["choices"][0];
            let text = if is_chat { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!(*text, entry["greedy_text"], "{case} {entry}");
            let n_prompt = entry["input_ids"].as_array().expect("ids").len();
            assert_eq!(whole["usage"]["prompt_tokens"], n_prompt, "{case} {entry}");
            body["stream"] = true.into();
            let (status, events) = post(&cluster, path, &body).await;
            assert_eq!(status, 200, "{events}");
            assert_eq!(streamed(&events, is_chat), entry["greedy_text"], "{case} {entry}");
        }
        check_beams(&cluster, case).await;
    }
    check_grpc(&cluster).await;
    check_prefix_cache(&cluster).await;
    check_structured(&cluster).await;
    check_refusals(&cluster).await;
}

async fn check_beams(cluster: &Cluster, case: &str) {
    let matrix = read(&format!("{case}/matrix.json"));
    let request = &matrix["requests"][0];
    let beams = &request["beam4"];
    let expected = beams["answers"].as_array().expect("answers");
    let body = json!({
        "model": case, "prompt": request["prompt"], "num_beams": 4, "n": expected.len(),
        "length_penalty": beams["length_penalty"], "early_stopping": beams["early_stopping"],
        "max_tokens": beams["max_new_tokens"],
    });
    let found = answer(cluster, "/v1/completions", &body).await;
    for (choice, expected) in found["choices"].as_array().expect("choices").iter().zip(expected) {
        let mut tokens = expected["tokens"].as_array().expect("ids").clone();
        tokens.retain(|token| !request["end_tokens"].as_array().expect("ids").contains(token));
        assert_eq!(choice["token_ids"], Value::Array(tokens), "{case}");
    }
}

async fn check_grpc(cluster: &Cluster) {
    let case = "qwen2_tied";
    let expected = read(&format!("{case}/expected.json"));
    let entry = &expected["prompts"][0];
    let text = entry["messages"][0]["content"].as_str().expect("a text");
    let mut client = connect(&cluster.grpc).await;
    let mut request = v1::GenerateRequest { model: case.into(), ..about_images(text, Vec::new()) };
    let n = entry["greedy_tokens"].as_array().expect("ids").len() as u32;
    request.sampling = Some(v1::Sampling {
        max_tokens: Some(n),
        temperature: Some(0.0),
        ..request.sampling.unwrap_or_default()
    });
    let found = generate(&mut client, request).await.expect("an answer");
    assert_eq!(found.text, entry["greedy_text"].as_str().expect("a text"));
    let listed = client.list_models(v1::ListModelsRequest {}).await.expect("a list").into_inner().models;
    assert!(listed.len() == CASES.len() && listed.iter().all(|model| model.modalities.is_empty()));
}

/// A prompt that was asked before is in the prefix cache.
async fn check_prefix_cache(cluster: &Cluster) {
    let text = "The north is cold and the south is warm. ".repeat(6);
    let body = json!({"model": "llama_tied", "prompt": text, "temperature": 0, "max_tokens": 4});
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let first = answer(cluster, "/v1/completions", &body).await;
    let second = answer(cluster, "/v1/completions", &body).await;
    assert_eq!(cached(&first).unwrap_or(0), 0);
    assert!(cached(&second).is_some_and(|n| n > 0), "{second}");
    assert_eq!(first["choices"][0]["text"], second["choices"][0]["text"]);
}

async fn check_structured(cluster: &Cluster) {
    let body = json!({
        "model": "mistral_windowed", "messages": [{"role": "user", "content": "Which?"}], "max_tokens": 16,
        "structured_outputs": {"choice": ["north", "south"]},
    });
    let found = answer(cluster, "/v1/chat/completions", &body).await;
    let content = found["choices"][0]["message"]["content"].as_str().expect("a text").to_owned();
    assert!(["north", "south"].contains(&content.as_str()), "{content}");
}

async fn check_refusals(cluster: &Cluster) {
    let image = std::fs::read(golden("llava_clip_llama/images/64x64.png")).expect("an image");
    let content = json!([
        {"type": "image_url", "image_url": {"url": data_url(&image)}}, {"type": "text", "text": "What is it?"},
    ]);
    let chat = json!({"model": "llama_tied", "messages": [{"role": "user", "content": content}]});
    let (status, text) = post(cluster, "/v1/chat/completions", &chat).await;
    assert_eq!(status, 400, "{text}");
    assert!(text.contains(r#"model \"llama_tied\" reads text only, the request has image"#), "{text}");
    let both = json!({"model": "llama_tied", "prompt": "a", "encoder_prompt": "b"});
    let (status, text) = post(cluster, "/v1/completions", &both).await;
    assert_eq!(status, 400, "{text}");
    assert!(text.contains("has no text encoder"), "{text}");
    let turns = json!([{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]);
    let (status, text) =
        post(cluster, "/v1/chat/completions", &json!({"model": "mistral_windowed", "messages": turns})).await;
    assert_eq!(status, 400, "{text}");
    assert!(text.contains("roles must alternate"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_decoder_is_served_beside_a_model_that_reads_images() {
    let cluster = cluster_of(&["llama_biased", "llava_clip_llama"]).await;
    assert_eq!(cluster.pids("encoder").len(), 1);
    let expected = read("llama_biased/expected.json");
    let entry = &expected["prompts"][0];
    let (path, body) = asked("llama_biased", entry);
    let found = answer(&cluster, path, &body).await;
    assert_eq!(found["choices"][0]["message"]["content"], entry["greedy_text"]);
    let image = std::fs::read(golden("llava_clip_llama/images/64x64.png")).expect("an image");
    let content = json!([{"type": "image_url", "image_url": {"url": data_url(&image)}}]);
    let body = json!({
        "model": "llava_clip_llama", "messages": [{"role": "user", "content": content}], "max_tokens": 2,
    });
    answer(&cluster, "/v1/chat/completions", &body).await;
    assert_eq!(cluster.metric("encoder-0", "triptych_encodes_total").await, 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_colocated_worker_serves_a_decoder_too() {
    let models = ["llama_biased", "llava_clip_llama"]
        .map(|case| format!("{case}={}", golden(case).join("model").display()));
    let [text, eyes] = models.each_ref().map(String::as_str);
    let cluster =
        Cluster::start(&["--model", text, "--model", eyes, "--encoders", "0", "--with-encoder"]).await;
    let expected = read("llama_biased/expected.json");
    let (path, body) = asked("llama_biased", &expected["prompts"][0]);
    let found = answer(&cluster, path, &body).await;
    assert_eq!(found["choices"][0]["message"]["content"], expected["prompts"][0]["greedy_text"]);
}
