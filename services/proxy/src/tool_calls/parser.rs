//! Calls of tools in a text that comes in pieces.
//!
//! The text is read character by character, so the result depends on no cut of it (the tests below hold that). What may
//! become a call is held until it is one, at most [`MAX_HELD`] bytes; what does not become one is text, every byte of
//! it. From the beginning of its arguments on a call is a call: they go out as they come, JSON or not, up to the
//! bracket that ends them.

use super::markers::{self, NamedHead, named_head};
use super::object::{self, Nesting, Step};
use super::{AnswerPiece, add};
use std::sync::Arc;
use triptych_core::prompt::ToolSyntax;

/// Most bytes of a call that are held while its name is not known.
pub(super) const MAX_HELD: usize = 64 << 10;
/// Most bytes of white space that are held because a call may follow.
const MAX_SPACE: usize = 256;

/// Reads the calls of one answer.
#[derive(Clone, Debug)]
pub(super) struct ToolParser {
    syntax: ToolSyntax,
    /// Names of the request's tools.
    tools: Arc<[String]>,
    state: State,
    /// Text that is not decided: with it an answer goes on as text if no call comes of it.
    held: String,
    /// True if white space that is held belongs to no text, should a call follow.
    between: bool,
    n_calls: u32,
    pieces: Vec<AnswerPiece>,
}

/// Place in the text.
#[derive(Clone, Debug)]
enum State {
    /// Outside calls; the marker of one may have begun.
    Outside,
    /// All that follows is text.
    Text,
    /// Behind the marker, or before another call of a list.
    Opening { in_list: bool },
    /// In a name that stands before its arguments; `at`: where it begins in what is held.
    Named { at: usize },
    /// In an object that may become a call.
    Object { at: usize, nesting: Nesting, in_list: bool },
    /// In the arguments; `within`: depth of what they are in.
    Arguments { nesting: Nesting, within: usize, in_list: bool },
    /// Behind them, in their object.
    Tail { nesting: Nesting, in_list: bool },
    /// Behind the object.
    Behind { in_list: bool },
}

impl ToolParser {
    pub(super) fn new(syntax: ToolSyntax, tools: Arc<[String]>) -> Self {
        let (held, pieces) = (String::new(), Vec::new());
        Self { syntax, tools, state: State::Outside, held, between: true, n_calls: 0, pieces }
    }

    /// Calls so far.
    pub(super) fn n_calls(&self) -> u32 {
        self.n_calls
    }

    /// Adds text. Returns what became certain.
    pub(super) fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        text.chars().for_each(|c| self.step(c));
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text.
    pub(super) fn finish(&mut self) -> Vec<AnswerPiece> {
        let behind_call = match self.state {
            State::Tail { .. } | State::Behind { .. } => true,
            State::Outside => self.between && self.n_calls > 0,
            _ => false,
        };
        if !(behind_call && self.held.trim().is_empty()) {
            self.give_up();
        }
        self.held.clear();
        std::mem::take(&mut self.pieces)
    }

    fn step(&mut self, c: char) {
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text => add(&mut self.pieces, AnswerPiece::Text(c.into())),
            State::Outside => self.outside(c),
            State::Opening { in_list } => self.opening(c, in_list),
            State::Named { at } => self.named(c, at),
            State::Object { at, nesting, in_list } => self.object(c, (at, nesting), in_list),
            State::Arguments { mut nesting, within, in_list } => {
                self.arguments(c.into());
                self.state = match nesting.step(c) {
                    Step::Closed(depth) if depth <= within && within > 0 => State::Tail { nesting, in_list },
                    Step::Closed(depth) if depth <= within => self.outside_again(),
                    _ => State::Arguments { nesting, within, in_list },
                };
            }
            State::Tail { nesting, in_list } => self.tail(c, nesting, in_list),
            State::Behind { in_list } => self.behind(c, in_list),
        }
    }

    fn outside(&mut self, c: char) {
        let marker = markers::opening(self.syntax);
        let is_llama = self.syntax == ToolSyntax::Llama3Json;
        if is_llama && c == '{' && self.held.trim().is_empty() {
            return self.begin_object(c, false);
        }
        self.held.push(c);
        self.state = State::Outside;
        loop {
            let rest = if self.between { self.held.trim_start() } else { &self.held };
            if rest == marker {
                self.state = State::Opening { in_list: false };
                return;
            }
            if marker.starts_with(rest) && self.held.len() - rest.len() <= MAX_SPACE {
                return;
            }
            if is_llama {
                // Its calls begin an answer.
                return self.give_up();
            }
            let first = self.held.remove(0);
            self.between &= first.is_whitespace() && self.held.len() < MAX_SPACE;
            add(&mut self.pieces, AnswerPiece::Text(first.into()));
        }
    }

    fn opening(&mut self, c: char, in_list: bool) {
        let is_mistral = self.syntax == ToolSyntax::Mistral;
        match c {
            '{' => self.begin_object(c, in_list),
            '[' if is_mistral && !in_list => self.hold(c, State::Opening { in_list: true }),
            _ if c.is_whitespace() && self.held.len() < MAX_SPACE => {
                self.hold(c, State::Opening { in_list });
            }
            _ if is_mistral && !in_list => self.named(c, self.held.len()),
            _ => self.not_a_call(c),
        }
    }

    fn named(&mut self, c: char, at: usize) {
        self.held.push(c);
        match named_head(self.held.get(at..).unwrap_or_default()) {
            NamedHead::Partial => self.state = State::Named { at },
            NamedHead::Complete(name) => {
                let mut nesting = Nesting::default();
                nesting.step(c);
                self.call(name, "{");
                self.state = State::Arguments { nesting, within: 0, in_list: false };
            }
            NamedHead::Other => {
                self.held.pop();
                self.not_a_call(c);
            }
        }
    }

    fn begin_object(&mut self, c: char, in_list: bool) {
        let at = self.held.len();
        self.object(c, (at, Nesting::default()), in_list);
    }

    fn object(&mut self, c: char, (at, mut nesting): (usize, Nesting), in_list: bool) {
        self.held.push(c);
        let text = self.held.get(at..).unwrap_or_default();
        match nesting.step(c) {
            Step::Object(2) => {
                if let Some(name) = object::begun(text).filter(|name| self.may_call(name)) {
                    self.call(name, "{");
                    self.state = State::Arguments { nesting, within: 1, in_list };
                    return;
                }
            }
            Step::Closed(0) => {
                match object::whole(text).filter(|call| self.may_call(&call.name)) {
                    Some(call) => {
                        self.call(call.name, call.arguments.as_deref().unwrap_or("{}"));
                        self.state = self.behind_object(in_list);
                    }
                    None => self.give_up(),
                }
                return;
            }
            _ => {}
        }
        self.state = State::Object { at, nesting, in_list };
        self.bound();
    }

    fn tail(&mut self, c: char, mut nesting: Nesting, in_list: bool) {
        self.held.push(c);
        let is_closed = nesting.step(c) == Step::Closed(0);
        self.state = State::Tail { nesting, in_list };
        if !is_closed {
            return self.bound();
        }
        if object::ends(&self.held) {
            self.held.clear();
            self.state = self.behind_object(in_list);
        } else {
            self.give_up();
        }
    }

    fn behind(&mut self, c: char, in_list: bool) {
        self.held.push(c);
        self.state = State::Behind { in_list };
        let rest = self.held.trim_start();
        let is_over = match (self.syntax, rest) {
            (_, "") => self.held.len() > MAX_SPACE,
            (ToolSyntax::Hermes, markers::END_OF_CALL) | (ToolSyntax::Mistral, "]") => {
                self.held.clear();
                self.state = self.outside_again();
                return;
            }
            (ToolSyntax::Mistral, ",") => return self.state = State::Opening { in_list },
            (ToolSyntax::Llama3Json, ";") => return self.state = State::Opening { in_list },
            (ToolSyntax::Hermes, rest) => !markers::END_OF_CALL.starts_with(rest),
            _ => true,
        };
        if is_over {
            self.held.pop();
            self.not_a_call(c);
        }
    }

    /// The state behind an object that is a call.
    fn behind_object(&mut self, in_list: bool) -> State {
        match self.syntax {
            ToolSyntax::Mistral if !in_list => self.outside_again(),
            _ => State::Behind { in_list },
        }
    }

    /// The state behind a call.
    fn outside_again(&mut self) -> State {
        self.between = true;
        State::Outside
    }

    fn hold(&mut self, c: char, state: State) {
        self.held.push(c);
        self.state = state;
    }

    /// Keeps what is held within its limit.
    fn bound(&mut self) {
        if self.held.len() > MAX_HELD {
            self.give_up();
        }
    }

    /// Makes text of what is held, and reads `c` as what follows it.
    fn not_a_call(&mut self, c: char) {
        self.give_up();
        self.step(c);
    }

    /// Makes text of what is held.
    fn give_up(&mut self) {
        add(&mut self.pieces, AnswerPiece::Text(std::mem::take(&mut self.held)));
        self.between = false;
        self.state = if self.syntax == ToolSyntax::Llama3Json { State::Text } else { State::Outside };
    }

    /// True if an object with this name can be a call. One that stands alone, as in Llama 3, has to name a tool: it may be
    /// an answer in JSON.
    fn may_call(&self, name: &str) -> bool {
        let is_marked = self.syntax != ToolSyntax::Llama3Json || self.held.contains(markers::PYTHON_TAG);
        is_marked || self.tools.iter().any(|tool| tool == name)
    }

    fn call(&mut self, name: String, arguments: &str) {
        self.held.clear();
        self.pieces.push(AnswerPiece::Call { index: self.n_calls, name });
        self.n_calls += 1;
        self.arguments(arguments.to_owned());
    }

    fn arguments(&mut self, text: String) {
        let index = self.n_calls.saturating_sub(1);
        add(&mut self.pieces, AnswerPiece::Arguments { index, text });
    }
}

#[cfg(test)]
mod tests;
