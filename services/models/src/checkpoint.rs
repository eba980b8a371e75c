//! Directories that hold something else than a model to serve, each refused with its cause and its cure.
//!
//! Adapters, checkpoints of a quantization that is not read, Git LFS pointers, and weights in formats that are not read. It looks at names and
//! at the starts of small files; it knows no family and reads no tensor.

use crate::error::ModelError;
use crate::files::JsonFile;
use crate::quantization::Quantization;
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// The first bytes of a Git LFS pointer
/// (<https://github.com/git-lfs/git-lfs/blob/v3.5.0/docs/spec.md>).
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A pointer is smaller than this.
const MAX_POINTER_BYTES: u64 = 1024;

/// Endings of the files that are read beside the weights.
const READ: [&str; 5] = ["json", "jinja", "model", "txt", "spm"];

/// Weights of other formats: how their names end, what they are called, and the reason.
const OTHER_WEIGHTS: [(&str, &str, &str); 7] = [
    (".bin", PICKLE, "only pytorch_model.bin, or the shards of pytorch_model.bin.index.json, are read"),
    (".pt", PICKLE, "only pytorch_model.bin, or the shards of pytorch_model.bin.index.json, are read"),
    (".pth", PICKLE, "only pytorch_model.bin, or the shards of pytorch_model.bin.index.json, are read"),
    (".gguf", "GGUF, the format of llama.cpp", "it is read by llama.cpp and its relatives"),
    (".h5", "TensorFlow's format", "it is read by TensorFlow"),
    (".msgpack", "Flax's format", "it is read by Flax"),
    (".onnx", "ONNX", "it is read by ONNX runtimes"),
];

/// Weights that are read: one of these files, or the shards that it lists.
const WEIGHTS: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];

const PICKLE: &str = "PyTorch's pickle format";

/// Cure for weights in another format.
pub(crate) const CONVERT: &str = "convert them with transformers, AutoModel.from_pretrained(DIR).save_pretrained(NEW_DIR), with the \
                       class of config.json's architectures in the place of AutoModel, or take a revision of the model \
                       that has *.safetensors";

/// Refuses a directory that is an adapter, a checkpoint of a quantization that is not read, or a clone without its large files. Weights are not
/// looked at: see [`no_weights`].
///
/// # Errors
/// [`ModelError::Checkpoint`], [`ModelError::File`] for a directory that cannot be listed.
pub(crate) fn check(dir: &Path) -> Result<(), ModelError> {
    let entries = entries(dir)?;
    entries.iter().filter(|path| ends_with(path, &READ)).try_for_each(|path| check_pointer(path))?;
    check_adapter(dir)?;
    if !dir.join("config.json").exists() && entries.iter().any(|path| ends_with(path, &["gguf"])) {
        return Err(no_weights(dir));
    }
    Quantization::of(dir).map(drop)
}

/// Refuses a file that is a Git LFS pointer. A file that cannot be read is left to its reader.
///
/// # Errors
/// [`ModelError::Checkpoint`].
pub(crate) fn check_pointer(path: &Path) -> Result<(), ModelError> {
    let mut start = [0; POINTER.len()];
    let is_small = std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() < MAX_POINTER_BYTES);
    let mut read = || File::open(path)?.read_exact(&mut start);
    if !is_small || read().is_err() || start.as_slice() != POINTER {
        return Ok(());
    }
    Err(ModelError::Checkpoint {
        path: path.to_owned(),
        found: "is a Git LFS pointer, not the file: the repository was cloned without Git LFS".into(),
        cure: "run `git lfs install && git lfs pull` there, or fetch the model with `hf download OWNER/NAME`"
            .into(),
    })
}

/// The error for a directory without weights that are read: it names those that are there instead.
pub(crate) fn no_weights(dir: &Path) -> ModelError {
    let names: Vec<String> = entries(dir).unwrap_or_default().iter().filter_map(|path| name(path)).collect();
    for (ending, format, reason) in OTHER_WEIGHTS {
        let of_it = names.iter().filter(|name| name.ends_with(ending) && *name != "training_args.bin");
        if let Some(first) = of_it.min() {
            return ModelError::Checkpoint {
                path: dir.to_owned(),
                found: format!("has its weights in {format} ({first}), which is not read: {reason}"),
                cure: CONVERT.into(),
            };
        }
    }
    ModelError::Checkpoint {
        path: dir.to_owned(),
        found: "has no weights: no model.safetensors, no pytorch_model.bin, and no index of shards".into(),
        cure: "fetch them, or start with --load-format dummy for random ones".into(),
    }
}

/// An adapter is not a model: its weights are differences to those of a base model.
fn check_adapter(dir: &Path) -> Result<(), ModelError> {
    const NAME: &str = "adapter_config.json";
    if !dir.join(NAME).exists() || WEIGHTS.iter().any(|name| dir.join(name).exists()) {
        return Ok(());
    }
    let file = JsonFile::read(dir, NAME)?;
    let text = |key: &str| file.get(key).and_then(Value::as_str);
    let base = text("base_model_name_or_path").unwrap_or("its base model");
    Err(ModelError::Checkpoint {
        path: dir.to_owned(),
        found: format!("is a {} adapter for {base}, not a model", text("peft_type").unwrap_or("PEFT")),
        cure: "serve its base model with --lora NAME=DIR, or merge it into that (PEFT: merge_and_unload(), then \
               save_pretrained(NEW_DIR)) and serve that directory"
            .into(),
    })
}

fn ends_with(path: &Path, endings: &[&str]) -> bool {
    path.extension().and_then(|ending| ending.to_str()).is_some_and(|ending| endings.contains(&ending))
}

/// Paths of the entries of a directory.
fn entries(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let failed = |source| ModelError::File { path: dir.to_owned(), source };
    std::fs::read_dir(dir).map_err(failed)?.map(|entry| Ok(entry.map_err(failed)?.path())).collect()
}

fn name(path: &Path) -> Option<String> {
    Some(path.file_name()?.to_str()?.to_owned())
}
