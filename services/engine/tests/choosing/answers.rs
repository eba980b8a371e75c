//! Answers and beams over a vocabulary of words: ends, stops, echo, bans, and what is reported.

use std::sync::Arc;
use std::time::Instant;
use triptych_core::sampling::{BeamParams, Constraint, EarlyStopping, FinishReason, SamplingParams};
use triptych_core::{FailureClass, TenantId};
use triptych_engine::answer::Answer;
use triptych_engine::beam::Turn;
use triptych_engine::beams::{BeamAnswer, Beams};
use triptych_engine::constraint::Constraints;
use triptych_engine::{Arrival, SequenceId};
use triptych_models::prompt::{OutputKind, PreparedSequence};
use triptych_models::rules::LogitRules;
use triptych_models::tokenization::Tokenizer;

const VOCAB: usize = 8;
const END: u32 = 7;
/// Tokens that the context leaves.
const ROOM: usize = 50;

/// Token `i` is the letter at place `i`; the last two are never written by chance.
fn tokenizer() -> Arc<Tokenizer> {
    let json = r#"{"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Split",
        "pattern": {"String": ""}, "behavior": "Isolated", "invert": false},
        "model": {"type": "WordLevel", "unk_token": "?", "vocab":
            {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "f": 5, "?": 6, "end": 7}},
        "decoder": {"type": "Fuse"}}"#;
    Arc::new(Tokenizer::from_bytes(json.as_bytes()).expect("a tokenizer"))
}

fn arrival(sampling: SamplingParams) -> Arrival {
    let tokens = vec![3, 4];
    let constraints = Constraints::new(tokenizer(), VOCAB);
    let constraint = sampling.constraint.as_ref().map(|c| constraints.compile(c).expect("a constraint"));
    Arrival {
        ids: (0..u64::from(sampling.n)).map(SequenceId).collect(),
        prepared: PreparedSequence {
            positions: vec![[0; 3], [1; 3]],
            tokens,
            next_position: 2,
            spans: Vec::new(),
            cross: None,
            rules: LogitRules::default(),
            end_tokens: vec![END],
            output: OutputKind::Text,
        },
        items: Vec::new(),
        sampling: SamplingParams { temperature: 0.0, ..sampling },
        constraint,
        priority: 0,
        tenant: TenantId::SHARED,
        deadline: Instant::now(),
        resumed: None,
    }
}

/// Logits that prefer `first`, and then each next letter.
fn prefer(first: u32) -> Vec<f32> {
    (0..VOCAB as u32).map(|t| -(((t + VOCAB as u32 - first) % VOCAB as u32) as f32)).collect()
}

/// What an answer says when the model prefers `wishes`, one after the other.
fn write(sampling: SamplingParams, wishes: &[u32]) -> (String, Vec<u32>, Option<FinishReason>) {
    let mut answer = Answer::new(&arrival(sampling), 0, ROOM, tokenizer());
    let (mut text, mut sent, mut generated) = (String::new(), Vec::new(), Vec::new());
    for wish in wishes {
        let progress = answer.advance(&generated, &mut prefer(*wish)).expect("finite logits");
        generated.push(progress.token);
        text += &progress.delta.text;
        sent.extend(progress.delta.token_ids);
        if progress.end.is_some() {
            return (text, sent, progress.end);
        }
    }
    (text, sent, None)
}

fn check(sampling: SamplingParams, wishes: &[u32], expect: (&str, &[u32], Option<FinishReason>)) {
    let (text, tokens, end) = write(sampling.clone(), wishes);
    assert_eq!((text.as_str(), &tokens[..], end), expect, "{sampling:?}");
}

#[test]
fn answers_end_where_the_settings_say() {
    let stop = Some(FinishReason::Stop);
    let base = SamplingParams::default();
    check(base.clone(), &[0, 1, END], ("ab", &[0, 1], stop));
    check(SamplingParams { stop_token_ids: vec![2], ..base.clone() }, &[0, 2, 1], ("a", &[0], stop));
    let ignoring = SamplingParams { ignore_eos: true, stop_token_ids: vec![2], ..base.clone() };
    check(ignoring, &[0, END, 2], ("aend", &[0, END], stop));
    // The next letter after the end is the first one.
    check(SamplingParams { min_tokens: 2, ..base.clone() }, &[END, END, END], ("aa", &[0, 0], stop));
    let patient = SamplingParams { min_tokens: 3, stop: vec!["b".into()], ..base.clone() };
    check(patient, &[1, 1, 0, 1], ("bba", &[1, 1, 0, 1], stop));
    let long = SamplingParams { max_tokens: Some(2), ..base };
    check(long, &[0, 1, 2], ("ab", &[0, 1], Some(FinishReason::Length)));
}

#[test]
fn the_last_token_there_is_room_for_is_the_familys_if_it_has_one() {
    let check = |max_tokens: Option<u32>, room: usize, expect: &[u32]| {
        let mut arrival = arrival(SamplingParams { max_tokens, min_tokens: 2, ..SamplingParams::default() });
        arrival.prepared.rules.last = [END].into();
        let mut answer = Answer::new(&arrival, 0, room, tokenizer());
        let mut written = Vec::new();
        while written.last() != Some(&END) {
            written.push(answer.advance(&written, &mut prefer(1)).expect("finite logits").token);
        }
        assert_eq!(written, expect);
    };
    check(Some(3), ROOM, &[1, 1, END]);
    check(None, 2, &[1, END]);
}

#[test]
fn an_echo_comes_before_the_answer_and_is_not_searched_for_stops() {
    let params = SamplingParams { echo: true, stop: vec!["e".into()], ..SamplingParams::default() };
    check(params.clone(), &[0, 4], ("dea", &[3, 4, 0, 4], Some(FinishReason::Stop)));
    check(params, &[END], ("de", &[3, 4], Some(FinishReason::Stop)));
}

#[test]
fn bad_words_are_banned_as_their_tokens_and_forced_tokens_are_beyond_every_setting() {
    let params = SamplingParams { bad_words: vec!["ab".into(), "c".into()], ..SamplingParams::default() };
    check(params.clone(), &[0, 1, 1, 2], ("adbd", &[0, 3, 1, 3], None));
    let mut forced = arrival(params);
    forced.prepared.rules.steps = vec![Arc::from([2])];
    let mut answer = Answer::new(&forced, 0, ROOM, tokenizer());
    assert_eq!(answer.advance(&[], &mut prefer(0)).expect("one token").token, 2);
}

fn choice(choices: &[&str]) -> SamplingParams {
    let choices = choices.iter().map(|c| (*c).to_owned()).collect();
    SamplingParams { constraint: Some(Constraint::Choice(choices)), ..SamplingParams::default() }
}

#[test]
fn a_constraint_goes_together_with_the_other_settings() {
    let stop = Some(FinishReason::Stop);
    let two = choice(&["ab", "abcd"]);
    check(two.clone(), &[5, 5, END], ("ab", &[0, 1], stop));
    // Where nothing may follow, no end token is waited for.
    check(two.clone(), &[0, 0, 2, 0], ("abcd", &[0, 1, 2, 3], stop));
    check(SamplingParams { min_tokens: 3, ..two.clone() }, &[0, 0, END, 0], ("abcd", &[0, 1, 2, 3], stop));
    check(SamplingParams { min_tokens: 3, ..choice(&["ab"]) }, &[0, 0], ("ab", &[0, 1], stop));
    check(SamplingParams { stop: vec!["b".into()], ..two.clone() }, &[0, 0], ("a", &[0, 1], stop));
    check(SamplingParams { ignore_eos: true, ..choice(&["f"]) }, &[0], ("f", &[5], stop));
    check(SamplingParams { max_tokens: Some(1), ..two }, &[0], ("a", &[0], Some(FinishReason::Length)));
}

#[test]
fn log_probabilities_are_of_what_the_constraint_leaves() {
    let params = SamplingParams { logprobs: Some(8), ..choice(&["a", "c"]) };
    let mut answer = Answer::new(&arrival(params), 0, ROOM, tokenizer());
    let progress = answer.advance(&[], &mut prefer(0)).expect("a choice");
    let top = &progress.delta.logprobs[0].top;
    assert_eq!(top.iter().map(|t| t.token_id).collect::<Vec<_>>(), [0, 2]);
    assert!((top.iter().map(|t| t.logprob.exp()).sum::<f32>() - 1.0).abs() < 1e-6);
}

#[test]
fn settings_that_leave_nothing_to_choose_are_the_clients_to_mend() {
    let params = SamplingParams { bad_words: vec!["b".into()], ..choice(&["ab"]) };
    let mut answer = Answer::new(&arrival(params), 0, ROOM, tokenizer());
    answer.advance(&[], &mut prefer(0)).expect("a choice");
    let failure = answer.advance(&[0], &mut prefer(0)).expect_err("nothing is left");
    assert_eq!(failure.class, FailureClass::InvalidArgument);
}

fn beams(sampling: SamplingParams, row: impl Fn(&[u32]) -> Vec<f32>) -> Vec<BeamAnswer> {
    let params = BeamParams { width: 3, length_penalty: 0.0, early_stopping: EarlyStopping::Never };
    let arrival = arrival(SamplingParams { beams: Some(params), ..sampling });
    let mut beams = Beams::new(&arrival, &params, 6, tokenizer());
    for _ in 0..6 {
        let mut logits: Vec<f32> = (0..beams.n_live()).flat_map(|beam| row(beams.tokens(beam))).collect();
        if beams.advance(&mut logits).expect("finite logits") == Turn::Done {
            return beams.into_answers();
        }
    }
    panic!("the room is six tokens");
}

#[test]
fn beams_answer_best_first_with_text_and_log_probabilities_of_their_own_path() {
    let params = SamplingParams { n: 3, logprobs: Some(2), echo: true, ..SamplingParams::default() };
    let answers =
        beams(params, |written| prefer(if written.len() == 3 { END } else { written.len() as u32 }));
    assert_eq!(answers.len(), 3);
    assert!(answers.is_sorted_by(|a, b| a.score >= b.score));
    assert_eq!((answers[0].delta.text.as_str(), answers[0].reason), ("deabc", FinishReason::Stop));
    for answer in &answers {
        let own: f32 = answer.delta.logprobs.iter().map(|c| c.chosen.logprob).sum();
        assert!((own + answer.end_logprob.unwrap_or(0.0) - answer.score).abs() < 1e-4, "{answer:?}");
        assert_eq!(answer.delta.token_ids.len(), 2 + answer.delta.logprobs.len());
        let ended = usize::from(answer.end_logprob.is_some());
        assert_eq!(answer.n_generated, answer.delta.logprobs.len() + ended);
    }
}

#[test]
fn a_stop_string_ends_a_beam_before_it() {
    let params = SamplingParams { stop: vec!["bc".into()], ..SamplingParams::default() };
    let answers = beams(params, |written| prefer(written.len() as u32));
    assert_eq!((answers[0].delta.text.as_str(), answers[0].reason), ("a", FinishReason::Stop));
    assert_eq!(answers[0].delta.token_ids, [0, 1, 2]);
}
