//! Sampling parameters of chat and completion bodies: OpenAI's fields, and the extensions of vLLM and Hugging Face
//! (`top_k`, `min_p`, `repetition_penalty`, `num_beams`, `structured_outputs`, …).
//!
//! Every field may be absent or null, which selects the model's own default.

use super::lists::{MAX_READ, ShortList, ShortMap, read_at_most};
use super::whitespace::WhitespaceOptions;
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

/// OpenAI's structured output.
#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: Option<String>,
    json_schema: Option<NamedSchema>,
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

/// vLLM's structured output; exactly one is set, or options alone beside `response_format`.
#[derive(Debug, Deserialize)]
struct StructuredOutputs {
    json: Option<Value>,
    regex: Option<String>,
    choice: Option<ShortList<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
    #[serde(flatten)]
    whitespace: WhitespaceOptions,
}

impl SamplingBody {
    /// Number of answers per prompt.
    pub(super) fn n(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// Scheduling priority; smaller runs first. Default 0.
    pub(super) fn priority(&self) -> i32 {
        self.priority.unwrap_or(0)
    }

    /// The parameters on the wire. `logprobs`: number of alternatives, which each body states in its own way.
    ///
    /// # Errors
    /// [`Failure`] that names the field.
    pub(super) fn into_wire(self, logprobs: Option<u32>) -> Result<v1::Sampling, Failure> {
        let beams = self.beams()?;
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
            constraint: constraint(self.response_format, self.structured_outputs)?,
            echo: self.echo.unwrap_or(false),
        })
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

fn constraint(
    format: Option<ResponseFormat>,
    mut structured: Option<StructuredOutputs>,
) -> Result<Option<v1::Constraint>, Failure> {
    let format = format.map(ResponseFormat::kind).transpose()?.flatten();
    let whitespace = structured.as_mut().map(|s| std::mem::take(&mut s.whitespace)).unwrap_or_default();
    let is_alone = |s: &StructuredOutputs| whitespace.is_set() && format.is_some() && s.is_empty();
    let structured = structured.filter(|s| !is_alone(s));
    let found = match (format, structured) {
        (Some(_), Some(_)) => {
            let message = "response_format and structured_outputs cannot be given together";
            return Err(Failure::invalid(message).with_param("structured_outputs"));
        }
        (kind, None) => kind,
        (None, Some(structured)) => Some(structured.kind()?),
    };
    let found = found.map(|kind| whitespace.apply(kind)).transpose()?;
    Ok(found.map(|kind| v1::Constraint { kind: Some(kind) }))
}

impl ResponseFormat {
    fn kind(self) -> Result<Option<v1::constraint::Kind>, Failure> {
        use v1::constraint::{JsonObject, Kind};
        match self.kind.as_deref() {
            None | Some("text") => Ok(None),
            Some("json_object") => Ok(Some(Kind::JsonObject(JsonObject {}))),
            Some("json_schema") => match self.json_schema.and_then(|s| s.schema) {
                Some(schema) => Ok(Some(Kind::JsonSchema(schema.to_string()))),
                None => {
                    Err(Failure::invalid("a response_format of type json_schema needs json_schema.schema")
                        .with_param("response_format.json_schema"))
                }
            },
            Some(other) => Err(Failure::invalid(format!(
                "response_format is of type {other:?}, allowed are text, json_object and json_schema"
            ))
            .with_param("response_format.type")),
        }
    }
}

impl StructuredOutputs {
    fn is_empty(&self) -> bool {
        let Self { json, regex, choice, grammar, json_object, whitespace: _ } = self;
        json.is_none()
            && regex.is_none()
            && choice.is_none()
            && grammar.is_none()
            && *json_object != Some(true)
    }

    fn kind(self) -> Result<v1::constraint::Kind, Failure> {
        use v1::constraint::{Choice, JsonObject, Kind};
        let kinds = [
            self.json.map(|schema| match schema {
                Value::String(text) => Kind::JsonSchema(text),
                schema => Kind::JsonSchema(schema.to_string()),
            }),
            self.regex.map(Kind::Regex),
            self.choice.map(|texts| Kind::Choice(Choice { texts: texts.0 })),
            self.grammar.map(Kind::Grammar),
            self.json_object.filter(|wanted| *wanted).map(|_| Kind::JsonObject(JsonObject {})),
        ];
        let mut kinds = kinds.into_iter().flatten();
        match (kinds.next(), kinds.next()) {
            (Some(kind), None) => Ok(kind),
            _ => {
                let message =
                    "structured_outputs needs exactly one of json, regex, choice, grammar and json_object";
                Err(Failure::invalid(message).with_param("structured_outputs"))
            }
        }
    }
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
            "stop_token_ids": [5], "encoder_no_repeat_ngram_size": 2, "renormalize_logits": true, "num_beams": 4, "length_penalty": 0.5, "early_stopping": "never", "echo": true,
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
