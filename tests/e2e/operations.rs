//! A cluster under an operator's hand: memory that stays within its budget, models that are loaded, replaced and unloaded while
//! requests run, the SLO that workers have by default, and a worker's log.

use futures::future::join_all;
use serde_json::{Value, json};
use std::io::Write as _;
use std::path::PathBuf;
use triptych_tests::cluster::{Cluster, reqwest_client};
use triptych_tests::process::eventually;
use triptych_tests::samples::{ask_images, text_of};

fn golden(path: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("golden").join(path).display().to_string()
}

/// A model of images, in an amount of memory that is small, beside which others may be loaded.
async fn start() -> Cluster {
    let model = format!("vl={}", golden("qwen2_vl_two_images/model"));
    let updates = golden("");
    let args = ["--model", &model, "--model-updates", &updates, "--ec-cache-mib", "1", "--ec-rows", "f32"];
    Cluster::start(&args).await
}

/// A PNG of one colour, 640 by 640.
fn square(shade: u8) -> Vec<u8> {
    const SIDE: u32 = 640;
    let mut png = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut chunk = |kind: &[u8; 4], data: &[u8]| {
        let mut crc = flate2::Crc::new();
        crc.update(kind);
        crc.update(data);
        png.extend((data.len() as u32).to_be_bytes());
        png.extend(kind);
        png.extend(data);
        png.extend(crc.sum().to_be_bytes());
    };
    let head = [&SIDE.to_be_bytes()[..], &SIDE.to_be_bytes(), &[8, 0, 0, 0, 0]].concat();
    chunk(b"IHDR", &head);
    let mut rows = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
    for _ in 0..SIDE {
        rows.write_all(&[0]).expect("memory");
        rows.write_all(&[shade; SIDE as usize]).expect("memory");
    }
    chunk(b"IDAT", &rows.finish().expect("memory"));
    chunk(b"IEND", &[]);
    png
}

/// Status and body of a call of the admin API.
async fn admin(cluster: &Cluster, method: &str, path: &str, body: Value) -> (u16, Value) {
    let url = format!("{}/admin/{path}", cluster.admin("proxy"));
    let call = reqwest_client().request(method.parse().expect("a method"), url);
    let call = if body.is_null() { call } else { call.body(body.to_string()) };
    let answer = call.send().await.expect("the proxy answers");
    let status = answer.status().as_u16();
    let text = answer.text().await.expect("a body");
    (status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
}

/// Status of a completion of `n` tokens, and their number.
async fn complete(cluster: &Cluster, model: &str, n: u32) -> (u16, u64) {
    let body =
        json!({"model": model, "prompt": "on and on", "max_tokens": n, "temperature": 0, "ignore_eos": true});
    let call = reqwest_client().post(format!("{}/v1/completions", cluster.http)).json(&body);
    let answer = call.send().await.expect("the proxy answers");
    let status = answer.status().as_u16();
    let body: Value = answer.json().await.expect("JSON");
    (status, body["usage"]["completion_tokens"].as_u64().unwrap_or(0))
}

/// Outcomes of a change, by the role of the worker.
fn outcomes(answer: &Value) -> Vec<(String, String)> {
    let of = |change: &Value| {
        let word = |value: &Value| value.as_str().expect("a text").to_owned();
        (word(&change["worker"]).split('@').next().expect("a role").to_owned(), word(&change["state"]))
    };
    answer["workers"].as_array().unwrap_or_else(|| panic!("{answer}")).iter().map(of).collect()
}

fn all(outcome: &[(&str, &str)]) -> Vec<(String, String)> {
    outcome.iter().map(|(role, state)| ((*role).to_owned(), (*state).to_owned())).collect()
}

/// Twenty requests of 529 rows each, 132 KiB, where a MiB is the budget.
async fn rows_stay_within_their_budget(cluster: &Cluster) {
    let images: Vec<Vec<u8>> = (0..20).map(|shade| square(shade * 12)).collect();
    let asked = join_all(images.iter().map(|image| cluster.chat(ask_images("vl", "what is it", &[image]))));
    let watch = async {
        loop {
            let text = cluster.metrics("pd-0").await;
            for state in ["held", "resident"] {
                let line = format!("triptych_ec_cache_bytes{{state=\"{state}\"}} ");
                let bytes = text.lines().find_map(|l| l.strip_prefix(&line)?.parse::<f64>().ok());
                assert!(bytes.is_some_and(|bytes| bytes <= f64::from(1 << 20)), "{state}: {bytes:?}");
            }
        }
    };
    let answers = tokio::select! { answers = asked => answers, () = watch => unreachable!("it has no end") };
    for (status, answer) in answers {
        assert_eq!(status, 200, "{answer}");
        assert!(!text_of(&answer).is_empty(), "{answer}");
    }
}

/// A model that gives way ends what it has begun; what comes later finds the new one, and not the old.
async fn a_model_gives_way(cluster: &Cluster) {
    let load = json!({"model": "text", "path": "llama_tied/model"});
    let (status, answer) = admin(cluster, "POST", "models/load", load).await;
    assert_eq!(
        (status, outcomes(&answer)),
        (200, all(&[("encoder", "not_needed"), ("pd", "done")])),
        "{answer}"
    );
    eventually("the proxy knows it", async || (complete(cluster, "text", 4).await == (200, 4)).then_some(()))
        .await;
    let replace = json!({"model": "next", "path": "mistral_windowed/model", "replaces": "text"});
    let (running, (status, answer)) = tokio::join!(complete(cluster, "text", 1500), async {
        let begun = async || (cluster.metric("pd-0", "triptych_requests_running").await > 0.0).then_some(());
        eventually("it runs", begun).await;
        admin(cluster, "POST", "models/load", replace).await
    });
    assert_eq!(running, (200, 1500), "what it had begun");
    assert_eq!(
        (status, outcomes(&answer)),
        (200, all(&[("encoder", "not_needed"), ("pd", "done")])),
        "{answer}"
    );
    eventually("it is served", async || (complete(cluster, "next", 4).await == (200, 4)).then_some(())).await;
    assert_eq!(complete(cluster, "text", 4).await.0, 404);
}

/// A directory that cannot be loaded is named, and changes nothing.
async fn a_wrong_directory_changes_nothing(cluster: &Cluster) {
    for path in ["../house", "llama_tied", "nowhere"] {
        let load = json!({"model": "wrong", "path": path, "replaces": "next", "workers": ["pd@nobody:1"]});
        assert_eq!(admin(cluster, "POST", "models/load", load.clone()).await.0, 404, "nobody is called so");
        let load = json!({"model": "wrong", "path": path, "replaces": "next"});
        let (status, answer) = admin(cluster, "POST", "models/load", load).await;
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].as_str().is_some_and(|text| !text.is_empty()), "{answer}");
    }
    assert_eq!(complete(cluster, "next", 4).await, (200, 4));
    let (_, models) = admin(cluster, "GET", "models", Value::Null).await;
    assert_eq!(models["changes"][0]["state"], "failed", "{models}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_stays_bounded_and_models_come_and_go_while_requests_run() {
    let cluster = start().await;
    rows_stay_within_their_budget(&cluster).await;
    a_model_gives_way(&cluster).await;
    a_wrong_directory_changes_nothing(&cluster).await;
    let (status, answer) =
        admin(&cluster, "POST", "models/unload", json!({"model": "vl", "drain_s": 20})).await;
    assert_eq!((status, outcomes(&answer)), (200, all(&[("pd", "done"), ("encoder", "done")])), "{answer}");
    eventually("nobody serves it", async || {
        let asked = cluster.chat(ask_images("vl", "what is it", &[&square(0)])).await;
        (asked.0 == 404).then_some(())
    })
    .await;
    let load = json!({"model": "eyes", "path": "qwen2_vl_two_images/model"});
    let (status, answer) = admin(&cluster, "POST", "models/load", load).await;
    assert_eq!((status, outcomes(&answer)), (200, all(&[("encoder", "done"), ("pd", "done")])), "{answer}");
    eventually("its encoder and its decoder are known", async || {
        let asked = cluster.chat(ask_images("eyes", "what is it", &[&square(9)])).await;
        (asked.0 == 200).then_some(())
    })
    .await;
    let (_, workers) = admin(&cluster, "GET", "workers", Value::Null).await;
    let pd = workers["workers"].as_array().expect("workers").iter().find(|w| w["role"] == "pd").expect("one");
    assert_eq!(pd["models"], json!(["eyes", "next"]));
    let path = format!("workers/{}/log", pd["id"].as_str().expect("an id"));
    let (status, answer) = admin(&cluster, "PUT", &path, json!({"filter": "info,triptych_pd=debug"})).await;
    assert_eq!((status, &answer["filter"]), (200, &json!("info,triptych_pd=debug")), "{answer}");
    assert_eq!(admin(&cluster, "PUT", &path, json!({"filter": "no=such=filter"})).await.0, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_share_their_cores_follow_a_tpot_slo_unless_they_are_told_otherwise() {
    let cases: [(&[&str], &[&str]); 5] = [
        (&[], &["tpot_slo_ms=100.0", "max_tpot_slo_ms=300.0"]),
        (&["--max-tpot-slo", "0"], &["tpot_slo_ms=100.0", "max_tpot_slo_ms=100.0"]),
        (&["--tpot-slo", "50"], &["tpot_slo_ms=50.0", "max_tpot_slo_ms=50.0"]),
        (&["--decode-share", "33"], &[]),
        (&["--encoders", "0", "--with-encoder"], &[]),
    ];
    for (flags, expected) in cases {
        let cluster = Cluster::start(flags).await;
        // A worker says so before its decoders are ready.
        let log = eventually("the PD worker's log", async || {
            Some(cluster.up.log()).filter(|log| log.contains("decoder ready"))
        });
        let log = log.await;
        let told: Vec<&str> = log.split_whitespace().filter(|word| word.contains("tpot_slo_ms=")).collect();
        assert_eq!(told, expected, "{flags:?}: {log}");
    }
}
