//! Size of a video, as its headers declare it, and the limits on it.

use crate::error::ItemError;
use crate::preprocess::image::{ImageSize, RgbPixels};
use triptych_core::limits::Limits;

/// Formats that are read, for the texts of errors.
pub(super) const READ: &str =
    "read are MP4 with H.264 or motion JPEG, animated GIF and WebP, and JPEGs one after another";

/// Takes the sampled frames, in order.
pub(super) type FrameSink<'s> = dyn FnMut(RgbPixels) -> Result<(), ItemError> + 's;

/// Size of a video, as its headers have it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct VideoFacts {
    /// Frames.
    pub n_frames: usize,
    /// Frames per second, on average.
    pub fps: f64,
    /// Pixels of a frame.
    pub size: ImageSize,
    /// True if it is a list of frames that its sender took: all are read.
    pub is_sampled: bool,
}

impl VideoFacts {
    /// Holds what a file declares against the limits.
    ///
    /// # Errors
    /// [`ItemError`] for nothing, or too much.
    pub fn check(&self, limits: &Limits) -> Result<(), ItemError> {
        let ImageSize { width, height } = self.size;
        let area = u64::from(width) * u64::from(height);
        if area == 0 || self.n_frames == 0 {
            return Err(ItemError::Empty(format!(
                "the video has {} frames of {width}x{height}",
                self.n_frames
            )));
        }
        let too_large = |what, actual, limit| Err(ItemError::TooLarge { what, actual, limit });
        if area > limits.max_image_pixels {
            let limit = format!("{} pixels", limits.max_image_pixels);
            return too_large("a frame of the video", format!("{width}x{height} = {area} pixels"), limit);
        }
        if self.n_frames > limits.max_video_frames as usize {
            return too_many_frames(self.n_frames, limits);
        }
        let pixels = area.saturating_mul(self.n_frames as u64);
        if pixels > limits.max_video_pixels {
            let actual = format!("{} frames of {width}x{height} = {pixels} pixels", self.n_frames);
            return too_large("the video", actual, format!("{} pixels", limits.max_video_pixels));
        }
        let seconds = self.n_frames as f64 / self.fps;
        if !seconds.is_finite() || self.fps <= 0.0 {
            return Err(ItemError::Corrupt("the video declares no duration".into()));
        }
        if seconds > limits.max_video.as_secs_f64() {
            let limit = format!("{} s", limits.max_video.as_secs());
            return too_large("the video", format!("{seconds:.1} s long"), limit);
        }
        Ok(())
    }
}

/// The refusal of a video with too many frames.
pub(super) fn too_many_frames<T>(n_frames: usize, limits: &Limits) -> Result<T, ItemError> {
    Err(ItemError::TooLarge {
        what: "the video",
        actual: format!("{n_frames} frames or more"),
        limit: format!("{} frames", limits.max_video_frames),
    })
}
