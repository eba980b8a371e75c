//! The real sizes: every tensor of a published model is found under its name, in its shape, and used.
//!
//! Shapes are those of `tests/golden/names`; weights are a file of the right length that nobody fills.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;
use triptych_core::Modality;
use triptych_kernels::Precision;
use triptych_models::decoder::TransformerDecoder;
use triptych_models::encoder::TransformerEncoder;
use triptych_models::family::{Config, Family};
use triptych_models::model::FootprintBackend;
use triptych_models::spec::{ModelSpec, Positions};
use triptych_models::tokenization::Tokenizer;
use triptych_models::weights::Weights;

fn whisper(layers: u64, hidden: u64, heads: u64, n_mels: u64, vocab: u64) -> serde_json::Value {
    serde_json::json!({
        "model_type": "whisper", "activation_function": "gelu", "d_model": hidden, "num_mel_bins": n_mels,
        "encoder_layers": layers, "encoder_attention_heads": heads, "encoder_ffn_dim": 4 * hidden,
        "decoder_layers": layers, "decoder_attention_heads": heads, "decoder_ffn_dim": 4 * hidden,
        "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": vocab,
        "scale_embedding": false,
    })
}

/// The text half of a published Qwen configuration.
fn qwen(
    model_type: &str,
    [layers, hidden, ffn, heads]: [u64; 4],
    vision: serde_json::Value,
) -> serde_json::Value {
    serde_json::json!({
        "model_type": model_type, "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": ffn,
        "num_attention_heads": heads, "num_hidden_layers": layers, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "max_window_layers": 28, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0, "rope_scaling": { "type": "mrope", "mrope_section": [16, 24, 24] },
        "sliding_window": 32768, "use_sliding_window": false, "tie_word_embeddings": true,
        "vocab_size": 151_936, "vision_config": vision,
    })
}

/// A weight file with the header of `shapes` and no content.
fn hollow_file(dir: &Path, shapes: &BTreeMap<String, Vec<usize>>) {
    let mut header = serde_json::Map::new();
    let mut at = 0;
    for (name, shape) in shapes {
        let end = at + 2 * shape.iter().product::<usize>();
        let tensor = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] });
        header.insert(name.clone(), tensor);
        at = end;
    }
    let header = serde_json::Value::Object(header).to_string();
    let mut file = File::create(dir.join("model.safetensors")).expect("a file");
    file.write_all(&(header.len() as u64).to_le_bytes()).expect("a length");
    file.write_all(header.as_bytes()).expect("a header");
    file.set_len((8 + header.len() + at) as u64).expect("a sparse file");
}

/// A directory with the hollow weights of a published model, and their shapes.
pub(super) fn hollow(name: &str) -> (TempDir, BTreeMap<String, Vec<usize>>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../../tests/golden/names/{name}.json"));
    let text = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let shapes: BTreeMap<String, Vec<usize>> = serde_json::from_slice(&text).expect("shapes by name");
    let dir = tempfile::tempdir().expect("a temporary directory");
    hollow_file(dir.path(), &shapes);
    (dir, shapes)
}

fn check(name: &str, modality: Modality, config: &serde_json::Value) {
    let (dir, shapes) = hollow(name);
    let config = Config::new("config.json", config);
    let spec = Family::of(&config).and_then(|f| f.spec(&config)).expect("a published configuration");
    let encoder = spec.encoder.as_ref().expect("an encoder");
    assert_eq!(encoder.modality, modality);
    let weights = Weights::survey(dir.path()).expect("a header");
    let backend = FootprintBackend::new(Precision::F32).expect("a CPU");
    TransformerEncoder::load(encoder, &weights, &backend).expect("encoder tensors");
    TransformerDecoder::load(&spec.decoder, &weights, &backend).expect("decoder tensors");
    let stored: usize = shapes.values().map(|s| s.iter().product::<usize>()).sum();
    // A token table that is the head as well is handed over twice; a gate becomes part of other tensors.
    let twice = if spec.decoder.head.tied { spec.decoder.vocab * spec.decoder.stack.hidden } else { 0 };
    let gates = shapes.values().filter(|shape| **shape == [1]).count();
    let computed = match encoder.positions {
        Positions::RepeatedSinusoids { n_rows, .. } => n_rows * encoder.stack.hidden,
        _ => 0,
    };
    assert_eq!(backend.footprint().n_elements, stored + twice + computed - gates, "{name}");
}

fn moonshine(layers: u64, hidden: u64, factor: f64) -> serde_json::Value {
    serde_json::json!({
        "model_type": "moonshine", "hidden_size": hidden, "intermediate_size": 4 * hidden, "vocab_size": 32768,
        "encoder_num_hidden_layers": layers, "encoder_num_attention_heads": 8, "encoder_num_key_value_heads": 8,
        "decoder_num_hidden_layers": layers, "decoder_num_attention_heads": 8, "decoder_num_key_value_heads": 8,
        "encoder_hidden_act": "gelu", "decoder_hidden_act": "silu", "attention_bias": false,
        "max_position_embeddings": 194, "partial_rotary_factor": factor, "rope_theta": 10000.0,
        "rope_scaling": null, "pad_head_dim_to_multiple_of": 8,
    })
}

/// As published, what the model does not ask for left out.
fn mllama() -> serde_json::Value {
    serde_json::json!({
        "model_type": "mllama", "image_token_index": 128_256,
        "vision_config": {
            "model_type": "mllama_vision_model", "attention_heads": 16, "hidden_act": "gelu", "hidden_size": 1280,
            "image_size": 560, "intermediate_layers_indices": [3, 7, 15, 23, 30], "intermediate_size": 5120,
            "max_num_tiles": 4, "norm_eps": 1e-5, "num_channels": 3, "num_global_layers": 8,
            "num_hidden_layers": 32, "patch_size": 14, "vision_output_dim": 7680,
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
        },
        "text_config": {
            "model_type": "mllama_text_model", "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
            "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "max_position_embeddings": 131_072, "num_hidden_layers": 40, "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": false, "vocab_size": 128_256,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
    })
}

#[test]
fn llama_3_2_vision() {
    check("llama-3.2-11b-vision", Modality::Image, &mllama());
}

/// The spec of a configuration, and the most rows that its processor gives a sequence.
fn rows(config: &serde_json::Value, processor: &serde_json::Value) -> (ModelSpec, Option<usize>) {
    let dir = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(dir.path().join("preprocessor_config.json"), processor.to_string()).expect("a file");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/t5_small/model");
    let tokenizer = Arc::new(Tokenizer::from_dir(&golden).expect("a tokenizer"));
    let config = Config::new("config.json", config);
    let family = Family::of(&config).expect("a family");
    let spec = family.spec(&config).expect("a published configuration");
    let processor = family
        .preprocess(dir.path(), spec.encoder.as_ref().expect("an encoder"), &tokenizer)
        .expect("a processor");
    let max_rows = processor.max_rows();
    (spec, max_rows)
}

#[test]
fn the_most_rows_of_published_models_and_what_one_costs_beside_a_token() {
    let check = |config, processor, n_rows, rows_per_token| {
        let (spec, max_rows) = rows(&config, &processor);
        assert_eq!((max_rows, spec.decoder.cross_rows_per_token()), (Some(n_rows), rows_per_token));
    };
    let tiles = serde_json::json!({ "size": { "height": 560, "width": 560 }, "max_image_tiles": 4 });
    check(mllama(), tiles, 4 * 1601, 129);
    let mel = serde_json::json!({
        "feature_size": 80, "sampling_rate": 16000, "n_fft": 400, "hop_length": 160, "chunk_length": 30,
    });
    check(whisper(4, 384, 6, 80, 51864), mel, 1500, 7);
    let t5 = serde_json::json!({
        "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
        "num_heads": 8, "feed_forward_proj": "relu",
    });
    check(t5, serde_json::json!({}), 8192, 7);
}

#[test]
fn moonshine_tiny() {
    check("moonshine-tiny", Modality::Audio, &moonshine(6, 288, 0.9));
}

#[test]
fn moonshine_base() {
    check("moonshine-base", Modality::Audio, &moonshine(8, 416, 0.62));
}

#[test]
fn whisper_tiny_en() {
    check("whisper-tiny.en", Modality::Audio, &whisper(4, 384, 6, 80, 51864));
}

#[test]
fn whisper_large_v3() {
    check("whisper-large-v3", Modality::Audio, &whisper(32, 1280, 20, 128, 51866));
}

#[test]
fn qwen2_vl_2b() {
    let vision = serde_json::json!({
        "depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3, "hidden_size": 1536,
        "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2,
    });
    check("qwen2-vl-2b", Modality::Image, &qwen("qwen2_vl", [28, 1536, 8960, 12], vision));
}

#[test]
fn qwen2_5_vl_3b() {
    let vision = serde_json::json!({
        "depth": 32, "hidden_act": "silu", "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "in_chans": 3, "out_hidden_size": 2048, "patch_size": 14, "spatial_merge_size": 2,
        "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2, "temporal_patch_size": 2,
    });
    check("qwen2.5-vl-3b", Modality::Image, &qwen("qwen2_5_vl", [36, 2048, 11008, 16], vision));
}

/// As published; its names are those of the modules.
#[test]
fn qwen3_vl_2b() {
    let config = serde_json::json!({
        "model_type": "qwen3_vl", "tie_word_embeddings": true, "image_token_id": 151_655,
        "text_config": {
            "model_type": "qwen3_vl_text", "attention_bias": false, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 262_144,
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "rope_scaling": {
                "mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default",
            },
            "rope_theta": 5_000_000, "tie_word_embeddings": true, "use_cache": true, "vocab_size": 151_936,
        },
        "vision_config": {
            "deepstack_visual_indexes": [5, 11, 17], "depth": 24, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1024, "in_channels": 3, "intermediate_size": 4096, "model_type": "qwen3_vl",
            "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    });
    check("qwen3-vl-2b", Modality::Image, &config);
}

/// As published; the layers for multi-token prediction, `mtp.*`, are left out.
#[test]
fn qwen3_5_0_8b() {
    let config = serde_json::json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": true,
        "image_token_id": 248_056, "video_token_id": 248_057,
        "text_config": {
            "model_type": "qwen3_5_text", "attention_bias": false, "attn_output_gate": true,
            "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024,
            "intermediate_size": 3584, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
            "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144, "mtp_num_hidden_layers": 1,
            "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10_000_000, "rope_type": "default",
            },
            "tie_word_embeddings": true, "use_cache": true, "vocab_size": 248_320,
        },
        "vision_config": {
            "deepstack_visual_indexes": [], "depth": 12, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 768,
            "in_channels": 3, "intermediate_size": 3072, "model_type": "qwen3_5", "num_heads": 12,
            "num_position_embeddings": 2304, "out_hidden_size": 1024, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    });
    check("qwen3.5-0.8b", Modality::Image, &config);
}

/// As published, but with four of the decoder's layers; the layers for multi-token prediction, `mtp.*`, are left out.
#[test]
fn qwen3_5_35b_a3b() {
    let config = serde_json::json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
        "tie_word_embeddings": false, "image_token_id": 248_056, "video_token_id": 248_057,
        "text_config": {
            "model_type": "qwen3_5_moe_text", "attention_bias": false, "attn_output_gate": true,
            "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262_144, "mlp_only_layers": [], "moe_intermediate_size": 512,
            "mtp_num_hidden_layers": 1, "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
            "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10_000_000, "rope_type": "default",
            },
            "shared_expert_intermediate_size": 512, "use_cache": true, "vocab_size": 248_320,
        },
        "vision_config": {
            "deepstack_visual_indexes": [], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
            "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_5_moe", "num_heads": 16,
            "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    });
    check("qwen3.5-35b-a3b", Modality::Image, &config);
}

/// As published, but with three of the decoder's layers, which are alike.
#[test]
fn qwen3_vl_30b_a3b() {
    let config = serde_json::json!({
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": false, "image_token_id": 151_655,
        "text_config": {
            "model_type": "qwen3_vl_moe_text", "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 262_144,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32,
            "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 3, "num_key_value_heads": 4,
            "rms_norm_eps": 1e-6, "rope_theta": 5_000_000, "use_cache": true, "vocab_size": 151_936,
            "rope_scaling": {
                "mrope_interleaved": true, "mrope_section": [24, 20, 20], "rope_type": "default",
            },
        },
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152, "in_channels": 3, "intermediate_size": 4304, "model_type": "qwen3_vl_moe",
            "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    });
    check("qwen3-vl-30b-a3b", Modality::Image, &config);
}

#[test]
fn qwen2_audio_7b() {
    let config = serde_json::json!({
        "model_type": "qwen2_audio", "audio_token_index": 151_646, "ignore_index": -100,
        "audio_config": {
            "model_type": "qwen2_audio_encoder", "activation_function": "gelu", "d_model": 1280,
            "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layerdrop": 0.0, "encoder_layers": 32,
            "max_source_positions": 1500, "num_mel_bins": 128, "scale_embedding": false,
        },
        "text_config": {
            "model_type": "qwen2", "intermediate_size": 11008, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "rope_theta": 10000, "use_mrope": false, "vocab_size": 156_032,
        },
    });
    check("qwen2-audio-7b", Modality::Audio, &config);
}

/// As published, in both layouts.
#[test]
fn qwen3_asr_both_layouts() {
    let audio = serde_json::json!({
        "activation_function": "gelu", "d_model": 1024, "downsample_hidden_size": 480, "encoder_attention_heads": 16,
        "encoder_ffn_dim": 4096, "encoder_layers": 24, "max_position_embeddings": 13, "n_window": 50,
        "n_window_infer": 800, "num_mel_bins": 128, "output_dim": 2048, "scale_embedding": false,
    });
    let text = serde_json::json!({
        "model_type": "qwen3", "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
        "max_position_embeddings": 65536, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0, "tie_word_embeddings": true, "vocab_size": 151_936,
    });
    let class = ["Qwen3ASRForConditionalGeneration"];
    let config = serde_json::json!({
        "architectures": class, "model_type": "qwen3_asr", "audio_config": audio, "text_config": text,
        "audio_token_id": 151_676, "tie_word_embeddings": true,
    });
    check("qwen3-asr-1.7b-hf", Modality::Audio, &config);
    let config = serde_json::json!({
        "architectures": class, "model_type": "qwen3_asr",
        "thinker_config": { "audio_config": audio, "text_config": text, "audio_token_id": 151_676 },
    });
    check("qwen3-asr-1.7b", Modality::Audio, &config);
}

#[test]
fn voxtral_mini_3b() {
    let config = serde_json::json!({
        "model_type": "voxtral", "audio_token_id": 24, "hidden_size": 3072, "projector_hidden_act": "gelu",
        "audio_config": {
            "model_type": "voxtral_encoder", "activation_function": "gelu", "hidden_size": 1280,
            "intermediate_size": 5120, "max_source_positions": 1500, "num_attention_heads": 20,
            "num_hidden_layers": 32, "num_mel_bins": 128, "scale_embedding": false,
        },
        "text_config": {
            "model_type": "llama", "head_dim": 128, "hidden_size": 3072, "intermediate_size": 8192,
            "max_position_embeddings": 131_072, "num_attention_heads": 32, "num_hidden_layers": 30,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 100_000_000.0, "vocab_size": 131_072,
        },
    });
    check("voxtral-mini-3b", Modality::Audio, &config);
}
