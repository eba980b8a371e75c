//! One job: its published output, and refusals.

use crate::support::{Advertised, Worker, key, source, start, start_at};
use tonic::Code;
use triptych_core::limits::Limits;
use triptych_core::{DType, EncodedItem, Extent, embeddings};
use triptych_ec::fault::Fault;
use triptych_ec::store::remote::{RemoteStore, RemoteTuning};
use triptych_ec::store::{EcStore, Op};
use triptych_ec::{EcError, object};
use triptych_models::Model;
use triptych_proto::v1;

async fn check(worker: &Worker, what: &str, job: v1::EncodeRequest, expect: Code) {
    let refused = worker.encode(job).await.expect_err(what);
    assert_eq!(refused.code(), expect, "{what}: {refused:?}");
}

#[tokio::test]
async fn describe_announces_each_model_with_the_fingerprint_that_others_compute_too() {
    let worker = start(8).await;
    let described = worker.describe().await;
    assert_eq!(described.worker_id, "encoder-test");
    for (case, name) in [("qwen2_vl_two_images", "vl"), ("whisper_multilingual", "speech")] {
        let model = Model::open(&source(case, name)).unwrap();
        let found = described.models.iter().find(|m| m.name == name).unwrap();
        let modality = model.modalities()[0];
        assert_eq!(found.family, model.family());
        assert_eq!(found.encoders[0].modality, i32::from(v1::Modality::from(modality)));
        let fingerprint = model.fingerprint(modality, DType::F32).unwrap();
        assert_eq!(found.encoders[0].fingerprint, fingerprint.as_bytes().as_slice());
    }
}

#[tokio::test]
async fn a_job_publishes_the_output_that_it_announced() {
    let worker = start(8).await;
    for (model, seed) in [("vl", 1), ("speech", 2)] {
        let answer = worker.encode(worker.job(model, seed).await).await.unwrap();
        let announced = EncodedItem::try_from(answer.item.unwrap()).unwrap();
        let stored = worker.store.get(&key(seed)).await.unwrap().expect("published before the answer");
        let output = object::decode(stored, &key(seed), &Limits::default()).unwrap();
        assert_eq!(output.item(), &announced, "{model}");
        assert!(output.rows_f32(0, 1).unwrap().iter().any(|v| *v != 0.0), "{model}: rows are not empty");
        assert!(answer.encode_us > 0 && answer.preprocess_us > 0, "{model}");
    }
    let again = worker.encode(worker.job("vl", 1).await).await;
    assert!(again.is_ok(), "the same job twice is the same object");
    assert_eq!(worker.store.n_objects(), 2);
}

/// A safetensors file of one tensor.
fn tensor_file(dtype: &str, shape: &[usize], bytes: &[u8]) -> Vec<u8> {
    let head =
        format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,{}]}}}}"#, bytes.len());
    [&(head.len() as u64).to_le_bytes()[..], head.as_bytes(), bytes].concat()
}

#[tokio::test]
async fn rows_that_a_client_computed_are_published_as_those_of_an_image() {
    let worker = start(8).await;
    let answer = worker.encode(worker.job("vl", 1).await).await.unwrap();
    let encoded = EncodedItem::try_from(answer.item.unwrap()).unwrap();
    let stored = worker.store.get(&key(1)).await.unwrap().expect("published");
    let output = object::decode(stored, &key(1), &Limits::default()).unwrap();
    let shape = [encoded.n_tokens as usize, encoded.hidden as usize];
    let rows = output.rows_f32(0, shape[0]).unwrap();
    let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
    let Extent::Grid { t, h, w } = encoded.extent else { panic!("{encoded:?}") };
    let sizes: Vec<u8> = [t, h, w].iter().flat_map(|n| u64::from(*n).to_le_bytes()).collect();
    let grid = tensor_file("I64", &[3], &sizes);
    let given = |rows: &[u8]| embeddings::join(rows, &grid).into();
    let job = v1::EncodeRequest { item_is_embeddings: true, ..worker.job("vl", 2).await };
    let whole = v1::EncodeRequest { item: given(&tensor_file("F32", &shape, &bytes)), ..job.clone() };
    let answer = worker.encode(whole).await.unwrap();
    let taken = EncodedItem::try_from(answer.item.unwrap()).unwrap();
    assert_eq!(taken, EncodedItem { key: key(2), ..encoded }, "the checksum is that of the same rows");
    assert_eq!(answer.encode_us, 0, "no encoder ran");
    let narrow = tensor_file("F32", &[shape[0] * shape[1], 1], &bytes);
    let other = v1::EncodeRequest { item: given(&narrow), key: vec![3; 32].into(), ..job.clone() };
    check(&worker, "another width", other, Code::InvalidArgument).await;
    let both = v1::EncodeRequest { item_is_token_ids: true, key: vec![3; 32].into(), ..job };
    check(&worker, "two forms at once", both, Code::InvalidArgument).await;
    let audio = v1::EncodeRequest { item_is_embeddings: true, ..worker.job("speech", 4).await };
    check(&worker, "rows for audio", audio, Code::InvalidArgument).await;
}

#[tokio::test]
async fn a_wrong_job_is_refused_as_such_and_the_worker_goes_on() {
    let worker = start(8).await;
    let job = worker.job("vl", 1).await;
    let other = v1::EncodeRequest { fingerprint: vec![9; 32].into(), ..job.clone() };
    check(&worker, "another encoder", other, Code::FailedPrecondition).await;
    let unknown = v1::EncodeRequest { model: "x".repeat(1 << 20), ..job.clone() };
    check(&worker, "unknown model", unknown, Code::NotFound).await;
    let invalid = Code::InvalidArgument;
    let bytes = |item: &'static [u8]| v1::EncodeRequest { item: item.into(), ..job.clone() };
    check(&worker, "no image", bytes(b"\x89PNG\r\n\x1a\nnot really"), invalid).await;
    check(&worker, "no bytes", bytes(b""), invalid).await;
    check(&worker, "short key", v1::EncodeRequest { key: vec![1; 31].into(), ..job.clone() }, invalid).await;
    check(&worker, "no modality", v1::EncodeRequest { modality: 77, ..job.clone() }, invalid).await;
    let audio = v1::EncodeRequest { modality: v1::Modality::Audio.into(), ..job.clone() };
    check(&worker, "audio for a vision model", audio, invalid).await;
    assert_eq!(worker.store.n_objects(), 0);
    assert!(worker.encode(job).await.is_ok());
    assert_eq!(worker.metric("triptych_requests_running"), 0.0, "every place was given back");
}

#[tokio::test]
async fn a_store_that_refuses_makes_the_job_unavailable_and_not_the_worker() {
    let worker = start(8).await;
    worker.faults.queue(Op::Put, Fault::Error);
    check(&worker, "store is away", worker.job("vl", 1).await, Code::Unavailable).await;
    assert!(worker.encode(worker.job("vl", 1).await).await.is_ok());
}

/// A PD worker can begin while the store's copy is still being written, and the proxy learns the peer's address.
#[tokio::test]
async fn a_job_is_done_when_its_output_can_be_read_from_memory_and_the_stores_copy_follows() {
    let worker = start_at(8, Advertised::Here).await;
    worker.faults.queue(Op::Put, Fault::Hang);
    let answer = worker.encode(worker.job("vl", 1).await).await.unwrap();
    assert_eq!(answer.peer, worker.address.to_string());
    assert_eq!(worker.store.n_objects(), 0, "the store hangs");
    let peer = RemoteStore::new(&answer.peer, RemoteTuning::default(), &Limits::default()).unwrap();
    let object = peer.get(&key(1)).await.unwrap().expect("it is in memory");
    let output = object::decode(object.clone(), &key(1), &Limits::default()).unwrap();
    assert_eq!(output.item(), &EncodedItem::try_from(answer.item.unwrap()).unwrap());
    let put = peer.put_if_absent(&key(2), object).await;
    assert!(
        matches!(put, Err(EcError::Unsupported { .. })),
        "a worker's memory is not to be written: {put:?}"
    );
    let again = worker.encode(worker.job("vl", 2).await).await.unwrap();
    assert_eq!(again.peer, worker.address.to_string());
    until_stored(&worker, 2).await;
}

async fn until_stored(worker: &Worker, seed: u8) {
    while worker.store.get(&key(seed)).await.unwrap().is_none() {
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}

#[tokio::test]
async fn a_worker_that_is_reached_nowhere_names_no_peer_and_serves_no_objects() {
    let worker = start(8).await;
    let answer = worker.encode(worker.job("vl", 1).await).await.unwrap();
    assert_eq!(answer.peer, "");
    let peer = RemoteStore::new(&worker.address.to_string(), RemoteTuning::default(), &Limits::default());
    assert!(matches!(peer.unwrap().get(&key(1)).await, Err(EcError::Unsupported { .. })));
}
