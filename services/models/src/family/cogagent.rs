//! CogAgent: an image at two sizes, a visual expert in every layer, and narrow cross-attention.
//!
//! After the code beside the published weights, <https://huggingface.co/zai-org/cogagent-chat-hf> (`modeling_cogagent.py`,
//! `visual.py`, `cross_visual.py`), and <https://arxiv.org/abs/2312.08914>; no release of transformers has the model. Quirks:
//! the small image's tower (EVA2-CLIP-E) norms what a sub-layer adds, and its rows stand among the tokens between two learned
//! ones; that of the large one (EVA2-CLIP-L) never runs its last block, and its sizes are not in the published configuration
//! (`cross_vision_config` of vLLM's says them); both add a learned table to their patches. Rotary positions of a tower count as
//! on a grid of 16 a side. A visual expert reads all rows of the image but the last. The newer CogAgent-9B is GLM-4V, another
//! model, and is not served.

use super::Config;
use super::image_keys;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape, RopePairs};

const ARCHITECTURE: &str = "CogAgentForCausalLM";

/// Not in the configuration: the default of torch's norms, for the projector's.
const PROJECTOR_NORM_EPS: f32 = 1e-5;
/// Not in the configuration: that of the large image's tower.
const HIGH_NORM_EPS: f32 = 1e-6;
/// Patches on a side of an image.
const MAX_SIDE: usize = 1024;
/// Rows of an image of both towers, of which the published sizes make 6658.
const MAX_ROWS: usize = 1 << 20;
/// Patches on a side of the grid that the large image's tower was first trained with.
const TRAINED_SIDE: usize = 16;

static LOW: EncoderNames = EncoderNames {
    prefixes: &["model.vision."],
    stem: &["patch_embedding.proj", "patch_embedding.cls_embedding"],
    tokens: &[],
    positions: "patch_embedding.position_embedding",
    stack: StackNames {
        input_norm: "",
        layers: "transformer.layers",
        attention: AttentionNames {
            norm: "input_layernorm",
            qkv: QkvNames::Fused("attention.query_key_value"),
            out: "attention.dense",
        },
        cross: None,
        feed_forward_norm: "post_attention_layernorm",
        feed_forward_inner: &["mlp.fc1"],
        feed_forward_outer: "mlp.fc2",
        final_norm: "",
    },
};

static PROJECTOR: ProjectorNames =
    ProjectorNames { prefixes: None, norm: "", layers: &["linear_proj.linear_proj"] };

static HIGH: EncoderNames = EncoderNames {
    prefixes: &["model.cross_vision."],
    stem: &["vit.model.patch_embed.proj", "vit.model.cls_token"],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "vit.model.blocks",
        attention: AttentionNames {
            norm: "norm1",
            qkv: QkvNames::SplitBiases(
                ["attn.q_proj", "attn.k_proj", "attn.v_proj"],
                ["attn.q_bias", "attn.v_bias"],
            ),
            out: "attn.proj",
        },
        cross: None,
        feed_forward_norm: "norm2",
        feed_forward_inner: &["mlp.w1", "mlp.w2"],
        feed_forward_outer: "mlp.w3",
        final_norm: "",
    },
};

static NO_PROJECTION: ProjectorNames = ProjectorNames { prefixes: None, norm: "", layers: &[] };

/// Names of a layer's weights for text, or for images.
const fn layer(
    [qkv, out]: [&'static str; 2],
    inner: &'static [&'static str],
    outer: &'static str,
) -> StackNames {
    StackNames {
        input_norm: "",
        layers: "layers",
        attention: AttentionNames { norm: "input_layernorm", qkv: QkvNames::Fused(qkv), out },
        cross: Some(CrossNames {
            norm: "post_cross_attention_layernorm",
            qkv: ["cross_attn.query", "cross_attn.key_value", "cross_attn.key_value"],
            out: "cross_attn.dense",
        }),
        feed_forward_norm: "post_attention_layernorm",
        feed_forward_inner: inner,
        feed_forward_outer: outer,
        final_norm: "norm",
    }
}

static DECODER: DecoderNames = DecoderNames {
    prefixes: &["model."],
    tokens: &["model.embed_tokens"],
    positions: "",
    stack: layer(
        ["self_attn.language_expert_query_key_value", "self_attn.language_expert_dense"],
        &["mlp.language_mlp.gate_proj", "mlp.language_mlp.up_proj"],
        "mlp.language_mlp.down_proj",
    ),
    head: &["lm_head"],
    head_bias: None,
};

static VISUAL: StackNames = layer(
    ["self_attn.vision_expert_query_key_value", "self_attn.vision_expert_dense"],
    &["mlp.vision_mlp.gate_proj", "mlp.vision_mlp.up_proj"],
    "mlp.vision_mlp.down_proj",
);

const NO_BIAS: AttentionBias = AttentionBias { q: false, k: false, v: false, out: false };

/// True for a configuration that names its architecture and no `model_type`, which the published code has no name for.
pub(super) fn is_named_by(config: &Config<'_>) -> bool {
    let names = config.get("architectures").and_then(|names| names.as_array());
    config.get("model_type").is_none()
        && names.is_some_and(|names| names.iter().any(|name| name == ARCHITECTURE))
}

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let decoder = decoder(config)?;
    let mut encoder = low(config, &config.section("vision_config", "vision_config.")?)?;
    let high = high(config)?;
    let n_patches = |spec: &EncoderSpec| spec.stem.fixed_grid().map_or(0, |grid| grid[0] * grid[1]);
    let n_rows = n_patches(&encoder) + 2 + n_patches(&high);
    if n_rows > MAX_ROWS {
        let expected = format!("sizes of both images that make at most {MAX_ROWS} rows, not {n_rows}");
        return Err(config.unsupported("cross_image_size", config.size("cross_image_size")?, expected));
    }
    encoder.extras.tower = Some(TowerSpec { name: "low", further: vec![high] });
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn decoder(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    config.must_be_off("tie_word_embeddings")?;
    let hidden = config.size("hidden_size")?;
    let cross_hidden = config.size("cross_hidden_size")?;
    let inner = config.size("cross_compute_hidden_size")?;
    if inner != cross_hidden {
        let expected = format!("{cross_hidden}, cross_hidden_size");
        return Err(config.unsupported("cross_compute_hidden_size", inner, expected));
    }
    let n_heads = config.size("num_attention_heads")?;
    let n_kv_heads = config.size_or("num_key_value_heads", n_heads)?;
    if n_kv_heads != n_heads {
        let expected = format!("{n_heads}, num_attention_heads");
        return Err(config.unsupported("num_key_value_heads", n_kv_heads, expected));
    }
    let activation = match config.text("hidden_act")? {
        "silu" => Activation::Silu,
        other => return Err(config.unsupported("hidden_act", other, "silu")),
    };
    let n_layers = config.size("num_hidden_layers")?;
    let visual = LayerSpec { visual_expert: Some(&VISUAL), ..LayerSpec::default() };
    Ok(DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context: config.size("max_position_embeddings")?,
        positions: Positions::Rotary(RotarySpec::new(10_000.0, RotaryAxes::Single)),
        stack: StackSpec {
            hidden,
            n_layers,
            attention: attention(config, hidden, n_heads)?,
            feed_forward: FeedForwardSpec {
                width: config.size("intermediate_size")?,
                kind: FeedForwardKind::Gated,
                activation,
                bias: false,
            },
            norm: NormSpec::rms(config.number("rms_norm_eps")?),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: true,
            layers: vec![visual; n_layers],
        },
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden: cross_hidden,
            attention: attention(config, inner, n_heads)?,
            layers: CrossLayers::Every,
            embedded_hidden: Some(hidden),
        }),
        embedding_scale: 1.0,
        head: HeadSpec::plain(false),
        names: &DECODER,
    })
}

/// Attention of `width` in `n_heads`, without biases.
fn attention(config: &Config<'_>, width: usize, n_heads: usize) -> Result<AttentionSpec, ModelError> {
    let head_dim = config.share("num_attention_heads", width, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let shape = AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None };
    Ok(AttentionSpec { shape, bias: NO_BIAS, head_norms: None })
}

/// The tower of the small image; `config` is that of the decoder.
fn low(config: &Config<'_>, vision: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    let hidden = vision.size("hidden_size")?;
    let side = image_keys::patch_side(vision)?;
    let grid = grid(vision, ["image_size", "patch_size"], [vision.size("image_size")?, side])?;
    let n_rows = grid[0] * grid[1] + 1;
    if vision.size_or("num_positions", n_rows)? != n_rows {
        let actual = vision.size("num_positions")?;
        return Err(vision.unsupported(
            "num_positions",
            actual,
            format!("{n_rows}, a class row and all patches"),
        ));
    }
    let bias = AttentionBias { q: true, k: true, v: true, out: true };
    let out = config.size("hidden_size")?;
    let gated = GatedSpec {
        norm: NormSpec::layer(PROJECTOR_NORM_EPS),
        normed: Activation::Gelu,
        width: config.size("intermediate_size")?,
        activation: Activation::Silu,
        names: [
            "linear_proj.norm1",
            "linear_proj.gate_proj",
            "linear_proj.dense_h_to_4h",
            "linear_proj.dense_4h_to_h",
        ],
    };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::PrefixedPatches {
            patch: [image_keys::channels(vision, "in_channels")?, side, side],
            grid,
            bias: true,
            n_prefix: 1,
            n_registers: 0,
            flat_prefix: true,
        },
        positions: Positions::Table { n_rows, offset: 0 },
        stack: StackSpec {
            hidden,
            n_layers: vision.size("num_hidden_layers")?,
            attention: image_keys::attention(vision, hidden, "num_heads", bias)?,
            feed_forward: FeedForwardSpec {
                width: vision.size("intermediate_size")?,
                kind: FeedForwardKind::Plain,
                activation: vision.activation("hidden_act", "gelu")?,
                bias: true,
            },
            norm: NormSpec::layer(vision.number("layer_norm_eps")?),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::ResPost,
            final_norm: false,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras {
            learned_rows: vec![&["model.vision.boi"], &["model.vision.eoi"]],
            added: AddedTables { stem: None, patches: Some("pos_embed") },
            ..EncoderExtras::default()
        },
        projector: Some(ProjectorSpec { widths: vec![out], gated: Some(gated), ..patches_only(&PROJECTOR) }),
        names: &LOW,
    })
}

/// The tower of the large image.
fn high(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    let hidden = config.size("cross_hidden_size")?;
    let sizes = high_sizes(config)?;
    let grid = grid(config, ["cross_image_size", "patch size"], [sizes.pixels, sizes.patch])?;
    let bias = AttentionBias { q: true, k: false, v: true, out: true };
    let factor = grid[0] as f32 / TRAINED_SIDE as f32;
    let rotary = RotarySpec {
        pairs: RopePairs::Interleaved,
        scaling: RotaryScaling::Linear { factor },
        ..RotarySpec::new(10_000.0, RotaryAxes::Plane)
    };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::PrefixedPatches {
            patch: [3, sizes.patch, sizes.patch],
            grid,
            bias: true,
            n_prefix: 1,
            n_registers: 0,
            flat_prefix: false,
        },
        positions: Positions::Rotary(rotary),
        stack: StackSpec {
            hidden,
            n_layers: sizes.n_layers,
            attention: image_keys::attention_of(config, hidden, sizes.n_heads, bias)?,
            feed_forward: FeedForwardSpec {
                width: sizes.width,
                kind: FeedForwardKind::Gated,
                activation: Activation::Silu,
                bias: true,
            },
            norm: NormSpec::layer(HIGH_NORM_EPS),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: false,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras {
            sub_norms: Some(["attn.inner_attn_ln", "mlp.ffn_ln"]),
            added: AddedTables { stem: Some("vit.model.pos_embed"), patches: Some("pos_embed") },
            tower: Some(TowerSpec { name: "high", further: Vec::new() }),
            ..EncoderExtras::default()
        },
        projector: Some(patches_only(&NO_PROJECTION)),
        names: &HIGH,
    })
}

/// Sizes of the large image's tower.
struct HighSizes {
    pixels: usize,
    patch: usize,
    /// Those that run.
    n_layers: usize,
    n_heads: usize,
    width: usize,
}

/// The published sizes, but for what `cross_vision_config` says.
fn high_sizes(config: &Config<'_>) -> Result<HighSizes, ModelError> {
    const KEY: &str = "cross_vision_config";
    let hidden = config.size("cross_hidden_size")?;
    let published =
        serde_json::json!({ "layers": 24, "head_width": 64, "patch_size": 14, "mlp_ratio": 2.6667 });
    let empty = Config::new("config.json", &published);
    let own = match config.get(KEY) {
        Some(_) => config.section(KEY, "cross_vision_config.")?.with_defaults(&published),
        None => empty,
    };
    for (key, expected) in [
        ("attn_bias", true),
        ("intp_freq", true),
        ("naiveswiglu", true),
        ("postnorm", false),
        ("split_qkv", true),
        ("use_abs_pos_emb", true),
        ("use_rel_pos_bias", false),
        ("use_rope", true),
        ("use_shared_rel_pos_bias", false),
    ] {
        if own.flag_or(key, expected)? != expected {
            return Err(own.unsupported(key, !expected, expected.to_string()));
        }
    }
    if let Some(value) = own.get("ls_init_value") {
        return Err(own.unsupported("ls_init_value", value, "null"));
    }
    for (key, expected) in [("hidden_size", hidden), ("pt_hw_seq_len", TRAINED_SIDE)] {
        let actual = own.size_or(key, expected)?;
        if actual != expected {
            return Err(own.unsupported(key, actual, expected.to_string()));
        }
    }
    let head = own.size("head_width")?;
    let n_heads = own.share("head_width", hidden, head)?;
    if !head.is_multiple_of(4) {
        return Err(own.unsupported("head_width", head, "a multiple of 4, for positions down and across"));
    }
    let n_layers = match own.size("layers")? {
        1 => return Err(own.unsupported("layers", 1, "2 or more: the last is not run")),
        n => n - 1,
    };
    Ok(HighSizes {
        pixels: own.size_or("image_size", config.size("cross_image_size")?)?,
        patch: own.size("patch_size")?,
        n_layers,
        n_heads,
        width: own.scaled_size("mlp_ratio", hidden)?,
    })
}

/// Patches down and across a square image.
fn grid(
    config: &Config<'_>,
    [key, of]: [&str; 2],
    [pixels, side]: [usize; 2],
) -> Result<[usize; 2], ModelError> {
    match pixels / side {
        0 => Err(config.unsupported(key, pixels, format!("{side}, the {of}, or more"))),
        n @ 1..=MAX_SIDE => Ok([n; 2]),
        n => Err(config.unsupported(key, pixels, format!("at most {MAX_SIDE} patches on a side, not {n}"))),
    }
}

/// A projector that leaves rows before the patches out.
fn patches_only(names: &'static ProjectorNames) -> ProjectorSpec {
    ProjectorSpec {
        rows: ProjectedRows::Patches,
        side: 1,
        merge: RowMerge::Concatenate,
        norm: None,
        widths: Vec::new(),
        bias: false,
        transposed: false,
        activation: Activation::None,
        names,
        merging: None,
        gated: None,
    }
}
