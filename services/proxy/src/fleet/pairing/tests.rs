//! Catalogs with a worker of another engine, and the encoders that it is paired with.

use super::super::catalog::{Health, Want};
use super::*;
use bytes::Bytes;
use triptych_proto::v1;
use triptych_proto::v1::worker_model::{ForeignEncoders, ItemsByMetadata};

/// The worker's own encoder.
const OWN: u8 = 1;

fn model(family: &str, images: u8) -> v1::WorkerModel {
    let encoder = v1::worker_model::Encoder {
        modality: v1::Modality::Image.into(),
        fingerprint: vec![images; 32].into(),
        ..v1::worker_model::Encoder::default()
    };
    v1::WorkerModel {
        name: "vl".into(),
        family: family.into(),
        encoders: vec![encoder],
        ..Default::default()
    }
}

fn known(id: &str, role: Role, model: v1::WorkerModel) -> Known {
    Known {
        id: WorkerId::new(id),
        role,
        encodes: role == Role::Pd,
        health: Health::Ready,
        instance: Bytes::new(),
        models: vec![Served::try_from(model).unwrap()],
    }
}

fn foreign() -> Known {
    let by_metadata =
        vec![ItemsByMetadata { family: "qwen2_vl".into(), modality: v1::Modality::Image.into() }];
    let foreign_encoders = Some(ForeignEncoders { by_metadata });
    let model = v1::WorkerModel { foreign_encoders, not_resumable: true, ..model("", OWN) };
    known("pd@vllm", Role::Pd, model)
}

/// The encoder that images are keyed with, whether their bytes go along, and the workers that may encode them.
fn check(encoders: &[(&str, u8)], expect: (u8, bool, &[&str])) {
    let encoder = |(i, (family, images)): (usize, &(&str, u8))| {
        known(&format!("encoder{i}"), Role::Encoder, model(family, *images))
    };
    let workers = encoders.iter().enumerate().map(encoder).chain([foreign()]).collect();
    let mut catalog = Catalog { workers };
    pair(&mut catalog);
    let again = catalog.clone();
    pair(&mut catalog);
    assert_eq!(catalog, again, "a pairing is stable");
    assert!(catalog.is_ready(), "{encoders:?}");
    let served =
        catalog.choose(Some(&ModelName::new("vl")), &BTreeSet::from([Modality::Image])).unwrap().served;
    let fingerprint = served.edition[&Modality::Image.into()];
    let want = Want::Encoder { model: ModelName::new("vl"), encoder: Modality::Image.into(), fingerprint };
    let able: Vec<_> =
        catalog.workers.iter().filter(|known| known.can_do(&want)).map(|known| known.id.as_str()).collect();
    let has_bytes = served.foreign.as_ref().unwrap().reads_bytes(Modality::Image);
    assert_eq!((fingerprint.as_bytes()[0], has_bytes, able.as_slice()), expect, "{encoders:?}");
    assert!(!served.is_resumable);
    assert!(catalog.workers.iter().any(|known| known.can_do(&served.decoder())));
    let (own, paired) = (OWN, pairings(&catalog));
    let pairing = paired.first().unwrap();
    assert_eq!(pairing.encoder.is_none(), fingerprint.as_bytes()[0] == own);
}

#[test]
fn a_worker_of_another_engine_reads_the_one_encoder_of_its_model() {
    check(&[], (OWN, true, &["pd@vllm"]));
    check(&[("qwen2_vl", 7)], (7, false, &["encoder0"]));
    check(&[("qwen2_vl", 7), ("qwen2_vl", 7)], (7, false, &["encoder0", "encoder1"]));
    check(&[("llava", 7)], (7, true, &["encoder0"]));
    check(&[("qwen2_vl", 7), ("qwen2_vl", 8)], (OWN, true, &["pd@vllm"]));
}

#[test]
fn a_request_that_was_routed_before_encoders_came_is_still_answered() {
    let before = foreign().models[0].decoder();
    let encoder = known("encoder", Role::Encoder, model("qwen2_vl", 7));
    let mut catalog = Catalog { workers: vec![encoder, foreign()] };
    pair(&mut catalog);
    assert!(catalog.workers[1].can_do(&before));
    let of_another = Want::Pd {
        model: ModelName::new("vl"),
        edition: [(Modality::Image.into(), Fingerprint::from_bytes([9; 32]))].into(),
        adapter: None,
        is_foreign: true,
    };
    assert!(!catalog.workers[1].can_do(&of_another));
    let paired = catalog.workers[1].models[0].decoder();
    let ours = known("pd", Role::Pd, model("qwen2_vl", 7));
    assert!(
        catalog.workers[1].can_do(&paired) && !ours.can_do(&paired),
        "requests of one engine are not the other's"
    );
}
