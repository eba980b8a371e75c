//! Catalogs with a worker of another engine, and the encoders that it is paired with.

use super::super::catalog::{Health, Want};
use super::*;
use bytes::Bytes;
use triptych_core::Tower;
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

fn tower(weights: u8) -> Tower {
    let digest = |n| Fingerprint::from_bytes([n; 32]);
    Tower { configuration: digest(1), processor: digest(2), weights: digest(weights) }
}

/// A worker of ours, or an encoder of vLLM's, with encoders of images and maybe of videos.
fn with_tower(id: &str, role: Role, of: &[(Modality, Fingerprint, Option<u8>)]) -> Known {
    let encoder =
        |(modality, fingerprint, weights): &(Modality, Fingerprint, Option<u8>)| v1::worker_model::Encoder {
            modality: v1::Modality::from(*modality).into(),
            fingerprint: fingerprint.as_bytes().to_vec().into(),
            tower: weights.map(|weights| (&tower(weights)).into()),
            ..v1::worker_model::Encoder::default()
        };
    let encoders = of.iter().map(encoder).collect();
    let mut worker = known(id, role, v1::WorkerModel { encoders, ..model("qwen2_vl", 0) });
    worker.encodes = false;
    worker
}

/// A PD worker of ours that reads images and videos, and encoders; the fingerprint of its images, and all that it reads.
fn paired(encoders: &[Known]) -> (Catalog, Edition) {
    let (image, video) = (Fingerprint::from_bytes([7; 32]), Fingerprint::from_bytes([8; 32]));
    let pd = with_tower("pd", Role::Pd, &[(Modality::Image, image, Some(3)), (Modality::Video, video, None)]);
    let mut catalog = Catalog { workers: encoders.iter().cloned().chain([pd]).collect() };
    pair(&mut catalog);
    let again = catalog.clone();
    pair(&mut catalog);
    assert_eq!(catalog, again, "a pairing is stable");
    let edition = catalog.workers.last().unwrap().models[0].edition.clone();
    (catalog, edition)
}

#[test]
fn a_worker_of_ours_reads_an_encoder_of_vllms_with_its_tower_where_there_is_none_of_ours() {
    use triptych_core::DType::Bf16;
    let image = |n: u8| (Modality::Image, Fingerprint::from_bytes([n; 32]), None);
    let of = |weights| (Modality::Image, tower(weights).rows_of_vllm(Modality::Image, Bf16), Some(weights));
    let vllm = |weights| with_tower("vllm", Role::Encoder, &[of(weights)]);
    let ours = with_tower("ours", Role::Encoder, &[image(7)]);

    let (catalog, edition) = paired(&[vllm(3)]);
    assert_eq!(edition, Edition::from([(Modality::Image.into(), of(3).1)]), "nobody encodes videos");
    assert!(catalog.is_ready() && catalog.disagreements().is_empty());
    let route = |kind| catalog.choose(Some(&ModelName::new("vl")), &BTreeSet::from([kind]));
    let before = route(Modality::Image).unwrap().served.decoder();
    assert!(route(Modality::Video).unwrap_err().message.contains("reads image, the request has video"));
    let want =
        Want::Encoder { model: ModelName::new("vl"), encoder: Modality::Image.into(), fingerprint: of(3).1 };
    assert!(catalog.workers[0].can_do(&want) && !ours.can_do(&want));

    let (catalog, edition) = paired(&[vllm(3), ours]);
    assert_eq!(edition[&Modality::Image.into()], image(7).1, "ours is preferred");
    assert!(catalog.disagreements().is_empty(), "the other is not at fault");
    assert!(catalog.workers[2].can_do(&before), "a request that was routed before is still answered");

    for wrong in [vllm(4), with_tower("liar", Role::Encoder, &[(Modality::Image, image(5).1, Some(3))])] {
        let (catalog, edition) = paired(std::slice::from_ref(&wrong));
        assert_eq!(edition[&Modality::Image.into()], image(7).1);
        assert!(!catalog.is_ready(), "{wrong:?}");
    }
    let (catalog, _) = paired(&[vllm(4)]);
    let refused =
        catalog.choose(Some(&ModelName::new("vl")), &BTreeSet::from([Modality::Image])).unwrap_err();
    assert!(refused.message.contains("they differ in weights"), "{refused}");
}
