//! Stored tensors by name: memory-mapped safetensors, or random values of the same shapes.
//!
//! A large tensor has a map of its own while it is in use: once its weights are packed, its pages are given back, so
//! that loading takes the memory of what is loaded and not that of the file too.
//!
//! It knows file formats and names, no model and no back end. A header is believed only after every range in
//! it was checked against the file (<https://github.com/huggingface/safetensors#format>).

use crate::error::ModelError;
use crate::model::LoadFormat;
use half::{bf16, f16};
use memmap2::{Mmap, MmapOptions};
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use triptych_core::DType;
use triptych_kernels::ops::WeightView;

mod dummy;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The tensors of a model directory.
#[derive(Debug)]
pub enum Weights {
    /// As stored.
    Stored(StoredWeights),
    /// Random, from a seed: any name exists, in the shape that is asked for.
    Dummy {
        /// Seed of the generator.
        seed: u64,
    },
}

/// What a tensor is for: decides the values of a random one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorRole {
    /// A matrix, convolution or table.
    Matrix,
    /// A bias.
    Bias,
    /// The scale of a norm.
    Scale,
}

/// A tensor that was asked for. Row-major, little-endian.
#[derive(Clone, Debug)]
pub struct Tensor<'a> {
    dtype: DType,
    shape: Vec<usize>,
    data: Data<'a>,
    // Of a survey: only its shape is looked at.
    surveyed: bool,
}

/// The bytes of a tensor.
#[derive(Clone, Debug)]
enum Data<'a> {
    /// Of a map that stays, or of another tensor.
    Borrowed(&'a [u8]),
    /// Made here.
    Owned(Vec<u8>),
    /// A map of its own: what was read of it is this process's memory for as long as the tensor is there, no longer.
    Mapped(Arc<Mmap>),
}

impl Deref for Data<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Borrowed(bytes) => bytes,
            Self::Owned(bytes) => bytes,
            Self::Mapped(map) => map,
        }
    }
}

impl Tensor<'_> {
    /// As a back end takes it.
    pub fn view(&self) -> WeightView<'_> {
        WeightView { dtype: self.dtype, shape: &self.shape, data: &self.data }
    }

    /// The elements as f32; zeros of a survey.
    pub fn values(&self) -> Vec<f32> {
        if self.surveyed {
            return vec![0.0; self.shape.iter().product()];
        }
        match self.dtype {
            DType::F32 => self.data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            DType::F16 => self.data.as_chunks().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            DType::Bf16 => self.data.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            // No tensor of a checkpoint is opened as one: see `Stored::tensor`.
            DType::I8 | DType::F8 => vec![f32::NAN; self.shape.iter().product()],
        }
    }

    /// Every element times `factor`, in f32; as it is for a factor of 1.
    #[must_use]
    pub fn scaled(self, factor: f32) -> Self {
        if factor == 1.0 || self.surveyed {
            return self;
        }
        let data = self.values().iter().flat_map(|v| (v * factor).to_le_bytes()).collect();
        Self { dtype: DType::F32, shape: self.shape, data: Data::Owned(data), surveyed: false }
    }

    /// The part of the outermost dimension in `rows`, which must lie in it.
    #[must_use]
    pub fn rows(&self, rows: Range<usize>) -> Tensor<'_> {
        let n_rows = self.shape.first().copied().unwrap_or_default();
        let row_bytes = self.data.len().checked_div(n_rows).unwrap_or_default();
        let mut shape = self.shape.clone();
        shape[0] = rows.len();
        let data = Data::Borrowed(&self.data[rows.start * row_bytes..rows.end * row_bytes]);
        Tensor { dtype: self.dtype, shape, data, surveyed: self.surveyed }
    }

    /// Columns `columns` of a matrix, which must be its own, in that order.
    #[must_use]
    pub fn columns(&self, columns: impl Iterator<Item = usize>) -> Tensor<'static> {
        let (n_rows, size) = (self.shape.first().copied().unwrap_or_default(), self.dtype.size());
        let row_bytes = self.data.len().checked_div(n_rows).unwrap_or_default().max(size);
        let columns: Vec<usize> = columns.collect();
        let mut data = Vec::with_capacity(n_rows * columns.len() * size);
        for row in self.data.chunks_exact(row_bytes) {
            for column in &columns {
                data.extend_from_slice(&row[column * size..(column + 1) * size]);
            }
        }
        let shape = vec![n_rows, columns.len()];
        Tensor { dtype: self.dtype, shape, data: Data::Owned(data), surveyed: self.surveyed }
    }

    /// The same elements as rows of `width`, which must divide their number.
    #[must_use]
    pub fn in_rows(mut self, width: usize) -> Self {
        let n_elements: usize = self.shape.iter().product();
        self.shape = vec![n_elements.checked_div(width).unwrap_or_default(), width];
        self
    }

    /// A copy that borrows nothing.
    #[must_use]
    pub fn owned(&self) -> Tensor<'static> {
        let (shape, data) = (self.shape.clone(), Data::Owned(self.data.to_vec()));
        Tensor { dtype: self.dtype, shape, data, surveyed: self.surveyed }
    }

    /// As f32, each row multiplied by its factor; the rows are those of the first dimension.
    #[must_use]
    pub fn times(&self, factors: &[f32]) -> Tensor<'static> {
        let mut values = self.values();
        let width = self.shape.iter().skip(1).product::<usize>().max(1);
        for (row, factor) in values.chunks_mut(width).zip(factors) {
            row.iter_mut().for_each(|v| *v *= factor);
        }
        let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Tensor {
            dtype: DType::F32,
            shape: self.shape.clone(),
            data: Data::Owned(data),
            surveyed: self.surveyed,
        }
    }

    /// The same elements without dimensions of 1: `[1, n]` as `[n]`.
    #[must_use]
    pub fn squeezed(mut self) -> Self {
        self.shape.retain(|n| *n != 1);
        self
    }
}

impl Weights {
    /// Opens the weights of a directory; reads headers only.
    ///
    /// # Errors
    /// [`ModelError::File`] or [`ModelError::Format`] for files that are missing or not whole.
    pub fn open(dir: &Path, format: LoadFormat) -> Result<Self, ModelError> {
        match format {
            LoadFormat::Safetensors => StoredWeights::open(dir).map(Self::Stored),
            LoadFormat::Dummy { seed } => Ok(Self::Dummy { seed }),
        }
    }

    /// Opens stored weights to see what a loader takes of them; see [`StoredWeights::taken`].
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn survey(dir: &Path) -> Result<Self, ModelError> {
        let stored = StoredWeights::open(dir)?;
        Ok(Self::Stored(StoredWeights { asked: Some(Mutex::default()), ..stored }))
    }

    /// Whether a tensor is stored under one of `names`; random weights are as if none were.
    pub fn has(&self, names: &[String]) -> bool {
        match self {
            Self::Stored(stored) => names.iter().any(|n| stored.entries.contains_key(n)),
            Self::Dummy { .. } => false,
        }
    }

    /// The tensor stored under the first of `names` that exists.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`] with all names tried; [`ModelError::TensorShape`] if it is not `shape`.
    pub fn tensor(
        &self,
        names: &[String],
        shape: &[usize],
        role: TensorRole,
    ) -> Result<Tensor<'_>, ModelError> {
        match self {
            Self::Stored(stored) => stored.tensor(names, shape),
            Self::Dummy { seed } => Ok(Tensor {
                dtype: DType::Bf16,
                shape: shape.to_vec(),
                data: Data::Owned(dummy::values(*seed, names, shape, role)),
                surveyed: false,
            }),
        }
    }
}

/// Bytes from which on a tensor gets a map of its own.
const LARGE: usize = 1 << 20;

/// Files mapped into memory, and where each tensor lies.
#[derive(Debug)]
pub struct StoredWeights {
    dir: PathBuf,
    files: Vec<(File, Mmap)>,
    // Every range lies inside its file.
    entries: BTreeMap<String, Entry>,
    // In a survey: the names of tensors that were taken.
    asked: Option<Mutex<BTreeSet<String>>>,
}

#[derive(Debug)]
struct Entry {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

/// A stored tensor with its name, for hashing.
#[derive(Clone, Copy, Debug)]
pub struct NamedTensor<'a> {
    stored: &'a StoredWeights,
    entry: &'a Entry,
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
    fn open(dir: &Path) -> Result<Self, ModelError> {
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
            let entry = Entry { file: self.files.len(), dtype: info.dtype, shape: info.shape.clone(), range };
            self.entries.insert(name, entry);
        }
        self.files.push((file, map));
        Ok(())
    }

    fn data(&self, entry: &Entry) -> Data<'_> {
        let Some((file, whole)) = self.files.get(entry.file) else { return Data::Borrowed(&[]) };
        if entry.range.len() >= LARGE
            && let Ok(map) = map(file, entry.range.clone())
        {
            return Data::Mapped(Arc::new(map));
        }
        Data::Borrowed(whole.get(entry.range.clone()).unwrap_or_default())
    }

    fn named<'a>(&'a self, name: &'a str, entry: &'a Entry) -> NamedTensor<'a> {
        NamedTensor { stored: self, entry, name, dtype: entry.dtype, shape: &entry.shape }
    }

    fn tensor(&self, names: &[String], shape: &[usize]) -> Result<Tensor<'_>, ModelError> {
        let Some((name, entry)) = names.iter().find_map(|n| self.entries.get_key_value(n)) else {
            let name = names.first().cloned().unwrap_or_default();
            return Err(ModelError::MissingTensor { name, tried: names.to_vec() });
        };
        if entry.shape != shape {
            let (expected, actual) = (shape.to_vec(), entry.shape.clone());
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
        if let Some(asked) = &self.asked {
            asked.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone());
        }
        let data = self.data(entry);
        Ok(Tensor { dtype, shape: entry.shape.clone(), data, surveyed: self.asked.is_some() })
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

    /// The names of the tensors that were taken since [`Weights::survey`].
    pub fn taken(&self) -> BTreeSet<String> {
        let asked = self.asked.as_ref();
        asked.map_or_else(BTreeSet::new, |a| a.lock().unwrap_or_else(PoisonError::into_inner).clone())
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

/// The weight files of a directory.
///
/// # Errors
/// [`ModelError::File`] or [`ModelError::Format`] for an index that cannot be read.
pub fn files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = dir.join(INDEX);
    if !index.exists() {
        return Ok(vec![dir.join(SINGLE)]);
    }
    Ok(shards(&index)?.into_iter().map(|shard| dir.join(shard)).collect())
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
