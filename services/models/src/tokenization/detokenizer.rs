//! Tokens to text as they come, whole characters only.
//!
//! A token need not be a whole character, and in sentencepiece-style vocabularies its text depends on the one
//! before. So a few tokens are kept and decoded in one call, and the final part of their text is returned. The idea is that of
//! text-generation-inference's `prefix_offset` and `read_offset`.
//!
//! The unfinished character at the end is held back, at most three bytes: nothing else of a text changes with the
//! tokens after it. A decoder of which that is not true (a file may name any) cannot take back what is out: then the
//! tokens that follow are written as they are after the last one.

use super::Tokenizer;
use super::characters::REPLACEMENT;
use std::sync::Arc;

/// Tokens kept at most while no character ends.
const MAX_KEPT: usize = 32;

/// Tokens that stay of them: an unfinished character has three at most.
const STAY: usize = 4;

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
    /// True if tokens before them were forgotten: their text is not the beginning.
    within: bool,
    /// The text of `ids` that is out.
    emitted: String,
}

impl Detokenizer {
    /// Starts a text.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self { tokenizer, ids: Vec::new(), n_context: 0, within: false, emitted: String::new() }
    }

    /// Adds a token. Returns the text that became final, which may be empty.
    pub fn push(&mut self, id: u32) -> String {
        // An id without a token, as in the padding of a wide vocabulary, says nothing, not even as context.
        if self.tokenizer.is_silent(id) || !self.tokenizer.has_text(id) {
            return String::new();
        }
        self.ids.push(id);
        let unfinished = self.tokenizer.unfinished(&self.ids);
        let piece = self.emit(self.settled(unfinished));
        match unfinished {
            None => self.forget(self.n_context),
            Some(_) if self.ids.len() >= MAX_KEPT => self.forget(self.ids.len() - STAY),
            Some(_) => {}
        }
        piece
    }

    /// Ends the text. Returns the rest; bytes that never became a character are replaced or left out.
    pub fn finish(&mut self) -> String {
        let text = self.text();
        let rest = self.emit(text);
        *self = Self::new(Arc::clone(&self.tokenizer));
        rest
    }

    /// The text of the tokens kept.
    fn text(&self) -> String {
        if self.within {
            self.tokenizer.decode_within(&self.ids)
        } else {
            self.tokenizer.decode_all(&self.ids)
        }
    }

    /// Their text without what stands for the unfinished character at its end.
    fn settled(&self, unfinished: Option<usize>) -> String {
        let mut text = self.text();
        for _ in 0..unfinished.unwrap_or(0) {
            if text.ends_with(REPLACEMENT) {
                text.pop();
            }
        }
        text
    }

    /// Gives out what is new of the final text of `ids`.
    fn emit(&mut self, text: String) -> String {
        if let Some(piece) = text.strip_prefix(&self.emitted) {
            let piece = piece.to_owned();
            self.emitted = text;
            return piece;
        }
        // The decoder changed what is out: this token and those that follow are written by themselves.
        self.ids.drain(..self.ids.len().saturating_sub(1));
        (self.within, self.n_context) = (true, 0);
        self.emitted = self.text();
        self.emitted.clone()
    }

    /// Forgets the first `n` tokens; the others are context for those to come.
    fn forget(&mut self, n: usize) {
        self.n_context = self.ids.len() - n;
        if n == 0 {
            return;
        }
        self.ids.drain(..n);
        self.within = true;
        self.emitted = self.settled(self.tokenizer.unfinished(&self.ids));
    }
}
