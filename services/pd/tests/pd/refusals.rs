//! Invalid requests: each is refused as such, and the worker goes on.

use crate::support::{Pd, about, sampled, source, start, start_changed, words};
use tonic::Code;
use triptych_core::sampling::Constraint;
use triptych_core::{ContentKey, DType, EncodedItem, Extent, Fingerprint, Modality};
use triptych_pd::PdConfig;
use triptych_proto::v1;

async fn check(pd: &Pd, what: &str, request: v1::PdGenerateRequest, expect: Code) {
    let refused = pd.generate(request).await.expect_err(what);
    assert_eq!(refused.code(), expect, "{what}: {refused:?}");
}

#[tokio::test]
async fn a_wrong_request_is_an_invalid_argument_and_the_worker_goes_on() {
    let pd = start().await;
    let invalid = Code::InvalidArgument;
    check(&pd, "prompt too long", words(&"word ".repeat(5_000), 4), invalid).await;
    check(&pd, "empty prompt", words("", 4), invalid).await;
    let no_prompt = v1::PdGenerateRequest { prompt: None, ..words("x", 4) };
    check(&pd, "no prompt", no_prompt, invalid).await;
    for id in ["", "req-", "7", &"f".repeat(100_000)] {
        let request = v1::PdGenerateRequest { request_id: id.into(), ..words("x", 4) };
        check(&pd, "request_id garbage", request, invalid).await;
    }
    let mut role = about(&[], 4);
    let Some(v1::prompt::Kind::Chat(chat)) = role.prompt.as_mut().and_then(|p| p.kind.as_mut()) else {
        unreachable!("about makes a chat")
    };
    chat.messages[0].role = 99;
    check(&pd, "unknown role", role, invalid).await;
    let tenant = v1::PdGenerateRequest { tenant: vec![1; 31].into(), ..words("x", 4) };
    check(&pd, "short tenant", tenant, invalid).await;
    check(&pd, "no choices", sampled(words("x", 4), |s| s.n = Some(17)), invalid).await;
    check(&pd, "not finite", sampled(words("x", 4), |s| s.temperature = Some(f32::NAN)), invalid).await;
    let small = sampled(words("x", 4), |s| s.repetition_penalty = Some(1e-45));
    check(&pd, "a penalty that makes logits infinite", small, invalid).await;
    let alien = sampled(words("x", 4), |s| s.logit_bias = [(9_999_999, 1.0)].into());
    check(&pd, "a bias past the vocabulary", alien, invalid).await;
    let broken = sampled(words("x", 4), |s| s.constraint = Some(Constraint::Regex("(a".into()).into()));
    check(&pd, "no expression", broken, invalid).await;
    assert_eq!(pd.generate(words("x", 4)).await.unwrap().tokens[0].len(), 4);
    pd.until_idle("vl").await;
}

/// A model without an encoder has the prompt in the place of the encoder's text, as in transformers.
#[tokio::test]
async fn no_token_of_the_prompt_is_written_where_its_ngrams_are_ruled_out() {
    let pd = start().await;
    let mut n_repeated = Vec::new();
    for size in [0, 1] {
        let request = sampled(words("what is it", 8), |s| {
            s.echo = true;
            s.encoder_no_repeat_ngram_size = Some(size);
        });
        let plain = pd.generate(request.clone()).await.unwrap();
        let n_prompt = plain.summary.usage.unwrap().prompt_tokens as usize;
        let favourite = plain.tokens[0][n_prompt - 1];
        let biased = sampled(request, |s| s.logit_bias = [(favourite, 100.0)].into());
        let answer = pd.generate(biased).await.unwrap();
        n_repeated.push(answer.tokens[0][n_prompt..].iter().filter(|token| **token == favourite).count());
    }
    assert_eq!(n_repeated, [8, 0]);
}

#[tokio::test]
async fn a_description_that_claims_too_much_is_refused_before_anything_is_made_of_it() {
    let pd = start().await;
    let mut image = pd.stored_image(1).await;
    (image.n_tokens, image.extent) = (u32::MAX / 4, Extent::Grid { t: 1, h: 2, w: u32::MAX / 2 });
    check(&pd, "rows", about(&[image], 4), Code::InvalidArgument).await;
    let mut audio = pd.output("speech", Extent::windows(1, 1), 2).item().clone();
    audio.extent = Extent::windows(2_000, 1);
    audio.n_tokens = 2_000 * crate::support::WINDOW;
    check(&pd, "windows", crate::support::transcribe(&audio, 4), Code::InvalidArgument).await;
}

#[tokio::test]
async fn a_model_that_is_not_here_is_not_found_and_its_name_does_not_overflow_the_status() {
    let pd = start().await;
    for name in ["nobody".to_owned(), "x".repeat(1 << 20)] {
        let request = v1::PdGenerateRequest { model: name, ..words("x", 4) };
        check(&pd, "unknown model", request, Code::NotFound).await;
    }
    pd.until_metric("triptych_requests_total{model=\"unknown\",outcome=\"not_found\"}", 2.0).await;
}

#[tokio::test]
async fn outputs_of_towers_come_in_their_order_one_for_each() {
    let models = vec![source("cogagent_chat", "towers")];
    let pd = start_changed(|config| PdConfig { models, ..config }).await;
    let described = pd.client().describe(v1::DescribeRequest {}).await.unwrap().into_inner();
    let encoders = &described.models[0].encoders;
    let names: Vec<_> = encoders.iter().map(|e| (e.tower_index, e.tower_name.as_str())).collect();
    assert_eq!(names, [(0, "low"), (1, "high")]);
    let output = |tower: usize| EncodedItem {
        key: ContentKey::from_bytes([7; 32]),
        fingerprint: Fingerprint::from_slice(&encoders[tower].fingerprint).unwrap(),
        modality: Modality::Image,
        n_tokens: 18,
        hidden: 32,
        dtype: DType::F32,
        extent: Extent::Grid { t: 1, h: 4, w: 4 },
        checksum: [1; 32],
    };
    for (towers, expect) in [
        (&[1, 0][..], "encoder fingerprints differ"),
        (&[0, 0], "encoder fingerprints differ"),
        (&[0], "1 encoder outputs for items that each have 2"),
        (&[0, 1, 0], "3 encoder outputs for items that each have 2"),
        // The rest is the prompt's to say.
        (&[0, 1], "item 0 has [18, 18] rows of its towers, an image of this model has [18, 36]"),
    ] {
        let items: Vec<EncodedItem> = towers.iter().map(|tower| output(*tower)).collect();
        let request = v1::PdGenerateRequest { model: "towers".into(), ..about(&items, 4) };
        let refused = pd.generate(request).await.expect_err(expect);
        assert!(refused.message().contains(expect), "{towers:?}: {refused}");
    }
}
