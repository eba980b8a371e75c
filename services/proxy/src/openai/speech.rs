//! `POST /v1/audio/transcriptions` and `/v1/audio/translations`.

mod form;
mod format;
mod options;

use super::api::{AdmittedCall, HttpApi, request_id};
use super::collected::CollectedLogprobs;
use super::error::HttpError;
use super::language_tag::LanguageTag;
use super::sse;
use super::token_logprob::Alternative;
use crate::orchestrate::{Answer, Piece};
use crate::request::{Api, Item, Request, Source};
use axum::extract::{Request as HttpRequest, State};
use axum::response::Response;
use bytes::Bytes;
use form::SpeechForm;
use format::{Transcript, WordTimes};
use futures::{Stream, stream};
use serde::Serialize;
use triptych_core::prompt::{Prompt, SpeechKind, SpeechTask, TextOrTokens};
use triptych_core::{Failure, ItemOptions, Modality, ModelName};
use triptych_proto::v1;

pub(super) async fn transcribe(
    State(api): State<HttpApi>,
    request: HttpRequest,
) -> Result<Response, HttpError> {
    answer(api, request, SpeechKind::Transcribe).await
}

pub(super) async fn translate(
    State(api): State<HttpApi>,
    request: HttpRequest,
) -> Result<Response, HttpError> {
    answer(api, request, SpeechKind::Translate).await
}

async fn answer(api: HttpApi, request: HttpRequest, kind: SpeechKind) -> Result<Response, HttpError> {
    let id = request_id(&request);
    let read = async {
        let call = api.admit(&request)?;
        let form = form::read(&api, &call, request).await?;
        Ok::<_, HttpError>((call, form))
    };
    let (call, form) = read.await.inspect_err(|e| api.refused(id, e))?;
    let format = form.format;
    let (stream, with_logprobs) = (form.stream, form.logprobs);
    let words = if form.options.words { WordTimes::Reported } else { WordTimes::Omitted };
    let request = into_request(form, &call, kind);
    let AdmittedCall { permit, .. } = call;
    let mut answer = api.orchestrator.start(request, permit)?;
    let first = next(&mut answer).await?;
    if stream {
        return Ok(sse::response(TranscriptEvents::new(with_logprobs).events(first, answer)));
    }
    let mut transcript = Transcript::new(kind, words);
    if with_logprobs {
        transcript = transcript.with_logprobs();
    }
    let mut logprobs = CollectedLogprobs::default();
    let mut piece = first;
    loop {
        match piece {
            Piece::Delta(delta) => {
                logprobs.add(&delta)?;
                transcript.add(delta);
            }
            Piece::Summary(summary) => return Ok(transcript.respond(summary, format)),
        }
        piece = next(&mut answer).await?;
    }
}

async fn next(answer: &mut Answer) -> Result<Piece, Failure> {
    answer.next().await.unwrap_or_else(|| Err(Failure::internal("an answer without an end")))
}

fn into_request(form: SpeechForm, call: &AdmittedCall, kind: SpeechKind) -> Request {
    let task = SpeechTask {
        kind,
        language: form.language,
        prompt: form.prompt.map(TextOrTokens::Text),
        prefix: form.options.prefix.map(TextOrTokens::Text),
        timestamps: form.format.has_times() || form.options.words,
        word_timestamps: form.options.words,
        long_form: form.options.long_form,
        condition_on_previous: form.options.condition_on_previous,
        fallback: form.options.fallback,
        resume: None,
    };
    let options = ItemOptions { vad: form.options.vad, ..ItemOptions::default() };
    Request {
        id: call.id,
        api: Api::Http,
        arrived: call.arrived,
        deadline: call.deadline,
        model: form.model.map(ModelName::new),
        prompt: Prompt::Speech(task),
        items: vec![Item {
            modality: Modality::Audio,
            source: Source::Bytes(form.file),
            options,
            param: "file".into(),
        }],
        caller: call.caller.clone(),
        priority: 0,
        encoder_prompt: None,
        src_lang: None,
        resumption: call.resumption,
        sampling: v1::Sampling {
            temperature: form.temperature,
            logprobs: form.logprobs.then_some(0),
            ..v1::Sampling::default()
        },
    }
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum TranscriptEvent {
    #[serde(rename = "transcript.text.delta")]
    Delta {
        delta: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<Vec<Alternative>>,
    },
    #[serde(rename = "transcript.text.done")]
    Done {
        text: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<Vec<Alternative>>,
        usage: format::TokenUsage,
    },
}

/// Turns an answer into events.
struct TranscriptEvents {
    tag: LanguageTag,
    text: String,
    /// Log-probabilities of the whole text, which the last event repeats.
    logprobs: Option<Vec<Alternative>>,
    /// Those of them that an event has had: a character may need several tokens.
    n_sent: usize,
    counted: CollectedLogprobs,
}

impl TranscriptEvents {
    fn new(with_logprobs: bool) -> Self {
        let logprobs = with_logprobs.then(Vec::new);
        let counted = CollectedLogprobs::default();
        Self { tag: LanguageTag::default(), text: String::new(), logprobs, n_sent: 0, counted }
    }

    /// An event per delta; the last one has the whole text. A failure is an event without `done` after it.
    fn events(self, first: Piece, answer: Answer) -> impl Stream<Item = Bytes> + Send + 'static {
        stream::unfold(Some((self, Some(Ok(first)), answer)), |state| async move {
            let (mut events, first, mut answer) = state?;
            let piece: Result<Piece, Failure> = match first {
                Some(piece) => piece,
                None => answer.next().await?,
            };
            match piece.and_then(|piece| events.event(piece)) {
                Ok(event) => Some((event, Some((events, None, answer)))),
                Err(failure) => Some((sse::error(&failure), None)),
            }
        })
    }

    fn event(&mut self, piece: Piece) -> Result<Bytes, Failure> {
        match piece {
            Piece::Delta(delta) => {
                self.counted.add(&delta)?;
                if let Some(logprobs) = &mut self.logprobs {
                    logprobs.extend(format::chosen(delta.logprobs));
                }
                let text = self.tag.read(delta.text);
                Ok(self.delta(text))
            }
            Piece::Summary(summary) => {
                let rest = self.tag.rest();
                let rest = self.delta(rest);
                let (text, logprobs) = (self.text.trim().to_owned(), self.logprobs.take());
                let usage = format::TokenUsage::of(&summary);
                Ok([rest, sse::event(&TranscriptEvent::Done { text, logprobs, usage })].concat().into())
            }
        }
    }

    /// The event of a further text; nothing for none.
    fn delta(&mut self, delta: String) -> Bytes {
        if delta.is_empty() {
            return Bytes::new();
        }
        self.text.push_str(&delta);
        let logprobs = self.logprobs.as_ref().map(|all| all.iter().skip(self.n_sent).cloned().collect());
        self.n_sent = self.logprobs.as_ref().map_or(0, Vec::len);
        sse::event(&TranscriptEvent::Delta { delta, logprobs })
    }
}
