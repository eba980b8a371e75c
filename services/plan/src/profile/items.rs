//! Items of several sizes, made for the measurement: those that the load generator sends, since a decoder's work depends
//! on what is in a file.

use super::error::ProfileError;
use super::progress::Progress;
use super::settings::{Extent, ProfileSettings};
use crate::curves::costs::Spread;
use crate::curves::{ItemPoint, Point};
use triptych_bench::media::Media;
use triptych_bench::offered::{ItemShape, OfferedItem};
use triptych_core::limits::Limits;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderId, Fingerprint, ItemForm, ItemOptions, Modality,
};
use triptych_models::preprocess::{EncoderInput, Preprocess};

/// One size of item: what it becomes, and what becoming that takes.
pub struct Sample {
    /// Pixels, milliseconds, or token ids.
    pub size: f64,
    /// Side in pixels, milliseconds, or token ids: what its file is made of.
    pub side: u32,
    /// Bytes of the file.
    pub bytes: usize,
    /// Input of the encoder.
    pub input: EncoderInput,
    spread: Spread,
}

impl Sample {
    /// Sizes of the item.
    pub fn point(&self) -> ItemPoint {
        ItemPoint { size: self.size, tokens: self.input.n_tokens, bytes: self.bytes }
    }

    /// Its description, as an encoder of such rows would publish it.
    pub fn described(&self, encoder: EncoderId, hidden: usize) -> EncodedItem {
        EncodedItem {
            key: ContentKey::from_bytes([7 + encoder.tower.0; 32]),
            fingerprint: Fingerprint::from_bytes([0; 32]),
            modality: encoder.modality,
            n_tokens: self.input.n_tokens,
            hidden: u32::try_from(hidden).unwrap_or(u32::MAX),
            dtype: DType::F32,
            extent: self.input.extent.clone(),
            checksum: [0; 32],
        }
    }

    /// Time of preprocessing.
    pub fn preprocess(&self) -> Point {
        let Spread { p50_us, p95_us } = self.spread;
        Point { of: self.size, p50_us, p95_us }
    }
}

/// Sizes to measure: sides in pixels, milliseconds, or token ids; ascending.
fn sizes(modality: Modality, extent: Extent) -> &'static [u32] {
    match (modality, extent) {
        (Modality::Image, Extent::Quick) => &[112, 224],
        (Modality::Image, Extent::Full) => &[112, 224, 336, 448, 640, 896, 1280],
        (Modality::Audio, Extent::Quick) => &[1000, 2000],
        (Modality::Audio, Extent::Full) => &[1000, 5000, 10_000, 20_000, 30_000],
        (Modality::Text, Extent::Quick) => &[16, 64],
        (Modality::Text, Extent::Full) => &[16, 64, 128, 256, 512],
        // Its encoder is that of images, which are measured.
        (Modality::Video, _) => &[],
    }
}

/// Makes and preprocesses an item of each size that an encoder reads.
pub fn samples(
    preprocess: &dyn Preprocess,
    modality: Modality,
    settings: &ProfileSettings,
    progress: Progress<'_>,
) -> Result<Vec<Sample>, ProfileError> {
    let files: Vec<(u32, Vec<u8>)> =
        sizes(modality, settings.extent).iter().map(|&size| (size, item_file(modality, size))).collect();
    let read = |size: u32, bytes: &[u8]| {
        let input = read(preprocess, modality, bytes);
        input.map_err(|source| ProfileError::Item { what: format!("{modality} of size {size}"), source })
    };
    let mut readable = Vec::new();
    let mut refused = None;
    for (size, file) in files {
        match read(size, &file) {
            Ok(input) => readable.push((size, file, input)),
            // A model may refuse large items; refusing all is an error.
            Err(e) => refused = Some(e),
        }
    }
    if let (true, Some(refused)) = (readable.is_empty(), refused) {
        return Err(refused);
    }
    let spreads = settings
        .rounds
        .measure(&readable, ("preprocess", progress), |(size, file, _)| read(*size, file).map(drop))?;
    let sample = |((side, file, input), spread): ((u32, Vec<u8>, EncoderInput), Spread)| {
        let n = f64::from(side);
        let size = if modality == Modality::Image { n * n } else { n };
        Sample { size, side, bytes: file.len(), input, spread }
    };
    Ok(readable.into_iter().zip(spreads).map(sample).collect())
}

pub(super) fn read(
    preprocess: &dyn Preprocess,
    modality: Modality,
    bytes: &[u8],
) -> Result<EncoderInput, triptych_models::ItemError> {
    let form = if modality == Modality::Text { ItemForm::TokenIds } else { ItemForm::Plain };
    let prompt = preprocess.takes_prompt().then(|| "a".to_owned());
    let options = ItemOptions { form, prompt, ..ItemOptions::default() };
    preprocess.preprocess(modality, bytes, &options, &Limits::default())
}

/// A file as `triptych bench` sends it: a PNG of `size` pixels each way, a WAV of `size` milliseconds; `size` token ids.
pub(super) fn item_file(modality: Modality, size: u32) -> Vec<u8> {
    let file = |shape| Media::new(0).file(&OfferedItem { content: 1, shape }).to_vec();
    match modality {
        Modality::Image => file(ItemShape::Image { width: size, height: size }),
        Modality::Audio => file(ItemShape::Audio { millis: size }),
        // Small ids exist in every vocabulary; the first few are special.
        Modality::Text => (0..size).flat_map(|i| (10 + i % 80).to_le_bytes()).collect(),
        Modality::Video => Vec::new(),
    }
}
