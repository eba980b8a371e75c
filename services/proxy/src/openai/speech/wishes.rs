//! How a sound is to be read: OpenAI's `chunking_strategy`, and fields that its API does not have.
//!
//! | field | values | |
//! |---|---|---|
//! | `chunking_strategy` | `auto`, or `{"type": "server_vad"}` | silence is skipped, and a window starts where speech does |
//! | `long_form` | `parallel` (default), `sequential` | windows side by side, or one after the other |
//! | `condition_on_previous_text` | `true`, `false` (default) | in sequence, what was written prompts the next window |
//! | `prefix` | text | what each window's transcript starts with; it is not repeated |
//! | `compression_ratio_threshold` | a number (2.4), `none` | above it a window is decoded again |
//! | `logprob_threshold` | a number (-1), `none` | below it a window is decoded again |
//! | `no_speech_threshold` | a number (0.6), `none` | above it a window that is a guess is left out |
//!
//! As OpenAI has it, a temperature of 0 (the default) means that a window that goes wrong is decoded again at 0.2, 0.4
//! and so on up to 1; another temperature is the only one, unless a threshold is given. With `stream` windows are
//! judged only when a threshold is given, since nothing of a window can go out before it has passed.

use super::form::wrong;
use std::collections::HashMap;
use triptych_core::Failure;
use triptych_core::prompt::{LongForm, SpeechFallback};

/// The fields that are read here.
pub(super) const FIELDS: [&str; 7] = [
    "chunking_strategy",
    "long_form",
    "condition_on_previous_text",
    "prefix",
    "compression_ratio_threshold",
    "logprob_threshold",
    "no_speech_threshold",
];

/// How a sound is to be read.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    pub(super) words: bool,
    pub(super) vad: bool,
    pub(super) long_form: LongForm,
    pub(super) condition_on_previous: bool,
    pub(super) prefix: Option<String>,
    pub(super) fallback: Option<SpeechFallback>,
}

impl Wishes {
    /// Reads the fields. `judged`: windows are, also without a threshold.
    pub(super) fn read(fields: &HashMap<String, String>, judged: bool) -> Result<Self, Failure> {
        let field = |name: &str| fields.get(name).map(String::as_str);
        let long_form = match field("long_form") {
            None | Some("parallel") => LongForm::Parallel,
            Some("sequential") => LongForm::Sequential,
            Some(other) => return Err(wrong("long_form", other, "parallel and sequential")),
        };
        let condition_on_previous = match field("condition_on_previous_text") {
            None | Some("false" | "False" | "0") => false,
            Some("true" | "True" | "1") => true,
            Some(other) => return Err(wrong("condition_on_previous_text", other, "true and false")),
        };
        Ok(Self {
            words: false,
            vad: field("chunking_strategy").map(is_vad).transpose()?.unwrap_or(false),
            long_form,
            condition_on_previous,
            prefix: field("prefix").map(str::to_owned),
            fallback: fallback(fields, judged)?,
        })
    }
}

fn is_vad(text: &str) -> Result<bool, Failure> {
    let named = |value: serde_json::Value| value["type"] == "server_vad";
    let object = serde_json::from_str(text).map(named).unwrap_or(false);
    if object || ["auto", "server_vad"].contains(&text) {
        return Ok(true);
    }
    Err(wrong("chunking_strategy", text, "auto and an object of type server_vad"))
}

fn fallback(fields: &HashMap<String, String>, judged: bool) -> Result<Option<SpeechFallback>, Failure> {
    let SpeechFallback { temperatures, compression_ratio, logprob, no_speech } = SpeechFallback::default();
    let number = |name: &'static str, default: Option<f32>| match fields.get(name).map(|t| t.trim()) {
        None => Ok(default),
        Some("none" | "None" | "null") => Ok(None),
        Some(text) => match text.parse::<f32>().ok().filter(|n| n.is_finite()) {
            Some(n) => Ok(Some(n)),
            None => Err(wrong(name, text, "a number and none")),
        },
    };
    let fallback = SpeechFallback {
        temperatures,
        compression_ratio: number("compression_ratio_threshold", compression_ratio)?,
        logprob: number("logprob_threshold", logprob)?,
        no_speech: number("no_speech_threshold", no_speech)?,
    };
    let given = fields.keys().any(|name| name.ends_with("_threshold"));
    Ok((given || judged).then_some(fallback))
}
