//! Model directories as operators have them: shards, parts, random weights, names of published models.

#[path = "loading/checkpoints.rs"]
mod checkpoints;
#[path = "loading/inventory.rs"]
mod inventory;
#[path = "loading/packed.rs"]
mod packed;
#[path = "loading/published.rs"]
mod published;
#[path = "loading/published_decoders.rs"]
mod published_decoders;
#[path = "loading/published_text.rs"]
mod published_text;
#[path = "loading/published_vision.rs"]
mod published_vision;
#[path = "loading/quantized.rs"]
mod quantized;
#[path = "loading/saved.rs"]
mod saved;
#[path = "loading/torch.rs"]
mod torch;
#[path = "loading/towers.rs"]
mod towers;
#[path = "loading/vision.rs"]
mod vision;

use safetensors::tensor::{TensorView, serialize};
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use triptych_core::{DType, Extent, Fingerprint, Modality};
use triptych_kernels::Precision;
use triptych_kernels::reference::ReferenceBackend;
use triptych_models::family::Family;
use triptych_models::preprocess::{EncoderInput, Features};
use triptych_models::weights::{TensorRole, Weights};
use triptych_models::{LoadFormat, Model, ModelError, ModelSource};

const CASE: &str = "whisper_en_odd_heads";
const STORED: LoadFormat = LoadFormat::Safetensors;

type Tensors = BTreeMap<String, (Vec<usize>, Vec<u8>)>;

fn golden(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(case).join("model")
}

/// A copy of a golden directory without its weights.
fn without_weights(case: &str) -> TempDir {
    let copy = tempfile::tempdir().expect("a temporary directory");
    for entry in std::fs::read_dir(golden(case)).expect("a golden directory") {
        let from = entry.expect("an entry").path();
        if from.extension().is_some_and(|e| e == "json") {
            std::fs::copy(&from, copy.path().join(from.file_name().expect("a file"))).expect("a copy");
        }
    }
    copy
}

/// The tensors of the f32 case.
fn tensors() -> Tensors {
    let bytes = std::fs::read(golden(CASE).join("model.safetensors")).expect("golden weights");
    let file = SafeTensors::deserialize(&bytes).expect("golden weights are whole");
    file.iter().map(|(name, t)| (name.to_owned(), (t.shape().to_vec(), t.data().to_vec()))).collect()
}

fn write(dir: &Path, file: &str, tensors: &Tensors) {
    let views = tensors.iter().map(|(name, (shape, data))| {
        (name, TensorView::new(Dtype::F32, shape.clone(), data).expect("data of the shape"))
    });
    std::fs::write(dir.join(file), serialize(views, None).expect("tensors")).expect("a written file");
}

fn open(dir: &Path, format: LoadFormat) -> Model {
    Model::open(&ModelSource { dir: dir.to_owned(), name: None, format, packed: None }).expect("a model")
}

fn part(tensors: &Tensors, of: &str) -> Tensors {
    tensors.iter().filter(|(n, _)| n.contains(of)).map(|(n, t)| (n.clone(), t.clone())).collect()
}

fn load_both(model: &Model) -> [Option<ModelError>; 2] {
    let backend = ReferenceBackend::new();
    [model.load_encoder(Modality::Audio, &backend).err(), model.load_decoder(&backend).err()]
}

fn fingerprint(dir: &Path) -> Fingerprint {
    open(dir, STORED).fingerprint(Modality::Audio, DType::F32).expect("weights")
}

#[test]
fn each_stage_loads_from_a_directory_with_its_own_tensors_only() {
    let dir = without_weights(CASE);
    write(dir.path(), "model.safetensors", &part(&tensors(), "encoder."));
    let [encoder, decoder] = load_both(&open(dir.path(), STORED));
    assert!(encoder.is_none(), "{encoder:?}");
    let Some(ModelError::MissingTensor { name, tried }) = decoder else { panic!("{decoder:?}") };
    assert_eq!(name, "model.decoder.embed_positions.weight");
    assert_eq!(tried, ["model.decoder.embed_positions.weight", "decoder.embed_positions.weight"]);

    write(dir.path(), "model.safetensors", &part(&tensors(), "decoder."));
    let [encoder, decoder] = load_both(&open(dir.path(), STORED));
    assert!(matches!(encoder, Some(ModelError::MissingTensor { .. })), "{encoder:?}");
    assert!(decoder.is_none(), "{decoder:?}");
}

#[test]
fn shards_are_read_through_their_index() {
    let dir = without_weights(CASE);
    let mut map = serde_json::Map::new();
    for (file, of) in [("model-00001-of-00002.safetensors", "encoder."), ("b.safetensors", "decoder.")] {
        let part = part(&tensors(), of);
        map.extend(part.keys().map(|name| (name.clone(), file.into())));
        write(dir.path(), file, &part);
    }
    let index = dir.path().join("model.safetensors.index.json");
    std::fs::write(&index, serde_json::json!({ "weight_map": map }).to_string()).expect("an index");
    assert!(load_both(&open(dir.path(), STORED)).iter().all(Option::is_none));
    assert_eq!(fingerprint(dir.path()), fingerprint(&golden(CASE)));
}

#[test]
fn names_without_the_outer_prefix_are_found() {
    let dir = without_weights(CASE);
    let bare = tensors().into_iter().map(|(n, t)| (n.replacen("model.", "", 1), t)).collect();
    write(dir.path(), "model.safetensors", &bare);
    assert!(load_both(&open(dir.path(), STORED)).iter().all(Option::is_none));
    assert_eq!(fingerprint(dir.path()), fingerprint(&golden(CASE)));
}

#[test]
fn an_index_cannot_name_files_outside_its_directory() {
    let dir = without_weights(CASE);
    for bad in ["../model.safetensors", "/etc/passwd", ".."] {
        let index = serde_json::json!({ "weight_map": { "x": bad } }).to_string();
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).expect("an index");
        let [encoder, _] = load_both(&open(dir.path(), STORED));
        assert!(matches!(encoder, Some(ModelError::Format { .. })), "{bad}: {encoder:?}");
    }
}

#[test]
fn a_tensor_of_another_shape_is_named_with_both_shapes() {
    let dir = without_weights(CASE);
    let mut wrong = tensors();
    let name = "model.encoder.layers.0.fc1.weight";
    wrong.get_mut(name).expect("a tensor").0 = vec![36, 100];
    write(dir.path(), "model.safetensors", &wrong);
    let [encoder, _] = load_both(&open(dir.path(), STORED));
    let text = encoder.expect("an error").to_string();
    assert_eq!(text, format!("tensor {name} is [36, 100], the configuration says [100, 36]"));
}

#[test]
fn weights_cut_anywhere_are_an_error() {
    let dir = without_weights(CASE);
    let whole = std::fs::read(golden(CASE).join("model.safetensors")).expect("golden weights");
    for len in [0, 1, 7, 8, 9, 200, whole.len() - 1] {
        std::fs::write(dir.path().join("model.safetensors"), &whole[..len]).expect("a written file");
        let [encoder, _] = load_both(&open(dir.path(), STORED));
        assert!(matches!(encoder, Some(ModelError::Format { .. })), "{len} bytes: {encoder:?}");
    }
    std::fs::remove_file(dir.path().join("model.safetensors")).expect("the file was there");
    let [encoder, _] = load_both(&open(dir.path(), STORED));
    assert!(matches!(encoder, Some(ModelError::Checkpoint { .. })), "{encoder:?}");
}

#[test]
fn a_tensor_of_megabytes_is_read_as_a_small_one_is() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    // In the order of their names: neither large one starts at a page, nor ends at one.
    let sizes = [("a", 3), ("b", 300_001), ("c", 5), ("d", 400_003)];
    let value = |i: usize| (i % 8191) as f32;
    let tensors: Tensors = sizes
        .map(|(name, n)| (name.to_owned(), (vec![n], (0..n).flat_map(|i| value(i).to_le_bytes()).collect())))
        .into();
    write(dir.path(), "model.safetensors", &tensors);
    let weights = Weights::open(dir.path(), STORED).expect("weights");
    for (name, n) in sizes {
        let tensor = weights.tensor(&[name.to_owned()], &[n], TensorRole::Matrix).expect(name);
        assert!(tensor.values().into_iter().eq((0..n).map(value)), "{name}");
        let Weights::Stored(stored) = &weights else { panic!("stored weights") };
        let hash = stored.first(&[name.to_owned()]).expect(name).hash();
        assert_eq!(hash, blake3::hash(&tensors[name].1), "{name}");
    }
}

#[test]
fn a_fingerprint_changes_with_what_the_encoder_computes_and_with_nothing_else() {
    let dir = without_weights(CASE);
    let with = |name: &str| {
        let mut tensors = tensors();
        if let Some((_, data)) = tensors.get_mut(name) {
            data[0] ^= 1;
        }
        write(dir.path(), "model.safetensors", &tensors);
        fingerprint(dir.path())
    };
    let same = with("");
    assert_eq!(with("model.decoder.layers.0.fc1.weight"), same);
    assert_ne!(with("model.encoder.layers.0.fc1.weight"), same);
    assert_ne!(with("model.encoder.conv1.bias"), same);

    write(dir.path(), "model.safetensors", &tensors());
    let model = open(dir.path(), STORED);
    assert_ne!(model.fingerprint(Modality::Audio, DType::Bf16).expect("weights"), same);
    // What it is computed in, under one element type of rows.
    let [bf16, int8] = [Precision::Bf16, Precision::Int8]
        .map(|precision| model.fingerprint_in(Modality::Audio, DType::F32, precision).expect("weights"));
    assert!(bf16 != same && int8 != same && bf16 != int8);
    let int4 = model.fingerprint_in(Modality::Audio, DType::F32, Precision::Int4).expect("weights");
    assert_eq!(int4, int8, "four bits are for decoders");
    assert!(matches!(model.fingerprint(Modality::Image, DType::F32), Err(ModelError::Config { .. })));

    let processor = dir.path().join("preprocessor_config.json");
    let text = std::fs::read_to_string(&processor).expect("processor config");
    std::fs::write(&processor, text.replacen('{', "{\"do_normalize\": true,", 1)).expect("a written file");
    assert_ne!(fingerprint(dir.path()), same);
}

#[test]
fn the_fingerprint_of_a_text_encoder_covers_a_shared_table_and_the_tokenizer() {
    const TEXT: &str = "t5_small";
    let dir = without_weights(TEXT);
    let stored = std::fs::read(golden(TEXT).join("model.safetensors")).expect("golden weights");
    let file = SafeTensors::deserialize(&stored).expect("golden weights are whole");
    let all: Tensors =
        file.iter().map(|(name, t)| (name.to_owned(), (t.shape().to_vec(), t.data().to_vec()))).collect();
    let fingerprint = || open(dir.path(), STORED).fingerprint(Modality::Text, DType::F32).expect("weights");
    let with = |name: &str| {
        let mut changed = all.clone();
        if let Some((_, data)) = changed.get_mut(name) {
            data[0] ^= 1;
        }
        write(dir.path(), "model.safetensors", &changed);
        fingerprint()
    };
    let same = with("");
    assert_eq!(with("decoder.block.0.layer.0.SelfAttention.q.weight"), same);
    assert_ne!(with("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"), same);
    assert_ne!(with("shared.weight"), same);
    write(dir.path(), "model.safetensors", &all);
    let path = dir.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).expect("a tokenizer");
    let changed = text.replacen("▁the", "▁thx", 1);
    assert_ne!(changed, text);
    std::fs::write(&path, changed).expect("a written file");
    assert_ne!(fingerprint(), same);
}

#[test]
fn tensors_of_text_models_that_are_missing_are_named() {
    let check = |case: &str, part: &str, expect: &str| {
        let dir = without_weights(case);
        let stored = std::fs::read(golden(case).join("model.safetensors")).expect("golden weights");
        let file = SafeTensors::deserialize(&stored).expect("golden weights are whole");
        let left = file.iter().filter(|(name, _)| !name.contains(part));
        let bytes = serialize(left, None).expect("tensors");
        std::fs::write(dir.path().join("model.safetensors"), bytes).expect("a written file");
        let error = open(dir.path(), STORED).load_decoder(&ReferenceBackend::new()).err();
        let Some(ModelError::MissingTensor { tried, .. }) = error else { panic!("{case}: {error:?}") };
        assert!(tried.iter().any(|name| name == expect), "{tried:?}");
    };
    let bias = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";
    check("t5_small", "decoder.block.0.layer.0.SelfAttention.relative", bias);
    check("t5_small", "shared", "shared.weight");
    check("bart_large_cnn", "shared", "model.shared.weight");
    check("bart_large_cnn", "decoder.embed_positions", "model.decoder.embed_positions.weight");
    check("mbart_50", "decoder.layernorm_embedding", "model.decoder.layernorm_embedding.weight");
    check("marian_two_tables", "decoder.embed_tokens", "model.decoder.embed_tokens.weight");
}

#[test]
fn random_weights_need_no_file_and_are_those_of_their_seed() {
    let dir = without_weights(CASE);
    let rows = |seed| {
        let model = open(dir.path(), LoadFormat::Dummy { seed });
        let backend = ReferenceBackend::new();
        model.load_decoder(&backend).expect("random weights");
        let mut encoder = model.load_encoder(Modality::Audio, &backend).expect("random weights");
        let features = Features::Mel(vec![0.5; 80 * 100]);
        let extent = Extent::windows(1, 1000);
        let rows = encoder.encode(&[&EncoderInput { extent, n_tokens: 50, features }]).expect("rows");
        (model.fingerprint(Modality::Audio, DType::F32).expect("a seed"), rows)
    };
    let one = rows(1);
    let again = rows(1);
    let other = rows(2);
    assert!(one == again);
    assert!(one.0 != other.0 && one.1 != other.1);
    assert!(one.1[0].iter().all(|v| v.is_finite()));
}

#[test]
fn configurations_that_are_not_served_say_what_would_do() {
    let dir = without_weights(CASE);
    let path = dir.path().join("config.json");
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
    let check = |key: &str, value: serde_json::Value, expect: &str| {
        let mut changed = config.clone();
        changed[key] = value;
        std::fs::write(&path, changed.to_string()).expect("a written file");
        let source = ModelSource { dir: dir.path().to_owned(), name: None, format: STORED, packed: None };
        assert_eq!(Model::open(&source).expect_err("a refusal").to_string(), expect);
    };
    let served: Vec<&str> = Family::ALL.iter().map(|family| family.model_type()).collect();
    check(
        "model_type",
        "bert".into(),
        &format!("config.json: model_type is bert, expected {}", served.join(", ")),
    );
    check("d_model", 0.into(), "config.json: d_model is 0, expected an integer from 1");
    check("d_model", serde_json::Value::Null, "config.json: d_model is missing, expected an integer from 1");
    check(
        "encoder_attention_heads",
        7.into(),
        "config.json: encoder_attention_heads is 7, expected a divisor of 36",
    );
    check("scale_embedding", true.into(), "config.json: scale_embedding is true, expected false");
}
