//! Images to windows and the whole image, as Step3's processor makes them.
//!
//! Decode, upright, RGB → of a large or long image: its sides to multiples of a window, whatever its own shape, its windows line by
//! line; then the image as a larger square → CLIP's colours. After `Step3VLImageProcessor` of vLLM 0.32
//! (<https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/transformers_utils/processors/step3_vl.py>), which is that of
//! <https://huggingface.co/stepfun-ai/step3>. No file of a model directory has its settings. Views are resized in
//! values, not in bytes.

use super::canvas::{self, CanvasSettings, CanvasStep};
use super::decode;
use super::pixels::{ImageSize, RgbPixels};
use super::resample::resample_values;
use super::settings::ResizeFilter;
use crate::error::ItemError;
use crate::preprocess::{EncoderInput, Features, Preprocess, TileRows, admit, check_options, contained};
use crate::spec::{EncoderSpec, StemSpec};
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// Windows of an image that is resized to its longest: so many along a side.
const MAX_ACROSS: u32 = 6;
/// Most windows of an image. A square has 36; the reference makes any number of a long image.
const MAX_WINDOWS: u32 = 64;
/// Longer over shorter side of a small image above which it has windows.
const LONG: f64 = 1.5;
/// Longer over shorter side of a large image above which its windows may be smaller, and of a thin one that is padded.
const VERY_LONG: f64 = 4.0;
/// Shorter side below which a very long image is padded to a square.
const THIN: u32 = 32;
/// Part of a window above which what is left of a side becomes a window.
const LEFT: f64 = 0.2;

/// The processor of models that read windows and the whole image.
#[derive(Clone, Debug)]
pub struct SlidingWindowsProcessor {
    settings: CanvasSettings,
    /// Patches on a side of a window, and of the whole image.
    sides: [u32; 2],
    /// Pixels on a side of a patch.
    patch: u32,
    /// Output rows of a window, and of the whole image.
    n_rows: [u32; 2],
}

impl SlidingWindowsProcessor {
    /// For an encoder of squares of two sizes; `None` for any other.
    pub fn new(spec: &EncoderSpec) -> Option<Self> {
        let StemSpec::SquareViews(stem) = &spec.stem else { return None };
        let sides = stem.sides.map(|side| side as u32);
        let patch = stem.patch[2] as u32;
        let settings = CanvasSettings {
            filter: ResizeFilter::Bilinear,
            ..CanvasSettings::clip_square(sides[1] * patch)
        };
        let n_rows = stem.sides.map(|side| spec.image_tokens([side; 2]).unwrap_or_default() as u32);
        Some(Self { settings, sides, patch, n_rows })
    }

    /// Pixels on a side of a window, and of the whole image, as the model reads them.
    fn pixels(&self) -> [u32; 2] {
        self.sides.map(|side| side * self.patch)
    }

    /// Patches of a view that is made a square of so many patches on a side.
    fn patches(&self, view: &RgbPixels, side: u32) -> Vec<f32> {
        let size = ImageSize { width: side * self.patch, height: side * self.patch };
        let values = resample_values(view, size, self.settings.filter);
        canvas::value_patches(&values, &self.settings, [side as usize; 2], self.patch as usize)
    }

    fn resized(
        &self,
        image: RgbPixels,
        [width, height]: [u32; 2],
        limits: &Limits,
    ) -> Result<RgbPixels, ItemError> {
        CanvasStep::Exact(ImageSize { width, height }).apply(image, self.settings.filter, limits)
    }

    /// An image that is not thin, and no longer than it is cut at.
    fn bounded(&self, image: RgbPixels, limits: &Limits) -> Result<RgbPixels, ItemError> {
        let ImageSize { width, height } = image.size;
        let (long, short) = (width.max(height), width.min(height));
        let image = match short < THIN && f64::from(long) / f64::from(short) > VERY_LONG {
            true => canvas::cut(&image, ImageSize { width: long, height: long }, [0, 0]),
            false => image,
        };
        let most = MAX_ACROSS * self.pixels()[0];
        if long <= most {
            return Ok(image);
        }
        let scale = f64::from(most) / f64::from(long);
        let size = [image.size.width, image.size.height].map(|n| (f64::from(n) * scale) as u32);
        if size.contains(&0) {
            let text = format!("the image is {width}x{height}, too thin for this model");
            return Err(ItemError::Unsupported(text));
        }
        self.resized(image, size, limits)
    }

    /// Windows of an image, squares of any size, and their number down and across; `[0, 0]` if it has none.
    fn windows(&self, image: &RgbPixels, limits: &Limits) -> Result<(Vec<RgbPixels>, [u32; 2]), ItemError> {
        let Some(side) = self.window(image.size) else { return Ok((Vec::new(), [0, 0])) };
        let lengths = [image.size.width, image.size.height].map(|n| whole_windows(n, side));
        let [across, down] = lengths.map(|n| n.div_ceil(side));
        if down.saturating_mul(across) > MAX_WINDOWS {
            return Err(ItemError::TooLarge {
                what: "the windows that the image is cut into",
                actual: format!("{} ({}x{} pixels)", down * across, image.size.width, image.size.height),
                limit: MAX_WINDOWS.to_string(),
            });
        }
        let resized = self.resized(image.clone(), lengths, limits)?;
        let window = ImageSize { width: side, height: side };
        let corners = (0..down).flat_map(|y| (0..across).map(move |x| [x, y]));
        let cut =
            |corner: [u32; 2]| canvas::cut(&resized, window, corner.map(|n| i64::from(n) * i64::from(side)));
        Ok((corners.map(cut).collect(), [down, across]))
    }

    /// Pixels on a side of a window of an image of this size; `None` if it has none.
    fn window(&self, ImageSize { width, height }: ImageSize) -> Option<u32> {
        let [own, whole] = self.pixels();
        let (long, short) = (width.max(height), width.min(height));
        let ratio = f64::from(long) / f64::from(short);
        match long < whole {
            true => (ratio > LONG).then_some(short),
            false => Some(if ratio > VERY_LONG { short.min(own) } else { own }),
        }
    }
}

/// The length of a side in whole windows; a side shorter than one stays.
fn whole_windows(length: u32, window: u32) -> u32 {
    if length < window {
        return length;
    }
    let n = length / window;
    let left = f64::from(length) / f64::from(window) - f64::from(n);
    (if left > LEFT { n + 1 } else { n }) * window
}

impl Preprocess for SlidingWindowsProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        Some((MAX_WINDOWS * self.n_rows[0] + self.n_rows[1]) as usize)
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        admit(Modality::Image, modality, bytes, limits)?;
        check_options(options, &[])?;
        let image = self.bounded(contained(modality, || decode::decode(bytes, limits))?, limits)?;
        let (mut views, arrangement) = self.windows(&image, limits)?;
        let n_windows = views.len() as u32;
        let [side, _] = self.pixels();
        let [of_window, of_whole] = self.sides;
        let mut sides = vec![of_window; views.len()];
        views.push(image);
        sides.push(of_whole);
        let patches = views.iter().zip(&sides).flat_map(|(view, side)| self.patches(view, *side)).collect();
        let n_tokens = n_windows * self.n_rows[0] + self.n_rows[1];
        let [h, w] = arrangement.map(|n| n.max(1) * (side / self.patch));
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h, w },
            n_tokens,
            features: Features::Views { patches, sides, rows: TileRows::whole(n_tokens) },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published sizes: windows of 504 pixels, the whole image of 728.
    fn published() -> SlidingWindowsProcessor {
        let settings = CanvasSettings::clip_square(728);
        SlidingWindowsProcessor { settings, sides: [36, 52], patch: 14, n_rows: [81, 169] }
    }

    fn black(width: u32, height: u32) -> RgbPixels {
        RgbPixels { size: ImageSize { width, height }, rgb: vec![0; (width * height * 3) as usize] }
    }

    /// Numbers that vLLM's processor gives.
    #[test]
    fn images_are_cut_as_by_the_published_processor() {
        let check = |width, height, expect: [u32; 2]| {
            let (own, limits) = (published(), Limits::default());
            let image = own.bounded(black(width, height), &limits).expect("an image");
            let (windows, arrangement) = own.windows(&image, &limits).expect("windows");
            assert_eq!(arrangement, expect, "{width}x{height}");
            assert_eq!(windows.len() as u32, expect[0] * expect[1]);
            assert!(windows.iter().all(|window| window.size.width == window.size.height));
        };
        check(500, 400, [0, 0]);
        check(727, 727, [0, 0]);
        check(727, 484, [1, 2]);
        check(727, 485, [0, 0]);
        check(728, 728, [2, 2]);
        check(728, 600, [1, 2]);
        check(604, 728, [2, 1]);
        check(605, 728, [2, 2]);
        check(1008, 504, [1, 2]);
        check(1108, 504, [1, 2]);
        check(1109, 504, [1, 3]);
        check(2000, 300, [1, 7]);
        check(300, 1500, [5, 1]);
        check(1300, 300, [1, 5]);
        check(3024, 3024, [6, 6]);
        check(4000, 3000, [5, 6]);
        check(120, 30, [1, 4]);
        check(160, 31, [0, 0]);
        check(900, 100, [1, 9]);
        check(7000, 700, [1, 10]);
        check(40, 500, [13, 1]);
    }

    #[test]
    fn an_image_of_too_many_windows_is_refused_by_their_number() {
        let (own, limits) = (published(), Limits::default());
        let error = own.windows(&black(3000, 40), &limits).expect_err("refused").to_string();
        assert!(error.contains("75") && error.contains("64"), "{error}");
    }
}
