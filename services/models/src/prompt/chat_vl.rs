//! Prompts of vision-language models whose image rows are among the tokens: Qwen2-VL, Qwen2.5-VL.
//!
//! In a conversation, control tokens come from the chat template alone: a client's text never makes one. A prompt without a template is the client's own layout, and is read as the reference reads it.

use super::conversation::read_chat;
use super::generation::GenerationFiles;
use super::positions::{GridSpan, positions};
use super::{
    ChatTemplate, ItemSpan, OutputKind, PreparedSequence, PromptBuilder, SamplingDefaults, check_ids,
};
use crate::error::{ModelError, PromptError};
use crate::rules::LogitRules;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{EncodedItem, Extent, ItemIdx, Modality};

/// Placeholder and delimiters of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VisionTokens {
    /// Placeholder of an image row.
    pub image: u32,
    /// Before the rows.
    pub start: u32,
    /// After the rows.
    pub end: u32,
}

/// Lays out conversations with images.
#[derive(Debug)]
pub struct ChatVl {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    vision: VisionTokens,
    /// Patches on a side of the square that becomes one row.
    merge_size: u32,
    vocab: u32,
    max_context: usize,
    end_tokens: Vec<u32>,
    rules: LogitRules,
    defaults: SamplingDefaults,
}

/// An item whose metadata were checked.
#[derive(Clone, Copy, Debug)]
struct ImageRows {
    item: ItemIdx,
    n_tokens: u32,
    /// Rows by frame, down, across.
    thw: [u32; 3],
}

impl ChatVl {
    /// Reads a model directory; `tokenizer` is the one of the same directory.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported.
    pub fn from_dir(dir: &Path, tokenizer: Arc<Tokenizer>) -> Result<Self, ModelError> {
        let files = GenerationFiles::read(dir)?;
        let token = |key: &str, name: &str| -> Result<u32, ModelError> {
            let known = files.config.u32(key)?.or_else(|| tokenizer.token_id(name));
            known.ok_or_else(|| files.config.wrong(key, &format!("a token id, or {name} in the tokenizer")))
        };
        let vision = VisionTokens {
            image: token("image_token_id", "<|image_pad|>")?,
            start: token("vision_start_token_id", "<|vision_start|>")?,
            end: token("vision_end_token_id", "<|vision_end|>")?,
        };
        const MERGE: &str = "vision_config.spatial_merge_size";
        let merge_size = files.config.u32(MERGE)?.unwrap_or(2);
        if merge_size == 0 {
            return Err(files.config.wrong(MERGE, "1 or more"));
        }
        Ok(Self {
            template: ChatTemplate::from_dir(dir)?,
            vision,
            merge_size,
            vocab: files.text_u32("vocab_size")?,
            max_context: files.text_u32("max_position_embeddings")? as usize,
            end_tokens: files.end_tokens()?,
            rules: files.logit_rules()?,
            defaults: files.sampling_defaults()?,
            tokenizer,
        })
    }

    /// Tokens of a prompt without a template. Items that it has no placeholder for go before it.
    fn raw(&self, prompt: &TextOrTokens, n_items: usize) -> Result<(Vec<u32>, Vec<ItemIdx>), PromptError> {
        let mut ids = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode_input(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        check_ids(&ids, self.vocab)?;
        if !ids.contains(&self.vision.image) {
            let one = [self.vision.start, self.vision.image, self.vision.end];
            ids.splice(0..0, std::iter::repeat_n(one, n_items).flatten());
        }
        Ok((ids, (0..n_items as u32).map(ItemIdx).collect()))
    }

    /// Checks what is known of an item against this model.
    fn image_rows(&self, idx: usize, item: &EncodedItem) -> Result<ImageRows, PromptError> {
        if item.modality != Modality::Image {
            let found = item.modality;
            return Err(PromptError::Invalid(format!("item {idx} is {found}, this model reads image items")));
        }
        let Extent::Grid { t, h, w } = item.extent else {
            return Err(PromptError::Invalid(format!("item {idx} is an image without a grid")));
        };
        let thw = [t, h / self.merge_size, w / self.merge_size];
        let n = thw.iter().try_fold(1_u32, |n, side| n.checked_mul(*side));
        let whole = h.is_multiple_of(self.merge_size) && w.is_multiple_of(self.merge_size);
        if n != Some(item.n_tokens) || item.n_tokens == 0 || !whole {
            return Err(PromptError::Invalid(format!(
                "item {idx} has {} rows, which is not what a grid of {t}x{h}x{w} patches makes",
                item.n_tokens
            )));
        }
        Ok(ImageRows { item: ItemIdx(idx as u32), n_tokens: item.n_tokens, thw })
    }

    /// Repeats each placeholder as often as its item has rows.
    fn expand(&self, ids: &[u32], images: &[ImageRows]) -> Result<PreparedSequence, PromptError> {
        let n_placeholders = ids.iter().filter(|id| **id == self.vision.image).count();
        if n_placeholders != images.len() {
            return Err(PromptError::Invalid(format!(
                "the prompt has {n_placeholders} image placeholders, the request {} image items",
                images.len()
            )));
        }
        let n_rows: u64 = images.iter().map(|image| u64::from(image.n_tokens)).sum();
        let n_tokens = (ids.len() - n_placeholders) as u64 + n_rows;
        if n_tokens > self.max_context as u64 {
            return Err(PromptError::TooLong { actual: n_tokens as usize, limit: self.max_context });
        }
        let mut tokens = Vec::with_capacity(n_tokens as usize);
        let mut spans = Vec::new();
        let mut grids = Vec::new();
        let mut waiting = images.iter();
        for id in ids {
            let image = waiting.as_slice().first().filter(|_| *id == self.vision.image);
            let Some(image) = image else {
                tokens.push(*id);
                continue;
            };
            waiting.next();
            let first_token = tokens.len();
            spans.push(ItemSpan {
                item: image.item,
                first_token: first_token as u32,
                n_tokens: image.n_tokens,
            });
            grids.push(GridSpan { first_token, thw: image.thw });
            tokens.extend(std::iter::repeat_n(self.vision.image, image.n_tokens as usize));
        }
        let (positions, next_position) = positions(tokens.len(), &grids);
        Ok(PreparedSequence {
            tokens,
            positions,
            next_position,
            spans,
            cross: None,
            rules: self.rules.clone(),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Text,
        })
    }
}

impl PromptBuilder for ChatVl {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        let rows: Vec<ImageRows> =
            items.iter().enumerate().map(|(i, item)| self.image_rows(i, item)).collect::<Result<_, _>>()?;
        let (ids, order) = match prompt {
            Prompt::Chat(messages) => read_chat(&self.tokenizer, &self.template, messages)?,
            Prompt::Singleton(prompt) => self.raw(prompt, items.len())?,
            Prompt::Explicit { .. } => {
                let text = "this model has no encoder for text: send one prompt, not one for each side";
                return Err(PromptError::Invalid(text.into()));
            }
            Prompt::Speech(_) => {
                return Err(PromptError::Invalid("this model reads images, not speech".into()));
            }
        };
        if ids.is_empty() {
            return Err(PromptError::Invalid("the prompt is empty".into()));
        }
        check_order(&order, items.len())?;
        let images: Vec<ImageRows> = order.iter().filter_map(|i| rows.get(i.0 as usize).copied()).collect();
        Ok(vec![self.expand(&ids, &images)?])
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }
}

/// Checks that every item is named exactly once.
fn check_order(order: &[ItemIdx], n_items: usize) -> Result<(), PromptError> {
    let mut named = vec![0_u32; n_items];
    for item in order {
        match named.get_mut(item.0 as usize) {
            Some(n) => *n += 1,
            None => {
                let text = format!("a message names item {}, the request has {n_items} items", item.0);
                return Err(PromptError::Invalid(text));
            }
        }
    }
    match named.iter().position(|n| *n != 1) {
        Some(idx) => Err(PromptError::Invalid(format!(
            "item {idx} is named {} times by the messages; once is right",
            named[idx]
        ))),
        None => Ok(()),
    }
}
