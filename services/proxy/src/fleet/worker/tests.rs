//! Reports and what is sent between them; moved by hand.

use super::*;
use crate::fleet::catalog::Health;
use crate::fleet::size::PrefillTime;
use crate::fleet::view::ItemSize;
use std::time::{Duration, Instant};
use triptych_core::{ContentKey, Modality, ModelName};
use triptych_proto::v1;

fn worker() -> Worker {
    let endpoint = Endpoint { role: Role::Encoder, address: "127.0.0.1:1".into() };
    Worker::new(endpoint, Dialer::default()).unwrap()
}

fn report(load: v1::WorkerLoad) -> v1::WorkerState {
    v1::WorkerState { load: Some(load), ..v1::WorkerState::default() }
}

fn job(encode_us: u64) -> Sent {
    Sent { n: 1, encode_us, tokens: 10 }
}

#[tokio::test]
async fn the_queue_is_what_was_reported_less_the_time_since_and_what_was_sent_after() {
    let (worker, start) = (worker(), Instant::now());
    let at = |ms: u64| start + Duration::from_millis(ms);
    let before = worker.give(job(700));
    assert_eq!(worker.view().queued_us(at(0)), 700);
    let load = v1::WorkerLoad { queued_us: 5000, running: 1, capacity: 3, ..Default::default() };
    worker.view().take_report(report(load), true, at(0));
    let after = worker.give(job(300));
    let queued = |ms| worker.view().queued_us(at(ms));
    assert_eq!([queued(0), queued(2), queued(60)], [5300, 3300, 300]);
    assert!(!worker.view().is_full());
    // It is in the report already.
    worker.done(before, job(700));
    assert_eq!(queued(0), 5300);
    worker.give(job(1));
    assert!(worker.view().is_full());
    worker.done(after, job(300));
    assert_eq!((queued(0), worker.view().is_full()), (5001, false));
}

#[tokio::test]
async fn a_load_of_encoder_weights_is_before_its_items_and_does_not_age() {
    let (worker, start) = (worker(), Instant::now());
    let model = ModelName::new("vl");
    let image = || v1::Modality::Image.into();
    let cost = v1::EncodeCost { model: "vl".into(), modality: image(), fixed_us: 1000, ..Default::default() };
    let cold =
        |load_us| v1::ColdEncoder { model: "vl".into(), modality: image(), load_us, ..Default::default() };
    let item = |modality: Modality| ItemSize { model: &model, encoder: modality.into(), bytes: 1 };
    let reported = |load_us| {
        let load = v1::WorkerLoad {
            costs: vec![cost.clone()],
            cold_encoders: vec![cold(load_us)],
            ..Default::default()
        };
        worker.view().take_report(report(load), false, start);
    };
    reported(3_000_000);
    let id = WorkerId::new("w");
    let later = start + Duration::from_secs(9);
    let completion = |modality| worker.view().encoder_load(&id, item(modality), later).completion_us();
    assert_eq!(completion(Modality::Image), 3_001_000);
    assert!(completion(Modality::Audio) < 1_000_000, "the load is of images alone");
    let key = |byte| ContentKey::from_bytes([byte; 32]);
    let site = |resident: bool| {
        worker.view().resident = if resident { [key(1)].into() } else { Default::default() };
        worker
            .view()
            .placement_site(&id, &[(key(1), Some(item(Modality::Image)))], PrefillTime::UNMEASURED, later)
            .encode
            .cold_us
    };
    assert_eq!([site(false), site(true)], [3_000_000, 0], "what is there needs no weights");
    let forecast = worker.view().forecast(item(Modality::Image), later).unwrap();
    assert_eq!((forecast.begin(), forecast.end()), (Duration::from_secs(3), Duration::from_millis(1)));
    // Nonsense is bounded.
    reported(u64::MAX);
    assert_eq!(worker.view().cold_us(&model, Modality::Image.into()), 600_000_000);
}

#[tokio::test]
async fn requests_sent_since_the_report_wait_and_take_room() {
    let worker = worker();
    let load = v1::WorkerLoad {
        running: 4,
        waiting: 1,
        waiting_tokens: 90,
        kv_usage: 0.2,
        cross_kv_usage: 0.5,
        ..Default::default()
    };
    worker.view().take_report(report(load), true, Instant::now());
    worker.give(job(0));
    assert_eq!(worker.view().requests(), (4, 2, 100));
    assert!((worker.view().kv_usage() - 0.51).abs() < 1e-6);
    let broken = v1::WorkerLoad { kv_usage: f32::NAN, cross_kv_usage: f32::INFINITY, ..Default::default() };
    worker.view().take_report(report(broken), false, Instant::now());
    assert!((worker.view().kv_usage() - 1.0).abs() < 1e-6);
}

#[tokio::test]
async fn the_time_of_a_prompt_token_is_that_of_its_model_as_reported_last() {
    let worker = worker();
    let cost = |model: &str, token_us| v1::PrefillCost { model: model.into(), token_us };
    let told = |costs: Vec<v1::PrefillCost>| {
        let load = v1::WorkerLoad { prefill_costs: costs, ..Default::default() };
        worker.view().take_report(report(load), false, Instant::now());
        ["small", "large", "adapter"].map(|name| worker.view().prefill_us(&ModelName::new(name)))
    };
    assert_eq!(told(Vec::new()), [None; 3]);
    let both = vec![cost("small", 30.0), cost("large", 900.0)];
    assert_eq!(told(both), [Some(30.0), Some(900.0), Some(900.0)]);
    let many: Vec<_> = (0..100_000).map(|i| cost(&i.to_string(), 1.0)).collect();
    assert_eq!(told(many), [Some(1.0); 3]);
    let n_kept = worker.view().report.as_ref().map(|report| report.load.prefill_costs.len());
    assert!(n_kept.is_some_and(|n| n < 1000), "{n_kept:?}");
}

#[tokio::test]
async fn what_it_holds_follows_its_reports_and_is_forgotten_with_them() {
    let worker = worker();
    let key = |byte: u8| ContentKey::from_bytes([byte; 32]);
    let state = |added: &[u8], removed: &[u8]| v1::WorkerState {
        resident_added: added.iter().map(|b| vec![*b; 32].into()).collect(),
        resident_removed: removed.iter().map(|b| vec![*b; 32].into()).collect(),
        ..v1::WorkerState::default()
    };
    let holds = || {
        let view = worker.view();
        [1, 2, 3].map(|b| view.resident.contains(&key(b)))
    };
    worker.view().take_report(state(&[1, 2], &[]), true, Instant::now());
    worker.view().take_report(state(&[3], &[1]), false, Instant::now());
    assert_eq!(holds(), [false, true, true]);
    let nonsense = v1::WorkerState { resident_added: vec![vec![1; 31].into()], ..Default::default() };
    worker.view().take_report(nonsense, false, Instant::now());
    assert_eq!(holds(), [false, true, true]);
    worker.view().take_report(state(&[1], &[]), true, Instant::now());
    assert_eq!(holds(), [true, false, false]);
    worker.view().end_reports();
    assert_eq!(holds(), [false; 3]);
}

#[tokio::test]
async fn a_worker_that_left_is_gone_when_its_last_work_is_done() {
    let worker = worker();
    let first = worker.give(job(1));
    let second = worker.give(job(1));
    worker.leaving.cancel();
    let mut gone = std::pin::pin!(worker.gone());
    assert!(futures::poll!(&mut gone).is_pending());
    worker.done(first, job(1));
    assert!(futures::poll!(&mut gone).is_pending());
    worker.done(second, job(1));
    gone.await;
}

#[test]
fn health_is_the_worst_that_is_known() {
    let mut view = View::default();
    assert_eq!(view.health(), Health::Down);
    view.is_up = true;
    assert_eq!(view.health(), Health::Ready);
    view.is_draining = true;
    assert_eq!(view.health(), Health::Draining);
    view.is_draining = false;
}
