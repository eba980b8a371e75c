//! Tokens to text as they come, whole characters only.
//!
//! A token need not be a whole character, and in sentencepiece-style vocabularies its text depends on the one
//! before. So a few tokens are kept and decoded in one call, and the final part of their text is returned. The idea is that of
//! text-generation-inference's `prefix_offset` and `read_offset`.

use super::Tokenizer;
use std::sync::Arc;

/// Replacement for bytes that are no character.
const REPLACEMENT: char = '\u{FFFD}';

/// A run of tokens this long without a whole character is no text: it is given out as it is.
const MAX_PENDING: usize = 32;

/// Turns the tokens of one sequence into text, piece by piece.
///
/// The pieces joined are the text of all the tokens, silent ones left out; no piece ends within a character.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// Tokens kept: context whose text is out, then tokens whose text is not.
    ids: Vec<u32>,
    /// Number of them that are context.
    n_context: usize,
    /// Bytes of the text of `ids` that are out.
    emitted: usize,
}

impl Detokenizer {
    /// Starts a text.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, ids: Vec::new(), n_context: 0, emitted: 0 }
    }

    /// Adds a token. Returns the text that became final, which may be empty.
    pub fn push(&mut self, id: u32) -> String {
        // An id without a token, as in the padding of a wide vocabulary, says nothing, not even as context.
        if self.tokenizer.is_silent(id) || self.tokenizer.token(id).is_none() {
            return String::new();
        }
        self.ids.push(id);
        let text = self.tokenizer.decode_all(&self.ids);
        let sure = text.trim_end_matches(REPLACEMENT);
        if sure.len() < text.len() && self.ids.len() - self.n_context >= MAX_PENDING {
            return self.emit(&text, text.len());
        }
        self.emit(&text, sure.len())
    }

    /// Ends the text. Returns the rest; bytes that never became a character are replaced.
    pub fn finish(&mut self) -> String {
        let text = self.tokenizer.decode_all(&self.ids);
        let rest = self.emit(&text, text.len());
        self.ids.clear();
        (self.n_context, self.emitted) = (0, 0);
        rest
    }

    /// Gives out `text[emitted..end]`; when nothing is left to come, forgets all but the last tokens.
    fn emit(&mut self, text: &str, end: usize) -> String {
        let Some(piece) = text.get(self.emitted..end).map(str::to_owned) else { return String::new() };
        self.emitted = end;
        if end == text.len() {
            self.ids.drain(..self.n_context);
            self.n_context = self.ids.len();
            self.emitted = self.tokenizer.decode_all(&self.ids).len();
        }
        piece
    }
}
