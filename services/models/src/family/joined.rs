//! An encoder and a decoder that were models of their own, as one model.
//!
//! After `EncoderDecoderModel` of
//! <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/encoder_decoder/modeling_encoder_decoder.py> and
//! its like for images. Quirk: where the widths differ and the decoder does not say that it reads the encoder's, a linear layer stands
//! between.

use super::Config;
use crate::error::ModelError;
use crate::spec::*;
use triptych_kernels::ops::Activation;

/// Between encoder and decoder, where their widths differ.
static PROJECTION: ProjectorNames =
    ProjectorNames { prefixes: Some(&["enc_to_dec_proj."]), norm: "", layers: &[""] };

/// Key of the width of encoder rows.
const READS: &str = "cross_attention_hidden_size";

/// A decoder, and the width of encoder rows that its configuration names.
pub(super) struct TextDecoder {
    /// Reads rows of its own width, or of the one named.
    pub spec: DecoderSpec,
    /// `cross_attention_hidden_size`.
    pub reads: Option<usize>,
}

/// The width of encoder rows that a configuration names.
///
/// # Errors
/// [`ModelError::Config`] for something else than a size.
pub(super) fn reads(config: &Config<'_>) -> Result<Option<usize>, ModelError> {
    config.get(READS).map(|_| config.size(READS)).transpose()
}

/// The same of a decoder whose cross-attention reads no other width than its own, which is at `key`.
///
/// # Errors
/// [`ModelError::Config`] for another width.
pub(super) fn reads_own(
    config: &Config<'_>,
    (key, hidden): (&str, usize),
) -> Result<Option<usize>, ModelError> {
    match reads(config)? {
        Some(width) if width != hidden => Err(config.unsupported(READS, width, format!("{hidden}, {key}"))),
        reads => Ok(reads),
    }
}

/// Both as one model; `config` is the decoder's.
///
/// # Errors
/// [`ModelError::Config`] for a decoder that says that it reads another width than the encoder's.
pub(super) fn spec(
    mut encoder: EncoderSpec,
    TextDecoder { spec: decoder, reads }: TextDecoder,
    config: &Config<'_>,
) -> Result<ModelSpec, ModelError> {
    let from = encoder.output_width();
    let to = decoder.stack.hidden;
    match reads {
        Some(width) if width != from => {
            return Err(config.unsupported(READS, width, format!("{from}, the encoder's width")));
        }
        None if from != to => {
            encoder.projector = Some(ProjectorSpec {
                rows: ProjectedRows::All,
                side: 1,
                merge: RowMerge::Concatenate,
                norm: None,
                widths: vec![to],
                bias: true,
                transposed: false,
                activation: Activation::None,
                names: &PROJECTION,
                merging: None,
                gated: None,
            });
        }
        _ => {}
    }
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}
