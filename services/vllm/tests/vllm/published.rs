//! vLLM's encoders in front of PD workers of ours: whose rows are taken, and what happens when they are lost or never come.

use crate::cluster::{CHAT, Proxy, eventually};
use crate::connector::{Connector, tower};
use crate::decoder::Decoder;
use crate::fake::{MODEL, Step, Vllm};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use std::sync::Arc;
use triptych_core::item::from_f32;
use triptych_core::{DType, EncodedItem, EncoderOutput, Fingerprint, Modality};
use triptych_ec::object::encode;

fn about(image: &[u8]) -> Value {
    let url = format!("data:image/png;base64,{}", BASE64_STANDARD.encode(image));
    json!({"model": MODEL, "messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"},
    ]}]})
}

/// Encoders of vLLM's with these weights, a PD worker of ours, and a proxy that is started with them.
async fn cluster(weights: &[u8], publishes: Option<Fingerprint>) -> (Vec<Vllm>, Decoder, Proxy) {
    let store = Proxy::store().await;
    let mut encoders = Vec::new();
    for weights in weights {
        let vllm = Vllm::start().await;
        vllm.publish(Connector { store: Arc::clone(&store), tower: tower(*weights), publishes });
        encoders.push(vllm);
    }
    let (decoder, address) = Decoder::start(tower(3)).await;
    assert!(decoder.store.set(Arc::clone(&store)).is_ok());
    let proxy =
        Proxy::unready(encoders.iter().map(|vllm| vllm.setting("")).collect(), vec![address], store).await;
    (encoders, decoder, proxy)
}

async fn ready(proxy: &Proxy) {
    eventually("the proxy is ready", async || proxy.status("/readyz").await == 200).await;
}

async fn ask(proxy: &Proxy, image: &[u8]) {
    assert_eq!(proxy.chat(&about(image)).await, (200, "Hello".to_owned()));
}

#[tokio::test]
async fn rows_of_vllms_tower_are_read_from_the_store_by_the_key_that_the_proxy_named() {
    let (encoders, decoder, proxy) = cluster(&[3], None).await;
    ready(&proxy).await;
    ask(&proxy, b"\x89PNG one").await;
    ask(&proxy, b"\x89PNG one").await;
    let read = decoder.answered();
    let of_vllm = tower(3).rows_of_vllm(Modality::Image, DType::Bf16);
    assert_eq!((read.len(), read[0].fingerprint, read[0].n_tokens), (2, of_vllm, 6));
    let asked = encoders[0].asked();
    assert_eq!(asked.len(), 1, "the second time it is in the store");
    let (body, part) = (&asked[0].body, &asked[0].body["messages"][0]["content"][0]);
    assert_eq!(
        (&part["uuid"], &body["max_tokens"]),
        (&json!(format!("triptych-{}", read[0].key)), &json!(1))
    );
    // What vLLM's connector does not publish is refused by name.
    let mut video = about(b"a film");
    video["messages"][0]["content"][0] =
        json!({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}});
    let (status, text) = proxy.chat(&video).await;
    assert!(status == 400 && text.contains("reads image, the request has video"), "{status} {text}");
}

#[tokio::test]
async fn a_lost_or_damaged_output_is_encoded_again_and_so_is_a_job_that_failed() {
    let (encoders, decoder, proxy) = cluster(&[3], None).await;
    ready(&proxy).await;
    let failed = Step::Status(500, json!({"error": {"message": "boom", "code": 500}}).to_string());
    encoders[0].script([failed, Step::Cut(Vec::new())]);
    ask(&proxy, b"\x89PNG one").await;
    assert_eq!(encoders[0].asked().len(), 3, "both failures are tried again");
    let key = decoder.answered()[0].key;
    proxy.store.delete(&key).await.unwrap();
    ask(&proxy, b"\x89PNG one").await;
    let object = proxy.store.get(&key).await.unwrap().unwrap();
    let mut damaged = object.to_vec();
    *damaged.last_mut().unwrap() ^= 1;
    proxy.store.delete(&key).await.unwrap();
    proxy.store.put_if_absent(&key, damaged.into()).await.unwrap();
    ask(&proxy, b"\x89PNG one").await;
    assert_eq!((encoders[0].asked().len(), decoder.answered().len()), (5, 3));
    // Another encoder's object under the key makes room.
    let item = EncodedItem { fingerprint: Fingerprint::from_bytes([9; 32]), ..decoder.answered()[0].clone() };
    let alien = EncoderOutput::seal(item, from_f32(&[2.0; 6], DType::Bf16)).unwrap();
    proxy.store.delete(&key).await.unwrap();
    proxy.store.put_if_absent(&key, encode(&alien)).await.unwrap();
    eventually("the proxy asks the store again", async || {
        ask(&proxy, b"\x89PNG one").await;
        encoders[0].asked().len() == 6
    })
    .await;
    assert_eq!(proxy.store.get(&key).await.unwrap(), Some(object));
}

#[tokio::test]
async fn an_encoder_that_dies_in_a_job_is_replaced_by_another() {
    let (encoders, decoder, proxy) = cluster(&[3, 3], None).await;
    ready(&proxy).await;
    let hold = || Step::Hold(Vec::new());
    encoders.iter().for_each(|encoder| encoder.script([hold()]));
    let request = tokio::spawn({
        let (client, url) = (proxy.client.clone(), proxy.url(CHAT));
        async move { client.post(url).json(&about(b"\x89PNG one")).send().await.unwrap().status().as_u16() }
    });
    eventually("one is asked", async || encoders.iter().any(|encoder| !encoder.asked().is_empty())).await;
    let (dead, other) = match encoders[0].asked().is_empty() {
        true => (&encoders[1], &encoders[0]),
        false => (&encoders[0], &encoders[1]),
    };
    other.clear_script();
    dead.kill();
    assert_eq!(request.await.unwrap(), 200);
    assert_eq!((decoder.answered().len(), other.asked().len()), (1, 1));
}

#[tokio::test]
async fn an_encoder_of_another_tower_is_refused_by_name() {
    let (_encoders, decoder, proxy) = cluster(&[4], None).await;
    eventually("the proxy knows both", async || {
        proxy.chat(&about(b"\x89PNG one")).await.1.contains("do not agree")
    })
    .await;
    let (status, text) = proxy.chat(&about(b"\x89PNG one")).await;
    assert!(status == 500 && text.contains("they differ in weights"), "{status} {text}");
    assert_ne!(proxy.status("/readyz").await, 200);
    assert!(decoder.answered().is_empty());
}

#[tokio::test]
async fn an_object_of_another_encoder_than_announced_is_never_read() {
    let (encoders, decoder, proxy) = cluster(&[3], Some(Fingerprint::from_bytes([9; 32]))).await;
    ready(&proxy).await;
    let request = tokio::spawn({
        let (client, url) = (proxy.client.clone(), proxy.url(CHAT));
        async move { client.post(url).json(&about(b"\x89PNG one")).send().await }
    });
    eventually("it is asked again", async || encoders[0].asked().len() > 1).await;
    assert!(decoder.answered().is_empty());
    request.abort();
}
