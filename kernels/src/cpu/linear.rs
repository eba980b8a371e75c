//! Linear layers: weights in panels, and their product with rows.
//!
//! A weight `[n_out, n_in]` is packed once into panels of 32 outputs, `[k_cells][32]`, the last one filled up
//! with zeros. With precision bf16, rows are rounded to bf16 too, once a call; sums are f32. With precision
//! int8, rows are quantized once a call ([`bytes`]); sums are integers. With precision int4, weights are groups of
//! nibbles ([`nibbles`]). What an earlier load packed is taken as it is.

use std::sync::Arc;

use super::cell::{
    Bf16Dot, Bf16Fma, Bf16Pair, F32Fma, FillRows, FloatMath, Math, PANEL, n_cells, unpack_pair,
};
use super::context::Context;
use super::matrix::{CpuTensor, unwritten};
use super::packed::Key;
use super::panels::{self, Panels};
use super::tile::Rows;
use crate::ops::Activation;
use crate::precision::Precision;
use crate::stored::Stacked;

mod bytes;
mod nibbles;
mod product;

use bytes::BytePanels;
pub(super) use bytes::Int8Dot;
pub(super) use bytes::RowScale;
use nibbles::NibblePanels;
pub(super) use product::stride;
use product::{Epilogue, Plain, Product, ProductArgs, Size};

/// Outputs from which on rows of f32 are copied to where they are not in each other's way.
pub(super) const COPIED: usize = 128;

/// A linear layer in panels.
#[derive(Debug)]
pub struct CpuLinear {
    n_in: usize,
    n_out: usize,
    weight: Arc<Packed>,
    /// `[n_panels · 32]`, zeros past `n_out`.
    bias: Option<Vec<f32>>,
}

/// The panels in a precision, `[n_panels][k_cells][32]`.
#[derive(Debug)]
pub(super) enum Packed {
    F32(Panels<f32>),
    Bf16(Panels<Bf16Pair>),
    Int8(BytePanels),
    Int4(NibblePanels),
}

impl CpuLinear {
    /// Packs a layer in a precision.
    pub(super) fn new(context: &Context, precision: Precision, stacked: Stacked<'_>) -> Self {
        let weight = Arc::new(Packed::new(context, precision, &stacked));
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

    /// The panels.
    pub(super) fn weight(&self) -> &Arc<Packed> {
        &self.weight
    }

    /// `act(x Wᵀ + b) + residual`. `x` has `n_in` columns, `residual` the shape of the result.
    pub(super) fn apply(
        &self,
        context: &Context,
        x: &CpuTensor,
        act: Activation,
        residual: Option<&CpuTensor>,
    ) -> CpuTensor {
        let (n_tokens, n_in) = x.dims();
        let mut out = unwritten(n_tokens * self.n_out);
        let epilogue = Epilogue { bias: self.bias.as_deref(), act, residual: residual.map(CpuTensor::data) };
        let size = Size { n_tokens, n_in, n_out: self.n_out };
        let args = ProductArgs { size, epilogue };
        match &*self.weight {
            // A copy pays for rows that are multiplied with many panels.
            Packed::F32(panels) if stride::<f32>(n_in) > n_in && n_tokens > 1 && self.n_out > COPIED => {
                multiply::<F32Fma>(context, laid::<F32Fma>(context, x).view(), panels, args, &mut out);
            }
            Packed::F32(panels) => {
                let rows = Rows { cells: x.data(), stride: n_in };
                multiply::<F32Fma>(context, rows, panels, args, &mut out);
            }
            Packed::Bf16(panels) if context.isa.has_bf16_dot() => {
                multiply::<Bf16Dot>(context, laid::<Bf16Dot>(context, x).view(), panels, args, &mut out);
            }
            Packed::Bf16(panels) => {
                multiply::<Bf16Fma>(context, laid::<Bf16Fma>(context, x).view(), panels, args, &mut out);
            }
            Packed::Int8(panels) => panels.multiply(context, x, args, &mut out),
            Packed::Int4(panels) => panels.multiply(context, x, args, &mut out),
        }
        CpuTensor::new(out, n_tokens, self.n_out)
    }
}

impl Packed {
    /// A weight as an earlier load packed it, or else packed now.
    fn new(context: &Context, precision: Precision, stacked: &Stacked<'_>) -> Self {
        let way = ["linear", precision.as_str(), context.isa.get().as_str()];
        let kept = context.packed.as_ref().map(|packed| (packed, Key::new(&way, stacked.parts())));
        let mut weight = Self::blank(precision, stacked);
        if let Some((packed, key)) = kept {
            if packed.restore(&context.pool, key, weight.records()) {
                return weight;
            }
            weight = Self::blank(precision, stacked);
        }
        weight.fill(context, stacked);
        if let Some((packed, key)) = kept {
            packed.keep(key, weight.records());
        }
        weight
    }

    /// Reads the weights of an output, `[n_in]`; returns the factor that they still lack. Nibbles are not read so.
    pub(super) fn read_output(&self, out: usize, to: &mut [f32]) -> f32 {
        let n_in = to.len();
        match self {
            Self::F32(panels) => {
                to.iter_mut().zip(panels.output(out, n_in)).for_each(|(to, word)| *to = word);
                1.0
            }
            Self::Bf16(panels) => {
                let words = panels.output(out, n_cells::<Bf16Pair>(n_in));
                to.chunks_mut(2)
                    .zip(words)
                    .for_each(|(to, pair)| to.copy_from_slice(&unpack_pair(pair)[..to.len()]));
                1.0
            }
            Self::Int8(panels) => panels.read_output(out, to),
            Self::Int4(_) => f32::NAN,
        }
    }

    /// Zeros.
    fn blank(precision: Precision, stacked: &Stacked<'_>) -> Self {
        match precision {
            Precision::F32 => Self::F32(Panels::blank(stacked, n_cells::<f32>(stacked.n_in))),
            Precision::Bf16 => Self::Bf16(Panels::blank(stacked, n_cells::<Bf16Pair>(stacked.n_in))),
            Precision::Int8 => Self::Int8(BytePanels::blank(stacked)),
            Precision::Int4 => Self::Int4(NibblePanels::blank(stacked)),
        }
    }

    /// Packs a weight into zeros.
    fn fill(&mut self, context: &Context, stacked: &Stacked<'_>) {
        match self {
            Self::F32(panels) => pack::<F32Fma>(panels, context, stacked),
            Self::Bf16(panels) => pack::<Bf16Dot>(panels, context, stacked),
            Self::Int8(panels) => panels.fill(context, stacked),
            Self::Int4(panels) => panels.fill(context, stacked),
        }
    }

    /// Its arrays as bytes, to be saved for a later load and filled by it.
    fn records(&mut self) -> Vec<&mut [u8]> {
        match self {
            Self::F32(panels) => vec![panels::bytes_mut(panels.cells_mut())],
            Self::Bf16(panels) => vec![panels::bytes_mut(panels.cells_mut())],
            Self::Int8(panels) => panels.records(),
            Self::Int4(panels) => panels.records(),
        }
    }
}

/// Lays `[n_out, n_in]` into panels.
fn pack<M: FloatMath<Row = <M as Math>::Word>>(
    panels: &mut Panels<M::Word>,
    context: &Context,
    stacked: &Stacked<'_>,
) {
    panels::pack(panels, &context.pool, stacked, n_cells::<M::Word>(stacked.n_in), |_, values, rows| {
        context.isa.run(FillRows::<M> { values, width: values.len(), rows });
    });
}

/// The product of rows and panels of floats, `out: [n_tokens, n_out]`.
fn multiply<M: FloatMath>(
    context: &Context,
    rows: Rows<'_, M::Row>,
    panels: &Panels<M::Word>,
    ProductArgs { size, epilogue }: ProductArgs<'_>,
    out: &mut [f32],
) {
    let (x, panels) = (rows, panels.cells());
    Product::<M, _> { x, panels, size, units: Plain, epilogue }.run(context, out);
}

/// Rows as a product reads them.
struct Laid<C> {
    /// `[n_tokens, stride]`.
    cells: Vec<C>,
    stride: usize,
}

impl<C> Laid<C> {
    fn view(&self) -> Rows<'_, C> {
        Rows { cells: &self.cells, stride: self.stride }
    }
}

/// Rounds rows.
fn laid<M: FloatMath>(context: &Context, x: &CpuTensor) -> Laid<M::Row> {
    let (n_tokens, width) = x.dims();
    let stride = stride::<M::Row>(n_cells::<M::Word>(width));
    let mut cells = vec![M::Row::default(); n_tokens * stride];
    context.pool.rows(&mut cells, stride, width / 8 + 1, |row, rows| {
        let values = &x.data()[row * width..][..rows.len() / stride * width];
        context.isa.run(FillRows::<M> { values, width, rows });
    });
    Laid { cells, stride }
}
