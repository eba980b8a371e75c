//! Qwen2-VL, Qwen2.5-VL, Qwen3-VL: a vision transformer that merges patches, and a Qwen decoder with M-RoPE.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/models/qwen2_vl/modeling_qwen2_vl.py>
//! and `qwen2_5_vl/modeling_qwen2_5_vl.py` beside it, and
//! <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/qwen3_vl/modeling_qwen3_vl.py>. The first
//! two have one decoder; their towers differ in norm, feed-forward and attention windows, and in what the configuration calls
//! their widths. Qwen3-VL's decoder is that of Qwen3, with M-RoPE of interleaved frequencies; its tower has a learned grid of
//! positions beside the rotary ones, and gives the output of some layers as further levels of each row.

use super::Config;
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
const LEVELS_3: &str = "deepstack_merger_list";
const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

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

static TEXT: DecoderNames = DecoderNames {
    prefixes: &["model.", "model.language_model.", "language_model.model.", "language_model."],
    tokens: &[
        "model.embed_tokens",
        "model.language_model.embed_tokens",
        "language_model.model.embed_tokens",
        "language_model.embed_tokens",
    ],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "layers",
        attention: AttentionNames {
            norm: "input_layernorm",
            qkv: QkvNames::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
            out: "self_attn.o_proj",
        },
        cross: None,
        feed_forward_norm: "post_attention_layernorm",
        feed_forward_inner: &["mlp.gate_proj", "mlp.up_proj"],
        feed_forward_outer: "mlp.down_proj",
        final_norm: "norm",
    },
    head: &["lm_head", "language_model.lm_head"],
    head_bias: None,
};

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, version: QwenVlVersion) -> Result<ModelSpec, ModelError> {
    let vision = config.section("vision_config", "vision_config.")?;
    let encoder = match version {
        QwenVlVersion::Two => vision_2(&vision)?,
        QwenVlVersion::TwoAndHalf => vision_2_5(&vision)?,
        QwenVlVersion::Three => vision_3(&vision)?,
    };
    let levels = encoder.extras.levels.as_ref().map_or(0, |levels| levels.layers.len());
    let decoder = text(config, version, levels)?;
    let actual = encoder.output_width() / (1 + levels);
    if actual != decoder.stack.hidden {
        let expected = format!("{}, hidden_size", decoder.stack.hidden);
        return Err(config.unsupported("vision_config: output width", actual, expected));
    }
    Ok(ModelSpec { encoder, decoder })
}

fn text(config: &Config<'_>, version: QwenVlVersion, levels: usize) -> Result<DecoderSpec, ModelError> {
    let tied_head = config.flag_or("tie_word_embeddings", false)?;
    let config = &config.or_section(&["text_config"]);
    config.must_be_off("use_sliding_window")?;
    let hidden = config.size("hidden_size")?;
    let n_heads = config.size("num_attention_heads")?;
    let n_kv_heads = config.size_or("num_key_value_heads", n_heads)?;
    config.share("num_key_value_heads", n_heads, n_kv_heads)?;
    let is_3 = version == QwenVlVersion::Three;
    let head_dim = match config.get("head_dim").filter(|_| is_3) {
        Some(_) => config.size("head_dim")?,
        None => config.share("num_attention_heads", hidden, n_heads)?,
    };
    let norm = NormSpec::rms(config.number("rms_norm_eps")?);
    let has_bias = !is_3 || config.flag_or("attention_bias", false)?;
    let n_layers = config.size("num_hidden_layers")?;
    if levels > n_layers {
        let expected = format!("{levels} or more, for the levels of deepstack_visual_indexes");
        return Err(config.unsupported("num_hidden_layers", n_layers, expected));
    }
    let stack = StackSpec {
        hidden,
        n_layers,
        attention: AttentionSpec {
            shape: AttentionShape { n_heads, n_kv_heads, head_dim, scale: scale(head_dim) },
            bias: AttentionBias { q: has_bias, k: has_bias, v: has_bias, out: is_3 && has_bias },
            head_norms: is_3.then_some(HeadNormsSpec { norm, names: HEAD_NORMS }),
        },
        feed_forward: FeedForwardSpec {
            width: config.size("intermediate_size")?,
            kind: FeedForwardKind::Gated,
            activation: silu(config)?,
            bias: false,
        },
        norm,
        input_norm: InputNorm::Absent,
        placement: NormPlacement::Pre,
        final_norm: true,
    };
    Ok(DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context: config.size("max_position_embeddings")?,
        positions: Positions::Rotary(text_rotary(config, head_dim)?),
        stack,
        items: ItemsSpec::Embedded { levels },
        embedding_scale: 1.0,
        head: HeadSpec::plain(tied_head),
        names: &TEXT,
    })
}

fn text_rotary(config: &Config<'_>, head_dim: usize) -> Result<RotarySpec, ModelError> {
    // `rope_parameters` holds the base as well; before it, the base was beside `rope_scaling`.
    let rope = config.or_section(&["rope_parameters", "rope_scaling"]);
    let kind = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    if let Some(value) = rope.get(kind)
        && !matches!(value.as_str(), Some("mrope" | "default"))
    {
        return Err(rope.unsupported(kind, value, "mrope or default"));
    }
    let sections = rope.sizes("mrope_section")?;
    let axes = match rope.flag_or("mrope_interleaved", false)? {
        true => RotaryAxes::Interleaved,
        false => RotaryAxes::Sections,
    };
    match <[usize; 3]>::try_from(sections.as_slice()) {
        Ok(s) if s.iter().sum::<usize>() == head_dim / 2 => {
            Ok(RotarySpec::new(rope.number("rope_theta")?, axes(s)))
        }
        _ => {
            let expected = format!("three numbers that add up to {}", head_dim / 2);
            Err(rope.unsupported("mrope_section", format!("{sections:?}"), expected))
        }
    }
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

fn vision_3(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
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
    let layers = config.sizes("deepstack_visual_indexes")?;
    let ascending = layers.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascending || layers.iter().any(|layer| *layer >= spec.stack.n_layers) {
        let expected = format!("layers below {}, ascending", spec.stack.n_layers);
        return Err(config.unsupported("deepstack_visual_indexes", format!("{layers:?}"), expected));
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
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::Patches {
            patch: [channels, config.size_or("temporal_patch_size", 2)?, side, side],
            bias: false,
        },
        positions: Positions::Rotary(RotarySpec::new(VISION_ROPE_THETA, RotaryAxes::Plane)),
        stack: StackSpec {
            hidden,
            n_layers: config.size("depth")?,
            attention: AttentionSpec {
                shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale: scale(head_dim) },
                bias: AttentionBias { q: true, k: true, v: true, out: true },
                head_norms: None,
            },
            feed_forward,
            norm,
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: false,
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
        side,
        norm: Some(ProjectorNorm { norm, of_joined: false }),
        widths: vec![hidden * side * side, out],
        activation: Activation::Gelu,
        names: &MERGER,
    }
}

fn silu(config: &Config<'_>) -> Result<Activation, ModelError> {
    match config.text("hidden_act")? {
        "silu" => Ok(Activation::Silu),
        other => Err(config.unsupported("hidden_act", other, "silu")),
    }
}

fn scale(head_dim: usize) -> f32 {
    1.0 / (head_dim as f32).sqrt()
}
