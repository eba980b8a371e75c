//! Qwen3-ASR: convolutions over chunks of log-mel, an encoder that attends inside windows, two linear layers, and a Qwen3 decoder.
//!
//! After <https://github.com/huggingface/transformers/blob/v5.13.0/src/transformers/models/qwen3_asr/modeling_qwen3_asr.py>; in the
//! layout of its authors all is a section `thinker_config` and has other names
//! (<https://github.com/QwenLM/Qwen3-ASR/blob/c17a131fe028b2e428b6e80a33d30bb4fa57b8df/qwen_asr/core/transformers_backend/modeling_qwen3_asr.py>).
//! Quirks: positions begin anew in every chunk; silence that fills up the last chunk is convolved, and its rows are left out. The
//! forced aligner, which is of the same layers, writes no text and is refused.

use super::Config;
use super::causal::{self, CausalKind, CausalPlace};
use super::fairseq::ENCODER_STACK;
use crate::error::ModelError;
use crate::spec::*;
use serde_json::{Value, json};
use std::sync::LazyLock;
use triptych_core::Modality;
use triptych_kernels::ops::AttentionShape;

/// Not in the configuration: the default of torch's `LayerNorm`.
const NORM_EPS: f32 = 1e-5;

/// Rows of a chunk, which the published code counts with.
const CHUNK_ROWS: usize = 13;

static TOWER: EncoderNames = EncoderNames {
    prefixes: &["model.audio_tower.", "audio_tower.", "thinker.audio_tower."],
    stem: &["conv2d1", "conv2d2", "conv2d3", "conv_out"],
    tokens: &[],
    positions: "",
    stack: StackNames { input_norm: "", final_norm: "ln_post", ..ENCODER_STACK },
};

static PROJECTOR: ProjectorNames = ProjectorNames {
    prefixes: Some(&["model.multi_modal_projector.", "multi_modal_projector."]),
    norm: "",
    layers: &["linear_1", "linear_2"],
};

static ORIGINAL_PROJECTOR: ProjectorNames =
    ProjectorNames { prefixes: Some(&["thinker.audio_tower."]), norm: "", layers: &["proj1", "proj2"] };

/// Values where the decoder's section is silent, which are not those of Qwen3.
static TEXT_DEFAULTS: LazyLock<Value> = LazyLock::new(|| {
    json!({
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65_536,
    })
});

/// The spec of a configuration.
///
/// # Errors
/// [`ModelError::Config`] for a key that is missing or not supported.
pub(super) fn spec(config: &Config<'_>) -> Result<ModelSpec, ModelError> {
    causal::check_class(config, "Qwen3ASRForConditionalGeneration")?;
    let original = config.get("thinker_config").is_some();
    let config = &config.or_section(&["thinker_config"]);
    let text = config.section("text_config", "text_config.")?.with_defaults(&TEXT_DEFAULTS);
    if original {
        // Its default is not that of Qwen3.
        text.number("rope_theta")?;
    }
    let tied_head = match config.get("tie_word_embeddings") {
        Some(_) => config.flag_or("tie_word_embeddings", true)?,
        None => text.flag_or("tie_word_embeddings", !original)?,
    };
    let place = CausalPlace { items: ItemsSpec::Embedded { levels: 0, is_mutual: false }, tied_head };
    let decoder = causal::spec(&text, CausalKind::Qwen3, place)?;
    let audio = config.section("audio_config", "audio_config.")?;
    let mut encoder = tower(&audio)?;
    let out = audio.size_or("output_dim", 3584)?;
    if out != decoder.stack.hidden {
        let expected = format!("{}, hidden_size of text_config", decoder.stack.hidden);
        return Err(audio.unsupported("output_dim", out, expected));
    }
    encoder.projector = Some(ProjectorSpec {
        rows: ProjectedRows::Line,
        side: 1,
        merge: RowMerge::Concatenate,
        norm: None,
        widths: vec![encoder.stack.hidden, out],
        bias: true,
        transposed: false,
        activation: audio.activation("activation_function", "gelu")?,
        merging: None,
        gated: None,
        names: if original { &ORIGINAL_PROJECTOR } else { &PROJECTOR },
    });
    Ok(ModelSpec { encoder: Some(encoder), decoder })
}

/// The encoder of a section.
fn tower(config: &Config<'_>) -> Result<EncoderSpec, ModelError> {
    config.must_be_off("scale_embedding")?;
    let chunks = chunks(config)?;
    let hidden = config.size_or("d_model", 1024)?;
    if !hidden.is_multiple_of(2) {
        return Err(config.unsupported("d_model", hidden, "an even number"));
    }
    let n_heads = config.size_or("encoder_attention_heads", 16)?;
    let head_dim = config.share("encoder_attention_heads", hidden, n_heads)?;
    let scale = 1.0 / (head_dim as f32).sqrt();
    Ok(EncoderSpec {
        modality: Modality::Audio,
        positions: Positions::RepeatedSinusoids { period: CHUNK_ROWS, n_rows: chunks.window_rows() },
        stem: StemSpec::MelChunks(chunks),
        stack: StackSpec {
            hidden,
            n_layers: config.size_or("encoder_layers", 24)?,
            attention: AttentionSpec {
                shape: AttentionShape { n_heads, n_kv_heads: n_heads, head_dim, scale, softcap: None },
                bias: AttentionBias { q: true, k: true, v: true, out: true },
                head_norms: None,
            },
            feed_forward: FeedForwardSpec {
                width: config.size_or("encoder_ffn_dim", 4096)?,
                kind: FeedForwardKind::Plain,
                activation: config.activation("activation_function", "gelu")?,
                bias: true,
            },
            norm: NormSpec::layer(NORM_EPS),
            input_norm: InputNorm::Absent,
            placement: NormPlacement::Pre,
            final_norm: true,
            layers: Vec::new(),
        },
        windows: None,
        extras: EncoderExtras::default(),
        projector: None,
        names: &TOWER,
    })
}

/// Chunks of log-mel, and how many attend to each other.
fn chunks(config: &Config<'_>) -> Result<MelChunksSpec, ModelError> {
    const WINDOW: &str = "n_window_infer";
    const POSITIONS: &str = "max_position_embeddings";
    let half = config.size_or("n_window", 50)?;
    let n_frames = 2 * half;
    let window = config.size_or(WINDOW, 800)?;
    let chunks = MelChunksSpec {
        n_mels: config.size_or("num_mel_bins", 128)?,
        n_frames,
        n_channels: config.size_or("downsample_hidden_size", 480)?,
        n_chunks: window / n_frames,
    };
    if chunks.chunk_rows() != CHUNK_ROWS {
        return Err(config.unsupported(
            "n_window",
            half,
            format!("49 to 52, of which come {CHUNK_ROWS} rows"),
        ));
    }
    if window < n_frames || !window.is_multiple_of(n_frames) {
        return Err(config.unsupported(WINDOW, window, format!("a multiple of {n_frames}, twice n_window")));
    }
    let n_positions = config.size_or(POSITIONS, CHUNK_ROWS)?;
    if n_positions < CHUNK_ROWS {
        return Err(config.unsupported(POSITIONS, n_positions, format!("{CHUNK_ROWS} or more")));
    }
    Ok(chunks)
}
