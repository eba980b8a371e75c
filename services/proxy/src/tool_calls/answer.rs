//! An answer's deltas with its reasoning and its calls of tools apart from its text.

use super::AnswerPiece;
use super::parser::ToolParser;
use super::reasoning::ReasoningParser;
use super::tagged::TaggedParser;
use serde_json::Value;
use std::sync::Arc;
use triptych_core::RequestId;
use triptych_core::prompt::{ReasoningSyntax, ToolSyntax};
use triptych_proto::v1;

/// Letters and digits of an id of a call. Mistral's templates refuse any other number.
const ID_LEN: usize = 9;

/// Parts of an answer that are read from its text.
#[derive(Clone, Debug, Default)]
pub struct AnswerFormat {
    /// Syntax of calls; `None`: they are text.
    pub calls: Option<ToolSyntax>,
    /// Names of the request's tools.
    pub tools: Arc<[String]>,
    /// Schemas of their arguments, by name; for a syntax whose values have no types.
    pub schemas: Arc<[(String, Value)]>,
    /// Marks around reasoning, which is apart from the text; `None`: it is text.
    pub reasoning: Option<ReasoningSyntax>,
    /// True if reasoning is left out.
    pub hides_reasoning: bool,
}

impl AnswerFormat {
    /// True if an answer is its text.
    pub fn is_plain(&self) -> bool {
        self.calls.is_none() && self.reasoning.is_none()
    }
}

/// Reads the deltas of a request's answers.
#[derive(Debug)]
pub struct AnswerParser {
    format: AnswerFormat,
    request: RequestId,
    /// By choice, in the order of their first deltas.
    choices: Vec<(u32, ChoiceParser)>,
}

/// Reads one answer.
#[derive(Debug)]
struct ChoiceParser {
    reasoning: Option<ReasoningParser>,
    calls: Option<CallParser>,
}

/// Reads calls, by their syntax.
#[derive(Debug)]
enum CallParser {
    Json(ToolParser),
    Tagged(TaggedParser),
}

impl CallParser {
    fn new(syntax: ToolSyntax, format: &AnswerFormat) -> Self {
        match syntax.is_tagged() {
            true => Self::Tagged(TaggedParser::new(syntax, Arc::clone(&format.schemas))),
            false => Self::Json(ToolParser::new(syntax, Arc::clone(&format.tools))),
        }
    }

    fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        match self {
            Self::Json(parser) => parser.push(text),
            Self::Tagged(parser) => parser.push(text),
        }
    }

    fn finish(&mut self) -> Vec<AnswerPiece> {
        match self {
            Self::Json(parser) => parser.finish(),
            Self::Tagged(parser) => parser.finish(),
        }
    }

    fn n_calls(&self) -> u32 {
        match self {
            Self::Json(parser) => parser.n_calls(),
            Self::Tagged(parser) => parser.n_calls(),
        }
    }
}

impl AnswerParser {
    /// For the answers of a request, whose id becomes part of the ids of calls.
    pub fn new(format: AnswerFormat, request: RequestId) -> Self {
        Self { format, request, choices: Vec::new() }
    }

    /// A delta with its parts apart.
    #[must_use]
    pub fn read(&mut self, mut delta: v1::Delta) -> v1::Delta {
        if self.format.is_plain() {
            return delta;
        }
        let choice = delta.choice;
        let at = self.choices.iter().position(|(other, _)| *other == choice).unwrap_or_else(|| {
            self.choices.push((choice, ChoiceParser::new(&self.format, delta.begins_in_reasoning)));
            self.choices.len() - 1
        });
        let Some((_, parser)) = self.choices.get_mut(at) else { return delta };
        let mut pieces = parser.push(&delta.text);
        if delta.finish_reason != i32::from(v1::FinishReason::Unspecified) {
            pieces.extend(parser.finish());
            let called = parser.calls.as_ref().is_some_and(|calls| calls.n_calls() > 0);
            if called && delta.finish_reason == i32::from(v1::FinishReason::Stop) {
                delta.finish_reason = v1::FinishReason::ToolCalls.into();
            }
        }
        delta.text.clear();
        for piece in pieces {
            self.put(piece, &mut delta);
        }
        delta
    }

    fn put(&self, piece: AnswerPiece, delta: &mut v1::Delta) {
        match piece {
            AnswerPiece::Text(text) => delta.text.push_str(&text),
            AnswerPiece::Reasoning(text) if !self.format.hides_reasoning => delta.reasoning.push_str(&text),
            AnswerPiece::Reasoning(_) => {}
            AnswerPiece::Call { index, name } => {
                let id = call_id(self.request, delta.choice, index);
                delta.tool_calls.push(v1::ToolCallDelta { index, id, name, arguments: String::new() });
            }
            AnswerPiece::Arguments { index, text } => match delta.tool_calls.last_mut() {
                Some(call) if call.index == index => call.arguments.push_str(&text),
                _ => {
                    let arguments = text;
                    delta.tool_calls.push(v1::ToolCallDelta { index, arguments, ..Default::default() });
                }
            },
        }
    }
}

impl ChoiceParser {
    fn new(format: &AnswerFormat, begins_in_reasoning: bool) -> Self {
        Self {
            reasoning: format.reasoning.map(|syntax| ReasoningParser::new(syntax, begins_in_reasoning)),
            calls: format.calls.map(|syntax| CallParser::new(syntax, format)),
        }
    }

    fn push(&mut self, text: &str) -> Vec<AnswerPiece> {
        let pieces = match &mut self.reasoning {
            Some(reasoning) => reasoning.push(text),
            None => vec![AnswerPiece::Text(text.to_owned())],
        };
        self.pass(pieces)
    }

    fn finish(&mut self) -> Vec<AnswerPiece> {
        let rest = self.reasoning.as_mut().map(ReasoningParser::finish).unwrap_or_default();
        let mut pieces = self.pass(rest);
        pieces.extend(self.calls.as_mut().map(CallParser::finish).unwrap_or_default());
        pieces
    }

    /// Reads the calls in text.
    fn pass(&mut self, pieces: Vec<AnswerPiece>) -> Vec<AnswerPiece> {
        let Some(calls) = &mut self.calls else { return pieces };
        let read = |piece| match piece {
            AnswerPiece::Text(text) => calls.push(&text),
            other => vec![other],
        };
        pieces.into_iter().flat_map(read).collect()
    }
}

/// Id of a call: of its request, choice and index, so that every reader of the answer sees the same.
fn call_id(request: RequestId, choice: u32, index: u32) -> String {
    const LETTERS: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let hash = blake3::hash(format!("{request}/{choice}/{index}").as_bytes());
    let letter = |byte: &u8| char::from(LETTERS[usize::from(byte % 32)]);
    hash.as_bytes().iter().take(ID_LEN).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parser(calls: Option<ToolSyntax>, hides_reasoning: bool) -> AnswerParser {
        let reasoning = Some(ReasoningSyntax::ThinkTags);
        let format = AnswerFormat { calls, reasoning, hides_reasoning, ..AnswerFormat::default() };
        AnswerParser::new(format, RequestId::from_bits(7))
    }

    fn delta(choice: u32, text: &str, finish: v1::FinishReason) -> v1::Delta {
        v1::Delta { choice, text: text.into(), finish_reason: finish.into(), ..v1::Delta::default() }
    }

    #[test]
    fn reasoning_text_and_calls_come_apart_and_choices_by_themselves() {
        use v1::FinishReason::{Stop, ToolCalls, Unspecified};
        let mut parser = parser(Some(ToolSyntax::Hermes), false);
        let _ = parser.read(delta(0, "<think>so</think>Let me. <tool_", Unspecified));
        let other = parser.read(delta(1, "just text", Stop));
        assert_eq!((&*other.text, other.finish_reason), ("just text", Stop.into()));
        let call = parser.read(delta(0, "call>{\"name\": \"f\", \"arguments\": {\"a\"", Unspecified));
        assert_eq!((&*call.text, &*call.reasoning), ("", ""));
        let [first] = call.tool_calls.as_slice() else { panic!("{call:?}") };
        assert_eq!((first.index, &*first.name, &*first.arguments), (0, "f", "{\"a\""));
        assert_eq!(first.id.len(), ID_LEN);
        let end = parser.read(delta(0, ": 1}}</tool_call>", Stop));
        assert_eq!(end.finish_reason, i32::from(ToolCalls));
        let [rest] = end.tool_calls.as_slice() else { panic!("{end:?}") };
        assert_eq!((&*rest.id, &*rest.name, &*rest.arguments), ("", "", ": 1}"));
    }

    #[test]
    fn hidden_reasoning_is_nowhere_and_a_cut_answer_is_no_finished_call() {
        let mut parser = parser(Some(ToolSyntax::Hermes), true);
        let text = "<think>so</think><tool_call>{\"name\": \"f\", \"arguments\": {";
        let cut = parser.read(delta(0, text, v1::FinishReason::Length));
        assert_eq!((&*cut.reasoning, &*cut.text), ("", ""));
        assert_eq!(cut.finish_reason, i32::from(v1::FinishReason::Length));
        assert_eq!(cut.tool_calls[0].arguments, "{");
    }
}
