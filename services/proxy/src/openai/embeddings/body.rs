//! The body of an embeddings request. Every field may be absent or null; unknown ones are ignored.

use super::super::api::AdmittedCall;
use super::super::chat::ChatBody;
use super::super::error::invalid_field;
use super::super::lists::IsWanted;
use super::super::prompt_input::PromptInput;
use super::super::sampling::SamplingBody;
use crate::request::Request;
use serde::Deserialize;
use serde::de::IgnoredAny;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{Failure, RequestId};

/// Most inputs of a request; all of them share one permit.
const MAX_INPUTS: usize = 256;

/// The body, as parsed. A conversation is read from the same object.
#[derive(Debug, Deserialize)]
pub(super) struct EmbeddingsBody {
    input: Option<PromptInput>,
    messages: Option<IgnoredAny>,
    encoding_format: Option<String>,
    dimensions: Option<usize>,
    /// True, which is the default: the vector has length 1.
    pub(super) normalize: Option<bool>,
    task: Option<String>,
    // Known and not supported: may be present with the value that changes nothing.
    truncate_prompt_tokens: Option<IsWanted>,
    add_special_tokens: Option<bool>,
}

/// Form of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// A list of numbers.
    Floats,
    /// Base64 of little-endian f32.
    Base64,
}

impl EmbeddingsBody {
    /// Refuses unsupported fields that would change the answer.
    pub(super) fn check_supported(&self) -> Result<(), Failure> {
        self.encoding()?;
        let wanted = [
            ("truncate_prompt_tokens", self.truncate_prompt_tokens.is_some_and(|value| value.0)),
            ("add_special_tokens", self.add_special_tokens == Some(false)),
        ];
        match wanted.into_iter().find(|(_, wanted)| *wanted) {
            Some((field, _)) => {
                Err(Failure::invalid(format!("{field} is not supported by this server")).with_param(field))
            }
            None => Ok(()),
        }
    }

    /// Form of the vectors.
    pub(super) fn encoding(&self) -> Result<Encoding, Failure> {
        match self.encoding_format.as_deref() {
            None | Some("float") => Ok(Encoding::Floats),
            Some("base64") => Ok(Encoding::Base64),
            Some(other) => Err(invalid_field("encoding_format", other, "float and base64")),
        }
    }

    /// Refuses another width than the encoder's: no vector is cut.
    pub(super) fn check_dimensions(&self, width: usize) -> Result<(), Failure> {
        match self.dimensions {
            Some(asked) if asked != width => {
                let message =
                    format!("dimensions is {asked}, allowed is the encoder's width, which is {width}");
                Err(Failure::invalid(message).with_param("dimensions"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what rows that are not pooled have not.
    pub(super) fn check_raw(&self) -> Result<(), Failure> {
        if let Some(task) = self.task.as_deref().filter(|task| *task != "token_embed") {
            return Err(invalid_field("task", task, "token_embed; one vector is /v1/embeddings"));
        }
        if self.encoding()? == Encoding::Base64 {
            return Err(invalid_field("encoding_format", "base64", "float"));
        }
        let given = [("dimensions", self.dimensions.is_some()), ("normalize", self.normalize == Some(true))];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((field, _)) => {
                let message = format!("{field} is of vectors, and rows are as the encoder made them");
                Err(Failure::invalid(message).with_param(field))
            }
            None => Ok(()),
        }
    }

    /// The requests, one per input; a conversation is one.
    pub(super) fn requests(&mut self, chat: ChatBody, call: &AdmittedCall) -> Result<Vec<Request>, Failure> {
        let request = chat.into_request(call, SamplingBody::default())?;
        let inputs = match (self.input.take(), &self.messages) {
            (None, Some(_)) => return Ok(vec![request]),
            (Some(input), None) => input.into_list(),
            _ => {
                return Err(Failure::invalid("one of input and messages is needed").with_param("input"));
            }
        };
        if inputs.is_empty() || inputs.len() > MAX_INPUTS {
            let message = format!("input has {} inputs, allowed are 1 to {MAX_INPUTS}", inputs.len());
            return Err(Failure::invalid(message).with_param("input"));
        }
        let of_input = |(i, input): (usize, TextOrTokens)| Request {
            // The first has the response's id.
            id: if i == 0 { request.id } else { RequestId::from_bits(rand::random()) },
            prompt: Prompt::Singleton(input),
            ..request.clone()
        };
        Ok(inputs.into_iter().enumerate().map(of_input).collect())
    }
}
