//! OpenAI's objects for completions, and the extensions. Fields and their names only; `response` fills them.

use super::super::prompt_logprobs::PromptLogprobs;
use super::super::response_head::own_bytes;
use super::super::usage::Usage;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use triptych_proto::v1;

/// A response, or one object of a streamed response.
#[derive(Debug, Serialize)]
pub(super) struct Completion {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: String,
    pub(super) choices: Vec<Choice>,
    /// Absent in a stream unless asked for; then null in every object but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
    pub(super) system_fingerprint: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Choice {
    pub(super) index: usize,
    pub(super) text: String,
    pub(super) logprobs: Option<Logprobs>,
    pub(super) finish_reason: Option<&'static str>,
    /// Extension: the tokens of the text.
    pub(super) token_ids: Vec<u32>,
    #[serde(flatten)]
    pub(super) prompts: ReportedPrompts,
    /// Extension, absent unless asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<PromptLogprobs>,
}

/// Extension: prompts of encoder and decoder, for encoder-decoder models.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct ReportedPrompts {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) encoder_prompt: Option<TextOrTokens>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) decoder_prompt: Option<DecoderPrompt>,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum TextOrTokens {
    Text(String),
    Tokens(Vec<u32>),
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct DecoderPrompt {
    text: String,
    token_ids: Vec<u32>,
}

/// Log-probabilities of a choice's tokens, as parallel lists.
#[derive(Debug, Default, Serialize)]
pub(super) struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<BTreeMap<String, f32>>,
    text_offset: Vec<usize>,
}

impl ReportedPrompts {
    /// The prompts of a summary.
    pub(super) fn of(summary: &v1::Summary) -> Self {
        use v1::text_or_tokens::Kind;
        let encoder = summary.encoder_prompt.clone().and_then(|p| p.kind).map(|kind| match kind {
            Kind::Text(text) => TextOrTokens::Text(text),
            Kind::Tokens(ids) => TextOrTokens::Tokens(ids.ids),
        });
        let decoder = summary.decoder_prompt.clone();
        let decoder = decoder.map(|p| DecoderPrompt { text: p.text, token_ids: p.token_ids });
        Self { encoder_prompt: encoder, decoder_prompt: decoder }
    }
}

impl Logprobs {
    /// Adds tokens, the first of which starts at `offset` characters of the choice's text. `None` if there are none.
    pub(super) fn of(tokens: Vec<v1::ChosenToken>, mut offset: usize) -> Option<Self> {
        if tokens.is_empty() {
            return None;
        }
        let mut all = Self::default();
        for token in tokens {
            let chosen = token.chosen.unwrap_or_default();
            all.text_offset.push(offset);
            // A character counts where it begins, so one of several tokens counts once.
            offset += own_bytes(&chosen).iter().filter(|byte| **byte & 0xC0 != 0x80).count();
            all.token_logprobs.push(finite(chosen.logprob));
            all.tokens.push(spelled(&chosen));
            all.top_logprobs.push(distinct(&token.top));
        }
        Some(all)
    }
}

/// A token's text, or OpenAI's spelling of bytes that are no whole characters: `bytes:\xe2\x80`.
fn spelled(token: &v1::TokenLogprob) -> String {
    let bytes = own_bytes(token);
    if std::str::from_utf8(bytes).is_ok() {
        return token.text.clone();
    }
    let mut text = "bytes:".to_owned();
    for byte in bytes {
        match byte {
            b' '..=b'~' => text.push(char::from(*byte)),
            _ => {
                // Writing to a string cannot fail.
                let _ = write!(text, "\\x{byte:02x}");
            }
        }
    }
    text
}

/// The best tokens by text. Of tokens with one text the best has it, the others vLLM's spelling of ids: `token_id:7`.
fn distinct(top: &[v1::TokenLogprob]) -> BTreeMap<String, f32> {
    let mut all = BTreeMap::new();
    for token in top {
        let mut key = spelled(token);
        if all.contains_key(&key) {
            key = format!("token_id:{}", token.token_id);
        }
        all.insert(key, finite(token.logprob));
    }
    all
}

/// JSON has no infinity, and clients expect a number; OpenAI writes -9999 for a negligible probability.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}
