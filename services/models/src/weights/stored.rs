//! Safetensors files mapped into memory, and the tensors in them by name.
//!
//! A large tensor has a map of its own while it is in use: once its weights are packed, its pages are given back, so
//! that loading takes the memory of what is loaded and not that of the file too. A header is believed only after every
//! range in it was checked against the file (<https://github.com/huggingface/safetensors#format>).

use super::tensor::{Tensor, TensorBytes};
use crate::checkpoint::{check_pointer, no_weights};
use crate::error::ModelError;
use memmap2::{Mmap, MmapOptions};
use parking_lot::Mutex;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use triptych_core::DType;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Bytes from which on a tensor gets a map of its own.
const LARGE: usize = 1 << 20;

/// Files mapped into memory, and where each tensor lies.
#[derive(Debug)]
pub struct StoredWeights {
    dir: PathBuf,
    files: Vec<(File, Mmap)>,
    // Every range lies inside its file.
    entries: BTreeMap<String, TensorEntry>,
    // In a survey: the names of tensors that were taken.
    asked: Option<Mutex<BTreeSet<String>>>,
}

#[derive(Debug)]
struct TensorEntry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// A stored tensor with its name, for hashing.
#[derive(Clone, Copy, Debug)]
pub struct NamedTensor<'a> {
    stored: &'a StoredWeights,
    entry: &'a TensorEntry,
    /// Stored name without the prefix it was found by.
    pub name: &'a str,
    /// Element type as the file has it.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: &'a [usize],
}

impl NamedTensor<'_> {
    /// The hash of its bytes.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(&self.stored.data(self.entry))
    }
}

impl StoredWeights {
    /// These weights, which note from now on the tensors that are taken.
    pub(super) fn surveyed(self) -> Self {
        Self { asked: Some(Mutex::default()), ..self }
    }

    /// True if a tensor is stored under one of `names`.
    pub(super) fn has(&self, names: &[String]) -> bool {
        names.iter().any(|n| self.entries.contains_key(n))
    }

    /// Opens the weight files of a directory; reads headers only.
    pub(super) fn open(dir: &Path) -> Result<Self, ModelError> {
        let mut stored =
            Self { dir: dir.to_owned(), files: Vec::new(), entries: BTreeMap::new(), asked: None };
        for file in files(dir)? {
            stored.add(&file)?;
        }
        Ok(stored)
    }

    fn add(&mut self, path: &Path) -> Result<(), ModelError> {
        let failed = |source| ModelError::File { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let map = map(&file, 0..usize::try_from(len).unwrap_or(usize::MAX)).map_err(failed)?;
        let broken = |e: safetensors::SafeTensorError| ModelError::Format {
            path: path.to_owned(),
            message: e.to_string(),
        };
        // Checks that ranges follow each other, fit their shapes, and end where the file ends.
        let (header_len, metadata) = SafeTensors::read_metadata(&map).map_err(broken)?;
        let data = size_of::<u64>() + header_len..map.len();
        for (name, info) in metadata.tensors() {
            let (from, to) = info.data_offsets;
            let range = data.start.saturating_add(from)..data.start.saturating_add(to);
            if range.start > range.end || range.end > data.end {
                return Err(broken(safetensors::SafeTensorError::InvalidOffset(name)));
            }
            let entry =
                TensorEntry { file: self.files.len(), dtype: info.dtype, shape: info.shape.clone(), range };
            self.entries.insert(name, entry);
        }
        self.files.push((file, map));
        Ok(())
    }

    fn data(&self, entry: &TensorEntry) -> TensorBytes<'_> {
        let Some((file, whole)) = self.files.get(entry.file) else { return TensorBytes::Borrowed(&[]) };
        if entry.range.len() >= LARGE
            && let Ok(map) = map(file, entry.range.clone())
        {
            return TensorBytes::Mapped(Arc::new(map));
        }
        TensorBytes::Borrowed(whole.get(entry.range.clone()).unwrap_or_default())
    }

    fn named<'a>(&'a self, name: &'a str, entry: &'a TensorEntry) -> NamedTensor<'a> {
        NamedTensor { stored: self, entry, name, dtype: entry.dtype, shape: &entry.shape }
    }

    /// The tensor of `shape` under the first of `names` that exists.
    pub(super) fn tensor(&self, names: &[String], shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let Some((name, entry)) = names.iter().find_map(|n| self.entries.get_key_value(n)) else {
            let name = names.first().cloned().unwrap_or_default();
            return Err(ModelError::MissingTensor { name, tried: names.to_vec() });
        };
        if entry.shape != shape {
            let expected = shape.to_vec();
            let actual = entry.shape.clone();
            return Err(ModelError::TensorShape { name: name.clone(), expected, actual });
        }
        let dtype = match entry.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::Bf16,
            other => {
                let message = format!("tensor {name} is {other:?}, expected F32, F16 or BF16");
                return Err(ModelError::Format { path: self.dir.clone(), message });
            }
        };
        let tensor = Tensor::new(dtype, entry.shape.clone(), self.data(entry));
        let Some(asked) = &self.asked else { return Ok(tensor) };
        asked.lock().insert(name.clone());
        Ok(tensor.surveyed())
    }

    /// The tensor under the first of `names` that exists.
    pub fn first(&self, names: &[String]) -> Option<NamedTensor<'_>> {
        let (name, e) = names.iter().find_map(|n| self.entries.get_key_value(n))?;
        Some(self.named(name, e))
    }

    /// Every tensor: its name, its values, its bytes.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        self.entries.iter().map(|(name, e)| (name.as_str(), e.shape.iter().product(), e.range.len()))
    }

    /// The names of the tensors that were taken since [`Weights::survey`](super::Weights::survey).
    pub fn taken(&self) -> BTreeSet<String> {
        let asked = self.asked.as_ref();
        asked.map_or_else(BTreeSet::new, |asked| asked.lock().clone())
    }

    /// All tensors under the first of `prefixes` that has any, in the order of their names.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] if none has.
    pub fn under(&self, prefixes: &[&str]) -> Result<Vec<NamedTensor<'_>>, ModelError> {
        let with = |prefix: &str| -> Vec<NamedTensor<'_>> {
            let named = self.entries.iter().filter_map(|(full, e)| Some((full.strip_prefix(prefix)?, e)));
            named.map(|(name, e)| self.named(name, e)).collect()
        };
        prefixes.iter().map(|p| with(p)).find(|found| !found.is_empty()).ok_or_else(|| {
            ModelError::MissingTensor {
                name: prefixes.first().copied().unwrap_or_default().to_owned(),
                tried: prefixes.iter().map(|p| format!("{p}*")).collect(),
            }
        })
    }
}

/// The weight files of a directory; each exists.
///
/// # Errors
/// [`ModelError::Checkpoint`] for weights that are missing, in another format, or Git LFS pointers;
/// [`ModelError::File`] or [`ModelError::Format`] for an index that cannot be read.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = dir.join(INDEX);
    let files: Vec<PathBuf> = match index.exists() {
        true => {
            check_pointer(&index)?;
            shards(&index)?.into_iter().map(|shard| dir.join(shard)).collect()
        }
        false => vec![dir.join(SINGLE)],
    };
    let missing: Vec<&PathBuf> = files.iter().filter(|file| !file.exists()).collect();
    match missing.first() {
        Some(first) if index.exists() => Err(ModelError::Checkpoint {
            path: index,
            found: format!(
                "names {} files, of which {} are missing, such as {}",
                files.len(),
                missing.len(),
                first.file_name().unwrap_or_default().to_string_lossy()
            ),
            cure: "fetch the rest of the model".into(),
        }),
        Some(_) => Err(no_weights(dir)),
        None => files.iter().try_for_each(|file| check_pointer(file)).map(|()| files),
    }
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

/// Maps a part of a file to read.
///
/// The one unsafe call of this crate. The weights of a 7-billion model are 15 GB: mapped, an encoder worker
/// touches only the pages of the encoder, and processes on one host share them.
#[allow(unsafe_code)]
fn map(file: &File, part: Range<usize>) -> std::io::Result<Mmap> {
    let mut options = MmapOptions::new();
    options.offset(part.start as u64).len(part.len());
    // SAFETY: the map is read-only and private to this process's address space; the obligation left is that
    // nobody changes the file while it is mapped. A model directory is written once, by the operator, before
    // it is served; that contract is in the documentation of `ModelSource::dir`. Content is never trusted:
    // plain bytes, for which every bit pattern is valid.
    unsafe { options.map(file) }
}
