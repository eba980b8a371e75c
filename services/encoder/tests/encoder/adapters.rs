//! LoRA adapters of an encoder that come and go while the worker serves.

use crate::support::{Worker, start};
use tonic::Code;
use triptych_proto::v1;

/// Name and fingerprint of each entry of the description that has an encoder of audio.
async fn announced(worker: &Worker) -> Vec<(String, String, Vec<u8>)> {
    let models = worker.describe().await.models.into_iter();
    let of = |model: v1::WorkerModel| {
        let encoder = model.encoders.first().expect("an encoder");
        assert_eq!(model.adapts_encoder, !model.parent.is_empty(), "{}", model.name);
        (model.name, model.parent, encoder.fingerprint.to_vec())
    };
    let mut models: Vec<_> = models.map(of).filter(|(name, ..)| name != "vl").collect();
    models.sort();
    models
}

async fn load(worker: &Worker, path: &str) -> Result<v1::LoadAdapterResponse, tonic::Status> {
    let request = v1::LoadAdapterRequest { model: "speech".into(), name: "late".into(), path: path.into() };
    Ok(worker.client().load_encoder_adapter(request).await?.into_inner())
}

#[tokio::test]
async fn an_adapter_makes_another_encoder_until_it_is_unloaded() {
    let worker = start(8).await;
    let [(.., base)] = &announced(&worker).await[..] else { panic!("one encoder of audio") };
    let decoders = load(&worker, "lora_whisper/decoder").await.expect("it does not concern the encoder");
    assert!(!decoders.adapts_encoder && announced(&worker).await.len() == 1);
    let loaded = load(&worker, "lora_whisper_encoder/both").await.expect("it is loaded");
    assert!(loaded.adapts_encoder && !loaded.was_loaded);
    assert!(load(&worker, "lora_whisper_encoder/both").await.expect("it stays").was_loaded);
    let other = load(&worker, "lora_whisper_encoder/encoder").await.expect_err("the name is taken");
    assert_eq!(other.code(), Code::InvalidArgument, "{other}");
    let [(late, parent, adapted), _] = &announced(&worker).await[..] else { panic!("two encoders of audio") };
    assert_eq!((late.as_str(), parent.as_str()), ("late", "speech"));
    assert_ne!(adapted, base);

    let plain = worker.encode(worker.job("speech", 1).await).await.expect("encoded");
    let with = |seed, fingerprint: &Vec<u8>| {
        let fingerprint = fingerprint.clone().into();
        let worker = &worker;
        async move {
            let job = v1::EncodeRequest { fingerprint, ..worker.job("speech", seed).await };
            worker.encode(job).await
        }
    };
    let other = with(2, adapted).await.expect("encoded");
    let checksum = |response: &v1::EncodeResponse| response.item.clone().expect("an item").checksum;
    assert_ne!(checksum(&plain), checksum(&other));
    let again = with(3, base).await.expect("encoded");
    assert_eq!(checksum(&plain), checksum(&again));

    let unload = async || {
        let request = v1::UnloadAdapterRequest { name: "late".into() };
        worker.client().unload_encoder_adapter(request).await
    };
    unload().await.expect("it is there");
    assert_eq!(unload().await.expect_err("it is gone").code(), Code::NotFound);
    assert_eq!(announced(&worker).await.len(), 1);
    let refused = with(4, adapted).await.expect_err("no such encoder");
    assert!(refused.message().contains("fingerprints differ"), "{refused}");
}
