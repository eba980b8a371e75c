//! Florence-2: a tower over an image's pixels, a projector, and BART over the image's rows and a prompt's.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/florence2/modeling_florence2.py>.
//! Quirks: the encoder reads a text with each image, a task's question; the text model's section is a BART
//! configuration with the norms and positions of one.
//!
//! A directory of the authors' release, whose text section says `florence2_language`, has other keys and names, a
//! projection that is a bare parameter, and a tokenizer without the tokens of tasks and places, which its processor adds
//! (<https://huggingface.co/microsoft/Florence-2-base/blob/main/processing_florence2.py>).

use super::Config;
use super::bart;
use super::fairseq::{DECODER_STACK, ENCODER_STACK};
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::AttentionShape;

/// Not in the configuration: the default of torch's `LayerNorm`.
const NORM_EPS: f32 = 1e-5;
/// Most stages of a tower.
const MAX_STAGES: usize = 8;

/// Keys and names of a release.
struct Layout {
    /// Widths of the tower's stages.
    widths: &'static str,
    encoder: &'static EncoderNames,
    decoder: &'static DecoderNames,
    projector: &'static CaptionedNames,
    tower: &'static DavitNames,
    /// True if the projection is a bare parameter, `[in, out]`.
    transposed: bool,
}

static CONVERTED: Layout = Layout {
    widths: "embed_dim",
    encoder: &encoder_names(&["model.language_model.encoder."], TOKENS),
    decoder: &DecoderNames {
        prefixes: &["model.language_model.decoder."],
        tokens: TOKENS,
        positions: "embed_positions",
        stack: DECODER_STACK,
        head: &["lm_head"],
        head_bias: None,
    },
    projector: &CaptionedNames {
        tower: &["model.vision_tower."],
        projector: &["model.multi_modal_projector."],
        row_positions: "image_position_embed.row_embeddings",
        column_positions: "image_position_embed.column_embeddings",
        projection: "image_projection",
        norm: "image_proj_norm",
    },
    tower: &DavitNames {
        convolutions: "convs",
        convolution: "conv",
        norm: "norm",
        blocks: "blocks",
        spatial: "spatial_block",
        channel: "channel_block",
        depthwise: ["conv1", "conv2"],
        window: attention_names("norm1", "window_attn.qkv", "window_attn.proj"),
        channels: attention_names("norm1", "channel_attn.qkv", "channel_attn.proj"),
        stack: stack_names(["norm2", "ffn.fc2"], &["ffn.fc1"]),
    },
    transposed: false,
};

static ORIGINAL: Layout = Layout {
    widths: "dim_embed",
    encoder: &encoder_names(&["language_model.model.encoder."], ORIGINAL_TOKENS),
    decoder: &DecoderNames {
        prefixes: &["language_model.model.decoder."],
        tokens: ORIGINAL_TOKENS,
        positions: "embed_positions",
        stack: DECODER_STACK,
        head: &["language_model.lm_head"],
        head_bias: Some("language_model.final_logits_bias"),
    },
    // What follows the tower has nothing but the beginning of its names in common.
    projector: &CaptionedNames {
        tower: &["vision_tower."],
        projector: &["image_"],
        row_positions: "pos_embed.row_embeddings",
        column_positions: "pos_embed.column_embeddings",
        projection: "projection",
        norm: "proj_norm",
    },
    tower: &DavitNames {
        convolutions: "convs",
        convolution: "proj",
        norm: "norm",
        blocks: "blocks",
        spatial: "spatial_block",
        channel: "channel_block",
        depthwise: ["conv1.fn.dw", "conv2.fn.dw"],
        window: attention_names("window_attn.norm", "window_attn.fn.qkv", "window_attn.fn.proj"),
        channels: attention_names("channel_attn.norm", "channel_attn.fn.qkv", "channel_attn.fn.proj"),
        stack: stack_names(["ffn.norm", "ffn.fn.net.fc2"], &["ffn.fn.net.fc1"]),
    },
    transposed: true,
};

const TOKENS: &[&str] = &[
    "model.language_model.shared",
    "model.language_model.encoder.embed_tokens",
    "model.language_model.decoder.embed_tokens",
    "lm_head",
];

const ORIGINAL_TOKENS: &[&str] = &[
    "language_model.model.shared",
    "language_model.model.encoder.embed_tokens",
    "language_model.model.decoder.embed_tokens",
    "language_model.lm_head",
];

const fn encoder_names(prefixes: &'static [&'static str], tokens: &'static [&'static str]) -> EncoderNames {
    EncoderNames { prefixes, stem: &[], tokens, positions: "embed_positions", stack: ENCODER_STACK }
}

const fn attention_names(norm: &'static str, qkv: &'static str, out: &'static str) -> AttentionNames {
    AttentionNames { norm, qkv: QkvNames::Fused(qkv), out }
}

/// Names of a feed-forward: its norm and outer layer, and the inner one.
const fn stack_names([norm, outer]: [&'static str; 2], inner: &'static [&'static str]) -> StackNames {
    StackNames {
        input_norm: "",
        layers: "",
        attention: attention_names("", "", ""),
        cross: None,
        feed_forward_norm: norm,
        feed_forward_inner: inner,
        feed_forward_outer: outer,
        final_norm: "",
    }
}

/// True for a directory of the authors' release.
fn is_original(config: &Config<'_>) -> bool {
    let text = config.get("text_config").and_then(|text| text.get("model_type"));
    text.and_then(serde_json::Value::as_str) == Some("florence2_language")
}

/// Tokens that the processor of the authors' release adds to its tokenizer, in that order; none for another.
pub(super) fn processor_tokens(config: &Config<'_>) -> Vec<String> {
    const BEFORE: [&str; 4] = ["<od>", "</od>", "<ocr>", "</ocr>"];
    const PLACES: usize = 1000;
    // One is misspelt there.
    const AFTER: [&str; 20] = [
        "<cap>",
        "</cap>",
        "<ncap>",
        "</ncap>",
        "<dcap>",
        "</dcap>",
        "<grounding>",
        "</grounding>",
        "<seg>",
        "</seg>",
        "<sep>",
        "<region_cap>",
        "</region_cap>",
        "<region_to_desciption>",
        "</region_to_desciption>",
        "<proposal>",
        "</proposal>",
        "<poly>",
        "</poly>",
        "<and>",
    ];
    if !is_original(config) {
        return Vec::new();
    }
    let owned = |token: &&str| (*token).to_owned();
    let places = (0..PLACES).map(|place| format!("<loc_{place}>"));
    BEFORE.iter().map(owned).chain(places).chain(AFTER.iter().map(owned)).collect()
}

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let vision = config.section("vision_config", "vision_config.")?;
    let model_type = text.text("model_type")?;
    let (layout, max_positions) = match model_type {
        "bart" => (&CONVERTED, vision.size("max_position_embeddings")?),
        "florence2_language" => (&ORIGINAL, original_positions(&vision)?),
        other => return Err(text.unsupported("model_type", other, "bart or florence2_language")),
    };
    let (mut encoder, mut decoder) = bart::stages(&text, bart::BART)?;
    let StemSpec::Tokens { vocab, max_tokens, scale } = encoder.stem else {
        return Err(text.unsupported("model_type", model_type, "a text model"));
    };
    let out = vision.size("projection_dim")?;
    if out != encoder.stack.hidden {
        let expected = format!("{}, d_model of text_config", encoder.stack.hidden);
        return Err(vision.unsupported("projection_dim", out, expected));
    }
    encoder.modality = Modality::Image;
    encoder.names = layout.encoder;
    encoder.stem = StemSpec::Captioned(CaptionedSpec {
        tower: tower(&vision, layout)?,
        max_positions,
        max_rows: max_tokens,
        vocab,
        scale,
        norm: NormSpec::layer(NORM_EPS),
        transposed: layout.transposed,
        names: layout.projector,
    });
    decoder.names = layout.decoder;
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn tower(config: &Config<'_>, layout: &Layout) -> Result<DavitSpec, ModelError> {
    let widths = config.sizes(layout.widths)?;
    if widths.is_empty() || widths.len() > MAX_STAGES || widths.contains(&0) {
        return Err(config.unsupported(layout.widths, format!("{widths:?}"), "1 to 8 widths"));
    }
    let list = |key: &str| -> Result<Vec<usize>, ModelError> {
        let list = config.sizes(key)?;
        match list.len() == widths.len() {
            true => Ok(list),
            false => Err(config.unsupported(key, format!("{list:?}"), format!("{} numbers", widths.len()))),
        }
    };
    let positive = |key: &str| -> Result<Vec<usize>, ModelError> {
        let list = list(key)?;
        match list.contains(&0) {
            false => Ok(list),
            true => Err(config.unsupported(key, format!("{list:?}"), "numbers from 1")),
        }
    };
    let [kernels, strides] = [positive("patch_size")?, positive("patch_stride")?];
    let [heads, groups] = [positive("num_heads")?, positive("num_groups")?];
    let [paddings, depths] = [list("patch_padding")?, list("depths")?];
    let norms_first = norms_first(config, widths.len())?;
    let mut stages = Vec::with_capacity(widths.len());
    let mut channels = config.size_or("in_channels", 3)?;
    if channels != 3 {
        return Err(config.unsupported("in_channels", channels, "3"));
    }
    for (i, &width) in widths.iter().enumerate() {
        config.share("num_groups", width, groups[i])?;
        stages.push(DavitStageSpec {
            channels,
            kernel: kernels[i],
            stride: strides[i],
            padding: paddings[i],
            norm_first: norms_first[i],
            n_groups: groups[i],
            stack: stack(config, [width, depths[i], heads[i]])?,
        });
        channels = width;
    }
    Ok(DavitSpec { stages, window: config.size("window_size")?, names: layout.tower })
}

/// Positions of the authors' release along an axis; refuses settings that its one model does not have.
fn original_positions(vision: &Config<'_>) -> Result<usize, ModelError> {
    const SOURCE: &str = "image_feature_source";
    let source = vision.required(SOURCE)?;
    if *source != serde_json::json!(["spatial_avg_pool", "temporal_avg_pool"]) {
        return Err(vision.unsupported(
            SOURCE,
            source,
            "spatial_avg_pool and temporal_avg_pool, in that order",
        ));
    }
    let kinds = [("visual_temporal_embedding", "COSINE"), ("image_pos_embed", "learned_abs_2d")];
    for (key, expected) in kinds {
        let kind = vision.required(key)?.get("type").and_then(serde_json::Value::as_str).unwrap_or_default();
        if kind != expected {
            return Err(vision.unsupported(key, vision.required(key)?, format!("type {expected}")));
        }
    }
    vision.section("image_pos_embed", "vision_config.image_pos_embed.")?.size("max_pos_embeddings")
}

fn norms_first(config: &Config<'_>, n_stages: usize) -> Result<Vec<bool>, ModelError> {
    const KEY: &str = "patch_prenorm";
    let expected = format!("{n_stages} truth values");
    let Some(value) = config.get(KEY) else { return Err(config.unsupported(KEY, "missing", expected)) };
    let list: Option<Vec<bool>> =
        value.as_array().and_then(|list| list.iter().map(serde_json::Value::as_bool).collect());
    list.filter(|list| list.len() == n_stages).ok_or_else(|| config.unsupported(KEY, value, expected))
}

/// The layers of a stage, with the heads of their windows.
fn stack(config: &Config<'_>, [hidden, n_layers, n_heads]: [usize; 3]) -> Result<StackSpec, ModelError> {
    let head_dim = config.share("num_heads", hidden, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let qkv = config.flag_or("qkv_bias", true)?;
    Ok(StackSpec {
        hidden,
        n_layers,
        attention: AttentionSpec {
            shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
            bias: AttentionBias { q: qkv, k: qkv, v: qkv, out: true },
            head_norms: None,
        },
        feed_forward: FeedForwardSpec {
            width: match config.get("mlp_ratio") {
                Some(_) => config.scaled_size("mlp_ratio", hidden)?,
                None => 4 * hidden,
            },
            kind: FeedForwardKind::Plain,
            activation: config.activation("activation_function", "gelu")?,
            bias: true,
        },
        norm: NormSpec::layer(NORM_EPS),
        input_norm: InputNorm::Absent,
        placement: NormPlacement::Pre,
        final_norm: false,
        layers: Vec::new(),
    })
}
