//! How tokens are chosen, and why a sequence ended.

use thiserror::Error;

/// Sampling settings of one request, already within their ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Tokens to write at most; `None`: as many as the context holds.
    pub max_tokens: Option<u32>,
    /// 0: greedy. Up to 2.
    pub temperature: f32,
    /// Smallest set of tokens whose probability reaches this; 1: all.
    pub top_p: f32,
    /// The most probable k; `None`: all.
    pub top_k: Option<u32>,
    /// Seed of the draw; `None`: one is drawn for the request.
    pub seed: Option<u64>,
    /// Answers to write for the same prompt.
    pub n: u32,
    /// Texts that end the answer; not part of it.
    pub stop: Vec<String>,
    /// Alternatives to report beside each token; `None`: no log-probabilities at all.
    pub logprobs: Option<u32>,
    /// Go on past the model's own end token.
    pub ignore_eos: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            max_tokens: None,
            temperature: 1.0,
            top_p: 1.0,
            top_k: None,
            seed: None,
            n: 1,
            stop: Vec::new(),
            logprobs: None,
            ignore_eos: false,
        }
    }
}

/// A setting outside its range. Safe to show to the client.
#[derive(Debug, Error, Clone, PartialEq)]
#[error("{field} is {value}, allowed is {allowed}")]
pub struct OutOfRange {
    /// The setting, as clients name it.
    pub field: &'static str,
    /// As given.
    pub value: String,
    /// What is allowed.
    pub allowed: &'static str,
}

/// Most answers per request.
pub const MAX_N: u32 = 16;
/// Most stop strings, and the longest of them in bytes.
pub const MAX_STOPS: usize = 16;
/// Longest stop string in bytes.
pub const MAX_STOP_BYTES: usize = 256;
/// Most alternatives beside a token.
pub const MAX_LOGPROBS: u32 = 20;

impl SamplingParams {
    /// Checks every range.
    ///
    /// # Errors
    /// [`OutOfRange`] names the first setting that is outside.
    pub fn validate(&self) -> Result<(), OutOfRange> {
        let check = |ok: bool, field, value: String, allowed| {
            if ok { Ok(()) } else { Err(OutOfRange { field, value, allowed }) }
        };
        check(
            (0.0..=2.0).contains(&self.temperature),
            "temperature",
            self.temperature.to_string(),
            "0 to 2",
        )?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top_p", self.top_p.to_string(), "above 0, up to 1")?;
        check(self.top_k != Some(0), "top_k", "0".into(), "1 or more")?;
        check(self.max_tokens != Some(0), "max_tokens", "0".into(), "1 or more")?;
        check((1..=MAX_N).contains(&self.n), "n", self.n.to_string(), "1 to 16")?;
        check(
            self.stop.len() <= MAX_STOPS,
            "stop",
            format!("{} strings", self.stop.len()),
            "up to 16 strings",
        )?;
        let longest = self.stop.iter().map(String::len).max().unwrap_or(0);
        check(
            longest <= MAX_STOP_BYTES,
            "stop",
            format!("a string of {longest} bytes"),
            "strings of 1 to 256 bytes",
        )?;
        check(
            !self.stop.iter().any(String::is_empty),
            "stop",
            "an empty string".into(),
            "strings of 1 to 256 bytes",
        )?;
        let logprobs = self.logprobs.unwrap_or(0);
        check(logprobs <= MAX_LOGPROBS, "top_logprobs", logprobs.to_string(), "0 to 20")
    }
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model's end token, or a stop string.
    Stop,
    /// `max_tokens`, or the end of the context.
    Length,
}

impl FinishReason {
    /// OpenAI's word for it.
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
    fn each_range_is_held_and_named() {
        let ok = SamplingParams::default();
        assert_eq!(ok.validate(), Ok(()));
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
        ];
        for (params, field) in cases {
            assert_eq!(params.validate().unwrap_err().field, field);
        }
    }
}
