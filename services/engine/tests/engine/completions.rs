//! Observable output of a completion: ends, texts, log-probabilities, and broken logits.

use crate::bench::{Bench, config};
use crate::fake::NAN_TOKEN;
use std::sync::Arc;
use triptych_core::FailureClass;
use triptych_core::sampling::{BeamParams, EarlyStopping, FinishReason, SamplingParams};
use triptych_engine::{SequenceId, SequenceRequest};
use triptych_models::speech::timestamps::NoSpeech;

/// Tokens that the plain sequence 1 generates.
fn plain(n: u32) -> Vec<u32> {
    let mut bench = Bench::decoder_only(config());
    bench.add(bench.sequence(1, 4, n));
    bench.settle();
    bench.seen(1).tokens()
}

fn run(change: impl FnOnce(&mut SequenceRequest)) -> Bench {
    let mut bench = Bench::decoder_only(config());
    let mut arrival = bench.sequence(1, 4, 8);
    change(&mut arrival);
    bench.add(arrival);
    bench.settle();
    bench
}

#[test]
fn end_token_ends_the_completion_and_is_no_part_of_it() {
    let tokens = plain(8);
    let end = tokens[5];
    let first = tokens.iter().position(|t| *t == end).unwrap();
    let bench = run(|a| {
        a.prepared.end_tokens = vec![end];
        a.sampling.ignore_eos = false;
    });
    let finished = bench.seen(1).finished().clone();
    assert_eq!(bench.seen(1).tokens(), tokens[..first]);
    assert_eq!((finished.reason, finished.n_generated), (FinishReason::Stop, first + 1));
    let ignored = run(|a| a.prepared.end_tokens = vec![end]);
    assert_eq!(ignored.seen(1).tokens(), tokens);
    assert_eq!(ignored.seen(1).finished().reason, FinishReason::Length);
}

#[test]
fn last_token_that_the_length_allows_is_the_one_the_family_ends_with() {
    let tokens = plain(8);
    let bench = run(|a| a.prepared.rules.last = [7].into());
    assert_eq!(bench.seen(1).tokens(), [&tokens[..7], &[7]].concat());
    let ended = run(|a| {
        a.prepared.rules.last = [7].into();
        a.prepared.end_tokens = vec![7];
        a.sampling.ignore_eos = false;
    });
    assert_eq!(ended.seen(1).finished().n_generated, 8);
    assert_eq!(ended.seen(1).finished().reason, FinishReason::Stop);
}

#[test]
fn stop_string_across_tokens_ends_the_completion_before_it() {
    let tokens = plain(8);
    let text: String = tokens.iter().map(|t| format!("<{t}>")).collect();
    let stop = format!("{}><{}", tokens[3], tokens[4]);
    let at = text.find(&stop).unwrap();
    let bench = run(|a| a.sampling.stop = vec!["never".into(), stop]);
    assert_eq!(bench.seen(1).text(), text[..at]);
    assert_eq!(bench.seen(1).finished().reason, FinishReason::Stop);
    let held_to_the_end = run(|a| a.sampling.stop = vec![format!("<{}>!", tokens[7])]);
    assert_eq!(held_to_the_end.seen(1).text(), text);
    assert_eq!(held_to_the_end.seen(1).finished().reason, FinishReason::Length);
}

#[test]
fn what_stopped_an_answer_is_part_of_it_where_that_is_asked_for() {
    let tokens = plain(8);
    let text = |n: usize| tokens[..n].iter().map(|t| format!("<{t}>")).collect::<String>();
    let stop = format!("<{}>", tokens[4]);
    let at = tokens.iter().position(|t| *t == tokens[4]).unwrap();
    let bench = run(|a| (a.sampling.stop, a.sampling.include_stop) = (vec![stop], true));
    assert_eq!((bench.seen(1).text(), bench.seen(1).finished().reason), (text(at + 1), FinishReason::Stop));
    let by_token = run(|a| (a.sampling.stop_token_ids, a.sampling.include_stop) = (vec![tokens[4]], true));
    assert_eq!((by_token.seen(1).text(), by_token.seen(1).tokens()), (text(at + 1), tokens[..at].to_vec()));
    let ended = run(|a| {
        (a.prepared.end_tokens, a.sampling.include_stop, a.sampling.ignore_eos) =
            (vec![tokens[4]], true, false);
    });
    assert_eq!(ended.seen(1).text(), text(at), "the model's own end has no text");
}

#[test]
fn an_answer_is_held_to_the_tokens_that_are_allowed() {
    let beams = BeamParams { width: 2, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic };
    let bench = run(|a| a.sampling.allowed_token_ids = vec![5, 40]);
    let written = bench.seen(1).tokens();
    assert!(written.len() == 8 && written.iter().all(|t| [5, 40].contains(t)), "{written:?}");
    // Whole rows are held to them as choices of the back end are.
    let by_row = run(|a| {
        a.sampling.allowed_token_ids = vec![5, 40];
        a.prepared.rules.no_speech = Some(NoSpeech { token: 40, step: 0 });
    });
    assert_eq!(by_row.seen(1).tokens(), written);
    let searched = run(|a| {
        a.sampling.allowed_token_ids = vec![5, 40];
        a.sampling.beams = Some(beams);
    });
    assert!(searched.seen(1).tokens().iter().all(|t| [5, 40].contains(t)));
    let nothing = run(|a| {
        a.sampling.allowed_token_ids = vec![5];
        a.sampling.logit_bias = vec![];
        a.sampling.bad_words = vec!["<5>".into()];
    });
    assert_eq!(nothing.seen(1).failure(), FailureClass::InvalidArgument);
    let outside = run(|a| a.sampling.allowed_token_ids = vec![5, 64]);
    assert_eq!(outside.seen(1).failure(), FailureClass::InvalidArgument);
}

#[test]
fn log_probabilities_come_with_their_tokens_when_asked_for() {
    let bench = run(|a| a.sampling.logprobs = Some(3));
    let seen = bench.seen(1);
    for delta in &seen.deltas {
        let [chosen] = &delta.logprobs[..] else { panic!("one token a step") };
        assert_eq!(chosen.chosen.token_id, delta.token_ids[0]);
        assert_eq!(chosen.chosen, chosen.top[0], "greedy takes the best");
        assert_eq!(chosen.chosen.text, format!("<{}>", delta.token_ids[0]));
        assert_eq!(chosen.top.len(), 3);
        assert!(chosen.top.is_sorted_by(|a, b| a.logprob >= b.logprob) && chosen.chosen.logprob < 0.0);
    }
    let none = run(|_| ());
    assert!(none.seen(1).deltas.iter().all(|d| d.logprobs.is_empty()));
}

#[test]
fn family_rules_force_and_forbid_and_report_no_speech() {
    let tokens = plain(8);
    let bench = run(|a| {
        a.prepared.rules.steps = vec![Arc::from([50]), Arc::from([51, 52])];
        a.prepared.rules.suppress = (0..60).filter(|t| t % 2 == 0).collect();
        a.prepared.rules.no_speech = Some(NoSpeech { token: 40, step: a.prepared.rules.steps.len() });
    });
    let written = bench.seen(1).tokens();
    assert_eq!(written[0], 50);
    assert!([51, 52].contains(&written[1]) && written != tokens);
    assert!(written[2..].iter().all(|t| t % 2 == 1 || *t >= 60));
    let no_speech = bench.seen(1).finished().no_speech_prob.unwrap();
    assert!(no_speech > 0.0 && no_speech < 1.0, "{no_speech}: read before the rules suppress it");
}

#[test]
fn broken_logits_end_only_their_sequence() {
    let mut bench = Bench::decoder_only(config());
    let mut broken = bench.sequence(1, 4, 8);
    broken.prepared.tokens[3] = NAN_TOKEN;
    bench.add(broken);
    bench.add(bench.sequence(2, 4, 3));
    bench.settle();
    assert_eq!(bench.seen(1).failure(), FailureClass::Unprocessable);
    assert_eq!(bench.seen(2).tokens().len(), 3);
    bench.assert_books_balance();
}

#[test]
fn broken_logits_end_only_their_beams() {
    let mut bench = Bench::decoder_only(config());
    let mut broken = bench.sequence(1, 4, 8);
    broken.prepared.tokens[3] = NAN_TOKEN;
    let early_stopping = EarlyStopping::Heuristic;
    broken.sampling.beams = Some(BeamParams { width: 3, length_penalty: 1.0, early_stopping });
    bench.add(broken);
    bench.add(bench.sequence(2, 4, 3));
    bench.settle();
    assert_eq!(bench.seen(1).failure(), FailureClass::Unprocessable);
    assert_eq!(bench.seen(2).tokens().len(), 3);
    bench.assert_books_balance();
}

#[test]
fn a_bias_for_a_token_without_a_logit_is_refused_by_name() {
    let mut bench = Bench::decoder_only(config());
    let vocab = crate::fake::VOCAB as u32;
    for (id, token) in [(1, vocab), (2, 10 * vocab), (3, u32::MAX)] {
        let mut arrival = bench.sequence(id, 4, 3);
        arrival.sampling.logit_bias = vec![(0, 1.0), (token, 1.0)];
        bench.add(arrival);
        let failure = bench.seen(id).end.unwrap().unwrap_err();
        assert_eq!(failure.class, FailureClass::InvalidArgument);
        assert_eq!(failure.param.as_deref(), Some("logit_bias"));
        assert_eq!(failure.message, format!("logit_bias names token {token}, allowed are tokens 0 to 63"));
    }
    let mut arrival = bench.sequence(4, 4, 3);
    arrival.sampling.logit_bias = vec![(vocab - 2, 1.0)];
    bench.add(arrival);
    bench.settle();
    assert_eq!(bench.seen(4).tokens().len(), 3);
}

#[test]
fn completions_of_one_request_differ_by_their_index_and_not_by_their_batch() {
    let completion = |choice: usize, others: u64| {
        let mut bench = Bench::decoder_only(config());
        for other in 0..others {
            bench.add(bench.sequence(other + 10, 9, 12));
        }
        let mut arrival = bench.sequence(1, 4, 12);
        arrival.ids = vec![SequenceId(2), SequenceId(1)];
        arrival.sampling =
            SamplingParams { seed: Some(5), n: 2, max_tokens: Some(12), ..SamplingParams::default() };
        let id = arrival.ids[choice].0;
        bench.add(arrival);
        bench.settle();
        bench.seen(id).tokens()
    };
    assert_eq!(completion(0, 0), completion(0, 5));
    assert_ne!(completion(0, 0), completion(1, 0));
}
