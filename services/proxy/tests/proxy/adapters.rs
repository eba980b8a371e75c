//! LoRA adapters that requests load: all workers that need one load it, or none does.

use crate::support::{Cluster, client};
use serde_json::{Value, json};

/// The fake encoders refuse every adapter.
#[tokio::test]
async fn what_encoders_refuse_is_dropped_by_the_decoders_again() {
    let cluster = Cluster::start().await;
    let load = async |path: &str| {
        let body = json!({"lora_name": "late", "lora_path": path, "base_model_name": "vl"});
        let request = client().post(cluster.proxy.url("/v1/load_lora_adapter")).json(&body);
        let response = request.send().await.unwrap();
        let (status, text) = (response.status().as_u16(), response.text().await.unwrap());
        // A success is no JSON.
        let answer: Value = serde_json::from_str(&text).unwrap_or_default();
        let message = answer["error"]["message"].as_str().unwrap_or_default().to_owned();
        (status, message, cluster.pd.take_adapter_changes())
    };
    let (status, _, changes) = load("decoder").await;
    assert_eq!((status, changes), (200, vec!["load late".to_owned()]), "no encoder is asked");
    let (status, message, changes) = load("encoder").await;
    assert!(status >= 400, "{message}");
    assert!(message.ends_with("; workers that had loaded it have dropped it again"), "{message}");
    assert_eq!(changes, ["load late", "unload late"]);
    let (status, message, changes) = load("known encoder").await;
    assert!(status >= 400 && !message.contains("dropped"), "{message}");
    assert_eq!(changes, ["load late"], "what was there before stays");
}

#[tokio::test]
async fn fields_that_are_not_known_are_refused_by_name() {
    let cluster = Cluster::start().await;
    for (path, field, body) in [
        ("load", "lora_pth", json!({"lora_name": "a", "lora_pth": "b"})),
        ("load", "is_3d", json!({"lora_name": "a", "lora_path": "b", "is_3d": true})),
        ("unload", "lora_path", json!({"lora_name": "a", "lora_path": "b"})),
    ] {
        let (status, answer) = cluster.proxy.post(&format!("/v1/{path}_lora_adapter"), &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}");
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains("is no field of this request, which has lora_name"), "{message}");
    }
    assert!(cluster.pd.take_adapter_changes().is_empty());
}
