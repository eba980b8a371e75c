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

#[test]
fn unsupported_settings_are_refused_by_key() {
    let check = |case: &str, pointer: &str, value: Value, expect: &str| {
        let dir = without_weights(case);
        set(dir.path(), "config.json", pointer, value);
        let source = ModelSource { dir: dir.path().to_owned(), name: None, format: RANDOM, packed: None };
        let error = Model::open(&source).expect_err("refused").to_string();
        let key = pointer.trim_start_matches('/').replace('/', ".");
        assert!(error.starts_with(&format!("config.json: {key} is ")), "{error}");
        assert!(error.contains(expect), "{error}");
    };
    check(
        "trocr_vit",
        "/encoder/model_type",
        "clip_vision_model".into(),
        "vit, deit, beit, swin, donut-swin",
    );
    check("trocr_vit", "/decoder/model_type", "gpt2".into(), "trocr, mbart");
    check("trocr_vit", "/decoder/cross_attention_hidden_size", 40.into(), "24, the encoder's width");
    check("trocr_vit", "/encoder/patch_size", json!([8, 4]), "the same down and across");
    check("trocr_vit", "/encoder/num_channels", 1.into(), "expected 3");
    check("trocr_vit", "/encoder/hidden_act", "mish".into(), "gelu");
    check("trocr_beit", "/encoder/image_size", json!([32, 24]), "a square");
    check("trocr_beit", "/encoder/use_shared_relative_position_bias", true.into(), "false beside");
    check("donut_shifted", "/encoder/use_absolute_embeddings", true.into(), "expected false");
    check("donut_shifted", "/encoder/depths", json!([2]), "as many as in num_heads");
    check("florence_windows", "/text_config/model_type", "t5".into(), "expected bart");
    check("florence_windows", "/vision_config/projection_dim", 20.into(), "16, d_model");
    check("florence_windows", "/vision_config/patch_prenorm", json!([true]), "2 truth values");
    check("florence_windows", "/vision_config/num_groups", json!([3, 4]), "a divisor of 8");
    check("florence_windows", "/vision_config/patch_stride", json!([4, 0]), "numbers from 1");
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
    check("trocr_vit", json!({ "height": 32, "width": 40 }), "32 by 40");
    check("trocr_vit", json!({ "shortest_edge": 32 }), "as the image has it, expected 32 by 32");
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

    let dir = changed("florence_windows", "model.language_model.decoder.layers.0.fc1.weight");
    set(dir.path(), "config.json", "/text_config/scale_embedding", true.into());
    assert_ne!(of(dir.path()), of(&golden("florence_windows")), "settings of the text model");
}
