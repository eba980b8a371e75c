//! Text and token ids to the input of a text encoder.
//!
//! A text gets the tokens that the model's own post-processor adds (an end token, a language); token ids are used
//! as they are. Nothing is cut: a text that does not fit is refused, since its answer would not be about it.

use super::{EncoderInput, Features, Preprocess};
use crate::error::{ItemError, PromptError};
use crate::tokenization::Tokenizer;
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemForm, ItemOptions, Modality};

/// Prepares encoder text for one model.
#[derive(Debug)]
pub struct TextProcessor {
    tokenizer: Arc<Tokenizer>,
    vocab: usize,
    max_tokens: usize,
}

impl TextProcessor {
    /// For an encoder with a table of `vocab` tokens that reads up to `max_tokens` of them.
    pub fn new(tokenizer: Arc<Tokenizer>, vocab: usize, max_tokens: usize) -> Self {
        Self { tokenizer, vocab, max_tokens }
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

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        super::admit(Modality::Text, modality, bytes, limits)?;
        super::check_options(options, &["tokens"])?;
        let ids = match options.form {
            ItemForm::Plain => self.text(bytes)?,
            ItemForm::TokenIds => token_ids(bytes)?,
        };
        if let Some(id) = ids.iter().find(|id| **id as usize >= self.vocab) {
            let text = format!("token {id} is not one of the encoder's {}", self.vocab);
            return Err(ItemError::Corrupt(text));
        }
        if ids.is_empty() {
            return Err(ItemError::Empty("the text has no tokens".into()));
        }
        if ids.len() > self.max_tokens {
            return Err(ItemError::TooLarge {
                what: "the text",
                actual: format!("{} tokens", ids.len()),
                limit: format!("{} tokens", self.max_tokens),
            });
        }
        // Bounded by `max_tokens`, which fits.
        Ok(EncoderInput {
            extent: Extent::Tokens,
            n_tokens: ids.len() as u32,
            features: Features::Tokens(ids),
        })
    }
}
