//! Sampling parameters of chat and completion bodies: OpenAI's fields, and the extensions of vLLM and Hugging Face
//! (`top_k`, `min_p`, `repetition_penalty`, `num_beams`, `structured_outputs`, …).
//!
//! Every field may be absent or null, which selects the model's own default.

use super::lists::{IsSet, IsWanted, MAX_READ, ShortList, ShortMap, read_at_most};
use super::structured::{Guided, ResponseFormat, StructuredOutputs, constraint};
use serde::Deserialize;
use serde::de::{Error, SeqAccess, Visitor};
use serde_json::Value;
use std::fmt;
use triptych_core::Failure;
use triptych_proto::v1;

/// The parameters, as parsed from the same object as the rest of the body.
#[derive(Debug, Default, Deserialize)]
pub(super) struct SamplingBody {
    n: Option<u32>,
    stop: Option<Stop>,
    seed: Option<serde_json::Number>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    logit_bias: Option<ShortMap<f32>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    response_format: Option<ResponseFormat>,
    // Extensions.
    top_k: Option<u32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    min_tokens: Option<u32>,
    stop_token_ids: Option<ShortList<u32>>,
    bad_words: Option<ShortList<String>>,
    no_repeat_ngram_size: Option<u32>,
    encoder_no_repeat_ngram_size: Option<u32>,
    renormalize_logits: Option<bool>,
    ignore_eos: Option<bool>,
    num_beams: Option<u32>,
    length_penalty: Option<f32>,
    early_stopping: Option<EarlyStopping>,
    structured_outputs: Option<StructuredOutputs>,
    echo: Option<bool>,
    priority: Option<i32>,
    allowed_token_ids: Option<ShortList<u32>>,
    include_stop_str_in_output: Option<bool>,
    prompt_logprobs: Option<u32>,
    truncate_prompt_tokens: Option<i32>,
    // vLLM's older names of structured outputs.
    guided_json: Option<Value>,
    guided_regex: Option<String>,
    guided_choice: Option<ShortList<String>>,
    guided_grammar: Option<String>,
    guided_whitespace_pattern: Option<String>,
    // Known and not supported: may be present with the value that changes nothing.
    skip_special_tokens: Option<bool>,
    use_beam_search: Option<IsWanted>,
    logits_processors: Option<IsSet>,
    return_tokens_as_token_ids: Option<IsWanted>,
    kv_transfer_params: Option<IsSet>,
    vllm_xargs: Option<IsSet>,
}

/// A string or a list of strings.
#[derive(Debug)]
struct Stop(Vec<String>);

/// By hand, so that a long list is not held before it is refused, as `untagged` does.
impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StopVisitor)
    }
}

struct StopVisitor;

impl<'de> Visitor<'de> for StopVisitor {
    type Value = Stop;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of strings")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Stop, E> {
        Ok(Stop(vec![text.to_owned()]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, texts: A) -> Result<Stop, A::Error> {
        read_at_most(MAX_READ, texts, Vec::new()).map(Stop)
    }
}

/// Hugging Face's setting.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "true, false or \"never\"")]
enum EarlyStopping {
    Flag(bool),
    Word(String),
}

impl SamplingBody {
    /// Number of answers per prompt.
    pub(super) fn n(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// True if log-probabilities of the prompt are wanted.
    pub(super) fn prompt_logprobs(&self) -> bool {
        self.prompt_logprobs.is_some()
    }

    /// Scheduling priority; smaller runs first. Default 0.
    pub(super) fn priority(&self) -> i32 {
        self.priority.unwrap_or(0)
    }

    /// Refuses log-probabilities of the prompt, which no event of a stream has a place for.
    pub(super) fn check_streamed(&self) -> Result<(), Failure> {
        if self.prompt_logprobs.is_none() {
            return Ok(());
        }
        let message = "prompt_logprobs are not for a stream: leave stream out";
        Err(Failure::invalid(message).with_param("prompt_logprobs"))
    }

    /// Sets what `/v1/responses` has under names of its own.
    pub(super) fn set_output(&mut self, max_tokens: Option<u32>, format: Option<ResponseFormat>) {
        self.max_tokens = max_tokens;
        self.response_format = format;
    }

    /// The parameters on the wire. `logprobs`: number of alternatives, which each body states in its own way.
    ///
    /// # Errors
    /// [`Failure`] that names the field.
    pub(super) fn into_wire(self, logprobs: Option<u32>) -> Result<v1::Sampling, Failure> {
        self.check_supported()?;
        let beams = self.beams()?;
        let guided = Guided {
            json: self.guided_json,
            regex: self.guided_regex,
            choice: self.guided_choice,
            grammar: self.guided_grammar,
            whitespace_pattern: self.guided_whitespace_pattern,
        };
        let structured = guided.or(self.structured_outputs)?;
        Ok(v1::Sampling {
            beams,
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            min_tokens: self.min_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            logit_bias: self.logit_bias.map(biases).transpose()?.unwrap_or_default(),
            bad_words: self.bad_words.map(|words| words.0).unwrap_or_default(),
            no_repeat_ngram_size: self.no_repeat_ngram_size,
            encoder_no_repeat_ngram_size: self.encoder_no_repeat_ngram_size,
            renormalize_logits: self.renormalize_logits,
            seed: self.seed.as_ref().map(seed).transpose()?,
            n: self.n,
            stop: self.stop.map(|stop| stop.0).unwrap_or_default(),
            stop_token_ids: self.stop_token_ids.map(|ids| ids.0).unwrap_or_default(),
            logprobs,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            constraint: constraint(self.response_format, structured)?,
            echo: self.echo.unwrap_or(false),
            allowed_token_ids: allowed(self.allowed_token_ids)?,
            include_stop_str_in_output: self.include_stop_str_in_output.unwrap_or(false),
            prompt_logprobs: self.prompt_logprobs,
            truncate_prompt_tokens: self.truncate_prompt_tokens,
        })
    }

    /// Refuses settings that would change the answer and are not supported.
    fn check_supported(&self) -> Result<(), Failure> {
        let is_set = |value: &Option<IsSet>| value.is_some_and(|value| value.0);
        let is_wanted = |value: &Option<IsWanted>| value.is_some_and(|value| value.0);
        let wanted = [
            ("skip_special_tokens", self.skip_special_tokens == Some(false)),
            ("use_beam_search", is_wanted(&self.use_beam_search)),
            ("logits_processors", is_set(&self.logits_processors)),
            ("return_tokens_as_token_ids", is_wanted(&self.return_tokens_as_token_ids)),
            ("kv_transfer_params", is_set(&self.kv_transfer_params)),
            ("vllm_xargs", is_set(&self.vllm_xargs)),
        ];
        match wanted.into_iter().find(|(_, wanted)| *wanted) {
            Some((field, _)) => {
                Err(Failure::invalid(format!("{field} is not supported by this server")).with_param(field))
            }
            None => Ok(()),
        }
    }

    fn beams(&self) -> Result<Option<v1::Beams>, Failure> {
        let early_stopping = match &self.early_stopping {
            None => v1::EarlyStopping::Unspecified,
            Some(EarlyStopping::Flag(true)) => v1::EarlyStopping::Immediately,
            Some(EarlyStopping::Flag(false)) => v1::EarlyStopping::Heuristic,
            Some(EarlyStopping::Word(word)) if word == "never" => v1::EarlyStopping::Never,
            Some(EarlyStopping::Word(word)) => {
                let message = format!("early_stopping is {word:?}, allowed is true, false or \"never\"");
                return Err(Failure::invalid(message).with_param("early_stopping"));
            }
        };
        match self.num_beams {
            Some(width) => Ok(Some(v1::Beams {
                width,
                length_penalty: self.length_penalty,
                early_stopping: early_stopping.into(),
            })),
            None if self.length_penalty.is_some() || self.early_stopping.is_some() => {
                let field = if self.length_penalty.is_some() { "length_penalty" } else { "early_stopping" };
                Err(Failure::invalid(format!("{field} needs num_beams")).with_param(field))
            }
            None => Ok(None),
        }
    }
}

/// The tokens that an answer is held to. An empty list would allow none.
fn allowed(ids: Option<ShortList<u32>>) -> Result<Vec<u32>, Failure> {
    match ids {
        Some(ids) if ids.0.is_empty() => {
            let message = "allowed_token_ids is an empty list, allowed are 1 to 1024 tokens";
            Err(Failure::invalid(message).with_param("allowed_token_ids"))
        }
        ids => Ok(ids.map(|ids| ids.0).unwrap_or_default()),
    }
}

/// Any 64-bit integer; a negative one is taken by its bits.
fn seed(number: &serde_json::Number) -> Result<u64, Failure> {
    let bits = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    bits.ok_or_else(|| {
        Failure::invalid(format!("seed is {number}, allowed is a 64-bit integer")).with_param("seed")
    })
}

/// Parses the keys, which are token ids written as strings.
fn biases(map: ShortMap<f32>) -> Result<std::collections::HashMap<u32, f32>, Failure> {
    let read = |(token, bias): (String, f32)| match token.parse() {
        Ok(id) => Ok((id, bias)),
        Err(_) => Err(Failure::invalid(format!("logit_bias names {token:?}, its keys are token ids"))
            .with_param("logit_bias")),
    };
    map.0.into_iter().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use v1::constraint::Kind;

    fn read(body: Value) -> Result<v1::Sampling, Failure> {
        serde_json::from_value::<SamplingBody>(body).unwrap().into_wire(None)
    }

    fn kind(body: Value) -> Option<Kind> {
        read(body).unwrap().constraint.and_then(|c| c.kind)
    }

    #[test]
    fn an_empty_body_leaves_every_default() {
        assert_eq!(read(json!({})).unwrap(), v1::Sampling::default());
        assert_eq!(read(json!({"response_format": {"type": "text"}})).unwrap(), v1::Sampling::default());
    }

    #[test]
    fn extensions_are_read() {
        let found = read(json!({
            "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5,
            "logit_bias": {"7": -100}, "bad_words": ["no"], "no_repeat_ngram_size": 3, "min_tokens": 2,
            "stop_token_ids": [5], "encoder_no_repeat_ngram_size": 2, "renormalize_logits": true, "num_beams": 4,
            "length_penalty": 0.5, "early_stopping": "never", "echo": true, "allowed_token_ids": [5, 6],
            "include_stop_str_in_output": true, "prompt_logprobs": 3, "truncate_prompt_tokens": -1,
        }));
        let beams = v1::Beams {
            width: 4,
            length_penalty: Some(0.5),
            early_stopping: v1::EarlyStopping::Never.into(),
        };
        let expect = v1::Sampling {
            min_p: Some(0.1),
            repetition_penalty: Some(1.2),
            presence_penalty: 0.5,
            frequency_penalty: -0.5,
            logit_bias: [(7, -100.0)].into(),
            bad_words: vec!["no".into()],
            no_repeat_ngram_size: Some(3),
            encoder_no_repeat_ngram_size: Some(2),
            renormalize_logits: Some(true),
            min_tokens: Some(2),
            stop_token_ids: vec![5],
            beams: Some(beams),
            echo: true,
            allowed_token_ids: vec![5, 6],
            include_stop_str_in_output: true,
            prompt_logprobs: Some(3),
            truncate_prompt_tokens: Some(-1),
            ..v1::Sampling::default()
        };
        assert_eq!(found.unwrap(), expect);
    }

    #[test]
    fn both_forms_of_structured_output_are_read() {
        let schema = json!({"type": "object"});
        let text = schema.to_string();
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        assert_eq!(kind(json!({"response_format": format})), Some(Kind::JsonSchema(text.clone())));
        assert_eq!(kind(json!({"structured_outputs": {"json": schema}})), Some(Kind::JsonSchema(text)));
        assert_eq!(kind(json!({"structured_outputs": {"regex": "a+"}})), Some(Kind::Regex("a+".into())));
        let object = json!({"response_format": {"type": "json_object"}});
        assert!(matches!(kind(object), Some(Kind::JsonObject(_))));
        let choice = json!({"structured_outputs": {"choice": ["a", "b"]}});
        assert!(matches!(kind(choice), Some(Kind::Choice(c)) if c.texts == ["a", "b"]));
    }

    #[test]
    fn white_space_is_an_option_of_json() {
        let schema = |body: Value| match kind(body) {
            Some(Kind::JsonSchema(text)) => serde_json::from_str::<Value>(&text).unwrap(),
            other => panic!("{other:?} is no schema"),
        };
        let compact = json!({"json_object": true, "disable_any_whitespace": true});
        let expect = json!({"type": "object", "x-guidance": {"whitespace_flexible": false}});
        assert_eq!(schema(json!({"structured_outputs": compact})), expect);
        let both = json!({"response_format": {"type": "json_object"},
            "structured_outputs": {"disable_any_whitespace": true}});
        assert_eq!(schema(both), expect);
        let pattern = json!({"json": {"type": "array"}, "whitespace_pattern": " ?"});
        let expect = json!({"type": "array", "x-guidance": {"whitespace_pattern": " ?"}});
        assert_eq!(schema(json!({"structured_outputs": pattern})), expect);
        let text = json!({"json": "true", "disable_any_whitespace": true});
        assert_eq!(
            schema(json!({"structured_outputs": text})),
            json!({"x-guidance": {"whitespace_flexible": false}})
        );
        let plain = json!({"regex": "a", "disable_any_whitespace": false});
        assert_eq!(kind(json!({"structured_outputs": plain})), Some(Kind::Regex("a".into())));
    }

    #[test]
    fn an_error_names_the_field() {
        let cases = [
            (json!({"logit_bias": {"x": 1}}), "logit_bias", "its keys are token ids"),
            (json!({"early_stopping": "soon", "num_beams": 2}), "early_stopping", "\"never\""),
            (json!({"length_penalty": 1}), "length_penalty", "needs num_beams"),
            (json!({"seed": 1.5}), "seed", "64-bit integer"),
            (json!({"allowed_token_ids": []}), "allowed_token_ids", "1 to 1024 tokens"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type", "\"xml\""),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema", "needs"),
            (json!({"structured_outputs": {}}), "structured_outputs", "exactly one"),
            (
                json!({"structured_outputs": {"regex": "a", "disable_any_whitespace": true}}),
                "structured_outputs",
                "json and json_object",
            ),
            (
                json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}),
                "structured_outputs",
                "exactly one",
            ),
        ];
        for (body, param, expect) in cases {
            let failure = read(body).unwrap_err();
            assert_eq!(failure.param.as_deref(), Some(param));
            assert!(failure.message.contains(expect), "{failure}");
        }
    }
}
