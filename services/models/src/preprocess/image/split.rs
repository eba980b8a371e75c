//! Images to whole tiles and the whole image, as transformers' `Idefics3ImageProcessor` and `SmolVLMImageProcessor` make them.
//!
//! Decode, upright, RGB → the longer side to a length → both sides to multiples of a tile → tiles, and what they were cut from
//! as one tile more → normalise
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/idefics3/image_processing_pil_idefics3.py>).

use super::decode;
use super::pixels::{ImageSize, RgbPixels};
use super::square_tiles::SquareTiles;
use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::{EncoderInput, Preprocess, admit, check_options, contained};
use crate::spec::EncoderSpec;
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};

/// Longest side that an image is brought to, whatever the setting.
const MAX_SIDE: u32 = 4096;

/// The processor of models that split an image into tiles.
#[derive(Clone, Debug)]
pub struct SplitProcessor {
    tiles: SquareTiles,
    /// The longer side of an image before it is brought to tiles.
    longest_edge: u32,
    /// False if every image is one tile.
    splits: bool,
}

impl SplitProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let tiles = SquareTiles::from_dir(dir, &file, "max_image_size", spec)?;
        if file.bool("do_resize")? == Some(false) {
            return Err(file.wrong("do_resize", "true"));
        }
        let longest_edge = file.u32("size.longest_edge")?.unwrap_or(4 * 364);
        if !(1..=MAX_SIDE).contains(&longest_edge) {
            return Err(file.wrong("size", &format!("a longest_edge from 1 to {MAX_SIDE}")));
        }
        let splits = file.bool("do_image_splitting")?.unwrap_or(true);
        Ok(Self { tiles, longest_edge, splits })
    }

    /// The size that is brought to tiles.
    fn resized(&self, image: ImageSize) -> ImageSize {
        let edge = self.longest_edge;
        let ratio = f64::from(image.width) / f64::from(image.height);
        // As Python's `int`; an odd side grows by one.
        let even = |n: f64| ((n as u32) + (n as u32) % 2).max(1);
        match image.width >= image.height {
            true => ImageSize { width: edge, height: even(f64::from(edge) / ratio) },
            false => ImageSize { width: even(f64::from(edge) * ratio), height: edge },
        }
    }

    /// The size in whole tiles.
    fn in_tiles(&self, image: ImageSize) -> ImageSize {
        let ratio = f64::from(image.width) / f64::from(image.height);
        let whole = |n: u32| n.div_ceil(self.tiles.side).max(1) * self.tiles.side;
        match image.width >= image.height {
            true => {
                let width = whole(image.width);
                ImageSize { width, height: whole((f64::from(width) / ratio) as u32) }
            }
            false => {
                let height = whole(image.height);
                ImageSize { width: whole((f64::from(height) * ratio) as u32), height }
            }
        }
    }

    /// Tiles of an image, and how many there are down and across; `[0, 0]` if it is one.
    fn cut(&self, image: RgbPixels, limits: &Limits) -> Result<(Vec<RgbPixels>, [u32; 2]), ItemError> {
        let size = self.resized(image.size);
        let image = self.tiles.resized(image, size, limits)?;
        if !self.splits {
            return Ok((vec![self.tiles.tile(image, limits)?], [0, 0]));
        }
        let size = self.in_tiles(image.size);
        let image = self.tiles.resized(image, size, limits)?;
        let arrangement = [size.height / self.tiles.side, size.width / self.tiles.side];
        if arrangement == [1, 1] {
            return Ok((vec![image], [0, 0]));
        }
        let mut tiles = self.tiles.cut(&image, arrangement);
        tiles.push(self.tiles.tile(image, limits)?);
        Ok((tiles, arrangement))
    }
}

impl Preprocess for SplitProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        // A square has most.
        let n = if self.splits { self.longest_edge.div_ceil(self.tiles.side) } else { 1 };
        let n_tiles = if n > 1 { n * n + 1 } else { 1 };
        Some(self.tiles.rows_of(n_tiles))
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
        let (tiles, arrangement) = self.cut(image, limits)?;
        Ok(self.tiles.input(&tiles, arrangement))
    }
}
