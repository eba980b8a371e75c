//! A video's bytes: its container, and its frames one after another.

use super::animation::{Gif, WebP};
use super::facts::{FrameSink, READ, VideoFacts};
use super::jpegs::JpegFrames;
use super::mp4::Mp4;
use super::settings::VideoSettings;
use crate::error::ItemError;
use crate::preprocess::look;
use triptych_core::FrameSampling;
use triptych_core::limits::Limits;

/// A video whose headers were read.
pub(super) enum Video<'a> {
    Mp4(Mp4),
    Gif(Gif<'a>),
    WebP(WebP<'a>),
    Jpegs(JpegFrames<'a>),
}

impl<'a> Video<'a> {
    /// Reads the headers of a file. `asked` is the rate of a list of frames, which has none of its own.
    ///
    /// # Errors
    /// [`ItemError`] for a container or codec that is not read, and for bytes that are none.
    pub fn open(
        bytes: &'a [u8],
        settings: &VideoSettings,
        asked: Option<FrameSampling>,
        limits: &Limits,
    ) -> Result<Self, ItemError> {
        match bytes {
            [b'G', b'I', b'F', b'8', ..] => Gif::open(bytes, limits).map(Self::Gif),
            [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => {
                WebP::open(bytes).map(Self::WebP)
            }
            [0xff, 0xd8, 0xff, ..] => {
                let fps = match asked {
                    None => settings.fps,
                    Some(FrameSampling::Rate { thousandths }) => f64::from(thousandths) / 1000.0,
                    Some(FrameSampling::Count(_)) => {
                        let text = "num_frames is not for a list of frames: all of them are read";
                        return Err(ItemError::Unsupported(text.into()));
                    }
                };
                JpegFrames::open(bytes, fps, limits).map(Self::Jpegs)
            }
            [_, _, _, _, b'f', b't', b'y', b'p', ..] | [_, _, _, _, b'm', b'o', b'o', b'v', ..] => {
                Mp4::open(bytes, limits).map(Self::Mp4)
            }
            _ => Err(ItemError::Unsupported(format!("the video is {}; {READ}", look(bytes)))),
        }
    }

    /// Size, as its headers declare it.
    pub fn facts(&self) -> VideoFacts {
        match self {
            Self::Mp4(mp4) => mp4.facts,
            Self::Gif(gif) => gif.facts,
            Self::WebP(webp) => webp.facts,
            Self::Jpegs(jpegs) => jpegs.facts,
        }
    }

    /// Decodes up to the last of the frames `wanted`, ascending in the order of display, and hands those over.
    ///
    /// # Errors
    /// [`ItemError`] for what does not decode; those of `sink`.
    pub fn decode(
        self,
        wanted: &[usize],
        limits: &Limits,
        sink: &mut FrameSink<'_>,
    ) -> Result<(), ItemError> {
        match self {
            Self::Mp4(mp4) => mp4.decode(wanted, limits, sink),
            Self::Gif(gif) => gif.decode(wanted, limits, sink),
            Self::WebP(webp) => webp.decode(wanted, sink),
            Self::Jpegs(jpegs) => jpegs.decode(limits, sink),
        }
    }
}
