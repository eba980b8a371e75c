//! `encoder-decoder` of BERT and RoBERTa: each as an encoder of text and as a decoder with cross-attention, also that of an image
//! encoder ([`super::vision`]).
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/bert/modeling_bert.py> (`BertModel`,
//! `BertLMHeadModel`) and `roberta/modeling_roberta.py` beside it. Quirks: every token is of the first type; RoBERTa's positions begin
//! behind the padding token's id, and its padding token would have a position of its own, which is not written here; the head has a
//! layer and a norm of its own before the token table, and a bias that is
//! stored apart where the head is the token table. Poolers are left alone.

use super::joined::{self, TextDecoder};
use super::{Config, bart, image_keys};
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::Activation;

/// One of the architectures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BertKind {
    Bert,
    Roberta,
}

const TYPES: &str = "embeddings.token_type_embeddings";
const POSITIONS: &str = "embeddings.position_embeddings";

const CROSS: CrossNames = CrossNames {
    norm: "crossattention.output.LayerNorm",
    qkv: ["crossattention.self.query", "crossattention.self.key", "crossattention.self.value"],
    out: "crossattention.output.dense",
};

const fn stack_names(cross: Option<CrossNames>) -> StackNames {
    StackNames {
        input_norm: "embeddings.LayerNorm",
        layers: "encoder.layer",
        attention: AttentionNames {
            norm: "attention.output.LayerNorm",
            qkv: QkvNames::Split(["attention.self.query", "attention.self.key", "attention.self.value"]),
            out: "attention.output.dense",
        },
        cross,
        feed_forward_norm: "output.LayerNorm",
        feed_forward_inner: &["intermediate.dense"],
        feed_forward_outer: "output.dense",
        final_norm: "",
    }
}

static ENCODER: EncoderNames = EncoderNames {
    prefixes: &["encoder."],
    stem: &[],
    tokens: &["encoder.embeddings.word_embeddings"],
    positions: POSITIONS,
    stack: stack_names(None),
};

static BERT: DecoderNames = DecoderNames {
    prefixes: &["decoder.bert."],
    tokens: &["decoder.bert.embeddings.word_embeddings", "decoder.cls.predictions.decoder"],
    positions: POSITIONS,
    stack: stack_names(Some(CROSS)),
    head: &["decoder.cls.predictions.decoder"],
    head_bias: None,
};

static ROBERTA: DecoderNames = DecoderNames {
    prefixes: &["decoder.roberta."],
    tokens: &["decoder.roberta.embeddings.word_embeddings", "decoder.lm_head.decoder"],
    positions: POSITIONS,
    stack: stack_names(Some(CROSS)),
    head: &["decoder.lm_head.decoder"],
    head_bias: None,
};

impl BertKind {
    fn of(config: &Config<'_>) -> Result<Self, ModelError> {
        match config.text("model_type")? {
            "bert" => Ok(Self::Bert),
            "roberta" => Ok(Self::Roberta),
            other => Err(config.unsupported("model_type", other, "bert, roberta")),
        }
    }
}

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let encoder_config = config.section("encoder", "encoder.")?;
    let decoder_config = config.section("decoder", "decoder.")?;
    let encoder = encoder(&encoder_config)?;
    let decoder = decoder(&decoder_config, BertKind::of(&decoder_config)?)?;
    joined::spec(encoder, decoder, &decoder_config)
}

/// The encoder of a section of a configuration.
fn encoder(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    let kind = BertKind::of(config)?;
    config.must_be_off("is_decoder")?;
    let (positions, max_tokens) = positions(config, kind)?;
    Ok(EncoderSpec {
        modality: Modality::Text,
        stem: StemSpec::Tokens { vocab: config.size("vocab_size")?, max_tokens, scale: 1.0 },
        positions,
        stack: stack(config)?,
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: &ENCODER,
    })
}

/// The decoder of a section of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn decoder(config: &Config<'_>, kind: BertKind) -> Result<TextDecoder, ModelError> {
    for key in ["is_decoder", "add_cross_attention"] {
        if !config.flag_or(key, true)? {
            return Err(config.unsupported(key, false, "true"));
        }
    }
    let stack = stack(config)?;
    let (positions, max_context) = positions(config, kind)?;
    let reads = joined::reads_own(config, ("hidden_size", stack.hidden))?;
    let (names, transform) = match kind {
        BertKind::Bert => (
            &BERT,
            HeadTransformSpec {
                activation: stack.feed_forward.activation,
                norm: stack.norm,
                names: [
                    "decoder.cls.predictions.transform.dense",
                    "decoder.cls.predictions.transform.LayerNorm",
                ],
                biases: &["decoder.cls.predictions.decoder.bias", "decoder.cls.predictions.bias"],
            },
        ),
        BertKind::Roberta => (
            &ROBERTA,
            HeadTransformSpec {
                activation: Activation::Gelu,
                norm: stack.norm,
                names: ["decoder.lm_head.dense", "decoder.lm_head.layer_norm"],
                biases: &["decoder.lm_head.decoder.bias", "decoder.lm_head.bias"],
            },
        ),
    };
    let spec = DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context,
        positions,
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden: stack.hidden,
            attention: stack.attention,
            layers: CrossLayers::Every,
            embedded_hidden: None,
        }),
        embedding_scale: 1.0,
        head: HeadSpec {
            transform: Some(transform),
            ..HeadSpec::plain(config.flag_or("tie_word_embeddings", true)?)
        },
        names,
        stack,
    };
    Ok(TextDecoder { spec, reads })
}

/// Position encoding, and the tokens that have a position.
fn positions(config: &Config<'_>, kind: BertKind) -> Result<(Positions, usize), ModelError> {
    const KIND: &str = "position_embedding_type";
    const ROWS: &str = "max_position_embeddings";
    if config.get(KIND).is_some() && config.text(KIND)? != "absolute" {
        return Err(config.unsupported(KIND, config.text(KIND)?, "absolute"));
    }
    let all = config.size(ROWS)?;
    let offset = match kind {
        BertKind::Bert => 0,
        BertKind::Roberta => bart::padding_token(config)? + 1,
    };
    match all.checked_sub(offset) {
        None | Some(0) => Err(config.unsupported(ROWS, all, format!("more than {offset}, pad_token_id + 1"))),
        Some(n_rows) => {
            let n_types = config.size_or("type_vocab_size", 2)?;
            Ok((Positions::Typed { n_rows, offset, n_types, types: TYPES }, n_rows))
        }
    }
}

fn stack(config: &Config<'_>) -> Result<StackSpec, ModelError> {
    let hidden = config.size("hidden_size")?;
    let bias = AttentionBias { q: true, k: true, v: true, out: true };
    let eps = match config.get("layer_norm_eps") {
        Some(_) => config.number("layer_norm_eps")?,
        None => 1e-12,
    };
    Ok(StackSpec {
        hidden,
        n_layers: config.size("num_hidden_layers")?,
        attention: image_keys::attention(config, hidden, "num_attention_heads", bias)?,
        feed_forward: FeedForwardSpec {
            width: config.size("intermediate_size")?,
            kind: FeedForwardKind::Plain,
            activation: config.activation("hidden_act", "gelu")?,
            bias: true,
        },
        norm: NormSpec::layer(eps),
        input_norm: InputNorm::AfterPositions,
        placement: NormPlacement::Post,
        final_norm: false,
        layers: Vec::new(),
    })
}
