//! Sampling settings. What a request leaves open stays open until a worker fills in the model's defaults.

use super::WireError;
use crate::v1;
use triptych_core::Failure;
use triptych_core::sampling::{FinishReason, SamplingParams, TokenLogprob};

/// A model's defaults for the three settings that a request may leave open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingFields {
    /// Default of `temperature`.
    pub temperature: f32,
    /// Default of `top_p`.
    pub top_p: f32,
    /// Default of `top_k`; `None`: all.
    pub top_k: Option<u32>,
}

/// Reads sampling settings and checks their ranges.
///
/// # Errors
/// [`Failure`] that names the setting, the value and what is allowed.
pub fn sampling_from_wire(s: v1::Sampling, defaults: SamplingFields) -> Result<SamplingParams, Failure> {
    let params = SamplingParams {
        max_tokens: s.max_tokens,
        temperature: s.temperature.unwrap_or(defaults.temperature),
        top_p: s.top_p.unwrap_or(defaults.top_p),
        top_k: s.top_k.or(defaults.top_k),
        seed: s.seed,
        n: s.n.unwrap_or(1),
        stop: s.stop,
        logprobs: s.logprobs,
        ignore_eos: s.ignore_eos,
        ..SamplingParams::default()
    };
    params.validate()?;
    Ok(params)
}

/// Writes settings with every field set.
pub fn sampling_to_wire(p: SamplingParams) -> v1::Sampling {
    v1::Sampling {
        max_tokens: p.max_tokens,
        temperature: Some(p.temperature),
        top_p: Some(p.top_p),
        top_k: p.top_k,
        seed: p.seed,
        n: Some(p.n),
        stop: p.stop,
        logprobs: p.logprobs,
        ignore_eos: p.ignore_eos,
    }
}

impl From<FinishReason> for v1::FinishReason {
    fn from(r: FinishReason) -> Self {
        match r {
            FinishReason::Stop => Self::Stop,
            FinishReason::Length => Self::Length,
        }
    }
}

/// Reads a finish reason; unset means that the sequence goes on.
///
/// # Errors
/// [`WireError::Enum`] for an unknown number.
pub fn finish_reason(value: i32) -> Result<Option<FinishReason>, WireError> {
    match v1::FinishReason::try_from(value) {
        Ok(v1::FinishReason::Unspecified) => Ok(None),
        Ok(v1::FinishReason::Stop) => Ok(Some(FinishReason::Stop)),
        Ok(v1::FinishReason::Length) => Ok(Some(FinishReason::Length)),
        Err(_) => Err(WireError::Enum { field: "finish_reason", value, set: "FinishReason" }),
    }
}

impl From<TokenLogprob> for v1::TokenLogprob {
    fn from(t: TokenLogprob) -> Self {
        Self { token_id: t.token_id, text: t.text, logprob: t.logprob }
    }
}
