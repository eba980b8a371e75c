//! Audio clips of several windows.

use crate::support::{Pd, SPEECH, WINDOW, sampled, start, transcribe};
use std::sync::Arc;
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, Extent, WindowSpan};
use triptych_proto::v1;

/// Window `k` of an output, as a clip of its own.
fn window(whole: &EncoderOutput, k: u32) -> EncoderOutput {
    let width = (whole.rows().len() / whole.item().n_tokens as usize) * WINDOW as usize;
    let rows: Arc<[u8]> = whole.rows()[k as usize * width..][..width].into();
    let item = EncodedItem {
        key: ContentKey::from_bytes([200 + k as u8; 32]),
        n_tokens: WINDOW,
        extent: Extent::windows(1, 1_000),
        ..whole.item().clone()
    };
    EncoderOutput::seal(item, rows).unwrap()
}

async fn tokens(pd: &Pd, output: &EncoderOutput) -> Vec<u32> {
    pd.put(output).await;
    pd.generate(transcribe(output.item(), 12)).await.unwrap().tokens.remove(0)
}

#[tokio::test]
async fn windows_are_emitted_in_order_for_each_choice() {
    let pd = start().await;
    let whole = pd.output(SPEECH, Extent::windows(3, 2_900), 3);
    pd.put(&whole).await;
    let mut expected = Vec::new();
    for k in 0..3 {
        expected.extend(tokens(&pd, &window(&whole, k)).await);
    }
    let response = pd.generate(sampled(transcribe(whole.item(), 12), |s| s.n = Some(2))).await.unwrap();
    assert_eq!(response.tokens, [expected.clone(), expected], "the windows alone, one after the other");
    assert_eq!(response.n_ends, 2, "one end for each response, not for each window");
    assert_eq!(response.summary.usage.unwrap().completion_tokens, 2 * 3 * 12);
    let prompt = response.summary.decoder_prompt.clone().expect("an encoder-decoder model reports it");
    assert!(prompt.text.starts_with("<|startoftranscript|><|en|>"), "{prompt:?}");
    assert_eq!(prompt.token_ids.len(), 3, "start, language, task");
    assert_eq!((response.summary.duration_s, response.summary.language.as_str()), (2.9, "en"));
    pd.until_idle(SPEECH).await;
}

/// A transcription in which the task is changed.
fn asked(item: &EncodedItem, change: impl FnOnce(&mut v1::SpeechTask)) -> v1::PdGenerateRequest {
    let mut request = transcribe(item, 12);
    let kind = request.prompt.as_mut().and_then(|p| p.kind.as_mut());
    let Some(v1::prompt::Kind::Speech(task)) = kind else { unreachable!("it is a speech task") };
    change(task);
    request
}

fn spans(of: &[[u32; 2]], duration_ms: u64) -> Extent {
    let spans: Arc<[WindowSpan]> =
        of.iter().map(|[start_ms, end_ms]| WindowSpan { start_ms: *start_ms, end_ms: *end_ms }).collect();
    Extent::Windows { n_windows: spans.len() as u32, duration_ms, spans }
}

fn fallback(
    temperatures: &[f32],
    logprob: Option<f32>,
    no_speech: Option<f32>,
) -> Option<v1::SpeechFallback> {
    let temperatures = temperatures.to_vec();
    Some(v1::SpeechFallback { temperatures, compression_ratio: None, logprob, no_speech })
}

#[tokio::test]
async fn a_window_that_goes_wrong_is_decoded_again_and_emitted_once() {
    let pd = start().await;
    let audio = pd.output(SPEECH, Extent::windows(1, 900), 4);
    pd.put(&audio).await;
    let seeded = |request| sampled(request, |s| s.seed = Some(5));
    let greedy = pd.generate(transcribe(audio.item(), 12)).await.unwrap();
    let drawn = |s: &mut v1::Sampling| (s.seed, s.temperature) = (Some(5), Some(1.0));
    let drawn = pd.generate(sampled(transcribe(audio.item(), 12), drawn)).await.unwrap();
    assert_ne!(greedy.tokens, drawn.tokens);
    let check = async |given: Option<v1::SpeechFallback>, expect: &[u32], temperature: f32| {
        let response = pd.generate(seeded(asked(audio.item(), |t| t.fallback = given))).await.unwrap();
        assert_eq!((response.tokens[0].as_slice(), response.n_ends), (expect, 1));
        assert!(response.segments.iter().all(|s| (s.temperature - temperature).abs() < 1e-6));
    };
    check(fallback(&[0.0, 0.5, 1.0], None, None), &greedy.tokens[0], 0.0).await;
    // No output reaches this confidence, so the last temperature decides.
    check(fallback(&[0.0, 0.5, 1.0], Some(0.0), None), &drawn.tokens[0], 1.0).await;
    check(fallback(&[0.0], Some(0.0), None), &greedy.tokens[0], 0.0).await;
    let silent = asked(audio.item(), |t| t.fallback = fallback(&[0.0, 1.0], Some(0.0), Some(-1.0)));
    let silent = pd.generate(silent).await.unwrap();
    assert!(silent.segments.is_empty() && silent.n_ends == 1, "no speech");
    pd.until_idle(SPEECH).await;
}

#[tokio::test]
async fn windows_that_overlap_are_joined_and_windows_without_audio_are_skipped() {
    let pd = start().await;
    let one = pd.output(SPEECH, Extent::windows(1, 1_000), 5);
    let alone = tokens(&pd, &one).await;
    let twice = |extent| {
        let rows: Arc<[u8]> = [&one.rows()[..], &one.rows()[..]].concat().into();
        let key = ContentKey::from_bytes([77; 32]);
        EncoderOutput::seal(EncodedItem { key, n_tokens: 2 * WINDOW, extent, ..one.item().clone() }, rows)
            .unwrap()
    };
    let overlapping = twice(spans(&[[0, 1_000], [500, 1_500]], 1_500));
    assert_eq!(tokens(&pd, &overlapping).await, alone, "what both heard is emitted once");
    let silent = EncodedItem { extent: spans(&[[3_000, 3_000]], 3_000), ..one.item().clone() };
    let silent = EncoderOutput::seal(silent, one.rows().clone()).unwrap();
    pd.put(&silent).await;
    let response = pd.generate(transcribe(silent.item(), 12)).await.unwrap();
    assert_eq!((response.tokens.concat().len(), response.segments.len(), response.n_ends), (0, 0, 1));
    assert_eq!(response.summary.usage.unwrap().completion_tokens, 0);
    pd.until_idle(SPEECH).await;
}

#[tokio::test]
async fn words_have_times_inside_their_window() {
    let pd = start().await;
    let audio = pd.output(SPEECH, spans(&[[2_000, 2_900]], 2_900), 6);
    pd.put(&audio).await;
    let plain = pd.generate(transcribe(audio.item(), 12)).await.unwrap();
    let response = pd.generate(asked(audio.item(), |t| t.word_timestamps = true)).await.unwrap();
    assert_eq!(response.tokens, plain.tokens);
    assert!(!response.segments.is_empty());
    for (timed, untimed) in response.segments.iter().zip(&plain.segments) {
        assert_eq!((&timed.text, timed.window_start_ms), (&untimed.text, 2_000));
        let text: String = timed.words.iter().map(|w| w.text.as_str()).collect();
        assert_eq!(text, timed.text);
        assert!(timed.words.iter().all(|w| w.start_s >= 2.0 && w.start_s <= w.end_s && w.end_s <= 2.9));
        assert!(timed.words.iter().all(|w| w.probability > 0.0 && w.probability <= 1.0));
    }
    pd.until_idle(SPEECH).await;
}

#[tokio::test]
async fn a_window_in_sequence_reports_the_start_of_the_next() {
    let pd = start().await;
    let audio = pd.output(SPEECH, spans(&[[1_000, 2_000]], 4_000), 7);
    pd.put(&audio).await;
    let in_sequence = |change: fn(&mut v1::SpeechTask)| {
        asked(audio.item(), |t| {
            t.long_form = v1::LongForm::Sequential.into();
            change(t);
        })
    };
    let response = pd.generate(in_sequence(|_| ())).await.unwrap();
    let next = response.summary.next.expect("there is more");
    assert!(next.start_ms > 1_000 && next.start_ms <= 2_000 && next.conditioned);
    assert_eq!(next.previous, response.tokens[0]);
    let on = in_sequence(|t| {
        t.condition_on_previous = true;
        t.resume = Some(v1::SpeechResume { start_ms: 1_000, previous: vec![70, 71, 72], conditioned: true });
    });
    let on = pd.generate(on).await.unwrap();
    assert_eq!(on.summary.next.expect("there is more").previous[..3], [70, 71, 72]);
    let two = pd.generate(sampled(in_sequence(|_| ()), |s| s.n = Some(2))).await.unwrap_err();
    assert!(two.message().contains("has one choice"), "{two}");
    pd.until_idle(SPEECH).await;
}
