//! Prompt formats: what a request may ask with.
//!
//! An item (image, sound) never appears here with its bytes: parts point to the request's item list.

use crate::ItemIdx;

/// Text or the tokens it stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextOrTokens {
    /// Text, tokenized by the worker.
    Text(String),
    /// Token ids, used as they are.
    Tokens(Vec<u32>),
}

/// Who says a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Sets the rules.
    System,
    /// Asks.
    User,
    /// Answered before.
    Assistant,
}

impl Role {
    /// The word chat templates know it by.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

/// One piece of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Words.
    Text(String),
    /// The item at this place.
    Item(ItemIdx),
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What, in order.
    pub parts: Vec<Part>,
}

/// Everything that decides what the decoder reads first.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    /// A conversation, laid out by the model's chat template.
    Chat(Vec<Message>),
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

/// What to do with speech.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct SpeechTask {
    /// Transcribe or translate.
    pub kind: SpeechKind,
    /// Two-letter language code of the speech; `None`: detected by the model, or its only language.
    pub language: Option<String>,
    /// What was said before, that sets spelling and style.
    pub prompt: Option<TextOrTokens>,
    /// What the transcript of each window starts with: written already, and not repeated in the answer.
    pub prefix: Option<TextOrTokens>,
    /// Ask the decoder for segment times.
    pub timestamps: bool,
    /// Ask for the time of each word.
    pub word_timestamps: bool,
    /// How a sound longer than a window is read.
    pub long_form: LongForm,
    /// In sequence: what was written of the windows before is the prompt of the next.
    pub condition_on_previous: bool,
    /// Decode a window again that went wrong; `None`: once is enough.
    pub fallback: Option<Fallback>,
    /// In sequence: where to go on; `None`: at the beginning.
    pub resume: Option<Resume>,
}

/// How a sound longer than a window is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum LongForm {
    /// All windows side by side, their texts stitched: fast.
    #[default]
    Parallel,
    /// One window after the other, each starting where the one before stopped being sure.
    Sequential,
}

/// When a window is decoded again, at the next temperature. A threshold that is `None` is not looked at.
#[derive(Clone, Debug, PartialEq)]
pub struct Fallback {
    /// Tried in this order; 0 is greedy. At least one.
    pub temperatures: Vec<f32>,
    /// A text whose tokens can be compressed by more than this repeats itself.
    pub compression_ratio: Option<f32>,
    /// A text whose tokens have a lower mean log-probability is a guess.
    pub logprob: Option<f32>,
    /// A window that is a guess, and silent with a higher probability than this, is left out.
    pub no_speech: Option<f32>,
}

impl Default for Fallback {
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

/// Where a transcript in sequence goes on.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Resume {
    /// The start of the window, in milliseconds from the start of the sound.
    pub start_ms: u32,
    /// Tokens written so far, the last ones that a prompt may hold.
    pub previous: Vec<u32>,
    /// Whether they are the prompt of the window: not after one that took a high temperature.
    pub conditioned: bool,
}

/// Which of the two speech tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SpeechKind {
    /// Write down what is said, in its language.
    #[default]
    Transcribe,
    /// Write it in English.
    Translate,
}
