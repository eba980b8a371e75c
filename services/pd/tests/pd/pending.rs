//! Requests that come before their items are encoded: the readable prefix is prefilled, the rest waits.

use crate::support::{Pd, VL, about, start, start_with, words};
use triptych_core::{EncoderOutput, Extent};
use triptych_ec::store::EcStore;
use triptych_ec::store::lease::Acquired;
use triptych_pd::EngineSettings;
use triptych_proto::v1;
use triptych_proto::v1::{part, prompt};

const COMPUTED: &str = "triptych_computed_tokens_total{model=\"vl\"}";

/// A question whose text comes before its images, which are still being encoded.
fn text_first(outputs: &[EncoderOutput]) -> v1::PdGenerateRequest {
    let items: Vec<_> = outputs.iter().map(|o| o.item().clone()).collect();
    let mut request = about(&items, 6);
    let part = |kind| v1::Part { kind: Some(kind) };
    let words = "a long text that stands before the image so that there is something to read ".repeat(4);
    let mut parts = vec![part(part::Kind::Text(words))];
    parts.extend((0..items.len() as u32).map(|i| part(part::Kind::Item(i))));
    let message = v1::Message { role: v1::Role::User.into(), parts };
    request.prompt = Some(v1::Prompt {
        kind: Some(prompt::Kind::Chat(prompt::Chat { messages: vec![message], ..Default::default() })),
    });
    for item in &mut request.items {
        item.checksum = vec![0; 32].into();
    }
    request.hints = vec![v1::ItemHint { pending: true, peers: Vec::new() }; outputs.len()];
    request
}

/// An image that is being encoded.
async fn image(pd: &Pd, seed: u8) -> EncoderOutput {
    let output = pd.output(VL, Extent::Grid { t: 1, h: 4, w: 4 }, seed);
    let lease = pd.store.acquire(&output.item().key, std::time::Duration::from_secs(600)).await;
    assert!(matches!(lease, Ok(Acquired::Granted(_))), "{lease:?}");
    output
}

#[tokio::test]
async fn the_text_before_an_image_is_prefilled_while_the_image_is_encoded() {
    let (pd, other) = (start().await, start().await);
    let output = image(&pd, 1).await;
    other.put(&output).await;
    let whole = other.generate(text_first(std::slice::from_ref(&output))).await.unwrap();
    let prompt = whole.summary.usage.unwrap().prompt_tokens;

    let request = text_first(std::slice::from_ref(&output));
    let mut client = pd.client();
    let response =
        tokio::spawn(async move { crate::support::read(client.generate(request).await?.into_inner()).await });
    // The image and the template after it cannot be prefilled yet.
    crate::support::until("the text is read", || pd.metric(COMPUTED) > f64::from(prompt) / 2.0).await;
    assert!(pd.metric(COMPUTED) <= f64::from(prompt - output.item().n_tokens));
    assert!(pd.store.used_bytes() == 0 && !response.is_finished(), "nothing is encoded yet");
    pd.put(&output).await;
    let response = response.await.unwrap().unwrap();
    assert_eq!(response.tokens, whole.tokens);
    let waited = "triptych_pending_item_wait_seconds_count{model=\"vl\"}";
    assert_eq!(pd.metric(waited), 1.0);
    pd.until_idle("vl").await;
}

#[tokio::test]
async fn images_that_come_one_after_the_other_are_prefilled_as_they_come() {
    let pd = start().await;
    let outputs = [image(&pd, 1).await, image(&pd, 2).await];
    let request = text_first(&outputs);
    let mut client = pd.client();
    let response =
        tokio::spawn(async move { crate::support::read(client.generate(request).await?.into_inner()).await });
    crate::support::until("the text is read", || pd.metric(COMPUTED) > 20.0).await;
    let before = pd.metric(COMPUTED);
    pd.put(&outputs[0]).await;
    crate::support::until("the first image is read", || pd.metric(COMPUTED) > before).await;
    assert!(!response.is_finished());
    pd.put(&outputs[1]).await;
    assert_eq!(response.await.unwrap().unwrap().tokens[0].len(), 6);
    pd.until_idle("vl").await;
}

/// Of eight places the last is for requests that wait for no encoder.
#[tokio::test]
async fn requests_whose_images_are_being_encoded_leave_room_for_text() {
    let pd = start_with(EngineSettings { max_requests: 8, ..EngineSettings::default() }).await;
    let mut waiting = Vec::new();
    for seed in 1..=7 {
        let output = image(&pd, seed).await;
        waiting.push(pd.client().generate(text_first(std::slice::from_ref(&output))).await.unwrap());
    }
    let one_more = image(&pd, 8).await;
    let refused = pd.generate(text_first(std::slice::from_ref(&one_more))).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted, "{refused:?}");
    assert_eq!(pd.generate(words("hello", 2)).await.unwrap().tokens[0].len(), 2);
    // An image that is encoded waits for nobody either.
    let ready = pd.stored_image(9).await;
    assert!(pd.generate(about(&[ready], 2)).await.is_ok());
    drop(waiting);
    pd.until_idle("vl").await;
}

#[tokio::test]
async fn a_caller_that_goes_away_before_its_image_comes_leaves_no_wait_behind() {
    let pd = start().await;
    let output = image(&pd, 1).await;
    let stream = pd.client().generate(text_first(std::slice::from_ref(&output))).await.unwrap();
    crate::support::until("the text is read", || pd.metric(COMPUTED) > 20.0).await;
    drop(stream);
    pd.until_metric("triptych_requests_total{model=\"vl\",outcome=\"cancelled\"}", 1.0).await;
    pd.until_idle("vl").await;
    // Draining waits for loads: one that went on waiting would hold it for minutes.
    pd.drain.begin();
    tokio::time::timeout(std::time::Duration::from_secs(30), pd.running).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn an_image_that_never_comes_ends_with_the_request_s_time() {
    let pd = start().await;
    let output = image(&pd, 1).await;
    let mut request = tonic::Request::new(text_first(std::slice::from_ref(&output)));
    request.set_timeout(std::time::Duration::from_millis(400));
    let failed = pd.generate(request).await.unwrap_err();
    assert!(matches!(failed.code(), tonic::Code::DeadlineExceeded | tonic::Code::Cancelled), "{failed}");
    pd.until_idle("vl").await;
}

#[tokio::test]
async fn an_image_whose_encode_was_abandoned_is_a_miss() {
    let pd = start().await;
    let output = pd.output(VL, Extent::Grid { t: 1, h: 4, w: 4 }, 1);
    let failed = pd.generate(text_first(std::slice::from_ref(&output))).await.unwrap_err();
    assert_eq!(failed.code(), tonic::Code::Unavailable);
    assert_eq!(failed.metadata().get("triptych-param").unwrap(), "items[0]");
    pd.until_idle("vl").await;
}
