//! Jobs for one key: they share a forward, cached outputs are returned again, and an old lease is refused.

use crate::support::{encode, key, start, until};
use tonic::Code;
use triptych_ec::fault::Fault;
use triptych_ec::store::{EcStore, Op};
use triptych_proto::v1;
use triptych_proto::v1::encode_event::Kind;

const ENCODES: &str = "triptych_encodes_total{modality=\"image\"}";
const SHARED: &str = "triptych_encodes_shared_total";

#[tokio::test]
async fn jobs_of_one_key_at_the_same_time_share_one_forward_and_each_gets_all_events() {
    let worker = start(1).await;
    let job = worker.job("vl", 1).await;
    worker.faults.queue(Op::Put, Fault::Hang);
    let first = tokio::spawn(encode(worker.client(), job.clone()));
    until("the first publishes", || worker.faults.n_calls(Op::Put) == 1).await;
    // The only permit is taken: a caller that joins needs none.
    let mut second = worker.client().encode(job.clone()).await.unwrap().into_inner();
    let event = second.message().await.unwrap().unwrap().kind.unwrap();
    let Kind::Announced(item) = event else { panic!("announced first: {event:?}") };
    assert_eq!((item.key.as_ref(), item.n_tokens > 0), (&[1; 32][..], true));
    assert_eq!(worker.metric(SHARED), 1.0);
    // The first caller goes away, and takes nothing from the second.
    first.abort();
    assert!(first.await.is_err_and(|e| e.is_cancelled()));
    assert!(futures::poll!(Box::pin(second.message())).is_pending());
    drop(second);
    until("its publishing goes on", || worker.metric("triptych_requests_running") == 1.0).await;
}

#[tokio::test]
async fn a_caller_that_joins_is_answered_with_the_others() {
    let worker = start(8).await;
    let job = worker.job("vl", 1).await;
    worker.faults.queue(Op::Put, Fault::Latency(std::time::Duration::from_millis(300)));
    let first = tokio::spawn(encode(worker.client(), job.clone()));
    until("the first publishes", || worker.faults.n_calls(Op::Put) == 1).await;
    let second = worker.encode(job).await.unwrap();
    let first = first.await.unwrap().unwrap();
    assert_eq!((first.shared, second.shared), (false, true));
    assert_eq!(first.item, second.item);
    assert_eq!((worker.metric(ENCODES), worker.store.n_objects()), (1.0, 1));
}

#[tokio::test]
async fn rows_that_are_still_here_are_given_again_and_published_again_if_the_store_lost_them() {
    let worker = start(8).await;
    let job = worker.job("vl", 1).await;
    let first = worker.encode(job.clone()).await.unwrap();
    let n_puts = worker.faults.n_calls(Op::Put);
    let again = worker.encode(job.clone()).await.unwrap();
    assert!(again.shared && again.item == first.item && again.encode_us == 0, "{again:?}");
    assert_eq!(worker.faults.n_calls(Op::Put), n_puts, "the store has it: nothing is sent");
    assert!(worker.store.delete(&key(1)).await.unwrap());
    let lost = worker.encode(job).await.unwrap();
    assert!(lost.shared && lost.item == first.item);
    assert_eq!((worker.store.n_objects(), worker.metric(ENCODES)), (1, 1.0));
}

#[tokio::test]
async fn a_job_under_an_older_lease_is_refused() {
    let worker = start(8).await;
    let job = |fence, seed: u8| {
        let worker = &worker;
        async move { v1::EncodeRequest { fence, ..worker.job("vl", seed).await } }
    };
    assert!(worker.encode(job(5, 1).await).await.is_ok());
    let refused = worker.encode(job(4, 1).await).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert_eq!(refused.metadata().get("triptych-param").unwrap(), "fence");
    for (fence, seed) in [(5, 1), (6, 1), (0, 1), (1, 2)] {
        assert!(worker.encode(job(fence, seed).await).await.is_ok(), "{fence}, {seed}");
    }
}
