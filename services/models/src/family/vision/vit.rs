//! ViT, DeiT, BEiT and DINOv2 with and without registers: a row for each patch and learned rows before them, pre-norm layers.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/vit/modeling_vit.py>,
//! `deit/modeling_deit.py`, `beit/modeling_beit.py`, `dinov2/modeling_dinov2.py` and
//! `dinov2_with_registers/modeling_dinov2_with_registers.py` beside it. Quirks: DeiT has a distillation row; BEiT has
//! no bias on keys, scales what its layers add, knows places by a bias on scores and has a position table only
//! if asked to, and no norm at the end if it pools by the mean; DINOv2 scales what its layers add, and its largest has a gated
//! feed-forward, whose inner width is two thirds of the configured one in whole eights; registers stand behind the class row and have
//! no positions. Poolers and mask tokens are left alone. A position table is made for a square image of `image_size`; where the
//! processor makes images of another size it is resampled, but for BEiT's.

use crate::error::ModelError;
use crate::family::Config;
use crate::family::image_keys::{attention, channels, pair, patch_side};
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::Activation;

/// One of the architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VitKind {
    Vit,
    Deit,
    Beit,
    Dinov2,
    Dinov2WithRegisters,
}

impl VitKind {
    fn is_dinov2(self) -> bool {
        matches!(self, Self::Dinov2 | Self::Dinov2WithRegisters)
    }
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
const REGISTERS_STEM: &[&str] = &[STEM[0], STEM[1], "embeddings.register_tokens"];

const DINOV2_STACK: StackNames = stack_names(["norm1", "norm2"], &["mlp.fc1"], "mlp.fc2");
const GATED_STACK: StackNames = stack_names(["norm1", "norm2"], &["mlp.weights_in"], "mlp.weights_out");

static DINOV2: EncoderNames = names(STEM, DINOV2_STACK);
static GATED_DINOV2: EncoderNames = names(STEM, GATED_STACK);
static REGISTERS: EncoderNames = names(REGISTERS_STEM, DINOV2_STACK);
static GATED_REGISTERS: EncoderNames = names(REGISTERS_STEM, GATED_STACK);
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
    if kind.is_dinov2() && grid[0] != grid[1] {
        return Err(config.unsupported("image_size", format!("{image:?}"), "a square"));
    }
    let is_gated = kind.is_dinov2() && config.flag_or("use_swiglu_ffn", false)?;
    let names = match (kind, is_gated) {
        (VitKind::Deit, _) => &DEIT,
        (VitKind::Dinov2, false) => &DINOV2,
        (VitKind::Dinov2, true) => &GATED_DINOV2,
        (VitKind::Dinov2WithRegisters, false) => &REGISTERS,
        (VitKind::Dinov2WithRegisters, true) => &GATED_REGISTERS,
        (VitKind::Vit | VitKind::Beit, _) => &VIT,
    };
    let n_registers = match kind {
        VitKind::Dinov2WithRegisters => config.size_or("num_register_tokens", 4)?,
        _ => 0,
    };
    let n_prefix = names.stem.len() - 1 + n_registers.saturating_sub(1);
    let extras = match kind {
        VitKind::Beit => beit_extras(config, grid)?,
        VitKind::Dinov2 | VitKind::Dinov2WithRegisters => {
            EncoderExtras { scales: Some(DINOV2_SCALES), ..EncoderExtras::default() }
        }
        VitKind::Vit | VitKind::Deit => EncoderExtras::default(),
    };
    let bias = config.flag_or("qkv_bias", true)?;
    let bias = AttentionBias { q: bias, k: bias && kind != VitKind::Beit, v: bias, out: true };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::PrefixedPatches {
            patch: [channels(config, "num_channels")?, side, side],
            grid,
            bias: true,
            n_prefix,
            n_registers,
            flat_prefix: false,
        },
        positions: positions(config, kind, (grid, n_prefix))?,
        stack: StackSpec {
            hidden,
            n_layers: config.size("num_hidden_layers")?,
            attention: attention(config, hidden, "num_attention_heads", bias)?,
            feed_forward: feed_forward(config, kind, (hidden, is_gated))?,
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

fn feed_forward(
    config: &Config<'_>,
    kind: VitKind,
    (hidden, is_gated): (usize, bool),
) -> Result<FeedForwardSpec, ModelError> {
    let width = match kind.is_dinov2() {
        true => config.scaled_size("mlp_ratio", hidden)?,
        false => config.size("intermediate_size")?,
    };
    Ok(match is_gated {
        true => FeedForwardSpec {
            width: (width * 2 / 3).next_multiple_of(8),
            kind: FeedForwardKind::GateUp,
            activation: Activation::Silu,
            bias: true,
        },
        false => FeedForwardSpec {
            width,
            kind: FeedForwardKind::Plain,
            activation: config.activation("hidden_act", "gelu")?,
            bias: true,
        },
    })
}

fn positions(
    config: &Config<'_>,
    kind: VitKind,
    (grid, n_prefix): ([usize; 2], usize),
) -> Result<Positions, ModelError> {
    Ok(match kind {
        VitKind::Beit if !config.flag_or("use_absolute_position_embeddings", false)? => Positions::Absent,
        VitKind::Dinov2WithRegisters => Positions::Resampled(ResampledSpec {
            from: grid,
            to: grid,
            n_placed: 1,
            n_unplaced: n_prefix - 1,
            filter: GridFilter::AntialiasedBicubic,
            bare: true,
        }),
        _ => Positions::Parameter { n_rows: grid[0] * grid[1] + n_prefix },
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
