//! Weight files mapped into memory, and the tensors in them by name.
//!
//! A large tensor has a map of its own while it is in use: once its weights are packed, its pages are given back, so
//! that loading takes the memory of what is loaded and not that of the file too. A header is believed only after every
//! range in it was checked against the file (<https://github.com/huggingface/safetensors#format>).

use super::files::{WeightFormat, formatted};
use super::tensor::{Tensor, TensorBytes};
use super::torch::{self, TorchTensor};
use crate::error::ModelError;
use crate::quantization::Quantization;
use memmap2::{Mmap, MmapOptions};
use parking_lot::Mutex;
use safetensors::tensor::TensorInfo;
use safetensors::{Dtype, SafeTensorError, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use triptych_core::DType;

/// Bytes from which on a tensor gets a map of its own.
const LARGE: usize = 1 << 20;

/// Files mapped into memory, and where each tensor lies.
#[derive(Debug)]
pub struct StoredWeights {
    dir: PathBuf,
    format: WeightFormat,
    quantization: Option<Quantization>,
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
    // Where elements do not lie in their order.
    strided: Option<TorchTensor>,
}

impl TensorEntry {
    fn n_elements(&self) -> usize {
        self.shape.iter().product()
    }
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

impl<'a> NamedTensor<'a> {
    /// Its bytes, row-major, little-endian.
    pub(super) fn bytes(&self) -> TensorBytes<'a> {
        self.stored.data(self.entry)
    }

    /// The hash of its bytes.
    pub fn hash(&self) -> blake3::Hash {
        blake3::hash(&self.bytes())
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
        let (format, files) = formatted(dir)?;
        let mut stored = Self {
            dir: dir.to_owned(),
            format,
            quantization: Quantization::of(dir)?,
            files: Vec::new(),
            entries: BTreeMap::new(),
            asked: None,
        };
        for file in files {
            stored.add(&file)?;
        }
        Ok(stored)
    }

    /// Opens one file; reads its header only.
    pub(crate) fn of_file(path: &Path, format: WeightFormat) -> Result<Self, ModelError> {
        let mut stored = Self {
            dir: path.to_owned(),
            format,
            quantization: None,
            files: Vec::new(),
            entries: BTreeMap::new(),
            asked: None,
        };
        stored.add(path)?;
        Ok(stored)
    }

    fn add(&mut self, path: &Path) -> Result<(), ModelError> {
        let failed = |source| ModelError::File { path: path.to_owned(), source };
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        let map = map(&file, 0..usize::try_from(len).unwrap_or(usize::MAX)).map_err(failed)?;
        let entries = match self.format {
            WeightFormat::Safetensors => safetensors_entries(&map, self.files.len()),
            WeightFormat::Torch => torch_entries(&map, self.files.len()),
        };
        self.entries
            .extend(entries.map_err(|message| ModelError::Format { path: path.to_owned(), message })?);
        self.files.push((file, map));
        Ok(())
    }

    /// Method by which the weights are quantized; `None`: they are not.
    pub fn quantization(&self) -> Option<&Quantization> {
        self.quantization.as_ref()
    }

    /// The tensor `name`.
    pub(crate) fn get(&self, name: &str) -> Option<NamedTensor<'_>> {
        self.entries.get_key_value(name).map(|(name, entry)| self.named(name, entry))
    }

    /// The tensor `name`, noted as taken in a survey.
    pub(super) fn take(&self, name: &str) -> Option<NamedTensor<'_>> {
        let tensor = self.get(name)?;
        if let Some(asked) = &self.asked {
            asked.lock().insert(name.to_owned());
        }
        Some(tensor)
    }

    /// True in a survey: no values are wanted.
    pub(super) fn is_surveyed(&self) -> bool {
        self.asked.is_some()
    }

    /// The error for tensors that are not what they should be.
    pub(super) fn broken(&self, message: String) -> ModelError {
        ModelError::Format { path: self.dir.clone(), message }
    }

    /// File format of the weights.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    fn data(&self, entry: &TensorEntry) -> TensorBytes<'_> {
        let Some((file, whole)) = self.files.get(entry.file) else { return TensorBytes::Borrowed(&[]) };
        let in_file = whole.get(entry.range.clone()).unwrap_or_default();
        if let Some(gathered) = entry.strided.as_ref().and_then(|strided| strided.gathered(in_file)) {
            return TensorBytes::Owned(gathered);
        }
        if entry.range.len() >= LARGE
            && let Ok(map) = map(file, entry.range.clone())
        {
            return TensorBytes::Mapped(Arc::new(map));
        }
        TensorBytes::Borrowed(in_file)
    }

    fn named<'a>(&'a self, name: &'a str, entry: &'a TensorEntry) -> NamedTensor<'a> {
        NamedTensor { stored: self, entry, name, dtype: entry.dtype, shape: &entry.shape }
    }

    /// The tensor of `shape` under the first of `names` that exists.
    pub(crate) fn tensor(&self, names: &[String], shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
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
                return Err(self.broken(format!("tensor {name} is {other:?}, expected F32, F16 or BF16")));
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

    /// Every tensor: its name, the parameters it stands for, its bytes.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (&str, usize, usize)> {
        let n_parameters = |name: &str, n_elements| match self.quantization {
            Some(_) => Quantization::n_parameters(name, n_elements),
            None => n_elements,
        };
        self.entries.iter().map(move |(name, e)| {
            let n_elements = e.n_elements();
            (name.as_str(), n_parameters(name, n_elements), n_elements * e.dtype.bitsize() / 8)
        })
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

/// Tensors of a safetensors file, which is number `file`.
fn safetensors_entries(bytes: &[u8], file: usize) -> Result<Vec<(String, TensorEntry)>, String> {
    // Checks that ranges follow each other, fit their shapes, and end where the file ends.
    let (header_len, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
    let data = size_of::<u64>() + header_len..bytes.len();
    let entry = |name: String, info: &TensorInfo| {
        let (from, to) = info.data_offsets;
        let range = data.start.saturating_add(from)..data.start.saturating_add(to);
        if range.start > range.end || range.end > data.end {
            return Err(SafeTensorError::InvalidOffset(name).to_string());
        }
        Ok((name, TensorEntry { file, dtype: info.dtype, shape: info.shape.clone(), range, strided: None }))
    };
    metadata.tensors().into_iter().map(|(name, info)| entry(name, info)).collect()
}

/// Tensors of a file of `torch.save`, which is number `file`.
fn torch_entries(bytes: &[u8], file: usize) -> Result<Vec<(String, TensorEntry)>, String> {
    let entry = |tensor: TorchTensor| TensorEntry {
        file,
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        range: tensor.range.clone(),
        strided: tensor.is_strided().then_some(tensor),
    };
    Ok(torch::tensors(bytes)?.into_iter().map(|(name, tensor)| (name, entry(tensor))).collect())
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
