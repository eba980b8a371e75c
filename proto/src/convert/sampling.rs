//! Sampling settings. What a request leaves open stays open until a worker fills in the model's defaults.

use super::WireError;
use crate::v1;
use triptych_core::Failure;
use triptych_core::sampling::{
    BeamParams, Constraint, EarlyStopping, FinishReason, PromptToken, RankedToken, SamplingParams,
    TokenLogprob,
};

/// Reads sampling settings and checks their ranges. What is open takes the value that `defaults` has.
///
/// # Errors
/// [`Failure`] that names the setting, the value and what is allowed.
pub fn sampling_from_wire(s: v1::Sampling, defaults: &SamplingParams) -> Result<SamplingParams, Failure> {
    let beams = beams(&s, defaults)?;
    let constraint = s.constraint.and_then(|c| c.kind).map(constraint);
    let params = SamplingParams {
        max_tokens: s.max_tokens.or(defaults.max_tokens),
        min_tokens: s.min_tokens.unwrap_or_else(|| open_min(s.max_tokens, defaults.min_tokens)),
        temperature: s.temperature.unwrap_or(defaults.temperature),
        top_p: s.top_p.unwrap_or(defaults.top_p),
        top_k: s.top_k.or(defaults.top_k),
        min_p: s.min_p.unwrap_or(defaults.min_p),
        repetition_penalty: s.repetition_penalty.unwrap_or(defaults.repetition_penalty),
        presence_penalty: s.presence_penalty,
        frequency_penalty: s.frequency_penalty,
        logit_bias: biases(s.logit_bias),
        bad_words: s.bad_words,
        no_repeat_ngram_size: s.no_repeat_ngram_size.unwrap_or(defaults.no_repeat_ngram_size),
        encoder_no_repeat_ngram_size: s
            .encoder_no_repeat_ngram_size
            .unwrap_or(defaults.encoder_no_repeat_ngram_size),
        renormalize_logits: s.renormalize_logits.unwrap_or(defaults.renormalize_logits),
        seed: s.seed,
        n: s.n.unwrap_or(1),
        beams,
        stop: s.stop,
        stop_token_ids: s.stop_token_ids,
        logprobs: s.logprobs,
        ignore_eos: s.ignore_eos,
        constraint,
        echo: s.echo,
        allowed_token_ids: s.allowed_token_ids,
        include_stop: s.include_stop_str_in_output,
        prompt_logprobs: s.prompt_logprobs,
    };
    params.validate()?;
    Ok(params)
}

/// A model's least length does not stand against a request for less.
fn open_min(max_tokens: Option<u32>, default: u32) -> u32 {
    max_tokens.map_or(default, |max| default.min(max))
}

/// The beams asked for. A model's own default holds only for a request that asks for nothing else: not for one that
/// draws, has a constraint, or wants more answers than there are beams.
fn beams(s: &v1::Sampling, defaults: &SamplingParams) -> Result<Option<BeamParams>, WireError> {
    let base = defaults.beams.unwrap_or(BeamParams {
        width: 1,
        length_penalty: 1.0,
        early_stopping: EarlyStopping::Heuristic,
    });
    let Some(asked) = &s.beams else {
        let draws = s.temperature.is_some() || s.top_p.is_some() || s.top_k.is_some() || s.min_p.is_some();
        let other = draws || s.seed.is_some() || s.constraint.is_some() || s.n.unwrap_or(1) > base.width;
        return Ok(defaults.beams.filter(|_| !other));
    };
    if asked.width == 1 {
        return Ok(None);
    }
    Ok(Some(BeamParams {
        width: asked.width,
        length_penalty: asked.length_penalty.unwrap_or(base.length_penalty),
        early_stopping: early_stopping(asked.early_stopping)?.unwrap_or(base.early_stopping),
    }))
}

fn early_stopping(value: i32) -> Result<Option<EarlyStopping>, WireError> {
    match v1::EarlyStopping::try_from(value) {
        Ok(v1::EarlyStopping::Unspecified) => Ok(None),
        Ok(v1::EarlyStopping::Heuristic) => Ok(Some(EarlyStopping::Heuristic)),
        Ok(v1::EarlyStopping::Immediately) => Ok(Some(EarlyStopping::Immediately)),
        Ok(v1::EarlyStopping::Never) => Ok(Some(EarlyStopping::Never)),
        Err(_) => Err(WireError::Enum { field: "beams.early_stopping", value, set: "EarlyStopping" }),
    }
}

/// Sorted by token: a map of the wire has no order, and equal requests must read equal.
fn biases(map: std::collections::HashMap<u32, f32>) -> Vec<(u32, f32)> {
    let mut biases: Vec<(u32, f32)> = map.into_iter().collect();
    biases.sort_unstable_by_key(|(token, _)| *token);
    biases
}

fn constraint(kind: v1::constraint::Kind) -> Constraint {
    use v1::constraint::Kind;
    match kind {
        Kind::JsonObject(_) => Constraint::JsonObject,
        Kind::JsonSchema(text) => Constraint::JsonSchema(text),
        Kind::Regex(text) => Constraint::Regex(text),
        Kind::Choice(choice) => Constraint::Choice(choice.texts),
        Kind::Grammar(text) => Constraint::Grammar(text),
    }
}

impl From<Constraint> for v1::Constraint {
    fn from(c: Constraint) -> Self {
        use v1::constraint::{Choice, JsonObject, Kind};
        let kind = match c {
            Constraint::JsonObject => Kind::JsonObject(JsonObject {}),
            Constraint::JsonSchema(text) => Kind::JsonSchema(text),
            Constraint::Regex(text) => Kind::Regex(text),
            Constraint::Choice(texts) => Kind::Choice(Choice { texts }),
            Constraint::Grammar(text) => Kind::Grammar(text),
        };
        Self { kind: Some(kind) }
    }
}

impl From<BeamParams> for v1::Beams {
    fn from(b: BeamParams) -> Self {
        let early_stopping = match b.early_stopping {
            EarlyStopping::Heuristic => v1::EarlyStopping::Heuristic,
            EarlyStopping::Immediately => v1::EarlyStopping::Immediately,
            EarlyStopping::Never => v1::EarlyStopping::Never,
        };
        let length_penalty = Some(b.length_penalty);
        Self { width: b.width, length_penalty, early_stopping: early_stopping.into() }
    }
}

/// Writes settings with every field set.
pub fn sampling_to_wire(p: SamplingParams) -> v1::Sampling {
    // Said as one beam, so that a model's own default does not come back.
    let greedy = BeamParams { width: 1, length_penalty: 1.0, early_stopping: EarlyStopping::Heuristic };
    v1::Sampling {
        max_tokens: p.max_tokens,
        min_tokens: Some(p.min_tokens),
        temperature: Some(p.temperature),
        top_p: Some(p.top_p),
        top_k: p.top_k,
        min_p: Some(p.min_p),
        repetition_penalty: Some(p.repetition_penalty),
        presence_penalty: p.presence_penalty,
        frequency_penalty: p.frequency_penalty,
        logit_bias: p.logit_bias.into_iter().collect(),
        bad_words: p.bad_words,
        no_repeat_ngram_size: Some(p.no_repeat_ngram_size),
        encoder_no_repeat_ngram_size: Some(p.encoder_no_repeat_ngram_size),
        renormalize_logits: Some(p.renormalize_logits),
        seed: p.seed,
        n: Some(p.n),
        beams: Some(p.beams.unwrap_or(greedy).into()),
        stop: p.stop,
        stop_token_ids: p.stop_token_ids,
        logprobs: p.logprobs,
        ignore_eos: p.ignore_eos,
        constraint: p.constraint.map(Into::into),
        echo: p.echo,
        allowed_token_ids: p.allowed_token_ids,
        include_stop_str_in_output: p.include_stop,
        prompt_logprobs: p.prompt_logprobs,
        // The prompt is laid out, and cut, before settings are read.
        truncate_prompt_tokens: None,
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
        // From a proxy to its clients alone.
        Ok(v1::FinishReason::ToolCalls) | Err(_) => {
            Err(WireError::Enum { field: "finish_reason", value, set: "FinishReason" })
        }
    }
}

/// OpenAI's name of a finish reason as clients are told it; `None`: there is none, or no such number.
pub fn finish_name(value: i32) -> Option<&'static str> {
    match v1::FinishReason::try_from(value) {
        Ok(v1::FinishReason::ToolCalls) => Some("tool_calls"),
        _ => finish_reason(value).ok().flatten().map(FinishReason::as_str),
    }
}

impl From<PromptToken> for v1::PromptToken {
    fn from(PromptToken(tokens): PromptToken) -> Self {
        let ranked = |RankedToken { logprob, rank }| v1::RankedToken { logprob: Some(logprob.into()), rank };
        Self { tokens: tokens.into_iter().map(ranked).collect() }
    }
}

impl From<TokenLogprob> for v1::TokenLogprob {
    fn from(t: TokenLogprob) -> Self {
        Self { token_id: t.token_id, text: t.text, logprob: t.logprob, bytes: t.bytes.into() }
    }
}
