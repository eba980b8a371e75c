//! Encoder input in small pieces and in one: the same keys and values, to the bit.

use crate::bench::{Bench, Seen, roomy};
use crate::case::cases;
use triptych_core::sampling::SamplingParams;
use triptych_engine::EngineConfig;

/// Tokens, and the bits of the log-probabilities of the five likeliest at each.
fn bits(seen: &Seen) -> Vec<(u32, Vec<(u32, u32)>)> {
    let logprobs = seen.deltas.iter().flat_map(|delta| &delta.logprobs);
    let top = logprobs.map(|l| l.top.iter().map(|t| (t.token_id, t.logprob.to_bits())).collect());
    seen.tokens().into_iter().zip(top).collect()
}

#[test]
fn encoder_input_in_pieces_beside_that_of_others_gives_the_same_logits_to_the_bit() {
    let (mut n_cut, mut n_joined) = (0, 0);
    for case in cases() {
        let requests: Vec<_> =
            case.numbered().filter(|(_, request)| request.cross().next().is_some()).collect();
        if requests.is_empty() {
            continue;
        }
        let asked = |p: SamplingParams| SamplingParams { logprobs: Some(5), ..p };
        let mut whole = Bench::new(&case, roomy());
        for (id, request) in &requests {
            whole.alone(case.arrival(request, *id, asked(request.greedy())));
        }
        let n_rows = |output: &triptych_core::EncoderOutput| output.item().n_tokens as usize;
        for token_budget in [4, 9] {
            let narrow = EngineConfig { token_budget, max_sequences: 4, ..roomy() };
            let mut pieces = Bench::new(&case, narrow);
            let room = token_budget * pieces.info.cross_rows_per_token;
            n_cut += case.outputs.iter().filter(|output| n_rows(output) > room).count();
            n_joined += case.outputs.iter().filter(|output| 2 * n_rows(output) <= room).count();
            for (id, request) in &requests {
                pieces.add(case.arrival(request, *id, asked(request.greedy())));
            }
            pieces.settle();
            for (id, _) in &requests {
                assert_eq!(bits(&pieces.seen[id]), bits(&whole.seen[id]), "{} request {id}", case.name);
            }
        }
    }
    assert!(n_cut >= 10 && n_joined >= 10, "{n_cut} inputs are cut, {n_joined} fit a step with another");
}
