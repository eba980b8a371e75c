//! Server-sent events as vLLM writes them: lines of `data:`, one event each (html.spec.whatwg.org, "Server-sent events").

use bytes::{Buf, Bytes, BytesMut};
use thiserror::Error;

/// Longest line: a chunk of one step with 20 alternatives beside each token of 16 answers is far below.
const MAX_LINE: usize = 4 << 20;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A JSON text.
    Data(Bytes),
    /// The end of the stream, `[DONE]`.
    Done,
}

/// A line over the limit.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("a line of the answer has more than {MAX_LINE} bytes")]
pub(crate) struct LineTooLong;

/// Splits a body into events.
#[derive(Debug, Default)]
pub(crate) struct EventReader {
    unread: BytesMut,
    /// Bytes of `unread` that have no line end.
    n_searched: usize,
}

impl EventReader {
    /// Takes bytes of the body.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.unread.extend_from_slice(bytes);
    }

    /// The next event; `None`: more bytes are needed.
    ///
    /// # Errors
    /// [`LineTooLong`].
    pub(crate) fn next(&mut self) -> Result<Option<Event>, LineTooLong> {
        loop {
            let searched = self.unread.get(self.n_searched..).unwrap_or_default();
            let Some(found) = searched.iter().position(|byte| *byte == b'\n') else {
                self.n_searched = self.unread.len();
                return if self.n_searched > MAX_LINE { Err(LineTooLong) } else { Ok(None) };
            };
            let end = self.n_searched + found;
            if end > MAX_LINE {
                return Err(LineTooLong);
            }
            let line = self.unread.split_to(end).freeze();
            self.unread.advance(1);
            self.n_searched = 0;
            let line = line.strip_suffix(b"\r").map_or_else(|| line.clone(), |kept| line.slice_ref(kept));
            // Comments, blank lines and other fields say nothing.
            let Some(data) = line.strip_prefix(b"data:") else { continue };
            let data = data.strip_prefix(b" ").unwrap_or(data);
            return Ok(Some(match data {
                b"[DONE]" => Event::Done,
                data => Event::Data(line.slice_ref(data)),
            }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(text: &'static str) -> Event {
        Event::Data(Bytes::from_static(text.as_bytes()))
    }

    #[test]
    fn events_are_the_same_however_the_body_is_cut() {
        let body = b": hello\r\n\r\ndata: {\"a\":1}\n\ndata:{\"b\":2}\r\n\r\nevent: x\ndata: [DONE]\n\nrest";
        let expect = [data("{\"a\":1}"), data("{\"b\":2}"), Event::Done];
        for size in 1..=body.len() {
            let mut reader = EventReader::default();
            let mut events = Vec::new();
            for piece in body.chunks(size) {
                reader.push(piece);
                while let Some(event) = reader.next().unwrap() {
                    events.push(event);
                }
            }
            assert_eq!(events, expect, "pieces of {size}");
        }
    }

    #[test]
    fn a_line_without_end_is_given_up() {
        let mut reader = EventReader::default();
        reader.push(b"data: ");
        for _ in 0..4 {
            reader.push(&vec![b'x'; 1 << 20]);
        }
        assert_eq!(reader.next(), Err(LineTooLong));
    }
}
