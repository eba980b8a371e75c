//! Checks of every prompt, for any model: it is not empty, and it fits the items.

use super::item::{Item, param_of_item};
use triptych_core::prompt::{Message, MessagePart, Prompt, TextOrTokens};
use triptych_core::{Failure, ItemIdx, Modality};

/// Checks a prompt beside its items.
pub(super) fn check(prompt: &Prompt, items: &[Item]) -> Result<(), Failure> {
    match prompt {
        Prompt::Chat(messages) => check_chat(messages, items),
        Prompt::Singleton(text) if items.is_empty() => check_text(text, "prompt"),
        Prompt::Singleton(_) => Ok(()),
        Prompt::Explicit { encoder: None, .. } if items.len() != 1 => Err(Failure::invalid(format!(
            "a prompt without an encoder part needs exactly 1 item, the request has {}",
            items.len()
        ))
        .with_param("prompt.explicit.encoder")),
        Prompt::Explicit { encoder: Some(text), .. } if items.is_empty() => {
            check_text(text, "prompt.explicit.encoder")
        }
        // Beside an item there may be nothing to say.
        Prompt::Explicit { .. } => Ok(()),
        Prompt::Speech(_) => check_speech(items),
    }
}

fn check_text(text: &TextOrTokens, param: &str) -> Result<(), Failure> {
    let empty = match text {
        TextOrTokens::Text(text) => text.trim().is_empty(),
        TextOrTokens::Tokens(ids) => ids.is_empty(),
    };
    if empty { Err(Failure::invalid("the prompt is empty").with_param(param)) } else { Ok(()) }
}

fn check_speech(items: &[Item]) -> Result<(), Failure> {
    match items {
        [item] if item.modality == Modality::Audio => Ok(()),
        [item] => Err(Failure::invalid(format!("a speech task needs audio, the item is {}", item.modality))
            .with_param(&*item.param)),
        _ => Err(Failure::invalid(format!(
            "a speech task needs exactly 1 audio item, the request has {}",
            items.len()
        ))
        .with_param("items")),
    }
}

fn check_chat(messages: &[Message], items: &[Item]) -> Result<(), Failure> {
    if messages.is_empty() {
        return Err(
            Failure::invalid("messages is empty, at least one message is needed").with_param("messages")
        );
    }
    let mut named = 0;
    let mut has_text = false;
    for (m, message) in messages.iter().enumerate() {
        for (p, part) in message.parts.iter().enumerate() {
            match part {
                MessagePart::Text(text) => has_text |= !text.trim().is_empty(),
                MessagePart::Item(idx) => {
                    check_next(*idx, named, items)
                        .map_err(|f| f.with_param(format!("messages[{m}].parts[{p}]")))?;
                    named += 1;
                }
            }
        }
    }
    if let Some(unused) = items.get(named) {
        let message =
            format!("{} is not named by any part of a message", param_of_item(ItemIdx(named as u32)));
        return Err(Failure::invalid(message).with_param(&*unused.param));
    }
    if !has_text && items.is_empty() {
        return Err(
            Failure::invalid("the prompt is empty: no message has text or an item").with_param("messages")
        );
    }
    Ok(())
}

/// Parts name the items in order, each once: what comes first in the list comes first in the prompt.
fn check_next(idx: ItemIdx, next: usize, items: &[Item]) -> Result<(), Failure> {
    if idx.0 as usize >= items.len() {
        return Err(Failure::invalid(format!(
            "the part names {}, the request has {} items",
            param_of_item(idx),
            items.len()
        )));
    }
    if idx.0 as usize != next {
        return Err(Failure::invalid(format!(
            "the part names {}, expected is {}: parts name items in order, each once",
            param_of_item(idx),
            param_of_item(ItemIdx(next as u32))
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::item::Source;
    use super::*;
    use triptych_core::ItemOptions;
    use triptych_core::prompt::{Role, SpeechTask};

    fn items(modalities: &[Modality]) -> Vec<Item> {
        let item = |(i, m): (usize, &Modality)| Item {
            modality: *m,
            source: Source::Bytes("x".into()),
            options: ItemOptions::default(),
            param: format!("items[{i}]"),
        };
        modalities.iter().enumerate().map(item).collect()
    }

    fn chat(parts: Vec<MessagePart>) -> Prompt {
        Prompt::Chat(vec![Message { role: Role::User, parts }])
    }

    fn text(text: &str) -> TextOrTokens {
        TextOrTokens::Text(text.into())
    }

    #[test]
    fn prompts_fit_their_items() {
        use Modality::{Audio, Image};
        let item = |i| MessagePart::Item(ItemIdx(i));
        let hello = || MessagePart::Text("hello".into());
        let cases: Vec<(Prompt, &[Modality], Option<&str>)> = vec![
            (chat(vec![hello()]), &[], None),
            (chat(vec![item(0), hello(), item(1)]), &[Image, Image], None),
            (Prompt::Chat(vec![]), &[], Some("messages is empty")),
            (chat(vec![]), &[], Some("the prompt is empty")),
            (chat(vec![MessagePart::Text(" \n".into())]), &[], Some("the prompt is empty")),
            (chat(vec![item(0)]), &[], Some("the part names items[0], the request has 0 items")),
            (chat(vec![item(1), item(0)]), &[Image, Image], Some("expected is items[0]")),
            (chat(vec![item(0), item(0)]), &[Image], Some("expected is items[1]")),
            (chat(vec![hello()]), &[Image], Some("items[0] is not named")),
            (Prompt::Singleton(text("")), &[], Some("the prompt is empty")),
            (Prompt::Singleton(TextOrTokens::Tokens(vec![])), &[], Some("the prompt is empty")),
            (Prompt::Singleton(text("")), &[Image], None),
            (Prompt::Explicit { encoder: None, decoder: text("") }, &[], Some("exactly 1 item")),
            (Prompt::Explicit { encoder: Some(text("a")), decoder: text("") }, &[Image], None),
            (Prompt::Explicit { encoder: Some(text("a")), decoder: text("") }, &[], None),
            (Prompt::Speech(SpeechTask::default()), &[Audio], None),
            (Prompt::Speech(SpeechTask::default()), &[Image], Some("needs audio, the item is image")),
            (Prompt::Speech(SpeechTask::default()), &[], Some("exactly 1 audio item")),
        ];
        for (prompt, modalities, expect) in cases {
            let found = check(&prompt, &items(modalities)).err().map(|f| f.message);
            match (expect, &found) {
                (None, None) => {}
                (Some(part), Some(message)) if message.contains(part) => {}
                _ => panic!("{prompt:?}: expected {expect:?}, found {found:?}"),
            }
        }
    }
}
