//! LoRA adapters through the whole cluster: several and the base model at once, loaded, used and unloaded while it serves; of
//! encoders too.
//!
//! The adapters are the golden ones, for which `tests/golden/lora.py` and `lora_encoders.py` have the tokens of PEFT.

use futures::future::join_all;
use serde_json::{Value, json};
use std::path::PathBuf;
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::process::{eventually, signal};

fn golden(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(path)
}

fn expected() -> Value {
    let text = std::fs::read(golden("lora_llama/expected.json")).expect("golden files");
    serde_json::from_slice(&text).expect("JSON")
}

/// Two adapters of the start, and a directory from which more may be loaded.
async fn start() -> Cluster {
    let adapter = |name: &str, case: &str| format!("{name}={}", golden("lora_llama").join(case).display());
    let (model, folder) = (golden("llama_tied/model"), golden("lora_llama"));
    let args = [
        "--model".to_owned(),
        format!("base={}", model.display()),
        "--lora".to_owned(),
        adapter("attention", "attention"),
        "--lora".to_owned(),
        adapter("base:everything", "everything"),
        "--lora-updates".to_owned(),
        folder.display().to_string(),
    ];
    Cluster::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).await
}

async fn post(cluster: &Cluster, path: &str, body: &Value) -> (u16, String) {
    let response = reqwest_client().post(format!("{}{path}", cluster.http)).json(body).send().await;
    let response = response.expect("the proxy answers");
    (response.status().as_u16(), response.text().await.expect("a body"))
}

/// The tokens that a model answers the golden prompt with.
async fn tokens(cluster: &Cluster, model: &str) -> Vec<u64> {
    let body = json!({
        "model": model, "prompt": expected()["input_ids"], "temperature": 0, "max_tokens": 24,
        "ignore_eos": true,
    });
    let (status, text) = post(cluster, "/v1/completions", &body).await;
    assert_eq!(status, 200, "{model}: {text}");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    ids(&answer["choices"][0]["token_ids"])
}

fn ids(value: &Value) -> Vec<u64> {
    value.as_array().expect("a list").iter().map(|id| id.as_u64().expect("an id")).collect()
}

/// The tokens of PEFT with an adapter, or of the base model.
fn of_peft(name: &str) -> Vec<u64> {
    let expected = expected();
    let adapters = expected["adapters"].as_array().expect("adapters").clone();
    let found = adapters.iter().find(|adapter| adapter["name"] == name);
    ids(found.map_or(&expected["base_greedy_tokens"], |adapter| &adapter["greedy_tokens"]))
}

async fn listed(cluster: &Cluster) -> Vec<(String, Option<String>)> {
    let models = reqwest_client().get(format!("{}/v1/models", cluster.http)).send().await.expect("an answer");
    let models: Value = models.json().await.expect("JSON");
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let of = |model: &Value| (text(&model["id"]).expect("an id"), text(&model["parent"]));
    models["data"].as_array().expect("models").iter().map(of).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_adapters_and_the_base_answer_at_once_as_peft_does_and_share_no_prefix() {
    let cluster = start().await;
    let base = || Some("base".to_owned());
    let all = [("attention", base()), ("base", None), ("everything", base())];
    assert_eq!(listed(&cluster).await, all.map(|(name, parent)| (name.to_owned(), parent)));
    // Three times, the second and third over cached prefixes.
    for _ in 0..3 {
        let names = ["base", "attention", "base:everything", "base:attention", "everything"];
        let answers = join_all(names.map(|name| tokens(&cluster, name))).await;
        for (name, answer) in names.iter().zip(answers) {
            assert_eq!(answer, of_peft(name.trim_start_matches("base:")), "{name}");
        }
    }
    let metrics = cluster.metrics("pd-0").await;
    assert!(metrics.contains("triptych_lora_adapters{model=\"base\"} 2"), "{metrics}");
    let body = json!({"model": "base:nobody", "prompt": "x", "max_tokens": 1});
    assert_eq!(post(&cluster, "/v1/completions", &body).await.0, 404);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_is_loaded_used_and_unloaded_while_the_cluster_serves() {
    let cluster = start().await;
    let load = |name: &str, path: &str| json!({"lora_name": name, "lora_path": path});
    for (name, path, param) in [
        ("late", "../llama_tied", "lora_path"),
        ("late", "nowhere", "lora_path"),
        ("base", "feed_forward", "lora_name"),
        ("attention", "feed_forward", "lora_name"),
        ("", "feed_forward", "lora_name"),
    ] {
        let (status, text) = post(&cluster, "/v1/load_lora_adapter", &load(name, path)).await;
        assert_eq!(status, 400, "{name} {path}: {text}");
        let error: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!(error["error"]["param"], param, "{text}");
    }
    for _ in 0..2 {
        let (status, text) = post(&cluster, "/v1/load_lora_adapter", &load("late", "feed_forward")).await;
        assert_eq!((status, text.as_str()), (200, "Success: LoRA adapter 'late' added successfully."));
    }
    eventually("the proxy knows it", async || {
        listed(&cluster).await.contains(&("late".to_owned(), Some("base".to_owned()))).then_some(())
    })
    .await;
    assert_eq!(tokens(&cluster, "late").await, of_peft("feed_forward"));
    let unload = json!({"lora_name": "late"});
    assert_eq!(post(&cluster, "/v1/unload_lora_adapter", &unload).await.0, 200);
    let body = json!({"model": "late", "prompt": "x", "max_tokens": 1});
    eventually("requests for it are refused", async || {
        (post(&cluster, "/v1/completions", &body).await.0 == 404).then_some(())
    })
    .await;
    assert_eq!(post(&cluster, "/v1/unload_lora_adapter", &unload).await.0, 404);
    assert_eq!(tokens(&cluster, "attention").await, of_peft("attention"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nobody_loads_adapters_where_it_is_not_allowed() {
    let model = format!("base={}", golden("llama_tied/model").display());
    let cluster = Cluster::start(&["--model", &model]).await;
    let body = json!({"lora_name": "a", "lora_path": golden("lora_llama/attention")});
    let (status, text) = post(&cluster, "/v1/load_lora_adapter", &body).await;
    assert_eq!(status, 400, "{text}");
    assert!(text.contains("--lora-updates"), "{text}");
}

/// The tokens of PEFT's T5 over the first text, with an adapter or without.
fn of_t5(name: &str) -> Vec<u64> {
    let text = std::fs::read(golden("lora_t5_encoder/expected.json")).expect("golden files");
    let expected: Value = serde_json::from_slice(&text).expect("JSON");
    let adapters = expected["adapters"].as_array().expect("adapters").iter();
    let found = adapters.clone().find(|adapter| adapter["name"] == name);
    ids(found.map_or(&expected["base_tokens_from_start"], |adapter| &adapter["tokens_from_start"]))
}

/// The tokens that a model or an adapter answers the first text with; the status if it does not.
async fn t5_tokens(cluster: &Cluster, model: &str) -> Result<Vec<u64>, (u16, String)> {
    t5_answer(cluster, model, 0).await
}

async fn t5_answer(cluster: &Cluster, model: &str, text: usize) -> Result<Vec<u64>, (u16, String)> {
    let input = text;
    let text = std::fs::read(golden("t5_small/expected.json")).expect("golden files");
    let case: Value = serde_json::from_slice(&text).expect("JSON");
    let body = json!({
        "model": model, "prompt": case["inputs"][input], "temperature": 0, "max_tokens": 24, "ignore_eos": true,
    });
    let (status, text) = post(cluster, "/v1/completions", &body).await;
    if status != 200 {
        return Err((status, text));
    }
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    Ok(ids(&answer["choices"][0]["token_ids"]))
}

/// An encoder with an adapter is another encoder: the same text is encoded once for each, and none takes the rows of another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn adapters_of_an_encoder_have_encoder_outputs_of_their_own_and_outlive_its_workers() {
    let (model, folder) = (golden("t5_small/model"), golden("lora_t5_encoder"));
    let args = [
        "--model".to_owned(),
        format!("t5={}", model.display()),
        "--lora".to_owned(),
        format!("both={}", folder.join("both").display()),
        "--lora-updates".to_owned(),
        folder.display().to_string(),
    ];
    let mut cluster = Cluster::start(&args.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let load = json!({"lora_name": "late", "lora_path": "encoder"});
    assert_eq!(post(&cluster, "/v1/load_lora_adapter", &load).await.0, 200);
    eventually("the proxy knows it", async || t5_tokens(&cluster, "late").await.ok().map(drop)).await;
    for _ in 0..2 {
        let names = ["t5", "late", "both", "t5:late", "t5", "both"];
        let answers = join_all(names.map(|name| t5_tokens(&cluster, name))).await;
        for (name, answer) in names.iter().zip(answers) {
            let golden_name = if name.ends_with("late") { "encoder" } else { name };
            assert_eq!(answer, Ok(of_t5(golden_name)), "{name}");
        }
    }
    let n_encodes = cluster.metric("encoder-0", "triptych_encodes_total").await;
    assert_eq!(n_encodes, 3.0, "one text, by the encoder and two adapters of it");

    for (field, body) in [
        ("lora_weight", json!({"lora_name": "late", "lora_path": "encoder", "lora_weight": 1})),
        ("lora_id", json!({"lora_name": "late", "lora_path": "encoder", "lora_id": 1})),
    ] {
        let (status, text) = post(&cluster, "/v1/load_lora_adapter", &body).await;
        let error: Value = serde_json::from_str(&text).expect("JSON");
        assert_eq!((status, &error["error"]["param"]), (400, &json!(field)), "{text}");
    }

    for (i, role) in ["encoder", "pd"].into_iter().enumerate() {
        let old = cluster.pid(role);
        signal(old, "KILL");
        cluster.wait_replaced(role, old).await;
        // A text that nobody has encoded.
        eventually("the adapter is loaded again", async || t5_answer(&cluster, "late", 1 + i).await.ok())
            .await;
        for (name, golden_name) in [("late", "encoder"), ("both", "both"), ("t5", "t5")] {
            assert_eq!(t5_tokens(&cluster, name).await, Ok(of_t5(golden_name)), "after the {role} restarted");
        }
    }

    assert_eq!(post(&cluster, "/v1/unload_lora_adapter", &json!({"lora_name": "late"})).await.0, 200);
    eventually("requests for it are refused", async || {
        t5_tokens(&cluster, "late").await.is_err_and(|(status, _)| status == 404).then_some(())
    })
    .await;
    assert_eq!(t5_tokens(&cluster, "t5").await, Ok(of_t5("t5")));
}
