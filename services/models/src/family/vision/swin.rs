//! Swin as Donut has it, Swin itself and its second version: stages with shifted windows.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/donut/modeling_donut_swin.py>
//! and `swin/modeling_swin.py` and `swinv2/modeling_swinv2.py` beside it. Quirks: the stages are the stem, and no layers follow; Swin
//! has a norm at the end, Donut's has none. The second version compares angles, has no bias on keys, norms after its
//! sub-layers, and windows no wider than the stage of an image of the configured size.

use crate::error::ModelError;
use crate::family::Config;
use crate::family::image_keys::{channels, pair, patch_side};
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::AttentionShape;

/// Not in the configuration: the default of torch's `LayerNorm`.
const NORM_EPS: f32 = 1e-5;

/// Widest window of version 2, whose files have no table that would bound it.
const MOST_WINDOW: usize = 64;

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

static PYRAMID_V2: SwinNames = SwinNames { bias: "attention.self.continuous_position_bias_mlp", ..PYRAMID };

/// One of the architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SwinKind {
    Donut,
    Swin,
    Swinv2,
}

/// The encoder of a section of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, kind: SwinKind) -> Result<EncoderSpec, ModelError> {
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
    let stage = |(i, (depth, n_heads)): (usize, (&usize, &usize))| {
        stack(config, kind, embed << i, [*depth, *n_heads])
    };
    let stages = depths.iter().zip(&heads).enumerate().map(stage).collect::<Result<Vec<_>, _>>()?;
    let final_norm = kind != SwinKind::Donut;
    let last = stages.last().cloned().map(|s| StackSpec { n_layers: 0, final_norm, ..s });
    let (windows, scores, names) = match kind {
        SwinKind::Donut | SwinKind::Swin => (
            vec![SwinWindow { side: window, shift: window / 2 }; stages.len()],
            SwinScores::Products,
            &PYRAMID,
        ),
        SwinKind::Swinv2 => {
            let windows = windows_v2(config, window, stages.len())?;
            let measured = measured(config, &windows)?;
            (windows, SwinScores::Cosines { measured, factor: "attention.self.logit_scale" }, &PYRAMID_V2)
        }
    };
    let patch = [channels(config, "num_channels")?, side, side];
    Ok(EncoderSpec {
        modality: Modality::Image,
        stack: last.ok_or_else(|| config.unsupported("depths", "no stages", "1 to 8"))?,
        stem: StemSpec::Swin(SwinSpec { patch, windows, scores, stages, norm_eps: NORM_EPS, names }),
        positions: Positions::Absent,
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: &NAMES,
    })
}

/// Windows of each stage of version 2, by the rows that an image of the configured size has there.
fn windows_v2(config: &Config<'_>, window: usize, n_stages: usize) -> Result<Vec<SwinWindow>, ModelError> {
    if window > MOST_WINDOW {
        return Err(config.unsupported("window_size", window, format!("up to {MOST_WINDOW}")));
    }
    let rows = pair(config, "image_size")?[0] / patch_side(config)?;
    let stage = |i: usize| match rows >> i {
        0 => {
            let expected = "a row or more in each stage";
            Err(config.unsupported(
                "image_size",
                format!("{rows} rows of patches, {n_stages} stages"),
                expected,
            ))
        }
        rows if rows <= window => Ok(SwinWindow { side: rows, shift: 0 }),
        _ => Ok(SwinWindow { side: window, shift: window / 2 }),
    };
    (0..n_stages).map(stage).collect()
}

/// Sides of the windows that offsets are measured by: those of the training, or its own.
fn measured(config: &Config<'_>, windows: &[SwinWindow]) -> Result<Vec<usize>, ModelError> {
    const KEY: &str = "pretrained_window_sizes";
    let own = || windows.iter().map(|window| window.side);
    if config.get(KEY).is_none_or(serde_json::Value::is_null) {
        return Ok(own().collect());
    }
    let trained = config.sizes(KEY)?;
    if trained.len() < windows.len() || trained.contains(&1) {
        let expected = format!("{} sizes, 0 or 2 and more", windows.len());
        return Err(config.unsupported(KEY, format!("{trained:?}"), expected));
    }
    Ok(trained.iter().zip(own()).map(|(trained, own)| if *trained == 0 { own } else { *trained }).collect())
}

fn stack(
    config: &Config<'_>,
    kind: SwinKind,
    hidden: usize,
    [n_layers, n_heads]: [usize; 2],
) -> Result<StackSpec, ModelError> {
    if n_heads == 0 {
        return Err(config.unsupported("num_heads", 0, "1 or more in each stage"));
    }
    let head_dim = config.share("num_heads", hidden, n_heads)?;
    let is_v2 = kind == SwinKind::Swinv2;
    // Cosines are products over `head_dim`.
    let scale = if is_v2 { 1.0 / head_dim as f32 } else { 1.0 / (head_dim as f32).sqrt() };
    let qkv = config.flag_or("qkv_bias", true)?;
    Ok(StackSpec {
        hidden,
        n_layers,
        attention: AttentionSpec {
            shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
            bias: AttentionBias { q: qkv, k: qkv && !is_v2, v: qkv, out: true },
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
        placement: if is_v2 { NormPlacement::ResPost } else { NormPlacement::Pre },
        final_norm: false,
        layers: Vec::new(),
    })
}
