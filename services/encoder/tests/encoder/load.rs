//! Many jobs: batches, the bound on them, callers that go away, the end.

use crate::support::{encode, start, start_stopping, until};
use std::time::Duration;
use tonic::Code;
use triptych_ec::fault::Fault;
use triptych_ec::store::Op;
use triptych_proto::v1;

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn jobs_of_several_callers_share_a_batch() {
    let worker = start(64).await;
    let job = worker.job("vl", 0).await;
    let n_batches = || worker.metric("triptych_encode_batch_items_count");
    let mut n_jobs = 0;
    // Whether two jobs meet depends on the machine; that none meet in so many rounds does not.
    while n_batches() == f64::from(n_jobs) && n_jobs < 3_200 {
        let calls = (0..32_u8).map(|seed| {
            let client = worker.client();
            let job = v1::EncodeRequest { key: vec![seed; 32].into(), ..job.clone() };
            async move { encode(client, job).await }
        });
        for answer in futures::future::join_all(calls).await {
            answer.unwrap();
        }
        n_jobs += 32;
    }
    assert_eq!(worker.metric("triptych_encode_batch_items_sum"), f64::from(n_jobs));
    assert!(n_batches() < f64::from(n_jobs), "{n_jobs} jobs in {} batches", n_batches());
}

#[tokio::test]
async fn a_job_more_than_the_bound_is_refused_at_once() {
    let worker = start(1).await;
    let job = worker.job("vl", 1).await;
    worker.faults.queue(Op::Put, Fault::Hang);
    let client = worker.client();
    let first = tokio::spawn({
        let job = job.clone();
        async move { encode(client, job).await }
    });
    until("the first publishes", || worker.faults.n_calls(Op::Put) == 1).await;
    let other = v1::EncodeRequest { key: vec![2; 32].into(), ..job };
    let refused = worker.encode(other).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    assert!(refused.metadata().contains_key("retry-after-ms"), "{refused:?}");
    first.abort();
}

#[tokio::test]
async fn a_caller_that_goes_away_releases_its_permit_once_its_output_is_published() {
    let worker = start(1).await;
    let job = worker.job("vl", 1).await;
    worker.faults.queue(Op::Put, Fault::Latency(Duration::from_millis(300)));
    let client = worker.client();
    let first = tokio::spawn({
        let job = job.clone();
        async move { encode(client, job).await }
    });
    until("it publishes", || worker.faults.n_calls(Op::Put) == 1).await;
    assert_eq!(worker.metric("triptych_requests_running"), 1.0);
    first.abort();
    assert!(first.await.is_err_and(|e| e.is_cancelled()));
    until("its place is free", || worker.metric("triptych_requests_running") == 0.0).await;
    assert_eq!(worker.store.n_objects(), 1, "the place was held for as long as there was work");
    assert!(worker.encode(job).await.is_ok());
}

#[tokio::test]
async fn drain_lets_a_running_job_end() {
    let worker = start(8).await;
    let job = worker.job("vl", 1).await;
    worker.faults.queue(Op::Put, Fault::Latency(Duration::from_millis(500)));
    let client = worker.client();
    let running = tokio::spawn(async move { encode(client, job).await });
    until("it publishes", || worker.faults.n_calls(Op::Put) == 1).await;
    worker.drain.begin();
    assert!(running.await.unwrap().is_ok());
    worker.running.await.unwrap().unwrap();
    assert_eq!(worker.store.n_objects(), 1);
}

#[tokio::test]
async fn a_worker_stopped_while_it_loads_ends_at_once() {
    let worker = start_stopping().await;
    worker.running.await.unwrap().unwrap();
    let connection = tokio::net::TcpStream::connect(worker.address).await;
    assert!(connection.is_err(), "it never answered");
}
