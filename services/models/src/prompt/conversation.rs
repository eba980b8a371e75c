//! A conversation as tokens: the chat template's text, with control tokens from the template alone.

use super::ChatTemplate;
use super::template::{TemplateMessage, TemplatePart};
use crate::error::PromptError;
use crate::tokenization::Tokenizer;
use triptych_core::ItemIdx;
use triptych_core::prompt::{Message, MessagePart};

/// Tokens of a conversation, one placeholder for each item; and the items in their order there.
///
/// Control tokens come from the template alone.
pub(super) fn read_chat(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
) -> Result<(Vec<u32>, Vec<ItemIdx>), PromptError> {
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
        MessagePart::Item(_) => TemplatePart::Image,
    };
    let shaped: Vec<TemplateMessage<'_>> = messages
        .iter()
        .map(|message| TemplateMessage {
            role: message.role.as_str(),
            content: message.parts.iter().map(content).collect(),
        })
        .collect();
    let rendered = template.render(&shaped)?;
    let order = parts().filter_map(|part| match part {
        MessagePart::Item(item) => Some(*item),
        MessagePart::Text(_) => None,
    });
    Ok((tokenizer.encode_guarded(&rendered, &guard)?, order.collect()))
}
