//! Tokens to text that may be sent: whole characters, and no part of a stop string.
//!
//! The text before a stop string is sent; the stop string only if the request wants it, and what follows is not. A suffix
//! that could grow into a stop string is held back until it does or cannot.

use std::sync::Arc;
use triptych_core::sampling::SamplingParams;
use triptych_models::tokenization::{Detokenizer, Tokenizer};

/// Incremental text of one completion, up to its first stop string.
#[derive(Clone, Debug)]
pub struct StopDetokenizer {
    detokenizer: Detokenizer,
    stops: Stops,
    /// Unsent suffix that may begin a stop string.
    held: String,
}

/// Texts that end a completion.
#[derive(Clone, Debug, Default)]
pub struct Stops {
    /// The texts; none is empty.
    pub texts: Vec<String>,
    /// True if the one that ends the completion is part of it.
    pub is_included: bool,
}

impl Stops {
    /// Those of a request.
    pub fn of(params: &SamplingParams) -> Self {
        Self { texts: params.stop.clone(), is_included: params.include_stop }
    }
}

/// Text released by a token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecodedText {
    /// New text, possibly empty.
    More(String),
    /// Text before a stop string, which is complete, or with it where it is included.
    Stopped(String),
}

impl StopDetokenizer {
    /// An empty text.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: Stops) -> Self {
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
        let found =
            self.stops.texts.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop.len())));
        if let Some((at, len)) = found.min() {
            self.held.truncate(if self.stops.is_included { at + len } else { at });
            return DecodedText::Stopped(std::mem::take(&mut self.held));
        }
        let sure = self.held.len() - self.may_begin_a_stop();
        let rest = self.held.split_off(sure);
        DecodedText::More(std::mem::replace(&mut self.held, rest))
    }

    /// Length in bytes of the longest suffix that begins a stop string.
    fn may_begin_a_stop(&self) -> usize {
        let suffixes = self.held.char_indices().map(|(at, _)| &self.held[at..]);
        let mut open = suffixes.filter(|suffix| self.stops.texts.iter().any(|stop| stop.starts_with(suffix)));
        open.next().map_or(0, str::len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A vocabulary of whole strings and single bytes; text is their concatenation.
    fn detokenizer(stops: &[&str], is_included: bool) -> StopDetokenizer {
        let json = r#"{
            "version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "unk_token": "?", "vocab":
                {"?": 0, "a": 1, "b": 2, "ab": 3, " the": 4, "é": 5, "<0xC3>": 6, "<0xA9>": 7, "xaby": 8}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
        }"#;
        let tokenizer = Tokenizer::from_bytes(json.as_bytes()).unwrap();
        let texts = stops.iter().map(|s| (*s).to_owned()).collect();
        StopDetokenizer::new(Arc::new(tokenizer), Stops { texts, is_included })
    }

    /// Compares the sent pieces, and whether a stop string ended them.
    fn check(stops: &[&str], tokens: &[u32], expect: &[&str], stopped: bool) {
        check_of(detokenizer(stops, false), tokens, expect, stopped);
    }

    fn check_of(mut detokenizer: StopDetokenizer, tokens: &[u32], expect: &[&str], stopped: bool) {
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
    fn a_stop_string_that_is_included_is_the_end_of_the_text() {
        check_of(detokenizer(&["bb"], true), &[1, 2, 2, 1], &["a", "", "bb"], true);
        check_of(detokenizer(&["y", "ab"], true), &[8], &["xab"], true);
        check_of(detokenizer(&["é"], true), &[1, 6, 7], &["a", "", "é"], true);
        check_of(detokenizer(&["bb"], true), &[1, 2], &["a", "", "b"], false);
    }

    #[test]
    fn text_that_passes_neither_ends_nor_waits() {
        let mut detokenizer = detokenizer(&["ab", "bb"], false);
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
