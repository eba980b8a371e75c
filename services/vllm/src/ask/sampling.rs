//! Sampling parameters as vLLM has them. What a request leaves open stays open: vLLM takes the model's defaults.

use crate::failure::no_field;
use serde_json::{Map, Value, json};
use triptych_core::Failure;
use triptych_proto::v1;

/// Writes the parameters into a body.
///
/// # Errors
/// InvalidArgument that names a parameter which vLLM does not have.
pub(super) fn put(s: v1::Sampling, is_chat: bool, body: &mut Map<String, Value>) -> Result<(), Failure> {
    refuse(&s)?;
    if is_chat {
        put_some("max_tokens", s.max_tokens, body);
        if let Some(n) = s.logprobs {
            body.extend([("logprobs".to_owned(), true.into()), ("top_logprobs".to_owned(), n.into())]);
        }
    } else {
        // Without it vLLM generates 16 tokens; null is as many as the context holds.
        body.insert("max_tokens".into(), s.max_tokens.into());
        put_some("logprobs", s.logprobs, body);
    }
    put_some("temperature", s.temperature.map(decimal), body);
    put_some("top_p", s.top_p.map(decimal), body);
    put_some("top_k", s.top_k, body);
    put_some("min_p", s.min_p.map(decimal), body);
    put_some("repetition_penalty", s.repetition_penalty.map(decimal), body);
    put_some("min_tokens", s.min_tokens, body);
    put_some("seed", s.seed, body);
    put_some("n", s.n, body);
    put_some("truncate_prompt_tokens", s.truncate_prompt_tokens, body);
    put_unless("presence_penalty", decimal(s.presence_penalty), 0.0.into(), body);
    put_unless("frequency_penalty", decimal(s.frequency_penalty), 0.0.into(), body);
    put_unless("ignore_eos", s.ignore_eos.into(), false.into(), body);
    put_unless("include_stop_str_in_output", s.include_stop_str_in_output.into(), false.into(), body);
    put_unless("stop", s.stop.into(), json!([]), body);
    put_unless("stop_token_ids", s.stop_token_ids.into(), json!([]), body);
    put_unless("bad_words", s.bad_words.into(), json!([]), body);
    put_unless("allowed_token_ids", s.allowed_token_ids.into(), json!([]), body);
    if !s.logit_bias.is_empty() {
        let biases = s.logit_bias.into_iter().map(|(token, bias)| (token.to_string(), decimal(bias)));
        body.insert("logit_bias".into(), Value::Object(biases.collect()));
    }
    if let Some(kind) = s.constraint.and_then(|constraint| constraint.kind) {
        body.insert("structured_outputs".into(), constraint(kind)?);
    }
    Ok(())
}

/// Refuses what vLLM does not have, or not in a stream.
fn refuse(s: &v1::Sampling) -> Result<(), Failure> {
    let is_on = |n: Option<u32>| n.is_some_and(|n| n > 0);
    let refused = [
        ("num_beams", s.beams.as_ref().is_some_and(|beams| beams.width > 1), "beam search"),
        ("no_repeat_ngram_size", is_on(s.no_repeat_ngram_size), "n-grams that occur once"),
        (
            "encoder_no_repeat_ngram_size",
            is_on(s.encoder_no_repeat_ngram_size),
            "n-grams that the answer may not repeat",
        ),
        ("renormalize_logits", s.renormalize_logits == Some(true), "logits that are normalised again"),
        ("prompt_logprobs", s.prompt_logprobs.is_some(), "log-probabilities of the prompt in a stream"),
        ("echo", s.echo, "the prompt in the answer"),
        ("seed", s.seed.is_some_and(|seed| i64::try_from(seed).is_err()), "a seed above 9223372036854775807"),
    ];
    match refused.into_iter().find(|(_, is_set, _)| *is_set) {
        Some((param, _, what)) => Err(no_field(param, what)),
        None => Ok(()),
    }
}

fn constraint(kind: v1::constraint::Kind) -> Result<Value, Failure> {
    use v1::constraint::Kind;
    Ok(match kind {
        Kind::JsonObject(_) => json!({"json_object": true}),
        Kind::JsonSchema(text) => {
            let schema: Value = serde_json::from_str(&text).map_err(|e| {
                Failure::invalid(format!("the schema is no JSON: {e}")).with_param("response_format")
            })?;
            json!({"json": schema})
        }
        Kind::Regex(text) => json!({"regex": text}),
        Kind::Choice(choice) => json!({"choice": choice.texts}),
        Kind::Grammar(text) => json!({"grammar": text}),
    })
}

/// A number with the decimals that its sender wrote: 0.1 is no 0.10000000149011612.
fn decimal(value: f32) -> Value {
    value.to_string().parse::<f64>().ok().map_or(Value::Null, Value::from)
}

fn put_some(name: &str, value: Option<impl Into<Value>>, body: &mut Map<String, Value>) {
    if let Some(value) = value {
        body.insert(name.into(), value.into());
    }
}

fn put_unless(name: &str, value: Value, default: Value, body: &mut Map<String, Value>) {
    if value != default {
        body.insert(name.into(), value);
    }
}
