//! Early forwarding: a request goes to a PD worker as soon as its items are announced, before they are encoded.

use crate::fakes::{EncodeStep, GenerateStep, hello};
use crate::support::{Cluster, IMAGE, ask, eventually, question};
use tonic::{Code, Status};
use triptych_core::Failure;
use triptych_core::limits::Limits;
use triptych_proto::v1::ItemSource::Encoded;
use triptych_runtime::status::to_status;

const EARLY: &str = "triptych_early_forwards_total{model=\"vl\"}";

fn missing(param: &str) -> Status {
    to_status(&Failure::unavailable("an encoder output is not in the store").with_param(param))
}

#[tokio::test]
async fn a_request_is_forwarded_before_its_item_is_encoded() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::AnnounceThenHold]);
    cluster.pd.script([GenerateStep::SendThenHold(vec![])]);
    let encoded_later = async {
        eventually("the request is there", async || !cluster.pd.requests().is_empty()).await;
        let request = cluster.pd.requests().remove(0);
        assert_eq!(request.hints.len(), 1);
        assert!(request.hints[0].pending && request.items[0].checksum == [0; 32].as_slice());
        assert_eq!((request.items[0].n_tokens, request.items[0].hidden), (2, 2), "it can be laid out");
        cluster.encoder.release(1);
        // The encoder's event reaches the proxy before the answer ends.
        eventually("the item is known to be encoded", async || {
            cluster.proxy.metric("triptych_item_source_total{source=\"encoded\",modality=\"image\"}").await
                == 1.0
        })
        .await;
        cluster.pd.release(1);
    };
    let asked = question(&[IMAGE]);
    let (answer, ()) = futures::join!(ask(&cluster.proxy, asked), encoded_later);
    let answer = answer.unwrap();
    assert_eq!((answer.text.as_str(), answer.sources()), ("hello world", vec![Encoded]));
    assert!(answer.summary.times.unwrap().encode_us > 0);
    assert_eq!(cluster.proxy.metric(EARLY).await, 1.0);
    // A READY item is not announced as pending.
    ask(&cluster.proxy, question(&[IMAGE])).await.unwrap();
    let second = cluster.pd.requests().remove(1);
    assert!(!second.hints[0].pending && second.items[0].checksum != [0; 32].as_slice());
    assert_eq!(cluster.proxy.metric(EARLY).await, 1.0);
}

#[tokio::test]
async fn a_permanent_item_failure_ends_a_request_that_was_forwarded_early() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::EndEarly]);
    cluster.encoder.script([EncodeStep::Fail(to_status(&Failure::invalid("the JPEG is cut off")))]);
    cluster.pd.script([GenerateStep::SendThenHold(vec![])]);
    let status = ask(&cluster.proxy, question(&[IMAGE])).await.unwrap_err();
    assert_eq!((status.code(), status.message()), (Code::InvalidArgument, "the JPEG is cut off"));
    assert_eq!(status.metadata().get("triptych-param").unwrap(), "items[0]");
    assert_eq!(cluster.pd.requests().len(), 1, "it was there, and is not sent again");
}

#[tokio::test]
async fn a_worker_that_does_not_wait_for_an_item_gets_the_request_again_when_it_is_ready() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::AnnounceThenHold]);
    cluster.pd.script([GenerateStep::Fail(missing("items[0]")), GenerateStep::Send(hello())]);
    let encoded_later = async {
        eventually("the request was there", async || !cluster.pd.requests().is_empty()).await;
        cluster.encoder.release(1);
    };
    let asked = question(&[IMAGE]);
    let (answer, ()) = futures::join!(ask(&cluster.proxy, asked), encoded_later);
    assert_eq!(answer.unwrap().text, "hello world");
    assert_eq!((cluster.pd.requests().len(), cluster.encoder.jobs().len()), (2, 1), "encoded once");
    assert!(!cluster.pd.requests()[1].hints[0].pending);
}

#[tokio::test]
async fn a_forwarded_request_whose_item_never_arrives_ends_at_its_deadline() {
    let limits = Limits { max_request_time: std::time::Duration::from_millis(500), ..Limits::default() };
    let cluster = Cluster::with(|config| config.limits = limits).await;
    cluster.encoder.script([EncodeStep::AnnounceThenHold]);
    cluster.pd.script([GenerateStep::SendThenHold(vec![])]);
    let status = ask(&cluster.proxy, question(&[IMAGE])).await.unwrap_err();
    assert!(matches!(status.code(), Code::DeadlineExceeded | Code::Unavailable), "{status}");
}

#[tokio::test]
async fn an_encode_of_a_failed_request_completes_for_the_next_one() {
    let cluster = Cluster::start().await;
    cluster.encoder.script([EncodeStep::AnnounceThenHold]);
    cluster
        .pd
        .script([GenerateStep::Fail(to_status(&Failure::invalid("5000 tokens, the context holds 4096")))]);
    let status = ask(&cluster.proxy, question(&[IMAGE])).await.unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    cluster.encoder.release(1);
    assert_eq!(ask(&cluster.proxy, question(&[IMAGE])).await.unwrap().text, "hello world");
    assert_eq!((cluster.encoder.jobs().len(), cluster.encoder.cancelled()), (1, 0));
}
