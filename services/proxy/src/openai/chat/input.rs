//! The body of a chat request. Every field may be absent or null; unknown ones are ignored.

use super::super::Call;
use super::message::RawMessage;
use crate::request::Request;
use serde::Deserialize;
use serde_json::Value;
use triptych_core::prompt::Prompt;
use triptych_core::{Failure, ModelName};
use triptych_proto::v1;

/// As it arrives.
#[derive(Debug, Deserialize)]
pub(super) struct ChatBody {
    model: Option<String>,
    messages: Option<Vec<RawMessage>>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    n: Option<u32>,
    stop: Option<Stop>,
    seed: Option<serde_json::Number>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    logprobs: Option<bool>,
    top_logprobs: Option<u32>,
    ignore_eos: Option<bool>,
    // What follows is known and not supported; it may be present with a value that asks for nothing.
    tools: Option<Value>,
    functions: Option<Value>,
    response_format: Option<ResponseFormat>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    logit_bias: Option<Value>,
    modalities: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// One string, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string or a list of strings")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

impl ChatBody {
    pub(super) fn stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false)
    }

    pub(super) fn n(&self) -> u32 {
        self.n.unwrap_or(1)
    }

    /// Refuses what would change the answer and cannot be done.
    pub(super) fn check_supported(&self) -> Result<(), Failure> {
        let given = |value: &Option<Value>| value.as_ref().is_some_and(asks_for_something);
        let format = self.response_format.as_ref().and_then(|f| f.kind.as_deref());
        let speaks = self.modalities.iter().flatten().any(|m| m != "text");
        let wanted = [
            ("tools", given(&self.tools)),
            ("functions", given(&self.functions)),
            ("logit_bias", given(&self.logit_bias)),
            ("response_format", format.is_some_and(|f| f != "text")),
            ("frequency_penalty", self.frequency_penalty.is_some_and(|p| p != 0.0)),
            ("presence_penalty", self.presence_penalty.is_some_and(|p| p != 0.0)),
            ("modalities", speaks),
        ];
        match wanted.into_iter().find(|(_, wanted)| *wanted) {
            Some((field, _)) => {
                Err(Failure::invalid(format!("{field} is not supported by this server")).with_param(field))
            }
            None => Ok(()),
        }
    }

    /// The request it asks for. Media stay as they are: text of a data URL, or a URL.
    pub(super) fn into_request(self, call: &Call) -> Result<Request, Failure> {
        let sampling = self.sampling()?;
        let (mut messages, mut items) = (Vec::new(), Vec::new());
        for (i, message) in self.messages.unwrap_or_default().into_iter().enumerate() {
            messages.push(message.into_message(i, &mut items)?);
        }
        Ok(Request {
            id: call.id,
            arrived: call.arrived,
            deadline: call.deadline,
            model: self.model.filter(|m| !m.is_empty()).map(ModelName::new),
            prompt: Prompt::Chat(messages),
            items,
            sampling,
        })
    }

    fn sampling(&self) -> Result<v1::Sampling, Failure> {
        let logprobs = match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (true, top) => Some(top.unwrap_or(0)),
            (false, None | Some(0)) => None,
            (false, Some(_)) => {
                return Err(Failure::invalid("top_logprobs needs logprobs: true").with_param("top_logprobs"));
            }
        };
        Ok(v1::Sampling {
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            seed: self.seed.as_ref().map(seed).transpose()?,
            n: self.n,
            stop: match &self.stop {
                None => Vec::new(),
                Some(Stop::One(text)) => vec![text.clone()],
                Some(Stop::Many(texts)) => texts.clone(),
            },
            logprobs,
            ignore_eos: self.ignore_eos.unwrap_or(false),
        })
    }
}

/// Any whole number of 64 bits; a negative one stands for its bits.
fn seed(number: &serde_json::Number) -> Result<u64, Failure> {
    let bits = number.as_u64().or_else(|| number.as_i64().map(i64::cast_unsigned));
    bits.ok_or_else(|| {
        Failure::invalid(format!("seed is {number}, allowed is a whole number of 64 bits")).with_param("seed")
    })
}

fn asks_for_something(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::Array(values) => !values.is_empty(),
        Value::Object(fields) => !fields.is_empty(),
        _ => true,
    }
}
