//! Log-probabilities, in the forms of chats and of completions. vLLM tells the ids of the tokens that were chosen; of alternatives
//! it tells texts alone, whose ids stay 0 unless they are the chosen token's.

use serde::Deserialize;
use serde_json::{Map, Value};
use triptych_proto::v1;

/// Log-probabilities of a choice's new tokens.
#[derive(Deserialize)]
pub(super) struct Logprobs {
    /// Of a chat.
    #[serde(default)]
    content: Option<Vec<ChatToken>>,
    /// Of a completion.
    #[serde(default)]
    tokens: Option<Vec<String>>,
    #[serde(default)]
    token_logprobs: Vec<Option<f32>>,
    /// Order of rank.
    #[serde(default)]
    top_logprobs: Vec<Option<Map<String, Value>>>,
}

#[derive(Deserialize)]
struct ChatToken {
    token: String,
    #[serde(default)]
    logprob: f32,
    #[serde(default)]
    bytes: Option<Vec<u8>>,
    #[serde(default)]
    top_logprobs: Vec<ChatToken>,
}

impl Logprobs {
    /// The tokens, with these ids if there is one for each.
    pub(super) fn tokens(self, ids: &[u32]) -> Vec<v1::ChosenToken> {
        let tokens: Vec<ChatToken> = match self.content {
            Some(content) => content,
            None => {
                let n = self.tokens.as_ref().map_or(0, Vec::len);
                let logprobs = self.token_logprobs.into_iter().chain(std::iter::repeat(None));
                let tops = self.top_logprobs.into_iter().chain(std::iter::repeat(None));
                let tokens = self.tokens.unwrap_or_default().into_iter().zip(logprobs).zip(tops).take(n);
                tokens.map(|((token, logprob), top)| completion_token(token, logprob, top)).collect()
            }
        };
        let has_ids = tokens.len() == ids.len();
        let id = |i: usize| ids.get(i).copied().filter(|_| has_ids).unwrap_or_default();
        tokens.into_iter().enumerate().map(|(i, token)| chosen(token, id(i))).collect()
    }
}

fn completion_token(token: String, logprob: Option<f32>, top: Option<Map<String, Value>>) -> ChatToken {
    let alternative = |(token, logprob): (String, Value)| {
        let logprob = logprob.as_f64().unwrap_or_default() as f32;
        ChatToken { token, logprob, bytes: None, top_logprobs: Vec::new() }
    };
    let top_logprobs = top.unwrap_or_default().into_iter().map(alternative).collect();
    ChatToken { token, logprob: logprob.unwrap_or_default(), bytes: None, top_logprobs }
}

fn chosen(mut token: ChatToken, id: u32) -> v1::ChosenToken {
    let top = std::mem::take(&mut token.top_logprobs);
    let own = token.token.clone();
    let top = top.into_iter().map(|one| {
        let id = if one.token == own { id } else { 0 };
        token_logprob(one, id)
    });
    v1::ChosenToken { top: top.collect(), chosen: Some(token_logprob(token, id)) }
}

fn token_logprob(token: ChatToken, token_id: u32) -> v1::TokenLogprob {
    let bytes = token.bytes.unwrap_or_else(|| token.token.as_bytes().to_vec());
    v1::TokenLogprob { token_id, text: token.token, logprob: token.logprob, bytes: bytes.into() }
}
