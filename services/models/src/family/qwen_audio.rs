//! Qwen2-Audio: Whisper's encoder, rows averaged in pairs, a linear layer, and a Qwen2 decoder.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/qwen2_audio/modeling_qwen2_audio.py>.
//! Quirks: silence behind the audio is not attended to; pairs of rows are averaged before the encoder's last norm, and a row
//! without a second is left out; the decoder's rows are those of the audio alone. Audio longer than the window is refused,
//! where transformers cuts it off.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::whisper::{self, TowerKeys, tower_names};
use crate::error::ModelError;
use crate::spec::*;
use triptych_kernels::ops::Activation;

/// In models with a Whisper encoder and a projector.
static TOWER: EncoderNames = tower_names(&["audio_tower.", "model.audio_tower."]);

static PROJECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["multi_modal_projector.", "model.multi_modal_projector."]),
    norm: "",
    layers: &["linear"],
};

/// Rows that are averaged.
const POOLED: usize = 2;

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let tied_head =
        config.flag_or("tie_word_embeddings", false)? || text.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    let decoder = causal::spec(&text, CausalKind::of_section(&text)?, place)?;
    let audio = config.section("audio_config", "audio_config.")?;
    let keys = TowerKeys {
        hidden: "d_model",
        stack: ["encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"],
    };
    let mut encoder = whisper::tower(&audio, keys, (MelWindows::Masked, &TOWER))?;
    encoder.extras.pooled = Some(POOLED);
    encoder.projector = Some(ProjectorSpec {
        rows: ProjectedRows::Line,
        side: 1,
        merge: RowMerge::Concatenate,
        norm: None,
        widths: vec![decoder.stack.hidden],
        bias: true,
        transposed: false,
        activation: Activation::None,
        merging: None,
        gated: None,
        names: &PROJECTOR,
    });
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}
