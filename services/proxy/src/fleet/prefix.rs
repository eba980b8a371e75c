//! A bounded table of prompts' beginnings, and the PD worker that read each of them last.
//!
//! A prompt is cut into pieces of text, and each beginning has a digest; who computed the keys and values of one may
//! have them still. The tenant and the items are in the digests, as they are in the workers' own keys. It is an estimate
//! that costs nothing when it is wrong: a worker that forgot computes again.

use std::collections::{HashMap, VecDeque};
use triptych_core::prompt::{Message, MessagePart, Prompt, TextOrTokens, Tool};
use triptych_core::{ContentKey, WorkerId};

/// Bytes of text between two digests.
const PIECE: u64 = 256;
/// Beginnings of one prompt that are remembered: what follows is rarely shared.
const N_PIECES: usize = 128;
/// Beginnings that are remembered in all.
const N_KEPT: usize = 1 << 16;
/// Bytes of text for each token, roughly, in most languages and vocabularies.
const BYTES_PER_TOKEN: u64 = 4;

/// A prompt's beginnings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prefixes {
    /// After each piece, of all that came before.
    digests: Vec<u64>,
    len: u64,
}

impl Prefixes {
    /// Of a prompt whose parts name these items.
    pub fn of(tenant: &[u8], prompt: &Prompt, items: &[ContentKey]) -> Self {
        let mut writer = Writer::new(tenant);
        match prompt {
            Prompt::Chat(chat) => {
                chat.tools.iter().for_each(|tool| writer.tool(tool));
                chat.template_kwargs.iter().for_each(|text| writer.mark(text.as_bytes()));
                chat.messages.iter().for_each(|m| writer.message(m, items));
            }
            Prompt::Singleton(text) => writer.text(text),
            Prompt::Explicit { encoder, decoder } => {
                encoder.iter().for_each(|text| writer.text(text));
                items.iter().for_each(|key| writer.mark(key.as_bytes()));
                writer.text(decoder);
            }
            // The audio decides, and its windows have nothing in common.
            Prompt::Speech(_) => items.iter().for_each(|key| writer.mark(key.as_bytes())),
        }
        writer.prefixes
    }

    /// Tokens of the whole, roughly.
    pub fn n_tokens(&self) -> u64 {
        self.len / BYTES_PER_TOKEN
    }
}

/// Hashes a prompt as it is read.
struct Writer {
    hasher: blake3::Hasher,
    prefixes: Prefixes,
}

impl Writer {
    fn new(tenant: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(tenant.len() as u64).to_le_bytes()).update(tenant);
        Self { hasher, prefixes: Prefixes::default() }
    }

    /// A part that is no text: it tells beginnings apart and ends none.
    fn mark(&mut self, bytes: &[u8]) {
        self.hasher.update(&[0xff]).update(bytes);
    }

    fn message(&mut self, message: &Message, items: &[ContentKey]) {
        self.mark(message.role.as_str().as_bytes());
        for part in &message.parts {
            match part {
                MessagePart::Text(text) | MessagePart::Reasoning(text) => self.bytes(text.as_bytes()),
                MessagePart::ToolCall(call) => {
                    self.mark(call.name.as_bytes());
                    self.bytes(call.arguments.as_bytes());
                }
                MessagePart::ResultOf(call) => self.mark(call.name.as_bytes()),
                MessagePart::Item(i) => {
                    if let Some(key) = items.get(i.0 as usize) {
                        self.mark(key.as_bytes());
                    }
                }
            }
        }
    }

    fn tool(&mut self, tool: &Tool) {
        self.mark(tool.name.as_bytes());
        for text in [&tool.description, &tool.parameters].into_iter().flatten() {
            self.bytes(text.as_bytes());
        }
    }

    fn text(&mut self, text: &TextOrTokens) {
        self.mark(&[]);
        match text {
            TextOrTokens::Text(text) => self.bytes(text.as_bytes()),
            // A token is as long as it is in the count of tokens.
            TextOrTokens::Tokens(ids) => ids.iter().for_each(|id| self.bytes(&id.to_le_bytes())),
        }
    }

    fn bytes(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = PIECE - self.prefixes.len % PIECE;
            let take = usize::try_from(room).unwrap_or(usize::MAX).min(bytes.len());
            let (piece, rest) = bytes.split_at(take);
            self.hasher.update(piece);
            self.prefixes.len += take as u64;
            bytes = rest;
            if self.prefixes.len.is_multiple_of(PIECE) && self.prefixes.digests.len() < N_PIECES {
                let digest = self.hasher.finalize();
                let [a, b, c, d, e, f, g, h, ..] = *digest.as_bytes();
                self.prefixes.digests.push(u64::from_le_bytes([a, b, c, d, e, f, g, h]));
            }
        }
    }
}

/// The last reader of each beginning.
#[derive(Debug, Default)]
pub struct PrefixTable {
    readers: HashMap<u64, WorkerId>,
    /// The oldest first. Each digest once.
    order: VecDeque<u64>,
}

impl PrefixTable {
    /// The worker that read the longest beginning of this prompt, and that beginning's tokens.
    pub fn reader(&self, prefixes: &Prefixes) -> Option<(&WorkerId, u64)> {
        let longest = prefixes.digests.iter().enumerate().rev();
        let mut found = longest.filter_map(|(i, digest)| Some((i as u64 + 1, self.readers.get(digest)?)));
        found.next().map(|(n_pieces, worker)| (worker, n_pieces * PIECE / BYTES_PER_TOKEN))
    }

    /// This worker reads the prompt.
    pub fn read(&mut self, prefixes: &Prefixes, worker: &WorkerId) {
        for digest in &prefixes.digests {
            if self.readers.insert(*digest, worker.clone()).is_some() {
                continue;
            }
            self.order.push_back(*digest);
            if self.order.len() > N_KEPT
                && let Some(oldest) = self.order.pop_front()
            {
                self.readers.remove(&oldest);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use triptych_core::ItemIdx;
    use triptych_core::prompt::Role;

    fn chat(texts: &[&str]) -> Prompt {
        let message = |text: &&str| Message {
            role: Role::User,
            parts: vec![MessagePart::Item(ItemIdx(0)), MessagePart::Text((*text).to_owned())],
        };
        Prompt::Chat(texts.iter().map(message).collect::<Vec<_>>().into())
    }

    fn key(byte: u8) -> ContentKey {
        ContentKey::from_bytes([byte; 32])
    }

    #[test]
    fn a_conversation_that_goes_on_is_known_by_its_beginning_and_by_nothing_else() {
        let long = "word ".repeat(300);
        let begun = Prefixes::of(b"t", &chat(&[&long]), &[key(1)]);
        let mut table = PrefixTable::default();
        let worker = WorkerId::new("pd@a:1");
        assert_eq!(table.reader(&begun), None);
        table.read(&begun, &worker);
        let goes_on = Prefixes::of(b"t", &chat(&[&long, "and then?"]), &[key(1)]);
        assert_eq!(table.reader(&goes_on), Some((&worker, 5 * PIECE / BYTES_PER_TOKEN)));
        for other in [
            Prefixes::of(b"other", &chat(&[&long]), &[key(1)]),
            Prefixes::of(b"t", &chat(&[&long]), &[key(2)]),
            Prefixes::of(b"t", &chat(&[&"other ".repeat(300)]), &[key(1)]),
            Prefixes::of(b"t", &chat(&["short"]), &[key(1)]),
        ] {
            assert_eq!(table.reader(&other), None);
        }
        assert_eq!(begun.n_tokens(), 375);
    }

    #[test]
    fn the_table_is_bounded_and_forgets_the_oldest() {
        let prompt = |n: usize| Prompt::Singleton(TextOrTokens::Text(format!("{n:0256}")));
        let mut table = PrefixTable::default();
        let worker = WorkerId::new("pd@a:1");
        for n in 0..=N_KEPT {
            table.read(&Prefixes::of(b"", &prompt(n), &[]), &worker);
        }
        assert_eq!((table.order.len(), table.readers.len()), (N_KEPT, N_KEPT));
        assert_eq!(table.reader(&Prefixes::of(b"", &prompt(0), &[])), None);
        assert!(table.reader(&Prefixes::of(b"", &prompt(N_KEPT), &[])).is_some());
    }
}
