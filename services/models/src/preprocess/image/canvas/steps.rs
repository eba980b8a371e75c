//! Steps from a decoded image to a canvas. Sizes are Python's arithmetic; a size is checked against the limit
//! before memory is taken for it.
//!
//! Nougat's thumbnail averages squares of pixels first where it makes a side less than a quarter as long, which takes an
//! image more than five times as long as wide; here the filter does all of it.

use crate::error::ItemError;
use crate::preprocess::image::pixels::{ImageSize, RgbPixels};
use crate::preprocess::image::resample::resample;
use crate::preprocess::image::settings::ResizeFilter;
use triptych_core::limits::Limits;

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CanvasStep {
    /// Cut to the box of what is dark beside the lightest and the darkest of the image: a page without its margins.
    CropMargin,
    /// A quarter turn to the right, if the longer side is then where the longer side of this size is.
    AlignLongAxis(ImageSize),
    /// Resized to this size, whatever the shape.
    Exact(ImageSize),
    /// Resized so that the shorter side is this long; the shape stays.
    ShortestEdge(u32),
    /// Made smaller until it fits into these bounds; the shape stays, but for a square one.
    Thumbnail {
        /// The bounds.
        bounds: ImageSize,
        /// Its filter; `None`: that of every resize.
        filter: Option<ResizeFilter>,
    },
    /// Laid in the middle of a black canvas of this size.
    Pad(ImageSize),
    /// The middle of this size; black where the image ends.
    CenterCrop(ImageSize),
}

impl CanvasStep {
    /// The size that no canvas exceeds after this step.
    pub fn max_size(self) -> Option<ImageSize> {
        match self {
            // A high image is only as wide as its shape says, which may be more than the bounds are wide.
            Self::Thumbnail { bounds, .. } => {
                let side = bounds.width.max(bounds.height);
                Some(ImageSize { width: side, height: side })
            }
            _ => self.fixed_size(),
        }
    }

    /// The size of every canvas after this step, if it is always the same.
    pub fn fixed_size(self) -> Option<ImageSize> {
        match self {
            Self::Exact(size) | Self::Pad(size) | Self::CenterCrop(size) => Some(size),
            Self::CropMargin | Self::AlignLongAxis(_) | Self::ShortestEdge(_) | Self::Thumbnail { .. } => {
                None
            }
        }
    }

    pub(in crate::preprocess::image) fn apply(
        self,
        image: RgbPixels,
        filter: ResizeFilter,
        limits: &Limits,
    ) -> Result<RgbPixels, ItemError> {
        let size = image.size;
        match self {
            Self::CropMargin => Ok(without_margin(image)),
            Self::AlignLongAxis(target) if lies_across(size, target) => Ok(turned_right(&image)),
            Self::AlignLongAxis(_) => Ok(image),
            Self::Exact(target) => resized(image, target, filter, limits),
            Self::ShortestEdge(edge) => resized(image, with_shortest_edge(size, edge), filter, limits),
            Self::Thumbnail { bounds, filter: own } => match thumbnail(size, bounds) {
                target if target == size => Ok(image),
                target => resized(image, target, own.unwrap_or(filter), limits),
            },
            Self::Pad(target) if size.width > target.width || size.height > target.height => {
                Err(ItemError::Unsupported(format!(
                    "the image is {}x{} before padding, this model's canvas is {}x{}",
                    size.width, size.height, target.width, target.height
                )))
            }
            // A smaller image has half of the rest on its left, rounded down; a crop rounds it up.
            Self::Pad(target) => {
                let [left, top] = [(target.width, size.width), (target.height, size.height)]
                    .map(|(t, s)| -i64::from((t - s) / 2));
                Ok(cut(&image, target, [left, top]))
            }
            Self::CenterCrop(target) => {
                let [left, top] = [(target.width, size.width), (target.height, size.height)]
                    .map(|(t, s)| (i64::from(s) - i64::from(t)).div_euclid(2));
                Ok(cut(&image, target, [left, top]))
            }
        }
    }
}

/// The part of an image within its margins. Pixels count by their grey value, stretched so that the darkest is 0 and
/// the lightest 255: those from 200 are margin. An image of one grey value stays.
fn without_margin(image: RgbPixels) -> RgbPixels {
    const MARGIN: f64 = 200.0;
    let width = image.size.width.max(1) as usize;
    // Pillow's grey, in 16 bits behind the point.
    let grey = |rgb: &[u8; 3]| {
        let [r, g, b] = rgb.map(u32::from);
        (r * 19_595 + g * 38_470 + b * 7_471 + 0x8000) >> 16
    };
    let values: Vec<u32> = image.rgb.as_chunks().0.iter().map(grey).collect();
    let (Some(&darkest), Some(&lightest)) = (values.iter().min(), values.iter().max()) else { return image };
    if darkest == lightest {
        return image;
    }
    let range = f64::from(lightest - darkest);
    let is_dark = |value: u32| f64::from(value - darkest) / range * 255.0 < MARGIN;
    let [mut top, mut left, mut bottom, mut right] = [usize::MAX, usize::MAX, 0, 0];
    for (i, _) in values.iter().enumerate().filter(|(_, value)| is_dark(**value)) {
        let [y, x] = [i / width, i % width];
        (top, left) = (top.min(y), left.min(x));
        (bottom, right) = (bottom.max(y + 1), right.max(x + 1));
    }
    // The darkest pixel is dark.
    let size = ImageSize { width: (right - left) as u32, height: (bottom - top) as u32 };
    cut(&image, size, [left as i64, top as i64])
}

/// True if the longer side of one is the shorter of the other.
fn lies_across(size: ImageSize, target: ImageSize) -> bool {
    (target.width < target.height && size.width > size.height)
        || (target.width > target.height && size.width < size.height)
}

fn turned_right(image: &RgbPixels) -> RgbPixels {
    let width = image.size.width as usize;
    let height = image.size.height as usize;
    let mut rgb = Vec::with_capacity(image.rgb.len());
    for x in 0..width {
        for y in (0..height).rev() {
            rgb.extend_from_slice(&image.rgb[(y * width + x) * 3..][..3]);
        }
    }
    RgbPixels { size: ImageSize { width: image.size.height, height: image.size.width }, rgb }
}

fn with_shortest_edge(size: ImageSize, edge: u32) -> ImageSize {
    let short = size.width.min(size.height);
    let long = size.width.max(size.height);
    let longer = scaled(edge, long, short);
    match size.width <= size.height {
        true => ImageSize { width: edge, height: longer },
        false => ImageSize { width: longer, height: edge },
    }
}

fn thumbnail(size: ImageSize, bounds: ImageSize) -> ImageSize {
    let width = size.width.min(bounds.width);
    let height = size.height.min(bounds.height);
    if (width, height) == (size.width, size.height) {
        return size;
    }
    match size.height.cmp(&size.width) {
        std::cmp::Ordering::Greater => ImageSize { width: scaled(size.width, height, size.height), height },
        std::cmp::Ordering::Less => ImageSize { width, height: scaled(size.height, width, size.width) },
        std::cmp::Ordering::Equal => ImageSize { width, height },
    }
}

/// `int(n * numerator / denominator)` of Python: a product and a division in f64, truncated.
fn scaled(n: u32, numerator: u32, denominator: u32) -> u32 {
    ((f64::from(n) * f64::from(numerator)) / f64::from(denominator)) as u32
}

/// Resizes if neither the result nor what lies between the passes is too large.
fn resized(
    image: RgbPixels,
    target: ImageSize,
    filter: ResizeFilter,
    limits: &Limits,
) -> Result<RgbPixels, ItemError> {
    let ImageSize { width, height } = target;
    if width == 0 || height == 0 {
        let w = image.size.width;
        let h = image.size.height;
        return Err(ItemError::Empty(format!(
            "the image of {w}x{h} pixels has {width}x{height} when resized"
        )));
    }
    for between in [ImageSize { width, height: image.size.height }, target] {
        let pixels = u64::from(between.width) * u64::from(between.height);
        if pixels > limits.max_image_pixels {
            return Err(ItemError::TooLarge {
                what: "the image, on the way to the model's size,",
                actual: format!("{}x{} = {pixels} pixels", between.width, between.height),
                limit: format!("{} pixels", limits.max_image_pixels),
            });
        }
    }
    Ok(resample(image, target, filter))
}

/// The part of the image under a frame of `size` whose corner is at `[left, top]`; black outside.
pub(in crate::preprocess::image) fn cut(
    image: &RgbPixels,
    size: ImageSize,
    [left, top]: [i64; 2],
) -> RgbPixels {
    let row_bytes = size.width as usize * 3;
    let mut rgb = vec![0; row_bytes * size.height as usize];
    // The part of a side that both have: from where in the frame, from where in the image, how much.
    let shared = |start: i64, frame: u32, whole: u32| -> (usize, usize, usize) {
        let from = (-start).max(0);
        let to = (i64::from(whole) - start).min(i64::from(frame));
        (from as usize, start.max(0) as usize, (to - from).max(0) as usize)
    };
    let (to_x, from_x, n_x) = shared(left, size.width, image.size.width);
    let (to_y, from_y, n_y) = shared(top, size.height, image.size.height);
    for i in 0..n_y {
        let from = ((from_y + i) * image.size.width as usize + from_x) * 3;
        let to = (to_y + i) * row_bytes + to_x * 3;
        rgb[to..to + n_x * 3].copy_from_slice(&image.rgb[from..from + n_x * 3]);
    }
    RgbPixels { size, rgb }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A image whose red is the column and whose green is the row, from 1.
    fn numbered(width: u32, height: u32) -> RgbPixels {
        let pixel = |i: u32| [((i % width) as u8).wrapping_add(1), ((i / width) as u8).wrapping_add(1), 0];
        RgbPixels { size: ImageSize { width, height }, rgb: (0..width * height).flat_map(pixel).collect() }
    }

    fn apply(step: CanvasStep, width: u32, height: u32) -> Result<RgbPixels, ItemError> {
        step.apply(numbered(width, height), ResizeFilter::Bilinear, &Limits::default())
    }

    fn thumbnail_of(width: u32, height: u32) -> CanvasStep {
        CanvasStep::Thumbnail { bounds: ImageSize { width, height }, filter: None }
    }

    #[test]
    fn a_margin_is_what_is_light_beside_the_darkest() {
        let check = |rows: &[&[u8]], expect: &[&[u8]]| {
            let size = |rows: &[&[u8]]| ImageSize { width: rows[0].len() as u32, height: rows.len() as u32 };
            let pixels = |rows: &[&[u8]]| RgbPixels {
                size: size(rows),
                rgb: rows.iter().flat_map(|row| row.iter().flat_map(|v| [*v; 3])).collect(),
            };
            assert_eq!(without_margin(pixels(rows)), pixels(expect), "{rows:?}");
        };
        check(&[&[255, 255, 255], &[255, 0, 255], &[255, 255, 199]], &[&[0, 255], &[255, 199]]);
        // 156 of 200 is stretched to 198.9, 157 to 200.2.
        check(&[&[200, 156, 157, 0, 200]], &[&[156, 157, 0]]);
        check(&[&[200, 157, 0]], &[&[0]]);
        check(&[&[7, 7], &[7, 7]], &[&[7, 7], &[7, 7]]);
    }

    #[test]
    fn a_crop_of_an_odd_rest_leans_to_the_top_left_and_fills_with_black() {
        let size = |width, height| ImageSize { width, height };
        let check = |step: CanvasStep, image: [u32; 2], first: [u8; 2], last: [u8; 2]| {
            let got = apply(step, image[0], image[1]).expect("a canvas");
            let end = got.rgb.len() - 3;
            assert_eq!([&got.rgb[..2], &got.rgb[end..end + 2]], [&first, &last], "{step:?} of {image:?}");
        };
        check(CanvasStep::CenterCrop(size(2, 2)), [5, 5], [2, 2], [3, 3]);
        check(CanvasStep::CenterCrop(size(4, 4)), [3, 3], [0, 0], [3, 3]);
        check(CanvasStep::Pad(size(4, 4)), [3, 3], [1, 1], [0, 0]);
        check(CanvasStep::CenterCrop(size(2, 4)), [5, 3], [0, 0], [3, 3]);
    }

    #[test]
    fn an_image_is_turned_right_when_it_lies_across() {
        let tall = ImageSize { width: 1, height: 2 };
        let got = apply(CanvasStep::AlignLongAxis(tall), 3, 2).expect("a canvas");
        assert_eq!(got.size, ImageSize { width: 2, height: 3 });
        assert_eq!(got.rgb[..6], [1, 2, 0, 1, 1, 0]);
        assert_eq!(apply(CanvasStep::AlignLongAxis(tall), 2, 3).expect("a canvas"), numbered(2, 3));
    }

    #[test]
    fn a_sliver_that_would_take_gigabytes_is_refused_before_it_does() {
        for (step, width, height) in [
            (CanvasStep::ShortestEdge(1920), 1, 60_000),
            (CanvasStep::ShortestEdge(1920), 60_000, 1),
            (CanvasStep::Exact(ImageSize { width: 2000, height: 4 }), 1, 60_000),
        ] {
            let error = apply(step, width, height).expect_err("too large");
            assert!(matches!(error, ItemError::TooLarge { .. }), "{error}");
        }
        let error = apply(thumbnail_of(4, 4), 1, 60_000).expect_err("no width");
        assert!(matches!(error, ItemError::Empty(_)), "{error}");
    }
}
