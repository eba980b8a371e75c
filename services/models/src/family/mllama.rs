//! Llama 3.2 Vision: an encoder of tiles in two stacks, and a Llama 3 decoder with layers that cross-attend instead.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/mllama/modeling_mllama.py>.
//! Quirks: the token table has eight rows more than the head, one of them the image's; gates are stored as what `tanh`
//! is taken of.
//!
//! **A deliberate difference from transformers.** A token before the image takes nothing from it, as in the published code
//! (<https://github.com/meta-llama/llama-models/blob/v0.1.0/models/llama3/reference_impl/multimodal/model.py>), which masks
//! what such a token gets from its cross-attention. transformers lets it attend to all tiles, those that the image does not
//! have included, and masks its feed-forward only; its states then depend on the image, so a prefix could not be
//! shared between images. A prompt that starts with the image is the same either way. Golden files are made with the
//! published mask (`blind_before_the_image` of `tests/golden/mllama.py`).

use super::Config;
use super::causal;
use crate::error::ModelError;
use crate::prompt::N_INPUT_ONLY;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape};

/// Not in the configuration: the default of torch's norms, for those around the first stack.
const TILE_NORM_EPS: f32 = 1e-5;

const QKV: QkvNames = QkvNames::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);

static VISION: EncoderNames = EncoderNames {
    prefixes: &["vision_model.", "model.vision_model."],
    stem: &["patch_embedding"],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "transformer.layers",
        attention: AttentionNames { norm: "input_layernorm", qkv: QKV, out: "self_attn.o_proj" },
        cross: None,
        feed_forward_norm: "post_attention_layernorm",
        feed_forward_inner: &["mlp.fc1"],
        feed_forward_outer: "mlp.fc2",
        final_norm: "",
    },
};

static TILES: TilesNames = TilesNames {
    class: "class_embedding",
    positions: "gated_positional_embedding.embedding",
    position_gate: "gated_positional_embedding.gate",
    tile_positions: "gated_positional_embedding.tile_embedding",
    tiles: [
        "pre_tile_positional_embedding.embedding.weight",
        "post_tile_positional_embedding.embedding.weight",
    ],
    tile_gates: ["pre_tile_positional_embedding.gate", "post_tile_positional_embedding.gate"],
    norms: ["layernorm_pre", "layernorm_post"],
    global_layers: "global_transformer.layers",
    global_gates: ["gate_attn", "gate_ffn"],
    projection: &["multi_modal_projector", "model.multi_modal_projector"],
};

static TEXT: DecoderNames = DecoderNames {
    prefixes: &["language_model.model.", "model.language_model."],
    tokens: &["language_model.model.embed_tokens", "model.language_model.embed_tokens"],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "layers",
        attention: AttentionNames { norm: "input_layernorm", qkv: QKV, out: "self_attn.o_proj" },
        cross: Some(CrossNames {
            norm: "input_layernorm",
            qkv: ["cross_attn.q_proj", "cross_attn.k_proj", "cross_attn.v_proj"],
            out: "cross_attn.o_proj",
        }),
        feed_forward_norm: "post_attention_layernorm",
        feed_forward_inner: &["mlp.gate_proj", "mlp.up_proj"],
        feed_forward_outer: "mlp.down_proj",
        final_norm: "norm",
    },
    head: &["language_model.lm_head", "lm_head"],
    head_bias: None,
};

const CROSS_NORMS: [&str; 2] = ["cross_attn.q_norm", "cross_attn.k_norm"];

static INSTEAD: CrossInsteadNames =
    CrossInsteadNames { gates: ["cross_attn_attn_gate", "cross_attn_mlp_gate"] };

const NO_BIAS: AttentionBias = AttentionBias { q: false, k: false, v: false, out: false };

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let decoder = text(&config.section("text_config", "text_config.")?)?;
    let encoder = vision(&config.section("vision_config", "vision_config.")?, decoder.stack.hidden)?;
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn text(config: &Config<'_>) -> Result<DecoderSpec, ModelError> {
    config.must_be_off("tie_word_embeddings")?;
    let hidden = config.size("hidden_size")?;
    let n_layers = config.size("num_hidden_layers")?;
    let n_heads = config.size("num_attention_heads")?;
    let n_kv_heads = config.size_or("num_key_value_heads", n_heads)?;
    config.share("num_key_value_heads", n_heads, n_kv_heads)?;
    let head_dim = config.share("num_attention_heads", hidden, n_heads)?;
    let shape = AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        softcap: None,
    };
    let attention = AttentionSpec { shape, bias: NO_BIAS, head_norms: None };
    let activation = match config.text("hidden_act")? {
        "silu" => Activation::Silu,
        other => return Err(config.unsupported("hidden_act", other, "silu")),
    };
    let norm = NormSpec::rms(config.number("rms_norm_eps")?);
    let layers = config.sizes("cross_attention_layers")?;
    let ascending = layers.windows(2).all(|pair| pair[0] < pair[1]);
    if layers.is_empty() || !ascending || layers.iter().any(|layer| *layer >= n_layers) {
        let expected = format!("layers below {n_layers}, ascending, at least one");
        return Err(config.unsupported("cross_attention_layers", format!("{layers:?}"), expected));
    }
    Ok(DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context: config.size("max_position_embeddings")?,
        positions: Positions::Rotary(causal::rotary(config, head_dim)?),
        stack: StackSpec {
            hidden,
            n_layers,
            attention,
            feed_forward: FeedForwardSpec {
                width: config.size("intermediate_size")?,
                kind: FeedForwardKind::Gated,
                activation,
                bias: false,
            },
            norm,
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: true,
            layers: Vec::new(),
        },
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden: hidden,
            attention: AttentionSpec {
                head_norms: Some(HeadNormsSpec { norm, part: NormedPart::Head, names: CROSS_NORMS }),
                ..attention
            },
            layers: CrossLayers::Instead(CrossInstead { layers, names: &INSTEAD }),
            embedded_hidden: None,
        }),
        embedding_scale: 1.0,
        head: HeadSpec { input_only: N_INPUT_ONLY, ..HeadSpec::plain(false) },
        names: &TEXT,
    })
}

fn vision(config: &Config<'_>, out: usize) -> Result<EncoderSpec, ModelError> {
    let hidden = config.size("hidden_size")?;
    let n_heads = config.size("attention_heads")?;
    let head_dim = config.share("attention_heads", hidden, n_heads)?;
    let n_layers = config.size("num_hidden_layers")?;
    let patch = config.size("patch_size")?;
    let side = config.share("patch_size", config.size("image_size")?, patch)?;
    let taps = config.sizes("intermediate_layers_indices")?;
    if taps.iter().any(|layer| *layer >= n_layers) {
        let expected = format!("layers below {n_layers}");
        return Err(config.unsupported("intermediate_layers_indices", format!("{taps:?}"), expected));
    }
    let width = config.size("vision_output_dim")?;
    if width != hidden * (1 + taps.len()) {
        let expected = format!("{}: the last layer and {} others", hidden * (1 + taps.len()), taps.len());
        return Err(config.unsupported("vision_output_dim", width, expected));
    }
    let activation = match config.text("hidden_act")? {
        "gelu" => Activation::Gelu,
        other => return Err(config.unsupported("hidden_act", other, "gelu")),
    };
    let tiles = TilesSpec {
        patch: [config.size_or("num_channels", 3)?, patch, patch],
        side,
        max_tiles: config.size("max_num_tiles")?,
        norm_eps: TILE_NORM_EPS,
        n_global_layers: config.size("num_global_layers")?,
        taps,
        out,
        names: &TILES,
    };
    check_arrangements(config, &tiles)?;
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::Tiles(tiles),
        positions: Positions::Absent,
        stack: StackSpec {
            hidden,
            n_layers,
            attention: AttentionSpec {
                shape: AttentionShape {
                    n_heads,
                    n_kv_heads: n_heads,
                    head_dim,
                    scale: 1.0 / (head_dim as f32).sqrt(),
                    softcap: None,
                },
                bias: NO_BIAS,
                head_norms: None,
            },
            feed_forward: FeedForwardSpec {
                width: config.size("intermediate_size")?,
                kind: FeedForwardKind::Plain,
                activation,
                bias: true,
            },
            norm: NormSpec::layer(config.number("norm_eps")?),
            input_norm: InputNorm::Absent,
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

/// The processor numbers arrangements by the tiles that there may be, whatever the encoder's list says.
fn check_arrangements(config: &Config<'_>, tiles: &TilesSpec) -> Result<(), ModelError> {
    const KEY: &str = "supported_aspect_ratios";
    if tiles.max_tiles > 64 {
        return Err(config.unsupported("max_num_tiles", tiles.max_tiles, "up to 64"));
    }
    let Some(stated) = config.get(KEY) else { return Ok(()) };
    let all = serde_json::json!(tiles.arrangements());
    if *stated == all { Ok(()) } else { Err(config.unsupported(KEY, stated, all.to_string())) }
}
