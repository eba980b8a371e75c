//! Prompts of vision-language models that cross-attend to an image: Llama 3.2 Vision.
//!
//! One token represents the image, anywhere in the prompt; tokens from there on attend to the image's rows. A prompt
//! without an image is plain text. Several images in one prompt are refused
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/mllama/processing_mllama.py>).

use super::conversation::RenderedChat;
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

/// Lays out conversations about one image, or none.
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

    /// Tokens of a prompt without a template, as the reference reads it. An image that it has no token for goes
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
            ids.insert(0, self.image);
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

    /// Rows of the one image, if there is one.
    fn image_rows(&self, items: &[EncodedItem]) -> Result<Option<u32>, PromptError> {
        let item = match items {
            [] => return Ok(None),
            [item] => item,
            _ => {
                let text = format!("the request has {} items, this model reads one image", items.len());
                return Err(PromptError::Invalid(text));
            }
        };
        if item.modality != Modality::Image {
            let text = format!("item 0 is {}, this model reads image items", item.modality);
            return Err(PromptError::Invalid(text));
        }
        let Extent::Grid { t: 1, .. } = item.extent else {
            return Err(PromptError::Invalid("item 0 is an image without a grid".into()));
        };
        if item.n_tokens == 0 {
            return Err(PromptError::Invalid("item 0 has no rows".into()));
        }
        Ok(Some(item.n_tokens))
    }

    fn sequence(&self, tokens: Vec<u32>, n_rows: Option<u32>) -> Result<PreparedSequence, PromptError> {
        let mut images =
            tokens.iter().enumerate().filter(|(_, id)| **id == self.image).map(|(i, _)| i as u32);
        let cross = match (images.next(), n_rows, images.count()) {
            (None, None, _) => None,
            (Some(first_token), Some(n_rows), 0) => {
                Some(CrossInput { item: ItemIdx(0), first_row: 0, n_rows, first_token })
            }
            (first, n_rows, more) => {
                return Err(PromptError::Invalid(format!(
                    "the prompt has {} image tokens, the request {} image items; this model reads one image, or none",
                    usize::from(first.is_some()) + more,
                    usize::from(n_rows.is_some())
                )));
            }
        };
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
        let n_rows = self.image_rows(items)?;
        let tokens = match prompt {
            Prompt::Chat(chat) => {
                let template = self.template.as_ref().map_err(|e| {
                    PromptError::Invalid(format!("this model has no conversations, only prompts: {e}"))
                })?;
                let chat = RenderedChat::new(&self.tokenizer, template, (chat, &|_| Modality::Image))?;
                let order = chat.order.clone();
                let tokens = chat.tokens(&self.tokenizer, Ok)?;
                if order.iter().any(|item| item.0 as usize >= items.len()) {
                    let text =
                        format!("a message names an item that is none of the request's {}", items.len());
                    return Err(PromptError::Invalid(text));
                }
                tokens
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
        Ok(vec![self.sequence(tokens, n_rows)?])
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref().ok()
    }
}
