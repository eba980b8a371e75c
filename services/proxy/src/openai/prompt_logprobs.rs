//! Log-probabilities of the prompt, as vLLM writes them: for each token an object by token id, and null for the first.

use super::response_head::own_bytes;
use serde::Serialize;
use std::collections::BTreeMap;
use triptych_proto::v1;

/// Log-probabilities of the tokens of a prompt, in order. A token of an item has none.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub(super) struct PromptLogprobs(Vec<Option<BTreeMap<u32, Ranked>>>);

/// A token at a place of the prompt.
#[derive(Clone, Debug, Serialize)]
struct Ranked {
    logprob: f32,
    rank: u32,
    decoded_token: String,
}

impl PromptLogprobs {
    /// Adds those of a delta. A request that was sent to another worker has its first ones again.
    pub(super) fn add(&mut self, delta: &v1::Delta) {
        if self.0.is_empty() {
            self.0.push(None);
        }
        let n_known = self.0.len().saturating_sub(delta.prompt_offset as usize);
        self.0.extend(delta.prompt_logprobs.iter().skip(n_known).map(by_id));
    }

    /// `None` if none were asked for.
    pub(super) fn asked(self, is_asked: bool) -> Option<Self> {
        is_asked.then(|| if self.0.is_empty() { Self(vec![None]) } else { self })
    }
}

fn by_id(token: &v1::PromptToken) -> Option<BTreeMap<u32, Ranked>> {
    let ranked = |ranked: &v1::RankedToken| {
        let token = ranked.logprob.as_ref()?;
        let decoded_token = String::from_utf8_lossy(own_bytes(token)).into_owned();
        // As in `token_logprob`: JSON has no infinity.
        Some((
            token.token_id,
            Ranked { logprob: token.logprob.max(-9999.0), rank: ranked.rank, decoded_token },
        ))
    };
    // The token itself comes first, and again among the best if it is one of them: with the same rank.
    let all: BTreeMap<_, _> = token.tokens.iter().filter_map(ranked).collect();
    (!all.is_empty()).then_some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tokens_are_objects_by_id_and_what_comes_twice_counts_once() {
        let ranked = |token_id, text: &str, logprob, rank| v1::RankedToken {
            logprob: Some(v1::TokenLogprob { token_id, text: text.into(), logprob, ..Default::default() }),
            rank,
        };
        let first = v1::PromptToken { tokens: vec![ranked(7, "b", -2.0, 3), ranked(5, "a", -0.5, 1)] };
        let delta = |tokens: &[v1::PromptToken], prompt_offset| v1::Delta {
            prompt_logprobs: tokens.to_vec(),
            prompt_offset,
            ..v1::Delta::default()
        };
        let mut all = PromptLogprobs::default();
        all.add(&delta(std::slice::from_ref(&first), 1));
        all.add(&delta(&[first, v1::PromptToken::default()], 1));
        let expect = json!([null, {
            "7": {"logprob": -2.0, "rank": 3, "decoded_token": "b"},
            "5": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        }, null]);
        assert_eq!(serde_json::to_value(all.asked(true)).unwrap(), expect);
        let none = PromptLogprobs::default();
        assert_eq!(serde_json::to_value(none.clone().asked(true)).unwrap(), json!([null]));
        assert!(none.asked(false).is_none());
    }
}
