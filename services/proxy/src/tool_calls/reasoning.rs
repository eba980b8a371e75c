//! Reasoning in a text that comes in pieces: between its marks (`<think>` and `</think>`, or Magistral's), of which the first
//! stands at the beginning of the text or in the prompt.
//!
//! Read character by character, so the result depends on no cut of the text.

use super::{AnswerPiece, add};
use triptych_core::prompt::ReasoningSyntax;

/// Most bytes of white space that are held because reasoning may follow.
const MAX_SPACE: usize = 64;

/// Splits the reasoning of one answer from its text.
#[derive(Clone, Debug)]
pub(super) struct ReasoningParser {
    /// The marks that begin and end it.
    marks: [&'static str; 2],
    state: State,
    held: String,
    /// The prompt ends within reasoning.
    is_open: bool,
    pieces: Vec<AnswerPiece>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Begin,
    Reasoning,
    Text,
}

impl ReasoningParser {
    /// A text; `is_open`: it begins within reasoning.
    pub(super) fn new(syntax: ReasoningSyntax, is_open: bool) -> Self {
        Self { marks: syntax.marks(), state: State::Begin, held: String::new(), is_open, pieces: Vec::new() }
    }

    /// Adds text. Returns what became certain.
    pub(super) fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        text.chars().for_each(|c| self.step(c));
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text. Reasoning without an end is reasoning.
    pub(super) fn finish(&mut self) -> Vec<AnswerPiece> {
        let rest = std::mem::take(&mut self.held);
        self.give(rest);
        std::mem::take(&mut self.pieces)
    }

    fn step(&mut self, c: char) {
        let [begin, end] = self.marks;
        match self.state {
            State::Text => self.give(c.into()),
            State::Begin => {
                self.held.push(c);
                let rest = self.held.trim_start();
                if rest == begin {
                    self.held.clear();
                    self.state = State::Reasoning;
                } else if !begin.starts_with(rest) || self.held.len() > MAX_SPACE {
                    self.state = if self.is_open { State::Reasoning } else { State::Text };
                    // What was held may begin the end.
                    std::mem::take(&mut self.held).chars().for_each(|c| self.step(c));
                }
            }
            State::Reasoning => {
                self.held.push(c);
                if self.held == end {
                    self.held.clear();
                    self.state = State::Text;
                }
                while !end.starts_with(self.held.as_str()) {
                    let first = self.held.remove(0);
                    self.give(first.into());
                }
            }
        }
    }

    fn give(&mut self, text: String) {
        let is_reasoning = match self.state {
            State::Begin => self.is_open,
            State::Reasoning => true,
            State::Text => false,
        };
        let piece = if is_reasoning { AnswerPiece::Reasoning(text) } else { AnswerPiece::Text(text) };
        add(&mut self.pieces, piece);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reasoning and text of an answer, cut everywhere.
    fn check(is_open: bool, answer: &str, expect: [&str; 2]) {
        check_marked(ReasoningSyntax::ThinkTags, is_open, answer, expect);
    }

    fn check_marked(syntax: ReasoningSyntax, is_open: bool, answer: &str, expect: [&str; 2]) {
        for size in [1, 2, 5, answer.len().max(1)] {
            let mut parser = ReasoningParser::new(syntax, is_open);
            let chars: Vec<char> = answer.chars().collect();
            let cuts = chars.chunks(size).map(|cut| cut.iter().collect::<String>());
            let mut pieces: Vec<AnswerPiece> = cuts.flat_map(|cut| parser.push(&cut)).collect();
            pieces.extend(parser.finish());
            let mut found = [String::new(), String::new()];
            for piece in pieces {
                match piece {
                    AnswerPiece::Reasoning(text) => found[0].push_str(&text),
                    AnswerPiece::Text(text) => found[1].push_str(&text),
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(found, expect, "{answer:?} in cuts of {size}");
        }
    }

    #[test]
    fn reasoning_is_what_stands_between_its_tags() {
        check(false, "<think>\nhm</think>\n\nyes", ["\nhm", "\n\nyes"]);
        check(false, "\n<think>a</thinx></think>b", ["a</thinx>", "b"]);
        check(false, "<think>never done", ["never done", ""]);
        check(false, "no <think>tag</think>", ["", "no <think>tag</think>"]);
        check(false, "<thi", ["", "<thi"]);
        check(false, "  ", ["", "  "]);
        check(false, "<think>a</th", ["a</th", ""]);
    }

    #[test]
    fn magistral_has_marks_of_its_own() {
        let check = |is_open, answer, expect| check_marked(ReasoningSyntax::Mistral, is_open, answer, expect);
        check(false, "[THINK]hm [x]</think>[/THINK]yes", ["hm [x]</think>", "yes"]);
        check(false, "<think>a</think>b", ["", "<think>a</think>b"]);
        check(true, "hm[/THI[/THINK]yes", ["hm[/THI", "yes"]);
    }

    #[test]
    fn reasoning_that_the_prompt_began_ends_in_the_answer() {
        check(true, "hm</think>yes", ["hm", "yes"]);
        check(true, "<think>hm</think>yes", ["hm", "yes"]);
        check(true, "</think>yes", ["", "yes"]);
        check(true, "hm", ["hm", ""]);
        check(true, " <th", [" <th", ""]);
    }
}
