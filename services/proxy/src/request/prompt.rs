//! Checks of every prompt, for any model: it is not empty, and it fits the items.

use super::chat;
use super::item::Item;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::{Failure, Modality};

/// Checks a prompt beside its items.
pub(super) fn check(prompt: &Prompt, items: &[Item]) -> Result<(), Failure> {
    match prompt {
        Prompt::Chat(chat) => chat::check(chat, items),
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

#[cfg(test)]
mod tests {
    use super::super::item::Source;
    use super::*;
    use triptych_core::prompt::{Message, MessagePart, Role, SpeechTask};
    use triptych_core::{ItemIdx, ItemOptions};

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
        Prompt::Chat(vec![Message { role: Role::User, parts }].into())
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
            (Prompt::Chat(vec![].into()), &[], Some("messages is empty")),
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
