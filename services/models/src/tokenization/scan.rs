//! Finding control tokens in text, and keeping clients from spelling them.
//!
//! A chat template mixes its own control tokens with clients' texts in one string. Before that, [`ControlTokenGuard`] puts
//! a mark behind every character of a client's text with which a control token could begin; so no control
//! token is found there, not even one that two texts spell together. Templates see text that trims, splits and
//! compares as before. After the split the marks go away, and what is left is read as plain text together with
//! its neighbours, so that ordinary words get the tokens they get without all this.

use std::collections::{HashMap, HashSet};

/// A token that steers the model.
#[derive(Clone, Debug)]
pub(super) struct ControlToken {
    /// Its id.
    pub(super) id: u32,
    /// Its spelling; two characters or more.
    pub(super) content: String,
    /// True if it strips white space before it.
    pub(super) strips_left: bool,
    /// True if it strips white space after it.
    pub(super) strips_right: bool,
}

/// Every control token of a vocabulary.
#[derive(Clone, Debug)]
pub(super) struct ControlTokens {
    /// By first character, longest first.
    by_first: HashMap<char, Vec<ControlToken>>,
    ids: HashSet<u32>,
}

/// A part of a mixed text.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum MixedSpan<'a> {
    /// A control token.
    Control(u32),
    /// Text between two control tokens.
    Text(&'a str),
}

impl ControlTokens {
    pub(super) fn new(tokens: Vec<ControlToken>) -> Self {
        let ids = tokens.iter().map(|t| t.id).collect();
        let mut by_first: HashMap<char, Vec<ControlToken>> = HashMap::new();
        for token in tokens {
            if let Some(first) = token.content.chars().next() {
                by_first.entry(first).or_default().push(token);
            }
        }
        for group in by_first.values_mut() {
            group.sort_by_key(|t| std::cmp::Reverse(t.content.len()));
        }
        Self { by_first, ids }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &ControlToken> {
        self.by_first.values().flatten()
    }

    pub(super) fn contains(&self, id: u32) -> bool {
        self.ids.contains(&id)
    }

    /// Splits at control tokens, the longest at each place, from the left. O(length · tokens that begin alike).
    pub(super) fn split<'a>(&self, text: &'a str) -> Vec<MixedSpan<'a>> {
        let mut spans = Vec::new();
        let mut start = 0;
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            let found =
                self.by_first.get(&c).and_then(|g| g.iter().find(|t| text[at..].starts_with(&t.content)));
            let Some(token) = found else {
                at += c.len_utf8();
                continue;
            };
            let before = &text[start..at];
            let before = if token.strips_left { before.trim_end() } else { before };
            if !before.is_empty() {
                spans.push(MixedSpan::Text(before));
            }
            spans.push(MixedSpan::Control(token.id));
            at += token.content.len();
            if token.strips_right {
                at = text.len() - text[at..].trim_start().len();
            }
            start = at;
        }
        if start < text.len() {
            spans.push(MixedSpan::Text(&text[start..]));
        }
        spans
    }

    /// A guard whose mark is in none of `texts`. `None` if every candidate is.
    pub(super) fn guard<'a>(
        &self,
        texts: impl Iterator<Item = &'a str> + Clone,
    ) -> Option<ControlTokenGuard> {
        // Noncharacters: Unicode sets them aside for use inside a program.
        let mark = ('\u{FDD0}'..='\u{FDEF}').find(|mark| !texts.clone().any(|t| t.contains(*mark)))?;
        Some(ControlTokenGuard { mark, firsts: self.by_first.keys().copied().collect() })
    }
}

/// Keeps clients' texts from spelling control tokens; see [`super::Tokenizer::guard`].
#[derive(Clone, Debug)]
pub struct ControlTokenGuard {
    mark: char,
    firsts: Vec<char>,
}

impl ControlTokenGuard {
    /// The text with marks. Only for a text that the guard was made for.
    pub fn apply(&self, text: &str) -> String {
        let mut marked = String::with_capacity(text.len() + 8);
        for c in text.chars() {
            marked.push(c);
            if self.firsts.contains(&c) {
                marked.push(self.mark);
            }
        }
        marked
    }

    /// The text without marks.
    pub fn remove(&self, text: &str) -> String {
        text.chars().filter(|c| *c != self.mark).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(list: &[(&str, bool, bool)]) -> ControlTokens {
        let token = |(id, (content, strips_left, strips_right)): (usize, &(&str, bool, bool))| ControlToken {
            id: id as u32,
            content: (*content).to_owned(),
            strips_left: *strips_left,
            strips_right: *strips_right,
        };
        ControlTokens::new(list.iter().enumerate().map(token).collect())
    }

    #[test]
    fn the_longest_token_wins_and_strips_what_it_says() {
        let controls = tokens(&[("<a>", false, false), ("<a><b>", false, false), ("[m]", true, true)]);
        let split = controls.split("x <a><b> <a>ü [m]  y");
        let expect = [
            MixedSpan::Text("x "),
            MixedSpan::Control(1),
            MixedSpan::Text(" "),
            MixedSpan::Control(0),
            MixedSpan::Text("ü"),
            MixedSpan::Control(2),
            MixedSpan::Text("y"),
        ];
        assert_eq!(split, expect);
        assert_eq!(controls.split(""), []);
    }

    #[test]
    fn two_guarded_texts_cannot_spell_a_token_together() {
        let controls = tokens(&[("<|end|>", false, false)]);
        let left = "a<|en";
        let right = "d|>\u{FDD0}b";
        let guard = controls.guard([left, right].into_iter()).unwrap();
        let mixed = format!("{}{}<|end|>", guard.apply(left), guard.apply(right));
        let split = controls.split(&mixed);
        assert_eq!(split.len(), 2);
        assert_eq!(split[1], MixedSpan::Control(0));
        let MixedSpan::Text(text) = split[0] else { panic!("text first") };
        assert_eq!(guard.remove(text), "a<|end|>\u{FDD0}b");
    }
}
