//! An answer of vLLM's as a stream of a PD worker's. Dropping it closes the connection, and vLLM ends the request.

use crate::answer::AnswerReader;
use crate::ask::Ask;
use crate::client::lost;
use crate::failure::CallError;
use crate::server::VllmServer;
use crate::sse::{Event, EventReader};
use futures::stream::{self, BoxStream, StreamExt};
use reqwest::Response;
use std::collections::VecDeque;
use std::time::Instant;
use tonic::Status;
use triptych_proto::v1;
use triptych_proto::v1::pd_generate_response::Kind;

/// Messages of a PD worker.
pub(crate) type Messages = BoxStream<'static, Result<v1::PdGenerateResponse, Status>>;

/// An answer that is read.
struct AnswerStream {
    server: VllmServer,
    ask: Ask,
    response: Response,
    events: EventReader,
    answer: AnswerReader,
    pieces: VecDeque<v1::Delta>,
    has_ended: bool,
}

/// The answer in a response to `ask`, which was sent at `began`.
pub(crate) fn messages(server: VllmServer, ask: Ask, (response, began): (Response, Instant)) -> Messages {
    let answer = AnswerReader::new(ask.n_choices, began);
    let (events, pieces) = (EventReader::default(), VecDeque::new());
    let open = AnswerStream { server, ask, response, events, answer, pieces, has_ended: false };
    stream::unfold(open, |mut open| async move {
        if open.has_ended {
            return None;
        }
        let next = match open.next().await {
            Ok(kind) => {
                open.has_ended = matches!(kind, Kind::Summary(_));
                Ok(v1::PdGenerateResponse { kind: Some(kind) })
            }
            Err(e) => {
                open.has_ended = true;
                // What has begun is not begun again.
                Err(if open.answer.has_begun() {
                    e.into_status()
                } else {
                    open.server.explained(e, &open.ask).await
                })
            }
        };
        Some((next, open))
    })
    .boxed()
}

impl AnswerStream {
    async fn next(&mut self) -> Result<Kind, CallError> {
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                return Ok(Kind::Delta(piece));
            }
            match self.events.next().map_err(|e| CallError::Unreadable(e.to_string()))? {
                Some(Event::Data(chunk)) => self.pieces.extend(self.answer.read(&chunk, Instant::now())?),
                Some(Event::Done) => return self.answer.finish().map(Kind::Summary),
                None => match self.response.chunk().await.map_err(lost)? {
                    Some(bytes) => self.events.push(&bytes),
                    None => return Err(CallError::Lost("vLLM server: it closed its answer".into())),
                },
            }
        }
    }
}
