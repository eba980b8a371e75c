//! The body of a completion request. Every field may be absent or null; unknown ones are ignored.

use super::super::api::AdmittedCall;
use super::super::lists::{MAX_READ, read_at_most};
use super::super::part::{RawPart, items_of};
use super::super::sampling::SamplingBody;
use super::super::sse::StreamOptions;
use crate::request::{Api, Item, Request};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Unexpected, Visitor};
use std::fmt;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{Failure, ModelName, RequestId};
use triptych_proto::v1;

/// Largest number of prompts in a body; all of them share one permit.
const MAX_PROMPTS: usize = 32;

/// The body, as parsed. [`SamplingBody`] is read from the same object.
#[derive(Debug, Deserialize)]
pub(super) struct CompletionBody {
    model: Option<String>,
    prompt: Option<PromptInput>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<u32>,
    // Extensions.
    encoder_prompt: Option<OnePrompt>,
    src_lang: Option<String>,
    items: Option<Vec<RawPart>>,
    // Known and not supported: may be present with an empty value.
    suffix: Option<String>,
    best_of: Option<u32>,
}

/// A prompt or a list of prompts, as text or token ids.
#[derive(Debug)]
enum PromptInput {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// By hand, as the other prompts here: `untagged` holds the whole list eight times over before it tries a form.
impl<'de> Deserialize<'de> for PromptInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptVisitor)
    }
}

struct PromptVisitor;

impl<'de> Visitor<'de> for PromptVisitor {
    type Value = PromptInput;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids, or a list of such lists")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PromptInput, E> {
        Ok(PromptInput::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<PromptInput, A::Error> {
        // The number of values of a body bounds the ids.
        Ok(match list.next_element()? {
            None => PromptInput::Tokens(Vec::new()),
            Some(PromptElement::Id(id)) => PromptInput::Tokens(read_at_most(usize::MAX, list, vec![id])?),
            Some(PromptElement::One(OnePrompt::Text(text))) => {
                PromptInput::Texts(read_at_most(MAX_READ, list, vec![text])?)
            }
            Some(PromptElement::One(OnePrompt::Tokens(ids))) => {
                PromptInput::TokenLists(read_at_most(MAX_READ, list, vec![ids])?)
            }
        })
    }
}

/// The first element of a list, which says what the others are.
enum PromptElement {
    Id(u32),
    One(OnePrompt),
}

impl<'de> Deserialize<'de> for PromptElement {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ElementVisitor)
    }
}

struct ElementVisitor;

impl<'de> Visitor<'de> for ElementVisitor {
    type Value = PromptElement;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id, or a list of token ids")
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<PromptElement, E> {
        let id = u32::try_from(id).map_err(|_| E::invalid_value(Unexpected::Unsigned(id), &self))?;
        Ok(PromptElement::Id(id))
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<PromptElement, E> {
        Ok(PromptElement::One(OnePrompt::Text(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, ids: A) -> Result<PromptElement, A::Error> {
        OnePromptVisitor.visit_seq(ids).map(PromptElement::One)
    }
}

#[derive(Debug)]
enum OnePrompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for OnePrompt {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(OnePromptVisitor)
    }
}

struct OnePromptVisitor;

impl<'de> Visitor<'de> for OnePromptVisitor {
    type Value = OnePrompt;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string or a list of token ids")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<OnePrompt, E> {
        Ok(OnePrompt::Text(text.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, ids: A) -> Result<OnePrompt, A::Error> {
        read_at_most(usize::MAX, ids, Vec::new()).map(OnePrompt::Tokens)
    }
}

impl From<OnePrompt> for TextOrTokens {
    fn from(p: OnePrompt) -> Self {
        match p {
            OnePrompt::Text(text) => Self::Text(text),
            OnePrompt::Tokens(ids) => Self::Tokens(ids),
        }
    }
}

impl PromptInput {
    fn into_list(self) -> Vec<TextOrTokens> {
        match self {
            Self::Text(text) => vec![TextOrTokens::Text(text)],
            Self::Tokens(ids) => vec![TextOrTokens::Tokens(ids)],
            Self::Texts(texts) => texts.into_iter().map(TextOrTokens::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(TextOrTokens::Tokens).collect(),
        }
    }
}

impl CompletionBody {
    pub(super) fn stream(&self) -> bool {
        self.stream.unwrap_or(false)
    }

    pub(super) fn include_usage(&self) -> bool {
        self.stream_options.as_ref().and_then(|o| o.include_usage).unwrap_or(false)
    }

    /// Refuses unsupported fields that would change the answer.
    pub(super) fn check_supported(&self, sampling: &SamplingBody) -> Result<(), Failure> {
        if self.suffix.as_ref().is_some_and(|s| !s.is_empty()) {
            return Err(Failure::invalid("suffix is not supported by this server").with_param("suffix"));
        }
        match self.best_of {
            Some(best_of) if best_of != sampling.n() => {
                let message = format!("best_of is {best_of}, allowed is n, which is {}", sampling.n());
                Err(Failure::invalid(message).with_param("best_of"))
            }
            _ => Ok(()),
        }
    }

    /// The requests, one per prompt.
    pub(super) fn into_requests(
        self,
        call: &AdmittedCall,
        sampling: SamplingBody,
    ) -> Result<Vec<Request>, Failure> {
        let priority = sampling.priority();
        let sampling = sampling.into_wire(self.logprobs)?;
        let items = items_of(self.items.unwrap_or_default())?;
        let decoder = self.prompt.map(PromptInput::into_list).unwrap_or_default();
        let prompts = prompts(decoder, self.encoder_prompt.map(Into::into), &items)?;
        let n_prompts = prompts.len();
        if n_prompts > MAX_PROMPTS || (n_prompts > 1 && !items.is_empty()) {
            let limit = if items.is_empty() { MAX_PROMPTS } else { 1 };
            let message = format!("prompt has {n_prompts} prompts, the limit is {limit}");
            return Err(Failure::invalid(message).with_param("prompt"));
        }
        let request = |(i, prompt): (usize, Prompt)| Request {
            // The first has the response's id; the others need their own for logs and seeds.
            id: if i == 0 { call.id } else { RequestId::from_bits(rand::random()) },
            api: Api::Http,
            arrived: call.arrived,
            deadline: call.deadline,
            model: self.model.as_deref().filter(|m| !m.is_empty()).map(ModelName::new),
            prompt,
            items: items.clone(),
            sampling: v1::Sampling::clone(&sampling),
            caller: call.caller.clone(),
            priority,
            encoder_prompt: None,
            src_lang: self.src_lang.clone().filter(|code| !code.is_empty()),
            resumption: call.resumption,
        };
        Ok(prompts.into_iter().enumerate().map(request).collect())
    }
}

/// The prompt of each answer. An encoder prompt makes the pair explicit; with items, an absent prompt is the model's own
/// start.
fn prompts(
    decoder: Vec<TextOrTokens>,
    encoder: Option<TextOrTokens>,
    items: &[Item],
) -> Result<Vec<Prompt>, Failure> {
    let start = || TextOrTokens::Tokens(Vec::new());
    match (encoder, decoder.is_empty()) {
        (Some(encoder), true) => Ok(vec![Prompt::Explicit { encoder: Some(encoder), decoder: start() }]),
        (Some(encoder), false) => {
            let pair = |decoder| Prompt::Explicit { encoder: Some(encoder.clone()), decoder };
            Ok(decoder.into_iter().map(pair).collect())
        }
        (None, true) if items.is_empty() => {
            let message = "prompt is missing: text, token ids, a list of either, or encoder_prompt or items";
            Err(Failure::invalid(message).with_param("prompt"))
        }
        (None, true) => Ok(vec![Prompt::Singleton(start())]),
        (None, false) => Ok(decoder.into_iter().map(Prompt::Singleton).collect()),
    }
}
