//! Tokens to text that may be sent: whole characters, and nothing that might belong to a stop string.
//!
//! The text before a stop string is sent, the stop string and what follows are not. A suffix that could grow
//! into a stop string is held back until it does or cannot. It does not know where tokens come from.

use std::sync::Arc;
use triptych_models::tokenization::{Detokenizer, Tokenizer};

/// The text of one answer.
#[derive(Debug)]
pub struct Writer {
    detokenizer: Detokenizer,
    stops: Vec<String>,
    /// Text that is not sent: a suffix that begins a stop string.
    held: String,
}

/// Text after one more token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Written {
    /// New text, possibly none.
    More(String),
    /// A stop string is complete; this is what came before it.
    Stopped(String),
}

impl Writer {
    /// An empty text. The stop strings are not empty.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Vec<String>) -> Self {
        Self { detokenizer: Detokenizer::new(tokenizer), stops, held: String::new() }
    }

    /// Adds a token.
    pub fn push(&mut self, token: u32) -> Written {
        let piece = self.detokenizer.push(token);
        self.add(&piece)
    }

    /// Adds a token whose text is no part of a stop string: the answer may not end yet.
    pub fn pass(&mut self, token: u32) -> String {
        std::mem::take(&mut self.held) + &self.detokenizer.push(token)
    }

    /// Ends the text: returns what was held back, up to a stop string that only its end completes.
    pub fn finish(&mut self) -> Written {
        let rest = self.detokenizer.finish();
        match self.add(&rest) {
            Written::More(text) => Written::More(text + &std::mem::take(&mut self.held)),
            stopped => stopped,
        }
    }

    fn add(&mut self, piece: &str) -> Written {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return Written::Stopped(std::mem::take(&mut self.held));
        }
        let sure = self.held.len() - self.may_begin_a_stop();
        let rest = self.held.split_off(sure);
        Written::More(std::mem::replace(&mut self.held, rest))
    }

    /// Length of the longest suffix that a stop string begins with.
    fn may_begin_a_stop(&self) -> usize {
        let suffixes = self.held.char_indices().map(|(at, _)| &self.held[at..]);
        let mut open = suffixes.filter(|suffix| self.stops.iter().any(|stop| stop.starts_with(suffix)));
        open.next().map_or(0, str::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of whole strings and single bytes; text is their concatenation.
    fn writer(stops: &[&str]) -> Writer {
        let json = r#"{
            "version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "unk_token": "?", "vocab":
                {"?": 0, "a": 1, "b": 2, "ab": 3, " the": 4, "é": 5, "<0xC3>": 6, "<0xA9>": 7, "xaby": 8}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        }"#;
        let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
        Writer::new(Arc::new(tokenizer), stops.iter().map(|s| (*s).to_owned()).collect())
    }

    /// Pieces as sent, and whether a stop string ended them.
    fn check(stops: &[&str], tokens: &[u32], expect: &[&str], stopped: bool) {
        let mut writer = writer(stops);
        let mut sent = Vec::new();
        for token in tokens {
            match writer.push(*token) {
                Written::More(text) => sent.push(text),
                Written::Stopped(text) => {
                    sent.push(text);
                    assert_eq!((sent, true), (expect.iter().map(|s| (*s).to_owned()).collect(), stopped));
                    return;
                }
            }
        }
        let (text, end) = match writer.finish() {
            Written::More(text) => (text, false),
            Written::Stopped(text) => (text, true),
        };
        sent.push(text);
        assert_eq!((sent, end), (expect.iter().map(|s| (*s).to_owned()).collect(), stopped));
    }

    #[test]
    fn text_goes_out_up_to_the_stop_string_and_no_part_of_it_before() {
        check(&[], &[1, 2, 4], &["a", "b", " the", ""], false);
        check(&["bb"], &[1, 2, 1, 2], &["a", "", "ba", "", "b"], false);
        check(&["bb"], &[1, 2, 2, 1], &["a", "", ""], true);
        check(&["ab"], &[8], &["x"], true);
        check(&["y", "ab"], &[8], &["x"], true);
        check(&["aab"], &[1, 1, 1, 2], &["", "", "a", ""], true);
        check(&["abab", "b"], &[1, 1, 2], &["", "a", "a"], true);
    }

    #[test]
    fn text_that_passes_neither_ends_nor_waits() {
        let mut writer = writer(&["ab", "bb"]);
        assert_eq!([writer.pass(1), writer.pass(2)], ["a", "b"]);
        assert_eq!(writer.push(2), Written::More(String::new()));
        assert_eq!(writer.push(2), Written::Stopped(String::new()));
    }

    #[test]
    fn a_character_in_two_tokens_goes_out_whole() {
        check(&[], &[6, 7, 1], &["", "é", "a", ""], false);
        check(&["é"], &[1, 6, 7], &["a", "", ""], true);
        check(&[], &[1, 6], &["a", "", "\u{FFFD}"], false);
    }
}
