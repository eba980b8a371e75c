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
#[derive(Clone, Debug, PartialEq, Eq)]
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
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct SpeechTask {
    /// Transcribe or translate.
    pub kind: SpeechKind,
    /// Two-letter language code of the speech; `None`: detected by the model, or its only language.
    pub language: Option<String>,
    /// Text said before, that sets spelling and style.
    pub prompt: Option<String>,
    /// Ask the decoder for segment times.
    pub timestamps: bool,
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
