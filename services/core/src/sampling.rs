//! Sampling parameters, and the reasons for which a sequence ends.

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
    /// Texts that end the answer; not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the answer, beside the model's own; not part of it.
    pub stop_token_ids: Vec<u32>,
    /// Alternatives to report beside each token; `None`: no log-probabilities at all.
    pub logprobs: Option<u32>,
    /// Continue past the model's end token.
    pub ignore_eos: bool,
    /// Format that the answer must have; `None`: any.
    pub constraint: Option<Constraint>,
    /// The answer starts with the decoder's prompt, log-probabilities included when they are asked for.
    pub echo: bool,
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

/// Most answers per request.
pub const MAX_N: u32 = 16;
/// Most beams.
pub const MAX_BEAMS: u32 = 32;
/// Most stop strings, and most bad words.
pub const MAX_STOPS: usize = 16;
/// Longest stop string or bad word in bytes.
pub const MAX_STOP_BYTES: usize = 256;
/// Most stop tokens.
pub const MAX_STOP_TOKENS: usize = 64;
/// Most alternatives beside a token.
pub const MAX_LOGPROBS: u32 = 20;
/// Most tokens with a bias.
pub const MAX_LOGIT_BIAS: usize = 1024;
/// Longest constraint in bytes; for choices, their sum.
pub const MAX_CONSTRAINT_BYTES: usize = 256 << 10;
/// Most choices of a constraint.
pub const MAX_CHOICES: usize = 1024;

fn check(
    ok: bool,
    field: &'static str,
    value: impl ToString,
    allowed: &'static str,
) -> Result<(), OutOfRange> {
    if ok { Ok(()) } else { Err(OutOfRange { field, value: value.to_string(), allowed }) }
}

impl SamplingParams {
    /// Checks every range and every combination.
    ///
    /// # Errors
    /// [`OutOfRange`] names the first setting that is outside.
    pub fn validate(&self) -> Result<(), OutOfRange> {
        self.check_cuts()?;
        self.check_penalties()?;
        self.check_lengths()?;
        self.check_words()?;
        self.check_beams()?;
        self.constraint.as_ref().map_or(Ok(()), Constraint::validate)
    }

    fn check_cuts(&self) -> Result<(), OutOfRange> {
        check((0.0..=2.0).contains(&self.temperature), "temperature", self.temperature, "0 to 2")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p, "above 0, up to 1")?;
        check(self.top_k != Some(0), "top_k", 0, "1 or more")?;
        check((0.0..=1.0).contains(&self.min_p), "min_p", self.min_p, "0 to 1")
    }

    fn check_penalties(&self) -> Result<(), OutOfRange> {
        let repetition = self.repetition_penalty;
        check(
            repetition > 0.0 && repetition <= 10.0,
            "repetition_penalty",
            repetition,
            "above 0, up to 10; 1 is off",
        )?;
        let range = -2.0..=2.0;
        check(range.contains(&self.presence_penalty), "presence_penalty", self.presence_penalty, "-2 to 2")?;
        check(
            range.contains(&self.frequency_penalty),
            "frequency_penalty",
            self.frequency_penalty,
            "-2 to 2",
        )?;
        let n_biases = self.logit_bias.len();
        check(n_biases <= MAX_LOGIT_BIAS, "logit_bias", format!("{n_biases} tokens"), "up to 1024 tokens")?;
        let outside = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias));
        check(outside.is_none(), "logit_bias", outside.map_or(0.0, |b| b.1), "-100 to 100")
    }

    fn check_lengths(&self) -> Result<(), OutOfRange> {
        check(self.max_tokens != Some(0), "max_tokens", 0, "1 or more")?;
        let fits = self.max_tokens.is_none_or(|max| self.min_tokens <= max);
        check(fits, "min_tokens", self.min_tokens, "0 to max_tokens")?;
        check((1..=MAX_N).contains(&self.n), "n", self.n, "1 to 16")?;
        let logprobs = self.logprobs.unwrap_or(0);
        check(logprobs <= MAX_LOGPROBS, "top_logprobs", logprobs, "0 to 20")
    }

    fn check_words(&self) -> Result<(), OutOfRange> {
        for (field, words) in [("stop", &self.stop), ("bad_words", &self.bad_words)] {
            let n = words.len();
            check(n <= MAX_STOPS, field, format!("{n} strings"), "up to 16 strings")?;
            let longest = words.iter().map(String::len).max().unwrap_or(0);
            let allowed = "strings of 1 to 256 bytes";
            check(longest <= MAX_STOP_BYTES, field, format!("a string of {longest} bytes"), allowed)?;
            check(!words.iter().any(String::is_empty), field, "an empty string", allowed)?;
        }
        let n = self.stop_token_ids.len();
        check(n <= MAX_STOP_TOKENS, "stop_token_ids", format!("{n} tokens"), "up to 64 tokens")
    }

    fn check_beams(&self) -> Result<(), OutOfRange> {
        let Some(beams) = &self.beams else { return Ok(()) };
        let fits = (self.n..=MAX_BEAMS).contains(&beams.width);
        check(fits, "num_beams", beams.width, "n to 32")?;
        let penalty = beams.length_penalty;
        check((-10.0..=10.0).contains(&penalty), "length_penalty", penalty, "-10 to 10")?;
        check(self.constraint.is_none(), "num_beams", beams.width, "not set together with a constraint")
    }
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

    fn validate(&self) -> Result<(), OutOfRange> {
        let n_bytes = match self {
            Self::JsonObject => 0,
            Self::JsonSchema(text) | Self::Regex(text) | Self::Grammar(text) => text.len(),
            Self::Choice(choices) => {
                let n = choices.len();
                let allowed = "1 to 1024 choices";
                check((1..=MAX_CHOICES).contains(&n), "choice", format!("{n} choices"), allowed)?;
                check(
                    !choices.iter().any(String::is_empty),
                    "choice",
                    "an empty choice",
                    "choices that are not empty",
                )?;
                choices.iter().map(String::len).sum()
            }
        };
        check(n_bytes <= MAX_CONSTRAINT_BYTES, self.field(), format!("{n_bytes} bytes"), "up to 262144 bytes")
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

/// Log-probability of one token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token_id: u32,
    /// Its text; bytes that are no whole character are replaced.
    pub text: String,
    /// Natural logarithm of its probability before temperature and cuts.
    pub logprob: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_outside_its_range_is_refused_by_name() {
        let ok = SamplingParams::default();
        assert_eq!(ok.validate(), Ok(()));
        let beams =
            |width| Some(BeamParams { width, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic });
        let cases: Vec<(SamplingParams, &str)> = vec![
            (SamplingParams { temperature: -0.1, ..ok.clone() }, "temperature"),
            (SamplingParams { temperature: f32::NAN, ..ok.clone() }, "temperature"),
            (SamplingParams { top_p: 0.0, ..ok.clone() }, "top_p"),
            (SamplingParams { top_k: Some(0), ..ok.clone() }, "top_k"),
            (SamplingParams { max_tokens: Some(0), ..ok.clone() }, "max_tokens"),
            (SamplingParams { n: 17, ..ok.clone() }, "n"),
            (SamplingParams { stop: vec![String::new()], ..ok.clone() }, "stop"),
            (SamplingParams { stop: vec!["x".repeat(257)], ..ok.clone() }, "stop"),
            (SamplingParams { logprobs: Some(21), ..ok.clone() }, "top_logprobs"),
            (SamplingParams { min_p: 1.5, ..ok.clone() }, "min_p"),
            (SamplingParams { repetition_penalty: 0.0, ..ok.clone() }, "repetition_penalty"),
            (SamplingParams { presence_penalty: 2.5, ..ok.clone() }, "presence_penalty"),
            (SamplingParams { frequency_penalty: f32::NAN, ..ok.clone() }, "frequency_penalty"),
            (SamplingParams { logit_bias: vec![(1, 101.0)], ..ok.clone() }, "logit_bias"),
            (SamplingParams { min_tokens: 5, max_tokens: Some(4), ..ok.clone() }, "min_tokens"),
            (SamplingParams { bad_words: vec![String::new()], ..ok.clone() }, "bad_words"),
            (SamplingParams { stop_token_ids: vec![0; 65], ..ok.clone() }, "stop_token_ids"),
            (SamplingParams { n: 4, beams: beams(3), ..ok.clone() }, "num_beams"),
            (SamplingParams { beams: beams(33), ..ok.clone() }, "num_beams"),
            (SamplingParams { constraint: Some(Constraint::Choice(vec![])), ..ok.clone() }, "choice"),
        ];
        for (params, field) in cases {
            assert_eq!(params.validate().unwrap_err().field, field);
        }
    }
}
