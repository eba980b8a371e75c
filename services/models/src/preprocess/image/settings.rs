//! Settings of an image processor, as `preprocessor_config.json` or `processor_config.json` has them.

use crate::error::ModelError;
use crate::files::{ItemProcessor, JsonFile};
use std::path::Path;
use triptych_kernels::cpu::pixels::PixelNorm;

/// Settings of an image processor.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSettings {
    /// Side of a patch in pixels.
    pub patch_size: u32,
    /// Patches on a side of the square that becomes one row.
    pub merge_size: u32,
    /// Frames of a patch; a still image is repeated.
    pub temporal_patch_size: u32,
    /// Least pixels after resizing.
    pub min_pixels: u64,
    /// Most pixels after resizing.
    pub max_pixels: u64,
    /// Means of red, green, blue.
    pub mean: [f32; 3],
    /// Standard deviations of red, green, blue.
    pub std: [f32; 3],
    /// Factor on pixel values before they are normalised.
    pub rescale: f32,
    /// The filter of the resize.
    pub filter: ResizeFilter,
    /// Count of pixels.
    pub count: PixelCount,
}

/// The pixels that limits count, and the treatment of a side shorter than a row's square.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PixelCount {
    /// Those of an image; a short side is brought to a square's alone. Qwen-VL.
    OfImage,
    /// Those of all frames of a patch; an image with a short side is enlarged before. GLM-4.1V and its successors.
    OfFrames,
}

/// A filter of Pillow's, by the number that files know it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResizeFilter {
    /// 0: the nearest pixel.
    Nearest,
    /// 1.
    Lanczos,
    /// 2.
    Bilinear,
    /// 3.
    Bicubic,
    /// 4: the mean of the pixels below.
    Box,
    /// 5.
    Hamming,
}

impl ResizeFilter {
    /// Every filter, by its number.
    pub const ALL: [Self; 6] =
        [Self::Nearest, Self::Lanczos, Self::Bilinear, Self::Bicubic, Self::Box, Self::Hamming];

    /// The key `resample` of a processor's file; `default` where it is missing.
    ///
    /// # Errors
    /// [`ModelError::Config`] for another filter.
    pub(super) fn of(file: &JsonFile, default: Self) -> Result<Self, ModelError> {
        let Some(number) = file.u32("resample")? else { return Ok(default) };
        Self::ALL.get(number as usize).copied().ok_or_else(|| {
            let names = "0 (nearest), 1 (lanczos), 2 (bilinear), 3 (bicubic), 4 (box) or 5 (hamming)";
            file.wrong("resample", names)
        })
    }
}

impl ImageSettings {
    /// Normalisation of pixel values.
    pub(super) fn norm(&self) -> PixelNorm {
        PixelNorm { rescale: self.rescale, mean: self.mean, std: self.std }
    }

    /// Reads the image processor of a model directory.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let name = file.get("image_processor_type").and_then(|name| name.as_str()).unwrap_or_default();
        let count = if name.starts_with("Glm4") { PixelCount::OfFrames } else { PixelCount::OfImage };
        let [min_pixels, max_pixels] = match count {
            PixelCount::OfImage => [56 * 56, 28 * 28 * 1280],
            PixelCount::OfFrames => [112 * 112, 28 * 28 * 15_000],
        };
        Self::read(&file, Self { min_pixels, max_pixels, count, ..Self::DEFAULT })
    }

    /// Reads the keys of a processor; those that are missing are as in `default`.
    ///
    /// # Errors
    /// [`ModelError::Config`] for a value that is not supported.
    pub(in crate::preprocess) fn read(file: &JsonFile, default: Self) -> Result<Self, ModelError> {
        for step in ["do_resize", "do_rescale", "do_normalize"] {
            if file.bool(step)? == Some(false) {
                return Err(file.wrong(step, "true"));
            }
        }
        let side = |key: &str, default: u32| -> Result<u32, ModelError> {
            let value = file.u32(key)?.unwrap_or(default);
            if (1..=256).contains(&value) { Ok(value) } else { Err(file.wrong(key, "1 to 256")) }
        };
        let pixels = |old: &str, new: &str, default: u64| -> Result<u64, ModelError> {
            Ok(match file.u32(old)? {
                Some(value) => u64::from(value),
                None => file.u32(new)?.map_or(default, u64::from),
            })
        };
        let settings = Self {
            patch_size: side("patch_size", default.patch_size)?,
            merge_size: side("merge_size", default.merge_size)?,
            temporal_patch_size: side("temporal_patch_size", default.temporal_patch_size)?,
            min_pixels: pixels("min_pixels", "size.shortest_edge", default.min_pixels)?,
            max_pixels: pixels("max_pixels", "size.longest_edge", default.max_pixels)?,
            mean: channels(file, "image_mean", default.mean)?,
            std: channels(file, "image_std", default.std)?,
            rescale: file.f64("rescale_factor")?.map_or(default.rescale, |factor| factor as f32),
            filter: ResizeFilter::of(file, default.filter)?,
            count: default.count,
        };
        if settings.std.iter().any(|s| *s <= 0.0) {
            return Err(file.wrong("image_std", "numbers above 0"));
        }
        let one_row = u64::from(settings.factor()).pow(2) * u64::from(settings.counted_frames());
        if settings.max_pixels < settings.min_pixels.max(one_row) {
            return Err(file.wrong("max_pixels", "at least min_pixels, and the pixels of one row"));
        }
        Ok(settings)
    }

    /// Those of `Qwen2VLImageProcessor`.
    pub(in crate::preprocess) const DEFAULT: Self = Self {
        patch_size: 14,
        merge_size: 2,
        temporal_patch_size: 2,
        min_pixels: 56 * 56,
        max_pixels: 28 * 28 * 1280,
        mean: [0.48145466, 0.4578275, 0.40821073],
        std: [0.26862954, 0.2613026, 0.2757771],
        rescale: (1.0_f64 / 255.0) as f32,
        filter: ResizeFilter::Bicubic,
        count: PixelCount::OfImage,
    };

    /// Times that limits count a pixel.
    pub fn counted_frames(&self) -> u32 {
        match self.count {
            PixelCount::OfImage => 1,
            PixelCount::OfFrames => self.temporal_patch_size,
        }
    }

    /// Sides of a resized image are multiples of this.
    pub fn factor(&self) -> u32 {
        self.patch_size * self.merge_size
    }
}

/// Three numbers at `key`: red, green, blue; `default` where it is missing.
///
/// # Errors
/// [`ModelError::Config`] for anything but three numbers.
pub(super) fn channels(file: &JsonFile, key: &str, default: [f32; 3]) -> Result<[f32; 3], ModelError> {
    let Some(values) = file.f64s(key)? else { return Ok(default) };
    match values[..] {
        [r, g, b] => Ok([r as f32, g as f32, b as f32]),
        _ => Err(file.wrong(key, "three numbers")),
    }
}
