//! The directory's JSON files, from the shapes of the weights and the ids of the tokenizer.

use super::ct2::{Dtype, Stored};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Sizes of the model, as its tensors have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    d_model: usize,
    n_heads: usize,
    ffn: usize,
    /// Layers of the encoder.
    pub encoder_layers: usize,
    /// Layers of the decoder.
    pub decoder_layers: usize,
    n_mels: usize,
    source_positions: usize,
    target_positions: usize,
    vocab: usize,
}

impl Shape {
    /// Reads them.
    ///
    /// # Errors
    /// If a tensor is missing or has another rank.
    pub fn of(stored: &Stored<'_>) -> Result<Self> {
        let dims = |name: &str, rank: usize| {
            let shape = stored.get(name)?.shape.clone();
            ensure!(shape.len() == rank, "{name} has shape {shape:?}, expected {rank} dimensions");
            Ok(shape)
        };
        let layers = |side: &str| {
            (0..).take_while(|i| stored.has(&format!("{side}/layer_{i}/ffn/linear_0/weight"))).count()
        };
        let embedding = dims("decoder/embeddings/weight", 2)?;
        let heads = stored.get("encoder/num_heads")?;
        ensure!(heads.dtype == Dtype::I16 && heads.data.len() == 2, "encoder/num_heads is no 16-bit number");
        Ok(Self {
            d_model: embedding[1],
            n_heads: usize::from(u16::from_le_bytes([heads.data[0], heads.data[1]])),
            ffn: dims("encoder/layer_0/ffn/linear_0/weight", 2)?[0],
            encoder_layers: layers("encoder"),
            decoder_layers: layers("decoder"),
            n_mels: dims("encoder/conv1/weight", 3)?[1],
            source_positions: dims("encoder/position_encodings/encodings", 2)?[0],
            target_positions: dims("decoder/position_encodings/encodings", 2)?[0],
            vocab: embedding[0],
        })
    }

    #[cfg(test)]
    pub(super) const fn tiny_en() -> Self {
        Self {
            d_model: 384,
            n_heads: 6,
            ffn: 1536,
            encoder_layers: 4,
            decoder_layers: 4,
            n_mels: 80,
            source_positions: 1500,
            target_positions: 448,
            vocab: 51864,
        }
    }
}

/// Ids of the tokens that steer the model.
struct Ids {
    end: u64,
    start: u64,
    no_timestamps: u64,
    previous: u64,
}

/// Names and contents. `tokenizer` is `tokenizer.json`; `extras` is CTranslate2's own configuration, which has the
/// lists of suppressed tokens.
///
/// # Errors
/// If the model is not English-only, or a list or token is missing.
pub fn files(shape: &Shape, tokenizer: &Value, extras: &Value) -> Result<Vec<(&'static str, Value)>> {
    // Multilingual vocabularies have 51865 tokens and more, and need a table of languages besides.
    ensure!(shape.vocab < 51865, "{} tokens: only English-only models are converted", shape.vocab);
    let ids = Ids {
        end: id(tokenizer, "<|endoftext|>")?,
        start: id(tokenizer, "<|startoftranscript|>")?,
        no_timestamps: id(tokenizer, "<|notimestamps|>")?,
        previous: id(tokenizer, "<|startofprev|>")?,
    };
    let list =
        |key: &str| extras.get(key).filter(|v| v.is_array()).with_context(|| format!("{key} is no list"));
    let (suppress, begin) = (list("suppress_ids")?, list("suppress_ids_begin")?);
    Ok(vec![
        ("preprocessor_config.json", preprocessor(shape)),
        ("tokenizer_config.json", tokenizer_config(shape)),
        ("generation_config.json", generation(shape, &ids, [suppress, begin, list("alignment_heads")?])),
        ("config.json", model(shape, &ids, suppress, begin)),
    ])
}

fn id(tokenizer: &Value, token: &str) -> Result<u64> {
    tokenizer["added_tokens"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|t| t["content"] == token)
        .and_then(|t| t["id"].as_u64())
        .with_context(|| format!("the tokenizer has no {token}"))
}

fn model(shape: &Shape, ids: &Ids, suppress: &Value, begin: &Value) -> Value {
    json!({
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": true,
        "activation_function": "gelu",
        "d_model": shape.d_model,
        "encoder_layers": shape.encoder_layers,
        "encoder_attention_heads": shape.n_heads,
        "encoder_ffn_dim": shape.ffn,
        "decoder_layers": shape.decoder_layers,
        "decoder_attention_heads": shape.n_heads,
        "decoder_ffn_dim": shape.ffn,
        "num_hidden_layers": shape.encoder_layers,
        "num_mel_bins": shape.n_mels,
        "max_source_positions": shape.source_positions,
        "max_target_positions": shape.target_positions,
        "vocab_size": shape.vocab,
        "scale_embedding": false,
        "tie_word_embeddings": true,
        "torch_dtype": "float16",
        "bos_token_id": ids.start,
        "eos_token_id": ids.end,
        "pad_token_id": ids.end,
        "decoder_start_token_id": ids.start,
        "suppress_tokens": suppress,
        "begin_suppress_tokens": begin,
    })
}

fn generation(shape: &Shape, ids: &Ids, [suppress, begin, heads]: [&Value; 3]) -> Value {
    json!({
        "is_multilingual": false,
        "bos_token_id": ids.start,
        "eos_token_id": ids.end,
        "pad_token_id": ids.end,
        "decoder_start_token_id": ids.start,
        "prev_sot_token_id": ids.previous,
        "no_timestamps_token_id": ids.no_timestamps,
        "max_initial_timestamp_index": 50,
        "forced_decoder_ids": [[1, ids.no_timestamps]],
        "max_length": shape.target_positions,
        "return_timestamps": false,
        "suppress_tokens": suppress,
        "begin_suppress_tokens": begin,
        "alignment_heads": heads,
    })
}

fn preprocessor(shape: &Shape) -> Value {
    json!({
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": shape.n_mels,
        "sampling_rate": 16000,
        "n_fft": 400,
        "hop_length": 160,
        "chunk_length": 30,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": false,
    })
}

fn tokenizer_config(shape: &Shape) -> Value {
    json!({
        "tokenizer_class": "WhisperTokenizer",
        "processor_class": "WhisperProcessor",
        "add_prefix_space": false,
        "errors": "replace",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": shape.target_positions,
    })
}
