//! Images to patches.
//!
//! [`ImageProcessor`] is transformers' `Qwen2VLImageProcessor`; [`CanvasProcessor`] is those that bring every
//! image to one canvas. The first: decode, upright, RGB → a size whose sides are multiples of patch · merge → normalise → patches in the order
//! of the merger
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/qwen2_vl/image_processing_qwen2_vl.py>).

pub mod canvas;
mod decode;
mod patches;
mod resize;
mod tiles;

pub use canvas::{CanvasProcessor, CanvasSettings};
pub use resize::smart_resize;
pub use tiles::TileProcessor;

use super::{EncoderInput, Features, Preprocess};
use crate::error::{ItemError, ModelError};
use crate::files::JsonFile;
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

const FILE: &str = "preprocessor_config.json";

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
    /// What a pixel value is multiplied with before that.
    pub rescale: f32,
    /// The filter of the resize.
    pub filter: Filter,
}

/// A filter of Pillow's by the number that files know it by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// 1.
    Lanczos,
    /// 2.
    Bilinear,
    /// 3.
    Bicubic,
}

impl Filter {
    fn of(file: &JsonFile, default: Self) -> Result<Self, ModelError> {
        match file.u32("resample")? {
            Some(1) => Ok(Self::Lanczos),
            Some(2) => Ok(Self::Bilinear),
            Some(3) => Ok(Self::Bicubic),
            None => Ok(default),
            Some(_) => Err(file.wrong("resample", "1 (lanczos), 2 (bilinear) or 3 (bicubic)")),
        }
    }
}

impl ImageSettings {
    /// Reads `preprocessor_config.json` of a model directory.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        let file = JsonFile::read(dir, FILE)?;
        for step in ["do_resize", "do_rescale", "do_normalize"] {
            if file.bool(step)? == Some(false) {
                return Err(file.wrong(step, "true"));
            }
        }
        let side = |key: &str, default: u32| -> Result<u32, ModelError> {
            let value = file.u32(key)?.unwrap_or(default);
            if (1..=256).contains(&value) { Ok(value) } else { Err(file.wrong(key, "1 to 256")) }
        };
        let pixels = |old: &str, new: &str, default: u32| -> Result<u64, ModelError> {
            Ok(u64::from(match file.u32(old)? {
                Some(value) => value,
                None => file.u32(new)?.unwrap_or(default),
            }))
        };
        let settings = Self {
            patch_size: side("patch_size", 14)?,
            merge_size: side("merge_size", 2)?,
            temporal_patch_size: side("temporal_patch_size", 2)?,
            min_pixels: pixels("min_pixels", "size.shortest_edge", 56 * 56)?,
            max_pixels: pixels("max_pixels", "size.longest_edge", 28 * 28 * 1280)?,
            mean: channels(&file, "image_mean", [0.48145466, 0.4578275, 0.40821073])?,
            std: channels(&file, "image_std", [0.26862954, 0.2613026, 0.2757771])?,
            rescale: file.f64("rescale_factor")?.unwrap_or(1.0 / 255.0) as f32,
            filter: Filter::of(&file, Filter::Bicubic)?,
        };
        if settings.std.iter().any(|s| *s <= 0.0) {
            return Err(file.wrong("image_std", "numbers above 0"));
        }
        let one_row = u64::from(settings.factor()).pow(2);
        if settings.max_pixels < settings.min_pixels.max(one_row) {
            return Err(file.wrong("max_pixels", "at least min_pixels, and the pixels of one row"));
        }
        Ok(settings)
    }

    /// Sides of a resized image are multiples of this.
    pub fn factor(&self) -> u32 {
        self.patch_size * self.merge_size
    }
}

fn channels(file: &JsonFile, key: &str, default: [f32; 3]) -> Result<[f32; 3], ModelError> {
    let Some(values) = file.f64s(key)? else { return Ok(default) };
    match values[..] {
        [r, g, b] => Ok([r as f32, g as f32, b as f32]),
        _ => Err(file.wrong(key, "three numbers")),
    }
}

/// The processor of Qwen2-VL and Qwen2.5-VL.
#[derive(Clone, Debug)]
pub struct ImageProcessor {
    settings: ImageSettings,
}

impl ImageProcessor {
    /// With these settings.
    pub fn new(settings: ImageSettings) -> Self {
        Self { settings }
    }

    /// With the settings of a model directory.
    ///
    /// # Errors
    /// As [`ImageSettings::from_dir`].
    pub fn from_dir(dir: &Path) -> Result<Self, ModelError> {
        Ok(Self::new(ImageSettings::from_dir(dir)?))
    }

    /// The settings.
    pub fn settings(&self) -> &ImageSettings {
        &self.settings
    }
}

impl Preprocess for ImageProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn preprocess(
        &self,
        modality: Modality,
        bytes: &[u8],
        options: &ItemOptions,
        limits: &Limits,
    ) -> Result<EncoderInput, ItemError> {
        super::admit(Modality::Image, modality, bytes, limits)?;
        super::check_options(options, &[])?;
        let picture = super::contained(modality, || decode::decode(bytes, limits))?;
        let target = smart_resize(picture.size, &self.settings)?;
        let picture = resize::resize(picture, target, self.settings.filter)?;
        let (h, w) = (target.height / self.settings.patch_size, target.width / self.settings.patch_size);
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h, w },
            n_tokens: h * w / (self.settings.merge_size * self.settings.merge_size),
            features: Features::Patches(patches::patches(&picture, &self.settings)),
        })
    }
}

/// Width and height in pixels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Across.
    pub width: u32,
    /// Down.
    pub height: u32,
}

/// Pixels `[height, width, 3]`, red, green, blue.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Picture {
    size: Size,
    rgb: Vec<u8>,
}
