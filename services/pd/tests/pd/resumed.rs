//! A stream that another worker began continues as it would have there, at any cut.

use crate::support::{Pd, SPEECH, about, sampled, start, transcribe, words};
use tonic::Code;
use triptych_core::Extent;
use triptych_core::sampling::Constraint;
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;

/// Deltas of a response, and its summary.
async fn pieces(pd: &Pd, request: v1::PdGenerateRequest) -> (Vec<v1::Delta>, v1::Summary) {
    let mut stream = pd.client().generate(request).await.expect("admitted").into_inner();
    let mut deltas = Vec::new();
    loop {
        match stream.message().await.expect("no failure").expect("a summary ends it").kind.expect("a kind") {
            Kind::Delta(delta) => deltas.push(delta),
            Kind::Summary(summary) => return (deltas, summary),
        }
    }
}

/// Joined deltas of each choice.
fn join(deltas: &[v1::Delta], n: u32) -> Vec<v1::Delta> {
    let mut all: Vec<_> = (0..n).map(|choice| v1::Delta { choice, ..v1::Delta::default() }).collect();
    for delta in deltas {
        let one = &mut all[delta.choice as usize];
        one.text.push_str(&delta.text);
        one.token_ids.extend(&delta.token_ids);
        one.logprobs.extend(delta.logprobs.clone());
        one.segments.extend(delta.segments.clone());
        one.finish_reason = one.finish_reason.max(delta.finish_reason);
    }
    all
}

/// Output that the client has after some deltas.
fn resumed_choices(deltas: &[v1::Delta], n: u32) -> Vec<v1::ResumedChoice> {
    let one = |d: v1::Delta| v1::ResumedChoice {
        choice: d.choice,
        token_ids: d.token_ids,
        text_len: d.text.len() as u64,
        ended: d.finish_reason != 0,
        segments: d.segments.len() as u32,
    };
    join(deltas, n).into_iter().map(one).filter(|c| c.ended || !c.token_ids.is_empty()).collect()
}

/// Cuts the stream of a request at about `n_cuts` points, both ends included, and resumes it on a worker that
/// never saw it.
async fn check(first: &Pd, second: &Pd, request: v1::PdGenerateRequest, n_cuts: usize) -> Vec<v1::Delta> {
    let n = request.sampling.as_ref().and_then(|s| s.n).unwrap_or(1);
    let (deltas, summary) = pieces(first, request.clone()).await;
    let stride = (deltas.len() / n_cuts).max(1);
    for cut in (0..deltas.len()).step_by(stride).chain([deltas.len() - 1, deltas.len()]) {
        let (before, after) = deltas.split_at(cut);
        let resumed = v1::PdGenerateRequest { resume: resumed_choices(before, n), ..request.clone() };
        let (rest, again) = pieces(second, resumed).await;
        let ended = |d: &v1::Delta| (d.choice, d.text.clone(), d.token_ids.clone(), d.finish_reason);
        let (rest, after) = (join(&rest, n), join(after, n));
        assert_eq!(
            rest.iter().map(ended).collect::<Vec<_>>(),
            after.iter().map(ended).collect::<Vec<_>>(),
            "cut at {cut} of {}",
            deltas.len()
        );
        assert_eq!(rest, after, "cut at {cut} of {}", deltas.len());
        let counts = |s: &v1::Summary| s.usage.map(|u| (u.prompt_tokens, u.completion_tokens));
        assert_eq!(counts(&again), counts(&summary), "cut at {cut} of {}", deltas.len());
    }
    join(&deltas, n)
}

#[tokio::test]
async fn text_about_an_image_goes_on_on_another_worker() {
    let (first, second) = (start().await, start().await);
    let image = first.stored_image(1).await;
    second.stored_image(1).await;
    let request = about(std::slice::from_ref(&image), 24);
    check(&first, &second, request.clone(), 24).await;
    // No seed: it is derived from the request's id, which another worker gets too.
    let drawn = sampled(request.clone(), |s| {
        (s.temperature, s.n, s.logprobs) = (Some(1.2), Some(2), Some(1));
        (s.repetition_penalty, s.presence_penalty) = (Some(1.2), 0.5);
        s.stop = vec!["zz".into(), "e ".into()];
    });
    check(&first, &second, drawn, 12).await;
    let constrained = sampled(request, |s| {
        (s.temperature, s.ignore_eos) = (Some(1.5), false);
        s.constraint = Some(Constraint::Regex("[0-9]{3}-(ab|c)[a-z]{4}".into()).into());
    });
    check(&first, &second, constrained, 12).await;
    let echoed = sampled(words("Say", 6), |s| (s.echo, s.logprobs) = (true, Some(0)));
    check(&first, &second, echoed, 8).await;
    for pd in [&first, &second] {
        pd.until_idle("vl").await;
    }
}

#[tokio::test]
async fn speech_and_beams_are_generated_again_without_what_was_sent() {
    let (first, second) = (start().await, start().await);
    let audio = first.output(SPEECH, Extent::windows(3, 2700), 3);
    first.put(&audio).await;
    second.put(&audio).await;
    let answers = check(&first, &second, transcribe(audio.item(), 12), 6).await;
    assert!(!answers[0].segments.is_empty());
    let mut aligned = transcribe(audio.item(), 8);
    if let Some(v1::prompt::Kind::Speech(task)) = aligned.prompt.as_mut().and_then(|p| p.kind.as_mut()) {
        task.fallback = Some(v1::SpeechFallback { logprob: Some(-0.5), ..Default::default() });
    }
    check(&first, &second, aligned, 4).await;
    let beams = sampled(words("again and again", 6), |s| {
        (s.temperature, s.n) = (None, Some(2));
        s.beams = Some(v1::Beams { width: 3, length_penalty: None, early_stopping: 0 });
    });
    check(&first, &second, beams, 4).await;
    for model in ["speech", "vl"] {
        second.until_idle(model).await;
    }
}

#[tokio::test]
async fn output_of_another_request_is_refused() {
    let pd = start().await;
    let audio = pd.output(SPEECH, Extent::windows(1, 900), 3);
    pd.put(&audio).await;
    let prior =
        |token_ids: Vec<u32>, text_len| v1::ResumedChoice { token_ids, text_len, ..Default::default() };
    let other = v1::PdGenerateRequest { resume: vec![prior(vec![9, 9], 1)], ..transcribe(audio.item(), 8) };
    assert_eq!(pd.generate(other).await.unwrap_err().code(), Code::Unavailable);
    let twice = v1::PdGenerateRequest { resume: vec![prior(vec![1], 0); 2], ..words("hi", 8) };
    assert_eq!(pd.generate(twice).await.unwrap_err().code(), Code::InvalidArgument);
    let alien = v1::PdGenerateRequest { resume: vec![prior(vec![u32::MAX], 0)], ..words("hi", 8) };
    assert_eq!(pd.generate(alien).await.unwrap_err().code(), Code::InvalidArgument);
    for model in ["speech", "vl"] {
        pd.until_idle(model).await;
    }
}
