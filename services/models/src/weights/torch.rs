//! Weight files of `torch.save`: a ZIP of storages, and a pickle that says which tensor is which piece of which storage.
//!
//! Nothing of the pickle is run ([`pickle`]); storages are read where they lie ([`zip`]), so that a tensor is mapped as one
//! of a safetensors file is. A tensor whose elements do not lie in their order is copied into it when it is read. Sizes,
//! offsets and strides are believed only after they were checked against the storage in the file. Format:
//! <https://github.com/pytorch/pytorch/blob/v2.11.0/torch/serialization.py>, `_save`.

mod pickle;
mod zip;

use pickle::PickledTensor;
use safetensors::Dtype;
use std::collections::BTreeMap;
use std::ops::Range;

/// Entry that holds the dict, in the folder that all entries are in.
const DICT: &str = "/data.pkl";

/// A tensor of a file of `torch.save`. Little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TorchTensor {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Bytes of the file from the first element to the last; inside the file.
    pub range: Range<usize>,
    // Elements from one index of a dimension to the next, where they do not lie in their order. Every place they lead to is
    // inside `range`, and the tensor has no more elements than its storage.
    strides: Option<Vec<usize>>,
}

impl TorchTensor {
    /// True if the elements do not lie in their order.
    pub fn is_strided(&self) -> bool {
        self.strides.is_some()
    }

    /// The elements in their order, of `bytes`, which are those of `range`; `None`: they are `bytes` as they are.
    pub fn gathered(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        Some(gather(bytes, &self.shape, self.strides.as_deref()?, self.dtype.bitsize() / 8))
    }
}

/// True for the start of a ZIP file, which is what `torch.save` writes since version 1.6.
pub fn is_container(start: &[u8]) -> bool {
    start.starts_with(zip::LOCAL_HEADER)
}

/// Tensors of a file of `torch.save`, by name. Reads the dict, no tensor.
///
/// # Errors
/// The defect of the file, or what is refused, by name.
pub fn tensors(file: &[u8]) -> Result<BTreeMap<String, TorchTensor>, String> {
    let opened = Opened::new(file)?;
    let dict = pickle::state_dict(opened.pickle)?;
    dict.iter().map(|(name, tensor)| Ok(((*name).to_owned(), opened.placed(name, tensor)?))).collect()
}

/// The tensor of a file of `torch.save` that holds one tensor.
///
/// # Errors
/// As [`tensors`].
pub fn tensor(file: &[u8]) -> Result<TorchTensor, String> {
    let opened = Opened::new(file)?;
    opened.placed("", &pickle::tensor(opened.pickle)?)
}

/// A file whose entries are known.
struct Opened<'a> {
    entries: BTreeMap<&'a str, Range<usize>>,
    folder: String,
    pickle: &'a [u8],
}

impl<'a> Opened<'a> {
    fn new(file: &'a [u8]) -> Result<Self, String> {
        if !is_container(file) {
            return Err("no ZIP file, as torch.save writes them since version 1.6".into());
        }
        let entries = zip::stored_entries(file)?;
        let bytes = |name: &str| entries.get(name).and_then(|range| file.get(range.clone()));
        let folder = |name: &str| name.strip_suffix(DICT).map(str::to_owned).filter(|f| !f.contains('/'));
        let folder = entries.keys().find_map(|name| folder(name));
        let folder = folder.ok_or("a ZIP file without data.pkl: not written by torch.save")?;
        if bytes(&format!("{folder}/byteorder")).is_some_and(|order| order != b"little") {
            return Err("written on a machine that is not little-endian".into());
        }
        let pickle = bytes(&format!("{folder}{DICT}")).unwrap_or_default();
        Ok(Self { pickle, folder, entries })
    }

    fn placed(&self, name: &str, tensor: &PickledTensor<'_>) -> Result<TorchTensor, String> {
        let storage = self.entries.get(format!("{}/data/{}", self.folder, tensor.storage).as_str());
        let storage = storage.ok_or_else(|| format!("its storage {} is not in the file", tensor.storage));
        let placed = storage.and_then(|storage| place(tensor, storage));
        placed.map_err(|message| format!("tensor {name}: {message}"))
    }
}

/// The place of a tensor in the file, checked against the bytes of its storage.
fn place(tensor: &PickledTensor<'_>, storage: &Range<usize>) -> Result<TorchTensor, String> {
    let size = tensor.dtype.bitsize() / 8;
    let n_stored = storage.len() / size;
    if n_stored < tensor.storage_len {
        return Err(format!("its storage has {n_stored} elements, the dict says {}", tensor.storage_len));
    }
    let shape = &tensor.shape;
    let wrong = || {
        format!(
            "{shape:?} with strides {:?} from element {} is not in a storage of {}",
            tensor.strides, tensor.offset, tensor.storage_len
        )
    };
    let n_elements = shape.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim)).ok_or_else(wrong)?;
    let n_spanned = match n_elements {
        0 => Some(0),
        _ => shape
            .iter()
            .zip(&tensor.strides)
            .try_fold(1usize, |end, (dim, stride)| end.checked_add((dim - 1).checked_mul(*stride)?)),
    };
    let n_spanned = n_spanned.ok_or_else(wrong)?;
    let end = tensor.offset.checked_add(n_spanned).filter(|end| *end <= tensor.storage_len);
    if end.is_none() {
        return Err(wrong());
    }
    if n_elements > tensor.storage_len {
        return Err(format!("{shape:?} repeats the elements of a storage of {}", tensor.storage_len));
    }
    let start = storage.start + tensor.offset * size;
    Ok(TorchTensor {
        dtype: tensor.dtype,
        shape: shape.clone(),
        range: start..start + n_spanned * size,
        strides: (n_elements > 0 && !is_contiguous(shape, &tensor.strides)).then(|| tensor.strides.clone()),
    })
}

/// True if elements lie in their order, without gaps. The stride of a dimension of 1 leads nowhere.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(dim, stride)| {
        let fits = *dim == 1 || *stride == expected;
        expected *= dim;
        fits
    })
}

/// Elements of `size` bytes in their order, from places that are inside `bytes`.
fn gather(bytes: &[u8], shape: &[usize], strides: &[usize], size: usize) -> Vec<u8> {
    let n_elements: usize = shape.iter().product();
    let mut gathered = Vec::with_capacity(n_elements * size);
    let mut index = vec![0; shape.len()];
    for _ in 0..n_elements {
        let place: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        gathered.extend_from_slice(bytes.get(place * size..(place + 1) * size).unwrap_or_default());
        for (i, dim) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < *dim {
                break;
            }
            *i = 0;
        }
    }
    gathered
}
