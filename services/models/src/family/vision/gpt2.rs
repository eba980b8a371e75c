//! GPT-2 with cross-attention, as part of a model that has an image encoder: ViT-GPT2.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/gpt2/modeling_gpt2.py>.
//! Quirks: its linear layers are stored inputs first; queries, keys and values of self-attention are one matrix, keys and
//! values of cross-attention another; the inner width is four times the outer where the configuration does not say.

use crate::error::ModelError;
use crate::family::Config;
use crate::family::joined::{self, TextDecoder};
use crate::spec::*;
use triptych_kernels::ops::AttentionShape;

static NAMES: DecoderNames = DecoderNames {
    prefixes: &["decoder.transformer."],
    tokens: &["decoder.transformer.wte"],
    positions: "wpe",
    stack: StackNames {
        input_norm: "",
        layers: "h",
        attention: AttentionNames {
            norm: "ln_1",
            qkv: QkvNames::FusedInputsFirst("attn.c_attn"),
            out: "attn.c_proj",
        },
        cross: Some(CrossNames {
            norm: "ln_cross_attn",
            qkv: ["crossattention.q_attn", "crossattention.c_attn", "crossattention.c_attn"],
            out: "crossattention.c_proj",
        }),
        feed_forward_norm: "ln_2",
        feed_forward_inner: &["mlp.c_fc"],
        feed_forward_outer: "mlp.c_proj",
        final_norm: "ln_f",
    },
    head: &["decoder.lm_head"],
    head_bias: None,
};

/// The decoder of a section of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn decoder(config: &Config<'_>) -> Result<TextDecoder, ModelError> {
    const CROSS: &str = "add_cross_attention";
    if !config.flag_or(CROSS, true)? {
        return Err(config.unsupported(CROSS, false, "true"));
    }
    // A scale for each layer, which the spec of a stack has no place for.
    config.must_be_off("scale_attn_by_inverse_layer_idx")?;
    let stack = stack(config)?;
    let max_context = config.size("n_positions")?;
    let spec = DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context,
        positions: Positions::Table { n_rows: max_context, offset: 0 },
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden: stack.hidden,
            attention: stack.attention,
            layers: CrossLayers::Every,
            embedded_hidden: None,
        }),
        embedding_scale: 1.0,
        head: HeadSpec::plain(config.flag_or("tie_word_embeddings", true)?),
        names: &NAMES,
        stack,
    };
    let reads = joined::reads_own(config, ("n_embd", spec.stack.hidden))?;
    Ok(TextDecoder { spec, reads })
}

fn stack(config: &Config<'_>) -> Result<StackSpec, ModelError> {
    let hidden = config.size("n_embd")?;
    let n_heads = config.size("n_head")?;
    let head_dim = config.share("n_head", hidden, n_heads)?;
    let scale = match config.flag_or("scale_attn_weights", true)? {
        true => 1.0 / (head_dim as f32).sqrt(),
        false => 1.0,
    };
    Ok(StackSpec {
        hidden,
        n_layers: config.size("n_layer")?,
        attention: AttentionSpec {
            shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
            bias: AttentionBias { q: true, k: true, v: true, out: true },
            head_norms: None,
        },
        feed_forward: FeedForwardSpec {
            width: config.size_or("n_inner", 4 * hidden)?,
            kind: FeedForwardKind::Plain,
            activation: config.activation("activation_function", "gelu_new")?,
            bias: true,
        },
        norm: NormSpec::layer(match config.get("layer_norm_epsilon") {
            Some(_) => config.number("layer_norm_epsilon")?,
            None => 1e-5,
        }),
        input_norm: InputNorm::Absent,
        placement: NormPlacement::Pre,
        final_norm: true,
        layers: Vec::new(),
    })
}
