//! Images to tiles in the arrangement whose shape is nearest, as transformers' `GotOcr2ImageProcessor` makes them for InternVL.
//!
//! Decode, upright, RGB → the arrangement → the image at its size, whatever its own shape → tiles, and the image as one tile more
//! → normalise
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/got_ocr2/image_processing_pil_got_ocr2.py>).
//! Where InternVL is in its authors' layout, `config.json` has the settings (`dynamic_preprocess` of its model card makes the same
//! tiles). `InternVLProcessor` asks for tiles whatever the file says of `crop_to_patches`.

use super::decode;
use super::pixels::{ImageSize, RgbPixels};
use super::square_tiles::SquareTiles;
use crate::error::{ItemError, ModelError};
use crate::files::{ItemProcessor, JsonFile};
use crate::preprocess::{EncoderInput, Preprocess, admit, check_options, contained};
use crate::spec::{EncoderSpec, TilingSpec};
use std::path::Path;
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};

/// Most tiles that a file may ask for.
pub(crate) const MAX_TILES: u32 = 64;

/// The processor of models that read tiles in the arrangement nearest to an image's shape.
#[derive(Clone, Debug)]
pub struct AspectRatioProcessor {
    tiles: SquareTiles,
    /// Tiles down and across of every arrangement, by their number.
    arrangements: Vec<[u32; 2]>,
}

impl AspectRatioProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        if let Some(TilingSpec::AspectRatioWithin { tiles: [least, most] }) = spec.extras.tiling {
            let tiles = SquareTiles::imagenet(spec).ok_or_else(|| {
                ModelError::missing_key("config.json", "vision_config.image_size", "a square of patches")
            })?;
            return Ok(Self { tiles, arrangements: arrangements(least, most) });
        }
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let tiles = SquareTiles::from_dir(dir, &file, "size", spec)?;
        let least = file.u32("min_patches")?.unwrap_or(1);
        let most = file.u32("max_patches")?.unwrap_or(12);
        if least == 0 || most < least || most > MAX_TILES {
            return Err(file.wrong("max_patches", &format!("from min_patches, 1 or more, to {MAX_TILES}")));
        }
        Ok(Self { tiles, arrangements: arrangements(least, most) })
    }

    /// Tiles of an image, and how many there are down and across.
    fn cut(&self, image: RgbPixels, limits: &Limits) -> Result<(Vec<RgbPixels>, [u32; 2]), ItemError> {
        let [down, across] = nearest(&self.arrangements, image.size, self.tiles.side);
        let whole = self.tiles.tile(image.clone(), limits)?;
        if [down, across] == [1, 1] {
            return Ok((vec![whole], [1, 1]));
        }
        let size = ImageSize { width: across * self.tiles.side, height: down * self.tiles.side };
        let mut tiles = self.tiles.cut(&self.tiles.resized(image, size, limits)?, [down, across]);
        tiles.push(whole);
        Ok((tiles, [down, across]))
    }
}

/// Tiles down and across, of `side` pixels, of these: those whose shape is nearest to an image's, of equals the later while the
/// image has more than half as many pixels as they.
pub(super) fn nearest(arrangements: &[[u32; 2]], image: ImageSize, side: u32) -> [u32; 2] {
    let ratio = f64::from(image.width) / f64::from(image.height);
    let pixels = f64::from(image.width) * f64::from(image.height);
    let of_tile = f64::from(side) * f64::from(side);
    let mut best = [1, 1];
    let mut least = f64::INFINITY;
    for &[down, across] in arrangements {
        let distance = (ratio - f64::from(across) / f64::from(down)).abs();
        let is_filled = pixels > 0.5 * of_tile * f64::from(down * across);
        if distance < least || (distance == least && is_filled) {
            least = distance;
            best = [down, across];
        }
    }
    best
}

/// Every arrangement of `least` to `most` tiles, down and across, by their number.
pub(super) fn arrangements(least: u32, most: u32) -> Vec<[u32; 2]> {
    let mut all: Vec<[u32; 2]> = (1..=most)
        .flat_map(|across| (1..=most).map(move |down| [down, across]))
        .filter(|[down, across]| (least..=most).contains(&(down * across)))
        .collect();
    all.sort_by_key(|[down, across]| down * across);
    all
}

impl Preprocess for AspectRatioProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        let most = self.arrangements.iter().map(|[down, across]| down * across).max().unwrap_or(1);
        let n_tiles = if most > 1 { most + 1 } else { 1 };
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
