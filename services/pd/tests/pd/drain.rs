//! Clients that go away, and a worker that stops.

use crate::support::{about, read, start, until, words};
use tonic::Code;
use triptych_ec::fault::Fault;
use triptych_ec::store::Op;
use triptych_proto::v1;

#[tokio::test]
async fn a_client_that_goes_away_in_the_stream_leaves_nothing_behind() {
    let pd = start().await;
    let image = [pd.stored_image(1).await];
    let stream = pd.begin(about(&image, 3_500)).await;
    pd.until_metric("triptych_requests_running{model=\"vl\"}", 1.0).await;
    assert!(pd.metric("triptych_kv_cache_usage_ratio{model=\"vl\",pool=\"self\"}") > 0.0);
    drop(stream);
    pd.until_metric("triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}", 1.0).await;
    pd.until_idle("vl").await;
    assert_eq!(pd.metric("triptych_generation_tokens_total{model=\"vl\"}"), 0.0, "it did not run to its end");
}

#[tokio::test]
async fn a_client_that_goes_away_while_its_item_loads_leaves_nothing_behind() {
    let pd = start().await;
    let image = [pd.stored_image(1).await];
    pd.faults.queue(Op::Get, Fault::Hang);
    let stream = pd.client().generate(about(&image, 4)).await.unwrap();
    // It prefills up to the item, and holds nothing while it waits there.
    pd.until_metric("triptych_requests_waiting{model=\"vl\"}", 1.0).await;
    drop(stream);
    pd.until_metric("triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}", 1.0).await;
    pd.until_idle("vl").await;
}

#[tokio::test]
async fn a_worker_stopped_while_it_loads_stops_at_once() {
    let drain = triptych_runtime::Drain::new();
    drain.begin();
    let store = triptych_ec::store::memory::MemoryStore::new(1 << 20, &Default::default());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let config = crate::support::config(listener, std::sync::Arc::new(store));
    triptych_pd::run(config, drain, Default::default()).await.unwrap();
    assert!(tokio::net::TcpStream::connect(address).await.is_err(), "it is not listening");
}

#[tokio::test]
async fn drain_lets_a_running_request_end_and_refuses_new_ones() {
    let pd = start().await;
    let running = pd.begin(words("on and on", 1_000)).await;
    pd.drain.begin();
    let closed = async {
        loop {
            match pd.client().describe(v1::DescribeRequest {}).await {
                Ok(_) => tokio::time::sleep(std::time::Duration::from_millis(5)).await,
                Err(refused) => return refused,
            }
        }
    };
    let refused = tokio::time::timeout(std::time::Duration::from_secs(60), closed).await.unwrap();
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    assert_eq!(read(running).await.unwrap().tokens[0].len(), 999, "one came before");
    until("the worker ends", || pd.running.is_finished()).await;
    pd.running.await.unwrap().unwrap();
}
