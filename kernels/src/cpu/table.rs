//! Embedding tables, and rows of them. A table that logits are made with too is kept once, as the panels of that layer: a
//! vocabulary's is often the largest weight of a small model, and few of its rows are read.

use std::sync::Arc;

use triptych_core::DType;

use super::cell::{Bf16Pair, ByteQuad, Cell, n_cells};
use super::context::Context;
use super::kv::{inverse, scale};
use super::linear::{CpuLinear, Packed};
use super::matrix::{CpuTensor, unwritten};
use super::packed::Key;
use super::rows::VALUES_PER_NS;
use super::simd::{Kernel, Simd};
use crate::ops::{LinearPart, WeightView};
use crate::precision::Precision;
use crate::stored;

/// Values of a table from which on it becomes bytes where weights do: a vocabulary's is often the largest weight of a
/// small model, a table of positions is added to every row and costs little as it is.
const WORTH_BYTES: usize = 1 << 21;

/// Bytes of the scale before a row of bytes.
const SCALE_BYTES: usize = size_of::<f32>();

/// Format of the rows of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    /// Their values one after another.
    Plain(DType),
    /// The scale of the row's bytes, as f32, then a signed byte for each value.
    Bytes,
}

impl Rows {
    /// The format in which a back end keeps a stored table.
    fn of(precision: Precision, stored: DType, n_values: usize) -> Self {
        match precision {
            Precision::Int8 | Precision::Int4 if n_values >= WORTH_BYTES => Self::Bytes,
            Precision::Bf16 | Precision::Int8 | Precision::Int4 if stored == DType::F32 => {
                Self::Plain(DType::Bf16)
            }
            _ => Self::Plain(stored),
        }
    }

    /// Bytes of a row.
    fn row_bytes(self, width: usize) -> usize {
        match self {
            Self::Plain(dtype) => width * dtype.size(),
            Self::Bytes => SCALE_BYTES + width,
        }
    }

    /// Reads a row; returns the factor that its values still lack.
    fn read(self, row: &[u8], to: &mut [f32]) -> f32 {
        match (self, row.split_first_chunk()) {
            (Self::Plain(dtype), _) => {
                stored::decode(dtype, row, to);
                1.0
            }
            (Self::Bytes, Some((scale, bytes))) => {
                for (value, byte) in to.iter_mut().zip(bytes) {
                    *value = f32::from(*byte as i8);
                }
                f32::from_le_bytes(*scale)
            }
            // A row of bytes begins with its scale.
            (Self::Bytes, None) => f32::NAN,
        }
    }

    /// The name of the way in which packed weights are made.
    fn as_str(self) -> &'static str {
        match self {
            Self::Plain(dtype) => dtype.as_str(),
            Self::Bytes => "bytes",
        }
    }
}

/// Bytes that a table of `n_rows` by `width` takes of a back end's memory.
pub fn table_bytes(precision: Precision, stored: DType, [n_rows, width]: [usize; 2]) -> usize {
    n_rows * Rows::of(precision, stored, n_rows * width).row_bytes(width)
}

/// `true` if a table is kept as the layer of this part, which computes logits with it: where its rows are the same.
pub fn is_table_of_logits(precision: Precision, part: &LinearPart<'_>) -> bool {
    let n_values = part.weight.shape.iter().product();
    match (Rows::of(precision, part.weight.dtype, n_values), precision) {
        // A byte stands for the same share of the largest value of its row, whatever all of them are multiplied with.
        (Rows::Bytes, _) => part.scale.is_normal(),
        (Rows::Plain(_), Precision::F32) => part.scale == 1.0,
        (Rows::Plain(dtype), Precision::Bf16) => part.scale == 1.0 && dtype == DType::Bf16,
        // A small one: in more bits than the layer.
        (Rows::Plain(_), Precision::Int8 | Precision::Int4) => false,
    }
}

/// Storage of a table.
#[derive(Debug)]
enum Kept {
    /// `[n_rows]` of these.
    Rows(Rows, Vec<u8>),
    /// As the panels of a layer whose outputs are the rows.
    Panels(Arc<Packed>),
}

/// An embedding table: as it was stored, in bf16 where weights are no more than that, in bytes where weights are and the
/// table is large, or as the layer that gives logits.
#[derive(Debug)]
pub struct CpuTable {
    kept: Kept,
    /// Rows.
    pub(super) n_rows: usize,
    /// Values of a row.
    width: usize,
    /// Factor on the values of a row.
    scale: f32,
}

impl CpuTable {
    /// Keeps a table of `(n_rows, width)`; the caller checked its bytes.
    pub(super) fn new(
        context: &Context,
        table: WeightView<'_>,
        (n_rows, width): (usize, usize),
        scale: f32,
    ) -> Self {
        let rows = Rows::of(context.precision, table.dtype, n_rows * width);
        if rows == Rows::Plain(table.dtype) {
            return Self { kept: Kept::Rows(rows, table.data.to_vec()), n_rows, width, scale };
        }
        let mut data = vec![0; n_rows * rows.row_bytes(width)];
        let kept = context
            .packed
            .as_ref()
            .map(|packed| (packed, Key::new(&["table", rows.as_str()], [&LinearPart::new(table, None)])));
        let is_restored =
            kept.is_some_and(|(packed, key)| packed.restore(&context.pool, key, vec![&mut data]));
        if !is_restored {
            let row_bytes = rows.row_bytes(width);
            context.pool.rows(&mut data, row_bytes, width / VALUES_PER_NS, |first, to| {
                let row_stored = width * table.dtype.size();
                let from = &table.data[first * row_stored..][..to.len() / row_bytes * row_stored];
                context.isa.run(Narrow { dtype: table.dtype, width, from, rows, to });
            });
            if let Some((packed, key)) = kept {
                packed.keep(key, vec![&mut data]);
            }
        }
        Self { kept: Kept::Rows(rows, data), n_rows, width, scale }
    }

    /// The outputs of a layer as rows, which are read times `scale`; only where [`is_table_of_logits`] is true.
    pub(super) fn of_logits(layer: &CpuLinear, scale: f32) -> Self {
        let (width, n_rows) = layer.dims();
        Self { kept: Kept::Panels(layer.weight().clone()), n_rows, width, scale }
    }

    /// Writes a row, `[width]`.
    fn row(&self, id: u32, to: &mut [f32]) {
        let id = id as usize;
        let factor = self.scale
            * match &self.kept {
                Kept::Rows(rows, data) => {
                    let row_bytes = rows.row_bytes(self.width);
                    rows.read(&data[id * row_bytes..][..row_bytes], to)
                }
                Kept::Panels(panels) => panels.read_output(id, to),
            };
        if factor != 1.0 {
            to.iter_mut().for_each(|value| *value *= factor);
        }
    }
}

/// A run of stored rows on its way to one of fewer bytes.
struct Narrow<'a> {
    dtype: DType,
    width: usize,
    from: &'a [u8],
    rows: Rows,
    to: &'a mut [u8],
}

impl Kernel for Narrow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { dtype, width, from, rows, to } = self;
        let mut values = vec![0.0; width];
        let (mut quads, mut pairs) =
            (vec![0; n_cells::<ByteQuad>(width)], vec![0; n_cells::<Bf16Pair>(width)]);
        let from = from.chunks_exact((width * dtype.size()).max(1));
        for (to, from) in to.chunks_exact_mut(rows.row_bytes(width).max(1)).zip(from) {
            stored::decode(dtype, from, &mut values);
            if rows == Rows::Bytes {
                let scale = scale(&values);
                ByteQuad::fill(s, &mut quads, &values, inverse(scale));
                let (first, bytes) = to.split_at_mut(SCALE_BYTES);
                first.copy_from_slice(&scale.to_le_bytes());
                copy(bytes, quads.iter().map(|quad| quad.to_le_bytes()));
            } else {
                Bf16Pair::fill(s, &mut pairs, &values, 1.0);
                copy(to, pairs.iter().map(|pair| pair.to_le_bytes()));
            }
        }
    }
}

/// Writes words, of the last of them as much as there is room for.
#[inline(always)]
fn copy(to: &mut [u8], words: impl Iterator<Item = [u8; 4]>) {
    for (to, word) in to.chunks_mut(4).zip(words) {
        to.copy_from_slice(&word[..to.len()]);
    }
}

/// Rows `ids` of a table, `[ids.len(), width]`.
pub(super) fn embed(context: &Context, table: &CpuTable, ids: &[u32]) -> CpuTensor {
    let width = table.width;
    let mut out = unwritten(ids.len() * width);
    context.pool.rows(&mut out, width, width / VALUES_PER_NS, |first, rows| {
        for (row, &id) in rows.chunks_exact_mut(width).zip(&ids[first..]) {
            table.row(id, row);
        }
    });
    CpuTensor::new(out, ids.len(), width)
}

/// Sums of rows, `ids` and `weights` of `n_terms` each: `[ids.len() / n_terms, width]`.
pub(super) fn embed_weighted(
    context: &Context,
    table: &CpuTable,
    (ids, weights): (&[u32], &[f32]),
    n_terms: usize,
) -> CpuTensor {
    let width = table.width;
    let n_sums = ids.len() / n_terms.max(1);
    let mut out = unwritten(n_sums * width);
    context.pool.rows(&mut out, width, n_terms * width / VALUES_PER_NS, |first, rows| {
        let mut term = vec![0.0; width];
        for (i, row) in rows.chunks_exact_mut(width).enumerate() {
            let terms = (first + i) * n_terms..(first + i + 1) * n_terms;
            row.fill(0.0);
            for (&id, &weight) in ids[terms.clone()].iter().zip(&weights[terms]) {
                table.row(id, &mut term);
                row.iter_mut().zip(&term).for_each(|(sum, value)| *sum += weight * value);
            }
        }
    });
    CpuTensor::new(out, n_sums, width)
}
