//! A prompt and the metadata of its items, laid out as decoder sequences.
//!
//! [`ChatVl`], [`ChatCross`] and [`ChatTowers`] serve vision-language models, [`ChatText`] decoders of text alone, [`Seq2SeqPrompt`] encoder-decoder models of text; the
//! builders of speech models are in [`crate::speech`]. All are made with `from_dir(model directory, tokenizer)`. They read
//! metadata of items only, never rows or pixels, and know no scheduler.

mod chat_cross;
mod chat_text;
mod chat_towers;
mod chat_vl;
mod conversation;
pub(crate) mod generation;
mod item_rows;
mod placeholder;
mod positions;
mod seq2seq;
mod template;
mod transcription;

pub use chat_cross::ChatCross;
pub(crate) use chat_cross::N_INPUT_ONLY;
pub use chat_text::ChatText;
pub use chat_towers::{ChatTowers, TowerRows};
pub use chat_vl::{ChatVl, PromptLimits};
pub use placeholder::{
    FrameTimes, LineLayout, PartsLayout, PlaceholderSpec, RowPositions, TileLayout, TileText, TokenName,
    VideoPlaceholder,
};
pub use seq2seq::{Seq2SeqLimits, Seq2SeqPrompt};
pub use template::{ChatTemplate, ContentFormat, TemplateInput, TemplateMessage, TemplatePart};
pub use transcription::{TranscriptionChat, TranscriptionSpec, TranscriptionTokens};

use crate::error::PromptError;
use crate::rules::LogitRules;
use crate::speech::SpeechInfo;
use triptych_core::prompt::{Chat, Prompt};
use triptych_core::sampling::BeamParams;
use triptych_core::{EncodedItem, ItemIdx};

/// Consecutive placeholder tokens that an item's rows replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ItemSpan {
    /// The item.
    pub item: ItemIdx,
    /// First row of the item; the spans of an item have its rows in order.
    pub first_row: u32,
    /// First token of the span.
    pub first_token: u32,
    /// Number of tokens, the same as of rows.
    pub n_tokens: u32,
}

/// The rows of an item that a sequence cross-attends to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossInput {
    /// The item.
    pub item: ItemIdx,
    /// First row, from 0.
    pub first_row: u32,
    /// Number of rows.
    pub n_rows: u32,
    /// First token that attends to them: earlier ones skip the layers that cross-attend, or attend to an input before. 0: every
    /// token does.
    pub first_token: u32,
}

/// Meaning of the generated tokens of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum OutputKind {
    /// Text.
    Text,
    /// One window of speech.
    Speech {
        /// Start of the window in the audio, in seconds.
        offset_s: f64,
        /// End of the window's audio, in seconds.
        end_s: f64,
        /// True if times are among the tokens.
        timestamps: bool,
    },
}

/// A decoder sequence, ready to be admitted.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedSequence {
    /// Prompt tokens, placeholders expanded.
    pub tokens: Vec<u32>,
    /// Position of each prompt token, `[tokens.len()]`.
    pub positions: Vec<[u32; 3]>,
    /// Position of the first generated token; later ones follow by 1 in all three parts.
    pub next_position: u32,
    /// Item rows among the tokens; ascending and disjoint.
    pub spans: Vec<ItemSpan>,
    /// Encoder rows that it cross-attends to, ascending by their first tokens.
    ///
    /// A token attends to the last input that begins at it or before, and to those that begin at the tokens just before
    /// that one: inputs at consecutive tokens are attended to together.
    pub cross: Vec<CrossInput>,
    /// Rules of the family on its logits.
    pub rules: LogitRules,
    /// Tokens that end it.
    pub end_tokens: Vec<u32>,
    /// Meaning of its generated tokens.
    pub output: OutputKind,
}

/// Defaults of a model, from `generation_config.json`, for what a request leaves open.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// Temperature; 0 when the model's default is greedy.
    pub temperature: f32,
    /// Nucleus: probability mass that tokens are sampled from, above 0 up to 1.
    pub top_p: f32,
    /// Top k; `None`: all.
    pub top_k: Option<u32>,
    /// Least probability, as a share of the most probable token's; 0: all.
    pub min_p: f32,
    /// Beam search; only where the model's default is not to sample.
    pub beams: Option<BeamParams>,
    /// Divides the logits of tokens of the prompt and of the output.
    pub repetition_penalty: Option<f32>,
    /// Tokens of an n-gram that is not generated twice.
    pub no_repeat_ngram_size: Option<u32>,
    /// Tokens of an n-gram of the encoder's text that is not generated.
    pub encoder_no_repeat_ngram_size: Option<u32>,
    /// True if logits are normalised again after the logits processors.
    pub renormalize_logits: bool,
    /// Maximum length of the output.
    pub max_length: Option<AnswerLength>,
    /// Minimum length of the output: no end token before it.
    pub min_length: Option<AnswerLength>,
}

/// A length of the output as `generation_config.json` states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerLength {
    /// Generated tokens.
    New(u32),
    /// Decoder tokens, those of the prompt and the start token included.
    WithPrompt(u32),
}

impl AnswerLength {
    /// Tokens to generate after a decoder prompt of `n_prompt` tokens, its start token included.
    pub fn after(self, n_prompt: usize) -> u32 {
        match self {
            Self::New(n) => n,
            Self::WithPrompt(n) => n.saturating_sub(u32::try_from(n_prompt).unwrap_or(u32::MAX)),
        }
    }
}

impl Default for SamplingDefaults {
    /// Greedy, and nothing else.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: None,
            min_p: 0.0,
            beams: None,
            repetition_penalty: None,
            no_repeat_ngram_size: None,
            encoder_no_repeat_ngram_size: None,
            renormalize_logits: false,
            max_length: None,
            min_length: None,
        }
    }
}

/// Lays out prompts for one model.
pub trait PromptBuilder: Send + Sync {
    /// One sequence, or one for each window of long audio, in order.
    ///
    /// # Errors
    /// [`PromptError`], with a text for the client: empty, too long, a kind the model does not take, an item
    /// that no part names.
    fn prepare(&self, prompt: &Prompt, items: &[EncodedItem]) -> Result<Vec<PreparedSequence>, PromptError>;

    /// Tokens of a conversation without items, even if they are more than the context holds. `None` if it lays none out.
    ///
    /// # Errors
    /// As [`Self::prepare`].
    fn chat_tokens(&self, _chat: &Chat) -> Result<Option<Vec<u32>>, PromptError> {
        Ok(None)
    }

    /// Sampling parameters for requests that leave them open.
    fn sampling_defaults(&self) -> SamplingDefaults;

    /// The template by which it lays out conversations; `None`: it has none.
    fn chat_template(&self) -> Option<&ChatTemplate> {
        None
    }

    /// True if it lays out conversations by a template.
    fn has_chat_template(&self) -> bool {
        self.chat_template().is_some()
    }

    /// Facts of a speech model that joining its transcripts needs; `None` for other models.
    fn speech(&self) -> Option<SpeechInfo> {
        None
    }

    /// True if it lays out speech tasks ([`Prompt::Speech`]).
    fn transcribes(&self) -> bool {
        false
    }

    /// The code of the language that a generated token names; `None` for any other token.
    fn language(&self, _token: u32) -> Option<&str> {
        None
    }
}

/// Refuses token ids from a client that the model has no embedding for.
pub(crate) fn check_ids(ids: &[u32], vocab: u32) -> Result<(), PromptError> {
    match ids.iter().find(|id| **id >= vocab) {
        Some(id) => Err(PromptError::Invalid(format!("token {id} is not one of the model's {vocab}"))),
        None => Ok(()),
    }
}
