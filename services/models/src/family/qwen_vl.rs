//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 with and without experts: a vision transformer that merges patches, and a Qwen decoder with M-RoPE.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/models/qwen2_vl/modeling_qwen2_vl.py>
//! and `qwen2_5_vl/modeling_qwen2_5_vl.py` beside it, and
//! <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/qwen3_vl/modeling_qwen3_vl.py>. The first
//! two have one decoder; their towers differ in norm, feed-forward and attention windows, and in what the configuration calls
//! their widths. Qwen3-VL's decoder is that of Qwen3, with M-RoPE of interleaved frequencies; its tower has a learned grid of
//! positions beside the rotary ones, and gives the output of some layers as further levels of each row. Qwen3.5 has the same tower
//! without further levels, and the decoder of `qwen3_5`.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace, silu};
use super::qwen3_5;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape};

/// Version of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QwenVlVersion {
    /// Qwen2-VL.
    Two,
    /// Qwen2.5-VL.
    TwoAndHalf,
    /// Qwen3-VL.
    Three,
    /// Qwen3-VL whose decoder has experts.
    ThreeMoe,
    /// Qwen3.5, dense.
    ThreeAndHalf,
    /// Qwen3.5 whose decoder has experts.
    ThreeAndHalfMoe,
}

/// Not in the configuration of the vision towers.
const VISION_NORM_EPS: f32 = 1e-6;
const VISION_ROPE_THETA: f32 = 10_000.0;

const VISION_PREFIXES: &[&str] = &["visual.", "model.visual."];

static MERGER: ProjectorNames =
    ProjectorNames { prefixes: None, norm: "merger.ln_q", layers: &["merger.mlp.0", "merger.mlp.2"] };
static MERGER_3: ProjectorNames = ProjectorNames {
    prefixes: None,
    norm: "merger.norm",
    layers: &["merger.linear_fc1", "merger.linear_fc2"],
};
/// Of each element of the list.
static LEVEL_3: ProjectorNames =
    ProjectorNames { prefixes: None, norm: "norm", layers: &["linear_fc1", "linear_fc2"] };
/// Key of the layers whose output makes further levels.
const LEVELS: &str = "deepstack_visual_indexes";
const LEVELS_3: &str = "deepstack_merger_list";

const fn vision_names(inner: &'static [&'static str], outer: &'static str) -> EncoderNames {
    EncoderNames {
        prefixes: VISION_PREFIXES,
        stem: &["patch_embed.proj"],
        tokens: &[],
        positions: "",
        stack: StackNames {
            input_norm: "",
            layers: "blocks",
            attention: AttentionNames { norm: "norm1", qkv: QkvNames::Fused("attn.qkv"), out: "attn.proj" },
            cross: None,
            feed_forward_norm: "norm2",
            feed_forward_inner: inner,
            feed_forward_outer: outer,
            final_norm: "",
        },
    }
}

static VISION_2: EncoderNames = vision_names(&["mlp.fc1"], "mlp.fc2");
static VISION_2_5: EncoderNames = vision_names(&["mlp.gate_proj", "mlp.up_proj"], "mlp.down_proj");
static VISION_3: EncoderNames = vision_names(&["mlp.linear_fc1"], "mlp.linear_fc2");

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, version: QwenVlVersion) -> Result<ModelSpec, ModelError> {
    let vision = config.section("vision_config", "vision_config.")?;
    let encoder = match version {
        QwenVlVersion::Two => vision_2(&vision)?,
        QwenVlVersion::TwoAndHalf => vision_2_5(&vision)?,
        QwenVlVersion::Three | QwenVlVersion::ThreeMoe => {
            let levels = vision.sizes(LEVELS)?;
            vision_3(&vision, levels)?
        }
        QwenVlVersion::ThreeAndHalf | QwenVlVersion::ThreeAndHalfMoe => {
            if let Some(levels) =
                vision.get(LEVELS).filter(|list| list.as_array().is_none_or(|l| !l.is_empty()))
            {
                return Err(vision.unsupported(LEVELS, levels, "none"));
            }
            vision_3(&vision, Vec::new())?
        }
    };
    let levels = encoder.extras.levels.as_ref().map_or(0, |levels| levels.layers.len());
    let decoder = text(config, version, levels)?;
    let actual = encoder.output_width() / (1 + levels);
    if actual != decoder.stack.hidden {
        let expected = format!("{}, hidden_size", decoder.stack.hidden);
        return Err(config.unsupported("vision_config: output width", actual, expected));
    }
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn text(config: &Config<'_>, version: QwenVlVersion, levels: usize) -> Result<DecoderSpec, ModelError> {
    let tied_head = config.flag_or("tie_word_embeddings", false)?;
    let config = &config.or_section(&["text_config"]);
    // A vision-language model without these is none of the family.
    for key in ["hidden_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "hidden_act"] {
        config.required(key)?;
    }
    config.or_section(&["rope_parameters", "rope_scaling"]).required("mrope_section")?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels, is_mutual: false }, tied_head };
    let kind = match version {
        QwenVlVersion::ThreeAndHalf => return qwen3_5::spec(config, CausalKind::Qwen35, place),
        QwenVlVersion::ThreeAndHalfMoe => return qwen3_5::spec(config, CausalKind::Qwen35Moe, place),
        QwenVlVersion::Two | QwenVlVersion::TwoAndHalf => CausalKind::Qwen2,
        QwenVlVersion::Three => CausalKind::Qwen3,
        QwenVlVersion::ThreeMoe => CausalKind::Qwen3VlMoe,
    };
    let spec = causal::spec(config, kind, place)?;
    if levels > spec.stack.n_layers {
        let expected = format!("{levels} or more, for the levels of deepstack_visual_indexes");
        return Err(config.unsupported("num_hidden_layers", spec.stack.n_layers, expected));
    }
    Ok(spec)
}

fn vision_2(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    let activation = match config.get("hidden_act").map(|a| a.as_str()) {
        None | Some(Some("quick_gelu")) => Activation::QuickGelu,
        Some(other) => return Err(config.unsupported("hidden_act", format!("{other:?}"), "quick_gelu")),
    };
    let hidden = config.size("embed_dim")?;
    // A ratio that is not whole is published as such by no model of the family.
    let width = hidden * config.size_or("mlp_ratio", 4)?;
    let feed_forward = FeedForwardSpec { width, kind: FeedForwardKind::Plain, activation, bias: true };
    vision(
        config,
        VisionTower {
            hidden,
            out: config.size("hidden_size")?,
            feed_forward,
            norm: NormSpec::layer(VISION_NORM_EPS),
            windows: None,
            names: &VISION_2,
        },
    )
}

fn vision_2_5(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    let feed_forward = FeedForwardSpec {
        width: config.size("intermediate_size")?,
        kind: FeedForwardKind::Gated,
        activation: silu(config)?,
        bias: true,
    };
    let group = config.size("patch_size")? * config.size_or("spatial_merge_size", 2)?;
    let window = config.size("window_size")?;
    if window < group {
        return Err(config.unsupported("window_size", window, format!("{group} pixels or more")));
    }
    let full_attention_layers = config.sizes("fullatt_block_indexes")?;
    vision(
        config,
        VisionTower {
            hidden: config.size("hidden_size")?,
            out: config.size("out_hidden_size")?,
            feed_forward,
            norm: NormSpec::rms(VISION_NORM_EPS),
            windows: Some(WindowSpec { side: window / group, full_attention_layers }),
            names: &VISION_2_5,
        },
    )
}

fn vision_3(config: &Config<'_>, layers: Vec<usize>) -> Result<EncoderSpec, ModelError> {
    let activation = match config.text("hidden_act")? {
        "gelu_pytorch_tanh" => Activation::GeluTanh,
        other => return Err(config.unsupported("hidden_act", other, "gelu_pytorch_tanh")),
    };
    let hidden = config.size("hidden_size")?;
    let n_positions = config.size("num_position_embeddings")?;
    let side = n_positions.isqrt();
    if side * side != n_positions {
        return Err(config.unsupported("num_position_embeddings", n_positions, "a square"));
    }
    let width = config.size("intermediate_size")?;
    let feed_forward = FeedForwardSpec { width, kind: FeedForwardKind::Plain, activation, bias: true };
    let norm = NormSpec::layer(VISION_NORM_EPS);
    let out = config.size("out_hidden_size")?;
    let tower = VisionTower { hidden, out, feed_forward, norm, windows: None, names: &VISION_3 };
    let mut spec = vision(config, tower)?;
    if let StemSpec::Patches { bias, .. } = &mut spec.stem {
        *bias = true;
    }
    let ascending = layers.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascending || layers.iter().any(|layer| *layer >= spec.stack.n_layers) {
        let expected = format!("layers below {}, ascending", spec.stack.n_layers);
        return Err(config.unsupported(LEVELS, format!("{layers:?}"), expected));
    }
    let projector = spec.projector.take().map(|projector| ProjectorSpec { names: &MERGER_3, ..projector });
    let level = projector.clone().map(|projector| ProjectorSpec {
        norm: Some(ProjectorNorm { norm, of_joined: true }),
        names: &LEVEL_3,
        ..projector
    });
    spec.projector = projector;
    spec.extras.interpolated = Some(InterpolatedSpec { side, name: "pos_embed" });
    spec.extras.levels = level.filter(|_| !layers.is_empty()).map(|projector| LevelsSpec {
        layers,
        projector,
        list: LEVELS_3,
    });
    Ok(spec)
}

/// Differences between the towers.
struct VisionTower {
    hidden: usize,
    out: usize,
    feed_forward: FeedForwardSpec,
    norm: NormSpec,
    windows: Option<WindowSpec>,
    names: &'static EncoderNames,
}

fn vision(config: &Config<'_>, tower: VisionTower) -> Result<EncoderSpec, ModelError> {
    let VisionTower { hidden, out, feed_forward, norm, windows, names } = tower;
    let n_heads = config.size("num_heads")?;
    let head_dim = config.share("num_heads", hidden, n_heads)?;
    config.share("num_heads (a head has a width in fours)", head_dim, 4)?;
    let side = config.size("patch_size")?;
    let channels = match config.get("in_channels") {
        Some(_) => config.size("in_channels")?,
        None => config.size_or("in_chans", 3)?,
    };
    let n_frames = match config.size_or("temporal_patch_size", 2)? {
        1 => return Err(config.unsupported("temporal_patch_size", 1, "2 or more")),
        n => n,
    };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::Patches { patch: [channels, n_frames, side, side], bias: false },
        positions: Positions::Rotary(RotarySpec::new(VISION_ROPE_THETA, RotaryAxes::Plane)),
        stack: StackSpec {
            hidden,
            n_layers: config.size("depth")?,
            attention: AttentionSpec {
                shape: AttentionShape {
                    n_heads,
                    n_kv_heads: n_heads,
                    head_dim,
                    scale: scale(head_dim),
                    softcap: None,
                },
                bias: AttentionBias { q: true, k: true, v: true, out: true },
                head_norms: None,
            },
            feed_forward,
            norm,
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: false,
            layers: Vec::new(),
        },
        windows,
        extras: EncoderExtras::default(),
        projector: Some(merger(hidden, config.size_or("spatial_merge_size", 2)?, norm, out)),
        names,
    })
}

/// Norm, join, two linear layers with GELU between.
fn merger(hidden: usize, side: usize, norm: NormSpec, out: usize) -> ProjectorSpec {
    ProjectorSpec {
        rows: ProjectedRows::All,
        side,
        merge: RowMerge::Concatenate,
        norm: Some(ProjectorNorm { norm, of_joined: false }),
        widths: vec![hidden * side * side, out],
        bias: true,
        transposed: false,
        activation: Activation::Gelu,
        names: &MERGER,
        merging: None,
        gated: None,
    }
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}
