//! Linear layers: weights as they are kept, and their products.

use super::arguments::{Epilogue, Product};
use super::cublaslt::{Algorithm, Cublaslt, Operands};
use super::device::{Function, Kernels};
use super::element::Element;
use super::memory::Fixed;
use super::packing::{bf16_fragments, int4_fragments, int8_fragments};
use super::queue::{Launch, Queue, as_bytes};
use super::rows::{activation_number, finish_linear};
use super::tensor::CudaTensor;
use crate::check::Dims;
use crate::ops::{Activation, KernelError, Result};
use crate::precision::Precision;
use crate::stored::Stacked;

/// A linear layer on a device.
#[derive(Debug)]
pub struct CudaLinear {
    n_in: usize,
    n_out: usize,
    kept: Kept,
    /// f32, `[n_out]`.
    bias: Option<Fixed>,
}

/// Weights in the layout of the kernel that multiplies with them. One kernel for a layer, however many rows there are.
#[derive(Debug)]
enum Kept {
    /// `[n_out, n_in]` in the element of activations, for cublasLt. `None`: no inputs or no outputs.
    Plain(Option<(Fixed, Algorithm)>),
    /// f32, `[n_out, n_in]`, of an expert.
    Rows(Fixed),
    /// Fragments of bf16.
    Bf16(Fixed),
    /// Fragments of int8, and their scales.
    Int8(Fixed, Fixed),
    /// Fragments of int4, and their scales.
    Int4(Fixed, Fixed),
}

/// Activation and residual after a product and the layer's bias.
#[derive(Clone, Copy, Debug)]
pub(super) struct Finish<'a> {
    pub(super) act: Activation,
    /// Added last, `[n_tokens, n_out]`.
    pub(super) residual: Option<&'a CudaTensor>,
}

/// Use of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Any number of rows.
    Hidden,
    /// A few rows of each step.
    Logits,
    /// The rows that are routed to one expert.
    Expert,
}

impl CudaLinear {
    /// Takes weights to the device.
    pub(super) fn load(
        queue: &Queue,
        cublaslt: &Cublaslt,
        precision: Precision,
        used: Use,
        weights: &Stacked<'_>,
    ) -> Result<Self> {
        let op = "load_linear";
        let fixed = |bytes: &[u8]| queue.fixed(op, bytes);
        let (n_in, n_out) = (weights.n_in, weights.n_out);
        let kept = match (precision, used) {
            (Precision::F32, Use::Expert) => Kept::Rows(fixed(&rows_of(Element::F32, weights))?),
            (Precision::F32, _) => plain(queue, cublaslt, Element::F32, weights)?,
            (Precision::Bf16, Use::Hidden) => plain(queue, cublaslt, Element::Bf16, weights)?,
            (Precision::Bf16, Use::Logits | Use::Expert) => {
                Kept::Bf16(fixed(as_bytes(&bf16_fragments(weights)))?)
            }
            (Precision::Int8, _) | (Precision::Int4, Use::Logits) => {
                let (bytes, scales) = int8_fragments(weights);
                Kept::Int8(fixed(&bytes)?, fixed(as_bytes(&scales))?)
            }
            (Precision::Int4, Use::Hidden | Use::Expert) => {
                let (bytes, scales) = int4_fragments(weights);
                Kept::Int4(fixed(&bytes)?, fixed(as_bytes(&scales))?)
            }
        };
        let bias = weights.bias.as_ref().map(|bias| fixed(as_bytes(bias))).transpose()?;
        Ok(Self { n_in, n_out, kept, bias })
    }

    /// `(n_in, n_out)`.
    pub(super) fn dims(&self) -> Dims {
        (self.n_in, self.n_out)
    }

    /// Addresses of the weights, and of the scales that quantised ones have, of an expert's layer.
    pub(super) fn expert_addresses(&self, op: &'static str) -> Result<[u64; 2]> {
        match &self.kept {
            _ if self.bias.is_some() => Err(not_of(op, "an expert without biases")),
            Kept::Plain(_) => Err(not_of(op, "an expert's layer")),
            Kept::Rows(w) | Kept::Bf16(w) => Ok([w.address(), 0]),
            Kept::Int8(w, scales) | Kept::Int4(w, scales) => Ok([w.address(), scales.address()]),
        }
    }

    /// The kernel that multiplies with an expert's layer like this one.
    pub(super) fn expert_kernel(&self, kernels: &Kernels) -> Function {
        match &self.kept {
            Kept::Plain(_) | Kept::Rows(_) => kernels.experts_f32,
            Kept::Bf16(_) => kernels.experts_bf16,
            Kept::Int8(..) => kernels.experts_int8,
            Kept::Int4(..) => kernels.experts_int4,
        }
    }

    /// `act(x Wᵀ + b)`, plus `residual`; the arguments are checked.
    pub(super) fn apply(
        &self,
        queue: &Queue,
        cublaslt: &Cublaslt,
        x: &CudaTensor,
        then: Finish<'_>,
    ) -> Result<CudaTensor> {
        let op = "linear";
        let (n_tokens, act) = (x.dims().0, then.act);
        let y = CudaTensor::new(op, queue, (n_tokens, self.n_out))?;
        if y.n_values() == 0 {
            return Ok(y);
        }
        let bias = self.bias.as_ref().map_or(0, Fixed::address);
        let residual = then.residual.map_or(0, CudaTensor::address);
        if let Kept::Plain(kept) = &self.kept {
            // Sums stay in f32 until all that follows is done, and are rounded once.
            let is_finished = bias == 0 && residual == 0 && act == Activation::None;
            let result = if is_finished { queue.element() } else { Element::F32 };
            let sums = match result == queue.element() {
                true => y.clone(),
                false => CudaTensor::of(op, queue, result, y.dims())?,
            };
            match kept {
                Some((weight, algorithm)) => {
                    let (x, w, y) = (x.address(), weight.address(), sums.address());
                    cublaslt.multiply(queue, algorithm, Operands { x, w, y, result, n_tokens })?;
                }
                None => queue.fill(op, sums.address(), 0, sums.n_values() * result.size())?,
            }
            if !is_finished {
                finish_linear(queue, [&y, &sums], [bias, residual], act)?;
            }
            return Ok(y);
        }
        let epilogue =
            Epilogue { y: y.address(), bias, residual, activation: activation_number(act), gap: 0 };
        let [n_in, n_out] = [self.n_in, self.n_out].map(|n| n as u32);
        let product = Product { x: x.address(), n_tokens: n_tokens as u32, n_in, n_out, gap: 0 };
        let grid = [self.n_out.div_ceil(16), n_tokens.div_ceil(8), 1];
        let launch = Launch { grid, threads: 128, shared_bytes: 0 };
        let kernels = &queue.device().kernels;
        match &self.kept {
            Kept::Plain(_) | Kept::Rows(_) => Err(not_of(op, "a layer that is no expert's")),
            Kept::Bf16(w) => {
                queue.launch(op, kernels.linear_bf16, launch, [&epilogue, &product, &w.address()])
            }
            Kept::Int8(w, scales) => {
                let arguments: [&dyn super::queue::Argument; 4] =
                    [&epilogue, &product, &w.address(), &scales.address()];
                queue.launch(op, kernels.linear_int8, launch, arguments)
            }
            Kept::Int4(w, scales) => {
                let arguments: [&dyn super::queue::Argument; 4] =
                    [&epilogue, &product, &w.address(), &scales.address()];
                queue.launch(op, kernels.linear_int4, launch, arguments)
            }
        }?;
        Ok(y)
    }
}

/// Weights row by row in an element.
fn plain(queue: &Queue, cublaslt: &Cublaslt, element: Element, weights: &Stacked<'_>) -> Result<Kept> {
    let (n_in, n_out) = (weights.n_in, weights.n_out);
    if n_in == 0 || n_out == 0 {
        return Ok(Kept::Plain(None));
    }
    let weight = queue.fixed("load_linear", &rows_of(element, weights))?;
    Ok(Kept::Plain(Some((weight, cublaslt.choose(element, n_in, n_out)?))))
}

/// Weights in an element, `[n_out, n_in]`.
fn rows_of(element: Element, weights: &Stacked<'_>) -> Vec<u8> {
    let (n_in, n_out) = (weights.n_in, weights.n_out);
    let (mut bytes, mut row) = (Vec::with_capacity(n_in * n_out * element.size()), vec![0.0; n_in]);
    for out in 0..n_out {
        weights.row(out, &mut row);
        element.encode(row.iter().copied(), &mut bytes);
    }
    bytes
}

/// The error of a layer that was loaded for another use.
fn not_of(op: &'static str, what: &'static str) -> KernelError {
    KernelError::Library { op, message: format!("this is not {what}") }
}
