//! Images of any resolution to tiles, as transformers' `LlavaNextImageProcessor` and `LlavaOnevisionImageProcessor` make them.
//!
//! Decode, upright, RGB → the whole image as one tile; then the image at the size that fits it best, its shape kept, laid in the
//! middle of black, as tiles → normalise
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/llava_next/image_processing_pil_llava_next.py>).
//! Output rows are those of the whole image, then the lines of patches of all tiles together, each with a learned row at its
//! end; lines and columns of padding alone are left out (`unpad_image` of `modeling_llava_next.py`). Where that is more than a
//! number of tiles, the grid of rows is made smaller (bilinear; `pack_image_features` of `modeling_llava_onevision.py`).

use super::canvas::{self, CanvasSettings, CanvasStep};
use super::decode;
use super::pixels::{ImageSize, RgbPixels};
use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::{EncoderInput, Features, Preprocess, TileRows, admit, check_options, contained};
use crate::spec::{EncoderSpec, StemSpec, TilingSpec};
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// The processor of models that read an image small and as tiles.
#[derive(Clone, Debug)]
pub struct AnyResolutionProcessor {
    settings: CanvasSettings,
    /// Sizes that an image may be brought to, down and across.
    sizes: Vec<[u32; 2]>,
    /// Tiles whose rows the grid of rows may have; `None`: any number.
    max_tiles: Option<u32>,
    /// Pixels on a side of a tile.
    side: u32,
    /// Patches on a side of a tile.
    grid: usize,
    /// Pixels on a side of a patch.
    patch: usize,
}

impl AnyResolutionProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let (
            Some(TilingSpec::AnyResolution { sizes, max_tiles }),
            &StemSpec::PrefixedPatches { patch: [.., patch], grid, .. },
        ) = (&spec.extras.tiling, &spec.stem)
        else {
            return Err(file.wrong("image_processor_type", "the processor of another encoder"));
        };
        let settings = CanvasSettings::from_dir(dir)?;
        let ImageSize { width: side, height } = settings
            .fixed_size()
            .ok_or_else(|| file.wrong("crop_size", "a size, as image_size in config.json"))?;
        if height != side || grid.iter().any(|n| side as usize / patch != *n) {
            let key = if file.get("crop_size").is_some() { "crop_size" } else { "size" };
            let expected = format!("square and of {} by {} patches, as in config.json", grid[0], grid[1]);
            return Err(file.wrong(key, &expected));
        }
        if let Some(own) = file.get("image_grid_pinpoints")
            && *own != serde_json::json!(sizes)
        {
            return Err(file.wrong("image_grid_pinpoints", "the same list as in config.json"));
        }
        if sizes.iter().flatten().any(|n| !n.is_multiple_of(side)) {
            return Err(file.wrong("image_grid_pinpoints", &format!("multiples of {side}, a tile's side")));
        }
        Ok(Self { settings, sizes: sizes.clone(), max_tiles: *max_tiles, side, grid: grid[0], patch })
    }

    /// The size of most pixels that an image fills, and of equals the one that wastes least.
    fn best_size(&self, image: ImageSize) -> ImageSize {
        let own = [f64::from(image.height), f64::from(image.width)];
        let area = |[height, width]: [f64; 2]| height * width;
        let mut best = ImageSize { width: self.side, height: self.side };
        let mut most = 0.0;
        let mut least_wasted = f64::INFINITY;
        for &[height, width] in &self.sizes {
            let size = [f64::from(height), f64::from(width)];
            let scale = (size[1] / own[1]).min(size[0] / own[0]);
            let filled = area(own.map(|n| (n * scale).trunc())).min(area(own));
            let wasted = area(size) - filled;
            if filled > most || (filled == most && wasted < least_wasted) {
                most = filled;
                least_wasted = wasted;
                best = ImageSize { width, height };
            }
        }
        best
    }

    /// Output rows of an image whose tiles fill `size`.
    fn rows(&self, image: ImageSize, size: ImageSize) -> TileRows {
        let of_tile = self.grid * self.grid;
        let across = (size.width / self.side) as usize;
        let down = (size.height / self.side) as usize;
        let newline = ((1 + down * across) * of_tile) as u32;
        let [top, left] = padding(image, [down * self.grid, across * self.grid]);
        let lines = down * self.grid - 2 * top;
        let columns = across * self.grid - 2 * left;
        let place = |y: usize, x: usize| {
            let [y, x] = [top + y, left + x];
            let tile = 1 + y / self.grid * across + x / self.grid;
            (tile * of_tile + y % self.grid * self.grid + x % self.grid) as u32
        };
        let whole = 0..of_tile as u32;
        let Some([new_lines, new_columns]) = self.reduced([lines, columns]) else {
            let line = |y| (0..columns).map(move |x| place(y, x)).chain([newline]);
            return TileRows {
                places: whole.chain((0..lines).flat_map(line)).collect(),
                weights: Vec::new(),
            };
        };
        let mut rows = TileRows { places: Vec::new(), weights: Vec::new() };
        let mut push = |terms: [(u32, f32); TileRows::N_TERMS]| {
            rows.places.extend(terms.map(|(place, _)| place));
            rows.weights.extend(terms.map(|(_, weight)| weight));
        };
        let alone = |place| [(place, 1.0), (place, 0.0), (place, 0.0), (place, 0.0)];
        whole.for_each(|place| push(alone(place)));
        for y in 0..new_lines {
            let [(y0, a), (y1, b)] = taps(y, new_lines, lines);
            for x in 0..new_columns {
                let [(x0, c), (x1, d)] = taps(x, new_columns, columns);
                push([
                    (place(y0, x0), a * c),
                    (place(y0, x1), a * d),
                    (place(y1, x0), b * c),
                    (place(y1, x1), b * d),
                ]);
            }
            push(alone(newline));
        }
        rows
    }

    /// The smaller grid that one of so many lines and columns is brought to; `None` if it stays.
    fn reduced(&self, [lines, columns]: [usize; 2]) -> Option<[usize; 2]> {
        let most = f64::from(self.max_tiles?) * (self.grid * self.grid) as f64;
        let ratio = ((lines * columns) as f64 / most).sqrt();
        // As Python's `int(n // ratio)`.
        (ratio > 1.1).then(|| [lines, columns].map(|n| (n as f64 / ratio).floor().max(1.0) as usize))
    }

    /// The tiles of an image: itself, then those of the size that fits it best.
    fn tiles(
        &self,
        image: &RgbPixels,
        size: ImageSize,
        limits: &Limits,
    ) -> Result<Vec<RgbPixels>, ItemError> {
        let side = self.side;
        let tile = ImageSize { width: side, height: side };
        let resized = |step: CanvasStep| step.apply(image.clone(), self.settings.filter, limits);
        let mut tiles = vec![resized(CanvasStep::Exact(tile))?];
        let fitted = resized(CanvasStep::Exact(fit(image.size, size)))?;
        let padded = CanvasStep::Pad(size).apply(fitted, self.settings.filter, limits)?;
        for top in (0..size.height).step_by(side as usize) {
            for left in (0..size.width).step_by(side as usize) {
                tiles.push(canvas::cut(&padded, tile, [i64::from(left), i64::from(top)]));
            }
        }
        Ok(tiles)
    }
}

impl Preprocess for AnyResolutionProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        let side = self.side;
        let of_size = |[height, width]: &[u32; 2]| {
            let lines = (height / side) as usize * self.grid;
            self.grid * self.grid + lines * ((width / side) as usize * self.grid + 1)
        };
        self.sizes.iter().map(of_size).max()
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
        let size = self.best_size(image.size);
        let rows = self.rows(image.size, size);
        let grid = [self.grid; 2];
        let tiles = self.tiles(&image, size, limits)?;
        let patches =
            tiles.iter().flat_map(|tile| canvas::patches(tile, &self.settings, grid, self.patch)).collect();
        let patches_along = |pixels: u32| pixels / self.patch as u32;
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h: patches_along(size.height), w: patches_along(size.width) },
            n_tokens: rows.n_rows() as u32,
            features: Features::Tiles { patches, rows },
        })
    }
}

/// The size of an image inside `bounds`, its shape kept: one side is that of the bounds, the other is rounded up.
fn fit(image: ImageSize, bounds: ImageSize) -> ImageSize {
    let across = f64::from(bounds.width) / f64::from(image.width);
    let down = f64::from(bounds.height) / f64::from(image.height);
    let scaled = |n: u32, scale: f64, most: u32| ((f64::from(n) * scale).ceil() as u32).min(most);
    match across < down {
        true => ImageSize { width: bounds.width, height: scaled(image.height, across, bounds.height) },
        false => ImageSize { width: scaled(image.width, down, bounds.width), height: bounds.height },
    }
}

/// Lines and columns of padding alone at either end of a grid of patches, for an image in its middle.
fn padding(image: ImageSize, [lines, columns]: [usize; 2]) -> [usize; 2] {
    let height = f64::from(image.height);
    let width = f64::from(image.width);
    // As Python's `int(round(x, 7))`.
    let whole = |x: f64| ((x * 1e7).round_ties_even() / 1e7) as usize;
    if width / height > columns as f64 / lines as f64 {
        [lines.saturating_sub(whole(height * (columns as f64 / width))) / 2, 0]
    } else {
        [0, columns.saturating_sub(whole(width * (lines as f64 / height))) / 2]
    }
}

/// The two of `n` places around place `i` of `of_n`, and their weights: bilinear, corners not aligned, as torch's
/// `interpolate`.
fn taps(i: usize, of_n: usize, n: usize) -> [(usize, f32); 2] {
    let scale = n as f32 / of_n as f32;
    let place = ((i as f32 + 0.5) * scale - 0.5).max(0.0);
    let first = (place as usize).min(n.saturating_sub(1));
    let weight = place - first as f32;
    [(first, 1.0 - weight), ((first + 1).min(n.saturating_sub(1)), weight)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_grid_has_the_mean_of_what_it_covers() {
        assert_eq!(taps(0, 2, 4), [(0, 0.5), (1, 0.5)]);
        assert_eq!(taps(1, 2, 4), [(2, 0.5), (3, 0.5)]);
        assert_eq!(taps(1, 2, 2), [(1, 1.0), (1, 0.0)]);
    }

    #[test]
    fn padding_is_that_of_the_side_that_the_image_does_not_fill() {
        let check = |width, height, grid, expect| {
            assert_eq!(padding(ImageSize { width, height }, grid), expect, "{width}x{height} in {grid:?}");
        };
        check(100, 100, [4, 4], [0, 0]);
        check(100, 50, [4, 4], [1, 0]);
        check(50, 100, [4, 8], [0, 3]);
        check(10_000, 1, [4, 4], [2, 0]);
    }

    #[test]
    fn an_image_is_fitted_with_one_side_rounded_up() {
        let size = |width, height| ImageSize { width, height };
        assert_eq!(fit(size(7, 3), size(20, 20)), size(20, 9));
        assert_eq!(fit(size(3, 7), size(40, 20)), size(9, 20));
    }
}
