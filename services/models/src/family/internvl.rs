//! InternVL 2.5 to 3.5 in the layout of transformers: InternViT, rows of a square joined, and a decoder of the Llama line.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/internvl/modeling_internvl.py>. Quirks:
//! what layers add is scaled by a learned factor for each channel; the class row is left out; a norm of joined rows stands
//! before the projection; the largest tower has norms of whole queries and keys. Videos are not served.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::image_keys;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, NormKind};

static VISION: EncoderNames = EncoderNames {
    prefixes: &["vision_tower.", "model.vision_tower."],
    stem: &["embeddings.patch_embeddings.projection", "embeddings.cls_token"],
    tokens: &[],
    positions: "embeddings.position_embeddings",
    stack: StackNames {
        input_norm: "",
        layers: "encoder.layer",
        attention: AttentionNames {
            norm: "layernorm_before",
            qkv: QkvNames::Split(["attention.q_proj", "attention.k_proj", "attention.v_proj"]),
            out: "attention.projection_layer",
        },
        cross: None,
        feed_forward_norm: "layernorm_after",
        feed_forward_inner: &["mlp.fc1"],
        feed_forward_outer: "mlp.fc2",
        final_norm: "layernorm",
    },
};

static PROJECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["multi_modal_projector.", "model.multi_modal_projector."]),
    norm: "layer_norm",
    layers: &["linear_1", "linear_2"],
};

const SCALES: [&str; 2] = ["lambda_1", "lambda_2"];
const ROW_NORMS: [&str; 2] = ["attention.q_norm", "attention.k_norm"];

/// Not in the configuration.
const PROJECTOR_NORM_EPS: f32 = 1e-5;
const ROW_NORM_EPS: f32 = 1e-6;

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    // The class's default; the section's own wins.
    let tied_head = match text.get("tie_word_embeddings") {
        Some(_) => text.flag_or("tie_word_embeddings", true)?,
        None => config.flag_or("tie_word_embeddings", true)?,
    };
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    let decoder = causal::spec(&text, CausalKind::of_section(&text)?, place)?;
    let mut encoder = vision(&config.section("vision_config", "vision_config.")?)?;
    for (key, expected) in [("vision_feature_layer", "-1"), ("vision_feature_select_strategy", "default")] {
        if let Some(value) = config.get(key)
            && value.to_string().trim_matches('"') != expected
        {
            return Err(config.unsupported(key, value, expected));
        }
    }
    let side = joined_side(config, &encoder.stem)?;
    encoder.projector = Some(ProjectorSpec {
        activation: config.activation("projector_hidden_act", "gelu")?,
        ..projector(side, decoder.stack.hidden, &PROJECTOR)
    });
    encoder.extras.tiling = Some(TilingSpec::AspectRatio);
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// The projection of joined rows to rows of `hidden`.
pub(super) fn projector(side: usize, hidden: usize, names: &'static ProjectorNames) -> ProjectorSpec {
    ProjectorSpec {
        rows: ProjectedRows::Patches,
        side,
        merge: RowMerge::Concatenate,
        norm: Some(ProjectorNorm { norm: NormSpec::layer(PROJECTOR_NORM_EPS), of_joined: true }),
        widths: vec![hidden, hidden],
        bias: true,
        transposed: false,
        activation: Activation::Gelu,
        names,
        merging: None,
        gated: None,
    }
}

/// Side of the square of rows that become one: the inverse of a ratio.
///
/// # Errors
/// [`ModelError::Config`] for a ratio that is no inverse of a divisor.
pub(super) fn joined_side(config: &Config<'_>, stem: &StemSpec) -> Result<usize, ModelError> {
    const KEY: &str = "downsample_ratio";
    let ratio = if config.get(KEY).is_some() { config.number(KEY)? } else { 0.5 };
    let side = (1.0 / ratio).round() as usize;
    let StemSpec::PrefixedPatches { grid, .. } = stem else { return Ok(side) };
    let is_inverse = (ratio * side as f32 - 1.0).abs() < 1e-3 && side > 0;
    match is_inverse && grid.iter().all(|n| n.is_multiple_of(side)) {
        true => Ok(side),
        false => Err(config.unsupported(KEY, ratio, format!("1 by a divisor of {}", grid[0]))),
    }
}

fn vision(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    match config.text("model_type")? {
        "internvl_vision" => {}
        other => return Err(config.unsupported("model_type", other, "internvl_vision")),
    }
    let row_norms = config.flag_or("use_qk_norm", false)?;
    let row_norms = row_norms.then_some(HeadNormsSpec {
        norm: NormSpec::rms(ROW_NORM_EPS),
        part: NormedPart::Row,
        names: ROW_NORMS,
    });
    let positions = config.flag_or("use_absolute_position_embeddings", true)?;
    tower(
        config,
        Tower {
            has_bias: config.flag_or("attention_bias", false)?,
            row_norms,
            has_positions: positions,
            final_norm: !config.flag_or("use_mean_pooling", true)?,
            scales: SCALES,
            names: &VISION,
        },
    )
}

/// Differences of a tower between the two layouts.
pub(super) struct Tower {
    /// Queries, keys and values have a bias.
    pub(super) has_bias: bool,
    /// Norms of whole queries and keys.
    pub(super) row_norms: Option<HeadNormsSpec>,
    /// A learned position is added to each row.
    pub(super) has_positions: bool,
    /// A norm follows the last layer.
    pub(super) final_norm: bool,
    /// Names of the factors of channels.
    pub(super) scales: [&'static str; 2],
    /// Names of its tensors.
    pub(super) names: &'static EncoderNames,
}

/// InternViT by the keys that both layouts have.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn tower(config: &Config<'_>, of: Tower) -> Result<EncoderSpec, ModelError> {
    let hidden = config.size_or("hidden_size", 1024)?;
    let side = if config.get("patch_size").is_some() { image_keys::patch_side(config)? } else { 14 };
    let image = match config.get("image_size") {
        Some(_) => image_keys::pair(config, "image_size")?,
        None => [448; 2],
    };
    let grid = image.map(|pixels| pixels / side);
    if grid[0] != grid[1] || grid[0] == 0 {
        return Err(config.unsupported("image_size", format!("{image:?}"), "a square of one patch or more"));
    }
    let bias = AttentionBias { q: of.has_bias, k: of.has_bias, v: of.has_bias, out: true };
    let eps = if config.get("layer_norm_eps").is_some() { config.number("layer_norm_eps")? } else { 1e-6 };
    let kind = match config.get("norm_type").map(|kind| kind.as_str()) {
        None | Some(Some("layer_norm")) => NormKind::Layer,
        Some(Some("rms_norm")) => NormKind::Rms,
        Some(other) => {
            return Err(config.unsupported("norm_type", format!("{other:?}"), "layer_norm or rms_norm"));
        }
    };
    let n_heads = config.size_or("num_attention_heads", 16)?;
    let mut attention = image_keys::attention_of(config, hidden, n_heads, bias)?;
    attention.head_norms = of.row_norms;
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::PrefixedPatches {
            patch: [image_keys::channels(config, "num_channels")?, side, side],
            grid,
            bias: true,
            n_prefix: 1,
            n_registers: 0,
            flat_prefix: false,
        },
        positions: match of.has_positions {
            true => Positions::Parameter { n_rows: grid[0] * grid[1] + 1 },
            false => Positions::Absent,
        },
        stack: StackSpec {
            hidden,
            n_layers: config.size_or("num_hidden_layers", 24)?,
            attention,
            feed_forward: FeedForwardSpec {
                width: config.size_or("intermediate_size", 4096)?,
                kind: FeedForwardKind::Plain,
                activation: config.activation("hidden_act", "gelu")?,
                bias: true,
            },
            norm: if kind == NormKind::Layer { NormSpec::layer(eps) } else { NormSpec::rms(eps) },
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: of.final_norm,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras { scales: Some(of.scales), ..EncoderExtras::default() },
        projector: None,
        names: of.names,
    })
}
