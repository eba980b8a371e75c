//! The real sizes: every tensor of a published model is found under its name, in its shape, and used.
//!
//! Shapes are those of `tests/golden/names`; weights are a file of the right length that nobody fills.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use tempfile::TempDir;
use triptych_core::Modality;
use triptych_kernels::cpu::Precision;
use triptych_models::LoadFormat;
use triptych_models::decoder::TransformerDecoder;
use triptych_models::encoder::TransformerEncoder;
use triptych_models::family::{Config, Family};
use triptych_models::model::Tally;
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
    assert_eq!(spec.encoder.modality, modality);
    let weights = Weights::open(dir.path(), LoadFormat::Safetensors).expect("a header");
    let backend = Tally::new(Precision::F32).expect("a CPU");
    TransformerEncoder::load(&spec.encoder, &weights, &backend).expect("encoder tensors");
    TransformerDecoder::load(&spec.decoder, &weights, &backend).expect("decoder tensors");
    let stored: usize = shapes.values().map(|s| s.iter().product::<usize>()).sum();
    // The token table is the head as well, and so is loaded twice.
    assert!(spec.decoder.head.tied);
    assert_eq!(backend.taken().n_elements, stored + spec.decoder.vocab * spec.decoder.stack.hidden, "{name}");
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
