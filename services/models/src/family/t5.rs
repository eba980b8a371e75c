//! T5, its version 1.1 and Flan-T5, ByT5, mT5, UMT5: an encoder-decoder of text whose attention knows distances.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/t5/modeling_t5.py>
//! and `mt5`, `umt5` beside it. Quirks: scores are not scaled; the biases of the first layer are all layers', except
//! in UMT5; the first T5 has one table for tokens and head and scales the rows that the head reads, its later
//! versions neither; published decoders also hold biases for cross-attention that nothing reads.

use super::Config;
use super::config::activation;
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape, BucketRule, BucketSides};

/// The models bound no length. This does: a text so long takes an encoder's whole batch.
const MAX_TOKENS: usize = 8192;

/// Differences between the members that a configuration may leave out.
#[derive(Clone, Copy, Debug)]
pub(super) struct T5Variant {
    feed_forward: &'static str,
    tables: RelativeTables,
    scaling: HeadScaling,
}

/// Scaling of the rows that the head reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HeadScaling {
    /// If embeddings are tied; the flag is the default for configurations that do not state it.
    WhereTied(bool),
    /// None.
    Never,
}

pub(super) const T5: T5Variant =
    T5Variant { feed_forward: "relu", tables: RelativeTables::First, scaling: HeadScaling::WhereTied(true) };

// Saved configurations say that its embeddings are tied, and no published ones are.
pub(super) const MT5: T5Variant =
    T5Variant { feed_forward: "gated-gelu", tables: RelativeTables::First, scaling: HeadScaling::Never };

pub(super) const UMT5: T5Variant = T5Variant {
    feed_forward: "gated-gelu",
    tables: RelativeTables::Each,
    scaling: HeadScaling::WhereTied(false),
};

const BIASES: &str = "layer.0.SelfAttention.relative_attention_bias";

const ATTENTION: AttentionNames = AttentionNames {
    norm: "layer.0.layer_norm",
    qkv: QkvNames::Split(["layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"]),
    out: "layer.0.SelfAttention.o",
};

const CROSS: CrossNames = CrossNames {
    norm: "layer.1.layer_norm",
    qkv: ["layer.1.EncDecAttention.q", "layer.1.EncDecAttention.k", "layer.1.EncDecAttention.v"],
    out: "layer.1.EncDecAttention.o",
};

const fn encoder_names(inner: &'static [&'static str]) -> EncoderNames {
    EncoderNames {
        prefixes: &["encoder."],
        stem: &[],
        tokens: &["encoder.embed_tokens", "shared", "decoder.embed_tokens", "lm_head"],
        positions: BIASES,
        stack: StackNames {
            input_norm: "",
            layers: "block",
            attention: ATTENTION,
            cross: None,
            feed_forward_norm: "layer.1.layer_norm",
            feed_forward_inner: inner,
            feed_forward_outer: "layer.1.DenseReluDense.wo",
            final_norm: "final_layer_norm",
        },
    }
}

const fn decoder_names(inner: &'static [&'static str]) -> DecoderNames {
    DecoderNames {
        prefixes: &["decoder."],
        tokens: &["decoder.embed_tokens", "shared", "encoder.embed_tokens", "lm_head"],
        positions: BIASES,
        stack: StackNames {
            input_norm: "",
            layers: "block",
            attention: ATTENTION,
            cross: Some(CROSS),
            feed_forward_norm: "layer.2.layer_norm",
            feed_forward_inner: inner,
            feed_forward_outer: "layer.2.DenseReluDense.wo",
            final_norm: "final_layer_norm",
        },
        head: &["lm_head"],
        head_bias: None,
    }
}

static ENCODER: EncoderNames = encoder_names(&["layer.1.DenseReluDense.wi"]);
static GATED_ENCODER: EncoderNames =
    encoder_names(&["layer.1.DenseReluDense.wi_0", "layer.1.DenseReluDense.wi_1"]);
static DECODER: DecoderNames = decoder_names(&["layer.2.DenseReluDense.wi"]);
static GATED_DECODER: DecoderNames =
    decoder_names(&["layer.2.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_1"]);

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>, variant: T5Variant) -> Result<ModelSpec, ModelError> {
    let vocab = config.size("vocab_size")?;
    let hidden = config.size("d_model")?;
    let n_encoder_layers = config.size("num_layers")?;
    let n_decoder_layers = config.size_or("num_decoder_layers", n_encoder_layers)?;
    let [encoder_stack, decoder_stack] =
        [stack(config, variant, n_encoder_layers)?, stack(config, variant, n_decoder_layers)?];
    let gated = encoder_stack.feed_forward.kind == FeedForwardKind::Gated;
    let encoder = EncoderSpec {
        modality: Modality::Text,
        stem: StemSpec::Tokens { vocab, max_tokens: MAX_TOKENS, scale: 1.0 },
        positions: positions(config, variant, BucketSides::Both)?,
        stack: encoder_stack,
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: if gated { &GATED_ENCODER } else { &ENCODER },
    };
    let decoder = DecoderSpec {
        vocab,
        max_context: MAX_TOKENS,
        positions: positions(config, variant, BucketSides::Past)?,
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden: hidden,
            attention: decoder_stack.attention,
            layers: CrossLayers::Every,
            embedded_hidden: None,
        }),
        stack: decoder_stack,
        embedding_scale: 1.0,
        // Later versions say that embeddings are tied and store a head all the same, which then is used.
        head: HeadSpec { scale: head_scale(config, variant, hidden)?, ..HeadSpec::plain(true) },
        names: if gated { &GATED_DECODER } else { &DECODER },
    };
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

fn positions(config: &Config<'_>, variant: T5Variant, sides: BucketSides) -> Result<Positions, ModelError> {
    const BUCKETS: &str = "relative_attention_num_buckets";
    const DISTANCE: &str = "relative_attention_max_distance";
    const FARTHEST: usize = 1 << 16;
    let n_buckets = config.size_or(BUCKETS, 32)?;
    let max_distance = config.size_or(DISTANCE, 128)?;
    if n_buckets < 4 {
        return Err(config.unsupported(BUCKETS, n_buckets, "4 or more"));
    }
    if max_distance <= n_buckets / 2 || max_distance > FARTHEST {
        let expected = format!("more than {}, half of the buckets, and at most {FARTHEST}", n_buckets / 2);
        return Err(config.unsupported(DISTANCE, max_distance, expected));
    }
    let rule = BucketRule { max_distance, sides };
    Ok(Positions::Relative(RelativeSpec { n_buckets, rule, tables: variant.tables }))
}

fn stack(config: &Config<'_>, variant: T5Variant, n_layers: usize) -> Result<StackSpec, ModelError> {
    let n_heads = config.size("num_heads")?;
    let eps =
        if config.get("layer_norm_epsilon").is_some() { config.number("layer_norm_epsilon")? } else { 1e-6 };
    Ok(StackSpec {
        hidden: config.size("d_model")?,
        n_layers,
        attention: AttentionSpec {
            shape: AttentionShape {
                n_heads,
                n_kv_heads: n_heads,
                head_dim: config.size("d_kv")?,
                scale: 1.0,
                softcap: None,
            },
            bias: AttentionBias { q: false, k: false, v: false, out: false },
            head_norms: None,
        },
        feed_forward: feed_forward(config, variant)?,
        norm: NormSpec::rms(eps),
        input_norm: InputNorm::Absent,
        placement: NormPlacement::Pre,
        final_norm: true,
        layers: Vec::new(),
    })
}

fn feed_forward(config: &Config<'_>, variant: T5Variant) -> Result<FeedForwardSpec, ModelError> {
    const KEY: &str = "feed_forward_proj";
    let stated = if config.get(KEY).is_some() { config.text(KEY)? } else { variant.feed_forward };
    let (kind, name) = match stated.strip_prefix("gated-") {
        Some(name) => (FeedForwardKind::Gated, name),
        None => (FeedForwardKind::Plain, stated),
    };
    // The first gated models were trained with the tanh form under the plain name.
    let activation = match (kind, name) {
        (FeedForwardKind::Gated, "gelu") => Some(Activation::GeluTanh),
        _ => activation(name),
    };
    let expected = "an activation such as relu or gelu, or gated- and one";
    let activation = activation.ok_or_else(|| config.unsupported(KEY, stated, expected))?;
    Ok(FeedForwardSpec { width: config.size("d_ff")?, kind, activation, bias: false })
}

fn head_scale(config: &Config<'_>, variant: T5Variant, hidden: usize) -> Result<f32, ModelError> {
    let scaled = match variant.scaling {
        HeadScaling::Never => false,
        HeadScaling::WhereTied(default) => {
            // Newer files have a key of its own for it, since they call every head tied.
            let tied = config.flag_or("tie_word_embeddings", default)?;
            config.flag_or("scale_decoder_outputs", tied)?
        }
    };
    Ok(if scaled { 1.0 / (hidden as f32).sqrt() } else { 1.0 })
}
