//! Text and token ids to the input of a text encoder.
//!
//! A text gets the tokens that the model's own post-processor adds (an end token, a language, which a request may name
//! as transformers' `src_lang` does); token ids are used as they are. Nothing is cut: a text that does not fit is
//! refused, since its answer would not be about it.

use super::{EncoderInput, Features, Preprocess};
use crate::error::{ItemError, PromptError};
use crate::tokenization::{LanguageTokens, Tokenizer};
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemForm, ItemOptions, Modality};

/// Prepares encoder text for one model.
#[derive(Debug)]
pub struct TextProcessor {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    max_tokens: usize,
    /// Languages of a text, and which of the tokens around it names its own.
    languages: LanguageTokens,
    place: Option<LanguagePlace>,
}

/// Place of the token that names a text's language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LanguagePlace {
    First,
    Last,
}

impl TextProcessor {
    /// For an encoder with a table of `vocab` tokens that reads up to `max_tokens` of them.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize, max_tokens: usize) -> Self {
        let languages = LanguageTokens::of_codes(&tokenizer);
        // What stands around every text stands around an empty one.
        let around = tokenizer.encode_input("").unwrap_or_default();
        let names = |id: Option<&u32>| id.is_some_and(|id| languages.code(*id).is_some());
        let place = match (names(around.first()), names(around.last())) {
            (true, _) => Some(LanguagePlace::First),
            (false, true) => Some(LanguagePlace::Last),
            (false, false) => None,
        };
        Self { tokenizer, vocab, max_tokens, languages, place }
    }

    /// Tokens of a text in the language of this code.
    fn text_of(&self, code: &str, bytes: &[u8]) -> Result<Vec<u32>, ItemError> {
        let Some(place) = self.place else {
            let text = "this model's encoder is told no language, so it takes no src_lang";
            return Err(ItemError::Unsupported(text.into()));
        };
        let Some(token) = self.languages.token(code) else {
            let allowed: Vec<&str> = self.languages.codes().collect();
            let text = format!("src_lang is {code:?}, allowed are {}", allowed.join(", "));
            return Err(ItemError::Unsupported(text));
        };
        let mut ids = self.text(bytes)?;
        let named = match place {
            LanguagePlace::First => ids.first_mut(),
            LanguagePlace::Last => ids.last_mut(),
        };
        if let Some(named) = named {
            *named = token;
        }
        Ok(ids)
    }

    fn text(&self, bytes: &[u8]) -> Result<Vec<u32>, ItemError> {
        let text = std::str::from_utf8(bytes).map_err(|e| {
            ItemError::Corrupt(format!("the text is no UTF-8 after {} bytes", e.valid_up_to()))
        })?;
        self.tokenizer.encode_input(text).map_err(|e: PromptError| ItemError::Corrupt(e.to_string()))
    }
}

fn token_ids(bytes: &[u8]) -> Result<Vec<u32>, ItemError> {
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        let text = format!("token ids are 4 bytes each, the item has {}", bytes.len());
        return Err(ItemError::Corrupt(text));
    }
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)).collect())
}

impl Preprocess for TextProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Text]
    }

    fn max_rows(&self) -> Option<usize> {
        Some(self.max_tokens)
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        super::admit(Modality::Text, modality, bytes, limits)?;
        super::check_options(options, &["tokens", "src_lang"])?;
        let ids = match (options.form, options.src_lang.as_deref()) {
            (ItemForm::Plain, None) => self.text(bytes)?,
            (ItemForm::Plain, Some(code)) => self.text_of(code, bytes)?,
            (ItemForm::TokenIds, None) => token_ids(bytes)?,
            (ItemForm::Embeddings, _) => {
                return Err(ItemError::Unsupported("rows in the place of a text are not read".into()));
            }
            (ItemForm::TokenIds, Some(_)) => {
                let text = "token ids are read as they are, so src_lang says nothing of them";
                return Err(ItemError::Unsupported(text.into()));
            }
        };
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab) {
            let text = format!("token {id} is not one of the encoder's {}", self.vocab);
            return Err(ItemError::Corrupt(text));
        }
        if ids.is_empty() {
            return Err(ItemError::Empty("the text has no tokens".into()));
        }
        if ids.len() > self.max_tokens {
            return Err(ItemError::TooLong { what: "the text", actual: ids.len(), limit: self.max_tokens });
        }
        // Bounded by `max_tokens`, which fits.
        Ok(EncoderInput {
            extent: Extent::Tokens,
            n_tokens: ids.len() as u32,
            features: Features::Tokens(ids),
        })
    }
}
