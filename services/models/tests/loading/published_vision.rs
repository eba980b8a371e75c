//! The real sizes of image encoders with a text decoder. Some of their tensors are laid out before a back end sees
//! them, and a token table may be loaded for both stages.

use super::published::hollow;
use triptych_core::Modality;
use triptych_kernels::Precision;
use triptych_models::decoder::TransformerDecoder;
use triptych_models::encoder::TransformerEncoder;
use triptych_models::family::{Config, Family};
use triptych_models::model::FootprintBackend;
use triptych_models::weights::Weights;

/// Differences between the loaded and the stored values.
struct LoadDifferences {
    /// Parts of names of tensors that are laid out before, or not read at all.
    not_as_stored: &'static [&'static str],
    /// Further loads of the token table: as the head, or for both stages.
    more_tables: usize,
    /// Elements of what is computed from tensors that are not loaded as stored.
    n_computed: usize,
}

fn check(name: &str, config: &serde_json::Value, differences: &LoadDifferences) {
    let (dir, shapes) = hollow(name);
    let config = Config::new("config.json", config);
    let spec = Family::of(&config).and_then(|f| f.spec(&config)).expect("a published configuration");
    let encoder = spec.encoder.as_ref().expect("an encoder");
    assert_eq!(encoder.modality, Modality::Image);
    let weights = Weights::survey(dir.path()).expect("a header");
    let backend = FootprintBackend::new(Precision::F32).expect("a CPU");
    for tower in encoder.towers() {
        TransformerEncoder::load(tower, &weights, &backend).expect("encoder tensors");
    }
    TransformerDecoder::load(&spec.decoder, &weights, &backend).expect("decoder tensors");
    let as_stored = |name: &str| !differences.not_as_stored.iter().any(|part| name.contains(part));
    let stored = shapes.iter().filter(|(name, _)| as_stored(name));
    let stored: usize = stored.map(|(_, s)| s.iter().product::<usize>()).sum();
    let table = spec.decoder.vocab * spec.decoder.stack.hidden;
    let n_elements = stored + differences.more_tables * table + differences.n_computed;
    assert_eq!(backend.footprint().n_elements, n_elements, "{name}");
}

#[test]
fn trocr_base_printed() {
    let config = serde_json::json!({
        "model_type": "vision-encoder-decoder", "is_encoder_decoder": true,
        "encoder": {
            "model_type": "vit", "hidden_act": "gelu", "hidden_size": 768, "image_size": 384, "intermediate_size": 3072,
            "layer_norm_eps": 1e-12, "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12,
            "patch_size": 16, "qkv_bias": false,
        },
        "decoder": {
            "model_type": "trocr", "activation_function": "gelu", "cross_attention_hidden_size": 768, "d_model": 1024,
            "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12, "layernorm_embedding": true,
            "max_position_embeddings": 512, "scale_embedding": false, "use_learned_position_embeddings": true,
            "vocab_size": 50265,
        },
    });
    check(
        "trocr-base-printed",
        &config,
        &LoadDifferences { not_as_stored: &[], more_tables: 1, n_computed: 0 },
    );
}

#[test]
fn donut_base() {
    let config = serde_json::json!({
        "model_type": "vision-encoder-decoder", "is_encoder_decoder": true,
        "encoder": {
            "model_type": "donut-swin", "depths": [2, 2, 14, 2], "embed_dim": 128, "hidden_act": "gelu",
            "image_size": [2560, 1920], "layer_norm_eps": 1e-5, "mlp_ratio": 4.0, "num_channels": 3,
            "num_heads": [4, 8, 16, 32], "patch_size": 4, "qkv_bias": true, "use_absolute_embeddings": false,
            "window_size": 10,
        },
        "decoder": {
            "model_type": "mbart", "activation_function": "gelu", "d_model": 1024, "decoder_attention_heads": 16,
            "decoder_ffn_dim": 4096, "decoder_layers": 4, "max_position_embeddings": 1536, "scale_embedding": true,
            "vocab_size": 57525,
        },
    });
    let differences = LoadDifferences {
        not_as_stored: &["relative_position_bias_table", "relative_position_index"],
        more_tables: 1,
        n_computed: 0,
    };
    check("donut-base", &config, &differences);
}

#[test]
fn florence_2_base() {
    let config = serde_json::json!({
        "model_type": "florence2", "is_encoder_decoder": true,
        "text_config": {
            "model_type": "bart", "activation_function": "gelu", "d_model": 768, "decoder_attention_heads": 12,
            "decoder_ffn_dim": 3072, "decoder_layers": 6, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072,
            "encoder_layers": 6, "max_position_embeddings": 1024, "scale_embedding": false, "vocab_size": 51289,
        },
        "vision_config": {
            "model_type": "florence_vision", "activation_function": "gelu", "depths": [1, 1, 9, 1],
            "embed_dim": [128, 256, 512, 1024], "in_channels": 3, "max_position_embeddings": 50,
            "max_temporal_embeddings": 100, "mlp_ratio": 4.0, "num_groups": [4, 8, 16, 32],
            "num_heads": [4, 8, 16, 32], "patch_padding": [3, 1, 1, 1],
            "patch_prenorm": [false, true, true, true], "patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2],
            "projection_dim": 768, "qkv_bias": true, "window_size": 12,
        },
    });
    let differences = LoadDifferences {
        not_as_stored: &["image_position_embed", "pos_idx_to_embed"],
        more_tables: 2,
        // A table for lines and one for columns, as wide as the rows they are added to.
        n_computed: 2 * 50 * 1024,
    };
    check("florence-2-base", &config, &differences);
}

#[test]
fn florence_2_base_in_the_authors_layout() {
    let config = serde_json::json!({
        "model_type": "florence2", "is_encoder_decoder": true, "projection_dim": 768, "vocab_size": 51289,
        "text_config": {
            "model_type": "florence2_language", "activation_function": "gelu", "d_model": 768,
            "decoder_attention_heads": 12, "decoder_ffn_dim": 3072, "decoder_layers": 6,
            "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "encoder_layers": 6,
            "max_position_embeddings": 1024, "scale_embedding": false, "vocab_size": 51289,
        },
        "vision_config": {
            "model_type": "davit", "depths": [1, 1, 9, 1], "dim_embed": [128, 256, 512, 1024],
            "drop_path_rate": 0.1, "enable_checkpoint": false,
            "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
            "image_pos_embed": { "max_pos_embeddings": 50, "type": "learned_abs_2d" },
            "num_groups": [4, 8, 16, 32], "num_heads": [4, 8, 16, 32], "patch_padding": [3, 1, 1, 1],
            "patch_prenorm": [false, true, true, true], "patch_size": [7, 3, 3, 3], "patch_stride": [4, 2, 2, 2],
            "projection_dim": 768,
            "visual_temporal_embedding": { "max_temporal_embeddings": 100, "type": "COSINE" }, "window_size": 12,
        },
    });
    let differences = LoadDifferences {
        not_as_stored: &["image_pos_embed", "pos_idx_to_embed"],
        more_tables: 2,
        // A table for lines and one for columns, as wide as the rows they are added to.
        n_computed: 2 * 50 * 1024,
    };
    check("florence-2-base-original", &config, &differences);
}

/// The layer behind the one that is read, the norm at the end of the tower, and a row that stays in host memory.
const LLAVA: LoadDifferences = LoadDifferences {
    not_as_stored: &["encoder.layers.23.", "post_layernorm", "image_newline"],
    more_tables: 0,
    n_computed: 0,
};

/// CLIP ViT-L/14 at 336 pixels.
fn llava_clip() -> serde_json::Value {
    serde_json::json!({
        "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096, "model_type": "clip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768,
        "vocab_size": 32_000,
    })
}

/// As published: whatever is Llama's default is left out.
#[test]
fn llava_1_5_7b() {
    let config = serde_json::json!({
        "model_type": "llava", "image_token_index": 32_000, "ignore_index": -100, "pad_token_id": 32_001,
        "projector_hidden_act": "gelu", "vision_feature_layer": -2, "vision_feature_select_strategy": "default",
        "vocab_size": 32_064, "vision_config": llava_clip(),
        "text_config": {
            "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32_064,
        },
    });
    check("llava-1.5-7b", &config, &LLAVA);
}

#[test]
fn llava_1_6_mistral_7b() {
    let config = serde_json::json!({
        "model_type": "llava_next", "image_token_index": 32_000, "ignore_index": -100,
        "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
        "projector_hidden_act": "gelu", "tie_word_embeddings": false, "use_image_newline_parameter": true,
        "vision_feature_layer": -2, "vision_feature_select_strategy": "default", "vision_config": llava_clip(),
        "text_config": {
            "model_type": "mistral", "intermediate_size": 14_336, "max_position_embeddings": 32_768,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "sliding_window": null,
            "vocab_size": 32_064,
        },
    });
    check("llava-v1.6-mistral-7b", &config, &LLAVA);
}

#[test]
fn llava_onevision_qwen2_0_5b() {
    let config = serde_json::json!({
        "model_type": "llava_onevision", "image_token_index": 151_646, "video_token_index": 151_647,
        "projector_hidden_act": "gelu", "tie_word_embeddings": true, "use_image_newline_parameter": true,
        "vision_aspect_ratio": "anyres_max_9", "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1_000_000.0, "vocab_size": 152_000,
            "tie_word_embeddings": true,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 384,
            "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 26, "patch_size": 14,
            "vision_use_head": false,
        },
    });
    check("llava-onevision-qwen2-0.5b", &config, &LoadDifferences { more_tables: 1, ..LLAVA_ONEVISION });
}

/// A norm behind the layer that is read, and a row that stays in host memory.
const LLAVA_ONEVISION: LoadDifferences =
    LoadDifferences { not_as_stored: &["post_layernorm", "image_newline"], more_tables: 0, n_computed: 0 };

#[test]
fn smolvlm_256m() {
    let config = serde_json::json!({
        "model_type": "smolvlm", "image_token_id": 49_190, "scale_factor": 4, "tie_word_embeddings": false,
        "text_config": {
            "model_type": "llama", "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536,
            "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30,
            "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100_000, "vocab_size": 49_280,
        },
        "vision_config": {
            "model_type": "smolvlm_vision", "hidden_size": 768, "image_size": 512, "num_attention_heads": 12,
            "patch_size": 16,
        },
    });
    let differences = LoadDifferences { not_as_stored: &[], more_tables: 0, n_computed: 0 };
    check("smolvlm-256m", &config, &differences);
}

const AS_STORED: LoadDifferences = LoadDifferences { not_as_stored: &[], more_tables: 0, n_computed: 0 };

/// As published: whatever is the default of Mistral or of the tower is left out.
#[test]
fn pixtral_12b() {
    let config = serde_json::json!({
        "model_type": "llava", "ignore_index": -100, "image_seq_length": 1, "image_token_index": 10,
        "projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "text_config": {
            "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 14_336,
            "is_composition": true, "max_position_embeddings": 1_024_000, "num_hidden_layers": 40,
            "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000_000.0, "sliding_window": null,
            "vocab_size": 131_072,
        },
        "vision_config": {
            "model_type": "pixtral", "head_dim": 64, "hidden_act": "silu", "image_size": 1024,
            "is_composition": true, "patch_size": 16, "rope_theta": 10_000.0, "tie_word_embeddings": false,
        },
    });
    check("pixtral-12b", &config, &AS_STORED);
}

#[test]
fn mistral_small_3_1_24b() {
    let config = serde_json::json!({
        "model_type": "mistral3", "image_token_index": 10, "multimodal_projector_bias": false,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1,
        "text_config": {
            "model_type": "mistral", "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "intermediate_size": 32_768, "max_position_embeddings": 131_072,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000_000.0, "sliding_window": null, "vocab_size": 131_072,
        },
        "vision_config": {
            "model_type": "pixtral", "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096, "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10_000.0,
        },
    });
    check("mistral-small-3.1-24b", &config, &AS_STORED);
}

#[test]
fn lighton_ocr_1b() {
    let config = serde_json::json!({
        "model_type": "lighton_ocr", "image_token_id": 151_655, "spatial_merge_size": 2,
        "text_config": {
            "model_type": "qwen3", "attention_bias": false, "attention_dropout": 0.0, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40_960,
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000, "sliding_window": null, "vocab_size": 151_936,
        },
        "vision_config": {
            "model_type": "pixtral", "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 1024, "image_size": 1540, "intermediate_size": 4096, "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10_000.0,
        },
    });
    check("lighton-ocr-1b", &config, &LoadDifferences { more_tables: 1, ..AS_STORED });
}

/// As its published sizes are, but for the number of the decoder's layers, of which all but the first are alike.
#[test]
fn deepseek_ocr_2() {
    let config = serde_json::json!({
        "model_type": "deepseek_ocr2", "image_token_id": 128_815, "tie_word_embeddings": false,
        "text_config": {
            "model_type": "deepseek_ocr2_text", "hidden_size": 1280, "intermediate_size": 6848,
            "max_position_embeddings": 8192, "mlp_layer_types": ["dense", "sparse", "sparse"],
            "moe_intermediate_size": 896, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
            "num_attention_heads": 10, "num_experts_per_tok": 6, "num_hidden_layers": 3, "num_key_value_heads": 10,
            "topk_group": 1, "topk_method": "greedy", "vocab_size": 129_280,
        },
        "vision_config": {
            "model_type": "deepseek_ocr2_vision",
            "encoder_config": {
                "model_type": "deepseek_ocr2_encoder", "hidden_size": 896, "intermediate_size": 4864,
                "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
                "rope_parameters": { "rope_theta": 1_000_000.0, "rope_type": "default" },
            },
            "sam_config": {
                "model_type": "deepseek_ocr2_sam_vision_model", "downsample_channels": [512, 896],
                "global_attn_indexes": [2, 5, 8, 11], "hidden_size": 768, "image_size": 1024, "mlp_dim": 3072,
                "num_attention_heads": 12, "num_hidden_layers": 12, "output_channels": 256, "patch_size": 16,
                "window_size": 14,
            },
        },
    });
    let [head_dim, window, part, whole] = [64, 14, 48, 64];
    let offsets = |side: usize| 2 * (2 * side - 1) * head_dim;
    // Zeros and ones that place heads, biases and rows of squares of a side.
    let placements = |side: usize| (head_dim + 2 * side) * (head_dim + 2 * (2 * side - 2) + side * side);
    let n_computed = (part * part + whole * whole) * 768
        + 8 * offsets(window)
        + 4 * (offsets(part) + offsets(whole))
        + [window, part, whole].map(placements).iter().sum::<usize>();
    let not_as_stored = &["pos_embed", "rel_pos", "view_seperator"];
    check("deepseek-ocr-2", &config, &LoadDifferences { not_as_stored, more_tables: 0, n_computed });
}

/// As published sizes are in vLLM's configuration, but for the number of the decoder's layers; one of these has experts.
#[test]
fn step3() {
    let config = serde_json::json!({
        "model_type": "step3_vl", "image_token_id": 128_001, "image_token_len": 169, "patch_token_len": 81,
        "projector_bias": false, "understand_projector_stride": 2,
        "text_config": {
            "model_type": "step3_text", "head_dim": 256, "hidden_size": 7168, "intermediate_size": 18432,
            "max_position_embedding": 65536, "max_seq_len": 65536, "moe_intermediate_size": 5120,
            "moe_layers_enum": "1", "moe_num_experts": 48, "moe_top_k": 3, "norm_expert_weight": false,
            "num_attention_groups": 1, "num_attention_heads": 64, "num_hidden_layers": 3, "rms_norm_eps": 1e-5,
            "rope_theta": 500_000, "share_expert_dim": 5120, "share_q_dim": 2048, "vocab_size": 128_815,
        },
        "vision_config": {
            "model_type": "step3_vision_encoder", "hidden_act": "quick_gelu", "hidden_size": 1792,
            "image_size": 728, "intermediate_size": 15360, "layer_norm_eps": 1e-5, "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 63, "output_hidden_size": 4096, "patch_size": 14,
        },
    });
    let [part, whole] = [36, 52];
    let n_computed = (1 + part * part + whole * whole) * 1792;
    let not_as_stored = &["class_embedding", "position_embedding"];
    check("step3", &config, &LoadDifferences { not_as_stored, more_tables: 0, n_computed });
}

/// The layer that predicts a token further is left out.
#[test]
fn glm_ocr() {
    let config = serde_json::json!({
        "model_type": "glm_ocr", "image_start_token_id": 59_256, "image_end_token_id": 59_257,
        "image_token_id": 59_280, "tie_word_embeddings": false, "video_token_id": 59_281,
        "text_config": {
            "model_type": "glm_ocr_text", "attention_bias": false, "attention_dropout": 0.0, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 4608,
            "max_position_embeddings": 131_072, "num_attention_heads": 16, "num_hidden_layers": 16,
            "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": 59_392,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0,
                "rope_theta": 10_000,
            },
        },
        "vision_config": {
            "model_type": "glm_ocr_vision", "attention_bias": true, "depth": 24, "hidden_act": "silu",
            "hidden_size": 1024, "image_size": 336, "in_channels": 3, "intermediate_size": 4096, "num_heads": 16,
            "out_hidden_size": 1536, "patch_size": 14, "rms_norm_eps": 1e-5, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    });
    // A row of ones.
    check("glm-ocr", &config, &LoadDifferences { n_computed: 1536, ..AS_STORED });
}

#[test]
fn internvl3_1b_hf() {
    let config = serde_json::json!({
        "model_type": "internvl", "downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151_667,
        "projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
            "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1_000_000.0, "vocab_size": 151_674,
            "tie_word_embeddings": false, "use_sliding_window": false,
        },
        "vision_config": {
            "model_type": "internvl_vision", "attention_bias": true, "hidden_size": 1024, "image_size": [448, 448],
            "intermediate_size": 4096, "layer_norm_eps": 1e-6, "norm_type": "layer_norm",
            "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": [14, 14], "use_mean_pooling": true,
            "use_qk_norm": false,
        },
    });
    check("internvl3-1b-hf", &config, &INTERNVL);
}

/// Factors on a layer's output, which become part of its matrices.
const INTERNVL: LoadDifferences =
    LoadDifferences { not_as_stored: &["lambda_"], more_tables: 0, n_computed: 0 };

#[test]
fn internvl3_38b_hf() {
    let config = serde_json::json!({
        "model_type": "internvl", "downsample_ratio": 0.5, "image_seq_length": 256, "image_token_id": 151_667,
        "projector_hidden_act": "gelu", "vision_feature_layer": -1, "vision_feature_select_strategy": "default",
        "text_config": {
            "model_type": "qwen2", "hidden_size": 5120, "intermediate_size": 27_648, "num_attention_heads": 40,
            "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 1_000_000.0, "vocab_size": 151_674,
            "tie_word_embeddings": false, "use_sliding_window": false,
        },
        "vision_config": {
            "model_type": "internvl_vision", "attention_bias": false, "hidden_size": 3200,
            "image_size": [448, 448], "intermediate_size": 12_800, "layer_norm_eps": 1e-6,
            "norm_type": "rms_norm", "num_attention_heads": 25, "num_hidden_layers": 45, "patch_size": [14, 14],
            "use_mean_pooling": true, "use_qk_norm": true,
        },
    });
    check("internvl3-38b-hf", &config, &INTERNVL);
}

/// InternVL in its authors' layout, with the tower of 300 million parameters.
fn original(llm: serde_json::Value) -> serde_json::Value {
    serde_json::json!({
        "architectures": ["InternVLChatModel"], "downsample_ratio": 0.5, "dynamic_image_size": true,
        "force_image_size": 448, "llm_config": llm, "max_dynamic_patch": 12, "min_dynamic_patch": 1,
        "model_type": "internvl_chat", "pad2square": false, "ps_version": "v2", "select_layer": -1,
        "template": "internvl2_5", "use_backbone_lora": 0, "use_llm_lora": 0, "use_thumbnail": true,
        "vision_config": {
            "architectures": ["InternVisionModel"], "attention_dropout": 0.0, "drop_path_rate": 0.0, "dropout": 0.0,
            "hidden_act": "gelu", "hidden_size": 1024, "image_size": 448, "initializer_factor": 1.0,
            "intermediate_size": 4096, "layer_norm_eps": 1e-6, "model_type": "intern_vit_6b",
            "norm_type": "layer_norm", "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24,
            "patch_size": 14, "qk_normalization": false, "qkv_bias": true, "use_flash_attn": true,
        },
    })
}

/// The same factors by their other names.
const INTERNVL_ORIGINAL: LoadDifferences =
    LoadDifferences { not_as_stored: &[".ls1", ".ls2"], more_tables: 0, n_computed: 0 };

#[test]
fn internvl3_1b() {
    let config = original(serde_json::json!({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": 896,
        "intermediate_size": 4864, "max_position_embeddings": 32_768, "max_window_layers": 21,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_scaling": { "factor": 2.0, "rope_type": "dynamic", "type": "dynamic" }, "rope_theta": 1_000_000.0,
        "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151_674,
    }));
    check("internvl3-1b", &config, &INTERNVL_ORIGINAL);
}

#[test]
fn internvl2_5_8b() {
    let config = original(serde_json::json!({
        "architectures": ["InternLM2ForCausalLM"], "attn_implementation": "flash_attention_2", "bias": false,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14_336, "max_position_embeddings": 32_768,
        "model_type": "internlm2", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "rope_scaling": { "factor": 2.0, "type": "dynamic" }, "rope_theta": 1_000_000,
        "tie_word_embeddings": false, "vocab_size": 92_553,
    }));
    check("internvl2.5-8b", &config, &INTERNVL_ORIGINAL);
}

#[test]
fn gemma_3_4b() {
    let config = serde_json::json!({
        "model_type": "gemma3", "boi_token_index": 255_999, "eoi_token_index": 256_000,
        "image_token_index": 262_144, "mm_tokens_per_image": 256,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34,
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" }, "sliding_window": 1024,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
            "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": false,
        },
    });
    let differences = LoadDifferences { not_as_stored: &[], more_tables: 1, n_computed: 0 };
    check("gemma-3-4b", &config, &differences);
}

#[test]
fn vit_gpt2() {
    let config = serde_json::json!({
        "model_type": "vision-encoder-decoder", "decoder_start_token_id": 50256, "is_encoder_decoder": true,
        "encoder": {
            "model_type": "vit", "hidden_act": "gelu", "hidden_size": 768, "image_size": 224, "intermediate_size": 3072,
            "layer_norm_eps": 1e-12, "num_attention_heads": 12, "num_channels": 3, "num_hidden_layers": 12,
            "patch_size": 16, "qkv_bias": true,
        },
        "decoder": {
            "model_type": "gpt2", "activation_function": "gelu_new", "add_cross_attention": true,
            "cross_attention_hidden_size": null, "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_embd": 768,
            "n_head": 12, "n_inner": null, "n_layer": 12, "n_positions": 1024, "reorder_and_upcast_attn": false,
            "scale_attn_by_inverse_layer_idx": false, "scale_attn_weights": true, "vocab_size": 50257,
        },
    });
    let differences = LoadDifferences { not_as_stored: &[], more_tables: 1, n_computed: 0 };
    check("vit-gpt2", &config, &differences);
}

#[test]
fn swinv2_tiny() {
    let config = serde_json::json!({
        "model_type": "vision-encoder-decoder", "is_encoder_decoder": true,
        "encoder": {
            "model_type": "swinv2", "depths": [2, 2, 6, 2], "embed_dim": 96, "encoder_stride": 32, "hidden_act": "gelu",
            "hidden_size": 768, "image_size": 256, "layer_norm_eps": 1e-5, "mlp_ratio": 4.0, "num_channels": 3,
            "num_heads": [3, 6, 12, 24], "num_layers": 4, "patch_size": 4, "pretrained_window_sizes": [0, 0, 0, 0],
            "qkv_bias": true, "use_absolute_embeddings": false, "window_size": 8,
        },
        "decoder": {
            "model_type": "trocr", "activation_function": "gelu", "cross_attention_hidden_size": null, "d_model": 1024,
            "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 12,
            "layernorm_embedding": true, "max_position_embeddings": 512, "scale_embedding": false,
            "use_learned_position_embeddings": true, "vocab_size": 50265,
        },
    });
    let differences = LoadDifferences {
        not_as_stored: &[
            "continuous_position_bias_mlp",
            "logit_scale",
            "relative_coords_table",
            "relative_position_index",
        ],
        more_tables: 1,
        // Ones of a head and factors of all heads in each layer.
        n_computed: 4800,
    };
    check("swinv2-tiny-trocr", &config, &differences);
}

#[test]
fn nougat_base() {
    let config = serde_json::json!({
        "model_type": "vision-encoder-decoder", "is_encoder_decoder": true,
        "encoder": {
            "model_type": "donut-swin", "depths": [2, 2, 14, 2], "embed_dim": 128, "hidden_act": "gelu",
            "hidden_size": 1024, "image_size": [896, 672], "layer_norm_eps": 1e-5, "mlp_ratio": 4.0,
            "num_channels": 3, "num_heads": [4, 8, 16, 32], "num_layers": 4, "patch_size": 4, "qkv_bias": true,
            "use_absolute_embeddings": false, "window_size": 7,
        },
        "decoder": {
            "model_type": "mbart", "activation_function": "gelu", "add_final_layer_norm": true, "d_model": 1024,
            "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layers": 10,
            "max_position_embeddings": 4096, "scale_embedding": true, "vocab_size": 50000,
        },
    });
    let differences = LoadDifferences {
        not_as_stored: &["relative_position_bias_table", "relative_position_index"],
        more_tables: 1,
        n_computed: 0,
    };
    check("nougat-base", &config, &differences);
}

/// The configuration beside the weights has no `model_type`.
#[test]
fn cogagent_chat_hf() {
    let config = serde_json::json!({
        "architectures": ["CogAgentForCausalLM"], "bos_token_id": 1, "cross_compute_hidden_size": 1024,
        "cross_hidden_size": 1024, "cross_image_size": 1120, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11_008,
        "max_position_embeddings": 2048, "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "template_version": "chat", "tie_word_embeddings": false, "use_cache": true,
        "vision_config": {
            "dropout_prob": 0.0, "hidden_act": "gelu", "hidden_size": 1792, "image_size": 224, "in_channels": 3,
            "intermediate_size": 15_360, "layer_norm_eps": 1e-6, "num_heads": 16, "num_hidden_layers": 63,
            "num_positions": 257, "patch_size": 14,
        },
        "vocab_size": 32_000,
    });
    let differences = LoadDifferences {
        // Rows around the image are put there by the host; the last block, its norm and its head are never run.
        not_as_stored: &["vision.boi", "vision.eoi", "blocks.23.", "vit.model.head.", "vit.model.norm."],
        more_tables: 0,
        // The ones that an activation is the gate of.
        n_computed: 4096,
    };
    check("cogagent-chat-hf", &config, &differences);
}
