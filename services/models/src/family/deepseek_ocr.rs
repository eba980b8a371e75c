//! DeepSeek-OCR-2: two towers that follow one another in one encode job, and a decoder of the Llama line with experts.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/deepseek_ocr2/modeling_deepseek_ocr2.py>.
//! The first tower is that of Segment Anything; the second a Qwen2 that reads its rows and as many learned queries, and whose rows
//! of queries are projected to the output. Quirks: rows of the image attend to each other, queries to those up to their own;
//! a part of an image has 0.75 of its pixels on a side, so the first tower's positions and offsets are resampled; a
//! learned row ends an image. Of the checkpoint the names of its authors are read, which `save_pretrained` writes too. The
//! decoder's attention is that of Llama: latent attention (MLA), which the configurations of its authors allow, is refused.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::image_keys;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::Activation;

static SAM: EncoderNames = EncoderNames {
    prefixes: &["model.sam_model."],
    stem: &["patch_embed.proj", "pos_embed", "neck.0", "neck.2", "neck.1", "neck.3", "net_2", "net_3"],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "blocks",
        attention: AttentionNames { norm: "norm1", qkv: QkvNames::Fused("attn.qkv"), out: "attn.proj" },
        cross: None,
        feed_forward_norm: "norm2",
        feed_forward_inner: &["mlp.lin1"],
        feed_forward_outer: "mlp.lin2",
        final_norm: "",
    },
};

const OFFSETS: [&str; 2] = ["attn.rel_pos_h", "attn.rel_pos_w"];
const QUERIES: [&[&str]; 2] = [&["model.qwen2_model.query_768"], &["model.qwen2_model.query_1024"]];

static ENCODER: EncoderNames = EncoderNames {
    prefixes: &["model.qwen2_model.model.model."],
    stem: &[],
    tokens: &[],
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
};

static PROJECTOR: ProjectorNames =
    ProjectorNames { prefixes: Some(&["model.projector.layers"]), norm: "", layers: &[""] };

/// As its authors spell it.
const END_OF_IMAGE: &[&str] = &["model.view_seperator"];

const EMBEDDED: ItemsSpec = ItemsSpec::Embedded { levels: 0, is_mutual: false };

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = section(config, ["text_config", "text_config."], "deepseek_ocr2_text")?;
    text.must_be_off("use_mla")?;
    for key in ["kv_lora_rank", "q_lora_rank"] {
        if let Some(rank) = text.get(key) {
            return Err(text.unsupported(key, rank, "null: attention without latent keys and values"));
        }
    }
    let method = if text.get("topk_method").is_some() { text.text("topk_method")? } else { "greedy" };
    if method != "greedy" {
        return Err(text.unsupported("topk_method", method, "greedy"));
    }
    let tied_head = config.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: EMBEDDED, tied_head };
    let decoder = causal::spec(&text, CausalKind::DeepseekOcr2, place)?;
    let vision = section(config, ["vision_config", "vision_config."], "deepseek_ocr2_vision")?;
    let encoder = encoder(&vision, decoder.stack.hidden)?;
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// A section of the kind `expected`, which it need not state.
fn section<'a>(
    config: &Config<'a>,
    [key, path]: [&'static str; 2],
    expected: &str,
) -> Result<Config<'a>, ModelError> {
    let section = config.section(key, path)?;
    match section.get("model_type") {
        Some(kind) if kind != expected => Err(section.unsupported("model_type", kind, expected)),
        _ => Ok(section),
    }
}

/// Both towers, and the projection to rows of `out`.
fn encoder(config: &Config<'_>, out: usize) -> Result<EncoderSpec, ModelError> {
    let sam = section(config, ["sam_config", "vision_config.sam_config."], "deepseek_ocr2_sam_vision_model")?;
    let own = section(config, ["encoder_config", "vision_config.encoder_config."], "deepseek_ocr2_encoder")?;
    own.must_be_off("use_sliding_window")?;
    let place = CausalPlace { items: EMBEDDED, tied_head: false };
    let second = causal::spec(&own, CausalKind::Qwen2, place)?;
    let stack = second.stack;
    let positions = match second.positions {
        // Rows of an image are one line of a plane.
        Positions::Rotary(rotary) => Positions::Rotary(RotarySpec {
            axes: RotaryAxes::Sections([0, 0, stack.attention.shape.head_dim / 2]),
            ..rotary
        }),
        other => other,
    };
    Ok(EncoderSpec {
        modality: Modality::Image,
        stem: StemSpec::Sam(Box::new(first(&sam, stack.hidden)?)),
        positions,
        stack,
        windows: None,
        extras: EncoderExtras {
            learned_rows: vec![END_OF_IMAGE],
            tiling: Some(TilingSpec::Views),
            ..EncoderExtras::default()
        },
        projector: Some(ProjectorSpec {
            rows: ProjectedRows::Queries,
            side: 1,
            merge: RowMerge::Concatenate,
            norm: None,
            widths: vec![out],
            bias: true,
            transposed: false,
            activation: Activation::None,
            names: &PROJECTOR,
            merging: None,
            gated: None,
        }),
        names: &ENCODER,
    })
}

/// The first tower, whose rows have the width `out` behind its convolutions.
fn first(config: &Config<'_>, out: usize) -> Result<SamSpec, ModelError> {
    for key in ["use_abs_pos", "use_rel_pos"] {
        if !config.flag_or(key, true)? {
            return Err(config.unsupported(key, false, "true"));
        }
    }
    let hidden = config.size_or("hidden_size", 768)?;
    let side = if config.get("patch_size").is_some() { image_keys::patch_side(config)? } else { 16 };
    let window = config.size_or("window_size", 14)?;
    if window < 2 {
        return Err(config.unsupported("window_size", window, "2 or more"));
    }
    let bias = config.flag_or("qkv_bias", true)?;
    let bias = AttentionBias { q: bias, k: bias, v: bias, out: true };
    let eps = if config.get("layer_norm_eps").is_some() { config.number("layer_norm_eps")? } else { 1e-6 };
    let downsampled = match config.get("downsample_channels") {
        Some(_) => config.sizes("downsample_channels")?,
        None => vec![512, 896],
    };
    let channels = match downsampled[..] {
        [inner, outer] if inner > 0 && outer == out => {
            [config.size_or("output_channels", 256)?, inner, outer]
        }
        _ => {
            let expected = format!("two sizes, the second encoder_config's hidden_size, {out}");
            return Err(config.unsupported("downsample_channels", format!("{downsampled:?}"), expected));
        }
    };
    let width = match config.get("mlp_dim") {
        Some(_) => config.size("mlp_dim")?,
        None if config.get("mlp_ratio").is_some() => config.scaled_size("mlp_ratio", hidden)?,
        None => 4 * hidden,
    };
    let global_layers = match config.get("global_attn_indexes") {
        Some(_) => config.sizes("global_attn_indexes")?,
        None => vec![2, 5, 8, 11],
    };
    Ok(SamSpec {
        patch: [image_keys::channels(config, "num_channels")?, side, side],
        sides: sides(config, side)?,
        window,
        global_layers,
        stack: StackSpec {
            hidden,
            n_layers: config.size_or("num_hidden_layers", 12)?,
            attention: image_keys::attention_of(
                config,
                hidden,
                config.size_or("num_attention_heads", 12)?,
                bias,
            )?,
            feed_forward: FeedForwardSpec {
                width,
                kind: FeedForwardKind::Plain,
                activation: config.activation("hidden_act", "gelu")?,
                bias: true,
            },
            norm: NormSpec::layer(eps),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: false,
            layers: Vec::new(),
        },
        channels,
        names: &SAM,
        offsets: OFFSETS,
        queries: QUERIES,
    })
}

/// Patches on a side of a part and of a whole image. The class has 144 queries for 768 pixels and 256 for 1024: one for each
/// row behind the convolutions.
fn sides(config: &Config<'_>, patch: usize) -> Result<[usize; 2], ModelError> {
    const KEY: &str = "image_size";
    let image = if config.get(KEY).is_some() { image_keys::pair(config, KEY)? } else { [1024; 2] };
    let whole = image[0] / patch;
    let is_cut = whole > 0 && whole.is_multiple_of(4) && image == [whole * patch; 2];
    match is_cut {
        true => Ok([whole / 4 * 3, whole]),
        false => {
            let expected = format!("a square whose side is a multiple of four patches of {patch} pixels");
            Err(config.unsupported(KEY, format!("{image:?}"), expected))
        }
    }
}
