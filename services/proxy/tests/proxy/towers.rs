//! A model of two towers, each on an encoder worker of its own: a job, a key and an output for each tower of each item.

use crate::fakes::{EncodeStep, Encoder, Pd, Process, model};
use crate::support::{Proxy, ask, memory, question};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::num::NonZeroU32;
use triptych_core::{Failure, Modality};
use triptych_proto::v1;
use triptych_proxy::ProxyConfig;
use triptych_proxy::auth::{AuthConfig, Quota};
use triptych_runtime::status::to_status;

const NAMES: [&str; 2] = ["low", "high"];

/// The model with the towers that a worker holds.
fn holding(towers: &[u8]) -> Vec<v1::WorkerModel> {
    let mut served = model("vl", Modality::Image, 1);
    served.encoders = towers
        .iter()
        .map(|tower| {
            let mut encoder = model("vl", Modality::Image, tower + 1).encoders.remove(0);
            (encoder.tower_index, encoder.tower_name) = ((*tower).into(), NAMES[usize::from(*tower)].into());
            encoder
        })
        .collect();
    vec![served]
}

struct Towers {
    low: Encoder,
    high: Encoder,
    pd: Pd,
    proxy: Proxy,
    _processes: Vec<Process>,
}

impl Towers {
    async fn start() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(change: impl FnOnce(&mut ProxyConfig)) -> Self {
        let store = memory().await;
        let [low, high] = [0, 1].map(|tower| Encoder::new(holding(&[tower]), store.clone()));
        let pd = Pd::new(holding(&[0, 1]));
        let processes = vec![low.serve(), high.serve(), pd.serve()];
        let [a, b, c] = [0, 1, 2].map(|i: usize| processes[i].address);
        let proxy = Proxy::start(&[a, b], &[c], store, change).await;
        proxy.ready().await;
        Self { low, high, pd, proxy, _processes: processes }
    }

    fn n_jobs(&self) -> [usize; 2] {
        [&self.low, &self.high].map(|encoder| encoder.jobs().len())
    }

    async fn post(&self, path: &str, content: Value) -> (u16, Value) {
        let body = json!({"model": "vl", "messages": [{"role": "user", "content": content}]});
        self.proxy.post(path, &body).await
    }
}

fn image(bytes: &[u8]) -> Value {
    let url = format!("data:image/png;base64,{}", STANDARD.encode(bytes));
    json!({"type": "image_url", "image_url": {"url": url}})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_is_a_job_for_each_tower_where_it_is_held() {
    let towers = Towers::start().await;
    let answer = ask(&towers.proxy, question(&[b"cat", b"dog"])).await.unwrap();
    assert_eq!(answer.sources(), [v1::ItemSource::Encoded; 2], "a source for each item");
    assert_eq!(towers.n_jobs(), [2, 2]);
    assert_eq!([towers.low.towers(), towers.high.towers()], [vec![0, 0], vec![1, 1]]);
    let request = towers.pd.requests().pop().unwrap();
    let prints: Vec<_> = request.items.iter().map(|item| item.fingerprint[0]).collect();
    assert_eq!(prints, [1, 2, 1, 2], "the outputs of an item follow one another");
    let keys: BTreeSet<_> = request.items.iter().map(|item| item.key.clone()).collect();
    assert_eq!(keys.len(), 4);
    // A tower that fails is asked again by itself.
    towers.high.script([EncodeStep::Fail(to_status(&Failure::unavailable("not now")))]);
    ask(&towers.proxy, question(&[b"cow"])).await.unwrap();
    assert_eq!(towers.n_jobs(), [3, 4], "only the tower that failed is asked again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count_an_item_once_whatever_number_of_towers_reads_it() {
    let towers = Towers::start().await;
    ask(&towers.proxy, question(&[b"cat", b"dog"])).await.unwrap();
    ask(&towers.proxy, question(&[b"cat"])).await.unwrap();
    for (line, expect) in [
        ("triptych_item_source_total{source=\"encoded\",modality=\"image\"}", 2.0),
        ("triptych_item_source_total{source=\"cached\",modality=\"image\"}", 1.0),
        ("triptych_item_tokens_count{modality=\"image\"}", 3.0),
        ("triptych_requests_by_items_total{model=\"vl\",items=\"2\"}", 1.0),
        // Two tokens of each item are the first tower's, of seven in a prompt.
        ("triptych_request_text_tokens_sum{model=\"vl\"}", 3.0 + 5.0),
    ] {
        assert_eq!(towers.proxy.metric(line).await, expect, "{line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_item_is_charged_once_whatever_number_of_towers_encodes_it() {
    const KIB: usize = 1 << 10;
    let towers = Towers::with(|config| {
        // A body's worth at once: the image fits once, not twice.
        config.limits.max_body_bytes = 64 * KIB;
        let quota = Quota { encode_kib_per_s: NonZeroU32::new(1), ..Quota::default() };
        config.auth = AuthConfig { quota, ..AuthConfig::default() };
    });
    let towers = towers.await;
    let image = vec![7; 40 * KIB];
    ask(&towers.proxy, question(&[&image])).await.unwrap();
    assert_eq!(towers.n_jobs(), [1, 1]);
    let refused = ask(&towers.proxy, question(&[&[8; 40 * KIB]])).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failure_of_a_tower_names_the_item() {
    let towers = Towers::start().await;
    ask(&towers.proxy, question(&[b"cat"])).await.unwrap();
    towers.high.script([EncodeStep::Fail(to_status(&Failure::invalid("the JPEG is cut off")))]);
    let content = json!([image(b"cat"), image(b"half a dog"), {"type": "text", "text": "what is it?"}]);
    let (status, refused) = towers.post("/v1/chat/completions", content).await;
    assert_eq!(status, 400, "{refused}");
    assert_eq!(refused["error"]["param"], "messages[0].content[1].image_url", "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_stands_for_the_outputs_of_all_towers() {
    let towers = Towers::start().await;
    let (status, stored) = towers.post("/v1/encoder_outputs", json!([image(b"cat")])).await;
    assert_eq!(status, 200, "{stored}");
    let part = json!({"type": "encoder_output", "encoder_output": {"id": stored["id"]}});
    let text = json!({"type": "text", "text": "what is it?"});
    let (status, answer) = towers.post("/v1/chat/completions", json!([part, text])).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(towers.n_jobs(), [1, 1], "nothing is encoded again");
    let request = towers.pd.requests().pop().unwrap();
    assert_eq!(request.items.iter().map(|item| item.fingerprint[0]).collect::<Vec<_>>(), [1, 2]);
    // The first tower's alone is the name of nothing that the model reads.
    let id = stored["id"].as_str().unwrap();
    let parts: Vec<&str> = id.split('-').collect();
    let (first, _) = parts[2].split_once('.').expect("two keys");
    let forged = json!({"type": "encoder_output", "encoder_output": {"id": id.replace(parts[2], first)}});
    let (status, refused) = towers.post("/v1/chat/completions", json!([forged])).await;
    assert_eq!(status, 404, "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_of_several_towers_are_no_embedding() {
    let towers = Towers::start().await;
    for path in ["/v1/embeddings", "/pooling"] {
        let (status, refused) = towers.post(path, json!([image(b"cat")])).await;
        assert_eq!(status, 400, "{refused}");
        let message = refused["error"]["message"].as_str().unwrap_or_default();
        assert!(message.contains("has the towers low and high"), "{refused}");
    }
    assert_eq!(towers.n_jobs(), [0, 0]);
}
