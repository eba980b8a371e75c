//! A plain item of a model's kind, as its own processors make it: sizes are illustrated by it.

use crate::preprocess::{EncoderInput, Features, Preprocess};
use crate::spec::{EncoderSpec, StemSpec};
use std::io::Cursor;
use std::sync::Arc;
use triptych_core::limits::Limits;
use triptych_core::{Extent, ItemOptions, Modality};

/// A plain item of the model's kind as each tower's own processor makes it. A processor that refuses a plain item has none.
pub(super) fn example_inputs(
    spec: &EncoderSpec,
    processors: &[Arc<dyn Preprocess>],
) -> Vec<Option<EncoderInput>> {
    let bytes = match (spec.modality, &spec.stem) {
        (Modality::Text, _) => {
            let n_tokens = n_text_tokens(spec);
            let features = Features::Tokens(vec![0; n_tokens]);
            return vec![Some(EncoderInput { extent: Extent::Tokens, n_tokens: n_tokens as u32, features })];
        }
        (Modality::Audio, _) => silence(30),
        (Modality::Image | Modality::Video, _) => blank(1024, 768),
    };
    let input = |processor: &Arc<dyn Preprocess>| {
        processor.preprocess(spec.modality, &bytes, &ItemOptions::default(), &Limits::default()).ok()
    };
    processors.iter().map(input).collect()
}

/// Description of the plain item.
pub(super) fn example_text(spec: &EncoderSpec) -> String {
    match spec.modality {
        Modality::Text => format!("a text of {} tokens", n_text_tokens(spec)),
        Modality::Audio => "30 s of audio".to_owned(),
        Modality::Image | Modality::Video => "an image of 1024 x 768".to_owned(),
    }
}

/// Tokens of the example of an encoder of text.
fn n_text_tokens(spec: &EncoderSpec) -> usize {
    match spec.stem {
        StemSpec::Tokens { max_tokens, .. } => max_tokens.min(512),
        _ => 512,
    }
}

/// A WAV file: 16 kHz, one channel, 16 bits.
fn silence(seconds: u32) -> Vec<u8> {
    const RATE: u32 = 16_000;
    let n_bytes = seconds * RATE * 2;
    let mut wav = b"RIFF".to_vec();
    wav.extend((36 + n_bytes).to_le_bytes());
    wav.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    wav.extend(RATE.to_le_bytes());
    wav.extend((2 * RATE).to_le_bytes());
    wav.extend(b"\x02\0\x10\0data");
    wav.extend(n_bytes.to_le_bytes());
    wav.resize(wav.len() + n_bytes as usize, 0);
    wav
}

/// A PNG file, black.
fn blank(width: u32, height: u32) -> Vec<u8> {
    let mut png = Vec::new();
    let image = image::RgbImage::new(width, height);
    image.write_to(&mut Cursor::new(&mut png), image::ImageFormat::Png).expect("memory takes every byte");
    png
}
