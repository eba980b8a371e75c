//! Image bytes to upright RGB, within limits: the first frame, as transformers converts it with Pillow.

use super::pixels::{ImageSize, RgbPixels};
use crate::error::ItemError;
use crate::preprocess::look;
use image::{DynamicImage, ImageBuffer, ImageDecoder, ImageError, ImageReader, Pixel};
use std::io::Cursor;
use triptych_core::limits::Limits;

/// Bytes per pixel that a decoder may need at once: 16-bit RGBA, twice.
const BYTES_PER_PIXEL: u64 = 16;
/// Bytes that a decoder may need beside its pixels.
const OVERHEAD_BYTES: u64 = 16 << 20;

/// Decodes the first frame.
pub(in crate::preprocess) fn decode(bytes: &[u8], limits: &Limits) -> Result<RgbPixels, ItemError> {
    let unsupported = || {
        let found = look(bytes);
        ItemError::Unsupported(format!("the image is {found}; read are PNG, JPEG, WebP, GIF and BMP"))
    };
    let corrupt = |e: ImageError| match e {
        ImageError::Unsupported(e) => ItemError::Unsupported(format!("the image is not supported: {e}")),
        ImageError::Limits(e) => ItemError::TooLarge {
            what: "the memory that the image needs",
            actual: e.to_string(),
            limit: format!("{} pixels", limits.max_image_pixels),
        },
        e => ItemError::Corrupt(format!("{} does not decode: {e}", look(bytes))),
    };
    let mut reader = ImageReader::new(Cursor::new(bytes)).with_guessed_format().map_err(|_| unsupported())?;
    if reader.format().is_none() {
        return Err(unsupported());
    }
    let mut memory = image::Limits::no_limits();
    let pixels = declared_by_png(bytes).unwrap_or(u64::MAX).min(limits.max_image_pixels);
    memory.max_alloc = Some(pixels.saturating_mul(BYTES_PER_PIXEL).saturating_add(OVERHEAD_BYTES));
    reader.limits(memory);
    // Up to here only the header was read; nothing of the size it declares was allocated.
    let mut decoder = reader.into_decoder().map_err(corrupt)?;
    let (width, height) = decoder.dimensions();
    check_size(ImageSize { width, height }, limits)?;
    let orientation = decoder.orientation().unwrap_or(image::metadata::Orientation::NoTransforms);
    let mut decoded = DynamicImage::from_decoder(decoder).map_err(corrupt)?;
    decoded.apply_orientation(orientation);
    Ok(on_white(decoded))
}

/// Pixels of a decoded image; what is transparent lies over white.
pub(in crate::preprocess) fn on_white(image: DynamicImage) -> RgbPixels {
    let size = ImageSize { width: image.width(), height: image.height() };
    RgbPixels { size, rgb: to_rgb(image) }
}

/// Pixels that a PNG's header declares. A colour profile before the pixels is inflated with the header and may be a
/// bomb: a small image leaves it little room.
fn declared_by_png(bytes: &[u8]) -> Option<u64> {
    let side = |at: usize| Some(u64::from(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?)));
    let is_png = bytes.starts_with(b"\x89PNG\r\n\x1a\n");
    if is_png { side(16)?.checked_mul(side(20)?) } else { None }
}

fn check_size(size: ImageSize, limits: &Limits) -> Result<(), ItemError> {
    let pixels = u64::from(size.width) * u64::from(size.height);
    if pixels == 0 {
        return Err(ItemError::Empty(format!("the image has {}x{} pixels", size.width, size.height)));
    }
    if pixels > limits.max_image_pixels {
        return Err(ItemError::TooLarge {
            what: "the image",
            actual: format!("{}x{} = {pixels} pixels", size.width, size.height),
            limit: format!("{} pixels", limits.max_image_pixels),
        });
    }
    Ok(())
}

/// Repeats grey, lays what is transparent over white, keeps the high byte of 16 bits.
fn to_rgb(image: DynamicImage) -> Vec<u8> {
    let high = |v: u16| (v >> 8) as u8;
    match image {
        DynamicImage::ImageRgb8(rgb) => rgb.into_raw(),
        DynamicImage::ImageLuma8(grey) => opaque(&grey, |v| v),
        DynamicImage::ImageLuma16(grey) => opaque(&grey, high),
        DynamicImage::ImageRgb16(rgb) => opaque(&rgb, high),
        DynamicImage::ImageLumaA8(grey) => over_white(&grey, |v| v),
        DynamicImage::ImageLumaA16(grey) => over_white(&grey, high),
        DynamicImage::ImageRgba16(rgba) => over_white(&rgba, high),
        DynamicImage::ImageRgba8(rgba) => over_white(&rgba, |v| v),
        other => over_white(&other.into_rgba8(), |v| v),
    }
}

fn opaque<P: Pixel>(image: &ImageBuffer<P, Vec<P::Subpixel>>, byte: impl Fn(P::Subpixel) -> u8) -> Vec<u8> {
    image.pixels().flat_map(|pixel| pixel.to_rgb().0.map(&byte)).collect()
}

fn over_white<P: Pixel>(
    image: &ImageBuffer<P, Vec<P::Subpixel>>,
    byte: impl Fn(P::Subpixel) -> u8,
) -> Vec<u8> {
    image
        .pixels()
        .flat_map(|pixel| {
            let [r, g, b, alpha] = pixel.to_rgba().0.map(&byte);
            [r, g, b].map(|value| blend(value, alpha))
        })
        .collect()
}

/// `value` over white, in the fixed-point arithmetic of Pillow's `alpha_composite`.
fn blend(value: u8, alpha: u8) -> u8 {
    let value = u32::from(value);
    let alpha = u32::from(alpha);
    let sum = (value * alpha + 255 * (255 - alpha)) * 128 + (0x80 << 7);
    ((((sum >> 8) + sum) >> 8) >> 7) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blending_ends_where_it_should() {
        for value in 0..=255 {
            assert_eq!(blend(value, 255), value);
            assert_eq!(blend(value, 0), 255);
        }
        assert_eq!(blend(0, 128), 127);
    }
}
