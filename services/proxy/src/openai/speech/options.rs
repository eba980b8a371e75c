//! Transcription options: OpenAI's `chunking_strategy`, and fields that its API does not have.
//!
//! | field | values | |
//! |---|---|---|
//! | `chunking_strategy` | `auto`, or `{"type": "server_vad"}` | silence is skipped, and a window starts where speech does |
//! | `long_form` | `parallel` (default), `sequential` | windows in parallel, or one after the other |
//! | `condition_on_previous_text` | `true`, `false` (default) | with `sequential`, the transcript of a window prompts the next one |
//! | `prefix` | text | start of each window's transcript; it is not repeated |
//! | `compression_ratio_threshold` | a number (2.4), `none` | above it a window is decoded again |
//! | `logprob_threshold` | a number (-1), `none` | below it a window is decoded again |
//! | `no_speech_threshold` | a number (0.6), `none` | above it a window of low log-probability is left out |
//!
//! With a temperature of 0 (the default), a window that fails a threshold is decoded again at 0.2, 0.4 and so on up to 1,
//! as in OpenAI's API. Another temperature is used alone, unless a threshold is given. With `stream`, windows are checked
//! only when a threshold is given, since nothing of a window can be sent before it has passed.

use super::super::error::invalid_field;
use std::collections::HashMap;
use triptych_core::Failure;
use triptych_core::prompt::{LongForm, SpeechFallback};

/// The fields of this module.
pub(super) const FIELDS: [&str; 7] = [
    "chunking_strategy",
    "long_form",
    "condition_on_previous_text",
    "prefix",
    "compression_ratio_threshold",
    "logprob_threshold",
    "no_speech_threshold",
];

/// Options of a transcription.
#[derive(Debug, Default)]
pub(super) struct SpeechOptions {
    pub(super) words: bool,
    pub(super) vad: bool,
    pub(super) long_form: LongForm,
    pub(super) condition_on_previous: bool,
    pub(super) prefix: Option<String>,
    pub(super) fallback: Option<SpeechFallback>,
}

impl SpeechOptions {
    /// Reads the fields. `with_fallback`: windows are checked even if no threshold is given.
    pub(super) fn read(fields: &HashMap<String, String>, with_fallback: bool) -> Result<Self, Failure> {
        let field = |name: &str| fields.get(name).map(String::as_str);
        let long_form = match field("long_form") {
            None | Some("parallel") => LongForm::Parallel,
            Some("sequential") => LongForm::Sequential,
            Some(other) => return Err(invalid_field("long_form", other, "parallel and sequential")),
        };
        let condition_on_previous = match field("condition_on_previous_text") {
            None | Some("false" | "False" | "0") => false,
            Some("true" | "True" | "1") => true,
            Some(other) => return Err(invalid_field("condition_on_previous_text", other, "true and false")),
        };
        Ok(Self {
            words: false,
            vad: field("chunking_strategy").map(is_vad).transpose()?.unwrap_or(false),
            long_form,
            condition_on_previous,
            prefix: field("prefix").map(str::to_owned),
            fallback: fallback(fields, with_fallback)?,
        })
    }
}

fn is_vad(text: &str) -> Result<bool, Failure> {
    let named = |value: serde_json::Value| value["type"] == "server_vad";
    let object = serde_json::from_str(text).map(named).unwrap_or(false);
    if object || ["auto", "server_vad"].contains(&text) {
        return Ok(true);
    }
    Err(invalid_field("chunking_strategy", text, "auto and an object of type server_vad"))
}

fn fallback(
    fields: &HashMap<String, String>,
    with_fallback: bool,
) -> Result<Option<SpeechFallback>, Failure> {
    let SpeechFallback { temperatures, compression_ratio, logprob, no_speech } = SpeechFallback::default();
    let number = |name: &'static str, default: Option<f32>| match fields.get(name).map(|t| t.trim()) {
        None => Ok(default),
        Some("none" | "None" | "null") => Ok(None),
        Some(text) => match text.parse::<f32>().ok().filter(|n| n.is_finite()) {
            Some(n) => Ok(Some(n)),
            None => Err(invalid_field(name, text, "a number and none")),
        },
    };
    let fallback = SpeechFallback {
        temperatures,
        compression_ratio: number("compression_ratio_threshold", compression_ratio)?,
        logprob: number("logprob_threshold", logprob)?,
        no_speech: number("no_speech_threshold", no_speech)?,
    };
    let given = fields.keys().any(|name| name.ends_with("_threshold"));
    Ok((given || with_fallback).then_some(fallback))
}
