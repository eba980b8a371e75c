//! Moonshine: convolutions over raw samples, and an encoder and a decoder with partial rotary embedding.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/moonshine/modeling_moonshine.py>.
//! Quirks: norms without bias; rotary embedding of neighbouring values; the decoder's feed-forward stores what is
//! gated on top of the gate; head widths are padded for speed only, which changes nothing.

use super::Config;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape, RopePairs};

/// Not in the configuration: the default of torch's norms.
const NORM_EPS: f32 = 1e-5;

/// Not in the configuration: the convolutions of the model, and the length of a window. A decoder of 194 tokens writes
/// down about 30 s of speech.
pub(super) const WAVE: WaveSpec =
    WaveSpec { rate: 16_000, convs: [[127, 64], [7, 3], [3, 2]], norm_eps: NORM_EPS, window: 30 * 16_000 };

const ATTENTION: AttentionNames = AttentionNames {
    norm: "input_layernorm",
    qkv: QkvNames::Split(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    out: "self_attn.o_proj",
};

static ENCODER: EncoderNames = EncoderNames {
    prefixes: &["model.encoder.", "encoder."],
    stem: &["conv1", "groupnorm", "conv2", "conv3"],
    tokens: &[],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "layers",
        attention: ATTENTION,
        cross: None,
        feed_forward_norm: "post_attention_layernorm",
        feed_forward_inner: &["mlp.fc1"],
        feed_forward_outer: "mlp.fc2",
        final_norm: "layer_norm",
    },
};

static DECODER: DecoderNames = DecoderNames {
    prefixes: &["model.decoder.", "decoder."],
    tokens: &["model.decoder.embed_tokens", "decoder.embed_tokens"],
    positions: "",
    stack: StackNames {
        input_norm: "",
        layers: "layers",
        attention: ATTENTION,
        cross: Some(CrossNames {
            norm: "post_attention_layernorm",
            qkv: ["encoder_attn.q_proj", "encoder_attn.k_proj", "encoder_attn.v_proj"],
            out: "encoder_attn.o_proj",
        }),
        feed_forward_norm: "final_layernorm",
        feed_forward_inner: &["mlp.fc1"],
        feed_forward_outer: "mlp.fc2",
        final_norm: "norm",
    },
    head: &["proj_out"],
    head_bias: None,
};

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let encoder = stack(config, Side::Encoder)?;
    let decoder = stack(config, Side::Decoder)?;
    Ok(ModelSpec {
        encoder: Some(EncoderSpec {
            modality: Modality::Audio,
            stem: StemSpec::Wave(WAVE),
            positions: rotary(config, Side::Encoder, encoder.attention)?,
            stack: encoder,
            windows: None,
            extras: EncoderExtras::default(),
            projector: None,
            names: &ENCODER,
        }),
        decoder: DecoderSpec {
            vocab: config.size("vocab_size")?,
            max_context: config.size("max_position_embeddings")?,
            positions: rotary(config, Side::Decoder, decoder.attention)?,
            items: ItemsSpec::CrossAttention(CrossSpec {
                encoder_hidden: decoder.hidden,
                attention: decoder.attention,
                layers: CrossLayers::Every,
                embedded_hidden: None,
            }),
            stack: decoder,
            embedding_scale: 1.0,
            head: HeadSpec::plain(config.flag_or("tie_word_embeddings", true)?),
            names: &DECODER,
        },
    })
}

/// Half of the model.
#[derive(Clone, Copy)]
enum Side {
    Encoder,
    Decoder,
}

fn stack(config: &Config<'_>, side: Side) -> Result<StackSpec, ModelError> {
    let [layers, heads, kv_heads, act] = match side {
        Side::Encoder => [
            "encoder_num_hidden_layers",
            "encoder_num_attention_heads",
            "encoder_num_key_value_heads",
            "encoder_hidden_act",
        ],
        Side::Decoder => [
            "decoder_num_hidden_layers",
            "decoder_num_attention_heads",
            "decoder_num_key_value_heads",
            "decoder_hidden_act",
        ],
    };
    let (activation, kind) = match (side, config.text(act)?) {
        (Side::Encoder, "gelu") => (Activation::Gelu, FeedForwardKind::Plain),
        (Side::Decoder, "silu") => (Activation::Silu, FeedForwardKind::UpGate),
        (Side::Encoder, other) => return Err(config.unsupported(act, other, "gelu")),
        (Side::Decoder, other) => return Err(config.unsupported(act, other, "silu")),
    };
    let hidden = config.size("hidden_size")?;
    let n_heads = config.size(heads)?;
    // The reference takes as many query heads as there are key heads; fewer fit no published model.
    let n_kv_heads = config.size_or(kv_heads, n_heads)?;
    if n_kv_heads != n_heads {
        return Err(config.unsupported(kv_heads, n_kv_heads, format!("{n_heads}, as {heads}")));
    }
    let head_dim = match config.get("head_dim") {
        Some(_) => config.size("head_dim")?,
        None => config.share(heads, hidden, n_heads)?,
    };
    let bias = config.flag_or("attention_bias", false)?;
    Ok(StackSpec {
        hidden,
        n_layers: config.size(layers)?,
        attention: AttentionSpec {
            shape: AttentionShape {
                n_heads,
                n_kv_heads,
                head_dim,
                scale: 1.0 / (head_dim as f32).sqrt(),
                softcap: None,
            },
            bias: AttentionBias { q: bias, k: bias, v: bias, out: false },
            head_norms: None,
        },
        feed_forward: FeedForwardSpec {
            width: config.size("intermediate_size")?,
            kind,
            activation,
            bias: true,
        },
        norm: NormSpec { bias: false, ..NormSpec::layer(NORM_EPS) },
        input_norm: InputNorm::Absent,
        placement: NormPlacement::Pre,
        final_norm: true,
        layers: Vec::new(),
    })
}

/// Rotary positions. Their settings are at the top of published files, and in a section of later ones.
fn rotary(config: &Config<'_>, side: Side, attention: AttentionSpec) -> Result<Positions, ModelError> {
    const FACTOR: &str = "partial_rotary_factor";
    let rope = config.or_section(&["rope_parameters", "rope_scaling"]);
    if let Some(kind) = rope.get("rope_type").filter(|kind| kind.as_str() != Some("default")) {
        return Err(rope.unsupported("rope_type", kind, "default"));
    }
    let head_dim = attention.shape.head_dim;
    let factor = rope.get(FACTOR).map_or(Some(0.9), |f| f.as_f64());
    // As the reference computes it: in f64, truncated.
    let rotary_dim = factor.map(|f| (head_dim as f64 * f) as usize);
    let Some(rotary_dim) = rotary_dim.filter(|d| d.is_multiple_of(2) && (2..=head_dim).contains(d)) else {
        let found = rope.get(FACTOR).map_or_else(|| "0.9".to_owned(), ToString::to_string);
        return Err(rope.unsupported(FACTOR, found, format!("an even part of head width {head_dim}")));
    };
    let axes = match side {
        // Rows of an audio window are one row of a plane.
        Side::Encoder => RotaryAxes::Sections([0, 0, rotary_dim / 2]),
        Side::Decoder => RotaryAxes::Single,
    };
    Ok(Positions::Rotary(RotarySpec {
        rotary_dim: Some(rotary_dim),
        pairs: RopePairs::Interleaved,
        ..RotarySpec::new(rope.number("rope_theta")?, axes)
    }))
}
