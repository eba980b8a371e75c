//! Everything that is particular to speech, from audio bytes to segments with times.
//!
//! Read in the order of a request: [`audio`] turns bytes into windows of features; [`WhisperPrompt`] and
//! [`MoonshinePrompt`] lay out the decoder's prompt for each window; [`timestamps`] is the grammar of times among
//! generated tokens; [`segments`] turns those tokens into segments. The pure parts of a long transcript follow:
//! [`quality`] judges a window, [`sequential`] says where the next one starts, [`stitch`] joins two that overlap,
//! [`align`] and [`words`] find the times of words.

pub mod audio;
mod info;
mod moonshine_prompt;
mod whisper_prompt;
pub mod timestamps;
pub mod segments;
pub mod quality;
pub mod sequential;
pub mod stitch;
pub mod align;
pub mod words;

pub use info::SpeechInfo;
pub use moonshine_prompt::MoonshinePrompt;
pub use segments::{Segment, Segmenter};
pub use whisper_prompt::{WhisperPrompt, max_previous};
