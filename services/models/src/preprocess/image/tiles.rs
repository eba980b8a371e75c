//! Images to the patches of tiles, as transformers' `MllamaImageProcessor` makes them.
//!
//! Decode, upright, RGB → the arrangement of tiles that fits best → a size inside it, of the same shape → filled up
//! with black to the right and below → normalise → patches, tile by tile
//! (<https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/mllama/image_processing_mllama.py>).

use super::pixels::{ImageSize, RgbPixels};
use super::settings::{ResizeFilter, channels};
use super::{decode, resample};
use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::{EncoderInput, Features, Preprocess, admit, check_options, contained};
use crate::spec::TilesSpec;
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// The processor of models that read tiles.
#[derive(Clone, Debug)]
pub struct TileProcessor {
    tiles: TilesSpec,
    filter: ResizeFilter,
    // The normalised value of each pixel value, by channel.
    tables: [[f32; 256]; 3],
}

impl TileProcessor {
    /// With the settings of a model directory, for an encoder with these tiles.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported.
    pub fn from_dir(dir: &Path, tiles: &TilesSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        for step in ["do_resize", "do_pad", "do_rescale", "do_normalize"] {
            if file.bool(step)? == Some(false) {
                return Err(file.wrong(step, "true"));
            }
        }
        let [n_channels, patch, _] = tiles.patch;
        let side = tiles.side * patch;
        let same = |key: &str, default: usize, expected: usize| -> Result<(), ModelError> {
            match file.u32(key)?.map_or(default, |n| n as usize) == expected {
                true => Ok(()),
                false => Err(file.wrong(key, &format!("{expected}, as in config.json"))),
            }
        };
        same("size.height", 224, side)?;
        same("size.width", 224, side)?;
        same("max_image_tiles", 4, tiles.max_tiles)?;
        if n_channels != 3 {
            return Err(file.wrong("do_convert_rgb", &format!("an encoder of 3 channels, not {n_channels}")));
        }
        let mean = channels(&file, "image_mean", [0.5; 3])?;
        let std = channels(&file, "image_std", [0.5; 3])?;
        if std.iter().any(|s| *s <= 0.0) {
            return Err(file.wrong("image_std", "numbers above 0"));
        }
        let rescale = file.f64("rescale_factor")?.unwrap_or(1.0 / 255.0);
        let value = |v: usize, c: usize| ((v as f64 * rescale) as f32 - mean[c]) / std[c];
        Ok(Self {
            tiles: tiles.clone(),
            filter: ResizeFilter::of(&file, ResizeFilter::Bilinear)?,
            tables: [0, 1, 2].map(|c| std::array::from_fn(|v| value(v, c))),
        })
    }

    /// Tiles down and across of an image of this size, and the size that it gets inside them.
    pub fn layout(&self, size: ImageSize) -> ([usize; 2], ImageSize) {
        let arrangement = self.arrangement(size);
        (arrangement, self.fit(size, arrangement))
    }

    /// Side of a tile in pixels.
    fn side(&self) -> usize {
        self.tiles.side * self.tiles.patch[1]
    }

    /// Tiles down and across: those of which an image fills most, and of equals the fewest. An image that fits is made
    /// larger as little as can be, one that does not, smaller.
    fn arrangement(&self, size: ImageSize) -> [usize; 2] {
        let height = f64::from(size.height);
        let width = f64::from(size.width);
        let side = self.side() as f64;
        let scale =
            |[down, across]: [usize; 2]| (down as f64 * side / height).min(across as f64 * side / width);
        let all = self.tiles.arrangements();
        let scales = || all.iter().map(|a| scale(*a));
        let grows = scales().filter(|s| *s >= 1.0).fold(f64::INFINITY, f64::min);
        let best = if grows.is_finite() { grows } else { scales().fold(0.0, f64::max) };
        let fits = all.iter().filter(|a| scale(**a) == best);
        fits.min_by_key(|[down, across]| down * across).copied().unwrap_or([1, 1])
    }

    /// The size an image gets inside its tiles: at least a tile where it is smaller, at most all of them.
    fn fit(&self, size: ImageSize, [down, across]: [usize; 2]) -> ImageSize {
        let side = self.side() as u32;
        let width = size.width.clamp(side, across as u32 * side);
        let height = size.height.clamp(side, down as u32 * side);
        let scale_w = f64::from(width) / f64::from(size.width);
        let scale_h = f64::from(height) / f64::from(size.height);
        let scaled = |n: u32, scale: f64, most: u32| ((f64::from(n) * scale).floor() as u32).clamp(1, most);
        match scale_w < scale_h {
            true => ImageSize { width, height: scaled(size.height, scale_w, height) },
            false => ImageSize { width: scaled(size.width, scale_h, width), height },
        }
    }

    /// `[n_patches, 3 · patch · patch]`: tiles row by row, patches of a tile row by row, a patch by channel.
    fn patches(&self, image: &RgbPixels, [down, across]: [usize; 2]) -> Vec<f32> {
        let side = self.side();
        let patch = self.tiles.patch[1];
        let width = image.size.width as usize;
        let height = image.size.height as usize;
        let per_side = self.tiles.side;
        let mut values = Vec::with_capacity(down * across * side * side * 3);
        for tile in 0..down * across {
            for place in 0..per_side * per_side {
                let top = tile / across * side + place / per_side * patch;
                let left = tile % across * side + place % per_side * patch;
                for (channel, table) in self.tables.iter().enumerate() {
                    for y in top..top + patch {
                        for x in left..left + patch {
                            let inside = y < height && x < width;
                            let pixel = if inside { image.rgb[(y * width + x) * 3 + channel] } else { 0 };
                            values.push(table[usize::from(pixel)]);
                        }
                    }
                }
            }
        }
        values
    }
}

impl Preprocess for TileProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        Some(self.tiles.max_tiles * self.tiles.tile_rows())
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
        let (arrangement, target) = self.layout(image.size);
        let image = resample::resample(image, target, self.filter);
        let [down, across] = arrangement;
        Ok(EncoderInput {
            extent: Extent::Grid {
                t: 1,
                h: (down * self.tiles.side) as u32,
                w: (across * self.tiles.side) as u32,
            },
            n_tokens: (down * across * self.tiles.tile_rows()) as u32,
            features: Features::Patches(self.patches(&image, arrangement)),
        })
    }
}
