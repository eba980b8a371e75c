//! Linear layers: weights in panels, and their product with rows.
//!
//! A weight `[n_out, n_in]` is packed once into panels of 32 outputs, `[k_cells][32]`, the last one filled up
//! with zeros. With precision bf16, rows are rounded to bf16 too, once a call; sums are f32. With precision
//! int8, rows are quantized once a call ([`bytes`]); sums are whole numbers. With precision int4, weights are groups of
//! nibbles ([`nibbles`]).

use super::cell::{Bf16Pair, Dots, FillRows, FloatMath, Halves, Math, PANEL, Singles, n_cells};
use super::matrix::{CpuTensor, unwritten};
use super::panels::{self, Panels};
use super::{CpuBackend, Precision};
use crate::ops::Activation;
use crate::stored::Stacked;

mod bytes;
mod nibbles;
mod product;

use bytes::BytePanels;
pub(super) use bytes::{Quads, TO_LOW_BITS};
use nibbles::NibblePanels;
use product::{Epilogue, Plain, Product, Size, stride};

/// Outputs from which on rows of f32 are copied to where they are not in each other's way.
const COPIED: usize = 128;

/// A linear layer in panels.
#[derive(Debug)]
pub struct CpuLinear {
    n_in: usize,
    n_out: usize,
    weight: Packed,
    /// `[n_panels · 32]`, zeros past `n_out`.
    bias: Option<Vec<f32>>,
}

/// The panels in a precision, `[n_panels][k_cells][32]`.
#[derive(Debug)]
enum Packed {
    F32(Panels<f32>),
    Bf16(Panels<Bf16Pair>),
    Int8(BytePanels),
    Int4(NibblePanels),
}

impl CpuLinear {
    /// Packs a layer in a precision.
    pub(super) fn new(backend: &CpuBackend, precision: Precision, stacked: Stacked<'_>) -> Self {
        let weight = match precision {
            Precision::F32 => Packed::F32(pack::<Singles>(backend, &stacked)),
            Precision::Bf16 => Packed::Bf16(pack::<Dots>(backend, &stacked)),
            Precision::Int8 => Packed::Int8(BytePanels::new(backend, &stacked)),
            Precision::Int4 => Packed::Int4(NibblePanels::new(backend, &stacked)),
        };
        let Stacked { n_in, n_out, bias, .. } = stacked;
        let bias = bias.map(|mut bias| {
            bias.resize(n_out.next_multiple_of(PANEL), 0.0);
            bias
        });
        Self { n_in, n_out, weight, bias }
    }

    /// `(n_in, n_out)`.
    pub(super) fn dims(&self) -> (usize, usize) {
        (self.n_in, self.n_out)
    }

    /// `act(x Wᵀ + b) + residual`. `x` has `n_in` columns, `residual` the shape of the result.
    pub(super) fn apply(
        &self,
        backend: &CpuBackend,
        x: &CpuTensor,
        act: Activation,
        residual: Option<&CpuTensor>,
    ) -> CpuTensor {
        let (n_tokens, n_in) = x.dims();
        let mut out = unwritten(n_tokens * self.n_out);
        let epilogue = Epilogue { bias: self.bias.as_deref(), act, residual: residual.map(CpuTensor::data) };
        let size = Size { n_tokens, n_in, n_out: self.n_out };
        match &self.weight {
            // A copy is worth its while for rows that meet many panels.
            Packed::F32(panels) if stride::<f32>(n_in) > n_in && n_tokens > 1 && self.n_out > COPIED => {
                let (x, stride) = laid::<Singles>(backend, x);
                let (x, panels) = (&x, panels.cells());
                Product::<Singles, _> { x, stride, panels, size, units: Plain, epilogue }
                    .run(backend, &mut out);
            }
            Packed::F32(panels) => {
                let (x, stride, panels) = (x.data(), n_in, panels.cells());
                Product::<Singles, _> { x, stride, panels, size, units: Plain, epilogue }
                    .run(backend, &mut out);
            }
            Packed::Bf16(panels) if backend.isa.has_pairs() => {
                let (x, stride) = laid::<Dots>(backend, x);
                let (x, panels) = (&x, panels.cells());
                Product::<Dots, _> { x, stride, panels, size, units: Plain, epilogue }.run(backend, &mut out);
            }
            Packed::Bf16(panels) => {
                let (x, stride) = laid::<Halves>(backend, x);
                let (x, panels) = (&x, panels.cells());
                Product::<Halves, _> { x, stride, panels, size, units: Plain, epilogue }
                    .run(backend, &mut out);
            }
            Packed::Int8(panels) => panels.multiply(backend, x, (size, epilogue), &mut out),
            Packed::Int4(panels) => panels.multiply(backend, x, (size, epilogue), &mut out),
        }
        CpuTensor::new(out, n_tokens, self.n_out)
    }
}

/// Lays `[n_out, n_in]` into panels.
fn pack<M: FloatMath<Row = <M as Math>::Word>>(
    backend: &CpuBackend,
    stacked: &Stacked<'_>,
) -> Panels<M::Word> {
    panels::pack(&backend.pool, stacked, n_cells::<M::Word>(stacked.n_in), |_, values, rows| {
        backend.isa.run(FillRows::<M> { values, width: values.len(), rows });
    })
}

/// Rows as a product reads them, rounded: `[n_tokens, stride]`, and the stride.
fn laid<M: FloatMath>(backend: &CpuBackend, x: &CpuTensor) -> (Vec<M::Row>, usize) {
    let (n_tokens, width) = x.dims();
    let stride = stride::<M::Row>(n_cells::<M::Word>(width));
    let mut rows = vec![M::Row::default(); n_tokens * stride];
    backend.pool.rows(&mut rows, stride, width / 8 + 1, |row, rows| {
        let values = &x.data()[row * width..][..rows.len() / stride * width];
        backend.isa.run(FillRows::<M> { values, width, rows });
    });
    (rows, stride)
}
