//! Load reports of a running worker.

use crate::support::{encode, start, until};
use triptych_ec::fault::Fault;
use triptych_ec::store::Op;
use triptych_proto::v1;

#[tokio::test]
async fn a_watcher_sees_the_load_the_learned_costs_and_the_end() {
    let worker = start(8).await;
    let template = worker.job("vl", 0).await;
    let job = |seed: u8| v1::EncodeRequest { key: vec![seed; 32].into(), ..template.clone() };
    let mut states = worker.client().watch(v1::WatchRequest {}).await.unwrap().into_inner();
    let first = states.message().await.unwrap().unwrap();
    let load = first.load.unwrap();
    assert_eq!((load.running, load.waiting, load.capacity, load.costs.len()), (0, 0, 8, 0));
    assert!(!first.draining);
    for seed in 1..=6 {
        worker.encode(job(seed)).await.unwrap();
    }
    let cost = loop {
        let state = states.message().await.unwrap().expect("it is watched");
        if let Some(cost) = state.load.and_then(|load| load.costs.first().cloned()) {
            break cost;
        }
    };
    assert_eq!((cost.model.as_str(), cost.modality()), ("vl", v1::Modality::Image));
    assert!(cost.token_us > 0.0 || cost.fixed_us > 0, "{cost:?}");
    assert!(cost.tokens_per_byte > 0.0 && cost.p95_ratio >= 1.0, "{cost:?}");
    // A job that is held up shows, with its predicted time.
    worker.faults.queue(Op::Put, Fault::Hang);
    let held = tokio::spawn(encode(worker.client(), job(7)));
    loop {
        let load = states.message().await.unwrap().expect("it is watched").load.unwrap();
        if load.running + load.waiting == 1 && load.queued_us > 0 {
            break;
        }
    }
    until("it publishes", || worker.faults.n_calls(Op::Put) == 7).await;
    worker.drain.begin();
    while !states.message().await.unwrap().expect("reported before the end").draining {}
    held.abort();
}
