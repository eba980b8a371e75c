//! Prompts of models that encode a text (or an image) and write on from a decoder prompt.
//!
//! The item is the encoder's; text or tokens are the decoder's, after the start token. Defaults are those of
//! transformers' `generate`
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/generation/utils.py>): a forced first
//! token only where the decoder prompt is the start token alone, a forced last one wherever the length ends it.

use super::generation::{GenerationFiles, SECTIONS};
use super::{CrossInput, OutputKind, PreparedSequence, PromptBuilder, SamplingDefaults, check_ids};
use crate::error::{ModelError, PromptError};
use crate::rules::LogitRules;
use crate::tokenization::{LanguageTokens, Tokenizer};
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{EncodedItem, ItemIdx, Modality};

/// Limits of a model's shapes on its prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seq2SeqLimits {
    /// The kind of item its encoder reads.
    pub modality: Modality,
    /// Tokens of the decoder's vocabulary.
    pub vocab: usize,
    /// Tokens the decoder's context holds.
    pub max_context: usize,
}

/// Lays out decoder prompts.
#[derive(Debug)]
pub struct Seq2SeqPrompt {
    tokenizer: Arc<Tokenizer>,
    limits: Seq2SeqLimits,
    start: u32,
    start_rule: StartRule,
    // The first token where the decoder prompt is the start token alone.
    forced_first: Option<u32>,
    // Rules of every sequence; `steps` is empty.
    rules: LogitRules,
    end_tokens: Vec<u32>,
    languages: LanguageTokens,
    defaults: SamplingDefaults,
}

impl Seq2SeqPrompt {
    /// Reads a model directory; `tokenizer` is the one of the same directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(
        dir: &Path,
        tokenizer: Arc<Tokenizer>,
        limits: Seq2SeqLimits,
    ) -> Result<Self, ModelError> {
        let files = GenerationFiles::read(dir)?;
        let source = files.source();
        let rules = files.logit_rules()?;
        let start = start_token(&files)?;
        if start as usize >= limits.vocab {
            return Err(source.wrong(START, &format!("a token below vocab_size {}", limits.vocab)));
        }
        Ok(Self {
            start,
            start_rule: StartRule::of(&files),
            forced_first: source.u32("forced_bos_token_id")?,
            rules,
            end_tokens: files.end_tokens()?,
            languages: LanguageTokens::of_codes(&tokenizer),
            defaults: files.sampling_defaults()?,
            limits,
            tokenizer,
        })
    }

    /// Decoder tokens of a client's prompt, the start token first.
    fn decoder(&self, prompt: &TextOrTokens) -> Result<Vec<u32>, PromptError> {
        let mut tokens = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        check_ids(&tokens, u32::try_from(self.limits.vocab).unwrap_or(u32::MAX))?;
        let has_start = match self.start_rule {
            StartRule::Unless => tokens.first().is_some_and(|first| self.starts(*first)),
            StartRule::Alone => !tokens.is_empty(),
        };
        if !has_start {
            tokens.insert(0, self.start);
        }
        Ok(tokens)
    }

    /// True for tokens that a decoder prompt may start with: the start token and, where that is a language, any language.
    fn starts(&self, token: u32) -> bool {
        let both = self.languages.code(self.start).zip(self.languages.code(token));
        token == self.start || both.is_some()
    }

    fn check_item<'a>(&self, items: &'a [EncodedItem]) -> Result<&'a EncodedItem, PromptError> {
        let modality = self.limits.modality;
        match items {
            [item] if item.modality == modality && item.n_tokens > 0 => Ok(item),
            [item] if item.modality == modality => Err(PromptError::Invalid("item 0 has no rows".into())),
            [item] => {
                let text =
                    format!("item 0 is {}, this model's encoder reads one {modality} item", item.modality);
                Err(PromptError::Invalid(text))
            }
            _ => {
                let text = format!(
                    "the request has {} items, this model's encoder reads one {modality} item",
                    items.len()
                );
                Err(PromptError::Invalid(text))
            }
        }
    }
}

impl PromptBuilder for Seq2SeqPrompt {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        let refuse = |text: &str| Err(PromptError::Invalid(text.into()));
        let prompt = match prompt {
            Prompt::Singleton(decoder) | Prompt::Explicit { encoder: None, decoder } => decoder,
            Prompt::Explicit { encoder: Some(_), .. } => {
                return refuse(
                    "the encoder prompt must come as an item, since the encoder runs on another worker",
                );
            }
            Prompt::Chat(_) => {
                return refuse("this model has no chat template: it takes a prompt, not messages");
            }
            Prompt::Speech(_) => {
                return refuse("this model reads no speech: it takes a prompt, not a speech task");
            }
        };
        let item = self.check_item(items)?;
        let tokens = self.decoder(prompt)?;
        let steps: Vec<Arc<[u32]>> = match (self.forced_first, tokens.len()) {
            (Some(token), 1) => vec![[token].into()],
            _ => Vec::new(),
        };
        let n_tokens = tokens.len() + steps.len();
        if n_tokens > self.limits.max_context {
            return Err(PromptError::TooLong { actual: n_tokens, limit: self.limits.max_context });
        }
        let n = tokens.len() as u32;
        Ok(vec![PreparedSequence {
            positions: (0..n).map(|p| [p; 3]).collect(),
            next_position: n,
            spans: Vec::new(),
            cross: vec![CrossInput { item: ItemIdx(0), first_row: 0, n_rows: item.n_tokens, first_token: 0 }],
            rules: LogitRules { steps, ..self.rules.clone() },
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Text,
            tokens,
        }])
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn language(&self, token: u32) -> Option<&str> {
        self.languages.code(token)
    }
}

/// Rule for the start token before a client's decoder prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartRule {
    /// Added unless it is there.
    Unless,
    /// Added to an empty prompt only: a Donut model's task tokens replace it.
    Alone,
}

impl StartRule {
    fn of(files: &GenerationFiles) -> Self {
        let encoder = files.config.get("encoder.model_type").and_then(|v| v.as_str());
        if encoder.is_some_and(|name| name.contains("donut")) { Self::Alone } else { Self::Unless }
    }
}

const START: &str = "decoder_start_token_id";

/// The token that decoding starts with: the stated one, or the beginning-of-sentence token.
fn start_token(files: &GenerationFiles) -> Result<u32, ModelError> {
    for key in [START, "bos_token_id"] {
        if let Some(id) = files.generation.u32(key)? {
            return Ok(id);
        }
        for section in SECTIONS {
            if let Some(id) = files.config.u32(&format!("{section}{key}"))? {
                return Ok(id);
            }
        }
    }
    Err(files.source().wrong(START, "a token id"))
}
