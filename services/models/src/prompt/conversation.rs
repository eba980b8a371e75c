//! A conversation as tokens: the chat template's text, with control tokens from the template alone.

mod guarded;

use super::ChatTemplate;
use super::template::{TemplateInput, TemplateMessage, TemplatePart};
use crate::error::PromptError;
use crate::tokenization::{ControlTokenGuard, Tokenizer};
use guarded::GuardedJson;
use triptych_core::prompt::{Chat, Message, MessagePart};
use triptych_core::{ItemIdx, Modality};

/// A conversation as the chat template's text.
pub(super) struct RenderedChat {
    text: String,
    guard: ControlTokenGuard,
    /// The items, in the order of their placeholders.
    pub(super) order: Vec<ItemIdx>,
}

impl RenderedChat {
    /// Renders a conversation, one placeholder for each item; `kind` is the kind of an item.
    ///
    /// # Errors
    /// [`PromptError`] if there are no messages, a text that has to be JSON is not, or the template refuses them.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        template: &ChatTemplate,
        (chat, kind): (&Chat, &dyn Fn(ItemIdx) -> Modality),
    ) -> Result<Self, PromptError> {
        if chat.messages.is_empty() {
            return Err(PromptError::Invalid("the conversation has no messages".into()));
        }
        let json = GuardedJson::read(chat)?;
        let texts = chat.messages.iter().flat_map(|m| &m.parts).filter_map(text_of);
        let guard = tokenizer.guard(texts.chain(json.texts()))?;
        let json = json.apply(&guard);
        let mut arguments = json.arguments.into_iter();
        let mut message = |message| shaped(message, kind, &guard, &mut arguments);
        let input = TemplateInput {
            messages: chat.messages.iter().map(&mut message).collect(),
            tools: json.tools,
            documents: json.documents,
            variables: json.variables,
            ending: chat.ending,
        };
        let text = match &chat.template {
            Some(source) => template.replaced_by(source)?.render(&input)?,
            None => template.render(&input)?,
        };
        let order = chat.messages.iter().flat_map(|m| &m.parts).filter_map(|part| match part {
            MessagePart::Item(item) => Some(*item),
            _ => None,
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

/// The text of a part that is text; names and ids are short, and are taken with the JSON.
fn text_of(part: &MessagePart) -> Option<&str> {
    match part {
        MessagePart::Text(text) | MessagePart::Reasoning(text) => Some(text),
        MessagePart::Item(_) | MessagePart::ToolCall(_) | MessagePart::ResultOf(_) => None,
    }
}

/// A message as templates see it; `arguments` are those of all calls, in order.
fn shaped<'a>(
    message: &'a Message,
    kind: &dyn Fn(ItemIdx) -> Modality,
    guard: &ControlTokenGuard,
    arguments: &mut impl Iterator<Item = serde_json::Value>,
) -> TemplateMessage<'a> {
    let part = |part: &MessagePart| match part {
        MessagePart::Text(text) => TemplatePart::Text(guard.apply(text)),
        MessagePart::Item(item) => TemplatePart::Item(kind(*item)),
        MessagePart::Reasoning(text) => TemplatePart::Reasoning(guard.apply(text)),
        MessagePart::ToolCall(call) => TemplatePart::ToolCall {
            id: guard.apply(&call.id),
            name: guard.apply(&call.name),
            arguments: arguments.next().unwrap_or_default(),
        },
        MessagePart::ResultOf(call) => {
            TemplatePart::ResultOf { id: guard.apply(&call.id), name: guard.apply(&call.name) }
        }
    };
    TemplateMessage { role: message.role.as_str(), content: message.parts.iter().map(part).collect() }
}

/// Checks that every item is named exactly once.
///
/// # Errors
/// [`PromptError::Invalid`] that names the item.
pub(super) fn check_order(order: &[ItemIdx], n_items: usize) -> Result<(), PromptError> {
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
