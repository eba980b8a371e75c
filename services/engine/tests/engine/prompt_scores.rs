//! Log-probabilities of the tokens of a prompt: those that a request has which writes at that place, in whatever chunks.

use crate::bench::{Bench, Seen, config, embed, item, with_blocks};
use triptych_core::sampling::{PromptToken, TokenLogprob};
use triptych_engine::{EngineConfig, Pipelining, SequenceId};

const N_PROMPT: usize = 150;

fn scores(seen: Seen) -> Vec<PromptToken> {
    seen.deltas.into_iter().flat_map(|delta| delta.prompt_logprobs).collect()
}

fn scored(config: EngineConfig, n: u32) -> Bench {
    let mut bench = Bench::decoder_only(config);
    let mut arrival = bench.sequence(1, N_PROMPT, 3);
    arrival.sampling.prompt_logprobs = Some(2);
    arrival.sampling.n = n;
    arrival.ids = (1..=u64::from(n)).map(SequenceId).collect();
    bench.add(arrival);
    bench.settle();
    bench.assert_books_balance();
    bench
}

/// The most probable tokens after the first `n` of the prompt.
fn best_after(n: usize) -> Vec<TokenLogprob> {
    let mut bench = Bench::decoder_only(config());
    let mut arrival = bench.sequence(1, N_PROMPT, 1);
    arrival.prepared.tokens.truncate(n);
    arrival.prepared.positions.truncate(n);
    arrival.prepared.next_position = n as u32;
    arrival.sampling.logprobs = Some(20);
    bench.add(arrival);
    bench.settle();
    bench.seen(1).deltas[0].logprobs[0].top.clone()
}

#[test]
fn each_token_of_the_prompt_has_the_log_probability_of_its_place() {
    let bench = scored(config(), 1);
    let found = scores(bench.seen(1));
    assert_eq!(found.len(), N_PROMPT - 1);
    let prompt = bench.sequence(1, N_PROMPT, 1).prepared.tokens;
    let mut n_among_best = 0;
    for at in [1, 2, 17, 63, 64, 65, 128, N_PROMPT - 1] {
        let best = best_after(at);
        let PromptToken(tokens) = &found[at - 1];
        assert_eq!(tokens[0].logprob.token_id, prompt[at]);
        assert_eq!(tokens[0].logprob.text, format!("<{}>", prompt[at]));
        for (rank, (token, expect)) in (1..).zip(tokens[1..].iter().zip(&best)) {
            assert_eq!((&token.logprob, token.rank), (expect, rank), "place {at}");
        }
        match best.iter().position(|token| token.token_id == prompt[at]) {
            Some(i) => {
                assert_eq!((&tokens[0].logprob, tokens[0].rank), (&best[i], i as u32 + 1));
                n_among_best += 1;
            }
            None => assert!(tokens[0].rank > 20),
        }
    }
    assert!(n_among_best > 0);
}

#[test]
fn neither_chunks_nor_other_answers_nor_a_cached_prefix_change_them() {
    let expect = scores(scored(config(), 1).seen(1));
    let narrow = EngineConfig { token_budget: 16, ..config() };
    let pipelined = EngineConfig { pipelining: Pipelining::On, token_budget: 48, ..config() };
    for config in [narrow, pipelined, with_blocks(12, 1)] {
        assert_eq!(scores(scored(config, 1).seen(1)), expect);
    }
    let several = scored(config(), 3);
    assert_eq!(scores(several.seen(1)), expect);
    assert!([2, 3].iter().all(|id| scores(several.seen(*id)).is_empty()), "they are those of one prompt");
    // A prompt that is in the cache is computed again, for the cache has no logits.
    let mut bench = scored(config(), 1);
    let mut again = bench.sequence(1, N_PROMPT, 3);
    again.ids = vec![SequenceId(9)];
    again.sampling.prompt_logprobs = Some(2);
    bench.add(again);
    bench.settle();
    assert_eq!(scores(bench.seen(9)), expect);
    assert_eq!(bench.seen(9).finished().n_cached, 0);
}

#[test]
fn tokens_of_items_have_none() {
    let mut bench = Bench::decoder_only(config());
    let output = item(9, 5);
    let mut arrival = embed(bench.sequence(1, 20, 2), &output, 3);
    arrival.sampling.prompt_logprobs = Some(0);
    bench.add(arrival);
    bench.ready(&output);
    bench.settle();
    let found = scores(bench.seen(1));
    let n_tokens: Vec<usize> = found.iter().map(|PromptToken(tokens)| tokens.len()).collect();
    assert_eq!(n_tokens, [&[1; 2][..], &[0; 5], &[1; 12]].concat());
}
