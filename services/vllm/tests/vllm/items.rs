//! Items: with their bytes where vLLM encodes, by metadata where our encoders do, and after an encoder instance of vLLM's.

use crate::cluster::{CHAT, Proxy, eventually};
use crate::connector::GRID;
use crate::encoder::Encoder;
use crate::fake::{MODEL, Step, Vllm};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::sync::Arc;
use triptych_core::ContentKey;

const PNG: &[u8] = b"\x89PNG\r\n\x1a\nnot decoded by anybody here";

fn about(image: &[u8]) -> Value {
    let url = format!("data:image/png;base64,{}", BASE64_STANDARD.encode(image));
    json!({"model": MODEL, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"},
    ]}]})
}

/// The image of the latest request, as vLLM was given it.
fn image_of(vllm: &Vllm) -> Value {
    vllm.asked().pop().unwrap().body["messages"][0]["content"][0].clone()
}

async fn ask(proxy: &Proxy, image: &[u8]) {
    assert_eq!(proxy.chat(&about(image)).await, (200, "Hello".to_owned()));
}

/// A proxy in front of a vLLM server and an encoder of ours.
async fn with_encoder(family: &'static str) -> (Vllm, Encoder, Proxy) {
    let vllm = Vllm::start().await;
    let (encoder, address) = Encoder::start(family).await;
    let proxy = Proxy::start(vec![address], vec![vllm.setting("")]).await;
    assert!(encoder.store.set(Arc::clone(&proxy.store)).is_ok());
    (vllm, encoder, proxy)
}

#[tokio::test]
async fn without_an_encoder_an_item_goes_with_its_bytes_under_a_name_of_the_proxy() {
    let vllm = Vllm::start().await;
    let proxy = Proxy::start(Vec::new(), vec![vllm.setting("")]).await;
    ask(&proxy, PNG).await;
    let part = image_of(&vllm);
    let url = format!("data:image/png;base64,{}", BASE64_STANDARD.encode(PNG));
    assert_eq!((&part["type"], &part["image_url"]["url"]), (&json!("image_url"), &json!(url)));
    let uuid = part["uuid"].as_str().unwrap();
    assert!(ContentKey::from_hex(uuid.strip_prefix("item-").unwrap()).is_some(), "{uuid}");
    ask(&proxy, b"\x89PNG another").await;
    assert_ne!(image_of(&vllm)["uuid"], uuid, "another item has another name");
}

#[tokio::test]
async fn an_item_of_our_encoder_goes_by_metadata_and_is_encoded_again_when_it_is_lost() {
    let (vllm, encoder, proxy) = with_encoder("qwen2_vl").await;
    ask(&proxy, PNG).await;
    let part = image_of(&vllm);
    assert_eq!(
        (&part["type"], &part["image_embeds"]),
        (&json!("image_embeds"), &json!({"image_grid_thw": GRID}))
    );
    let sent = vllm.asked().pop().unwrap().body.to_string();
    assert!(!sent.contains(&BASE64_STANDARD.encode(PNG)), "no pixels: {sent}");
    let key = part["uuid"].as_str().unwrap().strip_prefix("triptych-").unwrap();
    let key = ContentKey::from_hex(key).unwrap();
    assert!(proxy.store.get(&key).await.unwrap().is_some(), "it is the name of the object");
    assert_eq!(encoder.n_encodes(), 1);

    // vLLM waited for the object in vain, and ended the request.
    proxy.store.delete(&key).await.unwrap();
    vllm.script([Step::Status(
        500,
        json!({"error": {"message": "Internal server error", "code": 500}}).to_string(),
    )]);
    let n = vllm.asked().len();
    ask(&proxy, PNG).await;
    assert_eq!((encoder.n_encodes(), vllm.asked().len()), (2, n + 2));
    assert!(proxy.store.get(&key).await.unwrap().is_some());
}

#[tokio::test]
async fn a_request_is_sent_when_its_item_is_there_and_not_when_it_is_described() {
    let (vllm, encoder, proxy) = with_encoder("qwen2_vl").await;
    encoder.open(false);
    let request = tokio::spawn(proxy.client.post(proxy.url(CHAT)).json(&about(PNG)).send());
    eventually("it is encoded", async || encoder.n_encodes() == 1).await;
    // Another request goes all the way meanwhile.
    let text = json!({"model": MODEL, "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(proxy.chat(&text).await.0, 200);
    assert_eq!(vllm.asked().len(), 1, "vLLM would wait for its patience and give the request up");
    encoder.open(true);
    assert_eq!(request.await.unwrap().unwrap().status().as_u16(), 200);
    assert_eq!((vllm.asked().len(), image_of(&vllm)["type"].as_str()), (2, Some("image_embeds")));
}

#[tokio::test]
async fn an_item_of_a_family_without_metadata_goes_with_its_bytes_beside_the_output() {
    let (vllm, encoder, proxy) = with_encoder("llava").await;
    ask(&proxy, PNG).await;
    let part = image_of(&vllm);
    assert_eq!(part["type"], "image_url");
    assert!(part["uuid"].as_str().unwrap().starts_with("triptych-"), "{part}");
    assert_eq!(encoder.n_encodes(), 1);
}

#[tokio::test]
async fn an_encoder_instance_is_asked_for_one_token_about_the_item_under_the_same_name() {
    let (encoder, pd) = (Vllm::start().await, Vllm::start().await);
    let proxy = Proxy::start(vec![encoder.setting("")], vec![pd.setting("")]).await;
    let whole = json!({"id": "chatcmpl-1", "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "length"}]});
    encoder.script([Step::Status(500, String::new()), Step::Status(200, whole.to_string())]);
    ask(&proxy, PNG).await;
    let job = encoder.asked().pop().unwrap().body;
    assert_eq!((&job["max_tokens"], &job["stream"]), (&json!(1), &json!(false)));
    let part = image_of(&pd);
    assert_eq!(job["messages"][0]["content"][0], part, "the same item under the same name");
    assert!(part["uuid"].as_str().unwrap().starts_with("item-"), "{part}");
    assert_eq!((encoder.asked().len(), pd.asked().len()), (2, 1), "a job that failed is tried again");

    let bad =
        json!({"error": {"message": "cannot identify image file", "type": "BadRequestError", "code": 400}});
    encoder.script([Step::Status(400, bad.to_string())]);
    let (status, text) = proxy.chat(&about(b"no image")).await;
    assert_eq!(status, 400, "{text}");
    assert!(text.contains("cannot identify") && text.contains("messages[0].content[0].image_url"), "{text}");
}

#[tokio::test]
async fn options_of_an_item_are_refused_where_vllm_reads_it() {
    let vllm = Vllm::start().await;
    let proxy = Proxy::start(Vec::new(), vec![vllm.setting("?items=image+video")]).await;
    let url = format!("data:video/mp4;base64,{}", BASE64_STANDARD.encode(b"a film"));
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": [
        {"type": "video_url", "video_url": {"url": url}},
    ]}]});
    ask_for(&proxy, &body, 200, "Hello").await;
    assert_eq!(image_of(&vllm)["type"], "video_url");
    body["mm_processor_kwargs"] = json!({"fps": 2.0});
    ask_for(&proxy, &body, 400, "fps").await;
    body.as_object_mut().unwrap().remove("mm_processor_kwargs");
    body["messages"][0]["content"] =
        json!([{"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AAAA"}}]);
    ask_for(&proxy, &body, 400, "audio").await;
}

async fn ask_for(proxy: &Proxy, body: &Value, status: u16, says: &str) {
    let (answered, text) = proxy.chat(body).await;
    assert!(answered == status && text.contains(says), "{answered} {text}");
}
