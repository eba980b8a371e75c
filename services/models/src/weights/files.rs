//! The weight files of a directory: which there are, and which of several formats is read.

use super::torch;
use crate::checkpoint::{CONVERT, check_pointer, no_weights};
use crate::error::ModelError;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// File format of weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// <https://github.com/huggingface/safetensors#format>.
    Safetensors,
    /// A ZIP file of `torch.save`.
    Torch,
}

impl WeightFormat {
    /// Formats in the order in which they are looked for.
    const ALL: [Self; 2] = [Self::Safetensors, Self::Torch];

    /// The name of a format.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Safetensors => "safetensors",
            Self::Torch => "torch",
        }
    }

    /// Name of the one file of a model that is not sharded.
    fn single(self) -> &'static str {
        match self {
            Self::Safetensors => "model.safetensors",
            Self::Torch => "pytorch_model.bin",
        }
    }

    /// Name of the file that lists the shards.
    fn index(self) -> &'static str {
        match self {
            Self::Safetensors => "model.safetensors.index.json",
            Self::Torch => "pytorch_model.bin.index.json",
        }
    }

    /// The format of the weights of a directory.
    fn of(dir: &Path) -> Option<Self> {
        let has = |name| dir.join(name).exists();
        Self::ALL.into_iter().find(|format| has(format.index()) || has(format.single()))
    }
}

/// The weight files of a directory; each exists.
///
/// # Errors
/// As [`formatted`].
pub fn files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    formatted(dir).map(|(_, files)| files)
}

/// The weight files of a directory, each of which exists, and their format. Where a directory has both formats,
/// safetensors are read.
///
/// # Errors
/// [`ModelError::Checkpoint`] for weights that are missing, in another format, or Git LFS pointers;
/// [`ModelError::File`] or [`ModelError::Format`] for an index that cannot be read.
pub(super) fn formatted(dir: &Path) -> Result<(WeightFormat, Vec<PathBuf>), ModelError> {
    let format = WeightFormat::of(dir).ok_or_else(|| no_weights(dir))?;
    let index = dir.join(format.index());
    let files: Vec<PathBuf> = match index.exists() {
        true => {
            check_pointer(&index)?;
            shards(&index)?.into_iter().map(|shard| dir.join(shard)).collect()
        }
        false => vec![dir.join(format.single())],
    };
    let missing: Vec<&PathBuf> = files.iter().filter(|file| !file.exists()).collect();
    if let Some(first) = missing.first() {
        return Err(ModelError::Checkpoint {
            path: index,
            found: format!(
                "names {} files, of which {} are missing, such as {}",
                files.len(),
                missing.len(),
                first.file_name().unwrap_or_default().to_string_lossy()
            ),
            cure: "fetch the rest of the model".into(),
        });
    }
    files.iter().try_for_each(|file| check_pointer(file))?;
    if format == WeightFormat::Torch {
        files.iter().try_for_each(|file| check_torch(file))?;
    }
    Ok((format, files))
}

/// Refuses a file that is no ZIP file: before version 1.6 `torch.save` wrote tensors between pickles. A file that cannot be
/// read is left to its reader.
fn check_torch(path: &Path) -> Result<(), ModelError> {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(4).read_to_end(&mut start));
    if read.is_err() || torch::is_container(&start) {
        return Ok(());
    }
    Err(ModelError::Checkpoint {
        path: path.to_owned(),
        found: "is no ZIP file, as torch.save writes them since version 1.6: a bare pickle is not read"
            .into(),
        cure: CONVERT.into(),
    })
}

/// The file names of an index, each once. Names with a directory in them are refused: they would leave it.
fn shards(index: &Path) -> Result<BTreeSet<String>, ModelError> {
    let broken = |message: String| ModelError::Format { path: index.to_owned(), message };
    let text = std::fs::read(index).map_err(|source| ModelError::File { path: index.to_owned(), source })?;
    let index: serde_json::Value = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
    let map = index.get("weight_map").and_then(|m| m.as_object());
    let map = map.ok_or_else(|| broken("weight_map is missing or not an object".into()))?;
    map.values()
        .map(|file| match file.as_str() {
            Some(name) if Path::new(name).file_name() == Some(name.as_ref()) => Ok(name.to_owned()),
            _ => Err(broken(format!("weight_map names {file}, expected a file of this directory"))),
        })
        .collect()
}
