//! The target size of an image, and the resize.

use super::pixels::{ImageSize, RgbPixels};
use super::settings::{ImageSettings, ResizeFilter};
use crate::error::ItemError;
use fast_image_resize::images::Image;
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

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
    let height = f64::from(size.height);
    let width = f64::from(size.width);
    let factor = f64::from(settings.factor());
    let area = height * width;
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
    if h * w > max {
        let beta = (area / max).sqrt();
        h = factor.max((height / beta / factor).floor() * factor);
        w = factor.max((width / beta / factor).floor() * factor);
    } else if h * w < min {
        let beta = (min / area).sqrt();
        h = (height * beta / factor).ceil() * factor;
        w = (width * beta / factor).ceil() * factor;
    }
    // Without a least area, a side can round to nothing.
    Ok(ImageSize { width: w.max(factor) as u32, height: h.max(factor) as u32 })
}

/// Resizes with a filter widened by the scale, as Pillow does; its result within 1 of 255
/// (`pixels_match_the_reference`).
///
/// Across first, then down: between the two, values are cut to bytes, so the order shows at hard edges. Each
/// pass computes on 16 bits, since the library's weights for bytes are coarser than Pillow's.
pub(super) fn resize(
    image: RgbPixels,
    target: ImageSize,
    filter: ResizeFilter,
) -> Result<RgbPixels, ItemError> {
    let failed = |e: String| ItemError::Corrupt(format!("the image cannot be resized: {e}"));
    let filter = match filter {
        ResizeFilter::Lanczos => FilterType::Lanczos3,
        ResizeFilter::Bilinear => FilterType::Bilinear,
        ResizeFilter::Bicubic => FilterType::CatmullRom,
    };
    let across = ImageSize { width: target.width, height: image.size.height };
    [across, target].into_iter().try_fold(image, |image, size| {
        if image.size == size {
            return Ok(image);
        }
        let wide: Vec<u8> = image.rgb.iter().flat_map(|v| (u16::from(*v) * 257).to_ne_bytes()).collect();
        let source = Image::from_vec_u8(image.size.width, image.size.height, wide, PixelType::U16x3)
            .map_err(|e| failed(e.to_string()))?;
        let mut resized = Image::new(size.width, size.height, PixelType::U16x3);
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter));
        Resizer::new().resize(&source, &mut resized, &options).map_err(|e| failed(e.to_string()))?;
        let byte = |wide: &[u8; 2]| ((u32::from(u16::from_ne_bytes(*wide)) + 128) / 257) as u8;
        let rgb = resized.buffer().as_chunks::<2>().0.iter().map(byte).collect();
        Ok(RgbPixels { size, rgb })
    })
}
