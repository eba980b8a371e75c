//! Prompt formats.
//!
//! An item (image, audio clip) never appears here with its bytes: parts refer to the request's item list.

mod chat;

pub use chat::{
    CallReference, Chat, ChatEnding, ChatFormat, Message, MessagePart, ReasoningSyntax, Role, Tool, ToolCall,
    ToolChoice, ToolSyntax,
};

/// Text or the tokens it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextOrTokens {
    /// Text, tokenized by the worker.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// Input of the decoder before its first generated token.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation, laid out by the model's chat template.
    Chat(Chat),
    /// One prompt. Decoder-only models read it; encoder-decoder models give it to the encoder, unless an item
    /// is attached, which then goes to the encoder and this to the decoder.
    Singleton(TextOrTokens),
    /// Both sides of an encoder-decoder model. `encoder` is `None` when an item takes its place.
    Explicit {
        /// For the encoder.
        encoder: Option<TextOrTokens>,
        /// For the decoder; the start token is prepended unless it is there.
        decoder: TextOrTokens,
    },
    /// A speech task: the item goes to the encoder, the decoder gets the model's task tokens.
    Speech(SpeechTask),
}

/// A speech task: transcription or translation, and its options.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct SpeechTask {
    /// Transcribe or translate.
    pub kind: SpeechKind,
    /// Two-letter language code of the speech; `None`: detected by the model, or its only language.
    pub language: Option<String>,
    /// Preceding text, as a model of spelling and style.
    pub prompt: Option<TextOrTokens>,
    /// Text with which the transcript of each window starts; not repeated in the answer.
    pub prefix: Option<TextOrTokens>,
    /// Ask the decoder for segment times.
    pub timestamps: bool,
    /// Ask for the time of each word.
    pub word_timestamps: bool,
    /// Strategy for a clip longer than one window.
    pub long_form: LongForm,
    /// Sequential only: the transcript of the windows before is the prompt of the next.
    pub condition_on_previous: bool,
    /// Decode a window again if its transcript fails the thresholds; `None`: never.
    pub fallback: Option<SpeechFallback>,
    /// Sequential only: the position to resume at; `None`: the beginning.
    pub resume: Option<SpeechResume>,
}

/// Strategy for a clip longer than one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LongForm {
    /// All windows in parallel, their texts stitched: fast.
    #[default]
    Parallel,
    /// One window after the other, each starting at the last reliable timestamp of the one before.
    Sequential,
}

/// Thresholds above which a window is decoded again at the next temperature. `None`: not checked.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeechFallback {
    /// Temperatures in the order of the attempts; 0 is greedy. At least one.
    pub temperatures: Vec<f32>,
    /// Highest gzip compression ratio of a transcript that is not repetitive.
    pub compression_ratio: Option<f32>,
    /// Lowest mean log-probability of a reliable transcript.
    pub logprob: Option<f32>,
    /// A window with an unreliable transcript and a higher no-speech probability than this is skipped.
    pub no_speech: Option<f32>,
}

impl Default for SpeechFallback {
    /// The values Whisper was published with.
    fn default() -> Self {
        Self {
            temperatures: vec![0.0, 0.2, 0.4, 0.6, 0.8, 1.0],
            compression_ratio: Some(2.4),
            logprob: Some(-1.0),
            no_speech: Some(0.6),
        }
    }
}

/// Position at which a sequential transcript resumes.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SpeechResume {
    /// Start of the window, in milliseconds from the start of the clip.
    pub start_ms: u32,
    /// The last tokens of the transcript so far, as many as a prompt may hold.
    pub previous: Vec<u32>,
    /// True if they are the prompt of the window: not after one that needed a high temperature.
    pub conditioned: bool,
}

/// Kind of a speech task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SpeechKind {
    /// Transcribe in the language of the speech.
    #[default]
    Transcribe,
    /// Translate into English.
    Translate,
}
