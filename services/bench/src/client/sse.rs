//! Server-sent events, and what OpenAI-compatible servers put in them.

use super::tokens::TokenMessage;
use serde_json::Value;
use std::time::Duration;

/// The longest line that is read.
const MAX_LINE: usize = 4 << 20;

/// Bytes of a stream become the texts of its `data:` lines.
#[derive(Debug, Default)]
pub(super) struct LineBuffer {
    rest: Vec<u8>,
}

impl LineBuffer {
    /// The data that these bytes complete. None: a line is too long to be one.
    pub(super) fn add(&mut self, bytes: &[u8]) -> Option<Vec<String>> {
        let mut data = Vec::new();
        for byte in bytes.split_inclusive(|b| *b == b'\n') {
            self.rest.extend_from_slice(byte);
            if self.rest.len() > MAX_LINE {
                return None;
            }
            if byte.ends_with(b"\n") {
                let line = String::from_utf8_lossy(&self.rest).trim_end().to_owned();
                self.rest.clear();
                data.extend(line.strip_prefix("data:").map(|d| d.trim_start().to_owned()));
            }
        }
        Some(data)
    }
}

/// State of an answer after some of its events.
#[derive(Debug, Default)]
pub(super) struct AnswerState {
    pub(super) pieces: Vec<TokenMessage>,
    pub(super) prompt_tokens: Option<u32>,
    pub(super) completion_tokens: Option<u32>,
    /// True after the end: `[DONE]`, a finish reason, or a transcript's end.
    pub(super) over: bool,
    /// Error within the stream.
    pub(super) error: Option<String>,
    /// Last of the cumulative counts.
    counted: u32,
}

impl AnswerState {
    /// One event that arrived at `at`.
    pub(super) fn event(&mut self, data: &str, at: Duration) {
        if data == "[DONE]" {
            self.over = true;
            return;
        }
        let Ok(event) = serde_json::from_str::<Value>(data) else {
            self.error = Some("an event that is no JSON".to_owned());
            return;
        };
        if let Some(error) = event.get("error").filter(|e| !e.is_null()) {
            let text = error.get("message").and_then(Value::as_str).unwrap_or("no message");
            self.error = Some(shortened(text));
            return;
        }
        let choice = event.get("choices").and_then(|c| c.get(0));
        let text = choice.and_then(text_of).or_else(|| event.get("delta").and_then(Value::as_str));
        let grown = self.usage(&event);
        let ids = choice.and_then(|c| c.get("token_ids")).and_then(Value::as_array);
        let ids = ids.map(|ids| ids.len() as u32);
        let is_piece = choice.is_some() || event.get("delta").is_some();
        if is_piece {
            let has_text = text.is_some_and(|t| !t.is_empty());
            let n_tokens = ids.or(grown);
            let is_role =
                choice.and_then(|c| c.get("delta")).is_some_and(|delta| delta.get("role").is_some());
            if has_text || n_tokens.is_some() || !is_role {
                self.pieces.push(TokenMessage { at, n_tokens, has_text });
            }
        }
        let finished = choice.and_then(|c| c.get("finish_reason")).is_some_and(|f| !f.is_null());
        let done = event.get("type").and_then(Value::as_str) == Some("transcript.text.done");
        self.over |= finished || done;
    }

    /// Reads counts; gives the tokens that are new, if this event counts up to itself.
    fn usage(&mut self, event: &Value) -> Option<u32> {
        let usage = event.get("usage").filter(|u| u.is_object())?;
        let count = |name: &str| usage.get(name).and_then(Value::as_u64).and_then(|n| u32::try_from(n).ok());
        self.prompt_tokens = count("prompt_tokens").or_else(|| count("input_tokens")).or(self.prompt_tokens);
        let completion = count("completion_tokens").or_else(|| count("output_tokens"))?;
        self.completion_tokens = Some(completion);
        Some(completion.saturating_sub(std::mem::replace(&mut self.counted, completion)))
    }
}

/// Text of a chat's or a completion's choice, thoughts included.
fn text_of(choice: &Value) -> Option<&str> {
    let delta = choice.get("delta");
    let said = |name: &str| delta.and_then(|d| d.get(name)).and_then(Value::as_str).filter(|t| !t.is_empty());
    let chat = said("content").or_else(|| said("reasoning_content")).or_else(|| said("reasoning"));
    chat.or_else(|| choice.get("text").and_then(Value::as_str))
}

/// The beginning of a message.
pub(super) fn shortened(text: &str) -> String {
    text.chars().take(160).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tokens::times;
    use super::*;
    use proptest::prelude::*;

    /// Tokens by the millisecond, from events one millisecond apart.
    fn tokens(events: &[&str]) -> (AnswerState, Vec<u128>) {
        let mut answer = AnswerState::default();
        for (event, at) in events.iter().zip(0..) {
            answer.event(event, Duration::from_millis(at));
        }
        let times = times(&answer.pieces, answer.completion_tokens).iter().map(Duration::as_millis).collect();
        (answer, times)
    }

    #[test]
    fn a_chat_as_vllm_streams_it() {
        let (answer, times) = tokens(&[
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}"#,
            r#"{"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{"content":" b"},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{"content":" c"},"finish_reason":"length"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":17,"completion_tokens":3,"total_tokens":20}}"#,
            "[DONE]",
        ]);
        assert_eq!(times, [1, 2, 3], "the role is no token");
        assert_eq!((answer.prompt_tokens, answer.over, answer.error), (Some(17), true, None));
    }

    #[test]
    fn an_answer_of_special_tokens_has_no_text_and_all_its_tokens() {
        // vLLM leaves chunks without text out, but for the first and the last.
        let (answer, times) = tokens(&[
            r#"{"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}"#,
            r#"{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":17,"completion_tokens":3,"total_tokens":20}}"#,
        ]);
        assert_eq!((times, answer.completion_tokens), (vec![1, 1, 1], Some(3)));
    }

    #[test]
    fn counts_that_grow_say_which_piece_had_how_many() {
        let (_, times) = tokens(&[
            r#"{"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":5,"completion_tokens":1}}"#,
            r#"{"choices":[{"delta":{}}],"usage":{"prompt_tokens":5,"completion_tokens":3}}"#,
            r#"{"choices":[{"delta":{"content":"d"}}],"usage":{"prompt_tokens":5,"completion_tokens":4}}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":4}}"#,
        ]);
        assert_eq!(times, [0, 1, 1, 2]);
    }

    #[test]
    fn a_completion_with_token_ids_is_exact() {
        let (_, times) = tokens(&[
            r#"{"choices":[{"text":"","token_ids":[5]}]}"#,
            r#"{"choices":[{"text":"ab","token_ids":[6,7]}]}"#,
            r#"{"choices":[{"text":"","token_ids":[],"finish_reason":"length"}]}"#,
        ]);
        assert_eq!(times, [0, 1, 1]);
    }

    #[test]
    fn thoughts_and_transcripts_are_tokens_too() {
        assert_eq!(tokens(&[r#"{"choices":[{"delta":{"reasoning_content":"hm"}}]}"#]).1, [0]);
        let (answer, times) = tokens(&[
            r#"{"type":"transcript.text.delta","delta":" 4"}"#,
            r#"{"type":"transcript.text.delta","delta":" 2"}"#,
            r#"{"type":"transcript.text.done","text":" 4 2"}"#,
        ]);
        assert_eq!((times, answer.over), (vec![0, 1], true));
    }

    #[test]
    fn an_error_in_the_midst_is_kept() {
        let (answer, times) = tokens(&[
            r#"{"choices":[{"delta":{"content":"a"}}]}"#,
            r#"{"error":{"message":"worker gone","code":503}}"#,
        ]);
        assert_eq!((times.len(), answer.error.as_deref(), answer.over), (1, Some("worker gone"), false));
        assert!(tokens(&["{"]).0.error.is_some());
    }

    proptest! {
        #[test]
        fn events_are_the_same_however_bytes_are_cut(cuts in prop::collection::vec(1usize..9, 0..40)) {
            let stream = b"data: {\"a\": 1}\r\n\r\n: comment\ndata:x\n\nevent: y\ndata: \xc3\xa9\n\n";
            let mut lines = LineBuffer::default();
            let mut rest = &stream[..];
            let mut found = Vec::new();
            for cut in cuts {
                let (now, later) = rest.split_at(cut.min(rest.len()));
                found.extend(lines.add(now).expect("short lines"));
                rest = later;
            }
            found.extend(lines.add(rest).expect("short lines"));
            prop_assert_eq!(found, ["{\"a\": 1}", "x", "\u{e9}"]);
        }

        #[test]
        fn no_event_makes_it_panic(data in "\\PC{0,60}", bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut answer = AnswerState::default();
            answer.event(&data, Duration::ZERO);
            for line in LineBuffer::default().add(&bytes).unwrap_or_default() {
                answer.event(&line, Duration::ZERO);
            }
        }
    }
}
