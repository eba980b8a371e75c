//! Calls of tools in a model's answer: read from its text as it streams, and constrained by a grammar where they must be made.
//!
//! It knows the text alone, no wire and no API. The syntaxes are those of the published chat templates
//! ([`ToolSyntax`](triptych_core::prompt::ToolSyntax)); vLLM's parsers of the same names read them too.

mod answer;
mod grammar;
mod markers;
mod object;
mod parser;
mod reasoning;
mod tagged;

pub use answer::{AnswerFormat, AnswerParser};
pub use grammar::{call_grammar, calls_or_json_grammar, strict_grammar};

/// A piece of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPiece {
    /// Text.
    Text(String),
    /// Reasoning.
    Reasoning(String),
    /// A call begins.
    Call {
        /// Its index in the answer, from 0.
        index: u32,
        /// Name of the tool.
        name: String,
    },
    /// Text of a call's arguments.
    Arguments {
        /// Index of the call.
        index: u32,
        /// JSON, as far as the model wrote JSON.
        text: String,
    },
}

/// Adds a piece, joined to the one before where both are of a kind.
fn add(pieces: &mut Vec<AnswerPiece>, piece: AnswerPiece) {
    use AnswerPiece::{Arguments, Reasoning, Text};
    match (pieces.last_mut(), piece) {
        (Some(Text(before)), Text(text)) | (Some(Reasoning(before)), Reasoning(text)) => {
            before.push_str(&text)
        }
        (Some(Arguments { index: i, text: before }), Arguments { index, text }) if *i == index => {
            before.push_str(&text);
        }
        (_, Text(text) | Reasoning(text)) if text.is_empty() => {}
        (_, piece) => pieces.push(piece),
    }
}
