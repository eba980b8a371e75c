//! The budget of encoder outputs: requests wait for room, rows go once they were read, and what never fits is refused.

use crate::support::{Pd, about, start_changed};
use futures::future::join_all;
use triptych_core::EncodedItem;
use triptych_ec::fault::Fault;
use triptych_ec::store::Op;
use triptych_pd::{EngineSettings, PdConfig};

/// Bytes of an image of four rows.
const IMAGE: usize = 4 * 64 * 4;

async fn with_budget(ec_cache_bytes: usize) -> Pd {
    start_changed(|config| PdConfig { ec_cache_bytes, ..config }).await
}

fn bytes(pd: &Pd, state: &str) -> f64 {
    pd.metric(&format!("triptych_ec_cache_bytes{{state=\"{state}\"}}"))
}

async fn images(pd: &Pd, seeds: std::ops::Range<u8>) -> Vec<EncodedItem> {
    let mut images = Vec::new();
    for seed in seeds {
        images.push(pd.stored_image(seed).await);
    }
    images
}

#[tokio::test]
async fn twenty_requests_in_the_room_of_three_are_all_answered_and_never_pass_it() {
    let pd = with_budget(3 * IMAGE + 100).await;
    let roomy = with_budget(1 << 20).await;
    let (here, there) = (images(&pd, 1..21).await, images(&roomy, 1..21).await);
    pd.faults.stand(Op::Get, Fault::Latency(std::time::Duration::from_millis(5)));
    let watch = async {
        loop {
            let [held, resident] = ["held", "resident"].map(|state| bytes(&pd, state));
            assert!(held.max(resident) <= (3 * IMAGE + 100) as f64, "{held} held, {resident} resident");
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let asked = join_all(here.chunks(1).map(|image| pd.generate(about(image, 6))));
    let answers = tokio::select! { answers = asked => answers, () = watch => unreachable!("it has no end") };
    for (answer, image) in answers.into_iter().zip(there.chunks(1)) {
        let expected = roomy.generate(about(image, 6)).await.unwrap();
        assert_eq!(answer.unwrap().tokens, expected.tokens);
    }
    assert!(pd.metric("triptych_ec_cache_waits_total{}") >= 17.0);
    pd.until_metric("triptych_ec_cache_bytes{state=\"held\"}", 0.0).await;
    assert!(bytes(&pd, "resident") > 0.0, "rows are kept for later requests");
}

#[tokio::test]
async fn a_request_that_never_fits_is_refused_by_name_and_others_are_answered() {
    let pd = with_budget(3 * IMAGE).await;
    let images = images(&pd, 1..5).await;
    let refused = pd.generate(about(&images, 4)).await.unwrap_err();
    assert_eq!(refused.metadata().get("triptych-param").unwrap(), "items", "{refused:?}");
    assert!(
        refused.message().contains("4 KiB") && refused.message().contains("--ec-cache-mib"),
        "{refused:?}"
    );
    assert!(pd.generate(about(&images[..3], 4)).await.is_ok(), "exactly as many do fit");
    let same = [images[0].clone(), images[0].clone(), images[0].clone(), images[0].clone()];
    assert!(pd.generate(about(&same, 4)).await.is_ok(), "an image shown four times is held once");
}

#[tokio::test]
async fn a_decoding_request_holds_no_rows_and_lets_others_in() {
    let pd = with_budget(IMAGE).await;
    let images = images(&pd, 1..3).await;
    let running = pd.begin(about(&images[..1], 2_000)).await;
    pd.until_metric("triptych_ec_cache_bytes{state=\"held\"}", 0.0).await;
    let other = pd.generate(about(&images[1..], 4)).await.unwrap();
    assert_eq!(other.tokens[0].len(), 4);
    assert_eq!(pd.metric("triptych_requests_running{model=\"vl\"}"), 1.0, "the first goes on beside it");
    drop(running);
}

#[tokio::test]
async fn one_who_goes_away_while_it_waits_for_room_or_rows_leaves_its_place() {
    let pd = with_budget(IMAGE).await;
    let images = images(&pd, 1..4).await;
    pd.faults.stand(Op::Get, Fault::Hang);
    let mut client = pd.client();
    let first = client.generate(about(&images[..1], 4)).await.unwrap();
    let second = client.generate(about(&images[1..2], 4)).await.unwrap();
    pd.until_metric("triptych_ec_cache_waits_total{}", 1.0).await;
    drop((first, second));
    pd.until_metric("triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}", 2.0).await;
    pd.until_metric("triptych_ec_cache_bytes{state=\"held\"}", 0.0).await;
    pd.faults.clear();
    assert!(pd.generate(about(&images[2..], 4)).await.is_ok());
}

#[tokio::test]
async fn preempted_requests_load_their_rows_again_and_answer_the_same() {
    // Two sequences that outgrow the blocks: one is computed again, from rows that went.
    let engine = EngineSettings {
        self_kv_bytes: Some(300 << 10),
        cross_kv_bytes: Some(8 << 20),
        host_kv_bytes: 0,
        ..EngineSettings::default()
    };
    let pd = start_changed(|config| PdConfig { ec_cache_bytes: IMAGE, engine, ..config }).await;
    let roomy = with_budget(1 << 20).await;
    let (here, there) = (images(&pd, 1..5).await, images(&roomy, 1..5).await);
    let answers = join_all(here.chunks(1).map(|image| pd.generate(about(image, 200)))).await;
    for (answer, image) in answers.into_iter().zip(there.chunks(1)) {
        let expected = roomy.generate(about(image, 200)).await.unwrap();
        assert_eq!(answer.unwrap().tokens, expected.tokens);
    }
    assert!(pd.metric("triptych_preemptions_total{model=\"vl\"}") > 0.0, "nothing was preempted");
}
