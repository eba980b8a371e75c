//! Ops that move rows or treat each alone: embeddings, gathers, columns, gates.

use triptych_core::DType;

use super::cell::bf16_bits;
use super::math::Gate;
use super::matrix::{CpuTensor, unwritten};
use super::packed::Key;
use super::simd::{Kernel, Simd};
use super::{CpuBackend, Precision};
use crate::check::Dims;
use crate::ops::{Activation, LinearPart, WeightView};
use crate::stored;

/// Values of a row that are touched in a nanosecond, for the cost of a task.
pub(super) const VALUES_PER_NS: usize = 2;

/// The same for values that are only copied.
const COPIED_PER_NS: usize = 4;

/// An embedding table as it was stored, or in bf16 where weights are no more than that.
#[derive(Debug)]
pub struct CpuTable {
    /// Element type.
    pub(super) dtype: DType,
    /// `[n_rows, width]`.
    pub(super) data: Vec<u8>,
    /// Rows.
    pub(super) n_rows: usize,
    /// Values of a row.
    pub(super) width: usize,
    /// Factor on what is read.
    pub(super) scale: f32,
}

impl CpuTable {
    /// Keeps a table of `(n_rows, width)`; the caller checked its bytes.
    pub(super) fn new(
        backend: &CpuBackend,
        table: WeightView<'_>,
        (n_rows, width): (usize, usize),
        scale: f32,
    ) -> Self {
        if backend.precision == Precision::F32 || table.dtype != DType::F32 {
            return Self { dtype: table.dtype, data: table.data.to_vec(), n_rows, width, scale };
        }
        let mut data = vec![0; n_rows * width * DType::Bf16.size()];
        let kept = backend.packed.as_ref().map(|packed| {
            (packed, Key::new(&["table", DType::Bf16.as_str()], [&LinearPart::new(table, None)]))
        });
        let is_restored =
            kept.is_some_and(|(packed, key)| packed.restore(&backend.pool, key, vec![&mut data]));
        if !is_restored {
            halve(backend, table.data, &mut data);
            if let Some((packed, key)) = kept {
                packed.keep(key, vec![&mut data]);
            }
        }
        Self { dtype: DType::Bf16, data, n_rows, width, scale }
    }
}

/// Bytes of f32 to bytes of bf16.
fn halve(backend: &CpuBackend, from: &[u8], to: &mut [u8]) {
    backend.pool.rows(to, DType::Bf16.size(), 1, |first, to| {
        let from = &from[first * DType::F32.size()..][..to.len() * 2];
        backend.isa.run(Halve { from, to });
    });
}

/// The same in a run.
struct Halve<'a> {
    from: &'a [u8],
    to: &'a mut [u8],
}

impl Kernel for Halve<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        for (to, from) in self.to.as_chunks_mut::<2>().0.iter_mut().zip(self.from.as_chunks::<4>().0) {
            *to = (bf16_bits(f32::from_le_bytes(*from)) as u16).to_le_bytes();
        }
    }
}

/// Rows of a table.
pub(super) fn embed(backend: &CpuBackend, table: &CpuTable, ids: &[u32]) -> CpuTensor {
    let width = table.width;
    let mut out = unwritten(ids.len() * width);
    let row_bytes = width * table.dtype.size();
    backend.pool.rows(&mut out, width, width / VALUES_PER_NS, |first, rows| {
        for (row, &id) in rows.chunks_exact_mut(width).zip(&ids[first..]) {
            stored::decode(table.dtype, &table.data[id as usize * row_bytes..][..row_bytes], row);
            if table.scale != 1.0 {
                row.iter_mut().for_each(|value| *value *= table.scale);
            }
        }
    });
    CpuTensor::new(out, ids.len(), width)
}

/// Rows by number.
pub(super) fn gather(backend: &CpuBackend, x: &CpuTensor, rows: &[u32]) -> CpuTensor {
    let width = x.dims().1;
    let mut out = unwritten(rows.len() * width);
    backend.pool.rows(&mut out, width, width / COPIED_PER_NS, |first, out| {
        for (out, &row) in out.chunks_exact_mut(width).zip(&rows[first..]) {
            out.copy_from_slice(x.row(row as usize));
        }
    });
    CpuTensor::new(out, rows.len(), width)
}

/// Replaces rows.
pub(super) fn scatter(x: &mut CpuTensor, rows: &[u32], src: &CpuTensor) {
    let width = x.dims().1;
    let data = x.data_mut();
    for (i, &row) in rows.iter().enumerate() {
        data[row as usize * width..][..width].copy_from_slice(src.row(i));
    }
}

/// Some columns.
pub(super) fn columns(backend: &CpuBackend, x: &CpuTensor, start: usize, width: usize) -> CpuTensor {
    let n_tokens = x.dims().0;
    let mut out = unwritten(n_tokens * width);
    backend.pool.rows(&mut out, width, width / COPIED_PER_NS, |first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&x.row(row)[start..start + width]);
        }
    });
    CpuTensor::new(out, n_tokens, width)
}

/// Values of a turned row that are read before the next row's: their lines stay in the first cache.
const TURNED: usize = 64;

/// Rows of each sequence to columns; `t` rows are a sequence.
pub(super) fn transpose(backend: &CpuBackend, x: &CpuTensor, (t, dims): (usize, Dims)) -> CpuTensor {
    let (n_rows, width) = (dims.0, x.dims().1);
    let mut out = unwritten(n_rows * t);
    backend.pool.rows(&mut out, t, t, |first, rows| {
        for start in (0..t).step_by(TURNED) {
            for (row, out) in (first..).zip(rows.chunks_exact_mut(t)) {
                let (seq, column) = (row / width, row % width);
                for (i, out) in (start..t.min(start + TURNED)).zip(&mut out[start..]) {
                    *out = x.data()[(seq * t + i) * width + column];
                }
            }
        }
    });
    CpuTensor::new(out, n_rows, t)
}

/// `x += y`.
pub(super) fn add(backend: &CpuBackend, x: &mut CpuTensor, y: &CpuTensor) {
    let (_, width) = x.dims();
    let y = y.data();
    backend.pool.rows(x.data_mut(), width, width / VALUES_PER_NS, |row, x| {
        for (x, y) in x.iter_mut().zip(&y[row * width..]) {
            *x += y;
        }
    });
}

/// `act(x[:, ..width]) · x[:, width..]`.
pub(super) fn gate(backend: &CpuBackend, x: &CpuTensor, width: usize, act: Activation) -> CpuTensor {
    let n_tokens = x.dims().0;
    let mut out = unwritten(n_tokens * width);
    backend.pool.rows(&mut out, width, 2 * width / VALUES_PER_NS, |first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
            let (x, y) = x.row(row).split_at(width);
            backend.isa.run(Gate { x, y, out, act });
        }
    });
    CpuTensor::new(out, n_tokens, width)
}
