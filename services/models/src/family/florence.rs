//! Florence-2: a tower over an image's pixels, a projector, and BART over the image's rows and a prompt's.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/florence2/modeling_florence2.py>.
//! Quirks: the encoder reads a text with each image, a task's question; the text model's section is a BART
//! configuration with the norms and positions of one; directories of the first release, whose vision section
//! says `davit`, have other keys and are refused.

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

const TOKENS: &[&str] = &[
    "model.language_model.shared",
    "model.language_model.encoder.embed_tokens",
    "model.language_model.decoder.embed_tokens",
    "lm_head",
];

static ENCODER: EncoderNames = EncoderNames {
    prefixes: &["model.language_model.encoder."],
    stem: &[],
    tokens: TOKENS,
    positions: "embed_positions",
    stack: ENCODER_STACK,
};

static DECODER: DecoderNames = DecoderNames {
    prefixes: &["model.language_model.decoder."],
    tokens: TOKENS,
    positions: "embed_positions",
    stack: DECODER_STACK,
    head: &["lm_head"],
    head_bias: None,
};

static PROJECTOR: CaptionedNames = CaptionedNames {
    tower: &["model.vision_tower."],
    projector: &["model.multi_modal_projector."],
    row_positions: "image_position_embed.row_embeddings",
    column_positions: "image_position_embed.column_embeddings",
    projection: "image_projection",
    norm: "image_proj_norm",
};

const WINDOW: AttentionNames =
    AttentionNames { norm: "norm1", qkv: QkvNames::Fused("window_attn.qkv"), out: "window_attn.proj" };

static PYRAMID: DavitNames = DavitNames {
    convolutions: "convs",
    convolution: "conv",
    norm: "norm",
    blocks: "blocks",
    spatial: "spatial_block",
    channel: "channel_block",
    depthwise: ["conv1", "conv2"],
    window: WINDOW,
    channels: AttentionNames {
        norm: "norm1",
        qkv: QkvNames::Fused("channel_attn.qkv"),
        out: "channel_attn.proj",
    },
    stack: StackNames {
        input_norm: "",
        layers: "",
        attention: WINDOW,
        cross: None,
        feed_forward_norm: "norm2",
        feed_forward_inner: &["ffn.fc1"],
        feed_forward_outer: "ffn.fc2",
        final_norm: "",
    },
};

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let vision = config.section("vision_config", "vision_config.")?;
    let model_type = text.text("model_type")?;
    if model_type != "bart" {
        return Err(text.unsupported("model_type", model_type, "bart"));
    }
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
    encoder.names = &ENCODER;
    encoder.stem = StemSpec::Captioned(CaptionedSpec {
        tower: tower(&vision)?,
        max_positions: vision.size("max_position_embeddings")?,
        max_rows: max_tokens,
        vocab,
        scale,
        norm: NormSpec::layer(NORM_EPS),
        names: &PROJECTOR,
    });
    decoder.names = &DECODER;
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn tower(config: &Config<'_>) -> Result<DavitSpec, ModelError> {
    let widths = config.sizes("embed_dim")?;
    if widths.is_empty() || widths.len() > MAX_STAGES || widths.contains(&0) {
        return Err(config.unsupported("embed_dim", format!("{widths:?}"), "1 to 8 widths"));
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
    Ok(DavitSpec { stages, window: config.size("window_size")?, names: &PYRAMID })
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
            width: config.scaled_size("mlp_ratio", hidden)?,
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
