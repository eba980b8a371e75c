//! GLM-OCR: a tower with norms of heads that merges squares of patches by a convolution, and a GLM decoder with M-RoPE.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.1.0/src/transformers/models/glm_ocr/modeling_glm_ocr.py>. Quirks: the
//! decoder has a norm before and one behind each sub-layer, gate and up in one matrix, and rotates pairs of neighbours; behind
//! the tower come a norm with GELU and a gated feed-forward. The checkpoint's last layer, which predicts a token further, is not
//! read. Videos are not served.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::image_keys;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, RopePairs};

const HEAD_NORMS: [&str; 2] = ["attn.q_norm", "attn.k_norm"];
const SECOND_NORMS: [&str; 2] = ["post_self_attn_layernorm", "post_mlp_layernorm"];

static VISION: EncoderNames = EncoderNames {
    prefixes: &["model.visual.", "visual."],
    stem: &["patch_embed.proj"],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "blocks",
        attention: AttentionNames { norm: "norm1", qkv: QkvNames::Fused("attn.qkv"), out: "attn.proj" },
        cross: None,
        feed_forward_norm: "norm2",
        feed_forward_inner: &["mlp.gate_proj", "mlp.up_proj"],
        feed_forward_outer: "mlp.down_proj",
        final_norm: "post_layernorm",
    },
};

static MERGER: ProjectorNames = ProjectorNames { prefixes: None, norm: "", layers: &["merger.proj"] };
const DOWNSAMPLE: &str = "downsample";
const GATED: [&str; 4] =
    ["merger.post_projection_norm", "merger.gate_proj", "merger.up_proj", "merger.down_proj"];

static TEXT: DecoderNames = DecoderNames {
    prefixes: &["model.language_model.", "model."],
    tokens: &["model.language_model.embed_tokens", "model.embed_tokens"],
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
        feed_forward_inner: &["mlp.gate_up_proj"],
        feed_forward_outer: "mlp.down_proj",
        final_norm: "norm",
    },
    head: &["lm_head"],
    head_bias: None,
};

/// Not in the configuration: base of the tower's angles where it is silent, and epsilon of the merger's norm.
const VISION_ROPE_THETA: f32 = 10_000.0;
const MERGER_NORM_EPS: f32 = 1e-5;

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let section = config.section("text_config", "text_config.")?;
    let tied_head =
        config.flag_or("tie_word_embeddings", false)? || section.flag_or("tie_word_embeddings", false)?;
    let decoder = text(&section, tied_head)?;
    let vision = config.section("vision_config", "vision_config.")?;
    let encoder = tower(&vision)?;
    let actual = encoder.output_width();
    if actual != decoder.stack.hidden {
        let expected = format!("{}, hidden_size of text_config", decoder.stack.hidden);
        return Err(vision.unsupported("out_hidden_size", actual, expected));
    }
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn text(config: &Config<'_>, tied_head: bool) -> Result<DecoderSpec, ModelError> {
    // The defaults of the class are those of no published model.
    for key in [
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "rms_norm_eps",
        "vocab_size",
    ] {
        config.required(key)?;
    }
    config.must_be_off("attention_bias")?;
    let rope = config.or_section(&["rope_parameters", "rope_scaling"]);
    rope.required("mrope_section")?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    if let Some(part) = rope.get("partial_rotary_factor").filter(|part| part.as_f64() != Some(1.0)) {
        return Err(rope.unsupported("partial_rotary_factor", part, "1"));
    }
    let mut spec = causal::spec(config, CausalKind::Llama, place)?;
    if let Positions::Rotary(rotary) = &mut spec.positions {
        rotary.pairs = RopePairs::Interleaved;
    }
    spec.stack.placement = NormPlacement::Sandwich { names: SECOND_NORMS };
    spec.stack.feed_forward.kind = FeedForwardKind::GateUp;
    spec.names = &TEXT;
    Ok(spec)
}

fn tower(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    let hidden = config.size_or("hidden_size", 1024)?;
    let has_bias = config.flag_or("attention_bias", true)?;
    let bias = AttentionBias { q: has_bias, k: has_bias, v: has_bias, out: has_bias };
    let mut attention = image_keys::attention_of(config, hidden, config.size_or("num_heads", 16)?, bias)?;
    config.share("num_heads (a head has a width in fours)", attention.shape.head_dim, 4)?;
    let eps = if config.get("rms_norm_eps").is_some() { config.number("rms_norm_eps")? } else { 1e-5 };
    let norm = NormSpec::rms(eps);
    attention.head_norms = Some(HeadNormsSpec { norm, part: NormedPart::Head, names: HEAD_NORMS });
    let side = if config.get("patch_size").is_some() { image_keys::patch_side(config)? } else { 14 };
    let n_frames = match config.size_or("temporal_patch_size", 2)? {
        1 => return Err(config.unsupported("temporal_patch_size", 1, "2 or more")),
        n => n,
    };
    let activation = config.activation("hidden_act", "silu")?;
    let rope = config.or_section(&["rope_parameters"]);
    let theta = if rope.get("rope_theta").is_some() { rope.number("rope_theta")? } else { VISION_ROPE_THETA };
    let channels = image_keys::channels(config, "in_channels")?;
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::Patches { patch: [channels, n_frames, side, side], bias: true },
        positions: Positions::Rotary(RotarySpec::new(theta, RotaryAxes::Plane)),
        stack: StackSpec {
            hidden,
            n_layers: config.size_or("depth", 24)?,
            attention,
            feed_forward: FeedForwardSpec {
                width: config.size_or("intermediate_size", 4096)?,
                kind: FeedForwardKind::Gated,
                activation,
                bias: has_bias,
            },
            norm,
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: true,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras::default(),
        projector: Some(merger(config, channels, activation)?),
        names: &VISION,
    })
}

/// A convolution over squares, a linear layer, a norm with GELU, a gated feed-forward.
fn merger(config: &Config<'_>, channels: usize, activation: Activation) -> Result<ProjectorSpec, ModelError> {
    let out = config.size_or("out_hidden_size", 1536)?;
    Ok(ProjectorSpec {
        rows: ProjectedRows::All,
        side: config.size_or("spatial_merge_size", 2)?,
        norm: None,
        widths: vec![out],
        merge: RowMerge::Concatenate,
        bias: false,
        transposed: false,
        activation: Activation::None,
        names: &MERGER,
        merging: Some(MergingSpec { width: out, form: MergingForm::Convolution, name: DOWNSAMPLE }),
        gated: Some(GatedSpec {
            norm: NormSpec::layer(MERGER_NORM_EPS),
            normed: Activation::Gelu,
            width: out * channels,
            activation,
            names: GATED,
        }),
    })
}
