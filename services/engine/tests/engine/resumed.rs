//! A completion that was begun elsewhere goes on as it would have there, at any point.

use crate::bench::{Bench, END, Seen, config, cross, item, tokenizer, with_blocks};
use crate::fake::VOCAB;
use triptych_core::FailureClass;
use triptych_core::sampling::{Constraint, FinishReason, SamplingParams};
use triptych_engine::constraint::Constraints;
use triptych_engine::{Delta, EngineConfig, Resumed, SequenceId, SequenceRequest};

/// Settings that draw, so that a wrong place or a wrong seed shows.
fn drawn(a: &mut SequenceRequest) {
    (a.sampling.temperature, a.sampling.seed) = (1.5, Some(77));
}

/// A request of one sequence over 40 tokens that generates up to `n_tokens`.
fn make(bench: &Bench, n_tokens: u32, change: &dyn Fn(&mut SequenceRequest)) -> SequenceRequest {
    let mut arrival = bench.sequence(1, 40, n_tokens);
    change(&mut arrival);
    arrival.ids = (0..u64::from(arrival.sampling.n)).map(|i| SequenceId(1 + i)).collect();
    let constraints = Constraints::new(tokenizer(), VOCAB);
    arrival.constraint = arrival.sampling.constraint.as_ref().map(|c| constraints.compile(c).unwrap());
    arrival
}

/// The request that goes on with completion `choice` of `whole` after `deltas`.
fn go_on(whole: &SequenceRequest, choice: u32, deltas: &[Delta]) -> SequenceRequest {
    let tokens_before: Vec<u32> = deltas.iter().flat_map(|d| d.token_ids.clone()).collect();
    let is_echoed = whole.sampling.echo && !tokens_before.is_empty();
    let n_echoed = if is_echoed { whole.prepared.tokens.len() } else { 0 };
    let resumed = Resumed {
        choice,
        tokens: tokens_before[n_echoed..].to_vec(),
        text_len: deltas.iter().map(|d| d.text.len()).sum(),
        is_echoed,
        is_ended: false,
    };
    let sampling = SamplingParams { n: 1, ..whole.sampling.clone() };
    SequenceRequest { ids: vec![SequenceId(100)], sampling, resumed: Some(resumed), ..whole.clone() }
}

fn join(deltas: &[Delta]) -> Delta {
    let mut all = Delta::default();
    for delta in deltas {
        all.text.push_str(&delta.text);
        all.token_ids.extend(&delta.token_ids);
        all.logprobs.extend(delta.logprobs.clone());
    }
    all
}

fn settle(config: EngineConfig, cross_attention: bool, arrival: SequenceRequest) -> Bench {
    let mut bench = if cross_attention { Bench::with_cross(config) } else { Bench::decoder_only(config) };
    bench.add(arrival);
    bench.ready(&item(9, 5));
    bench.settle();
    bench.assert_books_balance();
    bench
}

/// Cuts every completion at every place; whatever follows is what followed there.
fn check_on(config: EngineConfig, n_tokens: u32, change: &dyn Fn(&mut SequenceRequest)) -> Vec<Seen> {
    let whole = make(&Bench::decoder_only(config), n_tokens, change);
    let with_cross = !whole.prepared.cross.is_empty();
    let undisturbed = settle(config, with_cross, whole.clone());
    let completions: Vec<Seen> = whole.ids.iter().map(|id| undisturbed.seen(id.0)).collect();
    for (choice, completion) in (0..).zip(&completions) {
        for cut in 0..=completion.deltas.len() {
            let (before, after) = completion.deltas.split_at(cut);
            let arrival = go_on(&whole, choice, before);
            let seen = settle(config, with_cross, arrival).seen(100);
            assert_eq!(join(&seen.deltas), join(after), "completion {choice} cut at {cut}");
            let (there, here) = (completion.finished(), seen.finished());
            let facts = |f: &triptych_engine::Finished| (f.reason, f.n_generated, f.n_prompt, f.end_logprob);
            assert_eq!(facts(here), facts(there), "completion {choice} cut at {cut}");
        }
    }
    completions
}

fn check(n_tokens: u32, change: &dyn Fn(&mut SequenceRequest)) -> Vec<Seen> {
    check_on(config(), n_tokens, change)
}

#[test]
fn a_cut_completion_goes_on_as_it_would_have() {
    check(12, &|_| ());
    check(12, &drawn);
    check(40, &|a| {
        drawn(a);
        a.sampling.repetition_penalty = 1.7;
        a.sampling.presence_penalty = 0.8;
        a.sampling.frequency_penalty = 0.3;
    });
    check(40, &|a| (a.sampling.no_repeat_ngram_size, a.sampling.bad_words) = (2, vec!["<7><8>".into()]));
    let rows = item(9, 5);
    check(12, &|a| *a = cross(a.clone(), &rows, 0..5));
    check(12, &|a| a.sampling.logprobs = Some(2));
    check(5, &|a| (a.sampling.echo, a.sampling.logprobs) = (true, Some(1)));
}

#[test]
fn every_completion_to_a_request_goes_on_with_its_own_draws() {
    let completions = check(9, &|a| {
        drawn(a);
        a.sampling.n = 3;
    });
    assert!(
        completions[0].tokens() != completions[1].tokens()
            && completions[1].tokens() != completions[2].tokens()
    );
}

#[test]
fn a_family_s_steps_and_its_last_token_keep_their_places() {
    check(8, &|a| {
        a.prepared.rules.steps = vec![std::sync::Arc::from([50]), std::sync::Arc::from([51, 52])];
        a.prepared.rules.begin_suppress = (0..40).collect();
        a.prepared.rules.last = [7].into();
    });
}

#[test]
fn an_end_is_found_wherever_the_completion_was_cut() {
    let plain = check(12, &|_| ())[0].tokens();
    let by_token = check(12, &|a| {
        (a.sampling.ignore_eos, a.prepared.end_tokens) = (false, vec![plain[7]]);
    });
    assert_eq!(by_token[0].finished().reason, FinishReason::Stop);
    let least = check(12, &|a| {
        (a.sampling.ignore_eos, a.prepared.end_tokens, a.sampling.min_tokens) =
            (false, vec![END, plain[5]], 9);
    });
    assert!(least[0].tokens().len() >= 9);
    // Held back over several tokens: complete in the end, or not.
    let stop = format!("{}><{}><{}", plain[3], plain[4], plain[5]);
    let stopped = check(12, &|a| a.sampling.stop = vec![stop.clone()]);
    assert_eq!(stopped[0].finished().reason, FinishReason::Stop);
    check(12, &|a| a.sampling.stop = vec![format!("<{}><{}>!", plain[3], plain[4])]);
    check(12, &|a| a.sampling.stop = vec![format!("<{}>!", plain[11])]);
}

#[test]
fn a_grammar_goes_on_where_it_was() {
    let completions = check(30, &|a| {
        drawn(a);
        (a.sampling.n, a.sampling.ignore_eos) = (2, false);
        a.sampling.constraint = Some(Constraint::Regex("(<1[0-9]>){3,4}<20><2[0-9]>".into()));
    });
    for completion in completions {
        assert!(completion.text().contains("><20><2"), "{}", completion.text());
        assert_eq!(completion.finished().reason, FinishReason::Stop);
    }
}

#[test]
fn what_was_generated_elsewhere_is_prefilled_in_chunks_and_found_again() {
    let narrow = EngineConfig { token_budget: 16, ..config() };
    check_on(narrow, 50, &drawn);
    let whole = make(&Bench::decoder_only(config()), 60, &drawn);
    let mut bench = Bench::decoder_only(config());
    bench.add(whole.clone());
    bench.settle();
    let completion = bench.seen(1);
    bench.add(go_on(&whole, 0, &completion.deltas[..50]));
    let read = bench.step();
    assert_eq!(read[0].1, 64..90, "two full blocks are known");
    bench.settle();
    assert_eq!(join(&bench.seen(100).deltas), join(&completion.deltas[50..]));
    assert_eq!(bench.seen(100).finished().n_cached, 40, "tokens of the prompt");
    bench.assert_books_balance();
}

#[test]
fn a_context_that_is_full_ends_a_resumed_completion_as_it_did_the_first() {
    // 64 tokens of context: 40 of the prompt, 24 generated.
    let completions = check_on(with_blocks(2, 1), 4000, &|_| ());
    assert_eq!((completions[0].tokens().len(), completions[0].finished().reason), (24, FinishReason::Length));
}

#[test]
fn a_completion_that_had_ended_is_counted_and_says_nothing() {
    let plain = check(12, &|_| ())[0].tokens();
    let ends: [&dyn Fn(&mut SequenceRequest); 3] =
        [&|_| (), &|a| (a.sampling.ignore_eos, a.prepared.end_tokens) = (false, vec![plain[7]]), &|a| {
            a.sampling.stop = vec![format!("<{}>", plain[6])]
        }];
    for change in ends {
        let whole = make(&Bench::decoder_only(config()), 12, change);
        let completion = settle(config(), false, whole.clone()).seen(1);
        let mut arrival = go_on(&whole, 0, &completion.deltas);
        arrival.resumed.as_mut().unwrap().is_ended = true;
        let seen = settle(config(), false, arrival).seen(100);
        assert!(seen.deltas.is_empty());
        assert_eq!(seen.finished().n_generated, completion.finished().n_generated);
    }
}

#[test]
fn what_cannot_be_a_completion_of_this_model_is_refused() {
    let refused = |change: &dyn Fn(&mut Resumed)| {
        let bench = Bench::decoder_only(config());
        let mut arrival = go_on(&make(&bench, 12, &|_| ()), 0, &[]);
        change(arrival.resumed.as_mut().unwrap());
        let mut bench = bench;
        bench.add(arrival);
        bench.assert_books_balance();
        bench.seen(100).failure()
    };
    assert_eq!(refused(&|r| r.tokens = vec![VOCAB as u32]), FailureClass::InvalidArgument);
    assert_eq!(refused(&|r| r.tokens = vec![1; 5000]), FailureClass::InvalidArgument);
    let mut bench = Bench::decoder_only(config());
    let two = make(&bench, 12, &|a| a.sampling.n = 2);
    bench.add(SequenceRequest { resumed: Some(Resumed::default()), ..two });
    assert_eq!(bench.seen(1).failure(), FailureClass::Internal);
}
