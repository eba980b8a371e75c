//! Image encoders with a text decoder: what is refused, and what the encoder's identity covers.

use super::{golden, open, without_weights};
use serde_json::{Value, json};
use std::path::Path;
use triptych_core::{DType, Modality};
use triptych_models::{LoadFormat, Model, ModelSource};

const RANDOM: LoadFormat = LoadFormat::Dummy { seed: 1 };

fn set(dir: &Path, file: &str, pointer: &str, value: Value) {
    let path = dir.join(file);
    let mut json: Value = serde_json::from_slice(&std::fs::read(&path).expect("a file")).expect("JSON");
    let (parent, key) = pointer.rsplit_once('/').expect("a pointer");
    json.pointer_mut(parent).expect("an object")[key] = value;
    std::fs::write(&path, json.to_string()).expect("a written file");
}

/// Fails unless a value of a case's configuration is refused by its key.
fn check_key(case: &str, pointer: &str, value: Value, expect: &str) {
    let dir = without_weights(case);
    set(dir.path(), "config.json", pointer, value);
    let source = ModelSource { dir: dir.path().to_owned(), name: None, format: RANDOM, packed: None };
    let error = Model::open(&source).expect_err("refused").to_string();
    let key = pointer.trim_start_matches('/').replace('/', ".");
    assert!(error.starts_with(&format!("config.json: {key} is ")), "{error}");
    assert!(error.contains(expect), "{error}");
}

#[test]
fn unsupported_settings_of_dinov2_and_bert_are_refused_by_key() {
    let check = check_key;
    check("dinov2_trocr", "/encoder/image_size", json!([32, 40]), "a square");
    check("registers_larger", "/encoder/num_register_tokens", 0.into(), "expected");
    check("vit_bert", "/decoder/is_decoder", false.into(), "expected true");
    check("vit_bert", "/decoder/add_cross_attention", false.into(), "expected true");
    check("vit_bert", "/decoder/position_embedding_type", "relative_key".into(), "expected absolute");
    check("vit_bert", "/decoder/cross_attention_hidden_size", 40.into(), "24, hidden_size");
    check(
        "deit_roberta_projected",
        "/decoder/max_position_embeddings",
        2.into(),
        "more than 298, pad_token_id + 1",
    );
    check("bert2bert", "/encoder/model_type", "albert".into(), "bert, roberta");
    check("bert2bert", "/decoder/model_type", "gpt2".into(), "bert, roberta");
    check("bert2bert", "/encoder/is_decoder", true.into(), "expected false");
}

#[test]
fn unsupported_settings_are_refused_by_key() {
    let check = check_key;
    check(
        "trocr_vit",
        "/encoder/model_type",
        "pvt".into(),
        "vit, deit, beit, dinov2, dinov2_with_registers, clip_vision_model, swin, swinv2, donut-swin",
    );
    check("trocr_vit", "/decoder/model_type", "opt".into(), "trocr, mbart, gpt2, bert, roberta");
    check("vit_gpt2", "/decoder/add_cross_attention", false.into(), "expected true");
    check("vit_gpt2", "/decoder/scale_attn_by_inverse_layer_idx", true.into(), "expected false");
    check("vit_gpt2", "/decoder/n_head", 5.into(), "a divisor of 24");
    check("vit_gpt2", "/decoder/cross_attention_hidden_size", 40.into(), "24, n_embd");
    check("trocr_vit", "/decoder/cross_attention_hidden_size", 40.into(), "24, the encoder's width");
    check("trocr_vit", "/encoder/patch_size", json!([8, 4]), "the same down and across");
    check("trocr_vit", "/encoder/num_channels", 1.into(), "expected 3");
    check("trocr_vit", "/encoder/hidden_act", "mish".into(), "gelu");
    check("trocr_beit", "/encoder/image_size", json!([32, 24]), "a square");
    check("trocr_beit", "/encoder/use_shared_relative_position_bias", true.into(), "false beside");
    check("donut_shifted", "/encoder/use_absolute_embeddings", true.into(), "expected false");
    check("donut_shifted", "/encoder/depths", json!([2]), "as many as in num_heads");
    check("florence_windows", "/text_config/model_type", "t5".into(), "bart or florence2_language");
    check("florence_windows", "/vision_config/projection_dim", 20.into(), "16, d_model");
    check("florence_windows", "/vision_config/patch_prenorm", json!([true]), "2 truth values");
    check("florence_windows", "/vision_config/num_groups", json!([3, 4]), "a divisor of 8");
    check("florence_windows", "/vision_config/patch_stride", json!([4, 0]), "numbers from 1");
    check("swinv2_padded", "/encoder/window_size", 65.into(), "up to 64");
    check("swinv2_padded", "/encoder/pretrained_window_sizes", json!([1, 0, 0]), "0 or 2 and more");
    check("swinv2_padded", "/encoder/pretrained_window_sizes", json!([0]), "3 sizes");
    check("swinv2_padded", "/encoder/use_absolute_embeddings", true.into(), "expected false");
    let original = "florence_original";
    check(
        original,
        "/vision_config/image_feature_source",
        json!(["temporal_avg_pool"]),
        "spatial_avg_pool and",
    );
    check(original, "/vision_config/image_pos_embed", json!({ "type": "sine" }), "type learned_abs_2d");
    check(original, "/vision_config/visual_temporal_embedding", json!({}), "type COSINE");
    check(original, "/vision_config/dim_embed", json!([]), "1 to 8 widths");
    check("pixtral_silu", "/vision_feature_select_strategy", "default".into(), "full, for a tower without");
    check("pixtral_silu", "/vision_feature_layer", json!([-1, -2]), "one layer");
    check("pixtral_silu", "/vision_feature_layer", 4.into(), "one of 3 layers");
    check("pixtral_silu", "/vision_config/head_dim", 8.into(), "16, hidden_size by heads");
    check("pixtral_silu", "/vision_config/rope_type", "yarn".into(), "default or axial");
    check("mistral3_merged", "/vision_config/model_type", "siglip_vision_model".into(), "expected pixtral");
    check("glm_ocr_mrope", "/text_config/attention_bias", true.into(), "expected false");
    check("glm_ocr_mrope", "/text_config/rms_norm_eps", Value::Null, "a value");
    check("glm_ocr_mrope", "/vision_config/out_hidden_size", 32.into(), "48, hidden_size of text_config");
    check("glm_ocr_mrope", "/vision_config/temporal_patch_size", 1.into(), "2 or more");
    check("mistral3_merged", "/text_config/model_type", "ministral3".into(), "llama, mistral");
}

#[test]
fn towers_and_attention_that_deepseek_ocr_does_not_have_are_refused_by_key() {
    let check = |file: &str, pointer: &str, value: Value, expect: &str| {
        let dir = without_weights("deepseek_ocr2_windows");
        set(dir.path(), file, pointer, value);
        let source = ModelSource { dir: dir.path().to_owned(), name: None, format: RANDOM, packed: None };
        let error = Model::open(&source).expect_err("refused").to_string();
        assert_eq!(error, format!("{file}: {}{expect}", pointer.trim_start_matches('/').replace('/', ".")));
    };
    let file = "config.json";
    check(file, "/text_config/use_mla", true.into(), " is true, expected false");
    let expect = " is 512, expected null: attention without latent keys and values";
    check(file, "/text_config/kv_lora_rank", 512.into(), expect);
    let method = "group_limited_greedy";
    check(file, "/text_config/topk_method", method.into(), &format!(" is {method}, expected greedy"));
    let kinds = " is [\"dense\"], expected 2 of dense and sparse";
    check(file, "/text_config/mlp_layer_types", json!(["dense"]), kinds);
    check(file, "/vision_config/sam_config/use_rel_pos", false.into(), " is false, expected true");
    check(file, "/vision_config/sam_config/window_size", 1.into(), " is 1, expected 2 or more");
    let square = " is [30, 30], expected a square whose side is a multiple of four patches of 2 pixels";
    check(file, "/vision_config/sam_config/image_size", 30.into(), square);
    let channels = " is [12, 20], expected two sizes, the second encoder_config's hidden_size, 24";
    check(file, "/vision_config/sam_config/downsample_channels", json!([12, 20]), channels);
    let kind = " is \"clip\", expected deepseek_ocr2_encoder";
    check(file, "/vision_config/encoder_config/model_type", "clip".into(), kind);
    let window = " is true, expected false";
    check(file, "/vision_config/encoder_config/use_sliding_window", true.into(), window);
    let file = "preprocessor_config.json";
    check(file, "/crop_to_patches", false.into(), " is false, expected true");
    check(file, "/max_patches", 9.into(), " is 9, expected 6, which is asked for whatever it is");
    let part = " is 32, expected 24, 0.75 of image_size in config.json";
    check(file, "/tile_size", 32.into(), part);
    let whole = " is {\"height\":16,\"width\":16}, expected 32 by 32, as image_size in config.json";
    check(file, "/size", json!({ "height": 16, "width": 16 }), whole);
    let colour = " is [127,127], expected three integers from 0 to 255";
    check(file, "/background_color", json!([127, 127]), colour);
    let file = "processor_config.json";
    check(file, "/patch_size", 16.into(), " is 16, expected 2, as config.json has it");
    check(file, "/downsample_ratio", 2.into(), " is 2, expected 4, as config.json has it");
}

#[test]
fn rotations_that_are_not_served_are_refused_by_key() {
    let check = |key: &str, value: Value, expect: &str| {
        let dir = without_weights("glm_ocr_mrope");
        set(dir.path(), "config.json", &format!("/text_config/rope_parameters/{key}"), value);
        let source = ModelSource { dir: dir.path().to_owned(), name: None, format: RANDOM, packed: None };
        let error = Model::open(&source).expect_err("refused").to_string();
        assert_eq!(error, format!("config.json: text_config.{key} is {expect}"));
    };
    check("partial_rotary_factor", json!(0.5), "0.5, expected 1");
    check("mrope_section", json!([4, 4]), "[4, 4], expected three numbers that add up to 8");
    check(
        "rope_type",
        "longrope".into(),
        "longrope, expected default, dynamic, mrope, linear, yarn or llama3",
    );
}

#[test]
fn a_processor_of_other_squares_than_the_encoders_is_refused() {
    let check = |file: &str, pointer: &str, value: Value, expect: &str| {
        let dir = without_weights("mistral3_merged");
        set(dir.path(), file, pointer, value);
        let source = ModelSource { dir: dir.path().to_owned(), name: None, format: RANDOM, packed: None };
        let error = Model::open(&source).expect_err("refused").to_string();
        assert_eq!(error, format!("{file}: {expect}"));
    };
    let file = "processor_config.json";
    check(file, "/patch_size", 14.into(), "patch_size is 14, expected 7, as in config.json");
    check(file, "/spatial_merge_size", 1.into(), "spatial_merge_size is 1, expected 2, as in config.json");
    let file = "preprocessor_config.json";
    check(file, "/size/longest_edge", 0.into(), "size.longest_edge is 0, expected 1 to 8192");
    check(file, "/size", json!({ "height": 8 }), "size is {\"height\":8}, expected a longest_edge");
    check(file, "/do_resize", false.into(), "do_resize is false, expected true");
    check(file, "/image_std", json!([0.0, 1.0, 1.0]), "image_std is [0.0,1.0,1.0], expected numbers above 0");
}

#[test]
fn a_processor_whose_canvas_the_encoder_does_not_read_is_refused() {
    let check = |case: &str, size: Value, expect: &str| {
        let dir = without_weights(case);
        set(dir.path(), "preprocessor_config.json", "/size", size);
        let source = ModelSource { dir: dir.path().to_owned(), name: None, format: RANDOM, packed: None };
        let error = Model::open(&source).expect_err("refused").to_string();
        assert!(error.starts_with(&format!("preprocessor_config.json: size is {expect}")), "{error}");
    };
    check("trocr_vit", json!({ "height": 7, "width": 40 }), "7 by 40");
    check("trocr_vit", json!({ "shortest_edge": 32 }), "as the image has it, expected 32 by 32");
    // Positions of a grid that is no square are not resampled, nor are biases of scores.
    check("trocr_beit_shared", json!({ "height": 48, "width": 32 }), "48 by 32");
    // A window of the second stage does not fit.
    check("donut_shifted", json!({ "height": 72, "width": 16 }), "72 by 16");
    // A larger grid than learned positions.
    check("florence_windows", json!({ "height": 32, "width": 112 }), "32 by 112");
}

/// A copy of a golden directory whose stored tensor `name` has one bit changed.
fn changed(case: &str, name: &str) -> tempfile::TempDir {
    let dir = without_weights(case);
    let mut bytes = std::fs::read(golden(case).join("model.safetensors")).expect("golden weights");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("a header");
    let start = header[name]["data_offsets"][0].as_u64().unwrap_or_else(|| panic!("no {name}")) as usize;
    bytes[8 + header_len + start] ^= 1;
    std::fs::write(dir.path().join("model.safetensors"), bytes).expect("written weights");
    dir
}

#[test]
fn the_fingerprint_covers_every_part_of_the_encoder() {
    let of = |dir: &Path| {
        let model = open(dir, LoadFormat::Safetensors);
        model.fingerprint(Modality::Image, DType::F32).expect("a fingerprint")
    };
    let check = |case: &str, tensor: &str, same: bool| {
        assert_eq!(of(changed(case, tensor).path()) == of(&golden(case)), same, "{case} {tensor}");
    };
    check("trocr_deit_projected", "encoder.embeddings.distillation_token", false);
    check("trocr_deit_projected", "enc_to_dec_proj.weight", false);
    check("trocr_deit_projected", "decoder.model.decoder.layers.0.fc1.weight", true);
    check("florence_windows", "model.vision_tower.convs.0.conv.weight", false);
    check("florence_windows", "model.multi_modal_projector.image_projection.weight", false);
    check("florence_windows", "model.language_model.encoder.layers.0.fc1.weight", false);
    check("florence_windows", "model.language_model.shared.weight", false);
    check("florence_windows", "model.language_model.decoder.layers.0.fc1.weight", true);
    check("florence_original", "vision_tower.convs.0.proj.weight", false);
    check("florence_original", "image_projection", false);
    check("florence_original", "image_pos_embed.row_embeddings.weight", false);
    check("florence_original", "language_model.model.encoder.layers.0.fc1.weight", false);
    check("florence_original", "language_model.model.decoder.layers.0.fc1.weight", true);
    check("vit_gpt2", "decoder.transformer.h.0.attn.c_attn.weight", true);

    let dir = changed("florence_windows", "model.language_model.decoder.layers.0.fc1.weight");
    set(dir.path(), "config.json", "/text_config/scale_embedding", true.into());
    assert_ne!(of(dir.path()), of(&golden("florence_windows")), "settings of the text model");
}
