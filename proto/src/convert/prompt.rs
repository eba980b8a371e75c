//! Prompts.

use super::{WireError, required};
use crate::v1;
use triptych_core::prompt::{
    LongForm, Prompt, SpeechFallback, SpeechKind, SpeechResume, SpeechTask, TextOrTokens,
};

/// Most temperatures of a fallback.
const MAX_TEMPERATURES: usize = 16;

impl From<TextOrTokens> for v1::TextOrTokens {
    fn from(t: TextOrTokens) -> Self {
        use v1::text_or_tokens::Kind;
        Self {
            kind: Some(match t {
                TextOrTokens::Text(text) => Kind::Text(text),
                TextOrTokens::Tokens(ids) => Kind::Tokens(v1::TokenIds { ids }),
            }),
        }
    }
}

impl TryFrom<v1::TextOrTokens> for TextOrTokens {
    type Error = WireError;

    fn try_from(t: v1::TextOrTokens) -> Result<Self, WireError> {
        use v1::text_or_tokens::Kind;
        Ok(match required(t.kind, "text or tokens")? {
            Kind::Text(text) => Self::Text(text),
            Kind::Tokens(v1::TokenIds { ids }) => Self::Tokens(ids),
        })
    }
}

impl From<Prompt> for v1::Prompt {
    fn from(p: Prompt) -> Self {
        use v1::prompt::{Explicit, Kind};
        let kind = match p {
            Prompt::Chat(chat) => Kind::Chat(chat.into()),
            Prompt::Singleton(t) => Kind::Singleton(t.into()),
            Prompt::Explicit { encoder, decoder } => {
                Kind::Explicit(Explicit { encoder: encoder.map(Into::into), decoder: Some(decoder.into()) })
            }
            Prompt::Speech(task) => Kind::Speech(task.into()),
        };
        Self { kind: Some(kind) }
    }
}

impl TryFrom<v1::Prompt> for Prompt {
    type Error = WireError;

    fn try_from(p: v1::Prompt) -> Result<Self, WireError> {
        use v1::prompt::Kind;
        Ok(match required(p.kind, "prompt")? {
            Kind::Chat(chat) => Self::Chat(chat.try_into()?),
            Kind::Singleton(t) => Self::Singleton(t.try_into()?),
            Kind::Explicit(e) => Self::Explicit {
                encoder: e.encoder.map(TryInto::try_into).transpose()?,
                decoder: required(e.decoder, "prompt.explicit.decoder")?.try_into()?,
            },
            Kind::Speech(task) => Self::Speech(task.try_into()?),
        })
    }
}

impl From<SpeechTask> for v1::SpeechTask {
    fn from(t: SpeechTask) -> Self {
        let kind = match t.kind {
            SpeechKind::Transcribe => v1::SpeechKind::Transcribe,
            SpeechKind::Translate => v1::SpeechKind::Translate,
        };
        let long_form = match t.long_form {
            LongForm::Parallel => v1::LongForm::Parallel,
            LongForm::Sequential => v1::LongForm::Sequential,
        };
        let (prompt, prompt_tokens) = split_fields(t.prompt);
        let (prefix, prefix_tokens) = split_fields(t.prefix);
        Self {
            kind: kind.into(),
            language: t.language,
            prompt,
            prompt_tokens,
            prefix,
            prefix_tokens,
            timestamps: t.timestamps,
            word_timestamps: t.word_timestamps,
            long_form: long_form.into(),
            condition_on_previous: t.condition_on_previous,
            fallback: t.fallback.map(Into::into),
            resume: t.resume.map(Into::into),
        }
    }
}

/// Splits text or tokens into two fields, one of them empty.
fn split_fields(value: Option<TextOrTokens>) -> (Option<String>, Vec<u32>) {
    match value {
        None => (None, Vec::new()),
        Some(TextOrTokens::Text(text)) => (Some(text), Vec::new()),
        Some(TextOrTokens::Tokens(ids)) => (None, ids),
    }
}

/// Merges text and tokens; both at once is an error.
fn merge_fields(
    text: Option<String>,
    ids: Vec<u32>,
    field: &'static str,
) -> Result<Option<TextOrTokens>, WireError> {
    match (text, ids.is_empty()) {
        (None, true) => Ok(None),
        (Some(text), true) => Ok(Some(TextOrTokens::Text(text))),
        (None, false) => Ok(Some(TextOrTokens::Tokens(ids))),
        (Some(_), false) => {
            Err(WireError::Value { field, message: "given as text and as tokens, one is needed".into() })
        }
    }
}

impl From<SpeechFallback> for v1::SpeechFallback {
    fn from(f: SpeechFallback) -> Self {
        Self {
            temperatures: f.temperatures,
            compression_ratio: f.compression_ratio,
            logprob: f.logprob,
            no_speech: f.no_speech,
        }
    }
}

impl TryFrom<v1::SpeechFallback> for SpeechFallback {
    type Error = WireError;

    fn try_from(f: v1::SpeechFallback) -> Result<Self, WireError> {
        let wrong = |field, value: f32, allowed: &str| {
            Err(WireError::Value { field, message: format!("is {value}, allowed is {allowed}") })
        };
        if let Some(t) = f.temperatures.iter().find(|t| !(0.0..=2.0).contains(*t)) {
            return wrong("speech.fallback.temperatures", *t, "0 to 2");
        }
        if f.temperatures.len() > MAX_TEMPERATURES {
            let message = format!("has {} values, the limit is {MAX_TEMPERATURES}", f.temperatures.len());
            return Err(WireError::Value { field: "speech.fallback.temperatures", message });
        }
        if let Some(ratio) = f.compression_ratio.filter(|r| !r.is_finite()) {
            return wrong("speech.fallback.compression_ratio", ratio, "a number");
        }
        if let Some(logprob) = f.logprob.filter(|l| !l.is_finite()) {
            return wrong("speech.fallback.logprob", logprob, "a number");
        }
        if let Some(p) = f.no_speech.filter(|p| !p.is_finite()) {
            return wrong("speech.fallback.no_speech", p, "a number");
        }
        let temperatures =
            if f.temperatures.is_empty() { Self::default().temperatures } else { f.temperatures };
        Ok(Self {
            temperatures,
            compression_ratio: f.compression_ratio,
            logprob: f.logprob,
            no_speech: f.no_speech,
        })
    }
}

impl From<SpeechResume> for v1::SpeechResume {
    fn from(r: SpeechResume) -> Self {
        Self { start_ms: r.start_ms, previous: r.previous, conditioned: r.conditioned }
    }
}

impl From<v1::SpeechResume> for SpeechResume {
    fn from(r: v1::SpeechResume) -> Self {
        Self { start_ms: r.start_ms, previous: r.previous, conditioned: r.conditioned }
    }
}

impl TryFrom<v1::SpeechTask> for SpeechTask {
    type Error = WireError;

    fn try_from(t: v1::SpeechTask) -> Result<Self, WireError> {
        let kind = match v1::SpeechKind::try_from(t.kind) {
            Ok(v1::SpeechKind::Unspecified | v1::SpeechKind::Transcribe) => SpeechKind::Transcribe,
            Ok(v1::SpeechKind::Translate) => SpeechKind::Translate,
            Err(_) => return Err(WireError::Enum { field: "speech.kind", value: t.kind, set: "SpeechKind" }),
        };
        let long_form = match v1::LongForm::try_from(t.long_form) {
            Ok(v1::LongForm::Unspecified | v1::LongForm::Parallel) => LongForm::Parallel,
            Ok(v1::LongForm::Sequential) => LongForm::Sequential,
            Err(_) => {
                let (field, value) = ("speech.long_form", t.long_form);
                return Err(WireError::Enum { field, value, set: "LongForm" });
            }
        };
        Ok(Self {
            kind,
            language: t.language,
            prompt: merge_fields(t.prompt, t.prompt_tokens, "speech.prompt")?,
            prefix: merge_fields(t.prefix, t.prefix_tokens, "speech.prefix")?,
            timestamps: t.timestamps,
            word_timestamps: t.word_timestamps,
            long_form,
            condition_on_previous: t.condition_on_previous,
            fallback: t.fallback.map(TryInto::try_into).transpose()?,
            resume: t.resume.map(Into::into),
        })
    }
}
