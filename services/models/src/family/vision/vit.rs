//! ViT, DeiT, BEiT and DINOv2: a row for each patch and learned rows before them, pre-norm layers.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/vit/modeling_vit.py>,
//! `deit/modeling_deit.py`, `beit/modeling_beit.py` and `dinov2/modeling_dinov2.py` beside it. Quirks: DeiT has a distillation row; BEiT has
//! no bias on keys, scales what its layers add, knows places by a bias on scores and has a position table only
//! if asked to, and no norm at the end if it pools by the mean; DINOv2 scales what its layers add. DINOv2's gated
//! feed-forward, which its largest has, is refused. Poolers and mask tokens are left alone.
//! A position table is read for the one size it was made for: nothing interpolates it.

use crate::error::ModelError;
use crate::family::Config;
use crate::family::image_keys::{attention, channels, pair, patch_side};
use crate::spec::*;
use triptych_core::Modality;

/// One of the architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VitKind {
    Vit,
    Deit,
    Beit,
    Dinov2,
}

const fn names(stem: &'static [&'static str], stack: StackNames) -> EncoderNames {
    EncoderNames {
        prefixes: &["encoder."],
        stem,
        tokens: &[],
        positions: "embeddings.position_embeddings",
        stack,
    }
}

/// Names of layers: their two norms, and the layers of the feed-forward.
const fn stack_names(
    norms: [&'static str; 2],
    inner: &'static [&'static str],
    outer: &'static str,
) -> StackNames {
    StackNames {
        input_norm: "",
        layers: "encoder.layer",
        attention: AttentionNames {
            norm: norms[0],
            qkv: QkvNames::Split([
                "attention.attention.query",
                "attention.attention.key",
                "attention.attention.value",
            ]),
            out: "attention.output.dense",
        },
        cross: None,
        feed_forward_norm: norms[1],
        feed_forward_inner: inner,
        feed_forward_outer: outer,
        final_norm: "layernorm",
    }
}

const STACK: StackNames =
    stack_names(["layernorm_before", "layernorm_after"], &["intermediate.dense"], "output.dense");
const STEM: &[&str] = &["embeddings.patch_embeddings.projection", "embeddings.cls_token"];

const DEIT_STEM: &[&str] = &[STEM[0], STEM[1], "embeddings.distillation_token"];

static VIT: EncoderNames = names(STEM, STACK);
static DINOV2: EncoderNames = names(STEM, stack_names(["norm1", "norm2"], &["mlp.fc1"], "mlp.fc2"));
static DEIT: EncoderNames = names(DEIT_STEM, STACK);

const SCALES: [&str; 2] = ["lambda_1", "lambda_2"];
const DINOV2_SCALES: [&str; 2] = ["layer_scale1.lambda1", "layer_scale2.lambda1"];
const OWN_BIAS: &str = "attention.attention.relative_position_bias.relative_position_bias_table";
const SHARED_BIAS: &str = "encoder.relative_position_bias.relative_position_bias_table";

/// The encoder of a section of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, kind: VitKind) -> Result<EncoderSpec, ModelError> {
    let hidden = config.size("hidden_size")?;
    let side = patch_side(config)?;
    let image = pair(config, "image_size")?;
    let grid = image.map(|pixels| pixels / side);
    if grid.contains(&0) {
        return Err(config.unsupported("patch_size", side, "at most image_size"));
    }
    let names = match kind {
        VitKind::Deit => &DEIT,
        VitKind::Dinov2 => &DINOV2,
        VitKind::Vit | VitKind::Beit => &VIT,
    };
    let n_prefix = names.stem.len() - 1;
    let extras = match kind {
        VitKind::Beit => beit_extras(config, grid)?,
        VitKind::Dinov2 => EncoderExtras { scales: Some(DINOV2_SCALES), ..EncoderExtras::default() },
        VitKind::Vit | VitKind::Deit => EncoderExtras::default(),
    };
    let width = match kind {
        VitKind::Dinov2 => {
            config.must_be_off("use_swiglu_ffn")?;
            config.scaled_size("mlp_ratio", hidden)?
        }
        _ => config.size("intermediate_size")?,
    };
    let has_table = kind != VitKind::Beit || config.flag_or("use_absolute_position_embeddings", false)?;
    let bias = config.flag_or("qkv_bias", true)?;
    let bias = AttentionBias { q: bias, k: bias && kind != VitKind::Beit, v: bias, out: true };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::PrefixedPatches {
            patch: [channels(config, "num_channels")?, side, side],
            grid,
            bias: true,
            n_prefix,
            flat_prefix: false,
        },
        positions: match has_table {
            true => Positions::Parameter { n_rows: grid[0] * grid[1] + n_prefix },
            false => Positions::Absent,
        },
        stack: StackSpec {
            hidden,
            n_layers: config.size("num_hidden_layers")?,
            attention: attention(config, hidden, "num_attention_heads", bias)?,
            feed_forward: FeedForwardSpec {
                width,
                kind: FeedForwardKind::Plain,
                activation: config.activation("hidden_act", "gelu")?,
                bias: true,
            },
            norm: NormSpec::layer(config.number("layer_norm_eps")?),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: kind != VitKind::Beit || !config.flag_or("use_mean_pooling", true)?,
            layers: Vec::new(),
        },
        windows: None,
        extras,
        projector: None,
        names,
    })
}

fn beit_extras(config: &Config<'_>, grid: [usize; 2]) -> Result<EncoderExtras, ModelError> {
    if grid[0] != grid[1] {
        let actual = format!("{} by {} patches", grid[0], grid[1]);
        return Err(config.unsupported("image_size", actual, "a square"));
    }
    let own = config.flag_or("use_relative_position_bias", false)?;
    let shared = config.flag_or("use_shared_relative_position_bias", false)?;
    let table = match (own, shared) {
        (false, false) => None,
        (true, false) => Some(PositionBiasTable::PerLayer(OWN_BIAS)),
        (false, true) => Some(PositionBiasTable::Shared(SHARED_BIAS)),
        (true, true) => {
            let expected = "false beside use_relative_position_bias";
            return Err(config.unsupported("use_shared_relative_position_bias", true, expected));
        }
    };
    let value = config.get("layer_scale_init_value").and_then(serde_json::Value::as_f64).unwrap_or(0.1);
    Ok(EncoderExtras {
        scales: (value > 0.0).then_some(SCALES),
        position_bias: table.map(|table| PositionBiasSpec { grid, table }),
        ..EncoderExtras::default()
    })
}
