//! A model of each family through the whole cluster, over HTTP: the tokens are those of transformers.
//!
//! The models are the golden ones, with small random weights; `tests/golden/README.md` describes how they are made.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde_json::{Value, json};
use std::path::PathBuf;
use triptych_proto::v1;
use triptych_tests::client::{about_images, connect, generate};
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::samples::data_url;

fn golden(case: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(case)
}

fn read(case: &str, file: &str) -> Value {
    let path = golden(case).join(file);
    let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_slice(&text).expect("JSON")
}

/// A cluster of golden models, each under the name of its case.
async fn cluster_of(cases: &[&str]) -> Cluster {
    let models = cases.iter().map(|case| format!("{case}={}", golden(case).join("model").display()));
    let args: Vec<String> = models.flat_map(|model| ["--model".to_owned(), model]).collect();
    Cluster::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).await
}

async fn post(cluster: &Cluster, path: &str, body: &Value) -> Value {
    let response = reqwest_client().post(format!("{}{path}", cluster.http)).json(body).send().await;
    let response = response.expect("the proxy answers");
    let status = response.status();
    let text = response.text().await.expect("a body");
    assert!(status.is_success(), "{body}: {text}");
    serde_json::from_str(&text).expect("JSON")
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id")).collect()
}

/// The expected tokens of an answer: those of transformers, without the end token.
fn without_end(tokens: &Value, request: &Value) -> Vec<u64> {
    let ends = ids(&request["end_tokens"]);
    let mut tokens = ids(tokens);
    if tokens.last().is_some_and(|last| ends.contains(last)) {
        tokens.pop();
    }
    tokens
}

/// The requests of a case that have the model's own generation rules: those of the first request.
fn requests(case: &str) -> Vec<Value> {
    let matrix = read(case, "matrix.json");
    let all = matrix["requests"].as_array().expect("requests");
    let rules = |r: &Value| {
        ["forced", "suppress", "begin_suppress", "end_tokens"]
            .map(|rule| r.get(rule).cloned().unwrap_or_default())
    };
    let plain: Vec<Value> = all.iter().filter(|r| rules(r) == rules(&all[0])).cloned().collect();
    assert!(plain.len() >= 2, "{case} has fewer than two requests with the model's own rules");
    plain
}

/// Checks the text requests of a case, with token ids for encoder and decoder.
async fn check_text(cluster: &Cluster, case: &str) {
    let inputs = read(case, "expected.json");
    for request in &requests(case) {
        let input = &inputs["inputs"][request["rows"].as_u64().expect("a place") as usize];
        let ask = |fields: Value| {
            // The expected answers know no such rule of a generation config.
            let mut body = json!({
                "model": case, "encoder_prompt": input, "prompt": request["prompt"], "no_repeat_ngram_size": 0,
            });
            body.as_object_mut().expect("an object").extend(fields.as_object().expect("an object").clone());
            body
        };
        let greedy = ask(json!({"temperature": 0, "max_tokens": request["max_new_tokens"]}));
        let answer = post(cluster, "/v1/completions", &greedy).await;
        let choice = &answer["choices"][0];
        assert_eq!(ids(&choice["token_ids"]), without_end(&request["greedy"], request), "{case} {request}");
        assert_eq!(choice["encoder_prompt"], *input);
        let n_prompt = [input, &request["prompt"]].map(|tokens| tokens.as_array().map_or(0, Vec::len));
        assert_eq!(answer["usage"]["prompt_tokens"], n_prompt.iter().sum::<usize>(), "both sides count");
        assert_eq!(choice["decoder_prompt"]["token_ids"], request["prompt"]);
        let beams = &request["beam4"];
        let searched = ask(json!({
            "num_beams": 4, "n": beams["answers"].as_array().expect("answers").len(),
            "length_penalty": beams["length_penalty"], "early_stopping": beams["early_stopping"],
            "max_tokens": beams["max_new_tokens"],
        }));
        let answer = post(cluster, "/v1/completions", &searched).await;
        for (choice, expect) in answer["choices"]
            .as_array()
            .expect("choices")
            .iter()
            .zip(beams["answers"].as_array().expect("answers"))
        {
            assert_eq!(
                ids(&choice["token_ids"]),
                without_end(&expect["tokens"], request),
                "{case}, beams, {request}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_models_answer_as_transformers_greedy_and_with_beams() {
    let cases = ["bart_odd_heads", "nllb_600m", "marian_en_de", "t5_odd_heads", "bert2bert"];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_text(&cluster, case).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn text_in_text_out_and_one_encode_for_the_same_text() {
    let case = "bart_odd_heads";
    let cluster = cluster_of(&[case]).await;
    let text = read(case, "expected.json")["texts"][0].clone();
    let completion = json!({"model": case, "prompt": text, "temperature": 0, "max_tokens": 8});
    let chat = json!({
        "model": case, "messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8,
    });
    let first = post(&cluster, "/v1/completions", &completion).await;
    let second = post(&cluster, "/v1/chat/completions", &chat).await;
    assert_eq!(first["choices"][0]["text"], second["choices"][0]["message"]["content"]);
    assert_eq!(first["choices"][0]["encoder_prompt"], text);
    assert_eq!(
        cluster.metric("encoder-0", "triptych_encodes_total").await,
        1.0,
        "the second was in the store"
    );
}

/// Checks every image of a case. A resize may differ from the reference by one step of 255 in some pixels, which random
/// weights may turn into another token. Images that are resized bit-exactly must match, and each case has some
/// (`golden_models/pipeline.rs` lists them).
async fn check_images(cluster: &Cluster, case: &str) {
    let expected = read(case, "expected.json");
    let mut n_matched = 0;
    for image in expected["images"].as_array().expect("images") {
        let file = golden(case).join(image["file"].as_str().expect("a file"));
        let url = data_url(&std::fs::read(file).expect("an image"));
        let mut body = json!({
            "model": case, "items": [{"type": "image_url", "image_url": {"url": url}}],
            "prompt": image["prompt"], "temperature": 0, "max_tokens": 16, "ignore_eos": true,
        });
        if let Some(asked) = image.get("asked") {
            body["encoder_prompt"] = asked.clone();
        }
        let answer = post(cluster, "/v1/completions", &body).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["decoder_prompt"]["token_ids"], image["prompt"], "{case} {}", image["name"]);
        let tokens = ids(&choice["token_ids"]);
        assert_eq!(tokens.len(), 16, "{case} {}", image["name"]);
        n_matched += usize::from(tokens == ids(&image["greedy_tokens"])[..16]);
    }
    assert!(n_matched > 0, "{case}: no image gave the tokens of the reference");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn images_reach_decoders_through_cross_attention() {
    let cases = [
        "trocr_vit",
        "vit_gpt2",
        "vit_bert",
        "registers_cropped_gated",
        "donut_shifted",
        "nougat_margins",
        "florence_windows",
        "florence_original",
    ];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_images(&cluster, case).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mllama_answers_with_none_to_three_images() {
    let case = "mllama_small_f32";
    let cluster = cluster_of(&[case]).await;
    let expected = read(case, "expected.json");
    let requests = requests(case);
    let prompts = expected["prompts"].as_array().expect("prompts");
    let mut n_several = 0;
    for request in &requests {
        let Some(prompt) = prompts.iter().find(|p| p["input_ids"] == request["prompt"]) else { continue };
        let numbers = prompt["images"].as_array().expect("images").iter().filter_map(Value::as_u64);
        let item = |idx: u64| {
            let file = golden(case).join(expected["images"][idx as usize]["file"].as_str().expect("a file"));
            let url = data_url(&std::fs::read(file).expect("an image"));
            json!({"type": "image_url", "image_url": {"url": url}})
        };
        let items: Vec<Value> = numbers.map(item).collect();
        let body = json!({
            "model": case, "prompt": request["prompt"], "items": items,
            "temperature": 0, "max_tokens": request["max_new_tokens"],
        });
        let answer = post(&cluster, "/v1/completions", &body).await;
        let choice = &answer["choices"][0];
        assert_eq!(ids(&choice["token_ids"]), without_end(&request["greedy"], request), "{request}");
        if items.len() < 2 {
            continue;
        }
        // The chat template gives the same prompt.
        let mut items = items.into_iter();
        let mut messages = prompt["messages"].clone();
        for part in messages.as_array_mut().expect("messages").iter_mut().flat_map(parts) {
            if part["type"] == "image" {
                *part = items.next().expect("an image for each part");
            }
        }
        let body = json!({
            "model": case, "messages": messages, "temperature": 0, "max_tokens": request["max_new_tokens"],
        });
        let answer = post(&cluster, "/v1/chat/completions", &body).await;
        let n_prompt = prompt["input_ids"].as_array().expect("ids").len();
        assert_eq!(answer["usage"]["prompt_tokens"], n_prompt, "{prompt}");
        assert_eq!(answer["choices"][0]["message"]["content"], choice["text"], "{prompt}");
        n_several += 1;
    }
    assert_eq!(n_several, 2);
    let prompt = &prompts[5];
    let body = json!({"model": case, "messages": prompt["messages"], "temperature": 0, "max_tokens": 4});
    let answer = post(&cluster, "/v1/chat/completions", &body).await;
    let n_prompt = prompt["input_ids"].as_array().expect("ids").len();
    assert_eq!(answer["usage"]["prompt_tokens"], n_prompt, "{prompt}");
}

/// The parts of a message.
fn parts(message: &mut Value) -> &mut Vec<Value> {
    message["content"].as_array_mut().expect("parts")
}

/// The items of a prompt as parts of a message: images, or audio by each of its parts in turn.
fn items(case: &str, expected: &Value, prompt: &Value) -> Vec<Value> {
    let list = if prompt.get("audios").is_some() { "audios" } else { "images" };
    let names = prompt[list].as_array().expect("items").iter().enumerate();
    let item = |(i, name): (usize, &Value)| {
        let file = &expected[list][name.as_str().expect("a name")]["file"];
        let bytes = std::fs::read(golden(case).join(file.as_str().expect("a file"))).expect("an item");
        let data = BASE64.encode(&bytes);
        match (list, i % 2) {
            ("images", _) => json!({"type": "image_url", "image_url": {"url": data_url(&bytes)}}),
            (_, 0) => json!({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}),
            _ => json!({"type": "audio_url", "audio_url": {"url": format!("data:audio/wav;base64,{data}")}}),
        }
    };
    names.map(item).collect()
}

/// Checks the conversations of a case whose items are among the tokens.
async fn check_conversations(cluster: &Cluster, case: &str) {
    let expected = read(case, "expected.json");
    for prompt in expected["prompts"].as_array().expect("prompts") {
        let text = |text: &Value| json!({"type": "text", "text": text});
        let user = |content: Vec<Value>| json!({"role": "user", "content": content});
        // The items are in the first message.
        let mut items = items(case, &expected, prompt);
        let mut messages = Vec::new();
        for turn in prompt["history"].as_array().into_iter().flatten() {
            messages.push(user(items.drain(..).chain([text(&turn[0])]).collect()));
            messages.push(json!({"role": "assistant", "content": turn[1]}));
        }
        messages.push(user(items.into_iter().chain([text(&prompt["text"])]).collect()));
        let body = json!({
            "model": case, "messages": messages, "temperature": 0,
            "max_tokens": prompt["greedy_tokens"].as_array().expect("ids").len(),
        });
        let answer = post(cluster, "/v1/chat/completions", &body).await;
        let n_prompt = prompt["input_ids"].as_array().expect("ids").len();
        assert_eq!(answer["usage"]["prompt_tokens"], n_prompt, "{case} {prompt}");
        assert_eq!(answer["choices"][0]["message"]["content"], prompt["greedy_text"], "{case} {prompt}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whole_images_and_tiles_answer_as_transformers() {
    let cases = [
        "llava_clip_llama",
        "llava_next_mistral",
        "smolvlm_split",
        "internvl_qwen2",
        "internvl_chat_internlm2",
        "mistral3_merged",
        "deepseek_ocr2_windows",
        "step3_renormalised",
        "glm_ocr_odd_heads",
        "cogagent_chat",
    ];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_conversations(&cluster, case).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_whose_rows_see_each_other_answer_as_transformers() {
    let cases = ["gemma3_old_keys", "gemma3_pan_and_scan"];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_conversations(&cluster, case).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn items_of_several_levels_answer_as_transformers() {
    let cases = ["qwen3_vl_one_level", "qwen3_vl_wide_heads", "qwen3_vl_moe_one_expert"];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_conversations(&cluster, case).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decoders_with_recurrent_states_answer_as_transformers() {
    let cases = ["qwen3_5_tied", "qwen3_5_moe_listed_layers"];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_conversations(&cluster, case).await;
    }
}

/// Checks a video of a case, an animation of which some frames are taken: alone, over gRPC, beside other items, and with other
/// frames.
async fn check_videos(cluster: &Cluster, case: &str) {
    let file = read(case, "video.json")["file"].clone();
    let bytes = std::fs::read(golden(file["path"].as_str().expect("a file"))).expect("a video");
    let url = format!("data:image/gif;base64,{}", BASE64.encode(&bytes));
    let video = json!({"type": "video_url", "video_url": {"url": url}});
    let text = json!({"type": "text", "text": file["text"]});
    let ask = |content: Value| {
        json!({
            "model": case, "messages": [{"role": "user", "content": content}], "temperature": 0,
            "max_tokens": file["greedy_tokens"].as_array().expect("ids").len(),
        })
    };
    let answer = post(cluster, "/v1/chat/completions", &ask(json!([video, text]))).await;
    assert_eq!(answer["usage"]["prompt_tokens"], file["n_prompt"], "{case}");
    assert_eq!(answer["choices"][0]["message"]["content"], file["greedy_text"], "{case}");
    // The same over gRPC finds the rows in the store.
    let mut over_grpc = about_images(file["text"].as_str().expect("a text"), vec![bytes.clone()]);
    over_grpc.model = case.to_owned();
    over_grpc.items[0].modality = v1::Modality::Video.into();
    if let Some(sampling) = &mut over_grpc.sampling {
        sampling.max_tokens = file["greedy_tokens"].as_array().map(|ids| ids.len() as u32);
    }
    let grpc = generate(&mut connect(&cluster.grpc).await, over_grpc).await.expect("an answer");
    assert_eq!(Some(grpc.text.as_str()), file["greedy_text"].as_str(), "{case}");
    assert_eq!(grpc.summary.item_sources, [i32::from(v1::ItemSource::Cached)], "{case}");
    // Two videos and an image, one of the videos as a list of frames.
    let still = std::fs::read(golden(case).join("videos/still.png")).expect("an image");
    let frame = BASE64.encode(std::fs::read(golden("preprocess/images/jpeg_420.jpg")).expect("a JPEG"));
    let list = format!("data:video/jpeg;base64,{frame},{frame}");
    let content = json!([
        video, {"type": "image_url", "image_url": {"url": data_url(&still)}},
        {"type": "video_url", "video_url": {"url": list}}, text,
    ]);
    let answer = post(cluster, "/v1/chat/completions", &ask(content)).await;
    let (n, alone) = (answer["usage"]["prompt_tokens"].as_u64(), file["n_prompt"].as_u64());
    assert!(n > alone.map(|n| n + 8), "{case}: {n:?} tokens with more items than {alone:?}");
    // More frames are more tokens.
    let mut more = ask(json!([video, text]));
    more["mm_processor_kwargs"] = json!({"num_frames": 6});
    let answer = post(cluster, "/v1/chat/completions", &more).await;
    assert!(answer["usage"]["prompt_tokens"].as_u64() > alone, "{case}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn videos_answer_as_transformers() {
    let cases = ["qwen2_vl_two_images", "qwen2_5_vl_window112", "qwen3_vl_wide_heads"];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_videos(&cluster, case).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn audio_among_the_tokens_answers_as_transformers() {
    let cases = ["qwen2_audio_odd_heads", "qwen3_asr_odd_heads", "qwen3_asr_original", "voxtral_odd_heads"];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_conversations(&cluster, case).await;
    }
}

const BOUNDARY: &str = "triptych-test-boundary";

/// A multipart body with fields and a file.
fn form(fields: &[(&str, &str)], file: &[u8]) -> Vec<u8> {
    let part = |(name, value): &(&str, &str)| {
        format!("--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n")
    };
    let mut body = fields.iter().map(part).collect::<String>().into_bytes();
    let head = "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"";
    body.extend(format!("--{BOUNDARY}\r\n{head}\r\n\r\n").into_bytes());
    body.extend(file);
    body.extend(format!("\r\n--{BOUNDARY}--\r\n").into_bytes());
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transcriptions_answer_as_transformers() {
    let cases = ["qwen3_asr_odd_heads", "voxtral_odd_heads"];
    let cluster = cluster_of(&cases).await;
    for case in cases {
        check_transcriptions(&cluster, case).await;
    }
}

async fn check_transcriptions(cluster: &Cluster, case: &str) {
    let expected = read(case, "expected.json");
    for task in expected["transcriptions"].as_array().expect("transcriptions") {
        let file = &expected["audios"][task["audio"].as_str().expect("a name")]["file"];
        let bytes = std::fs::read(golden(case).join(file.as_str().expect("a file"))).expect("audio");
        let language = task["language"].as_str().map(|code| ("language", code));
        let prompt = task["prompt"].as_str().map(|text| ("prompt", text));
        let fields: Vec<(&str, &str)> =
            [("model", case), ("temperature", "0")].into_iter().chain(language).chain(prompt).collect();
        let answer = reqwest_client()
            .post(format!("{}/v1/audio/transcriptions", cluster.http))
            .header("content-type", format!("multipart/form-data; boundary={BOUNDARY}"))
            .body(form(&fields, &bytes))
            .send()
            .await
            .expect("an answer");
        let status = answer.status();
        let body = answer.text().await.expect("a body");
        assert!(status.is_success(), "{body}");
        let body: Value = serde_json::from_str(&body).expect("JSON");
        assert_eq!(
            body["text"].as_str().map(str::trim),
            task["greedy_text"].as_str().map(str::trim),
            "{task}"
        );
    }
}
