//! Images to whole tiles and the whole image, as transformers' `Idefics3ImageProcessor` and `SmolVLMImageProcessor` make them.
//!
//! Decode, upright, RGB → the longer side to a length → both sides to multiples of a tile → tiles, and what they were cut from
//! as one tile more → normalise
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/idefics3/image_processing_pil_idefics3.py>).

use super::canvas::{self, CanvasSettings, CanvasStep};
use super::decode;
use super::pixels::{ImageSize, RgbPixels};
use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::{EncoderInput, Features, Preprocess, TileRows, admit, check_options, contained};
use crate::spec::{EncoderSpec, StemSpec};
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// Longest side that an image is brought to, whatever the setting.
const MAX_SIDE: u32 = 4096;

/// The processor of models that split an image into tiles.
#[derive(Clone, Debug)]
pub struct SplitProcessor {
    settings: CanvasSettings,
    /// The longer side of an image before it is brought to tiles.
    longest_edge: u32,
    /// False if every image is one tile.
    splits: bool,
    /// Pixels on a side of a tile.
    side: u32,
    /// Patches on a side of a tile.
    grid: u32,
    /// Pixels on a side of a patch.
    patch: usize,
    /// Output rows of a tile.
    n_rows: u32,
}

impl SplitProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        const TILE: &str = "max_image_size";
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let StemSpec::PrefixedPatches { patch: [.., patch], grid, .. } = spec.stem else {
            return Err(file.wrong("image_processor_type", "the processor of another encoder"));
        };
        let settings = CanvasSettings::from_dir(dir)?;
        let Some(ImageSize { width: side, .. }) = settings.fixed_size() else {
            return Err(file.wrong(TILE, "a longest_edge"));
        };
        if grid.iter().any(|n| side as usize / patch != *n) {
            let expected = format!("of {} patches of {patch} pixels, as in config.json", grid[0]);
            return Err(file.wrong(TILE, &expected));
        }
        if file.bool("do_resize")? == Some(false) {
            return Err(file.wrong("do_resize", "true"));
        }
        let longest_edge = file.u32("size.longest_edge")?.unwrap_or(4 * 364);
        if !(1..=MAX_SIDE).contains(&longest_edge) {
            return Err(file.wrong("size", &format!("a longest_edge from 1 to {MAX_SIDE}")));
        }
        Ok(Self {
            settings,
            longest_edge,
            splits: file.bool("do_image_splitting")?.unwrap_or(true),
            side,
            grid: grid[0] as u32,
            patch,
            n_rows: spec.image_tokens(grid).unwrap_or_default() as u32,
        })
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
        let whole = |n: u32| n.div_ceil(self.side).max(1) * self.side;
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
    fn tiles(&self, image: RgbPixels, limits: &Limits) -> Result<(Vec<RgbPixels>, [u32; 2]), ItemError> {
        let to = |image: RgbPixels, size| CanvasStep::Exact(size).apply(image, self.settings.filter, limits);
        let tile = ImageSize { width: self.side, height: self.side };
        let size = self.resized(image.size);
        let image = to(image, size)?;
        if !self.splits {
            return Ok((vec![to(image, tile)?], [0, 0]));
        }
        let size = self.in_tiles(image.size);
        let image = to(image, size)?;
        let grid = [size.height / self.side, size.width / self.side];
        if grid == [1, 1] {
            return Ok((vec![image], [0, 0]));
        }
        let mut tiles = Vec::with_capacity((grid[0] * grid[1] + 1) as usize);
        for y in 0..grid[0] {
            for x in 0..grid[1] {
                let corner = [x, y].map(|n| i64::from(n * self.side));
                tiles.push(canvas::cut(&image, tile, corner));
            }
        }
        tiles.push(to(image, tile)?);
        Ok((tiles, grid))
    }
}

impl Preprocess for SplitProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        // A square has most.
        let n = if self.splits { self.longest_edge.div_ceil(self.side) as usize } else { 1 };
        let n_tiles = if n > 1 { n * n + 1 } else { 1 };
        Some(n_tiles * self.n_rows as usize)
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
        let (tiles, arrangement) = self.tiles(image, limits)?;
        let grid = [self.grid as usize; 2];
        let patches =
            tiles.iter().flat_map(|tile| canvas::patches(tile, &self.settings, grid, self.patch)).collect();
        let n_tokens = tiles.len() as u32 * self.n_rows;
        let [h, w] = arrangement.map(|n| n.max(1) * self.grid);
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h, w },
            n_tokens,
            features: Features::Tiles { patches, rows: TileRows::whole(n_tokens) },
        })
    }
}
