//! `/v1/embeddings` and `/pooling` through the whole cluster: rows and their means are those of transformers.

use crate::tools::{answer, golden, json_of};
use base64::Engine as _;
use serde_json::{Value, json};
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::samples::data_url;

const PATH: &str = "/v1/embeddings";

/// Rows of a golden tensor in f32, `[n][width]`.
fn golden_rows(case: &str, name: &str) -> Vec<Vec<f32>> {
    let file = std::fs::read(golden(case).join("expected.safetensors")).expect("a golden file");
    let (len, rest) = file.split_first_chunk::<8>().expect("a header");
    let (head, data) = rest.split_at(u64::from_le_bytes(*len) as usize);
    let head: Value = serde_json::from_slice(head).expect("JSON");
    let tensor = &head[name];
    let number = |value: &Value| value.as_u64().expect("a number") as usize;
    let (from, to) = (number(&tensor["data_offsets"][0]), number(&tensor["data_offsets"][1]));
    assert_eq!(tensor["dtype"], "F32", "{case} {name}");
    let values: Vec<f32> =
        data[from..to].as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    values.chunks(number(&tensor["shape"][1])).map(<[f32]>::to_vec).collect()
}

fn mean(rows: &[Vec<f32>]) -> Vec<f64> {
    let column = |i: usize| rows.iter().map(|row| f64::from(row[i])).sum::<f64>() / rows.len() as f64;
    (0..rows[0].len()).map(column).collect()
}

fn normalised(vector: &[f64]) -> Vec<f64> {
    let length = vector.iter().map(|value| value * value).sum::<f64>().sqrt();
    vector.iter().map(|value| value / length).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("numbers").iter().map(|value| value.as_f64().expect("a number")).collect()
}

#[track_caller]
fn assert_close(found: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= tolerance, "{found} instead of {expected}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn texts_and_images_have_the_means_of_transformers_rows() {
    let models = ["bart_odd_heads", "llava_clip_llama", "llama_tied"]
        .map(|case| format!("{case}={}", golden(case).join("model").display()));
    let args: Vec<&str> = models.iter().flat_map(|model| ["--model", model]).collect();
    let cluster = Cluster::start(&[&args[..], &["--precision", "f32"]].concat()).await;
    check_texts(&cluster).await;
    check_image(&cluster).await;
    check_refusals(&cluster).await;
}

async fn check_texts(cluster: &Cluster) {
    let case = "bart_odd_heads";
    let expected = json_of(&golden(case).join("expected.json"));
    let texts = &expected["texts"];
    let found = answer(cluster, PATH, &json!({"model": case, "input": texts})).await;
    let data = found["data"].as_array().expect("a list");
    assert_eq!(data.len(), texts.as_array().expect("texts").len());
    let mut n_rows = 0;
    for (i, entry) in data.iter().enumerate() {
        let rows = golden_rows(case, &format!("matrix.{i}.rows"));
        n_rows += rows.len();
        assert_eq!((&entry["index"], &entry["object"]), (&json!(i), &json!("embedding")));
        assert_close(&numbers(&entry["embedding"]), &normalised(&mean(&rows)), 2e-5);
    }
    assert_eq!(found["usage"], json!({"prompt_tokens": n_rows, "total_tokens": n_rows}));
    // The same as tokens, as it is, and in base64.
    let rows = golden_rows(case, "matrix.1.rows");
    let plain = json!({"model": case, "input": expected["inputs"][1], "normalize": false});
    let plain = answer(cluster, PATH, &plain).await;
    assert_close(&numbers(&plain["data"][0]["embedding"]), &mean(&rows), 2e-5);
    let base64 = json!({"model": case, "input": texts[1], "encoding_format": "base64"});
    let base64 = answer(cluster, PATH, &base64).await;
    let text = base64["data"][0]["embedding"].as_str().expect("a text");
    let bytes = base64::engine::general_purpose::STANDARD.decode(text).expect("base64");
    let values: Vec<f64> =
        bytes.as_chunks::<4>().0.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))).collect();
    assert_close(&values, &numbers(&data[1]["embedding"]), 1e-7);
    // Every row.
    let pooled = answer(cluster, "/pooling", &json!({"model": case, "input": texts[1]})).await;
    let found = pooled["data"][0]["data"].as_array().expect("rows");
    assert_eq!(found.len(), rows.len());
    for (found, expected) in found.iter().zip(&rows) {
        let expected: Vec<f64> = expected.iter().map(|value| f64::from(*value)).collect();
        assert_close(&numbers(found), &expected, 2e-5);
    }
    assert_eq!(
        cluster.metric("encoder-0", "triptych_encodes_total").await,
        data.len() as f64 + 1.0,
        "each text once, and the one that was sent as tokens"
    );
}

fn image() -> Value {
    let image = std::fs::read(golden("llava_clip_llama/images/64x96.png")).expect("an image");
    json!({"type": "image_url", "image_url": {"url": data_url(&image)}})
}

async fn check_image(cluster: &Cluster) {
    let case = "llava_clip_llama";
    let body = json!({"model": case, "messages": [{"role": "user", "content": [image()]}]});
    let found = answer(cluster, PATH, &body).await;
    let rows = golden_rows(case, "image.64x96.embeds");
    assert_close(&numbers(&found["data"][0]["embedding"]), &normalised(&mean(&rows)), 2e-4);
    assert_eq!(found["usage"]["prompt_tokens"], rows.len());
}

async fn check_refusals(cluster: &Cluster) {
    let about =
        |parts: Value| json!({"model": "llava_clip_llama", "messages": [{"role": "user", "content": parts}]});
    let with_text = about(json!([image(), {"type": "text", "text": "What is it?"}]));
    for (path, body, param, expect) in [
        (PATH, json!({"model": "llava_clip_llama", "input": "a"}), "input", "has no encoder of text"),
        (PATH, json!({"model": "llama_tied", "input": "a"}), "input", "has no encoder of text"),
        (PATH, with_text, "messages", "leave the text out"),
        (PATH, about(json!([image(), image()])), "messages", "has 2 items"),
        (PATH, json!({"model": "bart_odd_heads"}), "input", "one of input and messages"),
        (PATH, json!({"model": "bart_odd_heads", "input": []}), "input", "empty"),
        (
            PATH,
            json!({"model": "bart_odd_heads", "input": "a", "dimensions": 8}),
            "dimensions",
            "which is 36",
        ),
        (
            PATH,
            json!({"model": "bart_odd_heads", "input": "a", "encoding_format": "int8"}),
            "encoding_format",
            "float and base64",
        ),
        (
            PATH,
            json!({"model": "bart_odd_heads", "input": "a", "truncate_prompt_tokens": 4}),
            "truncate_prompt_tokens",
            "not supported",
        ),
        (
            "/pooling",
            json!({"model": "bart_odd_heads", "input": "a", "task": "classify"}),
            "task",
            "token_embed",
        ),
    ] {
        let response = reqwest_client().post(format!("{}{path}", cluster.http)).json(&body).send().await;
        let response = response.expect("the proxy answers");
        let (status, text) = (response.status().as_u16(), response.text().await.expect("a body"));
        let found: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((status, &found["error"]["param"]), (400, &json!(param)), "{body}: {found}");
        assert!(found["error"]["message"].as_str().expect("a text").contains(expect), "{found}");
    }
}
