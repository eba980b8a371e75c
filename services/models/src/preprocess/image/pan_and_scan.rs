//! Images to one tile, or that and parts of a long image, as transformers' `Gemma3ImageProcessor` makes them.
//!
//! Decode, upright, RGB → equal parts along the longer side, if pan and scan is on and the shape calls for it → the whole image
//! and each part at the size of a tile → normalise
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/gemma3/image_processing_gemma3.py>).

use super::canvas;
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

/// Most parts that a file may ask for.
const MAX_PARTS: u32 = 64;

/// The processor of models that read an image as one tile, and a long one in parts as well.
#[derive(Clone, Debug)]
pub struct PanAndScanProcessor {
    tiles: SquareTiles,
    /// `None`: pan and scan is off.
    parts: Option<PartSettings>,
}

/// Settings of pan and scan.
#[derive(Clone, Copy, Debug, PartialEq)]
struct PartSettings {
    /// Least pixels on a side of a part.
    min_side: u32,
    /// Most parts.
    max_parts: u32,
    /// Longer side by shorter side from which an image is cut.
    min_ratio: f64,
}

impl PanAndScanProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let tiles = SquareTiles::from_dir(dir, &file, "size", spec)?;
        let parts = match file.bool("do_pan_and_scan")?.unwrap_or(false) {
            true => Some(PartSettings::of(&file)?),
            false => None,
        };
        Ok(Self { tiles, parts })
    }

    /// The whole image and its parts, and how many parts there are down and across; `[1, 1]`: none.
    fn cut(&self, image: RgbPixels, limits: &Limits) -> Result<(Vec<RgbPixels>, [u32; 2]), ItemError> {
        let ImageSize { width, height } = image.size;
        let Some(n) = self.parts.and_then(|parts| parts.number([width, height])) else {
            return Ok((vec![self.tiles.tile(image, limits)?], [1, 1]));
        };
        let [down, across] = if width >= height { [1, n] } else { [n, 1] };
        let [part_width, part_height] = [width.div_ceil(across), height.div_ceil(down)];
        let mut tiles = Vec::with_capacity(n as usize + 1);
        tiles.push(self.tiles.tile(image.clone(), limits)?);
        for [y, x] in (0..down).flat_map(|y| (0..across).map(move |x| [y * part_height, x * part_width])) {
            // The last part is what is left.
            let size = ImageSize {
                width: part_width.min(width.saturating_sub(x)),
                height: part_height.min(height.saturating_sub(y)),
            };
            if size.width == 0 || size.height == 0 {
                return Err(ItemError::Empty(format!(
                    "a part of the image of {width}x{height} pixels is empty"
                )));
            }
            let part = canvas::cut(&image, size, [i64::from(x), i64::from(y)]);
            tiles.push(self.tiles.tile(part, limits)?);
        }
        Ok((tiles, [down, across]))
    }
}

impl PartSettings {
    fn of(file: &JsonFile) -> Result<Self, ModelError> {
        let number = |key: &str, default: u32, most: u32| match file.u32(key)?.unwrap_or(default) {
            n if (1..=most).contains(&n) => Ok(n),
            _ => Err(file.wrong(key, &format!("1 to {most}"))),
        };
        const RATIO: &str = "pan_and_scan_min_ratio_to_activate";
        let min_ratio = file.f64(RATIO)?.unwrap_or(1.2);
        if !min_ratio.is_finite() {
            return Err(file.wrong(RATIO, "a number"));
        }
        Ok(Self {
            min_side: number("pan_and_scan_min_crop_size", 256, 8192)?,
            max_parts: number("pan_and_scan_max_num_crops", 4, MAX_PARTS)?,
            min_ratio,
        })
    }

    /// Parts along the longer side of an image of `[width, height]`; `None`: it is not cut.
    fn number(&self, [width, height]: [u32; 2]) -> Option<u32> {
        let (long, short) = (width.max(height), width.min(height));
        let ratio = f64::from(long) / f64::from(short);
        if ratio < self.min_ratio {
            return None;
        }
        let n = ((ratio + 0.5).floor() as u32).min(long / self.min_side).max(2).min(self.max_parts);
        let is_large = long.div_ceil(n).min(short) >= self.min_side;
        is_large.then_some(n)
    }
}

impl Preprocess for PanAndScanProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        Some(self.tiles.rows_of(1 + self.parts.map_or(0, |parts| parts.max_parts)))
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
