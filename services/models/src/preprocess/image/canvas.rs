//! Images to a canvas: resized, turned, padded or cut to the size that the model reads, then normalised patches.
//!
//! This is what transformers' processors of ViT, DeiT, BEiT, Donut, Nougat and CLIP do, with Pillow as the back end
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/donut/image_processing_donut.py>
//! and its like). Which steps there are is data; [`steps`] does them, [`settings`] reads them from a file.
//!
//! It differs in one thing: what is transparent is laid over white for every model, where some of the
//! processors refuse four channels.

mod settings;
mod steps;

pub use settings::CanvasSettings;
pub use steps::CanvasStep;
pub(super) use steps::cut;

use super::band::Band;
use super::decode;
use super::pixels::{ImageSize, RgbPixels};
use crate::error::ItemError;
use crate::preprocess::{EncoderInput, Features, Preprocess, admit, check_options, contained};
use crate::spec::EncoderSpec;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};
use triptych_kernels::cpu::pixels::large_vec;

/// The processor of an image encoder that reads a canvas.
#[derive(Clone, Debug)]
pub struct CanvasProcessor {
    settings: CanvasSettings,
    spec: EncoderSpec,
}

impl CanvasProcessor {
    /// With these settings, for an encoder of `spec`.
    pub fn new(settings: CanvasSettings, spec: EncoderSpec) -> Self {
        Self { settings, spec }
    }

    /// The settings.
    pub fn settings(&self) -> &CanvasSettings {
        &self.settings
    }

    /// Normalised patches of a finished canvas.
    fn input(&self, image: &RgbPixels) -> Result<EncoderInput, ItemError> {
        let size = image.size;
        let stem = &self.spec.stem;
        let patch = stem.patch_side().unwrap_or(1);
        let grid = [size.height as usize, size.width as usize].map(|side| stem.patches_along(side));
        let n_tokens = self.spec.image_tokens(grid).and_then(|n| u32::try_from(n).ok()).ok_or_else(|| {
            let ImageSize { width, height } = size;
            ItemError::Unsupported(format!(
                "the image is {width}x{height} when prepared, which the model does not read"
            ))
        })?;
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h: grid[0] as u32, w: grid[1] as u32 },
            n_tokens,
            features: Features::Patches(patches(image, &self.settings, grid, patch)),
        })
    }
}

impl Preprocess for CanvasProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        let ImageSize { width, height } = self.settings.max_size()?;
        self.spec.image_tokens([height, width].map(|side| self.spec.stem.patches_along(side as usize)))
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
        self.input(&self.settings.canvas(modality, bytes, limits)?)
    }
}

impl CanvasSettings {
    /// The canvas of an image's bytes.
    ///
    /// # Errors
    /// [`ItemError`] for bytes that are no image, and for what exceeds a limit.
    pub(super) fn canvas(
        &self,
        modality: Modality,
        bytes: &[u8],
        limits: &Limits,
    ) -> Result<RgbPixels, ItemError> {
        let mut image = contained(modality, || decode::decode(bytes, limits))?;
        for step in &self.steps {
            image = step.apply(image, self.filter, limits)?;
        }
        Ok(image)
    }
}

/// `[grid[0] · grid[1], 3 · side · side]`: patches row by row, a patch by channel, then row. What lies past the
/// image is 0, as a value after normalising.
pub(super) fn patches(
    image: &RgbPixels,
    settings: &CanvasSettings,
    grid: [usize; 2],
    side: usize,
) -> Vec<f32> {
    let width = image.size.width as usize;
    let height = image.size.height as usize;
    let mut band = Band::new(settings.norm(), [side, width]);
    let mut values = large_vec(grid[0] * grid[1] * 3 * side * side);
    for top in (0..grid[0]).map(|y| y * side) {
        band.fill(image, top);
        for left in (0..grid[1]).map(|x| x * side) {
            let inside = left.min(width)..width.min(left + side);
            for channel in 0..3 {
                for y in 0..side {
                    let row = if top + y < height { &band.row(channel, y)[inside.clone()] } else { &[] };
                    values.extend_from_slice(row);
                    values.extend(std::iter::repeat_n(0.0, side - row.len()));
                }
            }
        }
    }
    values
}

/// The same of values `[height, width, 3]` of 0 to 255, which fill the grid.
pub(super) fn value_patches(
    values: &[f32],
    settings: &CanvasSettings,
    grid: [usize; 2],
    side: usize,
) -> Vec<f32> {
    let width = grid[1] * side;
    let mut patches = Vec::with_capacity(values.len());
    for (top, left) in (0..grid[0]).flat_map(|y| (0..grid[1]).map(move |x| (y * side, x * side))) {
        for channel in 0..3 {
            let (mean, std) = (settings.mean[channel], settings.std[channel]);
            for y in top..top + side {
                let first = (y * width + left) * 3 + channel;
                let row = values.get(first..).unwrap_or_default().iter().step_by(3).take(side);
                patches.extend(row.map(|value| (value * settings.rescale - mean) / std));
            }
        }
    }
    patches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_past_the_image_are_zero_after_normalising() {
        let settings = CanvasSettings {
            steps: vec![],
            filter: crate::preprocess::image::ResizeFilter::Bilinear,
            mean: [0.5; 3],
            std: [0.5; 3],
            rescale: 1.0 / 255.0,
        };
        let size = ImageSize { width: 3, height: 1 };
        let image = RgbPixels { size, rgb: vec![255, 0, 0, 0, 255, 0, 0, 0, 255] };
        let values = patches(&image, &settings, [1, 2], 2);
        let red = [1.0, -1.0, 0.0, 0.0];
        let green = [-1.0, 1.0, 0.0, 0.0];
        let blue = [-1.0, -1.0, 0.0, 0.0];
        assert_eq!(values[..12], [red, green, blue].concat());
        assert_eq!(values[12..], [-1.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    }
}
