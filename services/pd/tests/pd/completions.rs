//! Responses to valid requests.

use crate::support::{
    SPEECH, VL, about, read, sampled, source, start, start_helped, start_with, tokenizer, transcribe, words,
};
use std::time::Duration;
use triptych_core::Extent;
use triptych_core::sampling::Constraint;
use triptych_ec::fault::Fault;
use triptych_ec::store::Op;
use triptych_pd::EngineSettings;
use triptych_proto::v1;

#[tokio::test]
async fn a_request_whose_item_is_in_the_store_gets_tokens_usage_and_times() {
    let pd = start().await;
    // On a machine that stalls, waiting may take longer than the load: another image is tried then. Were waiting for
    // rows counted as queueing, it always would.
    for seed in 1..=20 {
        let image = pd.stored_image(seed).await;
        pd.faults.queue(Op::Get, Fault::Latency(Duration::from_millis(100)));
        let response = pd.generate(about(std::slice::from_ref(&image), 9)).await.unwrap();
        assert_eq!((response.tokens.len(), response.tokens[0].len(), response.n_ends), (1, 9, 1));
        let (usage, times) = (response.summary.usage.unwrap(), response.summary.times.unwrap());
        assert_eq!(usage.completion_tokens, 9);
        assert!(usage.prompt_tokens > image.n_tokens, "placeholders count");
        assert!(times.load_us >= 100_000, "{times:?}");
        assert!(times.prefill_us > 0, "{times:?}");
        // Of two threads, each of which reads the clock at its own end of the load.
        if times.queue_us < times.load_us && times.first_token_us >= times.load_us {
            return pd.until_idle("vl").await;
        }
    }
    panic!("waiting for rows is not queueing, and the first token comes after it");
}

#[tokio::test]
async fn completions_keep_to_their_constraint() {
    let pd = start().await;
    let constraint = Constraint::Regex("[0-9]{3}-(ab|c)".into());
    let asked = sampled(words("Say", 60), |s| {
        (s.n, s.temperature, s.constraint) = (Some(4), Some(1.5), Some(constraint.into()));
    });
    let response = pd.generate(asked).await.unwrap();
    let tokenizer = tokenizer();
    for text in response.tokens.iter().map(|tokens| tokenizer.decode(tokens)) {
        let (number, rest) = text.split_once('-').unwrap();
        assert!(number.len() == 3 && number.bytes().all(|b| b.is_ascii_digit()), "{text}");
        assert!(["ab", "c"].contains(&rest), "{text}");
    }
    pd.until_idle("vl").await;
}

#[tokio::test]
async fn waiting_for_a_run_slot_is_not_loading() {
    let pd = start_with(EngineSettings { max_sequences: 1, ..EngineSettings::default() }).await;
    let image = pd.stored_image(1).await;
    pd.generate(about(std::slice::from_ref(&image), 1)).await.unwrap();
    // The second may not have to wait on a given machine, so it is tried until it does. Were waiting counted as
    // loading, no try would ever show a queue that is longer than the load.
    let mut times = v1::StageTimes::default();
    for _ in 0..100 {
        let first = pd.begin(words("go on and on", 300)).await;
        let second = pd.generate(about(std::slice::from_ref(&image), 1)).await.unwrap();
        assert_eq!(read(first).await.unwrap().tokens[0].len(), 299, "one came before");
        times = second.summary.times.unwrap();
        if times.load_us < times.queue_us {
            return;
        }
    }
    panic!("its rows were here: {times:?}");
}

#[tokio::test]
async fn speculation_changes_no_completion_and_is_counted() {
    let engine = EngineSettings::default();
    // A model that drafts for itself is mostly right; the end may cut a draft short.
    let itself = || vec![source("whisper_multilingual", SPEECH), source("qwen2_vl_two_images", VL)];
    let mut seen = Vec::new();
    for (lookup_tokens, drafts) in [(0, Vec::new()), (4, Vec::new()), (0, itself())] {
        let helped = !drafts.is_empty();
        let pd = start_helped(EngineSettings { lookup_tokens, ..engine }, drafts).await;
        let image = pd.stored_image(1).await;
        let audio = pd.output(SPEECH, Extent::windows(1, 900), 3);
        pd.put(&audio).await;
        let mut tokens = Vec::new();
        for request in
            [about(&[image], 24), words("again and again and again", 24), transcribe(audio.item(), 24)]
        {
            let response = pd.generate(request).await.unwrap();
            let usage = response.summary.usage.unwrap();
            if helped {
                assert!(usage.accepted_tokens * 2 > usage.drafted_tokens, "{usage:?}");
            } else if lookup_tokens == 0 {
                assert_eq!(usage.drafted_tokens, 0);
            }
            tokens.push(response.tokens);
        }
        pd.until_idle("vl").await;
        seen.push(tokens);
    }
    assert_eq!(seen[0], seen[1], "prompt lookup");
    assert_eq!(seen[0], seen[2], "a draft model");
}

#[tokio::test]
async fn the_same_seed_gives_the_same_completion_alone_and_in_a_batch() {
    let pd = start().await;
    let image = [pd.stored_image(1).await];
    let drawn = |seed| {
        sampled(about(&image, 24), |s| {
            (s.seed, s.n) = (Some(seed), Some(2));
            (s.temperature, s.top_p, s.top_k) = (Some(1.0), Some(1.0), Some(100));
        })
    };
    let alone = pd.generate(drawn(5)).await.unwrap().tokens;
    assert_ne!(alone[0], alone[1], "two completions under one seed differ");
    let (a, b, c, d) = tokio::join!(
        pd.generate(drawn(6)),
        pd.generate(drawn(5)),
        pd.generate(words("something else", 40)),
        pd.generate(drawn(7)),
    );
    assert_eq!(b.unwrap().tokens, alone);
    assert_ne!(a.unwrap().tokens, d.unwrap().tokens);
    assert_eq!(c.unwrap().tokens[0].len(), 40);
}
