//! Tiles that are squares of one size, each with as many output rows.

use super::canvas::{self, CanvasSettings, CanvasStep};
use super::pixels::{ImageSize, RgbPixels};
use crate::error::{ItemError, ModelError};
use crate::files::JsonFile;
use crate::preprocess::{EncoderInput, Features, TileRows};
use crate::spec::{EncoderSpec, StemSpec};
use std::path::Path;
use triptych_core::Extent;
use triptych_core::limits::Limits;

/// The tiles of a processor.
#[derive(Clone, Debug)]
pub(super) struct SquareTiles {
    settings: CanvasSettings,
    /// Pixels on a side.
    pub(super) side: u32,
    /// Patches on a side.
    grid: u32,
    /// Pixels on a side of a patch.
    patch: usize,
    /// Output rows of each.
    n_rows: u32,
}

impl SquareTiles {
    /// Those of a model directory, whose side is at `key` of its processor's file, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub(super) fn from_dir(
        dir: &Path,
        file: &JsonFile,
        key: &str,
        spec: &EncoderSpec,
    ) -> Result<Self, ModelError> {
        let StemSpec::PrefixedPatches { patch: [.., patch], grid, .. } = spec.stem else {
            return Err(file.wrong("image_processor_type", "the processor of another encoder"));
        };
        let settings = CanvasSettings::from_dir(dir)?;
        let fits = |size: &ImageSize| {
            size.width == size.height && grid.iter().all(|n| size.width as usize / patch == *n)
        };
        let Some(ImageSize { width: side, .. }) = settings.fixed_size().filter(fits) else {
            let expected = format!("{0} by {0} patches of {patch} pixels, as in config.json", grid[0]);
            return Err(file.wrong(key, &expected));
        };
        let n_rows = spec.image_tokens(grid).unwrap_or_default() as u32;
        Ok(Self { settings, side, grid: grid[0] as u32, patch, n_rows })
    }

    /// Those of an encoder of `spec`, in the colours of ImageNet; `None` for one that reads no square tiles.
    pub(super) fn imagenet(spec: &EncoderSpec) -> Option<Self> {
        let StemSpec::PrefixedPatches { patch: [.., patch], grid, .. } = spec.stem else { return None };
        let side = u32::try_from(grid[0] * patch).ok().filter(|_| grid[0] == grid[1])?;
        let n_rows = spec.image_tokens(grid).unwrap_or_default() as u32;
        let settings = CanvasSettings::imagenet_square(side);
        Some(Self { settings, side, grid: grid[0] as u32, patch, n_rows })
    }

    /// Output rows of so many tiles.
    pub(super) fn rows_of(&self, n_tiles: u32) -> usize {
        n_tiles as usize * self.n_rows as usize
    }

    /// An image as one tile.
    ///
    /// # Errors
    /// [`ItemError`] for an image that would be too large on the way.
    pub(super) fn tile(&self, image: RgbPixels, limits: &Limits) -> Result<RgbPixels, ItemError> {
        self.resized(image, ImageSize { width: self.side, height: self.side }, limits)
    }

    /// An image at a size, by the processor's filter.
    ///
    /// # Errors
    /// As [`Self::tile`].
    pub(super) fn resized(
        &self,
        image: RgbPixels,
        size: ImageSize,
        limits: &Limits,
    ) -> Result<RgbPixels, ItemError> {
        CanvasStep::Exact(size).apply(image, self.settings.filter, limits)
    }

    /// The tiles of an image of `[down, across]` tiles, line by line.
    pub(super) fn cut(&self, image: &RgbPixels, [down, across]: [u32; 2]) -> Vec<RgbPixels> {
        let tile = ImageSize { width: self.side, height: self.side };
        let corners = (0..down).flat_map(|y| (0..across).map(move |x| [x, y]));
        corners
            .map(|corner| canvas::cut(image, tile, corner.map(|n| i64::from(n) * i64::from(self.side))))
            .collect()
    }

    /// The input of an encoder; the arrangement, tiles down and across, is in the extent, 1 where it is 0.
    pub(super) fn input(&self, tiles: &[RgbPixels], arrangement: [u32; 2]) -> EncoderInput {
        let grid = [self.grid as usize; 2];
        let patches =
            tiles.iter().flat_map(|tile| canvas::patches(tile, &self.settings, grid, self.patch)).collect();
        let n_tokens = tiles.len() as u32 * self.n_rows;
        let [h, w] = arrangement.map(|n| n.max(1) * self.grid);
        EncoderInput {
            extent: Extent::Grid { t: 1, h, w },
            n_tokens,
            features: Features::Tiles { patches, rows: TileRows::whole(n_tokens) },
        }
    }
}
