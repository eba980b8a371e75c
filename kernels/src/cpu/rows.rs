//! Ops that treat each row alone: norms, rotary embedding, gates, windows, embeddings.

use triptych_core::DType;

use super::CpuBackend;
use super::math::Gate;
use super::matrix::CpuTensor;
use super::simd::{Kernel, Simd};
use crate::check::Windows;
use crate::ops::{Activation, NormKind, Unfold};
use crate::stored;

/// Values of a row that are touched in a nanosecond, for the cost of a task.
const VALUES_PER_NS: usize = 2;

/// Scale and bias of a norm.
#[derive(Debug)]
pub struct CpuNorm {
    /// Which.
    pub(super) kind: NormKind,
    /// `[width]`.
    pub(super) scale: Vec<f32>,
    /// `[width]`.
    pub(super) bias: Option<Vec<f32>>,
    /// Added to the variance.
    pub(super) eps: f32,
}

/// An embedding table as it was stored.
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
}

/// Rows of a table.
pub(super) fn embed(table: &CpuTable, ids: &[u32]) -> CpuTensor {
    let mut out = vec![0.0; ids.len() * table.width];
    let row_bytes = table.width * table.dtype.size();
    for (row, &id) in out.chunks_exact_mut(table.width.max(1)).zip(ids) {
        stored::decode(table.dtype, &table.data[id as usize * row_bytes..][..row_bytes], row);
    }
    CpuTensor::new(out, ids.len(), table.width)
}

/// Rows by number.
pub(super) fn gather(x: &CpuTensor, rows: &[u32]) -> CpuTensor {
    let out = rows.iter().flat_map(|&row| x.row(row as usize)).copied().collect();
    CpuTensor::new(out, rows.len(), x.dims().1)
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
pub(super) fn columns(x: &CpuTensor, start: usize, width: usize) -> CpuTensor {
    let n_tokens = x.dims().0;
    let out = (0..n_tokens).flat_map(|row| &x.row(row)[start..start + width]).copied().collect();
    CpuTensor::new(out, n_tokens, width)
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
    let mut out = vec![0.0; n_tokens * width];
    backend.pool.rows(&mut out, width, 2 * width / VALUES_PER_NS, |first, out| {
        for (row, out) in (first..).zip(out.chunks_exact_mut(width)) {
            let (x, y) = x.row(row).split_at(width);
            backend.isa.run(Gate { x, y, out, act });
        }
    });
    CpuTensor::new(out, n_tokens, width)
}

/// Normalises each row.
pub(super) fn norm(backend: &CpuBackend, x: &CpuTensor, norm: &CpuNorm) -> CpuTensor {
    let (n_tokens, width) = x.dims();
    let mut out = vec![0.0; n_tokens * width];
    backend.pool.rows(&mut out, width, width / VALUES_PER_NS, |row, out| {
        let x = &x.data()[row * width..][..out.len()];
        backend.isa.run(NormRows { x, out, norm });
    });
    CpuTensor::new(out, n_tokens, width)
}

/// Rows `[n, width]`, width not zero, and their norms.
struct NormRows<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
    norm: &'a CpuNorm,
}

impl Kernel for NormRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.norm.scale.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            let mean = match self.norm.kind {
                NormKind::Layer => sum(s, x) / width as f32,
                NormKind::Rms => 0.0,
            };
            let variance = sum_of_squares(s, x, mean) / width as f32;
            let factor = 1.0 / (variance + self.norm.eps).sqrt();
            scale_row(s, (x, out), (mean, factor), self.norm);
        }
    }
}

/// `Σ x`.
#[inline(always)]
fn sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for x in x.chunks(S::LANES) {
        sum = s.add(sum, s.load_or(x, 0.0));
    }
    s.sum(sum)
}

/// `Σ (x − mean)²`.
#[inline(always)]
fn sum_of_squares<S: Simd>(s: S, x: &[f32], mean: f32) -> f32 {
    let mut sum = s.splat(0.0);
    for x in x.chunks(S::LANES) {
        let centred = s.sub(s.load_or(x, mean), s.splat(mean));
        sum = s.fma(centred, centred, sum);
    }
    s.sum(sum)
}

/// `(x − mean) · factor · scale + bias`.
#[inline(always)]
fn scale_row<S: Simd>(s: S, (x, out): (&[f32], &mut [f32]), (mean, factor): (f32, f32), norm: &CpuNorm) {
    let vectors = x.chunks(S::LANES).zip(out.chunks_mut(S::LANES));
    for (i, (x, out)) in vectors.enumerate() {
        let at = i * S::LANES;
        let centred = s.sub(s.load_or(x, 0.0), s.splat(mean));
        let mut y = s.mul(s.mul(centred, s.splat(factor)), s.load_or(&norm.scale[at..], 0.0));
        if let Some(bias) = &norm.bias {
            y = s.add(y, s.load_or(&bias[at..], 0.0));
        }
        s.store_some(out, y);
    }
}

/// Turns pairs of each head, in place. `cos`, `sin`: `[n_tokens, head_dim / 2]`.
pub(super) fn rope(backend: &CpuBackend, x: &mut CpuTensor, head_dim: usize, cos_sin: [&[f32]; 2]) {
    let (_, width) = x.dims();
    let half = head_dim / 2;
    backend.pool.rows(x.data_mut(), width, width / VALUES_PER_NS, |first, x| {
        let n = x.len() / width * half;
        let [cos, sin] = cos_sin.map(|values| &values[first * half..][..n]);
        backend.isa.run(RopeRows { x, width, half, cos, sin });
    });
}

/// Rows `[n, width]` and the angles of each.
struct RopeRows<'a> {
    x: &'a mut [f32],
    width: usize,
    /// Half a head.
    half: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for RopeRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let angles = self.cos.chunks_exact(self.half).zip(self.sin.chunks_exact(self.half));
        for (row, (cos, sin)) in self.x.chunks_exact_mut(self.width).zip(angles) {
            for head in row.chunks_exact_mut(2 * self.half) {
                let (a, b) = head.split_at_mut(self.half);
                for (((a, b), cos), sin) in a.iter_mut().zip(b).zip(cos).zip(sin) {
                    (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
                }
            }
        }
    }
}

/// Windows of each sequence, zeros outside.
pub(super) fn unfold(backend: &CpuBackend, x: &CpuTensor, conv: Unfold, windows: Windows) -> CpuTensor {
    let Windows { t, t_out, width } = windows;
    let n_rows = conv.n_seqs * t_out;
    let mut out = vec![0.0; n_rows * width];
    backend.pool.rows(&mut out, width, width, |first, rows| {
        for (i, out) in (first..).zip(rows.chunks_exact_mut(width)) {
            let (seq, window) = (i / t_out, i % t_out);
            for tap in 0..conv.kernel {
                let row = (window * conv.stride + tap).checked_sub(conv.padding).filter(|&row| row < t);
                let Some(row) = row else { continue };
                for (out, x) in out[tap..].iter_mut().step_by(conv.kernel).zip(x.row(seq * t + row)) {
                    *out = *x;
                }
            }
        }
    });
    CpuTensor::new(out, n_rows, width)
}
