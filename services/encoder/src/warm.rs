//! A first forward before the worker is ready, so that no request pays for touching pages and choosing kernels.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::Preprocess;

/// Encodes the smallest item of a modality. A failure is logged, and the worker starts all the same: items of
/// requests may still encode.
pub fn warm_up(encoder: &mut dyn Encoder, preprocess: &dyn Preprocess, modality: Modality) {
    let began = Instant::now();
    let options =
        ItemOptions { prompt: preprocess.takes_prompt().then(|| "a".to_owned()), ..ItemOptions::default() };
    let bytes = smallest(modality);
    let work = catch_unwind(AssertUnwindSafe(|| {
        let input = preprocess.preprocess(modality, &bytes, &options, &Limits::default());
        let input = input.map_err(|e| e.to_string())?;
        encoder.encode(&[&input]).map(|_| input.n_tokens).map_err(|e| e.to_string())
    }));
    match work.unwrap_or_else(|_| Err("it panicked".to_owned())) {
        Ok(tokens) => tracing::debug!(%modality, tokens, took = ?began.elapsed(), "encoder warm"),
        Err(error) => {
            tracing::warn!(%modality, error, "the first forward failed; the first request pays for it")
        }
    }
}

/// A grey square, a tenth of a second of silence, one letter.
fn smallest(modality: Modality) -> Vec<u8> {
    match modality {
        // An encoder of videos reads images, too.
        Modality::Image | Modality::Video => bitmap(32),
        Modality::Audio => silence(16_000, 1_600),
        Modality::Text => b"a".to_vec(),
    }
}

/// A BMP file: 24 bits a pixel, bottom row first, rows padded to 4 bytes.
fn bitmap(side: u32) -> Vec<u8> {
    const HEADERS: u32 = 14 + 40;
    let pixels = (side * 3).next_multiple_of(4) * side;
    let mut file = b"BM".to_vec();
    for field in [HEADERS + pixels, 0, HEADERS, 40, side, side] {
        file.extend(field.to_le_bytes());
    }
    // One plane, 24 bits, then: no compression, size, resolution twice, no palette.
    file.extend([1, 0, 24, 0]);
    for field in [0, pixels, 2835, 2835, 0, 0] {
        file.extend(field.to_le_bytes());
    }
    file.resize(file.len() + pixels as usize, 128);
    file
}

/// A WAV file: one channel of 16-bit samples.
fn silence(rate: u32, n_samples: u32) -> Vec<u8> {
    let bytes = n_samples * 2;
    let mut file = b"RIFF".to_vec();
    file.extend((36 + bytes).to_le_bytes());
    file.extend(b"WAVEfmt ");
    file.extend(16_u32.to_le_bytes());
    file.extend([1, 0, 1, 0]);
    file.extend(rate.to_le_bytes());
    file.extend((rate * 2).to_le_bytes());
    file.extend([2, 0, 16, 0]);
    file.extend(b"data");
    file.extend(bytes.to_le_bytes());
    file.resize(file.len() + bytes as usize, 0);
    file
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use triptych_models::{LoadFormat, Model, ModelSource};

    #[test]
    fn the_smallest_items_are_valid_files() {
        for (case, modality) in [
            ("qwen2_vl_two_images", Modality::Image),
            ("whisper_multilingual", Modality::Audio),
            ("bart_odd_heads", Modality::Text),
            ("donut_odd_padded", Modality::Image),
        ] {
            let dir =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(case).join("model");
            let model =
                Model::open(&ModelSource { dir, name: None, format: LoadFormat::Safetensors, packed: None })
                    .unwrap();
            let (limits, options) = (Limits::default(), ItemOptions::default());
            let input = model.preprocess().preprocess(modality, &smallest(modality), &options, &limits);
            assert!(input.is_ok_and(|input| input.n_tokens > 0), "{case}");
        }
    }
}
