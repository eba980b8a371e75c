//! Sampling parameters, and the reasons for which a sequence ends.

mod ranges;

pub use ranges::{
    BIASES, COUNTS, CountRange, MAX_BEAM_LOGPROBS, MAX_BEAMS, MAX_CHOICES, MAX_CONSTRAINT_BYTES,
    MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_N, MAX_STOP_BYTES, MAX_STOP_TOKENS, MAX_STOPS, NUMBERS, NumberRange,
};

use thiserror::Error;

/// Sampling settings of one request. [`SamplingParams::validate`] checks their ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Most tokens to generate; `None`: as many as the context holds.
    pub max_tokens: Option<u32>,
    /// Fewest tokens of an answer. 0: it may end at once.
    pub min_tokens: u32,
    /// 0: greedy. Up to 2.
    pub temperature: f32,
    /// Smallest set of tokens whose probability reaches this; 1: all.
    pub top_p: f32,
    /// The most probable k; `None`: all.
    pub top_k: Option<u32>,
    /// Least probability, as a share of the most probable token's; 0: all.
    pub min_p: f32,
    /// Divides the positive logits of tokens of the prompt and the answer, and multiplies the negative ones; 1: off.
    pub repetition_penalty: f32,
    /// Subtracted from the logit of each token in the answer; 0: off.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token once for each time it occurs in the answer; 0: off.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens; each token once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Texts that are never generated.
    pub bad_words: Vec<String>,
    /// Length in tokens of the n-grams that may occur only once; 0: off.
    pub no_repeat_ngram_size: u32,
    /// Length in tokens of the n-grams of the encoder's text that the answer may not repeat; 0: off. Without an
    /// encoder, of the prompt.
    pub encoder_no_repeat_ngram_size: u32,
    /// True if logits are normalised again after all logits processors, as beam scores then are sums of proper
    /// log-probabilities.
    pub renormalize_logits: bool,
    /// Seed of the draw; `None`: one is drawn for the request.
    pub seed: Option<u64>,
    /// Answers to generate for the prompt.
    pub n: u32,
    /// Beam search instead of sampling; `None`: none.
    pub beams: Option<BeamParams>,
    /// Texts that end the answer; not part of it unless [`Self::include_stop`] says so.
    pub stop: Vec<String>,
    /// Tokens that end the answer, beside the model's own; not part of it, as [`Self::stop`].
    pub stop_token_ids: Vec<u32>,
    /// Alternatives to report beside each token; `None`: no log-probabilities at all.
    pub logprobs: Option<u32>,
    /// Continue past the model's end token.
    pub ignore_eos: bool,
    /// Format that the answer must have; `None`: any.
    pub constraint: Option<Constraint>,
    /// The answer starts with the decoder's prompt, log-probabilities included when they are asked for.
    pub echo: bool,
    /// The only tokens that are generated; empty: all.
    pub allowed_token_ids: Vec<u32>,
    /// The text that ended an answer is part of it.
    pub include_stop: bool,
    /// Alternatives to report beside each token of the prompt; `None`: no log-probabilities of the prompt.
    pub prompt_logprobs: Option<u32>,
}

/// Beam search as Hugging Face's `generate` does it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamParams {
    /// Beams, at least as many as answers.
    pub width: u32,
    /// A finished beam's score is its log-probability over its length to this power.
    pub length_penalty: f32,
    /// Condition for the end of the search, once enough beams have finished.
    pub early_stopping: EarlyStopping,
}

/// Condition for the end of beam search, once as many beams have finished as are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EarlyStopping {
    /// No open beam is likely to score higher (`False`).
    #[default]
    Heuristic,
    /// At once (`True`).
    Immediately,
    /// No open beam can score higher (`"never"`).
    Never,
}

/// Format that an answer must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Constraint {
    /// A JSON object.
    JsonObject,
    /// JSON that fits a JSON schema, given as its text.
    JsonSchema(String),
    /// Text that fits a regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of a grammar in llguidance's Lark dialect.
    Grammar(String),
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: None,
            min_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            bad_words: Vec::new(),
            no_repeat_ngram_size: 0,
            encoder_no_repeat_ngram_size: 0,
            renormalize_logits: false,
            seed: None,
            n: 1,
            beams: None,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            logprobs: None,
            ignore_eos: false,
            constraint: None,
            echo: false,
            allowed_token_ids: Vec::new(),
            include_stop: false,
            prompt_logprobs: None,
        }
    }
}

/// A setting outside its range. Safe to show to the client.
#[derive(Debug, Error, Clone, PartialEq)]
#[error("{field} is {value}, allowed is {allowed}")]
pub struct OutOfRange {
    /// The setting, as clients name it.
    pub field: &'static str,
    /// The value given.
    pub value: String,
    /// The allowed values.
    pub allowed: &'static str,
}

impl Constraint {
    /// The field of a request that sets it.
    pub const fn field(&self) -> &'static str {
        match self {
            Self::JsonObject => "response_format",
            Self::JsonSchema(_) => "json_schema",
            Self::Regex(_) => "regex",
            Self::Choice(_) => "choice",
            Self::Grammar(_) => "grammar",
        }
    }
}

/// Reason for the end of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model's end token, or a stop string.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
}

impl FinishReason {
    /// OpenAI's name for it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// Log-probabilities of a token of the prompt and of its alternatives.
///
/// The token itself comes first, then the most probable ones at its position, best first. Empty for a token without
/// one: the first of the prompt, or one of an item.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PromptToken(pub Vec<RankedToken>);

/// Log-probability of a token, and its rank.
#[derive(Clone, Debug, PartialEq)]
pub struct RankedToken {
    /// The token.
    pub logprob: TokenLogprob,
    /// Tokens that are more probable, and one.
    pub rank: u32,
}

/// Log-probability of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Its text; bytes that are no whole character are replaced.
    pub text: String,
    /// Its own bytes, which need not be whole characters.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability before temperature and cuts.
    pub logprob: f32,
}
