//! Weights of quantized checkpoints: the tensors that stand for one, checked against each other, and its values.
//!
//! A weight is found by what is stored, not by the lists of a configuration: where a float tensor has its name, that is it.
//! One weight at a time is dequantized, as f32, when a layer asks for it; no copy of the model is made. The layouts of
//! panels of the back ends differ from all of these, so weights are quantized again where those are int8 or int4.

use super::dequantize::{Codes, Groups, Words, affine, scale_blocks};
use super::stored::{NamedTensor, StoredWeights};
use super::tensor::{Tensor, TensorBytes};
use crate::error::ModelError;
use crate::quantization::{CODES_PER_WORD, GptqZeros, Quantization};
use safetensors::Dtype;
use triptych_core::DType;
use triptych_core::item::to_f32;

/// End of the name of a weight.
const WEIGHT: &str = "weight";
/// Zero of symmetric codes of four bits.
const MIDDLE: f32 = 8.0;
/// Element types of scales.
const FLOATS: &[Dtype] = &[Dtype::F32, Dtype::F16, Dtype::BF16];

/// Form in which a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// `weight: [n_out, n_in]` of bytes, and scales.
    Bytes,
    /// `qweight: [n_in / 8, n_out]`.
    Gptq(GptqZeros),
    /// `qweight: [n_in, n_out / 8]`.
    Awq,
    /// `weight_packed: [n_out, n_in / 8]`.
    Packed,
}

/// A weight of a quantized checkpoint.
#[derive(Debug)]
pub(super) struct QuantizedWeight<'a> {
    stored: &'a StoredWeights,
    quantization: Quantization,
    // Name up to and with the last dot.
    layer: &'a str,
    layout: Layout,
}

/// The tensors that stand for a weight `[n_out, n_in]`; their shapes fit it and each other.
#[derive(Debug)]
struct Parts<'a> {
    dims: [usize; 2],
    codes: NamedTensor<'a>,
    scales: NamedTensor<'a>,
    zeros: Option<NamedTensor<'a>>,
    // Group of each input, where inputs of a group are not neighbours.
    groups: Option<NamedTensor<'a>>,
    n_groups: usize,
}

impl<'a> QuantizedWeight<'a> {
    /// The weight under the first of `names` that exists, if it is quantized.
    pub(super) fn find(stored: &'a StoredWeights, names: &'a [String]) -> Option<Self> {
        let quantization = *stored.quantization()?;
        for name in names {
            let layer = name.strip_suffix(WEIGHT)?;
            let has = |part: &str| stored.get(&format!("{layer}{part}")).is_some();
            let layout = match (stored.get(name), quantization) {
                (Some(tensor), _) if matches!(tensor.dtype, Dtype::F8_E4M3 | Dtype::I8) => Layout::Bytes,
                (Some(_), _) => return None,
                (None, Quantization::Gptq { zeros, .. }) if has("qweight") => Layout::Gptq(zeros),
                (None, Quantization::Awq { .. }) if has("qweight") => Layout::Awq,
                (None, Quantization::CompressedTensors { .. }) if has("weight_packed") => Layout::Packed,
                (None, _) => continue,
            };
            return Some(Self { stored, quantization, layer, layout });
        }
        None
    }

    /// The weight, of `shape`, dequantized; without values in a survey.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::TensorShape`] or [`ModelError::Format`] for a tensor of it.
    pub(super) fn tensor(&self, shape: &[usize]) -> Result<Tensor<'static>, ModelError> {
        let Ok(dims) = <[usize; 2]>::try_from(shape) else {
            let message = format!("tensor {}{WEIGHT} is quantized, and is no matrix {shape:?}", self.layer);
            return Err(self.stored.broken(message));
        };
        let parts = match self.layout {
            Layout::Bytes => self.bytes(dims),
            Layout::Gptq(_) | Layout::Awq => self.words(dims),
            Layout::Packed => self.packed(dims),
        }?;
        if self.stored.is_surveyed() {
            return Ok(Tensor::new(DType::F32, shape.to_vec(), TensorBytes::Owned(Vec::new())).surveyed());
        }
        Ok(Tensor::new(DType::F32, shape.to_vec(), TensorBytes::Owned(self.values(&parts)?)))
    }

    /// The tensor `part` of this layer, if it is stored; its element type must be one of `dtypes`.
    fn optional(&self, part: &str, dtypes: &[Dtype]) -> Result<Option<NamedTensor<'a>>, ModelError> {
        let name = format!("{}{part}", self.layer);
        let Some(tensor) = self.stored.take(&name) else { return Ok(None) };
        if dtypes.contains(&tensor.dtype) {
            return Ok(Some(tensor));
        }
        let message = format!("tensor {name} is {:?}, expected one of {dtypes:?}", tensor.dtype);
        Err(self.stored.broken(message))
    }

    /// The tensor `part` of this layer.
    fn part(&self, part: &str, dtypes: &[Dtype]) -> Result<NamedTensor<'a>, ModelError> {
        self.optional(part, dtypes)?.ok_or_else(|| {
            let name = format!("{}{part}", self.layer);
            ModelError::MissingTensor { tried: vec![name.clone()], name }
        })
    }

    /// The tensor `part` of this layer, which must be of `shape`.
    fn shaped(&self, part: &str, dtype: Dtype, shape: [usize; 2]) -> Result<NamedTensor<'a>, ModelError> {
        let tensor = self.part(part, &[dtype])?;
        check_shape(&tensor, &shape)?;
        Ok(tensor)
    }

    /// The tensors of a weight of bytes.
    fn bytes(&self, dims: [usize; 2]) -> Result<Parts<'a>, ModelError> {
        let codes = self.part(WEIGHT, &[Dtype::F8_E4M3, Dtype::I8])?;
        check_shape(&codes, &dims)?;
        // Of both names the scale is what codes are multiplied by.
        let scales = match self.optional("weight_scale_inv", FLOATS)? {
            Some(scales) => scales,
            None => self.part("weight_scale", FLOATS)?,
        };
        self.block(&scales, dims)?;
        Ok(Parts { dims, codes, scales, zeros: None, groups: None, n_groups: 0 })
    }

    /// Outputs and inputs that share a scale of `scales`, for a weight of bytes.
    fn block(&self, scales: &NamedTensor<'_>, dims: [usize; 2]) -> Result<[usize; 2], ModelError> {
        let [n_out, n_in] = dims;
        let stated = match self.quantization {
            Quantization::Fp8 { block } | Quantization::CompressedTensors { block, .. } => block,
            _ => None,
        };
        let blocks = |[outputs, inputs]: [usize; 2]| [n_out.div_ceil(outputs), n_in.div_ceil(inputs)];
        let expected = stated.map_or([n_out, 1], blocks);
        match (scales.shape, stated) {
            ([] | [1] | [1, 1], None) => Ok([n_out, n_in]),
            ([n], None) if *n == n_out => Ok([1, n_in]),
            ([rows, columns], Some(block)) if [*rows, *columns] == expected => Ok(block),
            ([rows, columns], _) if *rows == n_out && *columns > 0 && n_in % columns == 0 => {
                Ok([1, n_in / columns])
            }
            _ => Err(wrong_shape(scales, &expected)),
        }
    }

    /// The tensors of a weight of GPTQ or AWQ.
    fn words(&self, dims: [usize; 2]) -> Result<Parts<'a>, ModelError> {
        let [n_out, n_in] = dims;
        if n_out % CODES_PER_WORD != 0 || n_in % CODES_PER_WORD != 0 {
            let message = format!("{}qweight stands for {dims:?}, which are no multiples of 8", self.layer);
            return Err(self.stored.broken(message));
        }
        let words = n_out / CODES_PER_WORD;
        let is_gptq = self.layout != Layout::Awq;
        let packed = if is_gptq { [n_in / CODES_PER_WORD, n_out] } else { [n_in, words] };
        let codes = self.shaped("qweight", Dtype::I32, packed)?;
        let scales = self.part("scales", FLOATS)?;
        let groups = if is_gptq { self.optional("g_idx", &[Dtype::I32, Dtype::I64])? } else { None };
        if let Some(groups) = &groups {
            check_shape(groups, &[n_in])?;
        }
        let group_size = match self.quantization {
            Quantization::Gptq { group_size, .. } | Quantization::Awq { group_size } => group_size,
            _ => None,
        };
        let n_groups = n_in.div_ceil(group_size.unwrap_or(n_in).max(1));
        check_shape(&scales, &[n_groups, n_out])?;
        let zeros = Some(self.shaped("qzeros", Dtype::I32, [n_groups, words])?);
        Ok(Parts { dims, codes, scales, zeros, groups, n_groups })
    }

    /// The tensors of a packed weight of compressed-tensors.
    fn packed(&self, dims: [usize; 2]) -> Result<Parts<'a>, ModelError> {
        let [n_out, n_in] = dims;
        let codes = self.shaped("weight_packed", Dtype::I32, [n_out, n_in.div_ceil(CODES_PER_WORD)])?;
        if let Some(shape) = self.optional("weight_shape", &[Dtype::I32, Dtype::I64])? {
            check_shape(&shape, &[2])?;
            if !self.stored.is_surveyed() && integers(&shape) != dims.map(|n| n as u64) {
                let actual = integers(&shape);
                let message = format!("{}weight_shape is {actual:?}, expected {dims:?}", self.layer);
                return Err(self.stored.broken(message));
            }
        }
        let scales = self.part("weight_scale", FLOATS)?;
        let n_groups = match scales.shape {
            [n] if *n == n_out => 1,
            [n, n_groups] if *n == n_out && *n_groups > 0 => *n_groups,
            _ => return Err(wrong_shape(&scales, &[n_out, 1])),
        };
        let zeros = self.optional("weight_zero_point", &[Dtype::I32])?;
        if let Some(zeros) = &zeros {
            check_shape(zeros, &[n_out.div_ceil(CODES_PER_WORD), n_groups])?;
        }
        let groups = self.optional("weight_g_idx", &[Dtype::I32, Dtype::I64])?;
        match &groups {
            Some(groups) => check_shape(groups, &[n_in])?,
            None if n_in % n_groups == 0 => {}
            None => return Err(wrong_shape(&scales, &[n_out, 1])),
        }
        Ok(Parts { dims, codes, scales, zeros, groups, n_groups })
    }

    /// The values as little-endian f32, row-major.
    fn values(&self, parts: &Parts<'_>) -> Result<Vec<u8>, ModelError> {
        let [n_out, n_in] = parts.dims;
        let codes = parts.codes.bytes();
        if self.layout == Layout::Bytes {
            let dtype = if parts.codes.dtype == Dtype::I8 { DType::I8 } else { DType::F8 };
            let mut values = to_f32(&codes, dtype);
            scale_blocks(&mut values, n_in, &floats(&parts.scales), self.block(&parts.scales, parts.dims)?);
            return Ok(values.iter().flat_map(|v| v.to_le_bytes()).collect());
        }
        let codes = match self.layout {
            Layout::Packed => Codes::Packed(Words::new(&codes, n_in.div_ceil(CODES_PER_WORD))),
            Layout::Awq => Codes::Awq(Words::new(&codes, n_out / CODES_PER_WORD)),
            Layout::Gptq(_) | Layout::Bytes => Codes::Gptq(Words::new(&codes, n_out)),
        };
        Ok(affine(&self.groups(parts)?, n_out, &codes))
    }

    /// The scales, the zeros and the group of each input.
    fn groups(&self, parts: &Parts<'_>) -> Result<Groups, ModelError> {
        let n_groups = parts.n_groups;
        let [n_out, n_in] = parts.dims;
        let stored = floats(&parts.scales);
        let zeros = parts.zeros.as_ref().map(NamedTensor::bytes);
        let zeros = zeros.as_deref();
        let by_group = Words::new(zeros.unwrap_or_default(), n_out / CODES_PER_WORD);
        let by_output = Words::new(zeros.unwrap_or_default(), n_groups);
        let zero = |output, group| match self.layout {
            _ if zeros.is_none() => MIDDLE,
            Layout::Gptq(GptqZeros::LessOne) => f32::from((by_group.along_row(group, output) + 1) & 0xf),
            Layout::Gptq(GptqZeros::Plain) => f32::from(by_group.along_row(group, output)),
            Layout::Awq => f32::from(by_group.interleaved(group, output)),
            Layout::Packed | Layout::Bytes => f32::from(by_output.down_column(output, group)),
        };
        let scale = |output: usize, group: usize| match self.layout {
            Layout::Packed | Layout::Bytes => stored[output * n_groups + group],
            Layout::Gptq(_) | Layout::Awq => stored[group * n_out + output],
        };
        let each = || (0..n_out).flat_map(|output| (0..n_groups).map(move |group| [output, group]));
        Ok(Groups {
            scales: each().map(|[output, group]| scale(output, group)).collect(),
            zeros: each().map(|[output, group]| zero(output, group)).collect(),
            of_input: match &parts.groups {
                Some(groups) => self.group_indices(groups, n_groups)?,
                None => (0..n_in).map(|input| input / self.group_size(parts)).collect(),
            },
        })
    }

    /// Neighbouring inputs that share a scale.
    fn group_size(&self, parts: &Parts<'_>) -> usize {
        let [_, n_in] = parts.dims;
        match self.quantization {
            Quantization::Gptq { group_size, .. } | Quantization::Awq { group_size } => {
                group_size.unwrap_or(n_in)
            }
            _ => n_in / parts.n_groups,
        }
        .max(1)
    }

    /// The group of each input as stored, each below `n_groups`.
    fn group_indices(&self, groups: &NamedTensor<'_>, n_groups: usize) -> Result<Vec<usize>, ModelError> {
        let index = |n: u64| usize::try_from(n).ok().filter(|index| *index < n_groups);
        let indices: Option<Vec<usize>> = integers(groups).into_iter().map(index).collect();
        indices.ok_or_else(|| {
            self.stored.broken(format!("tensor {} names a group that is not one of {n_groups}", groups.name))
        })
    }
}

fn wrong_shape(tensor: &NamedTensor<'_>, expected: &[usize]) -> ModelError {
    ModelError::TensorShape {
        name: tensor.name.to_owned(),
        expected: expected.to_vec(),
        actual: tensor.shape.to_vec(),
    }
}

fn check_shape(tensor: &NamedTensor<'_>, expected: &[usize]) -> Result<(), ModelError> {
    if tensor.shape == expected { Ok(()) } else { Err(wrong_shape(tensor, expected)) }
}

/// Elements of a tensor of [`FLOATS`].
fn floats(tensor: &NamedTensor<'_>) -> Vec<f32> {
    let dtype = match tensor.dtype {
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::Bf16,
        _ => DType::F32,
    };
    to_f32(&tensor.bytes(), dtype)
}

/// Elements of a tensor of 32-bit or 64-bit integers; what is below 0 becomes larger than every count.
fn integers(tensor: &NamedTensor<'_>) -> Vec<u64> {
    let bytes = tensor.bytes();
    match tensor.dtype {
        Dtype::I64 => bytes.as_chunks().0.iter().map(|b| u64::from_le_bytes(*b)).collect(),
        _ => bytes.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b).into()).collect(),
    }
}
