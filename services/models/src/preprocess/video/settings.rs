//! Settings of a video processor, as `processor_config.json`, `video_preprocessor_config.json` or `preprocessor_config.json`
//! has them.

use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::image::{ImageSettings, ImageSize, PixelBounds};
use std::path::Path;

/// Pixels of all frames that a processor without a cap of its own shares among them where they are more: 24,576 rows of Qwen3-VL
/// if each had one frame.
const SHARED_PIXELS: u64 = 24_576 * 32 * 32;

/// Most frames of a video that a processor may sample: their times travel with the metadata of its rows.
const MAX_FRAMES: u32 = 1024;

/// Version of the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VideoKind {
    /// Qwen2-VL and Qwen2.5-VL: bounds of pixels are those of a frame.
    PerFrame,
    /// Qwen3-VL: bounds of pixels are those of all frames.
    OverFrames,
}

/// Settings of a video processor.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoSettings {
    /// Version.
    pub kind: VideoKind,
    /// Patches, normalisation, and bounds of pixels.
    pub image: ImageSettings,
    /// Frames sampled of each second, unless `num_frames` is there.
    pub fps: f64,
    /// Frames sampled of the whole video.
    pub num_frames: Option<u32>,
    /// Least frames sampled by a rate.
    pub min_frames: u32,
    /// Most frames sampled by a rate.
    pub max_frames: u32,
    /// Bound on the pixels of a frame beside those of `image`.
    pub cap: PixelCap,
}

/// A bound on the pixels of a frame, by the key `cap_pixels_per_frame`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelCap {
    /// The key is absent: none, but [`SHARED_PIXELS`] are shared among the frames of a video that had more.
    Shared,
    /// `false`: none.
    Absent,
    /// `true`: that of qwen-vl-utils.
    Tokens {
        /// `max_video_tokens`.
        max_video_tokens: u32,
    },
}

impl VideoSettings {
    /// Reads the video processor of a model directory. `do_sample_frames` is not asked: what is served is always sampled.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path, kind: VideoKind) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Video)?;
        let (side, default) = match kind {
            VideoKind::PerFrame => (28, ImageSettings::DEFAULT),
            VideoKind::OverFrames => {
                let half = [0.5; 3];
                (32, ImageSettings { patch_size: 16, mean: half, std: half, ..ImageSettings::DEFAULT })
            }
        };
        let [min_pixels, max_pixels] = [128, 768].map(|n| n * side * side);
        let image = ImageSettings::read(&file, ImageSettings { min_pixels, max_pixels, ..default })?;
        let fps = file.f64("fps")?.unwrap_or(2.0);
        if !(0.001..=1000.0).contains(&fps) {
            return Err(file.wrong("fps", "0.001 to 1000"));
        }
        let positive = |key: &str| match file.u32(key)? {
            Some(0) => Err(file.wrong(key, "1 or more")),
            value => Ok(value),
        };
        let [min_frames, max_frames] =
            [positive("min_frames")?.unwrap_or(4), positive("max_frames")?.unwrap_or(768)];
        let least = min_frames.max(image.temporal_patch_size);
        if !(least..=MAX_FRAMES).contains(&max_frames) {
            let expected = format!("{least} (min_frames, or the frames of a temporal patch) to {MAX_FRAMES}");
            return Err(file.wrong("max_frames", &expected));
        }
        let tokens = match kind {
            VideoKind::PerFrame => 128_000,
            VideoKind::OverFrames => 768,
        };
        let cap = match file.bool("cap_pixels_per_frame")? {
            None => PixelCap::Shared,
            Some(false) => PixelCap::Absent,
            Some(true) => {
                PixelCap::Tokens { max_video_tokens: positive("max_video_tokens")?.unwrap_or(tokens) }
            }
        };
        Ok(Self { kind, image, fps, num_frames: positive("num_frames")?, min_frames, max_frames, cap })
    }

    /// Size of each of `n_frames` frames.
    ///
    /// # Errors
    /// [`ItemError::TooLarge`] if one side is more than 200 times the other.
    pub(super) fn target(&self, size: ImageSize, n_frames: usize) -> Result<ImageSize, ItemError> {
        let target = self.bounds(n_frames, self.most_pixels(n_frames)).smart_resize(size)?;
        let pixels = u64::from(target.width) * u64::from(target.height) * n_frames as u64;
        if self.cap != PixelCap::Shared || pixels <= SHARED_PIXELS {
            return Ok(target);
        }
        let most = match self.kind {
            VideoKind::PerFrame => SHARED_PIXELS / n_frames.max(1) as u64,
            VideoKind::OverFrames => SHARED_PIXELS,
        };
        self.bounds(n_frames, most).smart_resize(size)
    }

    fn bounds(&self, n_frames: usize, most: u64) -> PixelBounds {
        let image = &self.image;
        let patch = f64::from(image.temporal_patch_size);
        let [frames, whole_frames] = match self.kind {
            VideoKind::PerFrame => [1.0; 2],
            VideoKind::OverFrames => [n_frames as f64, (n_frames as f64 / patch).round_ties_even() * patch],
        };
        PixelBounds {
            factor: image.factor(),
            pixels: [image.min_pixels, most],
            enlarges_short_sides: self.kind == VideoKind::OverFrames,
            frames,
            whole_frames,
        }
    }

    /// Most pixels: of a frame, or of all.
    fn most_pixels(&self, n_frames: usize) -> u64 {
        let ImageSettings { min_pixels, max_pixels, temporal_patch_size, .. } = self.image;
        let PixelCap::Tokens { max_video_tokens } = self.cap else { return max_pixels };
        let (row, n) = (u64::from(self.image.factor()).pow(2), n_frames.max(1) as u64);
        let tokens = u64::from(max_video_tokens);
        // Products of Python's floats, cut to integers.
        let least = (min_pixels as f64 * 1.05) as u64;
        match self.kind {
            VideoKind::PerFrame => {
                let total = ((tokens * row) as f64 * 0.9) as u64;
                max_pixels.min(total * u64::from(temporal_patch_size) / n).max(least)
            }
            VideoKind::OverFrames => (tokens * row).min(max_pixels / n).max(least) * n,
        }
    }
}
