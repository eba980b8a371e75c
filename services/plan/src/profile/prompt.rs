//! Layout of the model's template, found with prompts that differ in one part.

use crate::curves::{ItemsAt, PromptSpec};
use triptych_core::prompt::{Message, MessagePart, Prompt, Role, TextOrTokens};
use triptych_core::{EncodedItem, ItemIdx};
use triptych_models::Model;
use triptych_models::prompt::PreparedSequence;

/// Layout of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Tokens of the template, and the place of the items.
    pub spec: PromptSpec,
    /// Number of the output of an item that is cross-attended to.
    pub cross: Option<usize>,
}

/// Layout of a chat with an item before its text, of which each tower has an output in `outputs`. A family without chats begins
/// with its own start, with the item in its encoder.
pub fn layout(model: &Model, outputs: &[EncodedItem]) -> Layout {
    let prepared = |prompt: Prompt, items: &[EncodedItem]| {
        model.prompts().prepare(&prompt, items).ok().and_then(|all| all.into_iter().next())
    };
    let chat = |text: &str, items: &[EncodedItem]| {
        let item = (!items.is_empty()).then_some(MessagePart::Item(ItemIdx(0)));
        let parts = item.into_iter().chain([MessagePart::Text(text.to_owned())]).collect();
        prepared(Prompt::Chat(vec![Message { role: Role::User, parts }].into()), items)
    };
    if let (Some(one), Some(other)) = (chat("a", outputs), chat("b", outputs)) {
        return between(&one, &other, chat("a", &[]).as_ref());
    }
    let start = prepared(Prompt::Singleton(TextOrTokens::Tokens(Vec::new())), outputs);
    let before = start.map_or(0, |start| start.tokens.len() as u32);
    Layout { spec: PromptSpec { before, around_item: 0, after: 0, items: ItemsAt::Cross }, cross: Some(0) }
}

/// Layout from two prompts with an item and different texts, and from one without an item.
fn between(one: &PreparedSequence, other: &PreparedSequence, alone: Option<&PreparedSequence>) -> Layout {
    let a = &one.tokens;
    let b = &other.tokens;
    let same = |(x, y): &(&u32, &u32)| x == y;
    let n_before = a.iter().zip(b).take_while(same).count() as u32;
    let n_after = a.iter().rev().zip(b.iter().rev()).take_while(same).count() as u32;
    let n_item: u32 = one.spans.iter().map(|span| span.n_tokens).sum();
    let n_alone = alone.map_or(a.len(), |alone| alone.tokens.len()) as u32;
    let around_item = (a.len() as u32).saturating_sub(n_alone + n_item);
    let cross = one.cross.first().map(|cross| cross.item.0 as usize);
    let spec = PromptSpec {
        before: n_before.saturating_sub(n_item + around_item),
        around_item,
        after: n_after,
        items: if cross.is_some() && one.spans.is_empty() { ItemsAt::Cross } else { ItemsAt::Front },
    };
    Layout { spec, cross }
}

#[cfg(test)]
mod tests {
    use super::super::items::{item_file, read};
    use super::*;
    use triptych_core::{ContentKey, DType, Fingerprint, Modality};
    use triptych_models::{LoadFormat, ModelSource};

    fn model(name: &str) -> Model {
        let dir = format!("{}/../../tests/models/{name}", env!("CARGO_MANIFEST_DIR"));
        Model::open(&ModelSource { dir: dir.into(), name: None, format: LoadFormat::default(), packed: None })
            .expect("a sample model")
    }

    /// An item of the size as the model would describe it.
    fn item(model: &Model, modality: Modality, size: u32) -> EncodedItem {
        let file = item_file(modality, size);
        let input = read(model.preprocess().as_ref(), modality, &file).expect("an item that the model reads");
        EncodedItem {
            key: ContentKey::from_bytes([7; 32]),
            fingerprint: Fingerprint::from_bytes([0; 32]),
            modality,
            n_tokens: input.n_tokens,
            hidden: 8,
            dtype: DType::F32,
            extent: input.extent,
            checksum: [0; 32],
        }
    }

    #[test]
    fn parts_of_a_chat_add_up_to_the_whole() {
        let model = model("shapes-qwen2-vl");
        let image = |side| item(&model, Modality::Image, side);
        let layout = layout(&model, &[image(112)]).spec;
        assert_eq!(layout.items, ItemsAt::Front);
        assert!(layout.before > 0 && layout.after > 0 && layout.around_item >= 2, "{layout:?}");
        // A text of two tokens, of two items: what the layout was not made of.
        let parts =
            [MessagePart::Item(ItemIdx(0)), MessagePart::Item(ItemIdx(1)), MessagePart::Text("ab".into())];
        let chat = Prompt::Chat(vec![Message { role: Role::User, parts: parts.to_vec() }].into());
        let items = [image(112), image(224)];
        let prepared = model.prompts().prepare(&chat, &items).expect("a prompt");
        let text = model.tokenizer().encode("ab").expect("tokens").len();
        let n_items = items[0].n_tokens + items[1].n_tokens;
        let expect = layout.before + 2 * layout.around_item + layout.after + n_items + text as u32;
        assert_eq!(prepared[0].tokens.len() as u32, expect, "{layout:?}");
    }

    #[test]
    fn an_item_in_the_encoder_is_no_part_of_the_prompt() {
        let model = model("digits-whisper");
        let Layout { spec: layout, cross } = layout(&model, &[item(&model, Modality::Audio, 1000)]);
        assert_eq!(cross, Some(0));
        assert_eq!((layout.items, layout.around_item), (ItemsAt::Cross, 0));
        assert!(layout.before > 0, "{layout:?}");
    }
}
