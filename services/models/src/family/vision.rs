//! `vision-encoder-decoder`: an image encoder and a text decoder with cross-attention, each of several kinds.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/vision_encoder_decoder/modeling_vision_encoder_decoder.py>.
//! TrOCR has an encoder of [`vit`] and the decoder of its own, Donut one of [`swin`] and that of mBART
//! ([`decoder`]). Quirk: where the widths differ and the decoder does not say that it reads the encoder's, a
//! linear layer stands between.

mod decoder;
mod swin;
mod vit;

use super::Config;
use crate::error::ModelError;
use crate::spec::{AttentionBias, AttentionSpec, ModelSpec, ProjectionSpec};
use triptych_kernels::ops::AttentionShape;

/// Between encoder and decoder, where their widths differ.
const PROJECTION: &[&str] = &["enc_to_dec_proj."];

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or asks for what is not built.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let encoder_config = config.section("encoder", "encoder.")?;
    let decoder_config = config.section("decoder", "decoder.")?;
    let mut encoder = match encoder_config.text("model_type")? {
        "vit" => vit::spec(&encoder_config, vit::Kind::Vit)?,
        "deit" => vit::spec(&encoder_config, vit::Kind::Deit)?,
        "beit" => vit::spec(&encoder_config, vit::Kind::Beit)?,
        "donut-swin" => swin::spec(&encoder_config, false)?,
        "swin" => swin::spec(&encoder_config, true)?,
        other => {
            return Err(encoder_config.unsupported("model_type", other, "vit, deit, beit, swin, donut-swin"));
        }
    };
    let decoder::Decoder { spec: decoder, reads } = decoder::decoder(&decoder_config)?;
    let (from, to) = (encoder.output_width(), decoder.stack.hidden);
    match reads {
        Some(width) if width != from => {
            let expected = format!("{from}, the encoder's width");
            return Err(decoder_config.unsupported("cross_attention_hidden_size", width, expected));
        }
        None if from != to => {
            encoder.extras.projection = Some(ProjectionSpec { out: to, prefixes: PROJECTION });
        }
        _ => {}
    }
    Ok(ModelSpec { encoder, decoder })
}

/// Self-attention of `hidden` in heads, scaled by `1/√head_dim`.
fn attention(
    config: &Config<'_>,
    hidden: usize,
    key: &str,
    bias: AttentionBias,
) -> Result<AttentionSpec, ModelError> {
    let n_heads = config.size(key)?;
    let head_dim = config.share(key, hidden, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    Ok(AttentionSpec { shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale }, bias })
}

/// A size or a pair of sizes: down, across.
fn pair(config: &Config<'_>, key: &str) -> Result<[usize; 2], ModelError> {
    match config.get(key).is_some_and(|v| v.is_array()) {
        false => config.size(key).map(|side| [side; 2]),
        true => match config.sizes(key)?[..] {
            [down, across] if down > 0 && across > 0 => Ok([down, across]),
            _ => Err(config.unsupported(key, format!("{:?}", config.sizes(key)?), "a size, or two")),
        },
    }
}

/// Side of a square patch.
fn patch_side(config: &Config<'_>) -> Result<usize, ModelError> {
    match pair(config, "patch_size")? {
        [down, across] if down == across => Ok(down),
        [down, across] => {
            Err(config.unsupported("patch_size", format!("[{down}, {across}]"), "the same down and across"))
        }
    }
}

/// Channels of a picture: red, green, blue.
fn channels(config: &Config<'_>, key: &str) -> Result<usize, ModelError> {
    match config.size_or(key, 3)? {
        3 => Ok(3),
        other => Err(config.unsupported(key, other, "3")),
    }
}
