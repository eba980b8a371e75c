//! Steps from a decoded picture to a canvas. Sizes are Python's arithmetic; a size is checked against the limit
//! before memory is taken for it.

use crate::error::ItemError;
use crate::preprocess::image::resize::resize;
use crate::preprocess::image::{Filter, Picture, Size};
use triptych_core::limits::Limits;

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A quarter turn to the right, if the longer side is then where the longer side of this size is.
    AlignLongAxis(Size),
    /// Resized to this size, whatever the shape.
    Exact(Size),
    /// Resized so that the shorter side is this long; the shape stays.
    ShortestEdge(u32),
    /// Made smaller until it fits into this size; the shape stays, but for a square one.
    Thumbnail(Size),
    /// Laid in the middle of a black canvas of this size.
    Pad(Size),
    /// The middle of this size; black where the picture ends.
    CenterCrop(Size),
}

impl Step {
    /// The size of every canvas after this step, if it is always the same.
    pub fn fixed_size(self) -> Option<Size> {
        match self {
            Self::Exact(size) | Self::Pad(size) | Self::CenterCrop(size) => Some(size),
            Self::AlignLongAxis(_) | Self::ShortestEdge(_) | Self::Thumbnail(_) => None,
        }
    }

    pub(super) fn apply(
        self,
        picture: Picture,
        filter: Filter,
        limits: &Limits,
    ) -> Result<Picture, ItemError> {
        let size = picture.size;
        match self {
            Self::AlignLongAxis(target) if lies_across(size, target) => Ok(turned_right(&picture)),
            Self::AlignLongAxis(_) => Ok(picture),
            Self::Exact(target) => resized(picture, target, filter, limits),
            Self::ShortestEdge(edge) => resized(picture, with_shortest_edge(size, edge), filter, limits),
            Self::Thumbnail(bounds) => match thumbnail(size, bounds) {
                target if target == size => Ok(picture),
                target => resized(picture, target, filter, limits),
            },
            Self::Pad(target) if size.width > target.width || size.height > target.height => {
                Err(ItemError::Unsupported(format!(
                    "the image is {}x{} before padding, this model's canvas is {}x{}",
                    size.width, size.height, target.width, target.height
                )))
            }
            // A smaller picture has half of the rest on its left, rounded down; a crop rounds it up.
            Self::Pad(target) => {
                let [left, top] = [(target.width, size.width), (target.height, size.height)]
                    .map(|(t, s)| -i64::from((t - s) / 2));
                Ok(cut(&picture, target, [left, top]))
            }
            Self::CenterCrop(target) => {
                let [left, top] = [(target.width, size.width), (target.height, size.height)]
                    .map(|(t, s)| (i64::from(s) - i64::from(t)).div_euclid(2));
                Ok(cut(&picture, target, [left, top]))
            }
        }
    }
}

/// Whether the longer side of one is the shorter of the other.
fn lies_across(size: Size, target: Size) -> bool {
    (target.width < target.height && size.width > size.height)
        || (target.width > target.height && size.width < size.height)
}

fn turned_right(picture: &Picture) -> Picture {
    let (width, height) = (picture.size.width as usize, picture.size.height as usize);
    let mut rgb = Vec::with_capacity(picture.rgb.len());
    for x in 0..width {
        for y in (0..height).rev() {
            rgb.extend_from_slice(&picture.rgb[(y * width + x) * 3..][..3]);
        }
    }
    Picture { size: Size { width: picture.size.height, height: picture.size.width }, rgb }
}

fn with_shortest_edge(size: Size, edge: u32) -> Size {
    let (short, long) = (size.width.min(size.height), size.width.max(size.height));
    let longer = scaled(edge, long, short);
    match size.width <= size.height {
        true => Size { width: edge, height: longer },
        false => Size { width: longer, height: edge },
    }
}

fn thumbnail(size: Size, bounds: Size) -> Size {
    let (width, height) = (size.width.min(bounds.width), size.height.min(bounds.height));
    if (width, height) == (size.width, size.height) {
        return size;
    }
    match size.height.cmp(&size.width) {
        std::cmp::Ordering::Greater => Size { width: scaled(size.width, height, size.height), height },
        std::cmp::Ordering::Less => Size { width, height: scaled(size.height, width, size.width) },
        std::cmp::Ordering::Equal => Size { width, height },
    }
}

/// `int(n * numerator / denominator)` of Python: a product, then a division of doubles, cut.
fn scaled(n: u32, numerator: u32, denominator: u32) -> u32 {
    ((f64::from(n) * f64::from(numerator)) / f64::from(denominator)) as u32
}

/// Resizes if neither the result nor what lies between the passes is too large.
fn resized(picture: Picture, target: Size, filter: Filter, limits: &Limits) -> Result<Picture, ItemError> {
    let Size { width, height } = target;
    if width == 0 || height == 0 {
        let (w, h) = (picture.size.width, picture.size.height);
        return Err(ItemError::Empty(format!(
            "the image of {w}x{h} pixels has {width}x{height} when resized"
        )));
    }
    for between in [Size { width, height: picture.size.height }, target] {
        let pixels = u64::from(between.width) * u64::from(between.height);
        if pixels > limits.max_image_pixels {
            return Err(ItemError::TooLarge {
                what: "the image, on the way to the model's size,",
                actual: format!("{}x{} = {pixels} pixels", between.width, between.height),
                limit: format!("{} pixels", limits.max_image_pixels),
            });
        }
    }
    resize(picture, target, filter)
}

/// What a frame of `size` shows with its corner at `[left, top]` of the picture; black outside.
fn cut(picture: &Picture, size: Size, [left, top]: [i64; 2]) -> Picture {
    let row_bytes = size.width as usize * 3;
    let mut rgb = vec![0; row_bytes * size.height as usize];
    // The part of a side that both have: from where in the frame, from where in the picture, how much.
    let shared = |start: i64, frame: u32, whole: u32| -> (usize, usize, usize) {
        let from = (-start).max(0);
        let to = (i64::from(whole) - start).min(i64::from(frame));
        (from as usize, start.max(0) as usize, (to - from).max(0) as usize)
    };
    let (to_x, from_x, n_x) = shared(left, size.width, picture.size.width);
    let (to_y, from_y, n_y) = shared(top, size.height, picture.size.height);
    for i in 0..n_y {
        let from = ((from_y + i) * picture.size.width as usize + from_x) * 3;
        let to = (to_y + i) * row_bytes + to_x * 3;
        rgb[to..to + n_x * 3].copy_from_slice(&picture.rgb[from..from + n_x * 3]);
    }
    Picture { size, rgb }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A picture whose red is the column and whose green is the row, from 1.
    fn numbered(width: u32, height: u32) -> Picture {
        let pixel = |i: u32| [((i % width) as u8).wrapping_add(1), ((i / width) as u8).wrapping_add(1), 0];
        Picture { size: Size { width, height }, rgb: (0..width * height).flat_map(pixel).collect() }
    }

    fn apply(step: Step, width: u32, height: u32) -> Result<Picture, ItemError> {
        step.apply(numbered(width, height), Filter::Bilinear, &Limits::default())
    }

    #[test]
    fn a_crop_of_an_odd_rest_leans_to_the_top_left_and_fills_with_black() {
        let size = |width, height| Size { width, height };
        let check = |step: Step, picture: [u32; 2], first: [u8; 2], last: [u8; 2]| {
            let got = apply(step, picture[0], picture[1]).expect("a canvas");
            let end = got.rgb.len() - 3;
            assert_eq!([&got.rgb[..2], &got.rgb[end..end + 2]], [&first, &last], "{step:?} of {picture:?}");
        };
        check(Step::CenterCrop(size(2, 2)), [5, 5], [2, 2], [3, 3]);
        check(Step::CenterCrop(size(4, 4)), [3, 3], [0, 0], [3, 3]);
        check(Step::Pad(size(4, 4)), [3, 3], [1, 1], [0, 0]);
        check(Step::CenterCrop(size(2, 4)), [5, 3], [0, 0], [3, 3]);
    }

    #[test]
    fn a_picture_is_turned_right_when_it_lies_across() {
        let tall = Size { width: 1, height: 2 };
        let got = apply(Step::AlignLongAxis(tall), 3, 2).expect("a canvas");
        assert_eq!(got.size, Size { width: 2, height: 3 });
        assert_eq!(got.rgb[..6], [1, 2, 0, 1, 1, 0]);
        assert_eq!(apply(Step::AlignLongAxis(tall), 2, 3).expect("a canvas"), numbered(2, 3));
    }

    #[test]
    fn a_sliver_that_would_take_gigabytes_is_refused_before_it_does() {
        for (step, width, height) in [
            (Step::ShortestEdge(1920), 1, 60_000),
            (Step::ShortestEdge(1920), 60_000, 1),
            (Step::Exact(Size { width: 2000, height: 4 }), 1, 60_000),
        ] {
            let error = apply(step, width, height).expect_err("too large");
            assert!(matches!(error, ItemError::TooLarge { .. }), "{error}");
        }
        let error = apply(Step::Thumbnail(Size { width: 4, height: 4 }), 1, 60_000).expect_err("no width");
        assert!(matches!(error, ItemError::Empty(_)), "{error}");
    }
}
