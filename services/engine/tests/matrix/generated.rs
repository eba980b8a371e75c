//! Greedy completions: alone, together, in small pieces, drafted; and what is reported with them.

use crate::bench::{Bench, ahead, cuda, reference, roomy};
use crate::case::cases;
use triptych_core::sampling::SamplingParams;
use triptych_engine::speculation::prompt_lookup::PromptLookup;
use triptych_engine::{EngineConfig, Speculation};

#[test]
fn greedy_completions_are_the_references_alone_and_together() {
    for case in &cases() {
        let mut bench = Bench::new(case, roomy());
        for (id, request) in case.numbered() {
            bench.alone(case.arrival(request, id, request.greedy()));
            bench.assert_golden(id, request);
        }
        // Each arrives in the middle of the others.
        for (id, request) in case.numbered() {
            bench.add(case.arrival(request, id + 100, request.greedy()));
            bench.step();
            bench.step();
        }
        bench.settle();
        case.numbered().for_each(|(id, request)| bench.assert_golden(id + 100, request));
    }
}

#[test]
fn greedy_completions_of_the_reference_back_end_are_the_references() {
    for case in cases().iter().step_by(4) {
        let mut bench = Bench::on(&reference(), case, roomy());
        for (id, request) in case.numbered() {
            bench.add(case.arrival(request, id, request.greedy()));
        }
        bench.settle();
        case.numbered().for_each(|(id, request)| bench.assert_golden(id, request));
    }
}

#[test]
fn greedy_completions_on_cuda_are_the_references() {
    for case in cases().iter().step_by(20) {
        let mut bench = Bench::on(&cuda(), case, ahead());
        // Each arrives in the middle of the others, so that prompts and decoding share steps.
        for (id, request) in case.numbered() {
            bench.add(case.arrival(request, id, request.greedy()));
            bench.step();
        }
        bench.settle();
        case.numbered().for_each(|(id, request)| bench.assert_golden(id, request));
    }
}

#[test]
fn prompts_prefilled_in_small_chunks_change_no_completion() {
    for case in &cases() {
        for token_budget in [3, 7] {
            let config = EngineConfig { token_budget, max_sequences: 3, ..roomy() };
            let mut bench = Bench::new(case, config);
            for (id, request) in case.numbered() {
                bench.add(case.arrival(request, id, request.greedy()));
            }
            bench.settle();
            case.numbered().for_each(|(id, request)| bench.assert_golden(id, request));
        }
    }
}

#[test]
fn drafts_change_no_completion() {
    let mut n_accepted = 0;
    for case in &cases() {
        let lookup = PromptLookup { n_tokens: 4, max_ngram: 2 };
        let config = EngineConfig { speculation: Speculation::PromptLookup(lookup), ..roomy() };
        if case.is_recurrent() {
            let refused = config.check(&Bench::new(case, roomy()).info).expect_err("no way back").to_string();
            assert_eq!(
                refused,
                "speculation does not go with recurrent states, which cannot be rolled back, needed is off"
            );
            continue;
        }
        let mut bench = Bench::new(case, config);
        for (id, request) in case.numbered() {
            bench.add(case.arrival(request, id, request.greedy()));
        }
        n_accepted += bench.settle().accepted_tokens;
        case.numbered().for_each(|(id, request)| bench.assert_golden(id, request));
    }
    assert!(n_accepted > 0, "no draft was accepted");
}

#[test]
fn log_probabilities_are_the_references() {
    for case in &cases() {
        let mut bench = Bench::new(case, roomy());
        for (id, request) in case.numbered() {
            let params = SamplingParams { logprobs: Some(5), max_tokens: Some(1), ..request.greedy() };
            let params = SamplingParams { ignore_eos: true, ..params };
            bench.add(case.arrival(request, id, params));
        }
        bench.settle();
        for (id, request) in case.numbered() {
            let logits = case.next_logits(request);
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
            let expected = |token: u32| f64::from(logits[token as usize] - max) - sum.ln();
            let deltas = &bench.seen[&id].deltas;
            let chosen = &deltas[0].logprobs[0];
            if request.forced.iter().any(|f| f.0 == -1) && request.max_new_tokens != 1 {
                // The one token of this completion is its last, which the family forces.
                assert_eq!(chosen.chosen.logprob, 0.0, "{} request {id}", case.name);
                continue;
            }
            let reported = chosen.top.iter().chain([&chosen.chosen]);
            for entry in reported {
                let error = (f64::from(entry.logprob) - expected(entry.token_id)).abs();
                assert!(error < 2e-3, "{} request {id}: {entry:?} is off by {error}", case.name);
            }
        }
    }
}
