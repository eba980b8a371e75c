//! Rows of an encoder output that a client computed, in the place of an image, as vLLM's `image_embeds`.
//!
//! The bytes are two files ([`embeddings::join`]), of which the second may be missing: the rows `[n_tokens, hidden]` (or `[1, n_tokens, hidden]`) in
//! f32, f16 or bf16, and the grid `[3]` or `[1, 3]` of patches before merging, in integers. A file is one tensor of
//! `torch.save`, whose pickle is not run, or of safetensors. It knows no model beyond the width of its rows; whether a grid fits
//! the rows is seen where the prompt is laid out.

use crate::error::ItemError;
use crate::weights::torch;
use half::{bf16, f16};
use safetensors::{Dtype, SafeTensors};
use std::borrow::Cow;
use triptych_core::limits::Limits;
use triptych_core::{Extent, embeddings};

/// Rows that a client computed.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenRows {
    /// `[n_tokens, hidden]`.
    pub rows: Vec<f32>,
    /// Number of rows.
    pub n_tokens: u32,
    /// Grid of the image.
    pub extent: Extent,
}

/// A tensor of a file.
struct Tensor<'a> {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Cow<'a, [u8]>,
}

/// Reads rows of width `hidden` and their grid.
///
/// # Errors
/// [`ItemError`] that says what was found and what is allowed.
pub fn read(item: &[u8], hidden: usize, limits: &Limits) -> Result<GivenRows, ItemError> {
    let invalid = |message: String| ItemError::Corrupt(format!("image_embeds: {message}"));
    let (rows, grid) = embeddings::split(item).ok_or_else(|| invalid("the item is cut".into()))?;
    let tensor = tensor(rows).map_err(invalid)?;
    let n_tokens = match tensor.shape[..] {
        [n, width] | [1, n, width] if width == hidden && n > 0 => n,
        _ => {
            let shape = &tensor.shape;
            return Err(invalid(format!("the tensor is {shape:?}, this model's rows are [n, {hidden}]")));
        }
    };
    let n_bytes = n_tokens.checked_mul(hidden).and_then(|n| n.checked_mul(size_of::<f32>()));
    if n_bytes.is_none_or(|n| n > limits.max_object_bytes) {
        let limit = limits.max_object_bytes;
        return Err(invalid(format!("{n_tokens} rows of {hidden} values are more than {limit} bytes")));
    }
    let rows = floats(&tensor).map_err(invalid)?;
    if rows.len() != n_tokens * hidden {
        return Err(invalid(format!("{} values for {n_tokens} rows of {hidden}", rows.len())));
    }
    if let Some(at) = rows.iter().position(|value| !value.is_finite()) {
        return Err(invalid(format!("value {} of row {} is {}", at % hidden, at / hidden, rows[at])));
    }
    let [t, h, w] = if grid.is_empty() { square(n_tokens) } else { grid_of(grid) }.map_err(invalid)?;
    let n_tokens = u32::try_from(n_tokens).map_err(|_| invalid(format!("{n_tokens} rows are too many")))?;
    Ok(GivenRows { rows, n_tokens, extent: Extent::Grid { t, h, w } })
}

/// The one tensor of a file.
fn tensor(file: &[u8]) -> Result<Tensor<'_>, String> {
    if torch::is_container(file) {
        let found = torch::tensor(file)?;
        let bytes = file.get(found.range.clone()).ok_or("the tensor is not inside its file")?;
        let bytes = found.gathered(bytes).map_or(Cow::Borrowed(bytes), Cow::Owned);
        return Ok(Tensor { dtype: found.dtype, shape: found.shape, bytes });
    }
    let read = SafeTensors::deserialize(file);
    let read = read.map_err(|e| format!("neither a tensor of torch.save nor a safetensors file: {e}"))?;
    let mut tensors = read.iter();
    match (tensors.next(), tensors.next()) {
        (Some((_, one)), None) => {
            Ok(Tensor { dtype: one.dtype(), shape: one.shape().to_vec(), bytes: Cow::Borrowed(one.data()) })
        }
        _ => Err(format!("the file has {} tensors, allowed is one", read.len())),
    }
}

fn floats(tensor: &Tensor<'_>) -> Result<Vec<f32>, String> {
    let pairs = || tensor.bytes.as_chunks::<2>().0.iter();
    match tensor.dtype {
        Dtype::F32 => Ok(tensor.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
        Dtype::F16 => Ok(pairs().map(|b| f16::from_le_bytes(*b).to_f32()).collect()),
        Dtype::BF16 => Ok(pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect()),
        other => Err(format!("the tensor is of {other:?}, allowed are F32, F16 and BF16")),
    }
}

/// The grid in a file.
fn grid_of(file: &[u8]) -> Result<[u32; 3], String> {
    let tensor = tensor(file).map_err(|message| format!("image_grid_thw: {message}"))?;
    let numbers: Vec<i64> = match tensor.dtype {
        Dtype::I64 => tensor.bytes.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        Dtype::I32 => tensor.bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        other => return Err(format!("image_grid_thw is of {other:?}, allowed are I64 and I32")),
    };
    let positive = |n: &i64| u32::try_from(*n).ok().filter(|n| *n > 0);
    let sizes: Option<Vec<u32>> = numbers.iter().map(positive).collect();
    match sizes.as_deref() {
        Some([t, h, w]) => Ok([*t, *h, *w]),
        _ => Err(format!("image_grid_thw is {numbers:?}, allowed are three numbers from 1")),
    }
}

/// The grid of a square image, of a model that merges no patches.
fn square(n_tokens: usize) -> Result<[u32; 3], String> {
    let side = n_tokens.isqrt();
    match u32::try_from(side) {
        Ok(one) if side * side == n_tokens => Ok([1, one, one]),
        _ => Err(format!("{n_tokens} rows are no square: image_grid_thw tells their grid")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::tensor::TensorView;

    fn file(dtype: Dtype, shape: &[usize], bytes: &[u8]) -> Vec<u8> {
        let view = TensorView::new(dtype, shape.to_vec(), bytes).expect("a tensor");
        safetensors::serialize([("image_embeds", view)], None).expect("a file")
    }

    fn rows(shape: &[usize]) -> Vec<u8> {
        let n: usize = shape.iter().product();
        let bytes: Vec<u8> = (0..n).flat_map(|i| (i as f32).to_le_bytes()).collect();
        file(Dtype::F32, shape, &bytes)
    }

    fn grid(sizes: [i64; 3]) -> Vec<u8> {
        file(Dtype::I64, &[1, 3], &sizes.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>())
    }

    fn given(rows: &[u8], grid: &[u8]) -> Result<GivenRows, String> {
        read(&embeddings::join(rows, grid), 3, &Limits::default()).map_err(|e| e.to_string())
    }

    #[test]
    fn rows_and_their_grid_are_read_in_each_element_type() {
        let found = given(&rows(&[4, 3]), &grid([1, 4, 4])).unwrap();
        assert_eq!((found.n_tokens, found.extent), (4, Extent::Grid { t: 1, h: 4, w: 4 }));
        assert_eq!(found.rows, (0..12).map(|i| i as f32).collect::<Vec<_>>());
        let square = given(&rows(&[1, 9, 3]), &[]).unwrap();
        assert_eq!(square.extent, Extent::Grid { t: 1, h: 3, w: 3 });
        let half: Vec<u8> = [1.5, -2.0, 0.25].iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect();
        assert_eq!(given(&file(Dtype::F16, &[1, 3], &half), &[]).unwrap().rows, [1.5, -2.0, 0.25]);
        let brain: Vec<u8> =
            [1.5, -2.0, 0.25].iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect();
        assert_eq!(given(&file(Dtype::BF16, &[1, 3], &brain), &[]).unwrap().rows, [1.5, -2.0, 0.25]);
    }

    #[test]
    fn what_does_not_fit_is_refused_by_name() {
        let nan: Vec<u8> = [0.0, f32::NAN, 0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        for (rows, grid, expect) in [
            (rows(&[4, 2]), vec![], "[4, 2], this model's rows are [n, 3]"),
            (rows(&[12]), vec![], "[12], this model's rows"),
            (rows(&[0, 3]), vec![], "[0, 3], this model's rows"),
            (rows(&[5, 3]), vec![], "no square: image_grid_thw"),
            (rows(&[4, 3]), grid([1, 0, 4]), "[1, 0, 4], allowed are three numbers from 1"),
            (rows(&[4, 3]), rows(&[3]), "of F32, allowed are I64 and I32"),
            (file(Dtype::I32, &[1, 3], &[0; 12]), vec![], "of I32, allowed are F32, F16 and BF16"),
            (file(Dtype::F32, &[1, 3], &nan), vec![], "value 1 of row 0 is NaN"),
            (b"not a file".to_vec(), vec![], "neither a tensor of torch.save nor a safetensors file"),
            (b"PK\x03\x04zip".to_vec(), vec![], "image_embeds: "),
        ] {
            let refused = given(&rows, &grid).unwrap_err();
            assert!(refused.contains(expect), "{refused}");
        }
        for item in [&b""[..], &[255; 8], &[9, 0, 0, 0, 0, 0, 0, 0, 1]] {
            assert!(read(item, 3, &Limits::default()).is_err());
        }
        let small = Limits { max_object_bytes: 47, ..Limits::default() };
        let refused = read(&embeddings::join(&rows(&[4, 3]), &[]), 3, &small).unwrap_err().to_string();
        assert!(refused.contains("more than 47 bytes"), "{refused}");
    }
}
