//! Tokens to text that may be sent: whole characters, and no part of a stop string.
//!
//! The text before a stop string is sent, the stop string and what follows are not. A suffix that could grow
//! into a stop string is held back until it does or cannot.

use std::sync::Arc;
use triptych_models::tokenization::{Detokenizer, Tokenizer};

/// Incremental text of one completion, up to its first stop string.
#[derive(Clone, Debug)]
pub struct StopDetokenizer {
    detokenizer: Detokenizer,
    stops: Vec<String>,
    /// Unsent suffix that may begin a stop string.
    held: String,
}

/// Text released by a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedText {
    /// New text, possibly empty.
    More(String),
    /// Text before a stop string, which is complete.
    Stopped(String),
}

impl StopDetokenizer {
    /// An empty text. The stop strings are not empty.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Vec<String>) -> Self {
        Self { detokenizer: Detokenizer::new(tokenizer), stops, held: String::new() }
    }

    /// Adds a token.
    pub fn push(&mut self, token: u32) -> DecodedText {
        let piece = self.detokenizer.push(token);
        self.add(&piece)
    }

    /// Adds a token without a check for stop strings: the completion may not end yet.
    pub fn pass(&mut self, token: u32) -> String {
        std::mem::take(&mut self.held) + &self.detokenizer.push(token)
    }

    /// Ends the text: returns the held suffix, up to a stop string that only the end completes.
    pub fn finish(&mut self) -> DecodedText {
        let rest = self.detokenizer.finish();
        match self.add(&rest) {
            DecodedText::More(text) => DecodedText::More(text + &std::mem::take(&mut self.held)),
            stopped => stopped,
        }
    }

    fn add(&mut self, piece: &str) -> DecodedText {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return DecodedText::Stopped(std::mem::take(&mut self.held));
        }
        let sure = self.held.len() - self.may_begin_a_stop();
        let rest = self.held.split_off(sure);
        DecodedText::More(std::mem::replace(&mut self.held, rest))
    }

    /// Length in bytes of the longest suffix that begins a stop string.
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
    fn detokenizer(stops: &[&str]) -> StopDetokenizer {
        let json = r#"{
            "version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "unk_token": "?", "vocab":
                {"?": 0, "a": 1, "b": 2, "ab": 3, " the": 4, "é": 5, "<0xC3>": 6, "<0xA9>": 7, "xaby": 8}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        }"#;
        let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
        StopDetokenizer::new(Arc::new(tokenizer), stops.iter().map(|s| (*s).to_owned()).collect())
    }

    /// Compares the sent pieces, and whether a stop string ended them.
    fn check(stops: &[&str], tokens: &[u32], expect: &[&str], stopped: bool) {
        let mut detokenizer = detokenizer(stops);
        let mut sent = Vec::new();
        for token in tokens {
            match detokenizer.push(*token) {
                DecodedText::More(text) => sent.push(text),
                DecodedText::Stopped(text) => {
                    sent.push(text);
                    assert_eq!((sent, true), (expect.iter().map(|s| (*s).to_owned()).collect(), stopped));
                    return;
                }
            }
        }
        let (text, end) = match detokenizer.finish() {
            DecodedText::More(text) => (text, false),
            DecodedText::Stopped(text) => (text, true),
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
        let mut detokenizer = detokenizer(&["ab", "bb"]);
        assert_eq!([detokenizer.pass(1), detokenizer.pass(2)], ["a", "b"]);
        assert_eq!(detokenizer.push(2), DecodedText::More(String::new()));
        assert_eq!(detokenizer.push(2), DecodedText::Stopped(String::new()));
    }

    #[test]
    fn a_character_in_two_tokens_goes_out_whole() {
        check(&[], &[6, 7, 1], &["", "é", "a", ""], false);
        check(&["é"], &[1, 6, 7], &["a", "", ""], true);
        check(&[], &[1, 6], &["a", "", "\u{FFFD}"], false);
    }
}
