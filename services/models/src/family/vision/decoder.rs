//! The decoders of TrOCR and mBART, as part of a model that has an image encoder.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/trocr/modeling_trocr.py>
//! and `mbart/modeling_mbart.py` beside it. TrOCR's is BART's with two things to choose: it may leave out the
//! norm of its embeddings, and it may compute its positions, which then begin after the padding token's id.

use crate::error::ModelError;
use crate::family::fairseq::DECODER_STACK;
use crate::family::joined::{self, TextDecoder};
use crate::family::{Config, bart};
use crate::spec::*;

const fn names(head: &'static [&'static str]) -> DecoderNames {
    DecoderNames {
        prefixes: &["decoder.model.decoder."],
        tokens: &["decoder.model.decoder.embed_tokens"],
        positions: "embed_positions",
        stack: DECODER_STACK,
        head,
        head_bias: None,
    }
}

static TROCR: DecoderNames = names(&["decoder.output_projection"]);
static MBART: DecoderNames = names(&["decoder.lm_head"]);

/// mBART's decoder.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn mbart(config: &Config<'_>) -> Result<TextDecoder, ModelError> {
    let spec = bart::decoder(config, bart::MBART, config.size("d_model")?)?;
    Ok(TextDecoder { spec: DecoderSpec { names: &MBART, ..spec }, reads: None })
}

/// TrOCR's decoder.
///
/// # Errors
/// As [`mbart`].
pub(super) fn trocr(config: &Config<'_>) -> Result<TextDecoder, ModelError> {
    let reads = joined::reads(config)?;
    let width = reads.map_or_else(|| config.size("d_model"), Ok)?;
    let mut spec = bart::decoder(config, bart::BART, width)?;
    spec.names = &TROCR;
    if !config.flag_or("layernorm_embedding", true)? {
        spec.stack.input_norm = InputNorm::Absent;
    }
    if !config.flag_or("use_learned_position_embeddings", true)? {
        let offset = bart::padding_token(config)? + 1;
        spec.positions = Positions::WideSinusoids { n_rows: spec.max_context, offset };
    }
    Ok(TextDecoder { spec, reads })
}
