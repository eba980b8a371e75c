//! Images to a view of the whole and views of parts, as transformers' `DeepseekOcr2ImageProcessor` makes them.
//!
//! Decode, upright, RGB → of an image larger than a part: the arrangement of parts, the image at its size, whatever its own shape,
//! its parts; then the image with its longer side as long as the whole view is, its shape kept, in the middle of grey → normalise
//! (<https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/deepseek_ocr2/image_processing_pil_deepseek_ocr2.py>).
//! Output rows are those of the parts, of the whole, and a learned row.

use super::aspect_ratio::{arrangements, nearest};
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

/// The least and the most parts: `DeepseekOcr2Processor` asks for so many whatever the image processor's file says.
const N_PARTS: [u32; 2] = [2, 6];

/// The processor of models that read a whole image and smaller views of its parts.
#[derive(Clone, Debug)]
pub struct ViewsProcessor {
    settings: CanvasSettings,
    /// Colour of the margins.
    background: [u8; 3],
    /// Parts down and across of every arrangement, by their number.
    arrangements: Vec<[u32; 2]>,
    /// Patches on a side of a part, and of a whole image.
    sides: [u32; 2],
    /// Pixels on a side of a patch.
    patch: u32,
    /// Output rows of a part, and of a whole image.
    n_rows: [u32; 2],
}

impl ViewsProcessor {
    /// With the settings of a model directory, for an encoder of `spec`.
    ///
    /// # Errors
    /// [`ModelError::File`], [`ModelError::Format`], or [`ModelError::Config`] for a value that is not supported, or not that
    /// of `config.json`.
    pub fn from_dir(dir: &Path, spec: &EncoderSpec) -> Result<Self, ModelError> {
        let file = JsonFile::processor(dir, ItemProcessor::Image)?;
        let StemSpec::Sam(sam) = &spec.stem else {
            return Err(file.wrong("image_processor_type", "the processor of another encoder"));
        };
        let settings = CanvasSettings::from_dir(dir)?;
        let patch = sam.patch[2] as u32;
        let sides = sam.sides.map(|side| side as u32);
        let [part, whole] = sides.map(|side| side * patch);
        if settings.fixed_size() != Some(ImageSize { width: whole, height: whole }) {
            return Err(file.wrong("size", &format!("{whole} by {whole}, as image_size in config.json")));
        }
        if file.u32("tile_size")?.unwrap_or(768) != part {
            let expected = format!("{part}, 0.75 of image_size in config.json");
            return Err(file.wrong("tile_size", &expected));
        }
        if file.bool("crop_to_patches")? == Some(false) {
            // The published processor counts rows of a view that it does not make then.
            return Err(file.wrong("crop_to_patches", "true"));
        }
        check_rows(dir, patch)?;
        for (key, expected) in [("min_patches", N_PARTS[0]), ("max_patches", N_PARTS[1])] {
            if file.u32(key)?.unwrap_or(expected) != expected {
                return Err(file.wrong(key, &format!("{expected}, which is asked for whatever it is")));
            }
        }
        let n_rows = sam.sides.map(|side| spec.image_tokens([side; 2]).unwrap_or_default() as u32);
        let arrangements = arrangements(N_PARTS[0], N_PARTS[1]);
        Ok(Self { settings, background: background(&file)?, arrangements, sides, patch, n_rows })
    }

    /// Pixels on a side of a part, and of a whole image.
    fn pixels(&self) -> [u32; 2] {
        self.sides.map(|side| side * self.patch)
    }

    /// The parts of an image; none if it is no larger than one.
    fn parts(&self, image: &RgbPixels, limits: &Limits) -> Result<Vec<RgbPixels>, ItemError> {
        let [side, _] = self.pixels();
        if image.size.width.max(image.size.height) <= side {
            return Ok(Vec::new());
        }
        let [down, across] = nearest(&self.arrangements, image.size, side);
        let size = ImageSize { width: across * side, height: down * side };
        let resized = CanvasStep::Exact(size).apply(image.clone(), self.settings.filter, limits)?;
        let part = ImageSize { width: side, height: side };
        let corners = (0..down).flat_map(|y| (0..across).map(move |x| [x, y]));
        let cut = |corner: [u32; 2]| canvas::cut(&resized, part, corner.map(|n| i64::from(n * side)));
        Ok(corners.map(cut).collect())
    }

    /// The whole image.
    fn whole(&self, image: RgbPixels, limits: &Limits) -> Result<RgbPixels, ItemError> {
        let [_, side] = self.pixels();
        let size = image.size;
        let scale = f64::from(side) / f64::from(size.width.max(size.height));
        // As Python's `round`.
        let [width, height] =
            [size.width, size.height].map(|n| (f64::from(n) * scale).round_ties_even() as u32);
        if width == 0 || height == 0 {
            let text = format!("the image is {}x{}, too thin for this model", size.width, size.height);
            return Err(ItemError::Unsupported(text));
        }
        let fitted =
            CanvasStep::Exact(ImageSize { width, height }).apply(image, self.settings.filter, limits)?;
        Ok(centred(&fitted, side, self.background))
    }
}

/// Checks the settings that the published processor counts rows by.
fn check_rows(dir: &Path, patch: u32) -> Result<(), ModelError> {
    let file = JsonFile::read_or_empty(dir, "processor_config.json")?;
    for (key, default, expected) in [("patch_size", 16, patch), ("downsample_ratio", 4, 4)] {
        if file.u32(key)?.unwrap_or(default) != expected {
            return Err(file.wrong(key, &format!("{expected}, as config.json has it")));
        }
    }
    Ok(())
}

/// Red, green and blue of the margins.
fn background(file: &JsonFile) -> Result<[u8; 3], ModelError> {
    const KEY: &str = "background_color";
    let Some(colour) = file.f64s(KEY)? else { return Ok([127; 3]) };
    let byte = |value: &f64| (value.fract() == 0.0 && (0.0..=255.0).contains(value)).then_some(*value as u8);
    let bytes: Option<Vec<u8>> = colour.iter().map(byte).collect();
    bytes
        .and_then(|bytes| bytes.try_into().ok())
        .ok_or_else(|| file.wrong(KEY, "three integers from 0 to 255"))
}

/// An image in the middle of a square of one colour; of an odd rest the smaller half is before it.
fn centred(image: &RgbPixels, side: u32, colour: [u8; 3]) -> RgbPixels {
    let ImageSize { width, height } = image.size;
    let square = ImageSize { width: side, height: side };
    let mut rgb = colour.repeat((side * side) as usize);
    let [left, top] = [width, height].map(|n| side.saturating_sub(n) as usize / 2);
    let n_bytes = width.min(side) as usize * 3;
    let rows = image.rgb.chunks_exact((width as usize * 3).max(1)).take(side as usize);
    for (y, row) in rows.enumerate() {
        let first = ((top + y) * side as usize + left) * 3;
        rgb[first..first + n_bytes].copy_from_slice(&row[..n_bytes]);
    }
    RgbPixels { size: square, rgb }
}

impl Preprocess for ViewsProcessor {
    fn modalities(&self) -> &[Modality] {
        &[Modality::Image]
    }

    fn max_rows(&self) -> Option<usize> {
        let most = self.arrangements.iter().map(|[down, across]| down * across).max().unwrap_or(0);
        Some((most * self.n_rows[0] + self.n_rows[1] + 1) as usize)
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
        let mut views = self.parts(&image, limits)?;
        let n_parts = views.len() as u32;
        views.push(self.whole(image, limits)?);
        let sides: Vec<u32> = views.iter().map(|view| view.size.width / self.patch).collect();
        let patches = views.iter().zip(&sides).flat_map(|(view, side)| {
            canvas::patches(view, &self.settings, [*side as usize; 2], self.patch as usize)
        });
        let patches = patches.collect();
        let n_tokens = n_parts * self.n_rows[0] + self.n_rows[1] + 1;
        let [_, whole] = self.sides;
        Ok(EncoderInput {
            extent: Extent::Grid { t: 1, h: whole, w: whole },
            n_tokens,
            features: Features::Views { patches, sides, rows: TileRows::whole(n_tokens) },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_stands_in_the_middle_of_one_colour() {
        let size = ImageSize { width: 3, height: 2 };
        let image = RgbPixels { size, rgb: [[1, 2, 3]; 6].as_flattened().to_vec() };
        let square = centred(&image, 5, [9, 8, 7]);
        let reds: Vec<u8> = square.rgb.iter().step_by(3).copied().collect();
        let [margin, line] = [[9; 5], [9, 1, 1, 1, 9]];
        assert_eq!(reds, [margin, line, line, margin, margin].concat());
    }
}
