//! Keys that the configurations of image encoders share.

use super::Config;
use crate::error::ModelError;
use crate::spec::{AttentionBias, AttentionSpec};
use triptych_kernels::ops::AttentionShape;

/// Self-attention of `hidden` in heads, scaled by `1/√head_dim`.
pub(super) fn attention(
    config: &Config<'_>,
    hidden: usize,
    key: &str,
    bias: AttentionBias,
) -> Result<AttentionSpec, ModelError> {
    attention_of(config, hidden, config.size(key)?, bias)
}

/// The same of so many heads.
pub(super) fn attention_of(
    config: &Config<'_>,
    hidden: usize,
    n_heads: usize,
    bias: AttentionBias,
) -> Result<AttentionSpec, ModelError> {
    let head_dim = config.share("num_attention_heads", hidden, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    Ok(AttentionSpec {
        shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
        bias,
        head_norms: None,
    })
}

/// A size or a pair of sizes: down, across.
pub(super) fn pair(config: &Config<'_>, key: &str) -> Result<[usize; 2], ModelError> {
    match config.get(key).is_some_and(|v| v.is_array()) {
        false => config.size(key).map(|side| [side; 2]),
        true => match config.sizes(key)?[..] {
            [down, across] if down > 0 && across > 0 => Ok([down, across]),
            _ => Err(config.unsupported(key, format!("{:?}", config.sizes(key)?), "a size, or two")),
        },
    }
}

/// Side of a square patch.
pub(super) fn patch_side(config: &Config<'_>) -> Result<usize, ModelError> {
    match pair(config, "patch_size")? {
        [down, across] if down == across => Ok(down),
        [down, across] => {
            Err(config.unsupported("patch_size", format!("[{down}, {across}]"), "the same down and across"))
        }
    }
}

/// Channels of an image: 3, red, green and blue.
pub(super) fn channels(config: &Config<'_>, key: &str) -> Result<usize, ModelError> {
    match config.size_or(key, 3)? {
        3 => Ok(3),
        other => Err(config.unsupported(key, other, "3")),
    }
}
