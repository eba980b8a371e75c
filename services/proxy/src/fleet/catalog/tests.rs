//! Catalogs written by hand, and what follows from them.

use super::*;
use Health::{Down, Ready};
use Modality::{Audio, Image};

fn worker(role: Role, health: Health, models: &[(&str, &[(Modality, u8)])]) -> Known {
    let edition = |of: &[(Modality, u8)]| -> Edition {
        of.iter().map(|(m, b)| ((*m).into(), Fingerprint::from_bytes([*b; 32]))).collect()
    };
    let served = |(name, of): &(&str, &[(Modality, u8)])| Served {
        name: ModelName::new(*name),
        family: "f".into(),
        edition: edition(of),
        own: edition(of),
        towers: Default::default(),
        tower_names: BTreeMap::new(),
        prompted: BTreeSet::new(),
        max_context: 10,
        max_items: None,
        created_s: 1,
        reads_encoder_prompt: false,
        chat: None,
        adapter: None,
        adapts_encoder: false,
        foreign: None,
        is_resumable: true,
    };
    Known {
        id: WorkerId::new("w"),
        role,
        encodes: false,
        health,
        instance: Bytes::new(),
        models: models.iter().map(served).collect(),
    }
}

fn encoder(health: Health, models: &[(&str, &[(Modality, u8)])]) -> Known {
    worker(Role::Encoder, health, models)
}

fn pd(health: Health, models: &[(&str, &[(Modality, u8)])]) -> Known {
    worker(Role::Pd, health, models)
}

/// The model, or class and part of the message.
type Chosen = Result<&'static str, (FailureClass, &'static str)>;

fn needs(modalities: &[Modality]) -> BTreeSet<Modality> {
    modalities.iter().copied().collect()
}

#[test]
fn ready_means_a_pd_and_an_agreeing_encoder_for_every_model() {
    let vl: &[(&str, &[(Modality, u8)])] = &[("vl", &[(Image, 1)])];
    let other: &[(&str, &[(Modality, u8)])] = &[("vl", &[(Image, 2)])];
    let both: &[(&str, &[(Modality, u8)])] = &[("vl", &[(Image, 1)]), ("asr", &[(Audio, 3)])];
    let text: &[(&str, &[(Modality, u8)])] = &[("lm", &[])];
    let cases: Vec<(Vec<Known>, bool)> = vec![
        (vec![], false),
        (vec![pd(Ready, vl)], false),
        (vec![encoder(Ready, vl)], false),
        (vec![encoder(Ready, vl), pd(Ready, vl)], true),
        (vec![encoder(Down, vl), pd(Ready, vl)], false),
        (vec![encoder(Ready, vl), pd(Down, vl)], false),
        (vec![encoder(Down, vl), encoder(Ready, vl), pd(Ready, vl), pd(Down, vl)], true),
        (vec![encoder(Ready, other), pd(Ready, vl)], false),
        (vec![encoder(Ready, other), encoder(Ready, vl), pd(Ready, vl)], true),
        (vec![encoder(Ready, vl), pd(Ready, both)], false),
        (vec![encoder(Ready, both), pd(Ready, both)], true),
        (vec![pd(Ready, text)], true),
    ];
    for (i, (workers, expect)) in cases.into_iter().enumerate() {
        assert_eq!(Catalog { workers }.is_ready(), expect, "case {i}");
    }
}

#[test]
fn a_pair_that_disagrees_is_shown_and_refused() {
    let catalog = Catalog {
        workers: vec![encoder(Ready, &[("vl", &[(Image, 1)])]), pd(Ready, &[("vl", &[(Image, 2)])])],
    };
    let found = catalog.disagreements();
    let one = found.first().unwrap();
    assert_eq!(
        (one.encoder.1, one.pd.1),
        (Fingerprint::from_bytes([1; 32]), Fingerprint::from_bytes([2; 32]))
    );
    let vl = ModelName::new("vl");
    let failure = catalog.choose(Some(&vl), &needs(&[Image])).unwrap_err();
    assert_eq!(failure.class, FailureClass::Mismatch);
    for fingerprint in [one.encoder.1, one.pd.1] {
        assert!(failure.message.contains(&fingerprint.to_string()), "{failure}");
    }
    // Text needs no encoder.
    assert!(catalog.choose(Some(&vl), &needs(&[])).is_ok());
}

#[test]
fn the_edition_with_a_ready_encoder_is_chosen_during_a_rollout() {
    let catalog = Catalog {
        workers: vec![
            pd(Ready, &[("vl", &[(Image, 1)])]),
            pd(Ready, &[("vl", &[(Image, 2)])]),
            encoder(Ready, &[("vl", &[(Image, 2)])]),
        ],
    };
    let route = catalog.choose(None, &needs(&[Image])).unwrap();
    assert_eq!(route.fingerprint(Image), Some(Fingerprint::from_bytes([2; 32])));
    let want = route.served.decoder();
    assert_eq!([0, 1, 2].map(|i| catalog.workers[i].can_do(&want)), [false, true, false]);
}

#[test]
fn models_are_chosen_by_name_or_by_what_they_read() {
    let served: &[(&str, &[(Modality, u8)])] = &[("vl", &[(Image, 1)]), ("asr", &[(Audio, 3)])];
    let catalog = Catalog { workers: vec![encoder(Ready, served), pd(Ready, served)] };
    let twins: &[(&str, &[(Modality, u8)])] = &[("a", &[(Image, 1)]), ("b", &[(Image, 1)])];
    let twins = Catalog { workers: vec![encoder(Ready, twins), pd(Ready, twins)] };
    let starting = Catalog { workers: vec![pd(Down, &[])] };
    let cases: Vec<(&Catalog, Option<&str>, &[Modality], Chosen)> = vec![
        (&catalog, Some("vl"), &[Image], Ok("vl")),
        (&catalog, Some("vl"), &[], Ok("vl")),
        (&catalog, None, &[Image], Ok("vl")),
        (&catalog, None, &[Audio], Ok("asr")),
        (&catalog, None, &[], Ok("vl")),
        (
            &catalog,
            Some("no"),
            &[],
            Err((FailureClass::NotFound, "served are \"asr\" (reads audio), \"vl\"")),
        ),
        (
            &catalog,
            Some("asr"),
            &[Image],
            Err((FailureClass::InvalidArgument, "reads audio, the request has image")),
        ),
        (
            &catalog,
            None,
            &[Image, Audio],
            Err((FailureClass::InvalidArgument, "no model reads image and audio")),
        ),
        (&twins, None, &[Image], Err((FailureClass::InvalidArgument, "more than one model fits"))),
        (&starting, Some("vl"), &[], Err((FailureClass::Unavailable, "no model is ready yet"))),
        (&starting, None, &[], Err((FailureClass::Unavailable, "no model is ready yet"))),
    ];
    for (catalog, asked, modalities, expect) in cases {
        let asked = asked.map(ModelName::new);
        let found = catalog.choose(asked.as_ref(), &needs(modalities));
        match (expect, &found) {
            (Ok(name), Ok(route)) => assert_eq!(route.served.name.as_str(), name),
            (Err((class, part)), Err(f)) if f.class == class && f.message.contains(part) => {}
            (expect, found) => panic!("{asked:?} {modalities:?}: expected {expect:?}, found {found:?}"),
        }
    }
}

#[test]
fn a_pd_worker_with_encoders_is_an_encoder_and_who_drains_takes_nothing() {
    let vl: &[(&str, &[(Modality, u8)])] = &[("vl", &[(Image, 1)])];
    let whole = |health| Known { encodes: true, ..pd(health, vl) };
    let want = Want::Encoder {
        model: ModelName::new("vl"),
        encoder: Image.into(),
        fingerprint: Fingerprint::from_bytes([1; 32]),
    };
    assert!(Catalog { workers: vec![whole(Ready)] }.is_ready());
    assert!(whole(Ready).can_do(&want) && !pd(Ready, vl).can_do(&want));
    for (health, expect) in Health::ALL.into_iter().zip([true, true, false, false, false]) {
        assert_eq!(whole(health).can_do(&want), expect, "{health:?}");
        assert_eq!(Catalog { workers: vec![encoder(health, vl), pd(Ready, vl)] }.is_ready(), expect);
    }
}

/// An adapter of the encoder has encoders of its own, under the name of its base model; one of the decoder alone has those of
/// the base.
#[test]
fn items_go_to_encoders_that_have_the_adapter() {
    let adapter = |mut known: Known, name: &str, (image, adapts_encoder): (u8, bool)| {
        let id = AdapterId::from_bytes([9; 32]);
        let base = known.models[0].clone();
        known.models.push(Served {
            name: ModelName::new(name),
            edition: [(Image.into(), Fingerprint::from_bytes([image; 32]))].into(),
            own: [(Image.into(), Fingerprint::from_bytes([image; 32]))].into(),
            adapter: Some((base.name.clone(), id)),
            adapts_encoder,
            ..base
        });
        known
    };
    let vl: &[(&str, &[(Modality, u8)])] = &[("vl", &[(Image, 1)])];
    let decoders = || adapter(adapter(pd(Ready, vl), "tower", (2, true)), "text", (1, false));
    let plain = encoder(Ready, vl);
    let adapted = adapter(encoder(Ready, vl), "tower", (2, true));
    let choose = |encoders: &[&Known], name: &str| {
        let workers = encoders.iter().map(|known| (*known).clone()).chain([decoders()]).collect();
        let catalog = Catalog { workers };
        assert!(catalog.is_ready(), "adapters do not count");
        assert!(catalog.disagreements().is_empty());
        let route = catalog.choose(Some(&ModelName::new(name)), &needs(&[Image])).unwrap();
        let fingerprint = route.fingerprint(Image).unwrap();
        let want =
            Want::Encoder { model: route.served.encoder_model().clone(), encoder: Image.into(), fingerprint };
        let able: Vec<bool> = encoders.iter().map(|known| known.can_do(&want)).collect();
        (fingerprint.as_bytes()[0], able)
    };
    assert_eq!(choose(&[&plain, &adapted], "vl"), (1, vec![true, true]));
    assert_eq!(choose(&[&plain, &adapted], "text"), (1, vec![true, true]));
    assert_eq!(choose(&[&plain, &adapted], "tower"), (2, vec![false, true]));
    assert_eq!(choose(&[&plain], "tower"), (2, vec![false]));
}

#[test]
fn each_tower_is_found_at_a_worker_that_holds_it() {
    let id = |tower| EncoderId { modality: Image, tower: TowerIdx(tower) };
    let print = |tower| Fingerprint::from_bytes([tower + 1; 32]);
    let holding = |role, health, towers: &[u8]| {
        let mut worker = worker(role, health, &[("vl", &[])]);
        worker.models[0].edition = towers.iter().map(|n| (id(*n), print(*n))).collect();
        worker.models[0].own = worker.models[0].edition.clone();
        let named = towers.iter().map(|n| (id(*n), ["low", "high"][usize::from(*n)].to_owned()));
        worker.models[0].tower_names = named.collect();
        worker
    };
    let pd = holding(Role::Pd, Ready, &[0, 1]);
    let encoder = |health, towers| holding(Role::Encoder, health, towers);
    for (workers, is_ready) in [
        (vec![encoder(Ready, &[0][..])], false),
        (vec![encoder(Ready, &[1])], false),
        (vec![encoder(Ready, &[0]), encoder(Down, &[1])], false),
        (vec![encoder(Ready, &[0]), encoder(Ready, &[1])], true),
        (vec![encoder(Ready, &[0, 1])], true),
    ] {
        let catalog = Catalog { workers: [workers, vec![pd.clone()]].concat() };
        assert_eq!(catalog.is_ready(), is_ready, "{catalog:?}");
        assert!(catalog.disagreements().is_empty());
        let route = catalog.choose(None, &needs(&[Image])).unwrap();
        assert_eq!(route.towers(Image).collect::<Vec<_>>(), [0, 1].map(|n| (TowerIdx(n), print(n))));
        assert_eq!([0, 1].map(|n| route.tower_name(id(n))), ["low", "high"]);
        assert_eq!(route.served.modalities().collect::<Vec<_>>(), [&Image]);
        let want = |n| Want::Encoder { model: ModelName::new("vl"), encoder: id(n), fingerprint: print(n) };
        for known in catalog.workers.iter().filter(|known| known.role == Role::Encoder) {
            let holds = |n| known.models[0].edition.contains_key(&id(n));
            assert_eq!([0, 1].map(|n| known.serves(&want(n))), [0, 1].map(holds));
        }
    }
    // Another edition of one tower alone.
    let mut other = encoder(Ready, &[1]);
    other.models[0].edition = [(id(1), print(8))].into();
    other.models[0].own = other.models[0].edition.clone();
    let catalog = Catalog { workers: vec![encoder(Ready, &[0]), other, pd] };
    assert_eq!(catalog.choose(None, &needs(&[Image])).unwrap_err().class, FailureClass::Mismatch);
    assert_eq!(catalog.disagreements().len(), 1);
}
