//! BART and its relatives: mBART, M2M100 and NLLB, Pegasus, Marian, BlenderBot, BlenderBot-small. One encoder-decoder of text with
//! different values.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/bart/modeling_bart.py>
//! and `mbart`, `m2m_100`, `pegasus`, `marian`, `blenderbot`, `blenderbot_small` beside it. Quirks: the tables of learned
//! positions begin with two rows that nothing uses, except BlenderBot's; BlenderBot-small's decoder normalises
//! embeddings before it adds positions, its encoder after; the logits have a bias that is seldom other than zero
//! and often not stored; one token table may be stored under any of its users' names.

use super::Config;
use super::fairseq::{DECODER_STACK, ENCODER_STACK};
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::AttentionShape;

/// Not in the configuration: the default of torch's `LayerNorm`.
const NORM_EPS: f32 = 1e-5;

/// Differences between the relatives.
#[derive(Clone, Copy, Debug)]
pub(super) struct BartVariant {
    /// Placement of norms; a stack whose norms come first ends with one.
    placement: NormPlacement,
    /// Norms before the first layer of encoder and decoder.
    input_norms: [InputNorm; 2],
    positions: PositionStyle,
    /// True if token embeddings are scaled where the configuration does not say.
    scales: bool,
}

/// Position encoding of the rows.
#[derive(Clone, Copy, Debug)]
enum PositionStyle {
    /// A learned table whose first rows nothing uses.
    Learned { offset: usize },
    /// Computed.
    Sinusoids,
    /// Computed as fairseq does: from behind the padding token's id.
    AfterPadding,
}

pub(super) const BART: BartVariant = BartVariant {
    placement: NormPlacement::Post,
    input_norms: [InputNorm::AfterPositions; 2],
    positions: PositionStyle::Learned { offset: 2 },
    scales: false,
};

pub(super) const MBART: BartVariant = BartVariant { placement: NormPlacement::Pre, ..BART };

pub(super) const M2M100: BartVariant = BartVariant {
    placement: NormPlacement::Pre,
    input_norms: [InputNorm::Absent; 2],
    positions: PositionStyle::AfterPadding,
    scales: true,
};

pub(super) const PEGASUS: BartVariant = BartVariant {
    placement: NormPlacement::Pre,
    input_norms: [InputNorm::Absent; 2],
    positions: PositionStyle::Sinusoids,
    scales: false,
};

pub(super) const MARIAN: BartVariant = BartVariant { placement: NormPlacement::Post, ..PEGASUS };

pub(super) const BLENDERBOT: BartVariant = BartVariant {
    placement: NormPlacement::Pre,
    input_norms: [InputNorm::Absent; 2],
    positions: PositionStyle::Learned { offset: 0 },
    scales: false,
};

pub(super) const BLENDERBOT_SMALL: BartVariant = BartVariant {
    placement: NormPlacement::Post,
    input_norms: [InputNorm::AfterPositions, InputNorm::BeforePositions],
    ..BLENDERBOT
};

const OWN: [&[&str]; 2] = [
    &["model.encoder.embed_tokens", "encoder.embed_tokens"],
    &["model.decoder.embed_tokens", "decoder.embed_tokens", "lm_head"],
];

static ENCODER: EncoderNames = encoder_names(&[
    "model.encoder.embed_tokens",
    "encoder.embed_tokens",
    "model.shared",
    "shared",
    "model.decoder.embed_tokens",
    "decoder.embed_tokens",
    "lm_head",
]);

static DECODER: DecoderNames = decoder_names(&[
    "model.decoder.embed_tokens",
    "decoder.embed_tokens",
    "model.shared",
    "shared",
    "model.encoder.embed_tokens",
    "encoder.embed_tokens",
    "lm_head",
]);

/// Names where encoder and decoder have a vocabulary each, and one's table cannot stand in for the other's.
static OWN_ENCODER: EncoderNames = encoder_names(OWN[0]);
static OWN_DECODER: DecoderNames = decoder_names(OWN[1]);

const fn encoder_names(tokens: &'static [&'static str]) -> EncoderNames {
    EncoderNames {
        prefixes: &["model.encoder.", "encoder."],
        stem: &[],
        tokens,
        positions: "embed_positions",
        stack: ENCODER_STACK,
    }
}

const fn decoder_names(tokens: &'static [&'static str]) -> DecoderNames {
    DecoderNames {
        prefixes: &["model.decoder.", "decoder."],
        tokens,
        positions: "embed_positions",
        stack: DECODER_STACK,
        head: &["lm_head"],
        head_bias: Some("final_logits_bias"),
    }
}

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, variant: BartVariant) -> Result<ModelSpec, ModelError> {
    let (encoder, decoder) = stages(config, variant)?;
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// Its encoder and its decoder.
///
/// # Errors
/// As [`spec`].
pub(super) fn stages(
    config: &Config<'_>,
    variant: BartVariant,
) -> Result<(EncoderSpec, DecoderSpec), ModelError> {
    let shared = config.flag_or("share_encoder_decoder_embeddings", true)?;
    let max_tokens = config.size("max_position_embeddings")?;
    let vocab = config.size("vocab_size")?;
    let encoder = EncoderSpec {
        modality: Modality::Text,
        stem: StemSpec::Tokens { vocab, max_tokens, scale: embedding_scale(config, variant)? },
        positions: variant.positions(config, max_tokens)?,
        stack: stack(config, variant, Side::Encoder)?,
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: if shared { &ENCODER } else { &OWN_ENCODER },
    };
    let mut decoder = decoder(config, variant, encoder.stack.hidden)?;
    if !shared {
        decoder.vocab = config.size_or("decoder_vocab_size", vocab)?;
        decoder.names = &OWN_DECODER;
    }
    Ok((encoder, decoder))
}

/// The decoder of a configuration over encoder rows of `encoder_hidden`.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn decoder(
    config: &Config<'_>,
    variant: BartVariant,
    encoder_hidden: usize,
) -> Result<DecoderSpec, ModelError> {
    let max_context = config.size("max_position_embeddings")?;
    let stack = stack(config, variant, Side::Decoder)?;
    let embedding_scale = match stack.input_norm {
        // A norm right behind the table undoes its factor but for rounding; the reference leaves it out.
        InputNorm::BeforePositions => 1.0,
        InputNorm::Absent | InputNorm::AfterPositions => embedding_scale(config, variant)?,
    };
    Ok(DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context,
        positions: variant.positions(config, max_context)?,
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden,
            attention: stack.attention,
            layers: CrossLayers::Every,
            embedded_hidden: None,
        }),
        stack,
        embedding_scale,
        head: HeadSpec::plain(config.flag_or("tie_word_embeddings", true)?),
        names: &DECODER,
    })
}

impl BartVariant {
    fn positions(self, config: &Config<'_>, n_rows: usize) -> Result<Positions, ModelError> {
        Ok(match self.positions {
            PositionStyle::Learned { offset } => Positions::Table { n_rows, offset },
            PositionStyle::Sinusoids => Positions::Sinusoids { n_rows },
            PositionStyle::AfterPadding => {
                Positions::WideSinusoids { n_rows, offset: padding_token(config)? + 1 }
            }
        })
    }
}

#[derive(Clone, Copy)]
enum Side {
    Encoder,
    Decoder,
}

fn stack(config: &Config<'_>, variant: BartVariant, side: Side) -> Result<StackSpec, ModelError> {
    let ([layers, heads, ffn], input_norm) = match side {
        Side::Encoder => {
            (["encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"], variant.input_norms[0])
        }
        Side::Decoder => {
            (["decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"], variant.input_norms[1])
        }
    };
    let hidden = config.size("d_model")?;
    let n_heads = config.size(heads)?;
    let head_dim = config.share(heads, hidden, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    Ok(StackSpec {
        hidden,
        n_layers: config.size(layers)?,
        attention: AttentionSpec {
            shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
            bias: AttentionBias { q: true, k: true, v: true, out: true },
            head_norms: None,
        },
        feed_forward: FeedForwardSpec {
            width: config.size(ffn)?,
            kind: FeedForwardKind::Plain,
            activation: config.activation("activation_function", "gelu")?,
            bias: true,
        },
        norm: NormSpec::layer(NORM_EPS),
        input_norm,
        placement: variant.placement,
        final_norm: variant.placement == NormPlacement::Pre,
        layers: Vec::new(),
    })
}

/// The padding token, 1 where the configuration does not say.
///
/// # Errors
/// [`ModelError::Config`] for something else than a token.
pub(super) fn padding_token(config: &Config<'_>) -> Result<usize, ModelError> {
    let Some(value) = config.get("pad_token_id") else { return Ok(1) };
    let id = value.as_u64().filter(|id| *id < 1 << 20);
    id.map(|id| id as usize).ok_or_else(|| config.unsupported("pad_token_id", value, "a token id"))
}

fn embedding_scale(config: &Config<'_>, variant: BartVariant) -> Result<f32, ModelError> {
    let hidden = config.size("d_model")? as f32;
    Ok(if config.flag_or("scale_embedding", variant.scales)? { hidden.sqrt() } else { 1.0 })
}
