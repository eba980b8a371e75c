//! Tokens to text, all at once, and the bytes of one token.
//!
//! The text is the library's decoder's, but for bytes that are no character ([`characters`](super::characters)).

use super::Tokenizer;
use super::characters::{InvalidBytes, MAX_UNFINISHED, n_unfinished, only_characters, replace_lone_bytes};
use super::spelling::{Spelling, fallback_byte};
use tokenizers::Decoder as _;

impl Tokenizer {
    /// The text of tokens, silent ones left out. Bytes that are no whole character are replaced, in ByT5 left out.
    pub fn decode(&self, ids: &[u32]) -> String {
        let audible: Vec<u32> = ids.iter().copied().filter(|id| !self.is_silent(*id)).collect();
        self.decode_all(&audible)
    }

    /// The text of one token by itself, silent or not, as log-probabilities report it.
    pub fn token_text(&self, id: u32) -> String {
        match self.token_bytes(id) {
            Some(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            None => self.token(id).unwrap_or_default(),
        }
    }

    /// The bytes that a token adds in the middle of a text. `None` for tokens that are no part of a text (see
    /// [`Self::is_silent`]) and for ids without a token.
    ///
    /// The bytes of an answer's tokens, one after another, are its text, but for the first space where
    /// [`Self::drops_first_space`]. They need not be whole characters.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        if self.is_silent(id) { None } else { self.spelled(id) }
    }

    /// The bytes of a token, silent or not.
    fn spelled(&self, id: u32) -> Option<Vec<u8>> {
        let token = self.token(id)?;
        let verbatim = self.verbatim.contains(&id);
        Some(if verbatim { token.into_bytes() } else { self.spelling.bytes(&token) })
    }

    /// True if the decoder drops the space that begins a text: sentencepiece writes a space before the first
    /// word as before any other.
    pub fn drops_first_space(&self) -> bool {
        self.spelling.drops_first_space()
    }

    /// Every token's text. Ids without a token, as in the padding of a wide vocabulary, have none.
    pub fn decode_all(&self, ids: &[u32]) -> String {
        self.decode_after(None, ids)
    }

    /// As [`Self::decode_all`], in the middle of a text, where no decoder drops a space.
    pub(super) fn decode_within(&self, ids: &[u32]) -> String {
        const BEFORE: &str = "x";
        let text = self.decode_after(Some(BEFORE), ids);
        text.strip_prefix(BEFORE).map_or_else(|| self.decode_all(ids), str::to_owned)
    }

    /// The text of a token of this name, and of tokens after it.
    fn decode_after(&self, before: Option<&str>, ids: &[u32]) -> String {
        if self.invalid_bytes == InvalidBytes::Dropped {
            let bytes = ids.iter().filter_map(|id| self.spelled(*id)).flatten();
            let bytes: Vec<u8> = before.unwrap_or_default().bytes().chain(bytes).collect();
            return only_characters(&bytes);
        }
        let names = ids.iter().filter_map(|id| self.token(*id));
        let mut names: Vec<String> = before.map(str::to_owned).into_iter().chain(names).collect();
        // Some of the library's decoders count back from the last token.
        if names.is_empty() {
            return String::new();
        }
        if self.spelling.has_byte_tokens() {
            names = replace_lone_bytes(&names);
        }
        match self.full.get_decoder() {
            Some(decoder) => decoder.decode(names).unwrap_or_default(),
            None => names.join(" "),
        }
    }

    /// True if a token adds something to a text.
    pub(super) fn has_text(&self, id: u32) -> bool {
        self.token(id).is_some_and(|name| !name.is_empty() || self.spelling != Spelling::ByteLevel)
    }

    /// If the text of tokens ends within a character: how many U+FFFD stand for what is there of it.
    pub(super) fn unfinished(&self, ids: &[u32]) -> Option<usize> {
        let dropped = self.invalid_bytes == InvalidBytes::Dropped;
        let level = self.spelling == Spelling::ByteLevel;
        let is_byte = |token: &String| level || fallback_byte(token).is_some();
        if !level && !self.spelling.has_byte_tokens() {
            return None;
        }
        let mut end: Vec<u8> = Vec::new();
        for token in ids.iter().rev().map_while(|id| self.token(*id)).take_while(is_byte) {
            end.splice(..0, self.spelling.bytes(&token));
            if end.len() >= MAX_UNFINISHED {
                break;
            }
        }
        let n = n_unfinished(&end);
        // The library replaces the bytes of an unfinished character with one U+FFFD, byte tokens with one each.
        (n > 0).then_some(if dropped {
            0
        } else if level {
            1
        } else {
            n
        })
    }
}
