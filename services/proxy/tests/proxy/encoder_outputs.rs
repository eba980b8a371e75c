//! Items without an image: rows that a client computed (`image_embeds`), and `/v1/encoder_outputs`, where an item is encoded once, and its name stands for it later, for its tenant alone.

use crate::support::{Cluster, client};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use triptych_core::embeddings;

const UPLOAD: &str = "/v1/encoder_outputs";
const CHAT: &str = "/v1/chat/completions";

fn upload(bytes: &[u8]) -> Value {
    let url = format!("data:image/png;base64,{}", STANDARD.encode(bytes));
    json!({"model": "vl", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]})
}

fn ask(id: &str) -> Value {
    let parts = json!([
        {"type": "text", "text": "what is it?"}, {"type": "encoder_output", "encoder_output": {"id": id}},
    ]);
    json!({"model": "vl", "messages": [{"role": "user", "content": parts}]})
}

async fn post(cluster: &Cluster, path: &str, tenant: &str, body: &Value) -> (u16, Value) {
    let request = client().post(cluster.proxy.url(path)).header("x-triptych-tenant", tenant).json(body);
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

#[tokio::test]
async fn a_name_stands_for_an_item_without_its_bytes() {
    let cluster = Cluster::start().await;
    let (status, stored) = post(&cluster, UPLOAD, "ada", &upload(b"cat")).await;
    assert_eq!(status, 200, "{stored}");
    assert_eq!(
        (&stored["object"], &stored["modality"], &stored["model"]),
        (&json!("encoder_output"), &json!("image"), &json!("vl"))
    );
    assert!(stored["n_tokens"].as_u64() > Some(0) && stored["hidden"].as_u64() > Some(0), "{stored}");
    let id = stored["id"].as_str().unwrap();
    let (status, answer) = post(&cluster, CHAT, "ada", &ask(id)).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(cluster.encoder.jobs().len(), 1, "nothing is encoded again");
    let request = cluster.pd.requests().pop().unwrap();
    let key: String = request.items[0].key.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(id.split('-').nth(2), Some(&*key));
    // The same item as bytes is the same output.
    let (_, again) = post(&cluster, UPLOAD, "ada", &upload(b"cat")).await;
    assert_eq!((&again["id"], cluster.encoder.jobs().len()), (&stored["id"], 1));
}

#[tokio::test]
async fn a_name_of_another_tenant_is_as_if_it_were_not_there() {
    let cluster = Cluster::start().await;
    let (_, stored) = post(&cluster, UPLOAD, "ada", &upload(b"cat")).await;
    let id = stored["id"].as_str().unwrap();
    // One that was never made: of a cluster with another store.
    let elsewhere = Cluster::start().await;
    let (_, other) = post(&elsewhere, UPLOAD, "bob", &upload(b"dog")).await;
    let absent = other["id"].as_str().unwrap();
    let mut refusals = Vec::new();
    for id in [id, absent] {
        let (status, refused) = post(&cluster, CHAT, "bob", &ask(id)).await;
        assert_eq!(status, 404, "{refused}");
        assert_eq!(refused["error"]["param"], "messages[0].content[1].encoder_output");
        refusals.push(refused);
    }
    assert_eq!(refusals[0], refusals[1], "the two cannot be told apart");
    assert_eq!(cluster.encoder.jobs().len(), 1, "nothing is encoded");
    assert!(cluster.pd.requests().is_empty());
}

#[tokio::test]
async fn rows_that_a_client_computed_go_to_the_encoder_as_they_are() {
    let cluster = Cluster::start().await;
    let asked = |embeds: Value| {
        let parts =
            json!([{"type": "text", "text": "what?"}, {"type": "image_embeds", "image_embeds": embeds}]);
        json!({"model": "vl", "messages": [{"role": "user", "content": parts}]})
    };
    let [rows, grid] = [b"rows", b"grid"].map(|file| STANDARD.encode(file));
    let (status, answer) = post(&cluster, CHAT, "", &asked(json!(rows))).await;
    assert_eq!(status, 200, "{answer}");
    let with_grid = json!({"image_embeds": rows, "image_grid_thw": grid});
    let (status, answer) = post(&cluster, CHAT, "", &asked(with_grid)).await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(cluster.encoder.jobs(), [embeddings::join(b"rows", b""), embeddings::join(b"rows", b"grid")]);
    // The same bytes as an image are another output.
    let url = format!("data:image/png;base64,{}", STANDARD.encode(embeddings::join(b"rows", b"")));
    let parts = json!([{"type": "image_url", "image_url": {"url": url}}]);
    let image = json!({"model": "vl", "messages": [{"role": "user", "content": parts}]});
    assert_eq!(post(&cluster, CHAT, "", &image).await.0, 200);
    let keys: Vec<_> = cluster.pd.requests().iter().map(|request| request.items[0].key.clone()).collect();
    assert!(keys[0] != keys[1] && keys[0] != keys[2]);
    for embeds in [json!("*"), json!(7), json!({"image_grid_thw": grid})] {
        let (status, refused) = post(&cluster, CHAT, "", &asked(embeds)).await;
        assert_eq!(status, 400, "{refused}");
    }
}

#[tokio::test]
async fn what_is_no_name_and_what_is_no_item_are_refused_by_name() {
    let cluster = Cluster::start().await;
    let (_, stored) = post(&cluster, UPLOAD, "", &upload(b"cat")).await;
    let (status, refused) = post(&cluster, CHAT, "", &ask("eco-image-00-00")).await;
    assert_eq!(
        (status, &refused["error"]["param"]),
        (400, &json!("messages[0].content[1].encoder_output")),
        "{refused}"
    );
    let mut of_audio = ask(stored["id"].as_str().unwrap());
    of_audio["model"] = json!("asr");
    let (status, refused) = post(&cluster, CHAT, "", &of_audio).await;
    assert_eq!(status, 400, "{refused}");
    let text = json!({"model": "vl", "messages": [{"role": "user", "content": "hi"}]});
    let (status, refused) = post(&cluster, UPLOAD, "", &text).await;
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("messages")), "{refused}");
}
