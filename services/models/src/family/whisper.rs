//! Whisper: a convolutional stem and stored positions, pre-norm layers, a decoder with cross-attention.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.52.4/src/transformers/models/whisper/modeling_whisper.py>.
//! Quirks: keys have no bias; the head is the token table; the encoder's sinusoids are stored, and read from
//! the file, since fine-tuned checkpoints change them.

use super::Config;
use super::fairseq::{DECODER_STACK, ENCODER_STACK};
use crate::error::ModelError;
use crate::spec::*;
use triptych_core::Modality;
use triptych_kernels::ops::{Activation, AttentionShape};

/// Not in the configuration: the default of torch's `LayerNorm`.
const NORM_EPS: f32 = 1e-5;

static ENCODER: EncoderNames = tower_names(&["model.encoder.", "encoder."]);

static DECODER: DecoderNames = DecoderNames {
    prefixes: &["model.decoder.", "decoder."],
    tokens: &["model.decoder.embed_tokens", "decoder.embed_tokens"],
    positions: "embed_positions",
    stack: DECODER_STACK,
    head: &["proj_out"],
    head_bias: None,
};

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let hidden = config.size("d_model")?;
    let max_context = config.size("max_target_positions")?;
    let keys = TowerKeys {
        hidden: "d_model",
        stack: ["encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"],
    };
    let encoder = tower(config, keys, (MelWindows::Separate, &ENCODER))?;
    let keys = TowerKeys {
        hidden: "d_model",
        stack: ["decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"],
    };
    let stack_of_decoder = stack(config, keys)?;
    let decoder = DecoderSpec {
        vocab: config.size("vocab_size")?,
        max_context,
        positions: Positions::Table { n_rows: max_context, offset: 0 },
        items: ItemsSpec::CrossAttention(CrossSpec {
            encoder_hidden: hidden,
            attention: stack_of_decoder.attention,
            layers: CrossLayers::Every,
            embedded_hidden: None,
        }),
        stack: stack_of_decoder,
        embedding_scale: 1.0,
        head: HeadSpec::plain(config.flag_or("tie_word_embeddings", true)?),
        names: &DECODER,
    };
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// Keys of the sizes of a stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct TowerKeys {
    /// Width of a row.
    pub(super) hidden: &'static str,
    /// Layers, heads, and width of the feed-forward.
    pub(super) stack: [&'static str; 3],
}

/// The encoder of a section.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn tower(
    config: &Config<'_>,
    keys: TowerKeys,
    (windows, names): (MelWindows, &'static EncoderNames),
) -> Result<EncoderSpec, ModelError> {
    config.must_be_off("scale_embedding")?;
    let n_rows = config.size("max_source_positions")?;
    Ok(EncoderSpec {
        modality: Modality::Audio,
        stem: StemSpec::Mel { n_mels: config.size("num_mel_bins")?, n_frames: 2 * n_rows, windows },
        positions: Positions::Table { n_rows, offset: 0 },
        stack: stack(config, keys)?,
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names,
    })
}

/// Names of the tensors of an encoder under any of `prefixes`.
pub(super) const fn tower_names(prefixes: &'static [&'static str]) -> EncoderNames {
    EncoderNames {
        prefixes,
        stem: &["conv1", "conv2"],
        tokens: &[],
        positions: "embed_positions",
        stack: ENCODER_STACK,
    }
}

fn stack(
    config: &Config<'_>,
    TowerKeys { hidden, stack: [layers, heads, ffn] }: TowerKeys,
) -> Result<StackSpec, ModelError> {
    let hidden = config.size(hidden)?;
    let n_heads = config.size(heads)?;
    let head_dim = config.share(heads, hidden, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    let activation = match config.text("activation_function")? {
        "gelu" => Activation::Gelu,
        other => return Err(config.unsupported("activation_function", other, "gelu")),
    };
    let kind = FeedForwardKind::Plain;
    Ok(StackSpec {
        hidden,
        n_layers: config.size(layers)?,
        attention: AttentionSpec {
            shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
            bias: AttentionBias { q: true, k: false, v: true, out: true },
            head_norms: None,
        },
        feed_forward: FeedForwardSpec { width: config.size(ffn)?, kind, activation, bias: true },
        norm: NormSpec::layer(NORM_EPS),
        input_norm: InputNorm::Absent,
        placement: NormPlacement::Pre,
        final_norm: true,
        layers: Vec::new(),
    })
}
