//! Images to patches.
//!
//! [`ImageProcessor`] is transformers' `Qwen2VLImageProcessor`; [`CanvasProcessor`] is those that bring every
//! image to one canvas. The first: decode, upright, RGB → a size whose sides are multiples of patch · merge → normalise → patches in the order
//! of the merger
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/qwen2_vl/image_processing_qwen2_vl.py>).

mod any_resolution;
mod aspect_ratio;
mod band;
pub mod canvas;
mod decode;
mod longest_edge;
mod pan_and_scan;
mod patches;
mod pixels;
mod resample;
mod resize;
mod settings;
mod sliding_windows;
mod split;
mod square_tiles;
mod tiles;
mod square_tower;
mod views;

pub use any_resolution::AnyResolutionProcessor;
pub(in crate::preprocess) use decode::{decode, on_white};
pub(in crate::preprocess) use patches::{add_patches, patches};
pub(in crate::preprocess) use pixels::RgbPixels;
pub(in crate::preprocess) use resample::resample;
pub(crate) use resample::resample_grid;
pub(in crate::preprocess) use resize::PixelBounds;

pub use aspect_ratio::AspectRatioProcessor;
pub(crate) use aspect_ratio::MAX_TILES;
pub use canvas::{CanvasProcessor, CanvasSettings};
pub use longest_edge::LongestEdgeProcessor;
pub use pan_and_scan::PanAndScanProcessor;
pub use pixels::ImageSize;
pub use resize::smart_resize;
pub use settings::{ImageSettings, PixelCount, ResizeFilter};
pub use sliding_windows::SlidingWindowsProcessor;
pub use split::SplitProcessor;
pub use square_tower::SquareTowerProcessor;
pub use tiles::TileProcessor;
pub use views::ViewsProcessor;

use super::{EncoderInput, Features, Preprocess};
use crate::error::{ItemError, ModelError};
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// The processor of Qwen-VL and of GLM-OCR.
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

    fn max_rows(&self) -> Option<usize> {
        let row = u64::from(self.settings.factor());
        let of_row = row * row * u64::from(self.settings.counted_frames());
        usize::try_from(self.settings.max_pixels / of_row).ok()
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
        let image = super::contained(modality, || decode(bytes, limits))?;
        let target = smart_resize(image.size, &self.settings)?;
        let image = resample(image, target, self.settings.filter);
        let h = target.height / self.settings.patch_size;
        let w = target.width / self.settings.patch_size;
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h, w },
            n_tokens: h * w / (self.settings.merge_size * self.settings.merge_size),
            features: Features::Patches(patches(&[&image], &self.settings)),
        })
    }
}
