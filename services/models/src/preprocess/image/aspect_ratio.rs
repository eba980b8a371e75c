//! Images to tiles in the arrangement whose shape is nearest, as transformers' `GotOcr2ImageProcessor` makes them for InternVL.
//!
//! Decode, upright, RGB → the arrangement → the image at its size, whatever its own shape → tiles, and the image as one tile more
//! → normalise
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/got_ocr2/image_processing_pil_got_ocr2.py>).
//! `InternVLProcessor` asks for tiles whatever the file says of `crop_to_patches`.

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

/// Most tiles that a file may ask for.
const MAX_TILES: u32 = 64;

/// The processor of models that read tiles in the arrangement nearest to an image's shape.
#[derive(Clone, Debug)]
pub struct AspectRatioProcessor {
    settings: CanvasSettings,
    /// Tiles down and across of every arrangement, by their number.
    arrangements: Vec<[u32; 2]>,
    /// Pixels on a side of a tile.
    side: u32,
    /// Patches on a side of a tile.
    grid: u32,
    /// Pixels on a side of a patch.
    patch: usize,
    /// Output rows of a tile.
    n_rows: u32,
}

impl AspectRatioProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let StemSpec::PrefixedPatches { patch: [.., patch], grid, .. } = spec.stem else {
            return Err(file.wrong("image_processor_type", "the processor of another encoder"));
        };
        let settings = CanvasSettings::from_dir(dir)?;
        let fits = |size: &ImageSize| {
            size.width == size.height && grid.iter().all(|n| size.width as usize / patch == *n)
        };
        let Some(ImageSize { width: side, .. }) = settings.fixed_size().filter(fits) else {
            let expected = format!("{0} by {0} patches of {patch} pixels, as in config.json", grid[0]);
            return Err(file.wrong("size", &expected));
        };
        let least = file.u32("min_patches")?.unwrap_or(1);
        let most = file.u32("max_patches")?.unwrap_or(12);
        if least == 0 || most < least || most > MAX_TILES {
            return Err(file.wrong("max_patches", &format!("from min_patches, 1 or more, to {MAX_TILES}")));
        }
        let mut arrangements: Vec<[u32; 2]> = (1..=most)
            .flat_map(|across| (1..=most).map(move |down| [down, across]))
            .filter(|[down, across]| (least..=most).contains(&(down * across)))
            .collect();
        arrangements.sort_by_key(|[down, across]| down * across);
        Ok(Self {
            settings,
            arrangements,
            side,
            grid: grid[0] as u32,
            patch,
            n_rows: spec.image_tokens(grid).unwrap_or_default() as u32,
        })
    }

    /// Tiles down and across: those whose shape is nearest, of equals the later while the image has more than half as many
    /// pixels as they.
    fn arrangement(&self, image: ImageSize) -> [u32; 2] {
        let ratio = f64::from(image.width) / f64::from(image.height);
        let pixels = f64::from(image.width) * f64::from(image.height);
        let of_tile = f64::from(self.side) * f64::from(self.side);
        let mut best = [1, 1];
        let mut least = f64::INFINITY;
        for &[down, across] in &self.arrangements {
            let distance = (ratio - f64::from(across) / f64::from(down)).abs();
            let is_filled = pixels > 0.5 * of_tile * f64::from(down * across);
            if distance < least || (distance == least && is_filled) {
                least = distance;
                best = [down, across];
            }
        }
        best
    }

    /// Tiles of an image, and how many there are down and across.
    fn tiles(&self, image: &RgbPixels, limits: &Limits) -> Result<(Vec<RgbPixels>, [u32; 2]), ItemError> {
        let to = |size| CanvasStep::Exact(size).apply(image.clone(), self.settings.filter, limits);
        let tile = ImageSize { width: self.side, height: self.side };
        let [down, across] = self.arrangement(image.size);
        if [down, across] == [1, 1] {
            return Ok((vec![to(tile)?], [1, 1]));
        }
        let whole = to(ImageSize { width: across * self.side, height: down * self.side })?;
        let corners = (0..down).flat_map(|y| (0..across).map(move |x| [x, y]));
        let mut tiles: Vec<RgbPixels> = corners
            .map(|corner| canvas::cut(&whole, tile, corner.map(|n| i64::from(n * self.side))))
            .collect();
        tiles.push(to(tile)?);
        Ok((tiles, [down, across]))
    }
}

impl Preprocess for AspectRatioProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        let most = self.arrangements.iter().map(|[down, across]| down * across).max().unwrap_or(1);
        let n_tiles = if most > 1 { most + 1 } else { 1 };
        Some(n_tiles as usize * self.n_rows as usize)
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
        let (tiles, arrangement) = self.tiles(&image, limits)?;
        let grid = [self.grid as usize; 2];
        let patches =
            tiles.iter().flat_map(|tile| canvas::patches(tile, &self.settings, grid, self.patch)).collect();
        let n_tokens = tiles.len() as u32 * self.n_rows;
        let [h, w] = arrangement.map(|n| n * self.grid);
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h, w },
            n_tokens,
            features: Features::Tiles { patches, rows: TileRows::whole(n_tokens) },
        })
    }
}
