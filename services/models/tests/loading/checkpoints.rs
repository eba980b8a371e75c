//! Directories that hold something else than a model to serve: the error names cause and cure.

use super::{CASE, STORED, golden, tensors, without_weights, write};
use serde_json::{Value, json};
use std::path::Path;
use triptych_kernels::reference::ReferenceBackend;
use triptych_models::{Model, ModelError, ModelSource};

const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n";

fn open(dir: &Path) -> Result<Model, ModelError> {
    Model::open(&ModelSource { dir: dir.to_owned(), name: None, format: STORED, packed: None })
}

/// The refusal before a worker starts, checked to be what loading would say.
fn refusal(dir: &Path) -> String {
    match open(dir) {
        Err(e) => e.to_string(),
        Ok(model) => {
            let early = model.check_weights().expect_err("refused").to_string();
            let late = model.load_decoder(&ReferenceBackend::new()).err().expect("refused").to_string();
            assert_eq!(early, late);
            early
        }
    }
}

fn check(dir: &Path, parts: &[&str]) {
    let error = refusal(dir);
    for part in parts {
        assert!(error.contains(part), "{error}: no {part:?}");
    }
}

#[test]
fn a_whole_directory_passes() {
    open(&golden(CASE)).and_then(|model| model.check_weights()).expect("a golden directory");
}

#[test]
fn weights_of_other_formats_are_named_with_a_way_to_convert_them() {
    for (name, format) in [
        ("consolidated.00.pth", "PyTorch's pickle format (consolidated.00.pth)"),
        ("pytorch_model-00001-of-00002.bin", "PyTorch's pickle format"),
        ("model-q4_k_m.gguf", "GGUF, the format of llama.cpp (model-q4_k_m.gguf)"),
        ("tf_model.h5", "TensorFlow's format"),
        ("flax_model.msgpack", "Flax's format"),
    ] {
        let dir = without_weights(CASE);
        std::fs::write(dir.path().join(name), "x").expect("a file");
        check(dir.path(), &[format, "which is not read", "save_pretrained(NEW_DIR)"]);
    }
    let dir = without_weights(CASE);
    std::fs::write(dir.path().join("training_args.bin"), "x").expect("a file");
    check(
        dir.path(),
        &["has no weights: no model.safetensors, no pytorch_model.bin, and no index of shards"],
    );
    let bare = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(bare.path().join("model.gguf"), "GGUF").expect("a file");
    check(bare.path(), &["GGUF, the format of llama.cpp (model.gguf)"]);
}

#[test]
fn shards_that_are_missing_are_counted() {
    let dir = without_weights(CASE);
    write(dir.path(), "a.safetensors", &tensors());
    let index = json!({ "weight_map": { "x": "a.safetensors", "y": "b.safetensors", "z": "c.safetensors" } });
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).expect("an index");
    check(dir.path(), &["names 3 files, of which 2 are missing, such as b.safetensors", "fetch the rest"]);
}

#[test]
fn git_lfs_pointers_are_named_wherever_they_are() {
    for name in ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"] {
        let dir = without_weights(CASE);
        write(dir.path(), "model.safetensors", &tensors());
        std::fs::write(dir.path().join(name), POINTER).expect("a pointer");
        check(dir.path(), &[name, "is a Git LFS pointer", "git lfs pull"]);
    }
    // What is not read may be a pointer.
    let dir = without_weights(CASE);
    write(dir.path(), "model.safetensors", &tensors());
    std::fs::write(dir.path().join("pytorch_model.bin"), POINTER).expect("a pointer");
    open(dir.path()).and_then(|model| model.check_weights()).expect("a model");
}

#[test]
fn an_adapter_names_its_base_model() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let config = json!({ "peft_type": "LORA", "base_model_name_or_path": "openai/whisper-small", "r": 8 });
    std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).expect("a file");
    std::fs::write(dir.path().join("adapter_model.safetensors"), "x").expect("a file");
    check(dir.path(), &["is a LORA adapter for openai/whisper-small, not a model", "merge_and_unload()"]);
    // Beside a whole model it is not read.
    let dir = without_weights(CASE);
    write(dir.path(), "model.safetensors", &tensors());
    std::fs::write(dir.path().join("adapter_config.json"), config.to_string()).expect("a file");
    open(dir.path()).and_then(|model| model.check_weights()).expect("a model");
}

#[test]
fn quantizations_that_are_not_read_are_named_by_their_method() {
    let with = |edit: &dyn Fn(&mut Value)| {
        let dir = without_weights(CASE);
        write(dir.path(), "model.safetensors", &tensors());
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).expect("config")).expect("JSON");
        edit(&mut config);
        std::fs::write(path, config.to_string()).expect("a written file");
        dir
    };
    for (settings, method) in [
        (json!({ "quant_method": "gptq", "bits": 8 }), "gptq, 8 bits"),
        (json!({ "quant_method": "bitsandbytes", "load_in_8bit": true }), "bitsandbytes, load_in_8bit"),
        (json!({ "load_in_4bit": true }), "load_in_4bit"),
        (json!({ "quant_method": "compressed-tensors", "format": "marlin-24" }), "compressed-tensors"),
        (json!({}), "of a method it does not name"),
    ] {
        let dir = with(&|config| config["quantization_config"] = settings.clone());
        let cause = format!("is a quantized checkpoint (quantization_config: {method}), which is not read");
        check(
            dir.path(),
            &[&cause, "serve the checkpoint that it was made from, with --precision int8 or int4"],
        );
    }
    let dir =
        with(&|config| config["text_config"] = json!({ "quantization_config": { "quant_method": "aqlm" } }));
    check(dir.path(), &["(text_config.quantization_config: aqlm)"]);
    let dir = with(&|_| ());
    std::fs::write(dir.path().join("quantize_config.json"), "{}").expect("a file");
    check(dir.path(), &["(quantize_config.json: gptq)"]);
}
