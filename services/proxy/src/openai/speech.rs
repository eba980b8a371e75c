//! `POST /v1/audio/transcriptions` and `/v1/audio/translations`.

mod form;
mod format;
mod options;

use super::api::{AdmittedCall, HttpApi, request_id};
use super::error::HttpError;
use super::sse;
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
    let stream = form.stream;
    let words = if form.options.words { WordTimes::Reported } else { WordTimes::Omitted };
    let request = into_request(form, &call, kind);
    let AdmittedCall { permit, .. } = call;
    let mut answer = api.orchestrator.start(request, permit)?;
    let first = next(&mut answer).await?;
    if stream {
        return Ok(sse::response(events(first, answer)));
    }
    let mut transcript = Transcript::new(kind, words);
    let mut piece = first;
    loop {
        match piece {
            Piece::Delta(delta) => transcript.add(delta),
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
        sampling: v1::Sampling { temperature: form.temperature, ..v1::Sampling::default() },
    }
}

#[derive(Serialize)]
#[serde(tag = "type")]
enum TranscriptEvent {
    #[serde(rename = "transcript.text.delta")]
    Delta { delta: String },
    #[serde(rename = "transcript.text.done")]
    Done { text: String, usage: format::DurationUsage },
}

/// An event per delta; the last one has the whole text. A failure is an event without `done` after it.
fn events(first: Piece, answer: Answer) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold((Some(Ok(first)), String::new(), answer), |(first, mut text, mut answer)| async move {
        let piece: Result<Piece, Failure> = match first {
            Some(piece) => piece,
            None => answer.next().await?,
        };
        let event = match piece {
            Ok(Piece::Delta(delta)) if delta.text.is_empty() => Bytes::new(),
            Ok(Piece::Delta(delta)) => {
                text.push_str(&delta.text);
                sse::event(&TranscriptEvent::Delta { delta: delta.text })
            }
            Ok(Piece::Summary(summary)) => {
                let text = text.trim().to_owned();
                sse::event(&TranscriptEvent::Done { text, usage: format::DurationUsage::of(&summary) })
            }
            Err(failure) => sse::error(&failure),
        };
        Some((event, (None, text, answer)))
    })
}
