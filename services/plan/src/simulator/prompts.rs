//! Prompts of requests: made-up text, and items in their places. Content that repeats in the workload repeats here:
//! the same content is the same key, and a conversation that goes on begins with what was said.

use super::output::ROW_BYTES;
use super::spec::{ItemsAt, PromptSpec};
use crate::curves::VOCAB;
use std::sync::Arc;
use triptych_bench::offered::{ConversationTurn, ItemShape, Offered, OfferedItem, TextBlocks};
use triptych_core::prompt::{Message, MessagePart, Prompt, Role};
use triptych_core::{ContentKey, EncodedItem, EncoderOutput, ItemIdx, Modality, TowerIdx};
use triptych_models::prompt::{CrossInput, ItemSpan, OutputKind, PreparedSequence};
use triptych_models::rules::LogitRules;

/// The stream of the template's tokens, which are the same everywhere.
const TEMPLATE: u64 = u64::MAX;
/// Letters of four of which a token is written.
const LETTERS: &[u8; 16] = b"abcdefghijklmnop";

/// The text of a request or conversation, endless: its tokens are a function of the stream and their place, or of the block
/// that they are in where other requests may have it too.
#[derive(Clone, Debug)]
pub(super) struct Stream {
    own: u64,
    /// Blocks of the text, and its tokens: an answer is in none.
    blocks: Option<(TextBlocks, u32)>,
}

impl Stream {
    /// Of a request: its own, or its conversation's.
    pub(super) fn of(offered: &Offered) -> Self {
        let own = match &offered.session {
            Some(session) => mix(session.id.wrapping_mul(2)),
            None => mix(offered.index.wrapping_mul(2).wrapping_add(1)),
        };
        Self { own, blocks: offered.blocks.clone().map(|blocks| (blocks, offered.text_tokens)) }
    }

    /// The token at a place.
    pub(super) fn token(&self, place: u32) -> u32 {
        let block = self.blocks.as_ref().filter(|(_, n)| place < *n).and_then(|(blocks, _)| {
            let id = blocks.ids.get((place / blocks.tokens) as usize)?;
            Some((mix(*id), place % blocks.tokens))
        });
        let (stream, place) = block.unwrap_or((self.own, place));
        (mix(stream ^ u64::from(place).wrapping_mul(0x9e37_79b9_7f4a_7c15)) % VOCAB as u64) as u32
    }
}

/// The finisher of MurmurHash3: every bit of the result depends on all of the input.
fn mix(mut x: u64) -> u64 {
    for factor in [0xff51_afd7_ed55_8ccd, 0xc4ce_b9fe_1a85_ec53] {
        x = (x ^ (x >> 33)).wrapping_mul(factor);
    }
    x ^ (x >> 33)
}

/// The key of an item's output: of its content and shape, and of the tower.
pub(super) fn key_of(item: &OfferedItem, tower: TowerIdx) -> ContentKey {
    let (kind, a, b) = match item.shape {
        ItemShape::Image { width, height } => (1_u32, width, height),
        ItemShape::Audio { millis } => (2, millis, 0),
    };
    let mut bytes = [0; 32];
    let parts = [
        mix(item.content),
        item.content,
        u64::from(kind) << 32 | u64::from(a),
        u64::from(tower.0) << 32 | u64::from(b),
    ];
    for (place, part) in bytes.chunks_exact_mut(8).zip(parts) {
        place.copy_from_slice(&part.to_le_bytes());
    }
    ContentKey::from_bytes(bytes)
}

/// True if an item is among those of which the store has the outputs from the start, a given part of all.
pub(super) fn is_stored(item: &OfferedItem, part: f64) -> bool {
    // Other bits than those that the text of a request is made of.
    ((mix(item.content ^ 0x5107_ed00) >> 11) as f64) < part * (1_u64 << 53) as f64
}

/// The item's modality.
pub(super) fn modality_of(item: &OfferedItem) -> Modality {
    match item.shape {
        ItemShape::Image { .. } => Modality::Image,
        ItemShape::Audio { .. } => Modality::Audio,
    }
}

/// An output whose rows are all nothing.
pub(super) fn sealed(item: EncodedItem) -> EncoderOutput {
    let rows: Arc<[u8]> = vec![0; item.n_tokens as usize * item.hidden as usize * ROW_BYTES].into();
    EncoderOutput::seal(item, rows).expect("as many bytes as the description says")
}

/// The turns of a request: those of its conversation, or itself as one.
fn turns(offered: &Offered) -> Vec<ConversationTurn> {
    match &offered.session {
        Some(session) => session.turns.clone(),
        None => vec![ConversationTurn {
            text_tokens: offered.text_tokens,
            n_items: offered.items.len() as u32,
            answer_tokens: offered.output_tokens,
        }],
    }
}

/// The prompt as the proxy reads it: a chat, a token being four letters.
pub(super) fn chat(offered: &Offered, spec: &PromptSpec) -> Prompt {
    let stream = Stream::of(offered);
    let (mut place, mut item) = (0, 0);
    let mut messages = Vec::new();
    let turns = turns(offered);
    for (i, turn) in turns.iter().enumerate() {
        let text = MessagePart::Text(letters(&stream, place..place + turn.text_tokens));
        let items = (item..item + turn.n_items as usize).map(|i| MessagePart::Item(ItemIdx(i as u32)));
        let parts = match spec.items {
            ItemsAt::Back => std::iter::once(text).chain(items).collect(),
            ItemsAt::Front | ItemsAt::Cross => items.chain([text]).collect(),
        };
        messages.push(Message { role: Role::User, parts });
        (place, item) = (place + turn.text_tokens, item + turn.n_items as usize);
        if i + 1 < turns.len() {
            let text = letters(&stream, place..place + turn.answer_tokens);
            messages.push(Message { role: Role::Assistant, parts: vec![MessagePart::Text(text)] });
            place += turn.answer_tokens;
        }
    }
    Prompt::Chat(messages.into())
}

fn letters(stream: &Stream, places: std::ops::Range<u32>) -> String {
    let token = |place| {
        let token = stream.token(place);
        [12, 8, 4, 0].map(|shift| char::from(LETTERS[(token >> shift & 15) as usize]))
    };
    places.flat_map(token).collect()
}

/// Rows of an output, and whether they are cross-attended to whatever stands among the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutputRows {
    pub(super) n: u32,
    pub(super) is_cross_attended: bool,
}

/// A prompt as a PD worker lays it out, of items with as many outputs each as there are towers, and where in the text's
/// stream the answer goes on.
pub(super) fn laid_out(
    offered: &Offered,
    outputs: &[OutputRows],
    spec: &PromptSpec,
) -> (PreparedSequence, u32) {
    let n_towers = (outputs.len() / offered.items.len().max(1)).max(1);
    let n_items = outputs.len() / n_towers;
    let is_cross = |output: &OutputRows| spec.items == ItemsAt::Cross || output.is_cross_attended;
    let mut writer = Writer { stream: Stream::of(offered), tokens: Vec::new(), place: 0, spans: Vec::new() };
    writer.template(spec.before);
    let turns = turns(offered);
    let mut item = 0;
    for (i, turn) in turns.iter().enumerate() {
        let items = item..(item + turn.n_items as usize).min(n_items);
        item = items.end;
        if spec.items == ItemsAt::Back {
            writer.text(turn.text_tokens);
        }
        for i in items.filter(|_| spec.items != ItemsAt::Cross) {
            let outputs = outputs.iter().enumerate().skip(i * n_towers).take(n_towers);
            writer.item(outputs.filter(|(_, output)| !is_cross(output)), spec.around_item);
        }
        if spec.items != ItemsAt::Back {
            writer.text(turn.text_tokens);
        }
        writer.template(spec.after);
        if i + 1 < turns.len() {
            writer.text(turn.answer_tokens);
        }
    }
    let Writer { tokens, place, spans, .. } = writer;
    let n = tokens.len() as u32;
    let cross = outputs.iter().enumerate().find(|(_, output)| is_cross(output));
    let cross = cross.map(|(i, output)| CrossInput {
        item: ItemIdx(i as u32),
        first_row: 0,
        n_rows: output.n,
        first_token: 0,
    });
    let cross = cross.into_iter().collect();
    let prepared = PreparedSequence {
        // A prompt without a token cannot be answered.
        tokens: if tokens.is_empty() { vec![0] } else { tokens },
        positions: (0..n.max(1)).map(|i| [i; 3]).collect(),
        next_position: n.max(1),
        spans,
        cross,
        rules: LogitRules::default(),
        end_tokens: Vec::new(),
        output: OutputKind::Text,
    };
    (prepared, place)
}

/// A prompt in the making.
struct Writer {
    stream: Stream,
    tokens: Vec<u32>,
    place: u32,
    spans: Vec<ItemSpan>,
}

impl Writer {
    fn template(&mut self, n: u32) {
        let template = Stream { own: TEMPLATE, blocks: None };
        self.tokens.extend((0..n).map(|i| template.token(i)));
    }

    fn text(&mut self, n: u32) {
        let (stream, first) = (&self.stream, self.place);
        self.tokens.extend((0..n).map(|i| stream.token(first + i)));
        self.place += n;
    }

    /// An item's outputs, with half of what the template puts around it before it.
    fn item<'a>(&mut self, outputs: impl Iterator<Item = (usize, &'a OutputRows)>, around: u32) {
        self.template(around / 2);
        for (i, output) in outputs {
            let first_token = self.tokens.len() as u32;
            let (item, n_tokens) = (ItemIdx(i as u32), output.n);
            self.spans.push(ItemSpan { item, first_row: 0, first_token, n_tokens });
            self.tokens.extend((0..n_tokens).map(|_| 0));
        }
        self.template(around - around / 2);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use triptych_bench::offered::Session;
    use triptych_proxy::decisions::prefix::Prefixes;

    const ROWS: [OutputRows; 2] =
        [OutputRows { n: 10, is_cross_attended: false }, OutputRows { n: 20, is_cross_attended: false }];

    fn offered(index: u64, turns: Option<Vec<ConversationTurn>>) -> Offered {
        let text_tokens = 40;
        let item = |content| OfferedItem { content, shape: ItemShape::Image { width: 64, height: 64 } };
        let items = vec![item(1), item(2)];
        let session = turns.map(|turns| Session { id: 7, turns });
        Offered {
            index,
            at: Duration::ZERO,
            text_tokens,
            output_tokens: 8,
            items,
            session,
            blocks: None,
            slo: None,
        }
    }

    #[test]
    fn prompts_with_the_same_blocks_begin_with_the_same_tokens() {
        let of = |index, ids: &[u64]| {
            let tokens = std::num::NonZeroU32::MIN.saturating_add(3);
            let blocks = Some(TextBlocks { tokens, ids: ids.into() });
            let offered = Offered { text_tokens: 10, items: Vec::new(), blocks, ..offered(index, None) };
            laid_out(&offered, &[], &PromptSpec { before: 0, after: 0, ..PromptSpec::default() }).0.tokens
        };
        let (a, b) = (of(1, &[7, 8, 9]), of(2, &[7, 8, 5]));
        assert_eq!((a.len(), &a[..8]), (10, &b[..8]));
        assert_ne!(a[8..], b[8..]);
        let answer = |index| Stream::of(&Offered { blocks: None, ..offered(index, None) }).token(10);
        assert_ne!(answer(1), answer(2), "an answer is the request's own");
    }

    #[test]
    fn items_stand_where_they_are_told_to() {
        let spec = PromptSpec { before: 3, around_item: 2, after: 1, items: ItemsAt::Front };
        for (items, expect) in
            [(ItemsAt::Front, vec![4, 16]), (ItemsAt::Back, vec![44, 56]), (ItemsAt::Cross, vec![])]
        {
            let (laid_out, place) = laid_out(&offered(0, None), &ROWS, &PromptSpec { items, ..spec });
            let firsts: Vec<_> = laid_out.spans.iter().map(|span| span.first_token).collect();
            let n_items = if items == ItemsAt::Cross { 0 } else { 2 + 10 + 2 + 20 };
            assert_eq!(
                (firsts, laid_out.tokens.len(), place),
                (expect, 3 + 40 + 1 + n_items, 40),
                "{items:?}"
            );
            assert_eq!(
                laid_out.cross.first().map(|cross| cross.n_rows),
                (items == ItemsAt::Cross).then_some(10)
            );
        }
    }

    #[test]
    fn each_tower_of_an_item_has_an_output_among_the_tokens_or_beside_them() {
        let offered = Offered { items: offered(0, None).items[..1].to_vec(), ..offered(0, None) };
        let spec = PromptSpec { before: 3, around_item: 2, after: 1, items: ItemsAt::Front };
        let spans = |outputs: &[OutputRows]| {
            let (laid_out, _) = laid_out(&offered, outputs, &spec);
            let spans = laid_out.spans.iter().map(|span| (span.item.0, span.first_token)).collect::<Vec<_>>();
            (spans, laid_out.cross.first().map(|cross| (cross.item.0, cross.n_rows)))
        };
        assert_eq!(spans(&ROWS), (vec![(0, 4), (1, 14)], None));
        let second = OutputRows { is_cross_attended: true, ..ROWS[1] };
        assert_eq!(spans(&[ROWS[0], second]), (vec![(0, 4)], Some((1, 20))));
        let item = &offered.items[0];
        assert_ne!(key_of(item, TowerIdx(0)), key_of(item, TowerIdx(1)));
        assert_eq!((is_stored(item, 0.0), is_stored(item, 1.0)), (false, true));
    }

    #[test]
    fn a_conversation_that_goes_on_begins_with_what_was_said_and_written() {
        let (first, second) = (
            ConversationTurn { text_tokens: 40, n_items: 2, answer_tokens: 8 },
            ConversationTurn { text_tokens: 5, n_items: 0, answer_tokens: 9 },
        );
        let spec = PromptSpec { after: 0, ..PromptSpec::default() };
        let (before, place) = laid_out(&offered(0, Some(vec![first])), &ROWS, &spec);
        let (after, _) = laid_out(&offered(9, Some(vec![first, second])), &ROWS, &spec);
        let mut known = before.tokens.clone();
        known.extend((0..8).map(|i| Stream::of(&offered(0, Some(vec![first]))).token(place + i)));
        assert_eq!(after.tokens[..known.len()], known);
        assert_eq!(after.tokens.len(), known.len() + 5);
        let (other, _) = laid_out(&offered(1, None), &ROWS, &spec);
        assert_ne!(other.tokens, before.tokens, "another request says something else");
    }

    #[test]
    fn the_proxy_sees_a_prompt_of_about_as_many_tokens() {
        let prompt = chat(&offered(0, None), &PromptSpec::default());
        let keys: Vec<_> = offered(0, None).items.iter().map(|item| key_of(item, TowerIdx(0))).collect();
        assert_eq!(Prefixes::of(b"", &prompt, &keys).n_tokens(), 40);
        assert_ne!(keys[0], keys[1]);
    }
}
