//! Stored weights as f32: checks of a [`WeightView`] against its bytes, and decoding.
//!
//! Bytes may start anywhere: a file guarantees no alignment, so elements are read byte by byte.

use std::ops::Range;

use half::{bf16, f16};
use triptych_core::DType;

use crate::check::sizes;
use crate::ops::{KernelError, LinearPart, Result, WeightView};

/// Decodes a weight; `op` is for the error when the bytes do not fit the shape.
pub(crate) fn to_f32(op: &'static str, view: WeightView<'_>) -> Result<Vec<f32>> {
    n_bytes(op, view)?;
    let mut out = vec![0.0; view.data.len() / view.dtype.size()];
    decode(view.dtype, view.data, &mut out);
    Ok(out)
}

/// Decodes little-endian elements: `data` holds as many as `out`.
pub(crate) fn decode(dtype: DType, data: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (value, bytes) in out.iter_mut().zip(data.as_chunks::<4>().0) {
                *value = f32::from_le_bytes(*bytes);
            }
        }
        DType::Bf16 => {
            for (value, bytes) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                *value = bf16::from_le_bytes(*bytes).to_f32();
            }
        }
        DType::F16 => {
            for (value, bytes) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                *value = f16::from_le_bytes(*bytes).to_f32();
            }
        }
        // Refused with the shape: no weight has a scale for each row.
        DType::I8 | DType::F8 => {}
    }
}

/// An error unless the bytes are as many as the shape says.
fn n_bytes(op: &'static str, view: WeightView<'_>) -> Result<()> {
    if view.dtype.is_scaled() {
        return Err(KernelError::Shape {
            op,
            what: "weight element bytes",
            expected: vec![2, 4],
            actual: vec![view.dtype.size()],
        });
    }
    let n_values = view.shape.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim));
    let expected = n_values.and_then(|n| n.checked_mul(view.dtype.size()));
    sizes::same(op, "weight bytes", &[view.data.len()], &[expected.unwrap_or(usize::MAX)])
}

/// `(n_rows, width)` of a table, checked against its bytes.
pub(crate) fn table_dims(op: &'static str, view: WeightView<'_>) -> Result<(usize, usize)> {
    n_bytes(op, view)?;
    match *view.shape {
        [n_rows, width] => Ok((n_rows, width)),
        _ => Err(rank(op, "table", view)),
    }
}

/// Scale and bias of a norm, `[width]` each.
pub(crate) fn norm(
    scale: WeightView<'_>,
    bias: Option<WeightView<'_>>,
) -> Result<(Vec<f32>, Option<Vec<f32>>)> {
    let [width] = *scale.shape else { return Err(rank("load_norm", "scale", scale)) };
    if let Some(bias) = bias {
        sizes::same("load_norm", "bias", bias.shape, &[width])?;
    }
    Ok((to_f32("load_norm", scale)?, bias.map(|b| to_f32("load_norm", b)).transpose()?))
}

/// Stacked linear layers. Weights are decoded row by row as they are asked for: a copy of all would cost as much as
/// packing them.
#[derive(Debug)]
pub(crate) struct Stacked<'a> {
    /// Inputs.
    pub(crate) n_in: usize,
    /// Outputs of all parts.
    pub(crate) n_out: usize,
    /// Each part with its range of outputs.
    parts: Vec<(Range<usize>, LinearPart<'a>)>,
    /// `[n_out]`; zeros for a part without one, `None` if no part has one.
    pub(crate) bias: Option<Vec<f32>>,
}

impl Stacked<'_> {
    /// Writes the weights of an output, `[n_in]`.
    pub(crate) fn row(&self, out: usize, to: &mut [f32]) {
        let Some((outputs, part)) = self.parts.iter().find(|(outputs, _)| outputs.contains(&out)) else {
            return;
        };
        let row_bytes = self.n_in * part.weight.dtype.size();
        decode(part.weight.dtype, &part.weight.data[(out - outputs.start) * row_bytes..][..row_bytes], to);
        if part.scale != 1.0 {
            to.iter_mut().for_each(|value| *value *= part.scale);
        }
    }

    /// The layers that were stacked.
    pub(crate) fn parts(&self) -> impl Iterator<Item = &LinearPart<'_>> {
        self.parts.iter().map(|(_, part)| part)
    }

    /// All weights, `[n_out, n_in]`.
    #[cfg(feature = "reference")]
    pub(crate) fn weight(&self) -> Vec<f32> {
        let mut weight = vec![0.0; self.n_out * self.n_in];
        for (out, row) in weight.chunks_exact_mut(self.n_in.max(1)).enumerate() {
            self.row(out, row);
        }
        weight
    }
}

/// Checks the parts of a linear layer and lays them one under another.
pub(crate) fn stack<'a>(parts: &[LinearPart<'a>]) -> Result<Stacked<'a>> {
    let op = "load_linear";
    let Some(first) = parts.first() else {
        return Err(KernelError::Shape { op, what: "parts", expected: vec![1], actual: vec![0] });
    };
    let (_, n_in) = part_dims(first)?;
    let mut stacked = Stacked { n_in, n_out: 0, parts: Vec::with_capacity(parts.len()), bias: None };
    if parts.iter().any(|part| part.bias.is_some()) {
        stacked.bias = Some(Vec::new());
    }
    for part in parts {
        let (n_out, part_in) = part_dims(part)?;
        sizes::same(op, "inputs of a part", &[part_in], &[n_in])?;
        stacked.parts.push((stacked.n_out..stacked.n_out + n_out, *part));
        stacked.n_out += n_out;
        if let Some(bias) = &mut stacked.bias {
            match part.bias {
                Some(view) => {
                    sizes::same(op, "bias", view.shape, &[n_out])?;
                    bias.extend(to_f32(op, view)?.into_iter().map(|value| value * part.scale));
                }
                None => bias.resize(stacked.n_out, 0.0),
            }
        }
    }
    Ok(stacked)
}

/// Taps of a depthwise convolution.
#[derive(Debug)]
pub(crate) struct Taps {
    /// Channels.
    pub(crate) channels: usize,
    /// Taps down and across.
    pub(crate) kernel: [usize; 2],
    /// `[kernel · kernel, channels]`: the stored weight transposed.
    pub(crate) weight: Vec<f32>,
    /// `[channels]`.
    pub(crate) bias: Option<Vec<f32>>,
}

/// Weight `[channels, 1, kernel]` and bias `[channels]` of a causal convolution, whose taps are those across.
pub(crate) fn causal_taps(weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<Taps> {
    let op = "load_causal_conv";
    let [channels, 1, kernel] = *weight.shape else { return Err(rank(op, "weight", weight)) };
    taps(op, WeightView { shape: &[channels, 1, 1, kernel], ..weight }, bias)
}

/// Weight `[channels, 1, down, across]` and bias `[channels]` of a depthwise convolution.
pub(crate) fn taps(op: &'static str, weight: WeightView<'_>, bias: Option<WeightView<'_>>) -> Result<Taps> {
    let [channels, 1, down, across] = *weight.shape else { return Err(rank(op, "weight", weight)) };
    if let Some(bias) = bias {
        sizes::same(op, "bias", bias.shape, &[channels])?;
    }
    let stored = to_f32(op, weight)?;
    let n_taps = stored.len() / channels.max(1);
    let weight =
        (0..n_taps).flat_map(|tap| stored.iter().skip(tap).step_by(n_taps)).copied().collect::<Vec<f32>>();
    Ok(Taps { channels, kernel: [down, across], weight, bias: bias.map(|b| to_f32(op, b)).transpose()? })
}

/// Decays of the heads of the gated delta rule.
#[derive(Debug)]
pub(crate) struct Decays {
    /// `−exp(a_log)`, `[n_heads]`.
    pub(crate) rates: Vec<f32>,
    /// `[n_heads]`.
    pub(crate) dt_bias: Vec<f32>,
}

impl Decays {
    /// Takes the logarithms of rates and the bias of the step, `[n_heads]` each.
    pub(crate) fn new(a_log: WeightView<'_>, dt_bias: WeightView<'_>) -> Result<Self> {
        let op = "load_decay";
        let [n_heads] = *a_log.shape else { return Err(rank(op, "a_log", a_log)) };
        sizes::same(op, "dt_bias", dt_bias.shape, &[n_heads])?;
        let rates = to_f32(op, a_log)?.into_iter().map(|a| -a.exp()).collect();
        Ok(Self { rates, dt_bias: to_f32(op, dt_bias)? })
    }
}

/// `(out, in)` of a part, dimensions after the first taken together.
fn part_dims(part: &LinearPart<'_>) -> Result<(usize, usize)> {
    n_bytes("load_linear", part.weight)?;
    match part.weight.shape {
        [_] | [] => Err(rank("load_linear", "weight", part.weight)),
        [n_out, rest @ ..] => match rest.iter().try_fold(1_usize, |n, &dim| n.checked_mul(dim)) {
            Some(n_in) => Ok((*n_out, n_in)),
            None => Err(rank("load_linear", "weight", part.weight)),
        },
    }
}

/// The error for an unexpected number of dimensions.
fn rank(op: &'static str, what: &'static str, view: WeightView<'_>) -> KernelError {
    KernelError::Shape { op, what, expected: vec![], actual: view.shape.to_vec() }
}
