//! The prompt of a transcript, for models that read audio among their tokens.

use crate::error::PromptError;
use triptych_core::ItemIdx;
use triptych_core::prompt::{
    Chat, LongForm, Message, MessagePart, Role, SpeechFallback, SpeechKind, SpeechTask, TextOrTokens,
};

/// Layout of a transcription's prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TranscriptionSpec {
    /// Control tokens around the audio.
    Tokens(TranscriptionTokens),
    /// A conversation by the chat template.
    Chat(TranscriptionChat),
}

/// Text of a transcription: control tokens around the audio, and the language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranscriptionTokens {
    /// Before the audio's rows.
    pub before: &'static str,
    /// Behind them.
    pub after: &'static str,
    /// Before the code of a language, where the client names one.
    pub language: &'static str,
    /// Last.
    pub end: &'static str,
}

/// A transcription as a conversation: the audio alone, words to expect as the system's part, and the start of an answer that names
/// the language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TranscriptionChat {
    /// Text before and behind the name of the language, where the client names one.
    pub around_language: [&'static str; 2],
    /// Codes of languages, each with its name.
    pub languages: &'static [[&'static str; 2]],
}

impl TranscriptionTokens {
    /// The text of a task; `audio` stands for the audio's rows.
    ///
    /// # Errors
    /// [`PromptError`] for what the model cannot be asked for.
    pub(super) fn text(&self, task: &SpeechTask, audio: &str) -> Result<String, PromptError> {
        check(task, [(task.prompt.is_some(), "reads no prompt with a transcription")])?;
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

impl TranscriptionChat {
    /// The conversation of a task, and the start of its answer.
    ///
    /// # Errors
    /// [`PromptError`] for what the model cannot be asked for.
    pub(super) fn chat(&self, task: &SpeechTask) -> Result<(Chat, String), PromptError> {
        let is_tokens = matches!(task.prompt, Some(TextOrTokens::Tokens(_)));
        check(task, [(is_tokens, "reads the prompt of a transcription as text, not as tokens")])?;
        let [before, after] = self.around_language;
        let start = match task.language.as_deref() {
            None => String::new(),
            Some(code) => match self.languages.iter().find(|[known, _]| *known == code) {
                Some([_, name]) => format!("{before}{name}{after}"),
                None => {
                    let codes: Vec<&str> = self.languages.iter().map(|[code, _]| *code).collect();
                    let text = format!("language is {code:?}, allowed are {}", codes.join(", "));
                    return Err(PromptError::Invalid(text));
                }
            },
        };
        let mut messages = Vec::new();
        if let Some(TextOrTokens::Text(text)) = &task.prompt {
            messages.push(Message { role: Role::System, parts: vec![MessagePart::Text(text.clone())] });
        }
        messages.push(Message { role: Role::User, parts: vec![MessagePart::Item(ItemIdx(0))] });
        Ok((messages.into(), start))
    }
}

/// Refuses what no such model can be asked for, and what `more` says that one cannot.
fn check(task: &SpeechTask, more: [(bool, &str); 1]) -> Result<(), PromptError> {
    // Transcriptions ask for Whisper's own thresholds unless a client has others.
    let asks_again = task.fallback.as_ref().is_some_and(|asked| *asked != SpeechFallback::default());
    let refused = [
        (task.kind == SpeechKind::Translate, "has no task of its own for translations"),
        (task.prefix.is_some(), "reads no prefix of a transcript"),
        (task.timestamps || task.word_timestamps, "writes no times: response_format may be json or text"),
        (task.long_form == LongForm::Sequential, "reads long audio at once"),
        (task.condition_on_previous, "does not condition on previous text"),
        (asks_again, "decodes a transcript once, whatever its thresholds"),
        (task.resume.is_some(), "does not resume in the middle of the audio"),
    ];
    match refused.iter().chain(&more).find(|(asked, _)| *asked) {
        Some((_, why)) => Err(PromptError::Invalid(format!("this model {why}"))),
        None => Ok(()),
    }
}
