//! Prompts of vision-language models that cross-attend to images: Llama 3.2 Vision.
//!
//! One token represents an image, anywhere in the prompt; tokens from there up to the next image attend to its rows. Images
//! whose tokens follow each other are attended to together. A prompt without an image is plain text
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/mllama/processing_mllama.py>,
//! `get_cross_attention_token_mask`).

use super::conversation::{RenderedChat, check_order};
use super::generation::GenerationFiles;
use super::{
    ChatTemplate, CrossInput, OutputKind, PreparedSequence, PromptBuilder, SamplingDefaults, check_ids,
};
use crate::error::{ModelError, PromptError};
use crate::rules::LogitRules;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{EncodedItem, Extent, ItemIdx, Modality};

/// Lays out conversations about images, or none.
#[derive(Debug)]
pub struct ChatCross {
    tokenizer: Arc<Tokenizer>,
    template: Result<ChatTemplate, String>,
    /// The image token.
    image: u32,
    /// The first token of every prompt.
    start: u32,
    /// Tokens that a prompt may hold.
    vocab: u32,
    max_context: usize,
    end_tokens: Vec<u32>,
    rules: LogitRules,
    defaults: SamplingDefaults,
}

/// Tokens at the end of the table that are only ever input; the image token is one of them.
pub(crate) const N_INPUT_ONLY: usize = 8;

impl ChatCross {
    /// Reads a model directory; `tokenizer` is the one of the same directory. A base model has no chat template, and
    /// is served without conversations.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(dir: &Path, tokenizer: Arc<Tokenizer>) -> Result<Self, ModelError> {
        let files = GenerationFiles::read(dir)?;
        let vocab = files.text_u32("vocab_size")?.saturating_add(N_INPUT_ONLY as u32);
        let token = |key: &str, stated: Option<u32>, name: &str| -> Result<u32, ModelError> {
            let known = stated.or_else(|| tokenizer.token_id(name)).filter(|id| *id < vocab);
            known.ok_or_else(|| files.config.wrong(key, &format!("a token id below {vocab}")))
        };
        let image = files.config.u32("image_token_index")?.or(files.config.u32("image_token_id")?);
        let start = match files.generation.u32("bos_token_id")? {
            Some(id) => Some(id),
            None => files.config.u32("text_config.bos_token_id")?,
        };
        Ok(Self {
            image: token("image_token_index", image, "<|image|>")?,
            start: token("bos_token_id", start, "<|begin_of_text|>")?,
            template: ChatTemplate::from_dir(dir).map_err(|e| e.to_string()),
            vocab,
            max_context: files.text_u32("max_position_embeddings")? as usize,
            end_tokens: files.end_tokens()?,
            rules: files.logit_rules()?,
            defaults: files.sampling_defaults()?,
            tokenizer,
        })
    }

    /// Tokens of a prompt without a template, as the reference reads it. Images that it has no token for go
    /// before it.
    fn raw(&self, prompt: &TextOrTokens, n_images: usize) -> Result<Vec<u32>, PromptError> {
        let mut ids = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode(text)?,
            TextOrTokens::Tokens(ids) => {
                check_ids(ids, self.vocab)?;
                ids.clone()
            }
        };
        if ids.is_empty() && n_images == 0 {
            return Err(PromptError::Invalid("the prompt is empty".into()));
        }
        if n_images > 0 && !ids.contains(&self.image) {
            ids.splice(0..0, std::iter::repeat_n(self.image, n_images));
        }
        if let TextOrTokens::Text(_) = prompt {
            if !ids.contains(&self.start) {
                let n_first = ids.iter().take_while(|id| **id == self.image).count();
                ids.insert(n_first, self.start);
            }
            // What the tokenizer adds by itself, it adds to a text that begins with a start token as well.
            let own = self.tokenizer.encode_input("")?;
            ids.splice(0..0, own);
        }
        Ok(ids)
    }

    /// Rows of each image.
    fn image_rows(items: &[EncodedItem]) -> Result<Vec<u32>, PromptError> {
        let rows = |(idx, item): (usize, &EncodedItem)| match (item.modality, &item.extent) {
            (Modality::Image, Extent::Grid { t: 1, .. }) if item.n_tokens > 0 => Ok(item.n_tokens),
            (Modality::Image, Extent::Grid { t: 1, .. }) => {
                Err(PromptError::Invalid(format!("item {idx} has no rows")))
            }
            (Modality::Image, _) => {
                Err(PromptError::Invalid(format!("item {idx} is an image without a grid")))
            }
            (other, _) => {
                Err(PromptError::Invalid(format!("item {idx} is {other}, this model reads image items")))
            }
        };
        items.iter().enumerate().map(rows).collect()
    }

    /// The sequence of a prompt whose image tokens stand for the items of `order`.
    fn sequence(
        &self,
        tokens: Vec<u32>,
        order: &[ItemIdx],
        n_rows: &[u32],
    ) -> Result<PreparedSequence, PromptError> {
        let images: Vec<u32> =
            (0..).zip(&tokens).filter(|(_, id)| **id == self.image).map(|(i, _)| i).collect();
        if images.len() != order.len() {
            return Err(PromptError::Invalid(format!(
                "the prompt has {} image tokens, the request {} image items",
                images.len(),
                order.len()
            )));
        }
        let input = |(item, first_token): (&ItemIdx, u32)| {
            let n_rows = n_rows.get(item.0 as usize).copied()?;
            Some(CrossInput { item: *item, first_row: 0, n_rows, first_token })
        };
        let cross = order.iter().zip(images).filter_map(input).collect();
        if tokens.len() > self.max_context {
            return Err(PromptError::TooLong { actual: tokens.len(), limit: self.max_context });
        }
        let n = tokens.len() as u32;
        Ok(PreparedSequence {
            tokens,
            positions: (0..n).map(|p| [p; 3]).collect(),
            next_position: n,
            spans: Vec::new(),
            cross,
            rules: self.rules.clone(),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Text,
        })
    }
}

impl PromptBuilder for ChatCross {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        let n_rows = Self::image_rows(items)?;
        let mut order: Vec<ItemIdx> = (0..).map(ItemIdx).take(items.len()).collect();
        let tokens = match prompt {
            Prompt::Chat(chat) => {
                let template = self.template.as_ref().map_err(|e| {
                    PromptError::Invalid(format!("this model has no conversations, only prompts: {e}"))
                })?;
                let chat = RenderedChat::new(&self.tokenizer, template, (chat, &|_| Modality::Image))?;
                check_order(&chat.order, items.len())?;
                order.clone_from(&chat.order);
                chat.tokens(&self.tokenizer, Ok)?
            }
            Prompt::Singleton(prompt) | Prompt::Explicit { encoder: None, decoder: prompt } => {
                self.raw(prompt, items.len())?
            }
            Prompt::Explicit { encoder: Some(_), .. } => {
                let text = "this model has no encoder for text: send one prompt, not one for each side";
                return Err(PromptError::Invalid(text.into()));
            }
            Prompt::Speech(_) => {
                return Err(PromptError::Invalid("this model reads images, not speech".into()));
            }
        };
        Ok(vec![self.sequence(tokens, &order, &n_rows)?])
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref().ok()
    }
}
