//! Modalities: the kinds of input that encoders read.

use std::fmt;

/// Kind of an item, and of the encoder that reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Modality {
    /// A still image.
    Image,
    /// An audio clip.
    Audio,
    /// Text for the encoder of an encoder-decoder model.
    Text,
    /// A video, without its sound.
    Video,
}

impl Modality {
    /// Every modality, in a fixed order.
    pub const ALL: [Self; 4] = [Self::Image, Self::Audio, Self::Text, Self::Video];

    /// The name used in settings, metrics and keys.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Image => "image",
            Self::Audio => "audio",
            Self::Text => "text",
            Self::Video => "video",
        }
    }

    /// Parses the name.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|m| m.as_str() == text)
    }
}

impl fmt::Display for Modality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
