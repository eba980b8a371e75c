//! Ops that move rows or treat each alone: gathers, columns, gates.

use triptych_core::EncodedRows;

use super::context::Context;
use super::math::{Gate, MultiplyGated, Softcap};
use super::matrix::{CpuTensor, unwritten};
use crate::check::Transposed;
use crate::ops::Activation;

/// Values of a row that are touched in a nanosecond, for the cost of a task.
pub(super) const VALUES_PER_NS: usize = 2;

/// The same for values that are only copied.
const COPIED_PER_NS: usize = 4;

/// Rows `rows` of `x`, `[rows.len(), width]`.
pub(super) fn gather(context: &Context, x: &CpuTensor, rows: &[u32]) -> CpuTensor {
    let width = x.dims().1;
    let mut out = unwritten(rows.len() * width);
    context.pool.rows(&mut out, width, width / COPIED_PER_NS, |first, out| {
        for (out, &row) in out.chunks_exact_mut(width).zip(&rows[first..]) {
            out.copy_from_slice(x.row(row as usize));
        }
    });
    CpuTensor::new(out, rows.len(), width)
}

/// The values of stored rows, `n_values` in all.
pub(super) fn widen(context: &Context, rows: &[EncodedRows<'_>], n_values: usize) -> Vec<f32> {
    let mut out = unwritten(n_values);
    let mut rest = out.as_mut_slice();
    for rows in rows {
        let width = rows.hidden();
        let (own, after) = rest.split_at_mut(rows.n_rows() * width);
        context.pool.rows(own, width, width / VALUES_PER_NS, |first, out| rows.widen(first, out));
        rest = after;
    }
    out
}

/// Replaces row `rows[i]` of `x` by row `i` of `src`, `[rows.len(), width]`.
pub(super) fn scatter(x: &mut CpuTensor, rows: &[u32], src: &CpuTensor) {
    let width = x.dims().1;
    let data = x.data_mut();
    for (i, &row) in rows.iter().enumerate() {
        data[row as usize * width..][..width].copy_from_slice(src.row(i));
    }
}

/// Columns `start .. start + width`, `[n_tokens, width]`.
pub(super) fn columns(context: &Context, x: &CpuTensor, start: usize, width: usize) -> CpuTensor {
    let n_tokens = x.dims().0;
    let mut out = unwritten(n_tokens * width);
    context.pool.rows(&mut out, width, width / COPIED_PER_NS, |first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&x.row(row)[start..start + width]);
        }
    });
    CpuTensor::new(out, n_tokens, width)
}

/// Values of a transposed row that are read before the next row's: their lines stay in the L1 cache.
const TRANSPOSED_AT_ONCE: usize = 64;

/// Rows of each sequence to columns: `[n_seqs · t, width]` to `[n_seqs · width, t]`.
pub(super) fn transpose(context: &Context, x: &CpuTensor, Transposed { t, dims }: Transposed) -> CpuTensor {
    let (n_rows, width) = (dims.0, x.dims().1);
    let mut out = unwritten(n_rows * t);
    context.pool.rows(&mut out, t, t, |first, rows| {
        for start in (0..t).step_by(TRANSPOSED_AT_ONCE) {
            for (row, out) in (first..).zip(rows.chunks_exact_mut(t)) {
                let (seq, column) = (row / width, row % width);
                for (i, out) in (start..t.min(start + TRANSPOSED_AT_ONCE)).zip(&mut out[start..]) {
                    *out = x.data()[(seq * t + i) * width + column];
                }
            }
        }
    });
    CpuTensor::new(out, n_rows, t)
}

/// `x += y`, both `[n_tokens, width]`.
pub(super) fn add(context: &Context, x: &mut CpuTensor, y: &CpuTensor) {
    let (_, width) = x.dims();
    let y = y.data();
    context.pool.rows(x.data_mut(), width, width / VALUES_PER_NS, |row, x| {
        for (x, y) in x.iter_mut().zip(&y[row * width..]) {
            *x += y;
        }
    });
}

/// `x = c · tanh(x / c)`, `[n_tokens, width]`.
pub(super) fn softcap(context: &Context, x: &mut CpuTensor, c: f32) {
    let (_, width) = x.dims();
    context.pool.rows(x.data_mut(), width, 4 * width / VALUES_PER_NS, |_, x| {
        context.isa.run(Softcap { x, c });
    });
}

/// `x = x · act(gate)`, both `[n_tokens, width]`.
pub(super) fn multiply_gated(context: &Context, x: &mut CpuTensor, gate: &CpuTensor, act: Activation) {
    let (_, width) = x.dims();
    let gate = gate.data();
    context.pool.rows(x.data_mut(), width, 2 * width / VALUES_PER_NS, |row, x| {
        let gate = &gate[row * width..][..x.len()];
        context.isa.run(MultiplyGated { x, gate, act });
    });
}

/// `act(x[:, ..width]) · x[:, width..]`: `[n_tokens, 2 · width]` to `[n_tokens, width]`.
pub(super) fn gate(context: &Context, x: &CpuTensor, width: usize, act: Activation) -> CpuTensor {
    let n_tokens = x.dims().0;
    let mut out = unwritten(n_tokens * width);
    context.pool.rows(&mut out, width, 2 * width / VALUES_PER_NS, |first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
            let (x, y) = x.row(row).split_at(width);
            context.isa.run(Gate { x, y, out, act });
        }
    });
    CpuTensor::new(out, n_tokens, width)
}
