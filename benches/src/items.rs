//! Items of a size, with random values: what encoders take the same time for as for real ones.

use crate::values::values;
use anyhow::{Result, bail};
use triptych_core::Extent;
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::spec::{EncoderSpec, StemSpec};

/// An item as the preprocessor of a model makes it: a square image by its side in pixels, a text by its tokens; audio windows
/// have one size.
pub fn random(spec: &EncoderSpec, size: usize) -> Result<EncoderInput> {
    let merged = spec.merged_side().pow(2);
    Ok(match &spec.stem {
        StemSpec::Patches { .. } => {
            let side = spec.stem.patches_along(size);
            EncoderInput {
                extent: Extent::Grid { t: 1, h: side as u32, w: side as u32 },
                n_tokens: (side * side / merged) as u32,
                features: Features::Patches(values(side * side * spec.stem.patch_values())),
            }
        }
        StemSpec::Mel { n_mels, n_frames, .. } => EncoderInput {
            extent: Extent::windows(1, 30_000),
            n_tokens: (n_frames / 2 / spec.merged_rows()) as u32,
            features: Features::Mel(values(n_mels * n_frames)),
        },
        StemSpec::Tokens { .. } => EncoderInput {
            extent: Extent::Tokens,
            n_tokens: size as u32,
            // Small ids exist in every vocabulary; the first few are special.
            features: Features::Tokens((0..size as u32).map(|i| 10 + i % 80).collect()),
        },
        other => bail!("no items for {other:?}"),
    })
}
