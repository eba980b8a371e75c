//! The few messages of a sentencepiece model that are read.
//!
//! Source: <https://github.com/google/sentencepiece/blob/v0.2.0/src/sentencepiece_model.proto>. Fields that do
//! not change what a text is split into are left out; the decoder skips them.

use prost::{Enumeration, Message};

/// A whole model.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) pieces: Vec<SentencePiece>,
    #[prost(message, optional, tag = "2")]
    pub(super) trainer: Option<TrainerSpec>,
    #[prost(message, optional, tag = "3")]
    pub(super) normalizer: Option<NormalizerSpec>,
}

/// An entry of the vocabulary; its id is its place.
#[derive(Clone, PartialEq, Message)]
pub(super) struct SentencePiece {
    #[prost(string, optional, tag = "1")]
    pub(super) piece: Option<String>,
    #[prost(float, optional, tag = "2")]
    pub(super) score: Option<f32>,
    #[prost(enumeration = "PieceKind", optional, tag = "3")]
    pub(super) kind: Option<i32>,
}

/// Type of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub(super) enum PieceKind {
    /// Text.
    Normal = 1,
    /// Text without an entry.
    Unknown = 2,
    /// Steers the model; no text reaches it.
    Control = 3,
    /// BuiltTokenizers before anything else.
    UserDefined = 4,
    /// No text reaches it.
    Unused = 5,
    /// A byte of text without an entry.
    Byte = 6,
}

/// Settings of the training.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TrainerSpec {
    /// 1 unigram, 2 BPE, 3 words, 4 characters.
    #[prost(int32, optional, tag = "3", default = "1")]
    pub(super) model_type: Option<i32>,
    #[prost(bool, optional, tag = "24", default = "false")]
    pub(super) treat_whitespace_as_suffix: Option<bool>,
    #[prost(bool, optional, tag = "35", default = "false")]
    pub(super) byte_fallback: Option<bool>,
}

/// Normalisation of a text before it is split.
#[derive(Clone, PartialEq, Message)]
pub(super) struct NormalizerSpec {
    #[prost(bytes = "vec", optional, tag = "2")]
    pub(super) precompiled_charsmap: Option<Vec<u8>>,
    #[prost(bool, optional, tag = "3", default = "true")]
    pub(super) add_dummy_prefix: Option<bool>,
    #[prost(bool, optional, tag = "4", default = "true")]
    pub(super) remove_extra_whitespaces: Option<bool>,
    #[prost(bool, optional, tag = "5", default = "true")]
    pub(super) escape_whitespaces: Option<bool>,
}
