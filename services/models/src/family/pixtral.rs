//! Pixtral, Mistral Small 3.1 and LightOnOCR: a tower that reads images at their own size, two linear layers, and a Mistral or
//! Qwen3 decoder.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/pixtral/modeling_pixtral.py>,
//! `mistral3/modeling_mistral3.py` and `lighton_ocr/modeling_lighton_ocr.py` beside it. Quirks: a tower without learned positions, with RMS norms whose epsilon no file
//! has, and two-dimensional rotations that share out the frequencies of a head; Mistral Small 3.1 joins squares of patches by a
//! linear layer of their channels, and so does LightOnOCR. Pixtral's configuration is that of LLaVA with another tower. Rows
//! stand line by line, each line with a token behind it; those of LightOnOCR stand one after the other.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::image_keys;
use super::towers;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;

/// `model_type` of the tower's section.
pub(super) const TOWER: &str = "pixtral";

/// Not in the configuration.
const NORM_EPS: f32 = 1e-5;

static VISION: EncoderNames = EncoderNames {
    prefixes: &["vision_tower.", "model.vision_tower.", "model.vision_encoder."],
    stem: &["patch_conv"],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "ln_pre",
        layers: "transformer.layers",
        attention: AttentionNames {
            norm: "attention_norm",
            qkv: QkvNames::Split(["attention.q_proj", "attention.k_proj", "attention.v_proj"]),
            out: "attention.o_proj",
        },
        cross: None,
        feed_forward_norm: "ffn_norm",
        feed_forward_inner: &["feed_forward.gate_proj", "feed_forward.up_proj"],
        feed_forward_outer: "feed_forward.down_proj",
        final_norm: "",
    },
};

static PROJECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["multi_modal_projector.", "model.multi_modal_projector.", "model.vision_projection."]),
    norm: "norm",
    layers: &["linear_1", "linear_2"],
};
const MERGING: &str = "patch_merger.merging_layer";

/// A model of the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PixtralKind {
    /// Pixtral.
    One,
    /// Mistral Small 3.1 and 3.2.
    Merged,
    /// LightOnOCR.
    LightOn,
}

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, kind: PixtralKind) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let tied_head = match kind {
        PixtralKind::One => config.flag_or("tie_word_embeddings", false)?,
        PixtralKind::Merged | PixtralKind::LightOn => config.flag_or("tie_word_embeddings", true)?,
    };
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    let decoder = causal::spec(&text, CausalKind::of_section(&text)?, place)?;
    let mut encoder = tower(&config.section("vision_config", "vision_config.")?)?;
    encoder.stack.n_layers = towers::n_layers(config, encoder.stack.n_layers, feature_layer(config, kind)?)?;
    let hidden = decoder.stack.hidden;
    let norm = NormSpec::rms(decoder.stack.norm.eps);
    let is_merged = kind != PixtralKind::One;
    encoder.projector = Some(ProjectorSpec {
        rows: ProjectedRows::All,
        side: if is_merged { config.size_or("spatial_merge_size", 2)? } else { 1 },
        norm: is_merged.then_some(ProjectorNorm { norm, of_joined: false }),
        widths: vec![hidden, hidden],
        merge: RowMerge::Concatenate,
        bias: config.flag_or("multimodal_projector_bias", !is_merged)?,
        transposed: false,
        activation: config.activation("projector_hidden_act", "gelu")?,
        names: &PROJECTOR,
        merging: is_merged.then_some(MergingSpec {
            width: encoder.stack.hidden,
            form: MergingForm::Matrix,
            name: MERGING,
        }),
        gated: None,
    });
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// The layer whose output is read, negative from the end.
fn feature_layer(config: &Config<'_>, kind: PixtralKind) -> Result<i64, ModelError> {
    const LAYER: &str = "vision_feature_layer";
    const STRATEGY: &str = "vision_feature_select_strategy";
    if kind == PixtralKind::LightOn {
        return Ok(-1);
    }
    if kind == PixtralKind::One {
        // The other, which is LLaVA's default, would leave out the first patch.
        match config.get(STRATEGY).map(|strategy| strategy.as_str()) {
            Some(Some("full")) => {}
            other => {
                let actual = other.flatten().unwrap_or("default");
                return Err(config.unsupported(STRATEGY, actual, "full, for a tower without a class row"));
            }
        }
    }
    let default = if kind == PixtralKind::One { -2 } else { -1 };
    let Some(value) = config.get(LAYER) else { return Ok(default) };
    value.as_i64().ok_or_else(|| config.unsupported(LAYER, value, "one layer"))
}

/// The tower with all of its layers.
fn tower(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    match config.text("model_type")? {
        TOWER => {}
        other => return Err(config.unsupported("model_type", other, TOWER)),
    }
    let hidden = config.size_or("hidden_size", 1024)?;
    let n_heads = config.size_or("num_attention_heads", 16)?;
    let bias = AttentionBias { q: false, k: false, v: false, out: false };
    let attention = image_keys::attention_of(config, hidden, n_heads, bias)?;
    let head_dim = attention.shape.head_dim;
    config.share("num_attention_heads (a head has a width in fours)", head_dim, 4)?;
    let own = config.size_or("head_dim", head_dim)?;
    if own != head_dim {
        return Err(config.unsupported("head_dim", own, format!("{head_dim}, hidden_size by heads")));
    }
    let side = if config.get("patch_size").is_some() { image_keys::patch_side(config)? } else { 16 };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::Patches {
            patch: [image_keys::channels(config, "num_channels")?, 1, side, side],
            bias: false,
        },
        positions: Positions::Rotary(rotary(config)?),
        stack: StackSpec {
            hidden,
            n_layers: config.size_or("num_hidden_layers", 24)?,
            attention,
            feed_forward: FeedForwardSpec {
                width: config.size_or("intermediate_size", 4096)?,
                kind: FeedForwardKind::Gated,
                activation: config.activation("hidden_act", "gelu")?,
                bias: false,
            },
            norm: NormSpec::rms(NORM_EPS),
            input_norm: InputNorm::AfterPositions,
            placement: NormPlacement::Pre,
            final_norm: false,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: &VISION,
    })
}

/// Rotation by line and column of a patch.
fn rotary(config: &Config<'_>) -> Result<RotarySpec, ModelError> {
    let rope = config.or_section(&["rope_parameters", "rope_scaling"]);
    match rope.get("rope_type").map(|kind| kind.as_str()) {
        None | Some(Some("default" | "axial")) => {}
        Some(other) => {
            return Err(rope.unsupported("rope_type", format!("{other:?}"), "default or axial"));
        }
    }
    let theta = if rope.get("rope_theta").is_some() { rope.number("rope_theta")? } else { 10_000.0 };
    Ok(RotarySpec::new(theta, RotaryAxes::AlternatingPlane))
}
