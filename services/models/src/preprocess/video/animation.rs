//! Animated GIF and WebP as videos.
//!
//! Frames count alike, whatever their delays; the rate is their number over the sum of the delays. A delay that viewers ignore
//! counts as theirs does, 100 ms.

use super::facts::{FrameSink, VideoFacts, too_many_frames};
use crate::error::ItemError;
use crate::preprocess::image::{ImageSize, RgbPixels, on_white};
use image::codecs::gif::GifDecoder;
use image::{AnimationDecoder, DynamicImage, ImageDecoder, RgbImage, RgbaImage};
use image_webp::WebPDecoder;
use std::io::Cursor;
use triptych_core::limits::Limits;

/// Hundredths of a second below which a delay is not kept.
const LEAST_DELAY: u16 = 2;
/// Hundredths of a second of a frame whose delay is not kept.
const USUAL_DELAY: u16 = 10;
/// Bytes that a decoder may need beside its pixels.
const OVERHEAD_BYTES: u64 = 16 << 20;

/// An animated GIF.
pub(super) struct Gif<'a> {
    bytes: &'a [u8],
    /// Size, as its headers declare it.
    pub facts: VideoFacts,
}

impl<'a> Gif<'a> {
    /// Reads the headers of all frames, and no pixel.
    ///
    /// # Errors
    /// [`ItemError`] for bytes that are no GIF, or too many frames.
    pub fn open(bytes: &'a [u8], limits: &Limits) -> Result<Self, ItemError> {
        let corrupt = |e: gif::DecodingError| ItemError::Corrupt(format!("a GIF does not decode: {e}"));
        let mut options = gif::DecodeOptions::new();
        options.skip_frame_decoding(true);
        let mut decoder = options.read_info(Cursor::new(bytes)).map_err(corrupt)?;
        let size = ImageSize { width: decoder.width().into(), height: decoder.height().into() };
        let (mut n_frames, mut hundredths) = (0_usize, 0_u64);
        while let Some(frame) = decoder.next_frame_info().map_err(corrupt)? {
            n_frames += 1;
            hundredths += u64::from(if frame.delay < LEAST_DELAY { USUAL_DELAY } else { frame.delay });
            if n_frames > limits.max_video_frames as usize {
                return too_many_frames(n_frames, limits);
            }
        }
        let fps = n_frames as f64 / (hundredths as f64 / 100.0);
        Ok(Self { bytes, facts: VideoFacts { n_frames, fps, size, is_sampled: false } })
    }

    /// Decodes up to the last frame wanted.
    ///
    /// # Errors
    /// [`ItemError`] for what does not decode; those of `sink`.
    pub fn decode(
        self,
        wanted: &[usize],
        limits: &Limits,
        sink: &mut FrameSink<'_>,
    ) -> Result<(), ItemError> {
        let corrupt = |e: image::ImageError| ItemError::Corrupt(format!("a GIF does not decode: {e}"));
        let mut decoder = GifDecoder::new(Cursor::new(self.bytes)).map_err(corrupt)?;
        let mut memory = image::Limits::no_limits();
        memory.max_alloc = Some(limits.max_image_pixels.saturating_mul(8).saturating_add(OVERHEAD_BYTES));
        decoder.set_limits(memory).map_err(corrupt)?;
        let mut wanted = wanted.iter().peekable();
        for (idx, frame) in decoder.into_frames().enumerate() {
            let Some(next) = wanted.peek() else { break };
            let frame = frame.map_err(corrupt)?;
            if **next == idx {
                wanted.next();
                sink(on_white(DynamicImage::ImageRgba8(frame.into_buffer())))?;
            }
        }
        Ok(())
    }
}

/// An animated WebP.
pub(super) struct WebP<'a> {
    decoder: Box<WebPDecoder<Cursor<&'a [u8]>>>,
    /// Size, as its headers declare it.
    pub facts: VideoFacts,
}

impl<'a> WebP<'a> {
    /// Reads the headers.
    ///
    /// # Errors
    /// [`ItemError`] for bytes that are no WebP, or a still one.
    pub fn open(bytes: &'a [u8]) -> Result<Self, ItemError> {
        let decoder = WebPDecoder::new(Cursor::new(bytes)).map_err(webp_corrupt)?;
        if !decoder.is_animated() {
            return Err(ItemError::Unsupported(
                "the video is a still WebP image, not an animated one".into(),
            ));
        }
        let (width, height) = decoder.dimensions();
        let n_frames = decoder.num_frames() as usize;
        let usual = n_frames as f64 * f64::from(USUAL_DELAY) / 100.0;
        let seconds = Some(decoder.loop_duration() as f64 / 1000.0).filter(|s| *s > 0.0).unwrap_or(usual);
        let size = ImageSize { width, height };
        let facts = VideoFacts { n_frames, fps: n_frames as f64 / seconds, size, is_sampled: false };
        Ok(Self { decoder: Box::new(decoder), facts })
    }

    /// Decodes up to the last frame wanted.
    ///
    /// # Errors
    /// [`ItemError`] for what does not decode; those of `sink`.
    pub fn decode(mut self, wanted: &[usize], sink: &mut FrameSink<'_>) -> Result<(), ItemError> {
        let ImageSize { width, height } = self.facts.size;
        let n_bytes = self.decoder.output_buffer_size();
        let n_bytes = n_bytes.ok_or_else(|| ItemError::Corrupt("a WebP's size overflows".into()))?;
        self.decoder.set_memory_limit(n_bytes.saturating_mul(4).saturating_add(OVERHEAD_BYTES as usize));
        let mut pixels = vec![0; n_bytes];
        let last = wanted.last().map_or(0, |last| last + 1);
        for idx in 0..last {
            self.decoder.read_frame(&mut pixels).map_err(webp_corrupt)?;
            if wanted.binary_search(&idx).is_ok() {
                sink(webp_frame(pixels.clone(), [width, height], self.decoder.has_alpha())?)?;
            }
        }
        Ok(())
    }
}

fn webp_corrupt(e: image_webp::DecodingError) -> ItemError {
    ItemError::Corrupt(format!("a WebP does not decode: {e}"))
}

fn webp_frame(pixels: Vec<u8>, [width, height]: [u32; 2], has_alpha: bool) -> Result<RgbPixels, ItemError> {
    let image = match has_alpha {
        true => RgbaImage::from_raw(width, height, pixels).map(DynamicImage::ImageRgba8),
        false => RgbImage::from_raw(width, height, pixels).map(DynamicImage::ImageRgb8),
    };
    image.map(on_white).ok_or_else(|| ItemError::Corrupt("a WebP frame has not its own size".into()))
}
