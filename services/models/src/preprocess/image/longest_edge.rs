//! Images up to a longest edge at about their own shape, as transformers' `PixtralImageProcessor` brings them to whole patches.
//!
//! Decode, upright, RGB → sides no longer than the edge, rounded up to whole squares of patches → normalise → patches, square by
//! square (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/pixtral/image_processing_pixtral.py>).
//! The size of a square is that of the encoder, as `PixtralProcessor` asks for it whatever the image processor's file says.

use super::canvas::CanvasStep;
use super::pixels::ImageSize;
use super::settings::{ImageSettings, PixelCount, ResizeFilter, channels};
use super::{decode, patches};
use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::{EncoderInput, Features, Preprocess, admit, check_options, contained};
use crate::spec::EncoderSpec;
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// Longest edge that a file may ask for.
const MAX_SIDE: u32 = 8192;

/// The processor of models that read an image at about its own size.
#[derive(Clone, Debug)]
pub struct LongestEdgeProcessor {
    settings: ImageSettings,
    longest_edge: u32,
}

impl LongestEdgeProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        for step in ["do_resize", "do_rescale", "do_normalize"] {
            if file.bool(step)? == Some(false) {
                return Err(file.wrong(step, "true"));
            }
        }
        if file.bool("do_center_crop")? == Some(true) {
            return Err(file.wrong("do_center_crop", "false"));
        }
        let patch_size = spec.stem.patch_side().unwrap_or(1) as u32;
        let merge_size = spec.merged_side() as u32;
        agree(dir, [("patch_size", patch_size), ("spatial_merge_size", merge_size)])?;
        const EDGE: &str = "size.longest_edge";
        let longest_edge = match file.u32(EDGE)? {
            None if file.get("size").is_some() => return Err(file.wrong("size", "a longest_edge")),
            edge => edge.unwrap_or(1024),
        };
        if !(1..=MAX_SIDE).contains(&longest_edge) {
            return Err(file.wrong(EDGE, &format!("1 to {MAX_SIDE}")));
        }
        let settings = ImageSettings {
            patch_size,
            merge_size,
            temporal_patch_size: 1,
            min_pixels: 0,
            max_pixels: u64::from(longest_edge).pow(2),
            mean: channels(&file, "image_mean", [0.48145466, 0.4578275, 0.40821073])?,
            std: channels(&file, "image_std", [0.26862954, 0.2613026, 0.2757771])?,
            rescale: file.f64("rescale_factor")?.unwrap_or(1.0 / 255.0) as f32,
            filter: ResizeFilter::of(&file, ResizeFilter::Bicubic)?,
            count: PixelCount::OfImage,
        };
        if settings.std.iter().any(|s| *s <= 0.0) {
            return Err(file.wrong("image_std", "numbers above 0"));
        }
        Ok(Self { settings, longest_edge })
    }

    /// Squares of patches down and across; 0 where a side shrinks to nothing.
    fn squares(&self, image: ImageSize) -> [u32; 2] {
        let own = [image.height, image.width].map(f64::from);
        let ratio = own.map(|n| n / f64::from(self.longest_edge)).into_iter().fold(0.0, f64::max);
        let fitted = own.map(|n| if ratio > 1.0 { (n / ratio).floor() as u32 } else { n as u32 });
        fitted.map(|n| n.div_ceil(self.settings.factor()))
    }
}

/// Refuses a `processor_config.json` that counts other squares than the encoder makes.
fn agree(dir: &Path, sizes: [(&'static str, u32); 2]) -> Result<(), ModelError> {
    let file = JsonFile::read_or_empty(dir, "processor_config.json")?;
    for (key, expected) in sizes {
        if file.u32(key)?.is_some_and(|actual| actual != expected) {
            return Err(file.wrong(key, &format!("{expected}, as in config.json")));
        }
    }
    Ok(())
}

impl Preprocess for LongestEdgeProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        Some((self.longest_edge.div_ceil(self.settings.factor()) as usize).pow(2))
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
        let image = contained(modality, || decode::decode(bytes, limits))?;
        let [down, across] = self.squares(image.size);
        let factor = self.settings.factor();
        let size = ImageSize { width: across * factor, height: down * factor };
        let image = CanvasStep::Exact(size).apply(image, self.settings.filter, limits)?;
        let merge = self.settings.merge_size;
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h: down * merge, w: across * merge },
            n_tokens: down * across,
            features: Features::Patches(patches::patches(&[&image], &self.settings)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_are_rounded_down_to_the_edge_and_up_to_whole_squares() {
        let settings = ImageSettings {
            patch_size: 14,
            merge_size: 2,
            temporal_patch_size: 1,
            min_pixels: 0,
            max_pixels: 1540 * 1540,
            mean: [0.5; 3],
            std: [0.5; 3],
            rescale: 1.0 / 255.0,
            filter: ResizeFilter::Bicubic,
            count: PixelCount::OfImage,
        };
        let processor = LongestEdgeProcessor { settings, longest_edge: 1540 };
        let check = |width, height, expect| {
            assert_eq!(processor.squares(ImageSize { width, height }), expect, "{width}x{height}");
        };
        check(28, 28, [1, 1]);
        check(29, 1, [1, 2]);
        check(1540, 1540, [55, 55]);
        // 1540 / 1541 of 1000 is 999 and a bit.
        check(1541, 1000, [36, 55]);
        check(3080, 1, [0, 55]);
    }
}
