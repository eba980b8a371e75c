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
    let mut height = f64::from(size.height);
    let mut width = f64::from(size.width);
    let factor = f64::from(settings.factor());
    if settings.count == PixelCount::OfFrames && height.min(width) < factor {
        let scale = (factor / height).max(factor / width);
        height = (height * scale).trunc();
        width = (width * scale).trunc();
    }
    let frames = f64::from(settings.counted_frames());
    let area = frames * height * width;
    let aspect = height.max(width) / height.min(width);
    if aspect.is_nan() || aspect > MAX_ASPECT {
        return Err(ItemError::TooLarge {
            what: "the image's longer side over its shorter",
            actual: format!("{aspect:.1} ({}x{})", size.width, size.height),
            limit: format!("{MAX_ASPECT:.0}"),
        });
    }
    let min = settings.min_pixels as f64;
    let max = settings.max_pixels as f64;
    let mut h = (height / factor).round_ties_even() * factor;
    let mut w = (width / factor).round_ties_even() * factor;
    if frames * h * w > max {
        let beta = (area / max).sqrt();
        h = factor.max((height / beta / factor).floor() * factor);
        w = factor.max((width / beta / factor).floor() * factor);
    } else if frames * h * w < min {
        let beta = (min / area).sqrt();
        h = (height * beta / factor).ceil() * factor;
        w = (width * beta / factor).ceil() * factor;
    }
    // Without a least area, a side can round to nothing.
    Ok(ImageSize { width: w.max(factor) as u32, height: h.max(factor) as u32 })
}
