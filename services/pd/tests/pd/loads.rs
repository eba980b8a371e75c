//! Loading of items: missing, corrupt, shared, late.

use crate::support::{Pd, about, start, until};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tonic::{Code, Request, Status};
use triptych_core::limits::Limits;
use triptych_core::{EncodedItem, EncoderOutput, Extent};
use triptych_ec::fault::Fault;
use triptych_ec::object;
use triptych_ec::store::lease::Acquired;
use triptych_ec::store::peer::{PeerCache, PeerCacheSettings, Pin};
use triptych_ec::store::{EcStore, Op};
use triptych_proto::v1;

fn assert_names(status: &Status, param: &str) {
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
    assert_eq!(status.metadata().get("triptych-param").unwrap(), param);
}

fn missing(pd: &Pd, seed: u8) -> EncodedItem {
    pd.output("vl", Extent::Grid { t: 1, h: 4, w: 4 }, seed).item().clone()
}

#[tokio::test]
async fn an_item_that_is_not_in_the_store_is_named_by_its_index() {
    let pd = start().await;
    let here = pd.stored_image(1).await;
    let gone = missing(&pd, 2);
    assert_names(&pd.generate(about(std::slice::from_ref(&gone), 4)).await.unwrap_err(), "items[0]");
    assert_names(&pd.generate(about(&[here, gone], 4)).await.unwrap_err(), "items[1]");
    pd.until_idle("vl").await;
}

#[tokio::test]
async fn a_corrupt_object_is_quarantined_and_can_be_published_again() {
    let pd = start().await;
    let image = [pd.stored_image(1).await];
    pd.faults.queue(Op::Get, Fault::BitFlip);
    assert_names(&pd.generate(about(&image, 4)).await.unwrap_err(), "items[0]");
    pd.until_metric("triptych_ec_corrupt_objects_total{tier=\"memory\"}", 1.0).await;
    assert_eq!(pd.faults.n_calls(Op::Quarantine), 1);
    assert_eq!(pd.store.n_objects(), 0, "out of view");
    pd.stored_image(1).await;
    assert_eq!(pd.generate(about(&image, 4)).await.unwrap().tokens[0].len(), 4);
}

#[tokio::test]
async fn an_item_of_another_encoder_is_refused_before_it_is_loaded() {
    let pd = start().await;
    let mut image = pd.stored_image(1).await;
    image.fingerprint = triptych_core::Fingerprint::from_bytes([9; 32]);
    let refused = pd.generate(about(&[image], 4)).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition, "{refused:?}");
    assert_eq!(pd.faults.n_calls(Op::Get), 0);
}

#[tokio::test]
async fn requests_on_one_item_share_one_read_of_the_store() {
    let pd = start().await;
    let image = [pd.stored_image(1).await];
    pd.faults.queue(Op::Get, Fault::Latency(Duration::from_millis(100)));
    let (a, b) = tokio::join!(pd.generate(about(&image, 6)), pd.generate(about(&image, 6)));
    assert_eq!(a.unwrap().tokens, b.unwrap().tokens);
    pd.generate(about(&image, 6)).await.unwrap();
    assert_eq!(pd.faults.n_calls(Op::Get), 1);
}

#[tokio::test]
async fn a_load_that_fails_for_two_requests_fails_both_and_not_the_next() {
    let pd = start().await;
    let gone = [missing(&pd, 1)];
    pd.faults.queue(Op::Get, Fault::Latency(Duration::from_millis(100)));
    let (a, b) = tokio::join!(pd.generate(about(&gone, 6)), pd.generate(about(&gone, 6)));
    assert_names(&a.unwrap_err(), "items[0]");
    assert_names(&b.unwrap_err(), "items[0]");
    pd.stored_image(1).await;
    assert_eq!(pd.generate(about(&gone, 6)).await.unwrap().tokens[0].len(), 6);
}

#[tokio::test]
async fn a_deadline_passes_while_a_store_stalls() {
    let pd = start().await;
    let image = pd.stored_image(1).await;
    pd.faults.stand(Op::Get, Fault::Hang);
    // Not tonic's own timeout, which would also end the call on this side.
    let mut request = Request::new(about(&[image], 4));
    request.metadata_mut().insert("grpc-timeout", "300m".parse().unwrap());
    let late = pd.generate(request).await.unwrap_err();
    assert_eq!(late.code(), Code::DeadlineExceeded, "{late:?}");
    pd.until_idle("vl").await;
}

fn hinted(mut request: v1::PdGenerateRequest, hint: v1::ItemHint) -> v1::PdGenerateRequest {
    request.hints = vec![hint];
    request
}

/// A worker's memory that serves what is on its peer cache.
async fn peer_with(outputs: &[EncoderOutput]) -> (String, Vec<Pin>) {
    let peer_cache = Arc::new(PeerCache::new(PeerCacheSettings::default(), &Limits::default()));
    let place = |o: &EncoderOutput| peer_cache.place(o.item().key, object::encode(o));
    let pins = outputs.iter().map(place).collect();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        triptych_ec::server::serve(listener, peer_cache, &Limits::default(), std::future::pending()).await
    });
    (address, pins)
}

#[tokio::test]
async fn an_item_is_read_from_the_worker_that_encoded_it_while_the_store_does_not_have_it() {
    let pd = start().await;
    let output = pd.output("vl", Extent::Grid { t: 1, h: 4, w: 4 }, 1);
    let (peer, _pins) = peer_with(std::slice::from_ref(&output)).await;
    let image = [output.item().clone()];
    let hint = v1::ItemHint { peers: vec!["127.0.0.1:1".into(), peer], pending: false };
    let response = pd.generate(hinted(about(&image, 4), hint)).await.unwrap();
    assert_eq!(response.tokens[0].len(), 4);
    assert_eq!(pd.faults.n_calls(Op::Get), 0, "the store was not asked");
    pd.until_metric("triptych_ec_hits_total{tier=\"peer\"}", 1.0).await;
}

#[tokio::test]
async fn a_pending_item_is_waited_for_and_its_own_header_describes_it() {
    let pd = start().await;
    let output = pd.output("vl", Extent::Grid { t: 1, h: 4, w: 4 }, 1);
    let lease = pd.store.acquire(&output.item().key, Duration::from_secs(60)).await.unwrap();
    assert!(matches!(lease, Acquired::Granted(_)));
    let announced = EncodedItem { checksum: [0; 32], ..output.item().clone() };
    let request = hinted(about(&[announced], 4), v1::ItemHint { peers: Vec::new(), pending: true });
    let (response, ()) = tokio::join!(pd.generate(request), async {
        until("it waits", || pd.faults.n_calls(Op::Wait) > 0).await;
        pd.put(&output).await;
    });
    assert_eq!(response.unwrap().tokens[0].len(), 4);
}

#[tokio::test]
async fn an_item_that_was_announced_wrongly_fails_its_own_request_and_no_other() {
    let pd = start().await;
    let right = pd.stored_image(1).await;
    let wrong = EncodedItem { extent: Extent::Grid { t: 1, h: 2, w: 8 }, ..right.clone() };
    pd.generate(about(&[wrong], 4)).await.unwrap_err();
    assert_eq!(pd.faults.n_calls(Op::Quarantine), 0);
    assert_eq!(pd.generate(about(&[right], 4)).await.unwrap().tokens[0].len(), 4);
}
