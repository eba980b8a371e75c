//! Voxtral: Whisper's encoder over the windows of an audio, rows joined, two linear layers, and a Llama decoder.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/voxtral/modeling_voxtral.py>. Quirks: an
//! audio is filled up to whole windows, whose silence is read; their rows are one item's; the number of rows that are joined is
//! that of the feed-forward's width in the encoder's; the tokenizer is `tekken.json`, and conversations are laid out by it. The
//! realtime models, whose encoder is causal, are another family.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::whisper::{self, TowerKeys, tower_names};
use crate::error::ModelError;
use crate::spec::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

static TOWER: EncoderNames = tower_names(&["audio_tower.", "model.audio_tower."]);

static PROJECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["multi_modal_projector.", "model.multi_modal_projector."]),
    norm: "",
    layers: &["linear_1", "linear_2"],
};

/// Values where the decoder's section is silent, which are not those of Llama.
static TEXT_DEFAULTS: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "rope_theta": 100_000_000.0, "head_dim": 128,
    })
});

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    let text = config.section("text_config", "text_config.")?;
    let tied_head =
        config.flag_or("tie_word_embeddings", false)? || text.flag_or("tie_word_embeddings", false)?;
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    let kind = CausalKind::of_section(&text)?;
    let decoder = causal::spec(&text.with_defaults(&TEXT_DEFAULTS), kind, place)?;
    let audio = config.section("audio_config", "audio_config.")?;
    let keys = TowerKeys {
        hidden: "hidden_size",
        stack: ["num_hidden_layers", "num_attention_heads", "intermediate_size"],
    };
    let mut encoder = whisper::tower(&audio, keys, (MelWindows::Joined, &TOWER))?;
    let hidden = decoder.stack.hidden;
    encoder.projector = Some(ProjectorSpec {
        rows: ProjectedRows::Line,
        side: joined_rows(&audio, &encoder)?,
        merge: RowMerge::Concatenate,
        norm: None,
        widths: vec![hidden, hidden],
        bias: false,
        transposed: false,
        activation: config.activation("projector_hidden_act", "gelu")?,
        merging: None,
        gated: None,
        names: &PROJECTOR,
    });
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// Rows that become one.
fn joined_rows(audio: &Config<'_>, encoder: &EncoderSpec) -> Result<usize, ModelError> {
    const KEY: &str = "intermediate_size";
    let StackSpec { hidden, feed_forward: FeedForwardSpec { width, .. }, .. } = encoder.stack;
    let n_rows = match encoder.stem {
        StemSpec::Mel { n_frames, .. } => n_frames / 2,
        _ => 0,
    };
    match width.is_multiple_of(hidden) && n_rows.is_multiple_of(width / hidden) {
        true => Ok(width / hidden),
        false => {
            let expected =
                format!("a multiple of hidden_size {hidden} by a divisor of max_source_positions {n_rows}");
            Err(audio.unsupported(KEY, width, expected))
        }
    }
}
