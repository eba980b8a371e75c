//! Prompts of a JSON body: a text, token ids, or a list of either.

use super::lists::{MAX_READ, read_at_most};
use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Unexpected, Visitor};
use std::fmt;
use triptych_core::prompt::TextOrTokens;

/// A prompt or a list of prompts, as text or token ids.
#[derive(Debug)]
pub(super) enum PromptInput {
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

/// A prompt, as text or token ids.
#[derive(Debug)]
pub(super) enum OnePrompt {
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
    /// The prompts, in order.
    pub(super) fn into_list(self) -> Vec<TextOrTokens> {
        match self {
            Self::Text(text) => vec![TextOrTokens::Text(text)],
            Self::Tokens(ids) => vec![TextOrTokens::Tokens(ids)],
            Self::Texts(texts) => texts.into_iter().map(TextOrTokens::Text).collect(),
            Self::TokenLists(lists) => lists.into_iter().map(TextOrTokens::Tokens).collect(),
        }
    }
}
