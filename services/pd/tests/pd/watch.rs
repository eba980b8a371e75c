//! State reports of a worker: load, resident encoder outputs, and draining.

use crate::support::{Pd, about, read, start, words};
use tonic::{Code, Streaming};
use triptych_proto::v1;

async fn watch(pd: &Pd) -> Streaming<v1::WorkerState> {
    pd.client().watch(v1::WatchRequest {}).await.expect("a stream of states").into_inner()
}

/// Reads states until one is as wanted; returns it.
async fn until(
    states: &mut Streaming<v1::WorkerState>,
    mut wanted: impl FnMut(&v1::WorkerState) -> bool,
) -> v1::WorkerState {
    let wait = async {
        loop {
            let state = states.message().await.expect("no failure").expect("it goes on");
            if wanted(&state) {
                return state;
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(60), wait).await.expect("a report in time")
}

#[tokio::test]
async fn the_first_state_is_complete_and_changes_follow() {
    let pd = start().await;
    let image = pd.stored_image(1).await;
    pd.generate(about(std::slice::from_ref(&image), 2)).await.unwrap();
    let mut states = watch(&pd).await;
    let first = states.message().await.unwrap().unwrap();
    let load = first.load.expect("a load");
    assert_eq!((load.running, load.waiting, load.capacity, load.waiting_tokens), (0, 0, 512, 0));
    assert_eq!(first.resident_added, [image.key.as_bytes().to_vec()]);
    assert!(!first.draining && first.resident_removed.is_empty());

    let other = pd.stored_image(2).await;
    let stream = pd.begin(about(std::slice::from_ref(&other), 3000)).await;
    let mut added = Vec::new();
    let busy = until(&mut states, |s| {
        added.extend(s.resident_added.clone());
        s.load.as_ref().is_some_and(|l| l.running == 1 && l.kv_usage > 0.0)
    });
    busy.await;
    assert_eq!(added, [other.key.as_bytes().to_vec()]);
    drop(stream);
    until(&mut states, |s| s.load.as_ref().is_some_and(|l| l.running == 0 && l.kv_usage == 0.0)).await;
}

#[tokio::test]
async fn a_worker_that_has_read_a_prompt_tells_what_a_token_of_it_takes() {
    let pd = start().await;
    let mut states = watch(&pd).await;
    let first = states.message().await.unwrap().unwrap();
    assert!(first.load.is_some_and(|load| load.prefill_costs.is_empty()));
    pd.generate(words("a prompt", 2)).await.unwrap();
    let told = until(&mut states, |s| s.load.as_ref().is_some_and(|l| !l.prefill_costs.is_empty())).await;
    let costs = told.load.unwrap().prefill_costs;
    let models = pd.client().describe(v1::DescribeRequest {}).await.unwrap().into_inner().models;
    assert!(costs.iter().all(|cost| models.iter().any(|model| model.name == cost.model)), "{costs:?}");
    assert!(costs.iter().all(|cost| cost.token_us.is_finite() && cost.token_us >= 0.0), "{costs:?}");
}

#[tokio::test]
async fn a_request_that_waits_for_its_item_shows_as_tokens_to_prefill() {
    let pd = start().await;
    let image = pd.stored_image(1).await;
    let latency = triptych_ec::fault::Fault::Latency(std::time::Duration::from_millis(700));
    pd.faults.queue(triptych_ec::store::Op::Get, latency);
    let mut states = watch(&pd).await;
    let response = pd.generate(about(std::slice::from_ref(&image), 2));
    let waits = until(&mut states, |s| s.load.as_ref().is_some_and(|l| l.waiting == 1));
    let (response, state) = tokio::join!(response, waits);
    assert!(response.is_ok() && state.load.unwrap().waiting_tokens >= u64::from(image.n_tokens));
}

#[tokio::test]
async fn a_worker_that_drains_reports_it_and_ends_what_runs() {
    let pd = start().await;
    let mut states = watch(&pd).await;
    assert!(!states.message().await.unwrap().unwrap().draining);
    let stream = pd.begin(words("go on", 200)).await;
    let mut client = pd.client();
    // Connected before it stops: a lame duck still answers.
    client.describe(v1::DescribeRequest {}).await.unwrap();
    pd.drain.begin();
    let refused = client.generate(words("one more", 2)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Unavailable);
    until(&mut states, |s| s.draining).await;
    assert_eq!(read(stream).await.unwrap().tokens[0].len(), 199, "one came before");
    while let Ok(Some(_)) = states.message().await {}
    pd.running.await.unwrap().unwrap();
}
