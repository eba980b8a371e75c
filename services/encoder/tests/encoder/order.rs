//! The order in which a worker preprocesses what waits.

use crate::support::{Preprocessing, encode, start_preprocessing, until};
use std::sync::{Arc, Mutex, mpsc};
use triptych_encoder::ItemHook;
use triptych_proto::v1;

/// While one thread is busy, a request with three items and one with a single item come, in this order. The single one is next.
#[tokio::test]
async fn a_request_with_one_item_is_preprocessed_before_one_with_three_that_came_earlier() {
    let seen = Arc::<Mutex<Vec<Vec<u8>>>>::default();
    let (release, released) = mpsc::channel::<()>();
    let (items, released) = (Arc::clone(&seen), Mutex::new(released));
    let hook: ItemHook = Arc::new(move |item| {
        let is_first = {
            let mut items = items.lock().expect("no panic");
            items.push(item.to_vec());
            items.len() == 1
        };
        if is_first {
            released.lock().expect("no panic").recv().expect("the test goes on");
        }
    });
    let worker = start_preprocessing(Preprocessing { threads: 1, hook: Some(hook) }).await;
    let of_model = worker.job("vl", 0).await;
    // These are no images, which only the preprocessing finds out.
    let job = |seed: u8, request: u8| v1::EncodeRequest {
        request_id: format!("req-{request:032x}"),
        key: vec![seed; 32].into(),
        item: vec![request; 100].into(),
        ..of_model.clone()
    };
    let mut calls = Vec::new();
    for (n_before, request) in [9, 1, 1, 1, 2].into_iter().enumerate() {
        calls.push(tokio::spawn(encode(worker.client(), job(n_before as u8 + 1, request))));
        let n_jobs = n_before as f64 + 1.0;
        until("it waits", || worker.metric("triptych_requests_running") == n_jobs).await;
    }
    until("the first is on the thread", || seen.lock().expect("no panic").len() == 1).await;
    release.send(()).expect("it waits for that");
    for call in calls {
        assert!(call.await.expect("no panic").is_err(), "no image");
    }
    let order: Vec<u8> = seen.lock().expect("no panic").iter().map(|item| item[0]).collect();
    assert_eq!(order, [9, 2, 1, 1, 1]);
}
