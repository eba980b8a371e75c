//! Swin as Donut has it, and Swin itself: stages with shifted windows.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/donut/modeling_donut_swin.py>
//! and `swin/modeling_swin.py` beside it. Quirks: the stages are the stem, and no layers follow; Swin has a norm
//! at the end, Donut's has none.

use crate::error::ModelError;
use crate::family::Config;
use crate::family::image_keys::{channels, patch_side};
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::AttentionShape;

/// Not in the configuration: the default of torch's `LayerNorm`.
const NORM_EPS: f32 = 1e-5;

static NAMES: EncoderNames = EncoderNames {
    prefixes: &["encoder."],
    stem: &[],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "blocks",
        attention: AttentionNames {
            norm: "layernorm_before",
            qkv: QkvNames::Split(["attention.self.query", "attention.self.key", "attention.self.value"]),
            out: "attention.output.dense",
        },
        cross: None,
        feed_forward_norm: "layernorm_after",
        feed_forward_inner: &["intermediate.dense"],
        feed_forward_outer: "output.dense",
        final_norm: "layernorm",
    },
};

static PYRAMID: SwinNames = SwinNames {
    projection: "embeddings.patch_embeddings.projection",
    norm: "embeddings.norm",
    stages: "encoder.layers",
    bias: "attention.self.relative_position_bias_table",
    merge_norm: "downsample.norm",
    merge: "downsample.reduction",
};

/// The encoder of a section of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, has_final_norm: bool) -> Result<EncoderSpec, ModelError> {
    config.must_be_off("use_absolute_embeddings")?;
    let side = patch_side(config)?;
    let window = config.size("window_size")?;
    let embed = config.size("embed_dim")?;
    let depths = config.sizes("depths")?;
    let heads = config.sizes("num_heads")?;
    if depths.is_empty() || depths.len() != heads.len() || depths.len() > 8 {
        let actual = format!("{} stages, {} in num_heads", depths.len(), heads.len());
        return Err(config.unsupported("depths", actual, "as many as in num_heads, 1 to 8"));
    }
    let stage =
        |(i, (depth, n_heads)): (usize, (&usize, &usize))| stack(config, embed << i, *depth, *n_heads);
    let stages = depths.iter().zip(&heads).enumerate().map(stage).collect::<Result<Vec<_>, _>>()?;
    let last = stages.last().cloned().map(|s| StackSpec { n_layers: 0, final_norm: has_final_norm, ..s });
    let patch = [channels(config, "num_channels")?, side, side];
    Ok(EncoderSpec {
        modality: Modality::Image,
        stack: last.ok_or_else(|| config.unsupported("depths", "no stages", "1 to 8"))?,
        stem: StemSpec::Swin(SwinSpec { patch, window, stages, norm_eps: NORM_EPS, names: &PYRAMID }),
        positions: Positions::Absent,
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: &NAMES,
    })
}

fn stack(
    config: &Config<'_>,
    hidden: usize,
    n_layers: usize,
    n_heads: usize,
) -> Result<StackSpec, ModelError> {
    if n_heads == 0 {
        return Err(config.unsupported("num_heads", 0, "1 or more in each stage"));
    }
    let head_dim = config.share("num_heads", hidden, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let qkv = config.flag_or("qkv_bias", true)?;
    Ok(StackSpec {
        hidden,
        n_layers,
        attention: AttentionSpec {
            shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
            bias: AttentionBias { q: qkv, k: qkv, v: qkv, out: true },
            head_norms: None,
        },
        feed_forward: FeedForwardSpec {
            width: config.scaled_size("mlp_ratio", hidden)?,
            kind: FeedForwardKind::Plain,
            activation: config.activation("hidden_act", "gelu")?,
            bias: true,
        },
        norm: NormSpec::layer(config.number("layer_norm_eps")?),
        input_norm: InputNorm::Absent,
        placement: NormPlacement::Pre,
        final_norm: false,
        layers: Vec::new(),
    })
}
