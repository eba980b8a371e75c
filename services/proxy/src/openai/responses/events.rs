//! The stream of a response: OpenAI's events in OpenAI's order, each with its number.

use super::super::collected::CollectedLogprobs;
use super::super::sse;
use super::output::OutputWriter;
use super::response::ResponseFrame;
use super::schema::{Event, EventFields, Response};
use crate::orchestrate::{Answer, Piece};
use bytes::{Bytes, BytesMut};
use futures::{Stream, stream};
use serde::Serialize;
use tracing::Span;
use triptych_core::Failure;
use triptych_proto::v1;
use triptych_runtime::spans::served_failure;

/// Turns an answer into events.
pub(super) struct ResponseEvents {
    frame: ResponseFrame,
    writer: OutputWriter,
    logprobs: CollectedLogprobs,
    next_number: u64,
}

#[derive(Serialize)]
struct Numbered<'a> {
    sequence_number: u64,
    #[serde(flatten)]
    event: &'a Event,
}

impl ResponseEvents {
    /// A stream before its first event.
    pub(super) fn new(frame: ResponseFrame) -> Self {
        let writer = OutputWriter::new(&frame.head.id);
        Self { frame, writer, logprobs: CollectedLogprobs::default(), next_number: 0 }
    }

    /// Events for `first` and the rest of the answer; the last one has the whole response.
    pub(super) fn events(
        mut self,
        first: Piece,
        answer: Answer,
    ) -> impl Stream<Item = Bytes> + Send + 'static {
        let begun = self.begin();
        let rest = stream::unfold(Some((self, Some(Ok(first)), answer)), |state| async move {
            let (mut events, first, mut answer) = state?;
            let piece: Result<Piece, Failure> = match first {
                Some(piece) => piece,
                None => answer.next().await?,
            };
            match piece.and_then(|piece| events.counted(piece)) {
                Ok(Piece::Delta(delta)) => {
                    let written = events.writer.push(delta);
                    Some((numbered(&mut events.next_number, &written), Some((events, None, answer))))
                }
                Ok(Piece::Summary(summary)) => Some((events.end(&summary), None)),
                Err(failure) => Some((events.fail(&failure), None)),
            }
        });
        futures::StreamExt::chain(stream::iter([begun]), rest)
    }

    /// Holds the log-probabilities against their limit: the last event repeats them all.
    fn counted(&mut self, piece: Piece) -> Result<Piece, Failure> {
        if let Piece::Delta(delta) = &piece {
            self.logprobs.add(delta)?;
        }
        Ok(piece)
    }

    fn begin(&mut self) -> Bytes {
        let response = self.frame.in_progress();
        let events = [
            of_response("response.created", response.clone()),
            of_response("response.in_progress", response),
        ];
        numbered(&mut self.next_number, &events)
    }

    fn end(self, summary: &v1::Summary) -> Bytes {
        let Self { frame, writer, mut next_number, .. } = self;
        let (output, mut events) = writer.finish();
        let kind = if output.is_cut { "response.incomplete" } else { "response.completed" };
        events.push(of_response(kind, frame.ended(output, summary)));
        numbered(&mut next_number, &events)
    }

    fn fail(self, failure: &Failure) -> Bytes {
        served_failure(&Span::current(), failure.class);
        let Self { frame, writer, mut next_number, .. } = self;
        let response = frame.failed(writer.into_items(), failure);
        numbered(&mut next_number, &[of_response("response.failed", response)])
    }
}

/// The events with their numbers, from the next on.
fn numbered(next_number: &mut u64, events: &[Event]) -> Bytes {
    let mut bytes = BytesMut::new();
    for event in events {
        let numbered = Numbered { sequence_number: *next_number, event };
        bytes.extend_from_slice(&sse::named_event(event.kind, &numbered));
        *next_number += 1;
    }
    bytes.freeze()
}

fn of_response(kind: &'static str, response: Response) -> Event {
    Event { kind, fields: EventFields::Response { response: Box::new(response) } }
}
