//! The prompt of a transcript, for models that read audio among their tokens.

use crate::error::PromptError;
use triptych_core::prompt::{LongForm, SpeechFallback, SpeechKind, SpeechTask};

/// Text of a transcription: control tokens around the audio, and the language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranscriptionSpec {
    /// Before the audio's rows.
    pub before: &'static str,
    /// Behind them.
    pub after: &'static str,
    /// Before the code of a language, where the client names one.
    pub language: &'static str,
    /// Last.
    pub end: &'static str,
}

impl TranscriptionSpec {
    /// The text of a task; `audio` stands for the audio's rows.
    ///
    /// # Errors
    /// [`PromptError`] for what the model cannot be asked for.
    pub(super) fn text(&self, task: &SpeechTask, audio: &str) -> Result<String, PromptError> {
        // Transcriptions ask for Whisper's own thresholds unless a client has others.
        let asks_again = task.fallback.as_ref().is_some_and(|asked| *asked != SpeechFallback::default());
        let refused = [
            (task.kind == SpeechKind::Translate, "has no task of its own for translations"),
            (task.prompt.is_some(), "reads no prompt with a transcription"),
            (task.prefix.is_some(), "reads no prefix of a transcript"),
            (task.timestamps || task.word_timestamps, "writes no times: response_format may be json or text"),
            (task.long_form == LongForm::Sequential, "reads long audio at once"),
            (task.condition_on_previous, "does not condition on previous text"),
            (asks_again, "decodes a transcript once, whatever its thresholds"),
            (task.resume.is_some(), "does not resume in the middle of the audio"),
        ];
        if let Some((_, why)) = refused.iter().find(|(asked, _)| *asked) {
            return Err(PromptError::Invalid(format!("this model {why}")));
        }
        let Self { before, after, language, end } = self;
        let language = match task.language.as_deref() {
            None => String::new(),
            Some(code) if code.len() == 2 && code.bytes().all(|b| b.is_ascii_lowercase()) => {
                format!("{language}{code}")
            }
            Some(code) => {
                let text = format!("language is {code:?}, allowed is a code of two letters such as \"en\"");
                return Err(PromptError::Invalid(text));
            }
        };
        Ok(format!("{before}{audio}{after}{language}{end}"))
    }
}
