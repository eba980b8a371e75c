//! The transcript of a part of a stream: one request to the cluster, as any transcription is.
//!
//! Models differ in what a transcription may ask of them. A refusal of what the session adds by itself (times, a check of
//! silence, the text before) is no failure: it is asked without that, from then on.

use super::super::language_tag::LanguageTag;
use super::settings::SessionSettings;
use crate::admission::Permit;
use crate::auth::Caller;
use crate::orchestrate::{Orchestrator, Piece};
use crate::request::{Api, Item, Request, Resumption, Source};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use triptych_core::prompt::{Prompt, SpeechFallback, SpeechTask, TextOrTokens};
use triptych_core::{Failure, FailureClass, ItemOptions, Modality, RequestId};
use triptych_proto::v1;

/// A transcript and its segments.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Transcript {
    pub(super) text: String,
    /// In order; empty where the model tells no times.
    pub(super) segments: Vec<TranscriptSegment>,
}

/// A segment of a transcript.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TranscriptSegment {
    /// Its end, in seconds from the beginning of the part.
    pub(super) end_s: f64,
    pub(super) text: String,
}

/// Extras of a transcription, beyond the session's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Extras {
    /// Times of segments, a check for silence, and the text before as a prompt.
    TimesAndContext,
    /// Times of segments and a check for silence.
    Times,
    /// Nothing.
    Nothing,
}

impl Extras {
    /// Extras after a refusal; `None`: it was not of them.
    pub(super) fn after(self, failure: &Failure) -> Option<Self> {
        let is_refusal = failure.class == FailureClass::InvalidArgument;
        match self {
            Self::TimesAndContext if is_refusal => Some(Self::Times),
            Self::Times if is_refusal => Some(Self::Nothing),
            _ => None,
        }
    }
}

/// The parts of an admitted session that its transcriptions use.
#[derive(Clone)]
pub(super) struct Transcriber {
    pub(super) orchestrator: Arc<Orchestrator>,
    pub(super) permit: Permit,
    pub(super) caller: Caller,
    pub(super) max_time: Duration,
}

/// A transcription that is to be made.
pub(super) struct PartToHear {
    /// The audio, as a file.
    pub(super) file: Bytes,
    pub(super) settings: SessionSettings,
    pub(super) extras: Extras,
    /// Text before it; empty: none.
    pub(super) context: String,
}

impl Transcriber {
    /// Transcribes a part. Dropping the future ends the work on it.
    ///
    /// # Errors
    /// Those of any transcription.
    pub(super) async fn hear(self, part: PartToHear) -> Result<Transcript, Failure> {
        let request = self.request(part);
        let mut answer = self.orchestrator.start(request, self.permit)?;
        let (mut tag, mut found) = (LanguageTag::default(), Transcript::default());
        loop {
            let piece = answer.next().await;
            match piece.unwrap_or_else(|| Err(Failure::internal("an answer without an end")))? {
                Piece::Delta(delta) => {
                    found.text.push_str(&tag.read(delta.text));
                    let segment = |s: v1::Segment| TranscriptSegment { end_s: s.end_s, text: s.text };
                    found.segments.extend(delta.segments.into_iter().map(segment));
                }
                Piece::Summary(_) => {
                    found.text.push_str(&tag.rest());
                    return Ok(found);
                }
            }
        }
    }

    fn request(&self, part: PartToHear) -> Request {
        let PartToHear { file, settings, extras, context } = part;
        let with_times = extras != Extras::Nothing;
        let context = if extras == Extras::TimesAndContext { context } else { String::new() };
        let prompt = [settings.prompt.unwrap_or_default(), context].join(" ").trim().to_owned();
        let task = SpeechTask {
            language: settings.language,
            prompt: (!prompt.is_empty()).then_some(TextOrTokens::Text(prompt)),
            timestamps: with_times,
            // One attempt: text of another temperature would agree with nothing. Silence is left out.
            fallback: with_times
                .then(|| SpeechFallback { temperatures: vec![0.0], ..SpeechFallback::default() }),
            ..SpeechTask::default()
        };
        let arrived = Instant::now();
        Request {
            id: RequestId::from_bits(rand::random()),
            api: Api::Http,
            arrived,
            deadline: arrived + self.max_time,
            model: settings.model,
            prompt: Prompt::Speech(task),
            items: vec![Item {
                modality: Modality::Audio,
                source: Source::Bytes(file),
                options: ItemOptions::default(),
                param: "audio".into(),
            }],
            caller: self.caller.clone(),
            priority: 0,
            encoder_prompt: None,
            src_lang: None,
            resumption: Resumption::GoOn,
            sampling: v1::Sampling { temperature: Some(0.0), ..v1::Sampling::default() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_model_refuses_is_left_out_one_after_the_other() {
        let refused = Failure::invalid("no prompts");
        let mut extras = Extras::TimesAndContext;
        for expect in [Some(Extras::Times), Some(Extras::Nothing), None] {
            let next = extras.after(&refused);
            assert_eq!(next, expect);
            extras = next.unwrap_or(extras);
        }
        assert_eq!(Extras::Times.after(&Failure::unavailable("gone")), None);
    }
}
