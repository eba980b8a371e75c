//! Tokens of a segment to words, with the times of their tokens.
//!
//! A word begins at a token that begins with a space; languages that write no spaces are split at every whole
//! character; punctuation joins its neighbour. The rules are transformers'
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/whisper/tokenization_whisper.py>).

use crate::tokenization::Tokenizer;
use std::ops::Range;

/// Languages that are not written with spaces.
const WITHOUT_SPACES: [&str; 6] = ["zh", "ja", "th", "lo", "my", "yue"];
const PUNCTUATION: &str = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~";
const JOINS_NEXT: &str = "\"'“¡¿([{-";
const JOINS_LAST: &str = "\"'.。,，!！?？:：”)]}、";

/// A word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WordTokens {
    /// The word with the space and punctuation that belong to it.
    pub text: String,
    /// Its tokens among those of the segment.
    pub tokens: Range<usize>,
}

/// The words of `tokens`, text tokens only. `language` is a code; `None`: one that is written with spaces.
pub fn words(tokenizer: &Tokenizer, tokens: &[u32], language: Option<&str>) -> Vec<WordTokens> {
    let mut words = characters(tokenizer, tokens);
    if !language.is_some_and(|code| WITHOUT_SPACES.contains(&code)) {
        words = by_spaces(words);
    }
    join_next(&mut words);
    join_last(&mut words);
    words.retain(|word| !word.text.is_empty());
    words
}

/// The fewest tokens at a time that are whole characters.
fn characters(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<WordTokens> {
    let whole: Vec<char> = tokenizer.decode(tokens).chars().collect();
    let mut found = Vec::new();
    let mut first = 0;
    let mut n_chars = 0;
    for end in 1..=tokens.len() {
        let text = tokenizer.decode(&tokens[first..end]);
        // A replacement character is part of the text only if the whole text has one at that place.
        let broken = text.chars().position(|c| c == char::REPLACEMENT_CHARACTER);
        let complete =
            broken.is_none_or(|at| whole.get(n_chars + at).is_none_or(|c| *c == char::REPLACEMENT_CHARACTER));
        if complete {
            n_chars += text.chars().count();
            found.push(WordTokens { text, tokens: first..end });
            first = end;
        }
    }
    found
}

fn by_spaces(pieces: Vec<WordTokens>) -> Vec<WordTokens> {
    let mut words: Vec<WordTokens> = Vec::new();
    for piece in pieces {
        let begins = piece.text.starts_with(' ') || PUNCTUATION.contains(piece.text.trim());
        match words.last_mut() {
            Some(word) if !begins => {
                word.text.push_str(&piece.text);
                word.tokens.end = piece.tokens.end;
            }
            _ => words.push(piece),
        }
    }
    words
}

/// An opening sign after a space becomes the beginning of the next word.
fn join_next(words: &mut [WordTokens]) {
    let mut next = words.len().saturating_sub(1);
    for i in (0..next).rev() {
        if words[i].text.starts_with(' ') && JOINS_NEXT.contains(words[i].text.trim()) {
            let text = std::mem::take(&mut words[i].text);
            words[next].text.insert_str(0, &text);
            words[next].tokens.start = words[i].tokens.start;
        } else {
            next = i;
        }
    }
}

/// A closing sign becomes the end of the word before.
fn join_last(words: &mut [WordTokens]) {
    let mut last = 0;
    for i in 1..words.len() {
        if !words[last].text.ends_with(' ') && JOINS_LAST.contains(words[i].text.as_str()) {
            let text = std::mem::take(&mut words[i].text);
            if !text.is_empty() {
                words[last].text.push_str(&text);
                words[last].tokens.end = words[i].tokens.end;
            }
        } else {
            last = i;
        }
    }
}
