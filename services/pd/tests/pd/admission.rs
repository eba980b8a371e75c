//! Admission of sequences: a request gets permits for all of them, or is refused before it starts.

use crate::support::{Pd, about, sampled, start_with, words};
use tonic::Code;
use triptych_ec::fault::Fault;
use triptych_ec::store::Op;
use triptych_pd::EngineSettings;
use triptych_proto::v1;

/// Twelve sequences in all.
async fn small() -> Pd {
    start_with(EngineSettings { max_sequences: 4, max_waiting: 8, ..EngineSettings::default() }).await
}

fn n(request: v1::PdGenerateRequest, n: u32) -> v1::PdGenerateRequest {
    sampled(request, |s| s.n = Some(n))
}

#[tokio::test]
async fn a_request_with_more_sequences_than_the_worker_holds_is_too_large_for_ever() {
    let pd = small().await;
    let refused = pd.generate(n(words("x", 4), 13)).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused:?}");
    assert_eq!(refused.metadata().get("triptych-param").unwrap(), "n");
    let most = pd.generate(n(words("x", 4), 12)).await.unwrap();
    assert_eq!(most.n_ends, 12, "exactly as many do fit");
}

#[tokio::test]
async fn a_request_without_room_for_all_its_sequences_is_refused_and_fits_when_others_left() {
    let pd = small().await;
    let image = [pd.stored_image(1).await];
    pd.faults.stand(Op::Get, Fault::Hang);
    let mut client = pd.client();
    let first = client.generate(n(about(&image, 4), 6)).await.unwrap();
    let second = client.generate(n(about(&image, 4), 5)).await.unwrap();
    let refused = pd.generate(n(words("x", 4), 2)).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    drop((first, second));
    pd.until_metric("triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}", 2.0).await;
    pd.until_idle("vl").await;
    assert_eq!(pd.generate(n(words("x", 4), 12)).await.unwrap().n_ends, 12);
}

#[tokio::test]
async fn more_requests_than_permits_are_refused() {
    let pd = start_with(EngineSettings { max_requests: 1, ..EngineSettings::default() }).await;
    let running = pd.begin(words("on and on", 2_000)).await;
    let refused = pd.generate(words("x", 4)).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
    drop(running);
    pd.until_metric("triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}", 1.0).await;
    pd.until_idle("vl").await;
    assert!(pd.generate(words("x", 4)).await.is_ok());
}
