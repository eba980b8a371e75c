//! A conversation as tokens: the chat template's text, with control tokens from the template alone.

use super::ChatTemplate;
use super::template::{TemplateMessage, TemplatePart};
use crate::error::PromptError;
use crate::tokenization::{ControlTokenGuard, Tokenizer};
use triptych_core::prompt::{Message, MessagePart};
use triptych_core::{ItemIdx, Modality};

/// A conversation as the chat template's text.
pub(super) struct RenderedChat {
    text: String,
    guard: ControlTokenGuard,
    /// The items, in the order of their placeholders.
    pub(super) order: Vec<ItemIdx>,
}

impl RenderedChat {
    /// Renders a conversation whose items are of one kind, one placeholder for each item.
    ///
    /// # Errors
    /// [`PromptError`] if there are no messages, or the template refuses them.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        template: &ChatTemplate,
        (messages, modality): (&[Message], Modality),
    ) -> Result<Self, PromptError> {
        if messages.is_empty() {
            return Err(PromptError::Invalid("the conversation has no messages".into()));
        }
        let parts = || messages.iter().flat_map(|m| &m.parts);
        let guard = tokenizer.guard(parts().filter_map(|part| match part {
            MessagePart::Text(text) => Some(text.as_str()),
            MessagePart::Item(_) => None,
        }))?;
        let content = |part: &MessagePart| match part {
            MessagePart::Text(text) => TemplatePart::Text(guard.apply(text)),
            MessagePart::Item(_) => TemplatePart::Item(modality),
        };
        let shaped: Vec<TemplateMessage<'_>> = messages
            .iter()
            .map(|message| TemplateMessage {
                role: message.role.as_str(),
                content: message.parts.iter().map(content).collect(),
            })
            .collect();
        let text = template.render(&shaped)?;
        let order = parts().filter_map(|part| match part {
            MessagePart::Item(item) => Some(*item),
            MessagePart::Text(_) => None,
        });
        Ok(Self { text, order: order.collect(), guard })
    }

    /// Its tokens as the template writes them, and nothing around them: what tokenizers of text models do with a conversation.
    ///
    /// # Errors
    /// [`PromptError`] if the model's rules have no token for the text.
    pub(super) fn template_tokens(self, tokenizer: &Tokenizer) -> Result<Vec<u32>, PromptError> {
        tokenizer.encode_guarded(&self.text, &self.guard)
    }

    /// Its tokens; `edit` changes the text, whose placeholders are the template's alone.
    ///
    /// Control tokens come from the template and from `edit` alone.
    ///
    /// # Errors
    /// [`PromptError`] if the model's rules have no token for the text; those of `edit`.
    pub(super) fn tokens(
        self,
        tokenizer: &Tokenizer,
        edit: impl FnOnce(String) -> Result<String, PromptError>,
    ) -> Result<Vec<u32>, PromptError> {
        let mut ids = tokenizer.encode_guarded(&edit(self.text)?, &self.guard)?;
        // What the post-processor puts before a text, such as `<s>`, unless the template wrote it.
        let prefix = tokenizer.prefix()?;
        if !ids.starts_with(&prefix) {
            ids.splice(0..0, prefix);
        }
        Ok(ids)
    }
}
