//! A transcript in the formats of OpenAI's API.

use super::super::language_tag::LanguageTag;
use super::super::token_logprob::Alternative;
use super::form::TranscriptFormat;
use axum::Json;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;
use triptych_core::prompt::SpeechKind;
use triptych_proto::v1;

/// Milliseconds of a mel frame, in which `seek` counts the start of a segment's window (Whisper's convention).
const FRAME_MS: u32 = 10;

/// Times of words in the response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WordTimes {
    /// Listed.
    Reported,
    /// Left out.
    Omitted,
}

/// Collects a transcript.
pub(super) struct Transcript {
    kind: SpeechKind,
    words: WordTimes,
    tag: LanguageTag,
    text: String,
    segments: Vec<v1::Segment>,
    logprobs: Option<Vec<Alternative>>,
}

#[derive(Serialize)]
struct JsonTranscript<'a> {
    text: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<Alternative>>,
    usage: DurationUsage,
}

#[derive(Serialize)]
struct VerboseTranscript<'a> {
    task: &'static str,
    language: &'a str,
    duration: f64,
    text: &'a str,
    segments: Vec<Segment<'a>>,
    /// Present only if word times were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    words: Option<Vec<TimedWord<'a>>>,
    usage: DurationUsage,
}

#[derive(Serialize)]
struct TimedWord<'a> {
    word: &'a str,
    start: f64,
    end: f64,
    probability: f32,
}

#[derive(Serialize)]
struct Segment<'a> {
    id: usize,
    seek: u64,
    start: f64,
    end: f64,
    text: &'a str,
    tokens: &'a [u32],
    temperature: f32,
    avg_logprob: f32,
    compression_ratio: f64,
    no_speech_prob: f32,
}

/// Usage by duration of the audio.
#[derive(Serialize)]
struct DurationUsage {
    #[serde(rename = "type")]
    kind: &'static str,
    seconds: f64,
}

impl DurationUsage {
    fn of(summary: &v1::Summary) -> Self {
        Self { kind: "duration", seconds: summary.duration_s }
    }
}

/// Usage by tokens: the only one of a transcription that streams.
#[derive(Serialize)]
pub(super) struct TokenUsage {
    #[serde(rename = "type")]
    kind: &'static str,
    input_tokens: u32,
    output_tokens: u32,
    total_tokens: u64,
}

impl TokenUsage {
    pub(super) fn of(summary: &v1::Summary) -> Self {
        let usage = summary.usage.unwrap_or_default();
        let (input_tokens, output_tokens) = (usage.prompt_tokens, usage.completion_tokens);
        let total_tokens = u64::from(input_tokens) + u64::from(output_tokens);
        Self { kind: "tokens", input_tokens, output_tokens, total_tokens }
    }
}

impl Transcript {
    pub(super) fn new(kind: SpeechKind, words: WordTimes) -> Self {
        Self {
            kind,
            words,
            tag: LanguageTag::default(),
            text: String::new(),
            segments: Vec::new(),
            logprobs: None,
        }
    }

    /// With the log-probability of each token.
    #[must_use]
    pub(super) fn with_logprobs(self) -> Self {
        Self { logprobs: Some(Vec::new()), ..self }
    }

    pub(super) fn add(&mut self, delta: v1::Delta) {
        self.text.push_str(&self.tag.read(delta.text));
        self.segments.extend(delta.segments);
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.extend(chosen(delta.logprobs));
        }
    }

    pub(super) fn respond(mut self, summary: v1::Summary, format: TranscriptFormat) -> Response {
        self.text.push_str(&self.tag.rest());
        let text = self.text.trim().to_owned();
        if self.segments.is_empty() && !text.is_empty() {
            // A model without times gives one segment over the whole clip.
            let whole =
                v1::Segment { end_s: summary.duration_s, text: text.clone(), ..v1::Segment::default() };
            self.segments.push(whole);
        }
        let typed = |kind: &'static str, body: String| ([(header::CONTENT_TYPE, kind)], body).into_response();
        match format {
            TranscriptFormat::Json => {
                let (logprobs, usage) = (self.logprobs, DurationUsage::of(&summary));
                Json(JsonTranscript { text: &text, logprobs, usage }).into_response()
            }
            TranscriptFormat::Text => typed("text/plain; charset=utf-8", text + "\n"),
            TranscriptFormat::VerboseJson => Json(self.verbose(&text, &summary)).into_response(),
            TranscriptFormat::Srt => typed("application/x-subrip; charset=utf-8", self.srt()),
            TranscriptFormat::Vtt => typed("text/vtt; charset=utf-8", self.vtt()),
        }
    }

    fn verbose<'a>(&'a self, text: &'a str, summary: &'a v1::Summary) -> VerboseTranscript<'a> {
        let segment = |(id, s): (usize, &'a v1::Segment)| Segment {
            id,
            seek: u64::from(s.window_start_ms / FRAME_MS),
            start: s.start_s,
            end: s.end_s,
            text: &s.text,
            tokens: &s.token_ids,
            temperature: s.temperature,
            avg_logprob: s.avg_logprob,
            compression_ratio: compression_ratio(&s.text),
            no_speech_prob: s.no_speech_prob,
        };
        VerboseTranscript {
            task: match self.kind {
                SpeechKind::Transcribe => "transcribe",
                SpeechKind::Translate => "translate",
            },
            language: &summary.language,
            duration: summary.duration_s,
            text,
            segments: self.segments.iter().enumerate().map(segment).collect(),
            words: (self.words == WordTimes::Reported).then(|| self.words()),
            usage: DurationUsage::of(summary),
        }
    }

    fn words(&self) -> Vec<TimedWord<'_>> {
        let words = self.segments.iter().flat_map(|s| &s.words);
        words
            .map(|w| TimedWord {
                word: w.text.trim(),
                start: w.start_s,
                end: w.end_s,
                probability: w.probability,
            })
            .collect()
    }

    fn srt(&self) -> String {
        let mut out = String::new();
        for (i, s) in self.segments.iter().enumerate() {
            let start = clock(s.start_s, ',');
            let end = clock(s.end_s, ',');
            // Writing to a String cannot fail.
            let _ = write!(out, "{}\n{start} --> {end}\n{}\n\n", i + 1, s.text.trim());
        }
        out
    }

    fn vtt(&self) -> String {
        let mut out = "WEBVTT\n\n".to_owned();
        for s in &self.segments {
            let start = clock(s.start_s, '.');
            let end = clock(s.end_s, '.');
            let _ = write!(out, "{start} --> {end}\n{}\n\n", s.text.trim().replace("-->", "->"));
        }
        out
    }
}

/// The tokens of the text, each with its log-probability. Languages, tasks and times are tokens that Whisper writes too, and
/// spells in one way; they are no text.
pub(super) fn chosen(tokens: Vec<v1::ChosenToken>) -> impl Iterator<Item = Alternative> {
    let is_text = |token: &v1::TokenLogprob| !(token.text.starts_with("<|") && token.text.ends_with("|>"));
    tokens.into_iter().filter_map(|token| token.chosen).filter(is_text).map(Alternative::from)
}

/// `HH:MM:SS,mmm`.
fn clock(seconds: f64, mark: char) -> String {
    // The cast saturates; NaN becomes 0.
    let ms = (seconds * 1000.0).round() as u64;
    let (h, m, s) = (ms / 3_600_000, ms / 60_000 % 60, ms / 1000 % 60);
    format!("{h:02}:{m:02}:{s:02}{mark}{:03}", ms % 1000)
}

/// Bytes of the text per byte of its zlib form, as Whisper measures repetition.
fn compression_ratio(text: &str) -> f64 {
    let mut zlib = ZlibEncoder::new(Vec::new(), Compression::default());
    let compressed = zlib.write_all(text.as_bytes()).and_then(|()| zlib.finish());
    match compressed {
        Ok(bytes) if !text.is_empty() => text.len() as f64 / bytes.len().max(1) as f64,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_round_and_carry() {
        let cases = [
            (0.0, "00:00:00,000"),
            (1.2345, "00:00:01,235"),
            (59.9996, "00:01:00,000"),
            (3661.5, "01:01:01,500"),
            (-1.0, "00:00:00,000"),
            (f64::NAN, "00:00:00,000"),
        ];
        for (seconds, expect) in cases {
            assert_eq!(clock(seconds, ','), expect);
        }
    }

    #[test]
    fn repetition_compresses() {
        assert!(compression_ratio(&"la ".repeat(100)) > 10.0);
        assert!(compression_ratio("hello world") < 1.1);
        assert_eq!(compression_ratio(""), 1.0);
    }
}
