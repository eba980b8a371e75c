//! The target size of an image that keeps its shape: `smart_resize` of the processors of Qwen-VL and GLM.

use super::pixels::ImageSize;
use super::settings::{ImageSettings, PixelCount};
use crate::error::ItemError;

/// Sides may not differ more than this.
const MAX_ASPECT: f64 = 200.0;

/// The size nearest to the image's own whose sides are multiples of [`ImageSettings::factor`], whose area is
/// within the limits, and whose shape is about the same.
///
/// The arithmetic is Python's, in f64, with halves rounded to even: another rounding is another number of
/// rows.
///
/// # Errors
/// [`ItemError::TooLarge`] if one side is more than 200 times the other.
pub fn smart_resize(size: ImageSize, settings: &ImageSettings) -> Result<ImageSize, ItemError> {
    let frames = f64::from(settings.counted_frames());
    let bounds = PixelBounds {
        factor: settings.factor(),
        pixels: [settings.min_pixels, settings.max_pixels],
        enlarges_short_sides: settings.count == PixelCount::OfFrames,
        frames,
        whole_frames: frames,
    };
    bounds.smart_resize(size)
}

/// Bounds of the target size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::preprocess) struct PixelBounds {
    /// Sides are multiples of this.
    pub factor: u32,
    /// Least and most pixels of all frames.
    pub pixels: [u64; 2],
    /// True if an image with a side shorter than `factor` is enlarged before.
    pub enlarges_short_sides: bool,
    /// Frames whose pixels are counted.
    pub frames: f64,
    /// The same, rounded to whole temporal patches.
    pub whole_frames: f64,
}

impl PixelBounds {
    /// As [`smart_resize`].
    ///
    /// # Errors
    /// As [`smart_resize`].
    pub fn smart_resize(&self, size: ImageSize) -> Result<ImageSize, ItemError> {
        let mut height = f64::from(size.height);
        let mut width = f64::from(size.width);
        let factor = f64::from(self.factor);
        if self.enlarges_short_sides && height.min(width) < factor {
            let scale = (factor / height).max(factor / width);
            height = (height * scale).trunc();
            width = (width * scale).trunc();
        }
        let area = self.frames * height * width;
        let aspect = height.max(width) / height.min(width);
        if aspect.is_nan() || aspect > MAX_ASPECT {
            return Err(ItemError::TooLarge {
                what: "the image's longer side over its shorter",
                actual: format!("{aspect:.1} ({}x{})", size.width, size.height),
                limit: format!("{MAX_ASPECT:.0}"),
            });
        }
        let [min, max] = self.pixels.map(|n| n as f64);
        let mut h = (height / factor).round_ties_even() * factor;
        let mut w = (width / factor).round_ties_even() * factor;
        if self.whole_frames * h * w > max {
            let beta = (area / max).sqrt();
            h = factor.max((height / beta / factor).floor() * factor);
            w = factor.max((width / beta / factor).floor() * factor);
        } else if self.whole_frames * h * w < min {
            let beta = (min / area).sqrt();
            h = (height * beta / factor).ceil() * factor;
            w = (width * beta / factor).ceil() * factor;
        }
        // Without a least area, a side can round to nothing.
        Ok(ImageSize { width: w.max(factor) as u32, height: h.max(factor) as u32 })
    }
}
