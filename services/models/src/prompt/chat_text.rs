//! Prompts of decoders of text alone: a conversation by the model's chat template, or a prompt as it is. Items are refused.
//!
//! In a conversation, control tokens come from the template alone: a client's text never makes one. A prompt without a
//! template is the client's own layout, and is read as the reference reads it.

use super::conversation::RenderedChat;
use super::generation::GenerationFiles;
use super::{
    ChatTemplate, ContentFormat, OutputKind, PreparedSequence, PromptBuilder, PromptLimits, SamplingDefaults,
    check_ids,
};
use crate::error::{ModelError, PromptError};
use crate::rules::LogitRules;
use crate::tokenization::Tokenizer;
use std::path::Path;
use std::sync::Arc;
use triptych_core::prompt::{Chat, Prompt, TextOrTokens};
use triptych_core::{EncodedItem, Modality};

/// Lays out conversations and prompts without items.
#[derive(Debug)]
pub struct ChatText {
    tokenizer: Arc<Tokenizer>,
    /// `None` of a base model, which is published without one.
    template: Option<ChatTemplate>,
    limits: PromptLimits,
    end_tokens: Vec<u32>,
    rules: LogitRules,
    defaults: SamplingDefaults,
}

impl ChatText {
    /// Reads a model directory; `tokenizer` is the one of the same directory. A base model has no chat template, and is
    /// served without conversations.
    ///
    /// # Errors
    /// [`ModelError`] for a file or key that is missing or not supported, and for a template that does not compile.
    pub fn from_dir(dir: &Path, tokenizer: Arc<Tokenizer>, limits: PromptLimits) -> Result<Self, ModelError> {
        let files = GenerationFiles::read(dir)?;
        Ok(Self {
            template: ChatTemplate::find(dir, ContentFormat::String)?,
            limits,
            end_tokens: files.end_tokens()?,
            rules: files.logit_rules()?,
            defaults: files.sampling_defaults()?,
            tokenizer,
        })
    }

    /// Tokens of a conversation.
    fn of_chat(&self, chat: &Chat) -> Result<Vec<u32>, PromptError> {
        let template = self.template.as_ref().ok_or_else(|| {
            let text = "this model has no chat template: it takes a prompt, not messages";
            PromptError::Invalid(text.into())
        })?;
        let chat = RenderedChat::new(&self.tokenizer, template, (chat, &|_| Modality::Text))?;
        if let Some(item) = chat.order.first() {
            let text = format!("a message names item {}, the request has 0 items", item.0);
            return Err(PromptError::Invalid(text));
        }
        chat.template_tokens(&self.tokenizer)
    }

    /// Tokens of a prompt without a template.
    fn raw(&self, prompt: &TextOrTokens) -> Result<Vec<u32>, PromptError> {
        let ids = match prompt {
            TextOrTokens::Text(text) => self.tokenizer.encode_input(text)?,
            TextOrTokens::Tokens(ids) => ids.clone(),
        };
        check_ids(&ids, u32::try_from(self.limits.vocab).unwrap_or(u32::MAX))?;
        Ok(ids)
    }
}

impl PromptBuilder for ChatText {
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError> {
        if let Some(item) = items.first() {
            let text =
                format!("item 0 is {}, this model reads the text of its prompt, no items", item.modality);
            return Err(PromptError::Invalid(text));
        }
        let tokens = match prompt {
            Prompt::Chat(chat) => self.of_chat(chat)?,
            Prompt::Singleton(prompt) | Prompt::Explicit { encoder: None, decoder: prompt } => {
                self.raw(prompt)?
            }
            Prompt::Explicit { encoder: Some(_), .. } => {
                let text = "this model has no encoder: send one prompt, not one for each side";
                return Err(PromptError::Invalid(text.into()));
            }
            Prompt::Speech(_) => {
                return Err(PromptError::Invalid("this model reads text, not speech".into()));
            }
        };
        if tokens.is_empty() {
            return Err(PromptError::Invalid("the prompt is empty".into()));
        }
        if tokens.len() > self.limits.max_context {
            return Err(PromptError::TooLong { actual: tokens.len(), limit: self.limits.max_context });
        }
        // Bounded by the context, which fits.
        let n = tokens.len() as u32;
        Ok(vec![PreparedSequence {
            tokens,
            positions: (0..n).map(|p| [p; 3]).collect(),
            next_position: n,
            spans: Vec::new(),
            cross: Vec::new(),
            rules: self.rules.clone(),
            end_tokens: self.end_tokens.clone(),
            output: OutputKind::Text,
        }])
    }

    fn chat_tokens(&self, chat: &Chat) -> Result<Option<Vec<u32>>, PromptError> {
        self.of_chat(chat).map(Some)
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.defaults
    }

    fn chat_template(&self) -> Option<&ChatTemplate> {
        self.template.as_ref()
    }
}
