//! Settings of a session, as `session.update` changes them: fields that are there, and no others.

use super::super::error::quoted;
use super::audio::AudioFormat;
use serde_json::{Value, json};
use triptych_core::{Failure, ModelName};

/// Longest text of a setting, in bytes.
const MAX_TEXT: usize = 64 << 10;

/// Settings of a session.
#[derive(Clone, Debug, Default)]
pub(super) struct SessionSettings {
    /// The model; `None`: the only one that is served.
    pub(super) model: Option<ModelName>,
    pub(super) language: Option<String>,
    pub(super) prompt: Option<String>,
    pub(super) format: AudioFormat,
}

impl SessionSettings {
    /// The settings after an update. `has_audio`: the buffer has audio, whose format does not change.
    ///
    /// # Errors
    /// Invalid, with the field, for one that is not honoured.
    pub(super) fn updated(&self, session: &Value, has_audio: bool) -> Result<Self, Failure> {
        let mut next = self.clone();
        match session.get("type").and_then(Value::as_str) {
            Some("transcription") => {}
            other => {
                let what = other.map_or("missing".to_owned(), quoted);
                let message =
                    format!("type is {what}, allowed is transcription: nothing is spoken or answered");
                return Err(Failure::invalid(message).with_param("session.type"));
            }
        }
        refuse(session, "include", "session.include")?;
        let Some(input) = session.pointer("/audio/input").filter(|value| !value.is_null()) else {
            return Ok(next);
        };
        refuse(input, "noise_reduction", "session.audio.input.noise_reduction")?;
        refuse(input, "turn_detection", "session.audio.input.turn_detection")?;
        if let Some(format) = input.get("format").filter(|value| !value.is_null()) {
            next.format = format_of(format)?;
            if has_audio && next.format != self.format {
                let message = "the format cannot change while the buffer has audio: commit or clear it";
                return Err(Failure::invalid(message).with_param("session.audio.input.format"));
            }
        }
        if let Some(transcription) = input.get("transcription").filter(|value| !value.is_null()) {
            next.transcribe_as(transcription)?;
        }
        Ok(next)
    }

    fn transcribe_as(&mut self, transcription: &Value) -> Result<(), Failure> {
        let at = "session.audio.input.transcription";
        for field in ["keywords", "languages"] {
            refuse(transcription, field, &format!("{at}.{field}"))?;
        }
        let text = |field: &str| match transcription.get(field) {
            None => Ok(None),
            Some(Value::Null) => Ok(Some(None)),
            Some(Value::String(text)) if text.len() <= MAX_TEXT => {
                Ok(Some(Some(text.clone()).filter(|text| !text.is_empty())))
            }
            Some(_) => {
                let message = format!("{field} is no text of up to {MAX_TEXT} bytes");
                Err(Failure::invalid(message).with_param(format!("{at}.{field}")))
            }
        };
        if let Some(model) = text("model")? {
            self.model = model.map(ModelName::new);
        }
        if let Some(language) = text("language")? {
            self.language = language;
        }
        if let Some(prompt) = text("prompt")? {
            self.prompt = prompt;
        }
        Ok(())
    }

    /// The session's object, as OpenAI has it.
    pub(super) fn object(&self, id: &str, expires_at: u64) -> Value {
        json!({
            "type": "transcription", "object": "realtime.transcription_session", "id": id,
            "expires_at": expires_at, "include": null,
            "audio": {"input": {
                "format": match self.format {
                    AudioFormat::Pcm { rate } => json!({"type": "audio/pcm", "rate": rate}),
                    other => json!(other),
                },
                "noise_reduction": null, "turn_detection": null,
                "transcription": {
                    "model": self.model.as_ref().map(ModelName::as_str),
                    "language": self.language, "prompt": self.prompt,
                },
            }},
        })
    }
}

/// Refuses a field that asks for something.
fn refuse(object: &Value, field: &str, param: &str) -> Result<(), Failure> {
    let is_empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        _ => false,
    };
    match object.get(field) {
        Some(value) if !is_empty(value) => {
            Err(Failure::invalid(format!("{field} is not supported by this server")).with_param(param))
        }
        _ => Ok(()),
    }
}

fn format_of(format: &Value) -> Result<AudioFormat, Failure> {
    let param = "session.audio.input.format";
    let name = format.get("type").and_then(Value::as_str).unwrap_or_default();
    let rate = match format.get("rate") {
        None | Some(Value::Null) => None,
        // A rate that is no such number is outside every range.
        Some(rate) => Some(rate.as_u64().and_then(|rate| u32::try_from(rate).ok()).unwrap_or(0)),
    };
    AudioFormat::new(name, rate).map_err(|failure| failure.with_param(param))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(input: Value) -> Value {
        json!({"type": "transcription", "audio": {"input": input}})
    }

    #[test]
    fn fields_that_are_there_change_and_others_stay() {
        let first = input(json!({
            "format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": null,
            "transcription": {"model": "whisper", "language": "de", "prompt": "Ada"},
        }));
        let settings = SessionSettings::default().updated(&first, false).unwrap();
        let second = input(json!({"transcription": {"language": null}}));
        let settings = settings.updated(&second, true).unwrap();
        assert_eq!(settings.model.as_ref().map(ModelName::as_str), Some("whisper"));
        assert_eq!((settings.language.as_deref(), settings.prompt.as_deref()), (None, Some("Ada")));
        let object = settings.object("sess_1", 7);
        assert_eq!(object["audio"]["input"]["format"], json!({"type": "audio/pcm", "rate": 16_000}));
        assert_eq!(object["audio"]["input"]["transcription"]["model"], "whisper");
    }

    #[test]
    fn what_is_not_honoured_is_refused_by_its_name() {
        for (update, param, has_audio) in [
            (json!({}), "type", false),
            (json!({"type": "realtime"}), "type", false),
            (
                json!({"type": "transcription", "include": ["item.input_audio_transcription.logprobs"]}),
                "include",
                false,
            ),
            (input(json!({"turn_detection": {"type": "server_vad"}})), "audio.input.turn_detection", false),
            (input(json!({"noise_reduction": {"type": "near_field"}})), "audio.input.noise_reduction", false),
            (input(json!({"format": {"type": "audio/opus"}})), "audio.input.format", false),
            (input(json!({"format": {"type": "audio/pcm", "rate": -1}})), "audio.input.format", false),
            (input(json!({"format": {"type": "audio/pcmu"}})), "audio.input.format", true),
            (
                input(json!({"transcription": {"keywords": ["Ada"]}})),
                "audio.input.transcription.keywords",
                false,
            ),
            (input(json!({"transcription": {"model": 7}})), "audio.input.transcription.model", false),
        ] {
            let refused = SessionSettings::default().updated(&update, has_audio).unwrap_err();
            assert_eq!(refused.param, Some(format!("session.{param}")), "{refused}");
        }
    }
}
