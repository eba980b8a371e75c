//! Norms, of rows and of whole sequences.

use super::context::Context;
use super::matrix::{CpuTensor, unwritten};
use super::rows::VALUES_PER_NS;
use super::simd::{Kernel, Simd};
use crate::ops::NormKind;

/// Scale and bias of a norm.
#[derive(Debug)]
pub struct CpuNorm {
    /// Kind of the norm.
    pub(super) kind: NormKind,
    /// `[width]`.
    pub(super) scale: Vec<f32>,
    /// `[width]`.
    pub(super) bias: Option<Vec<f32>>,
    /// Added to the variance.
    pub(super) eps: f32,
}

/// Normalises each row of `[n_tokens, width]`.
pub(super) fn norm(context: &Context, x: &CpuTensor, norm: &CpuNorm) -> CpuTensor {
    let (n_tokens, width) = x.dims();
    let mut out = unwritten(n_tokens * width);
    context.pool.rows(&mut out, width, width / VALUES_PER_NS, |row, out| {
        let x = &x.data()[row * width..][..out.len()];
        context.isa.run(NormRows { x, out, norm });
    });
    CpuTensor::new(out, n_tokens, width)
}

/// Normalises each sequence of `[n_tokens, width]` as a whole. Sums go over rows and then over them in order, so a sequence has the same
/// bits on any number of threads.
pub(super) fn group_norm(context: &Context, x: &CpuTensor, norm: &CpuNorm, cu_seqlens: &[u32]) -> CpuTensor {
    let (n_tokens, width) = x.dims();
    let mut out = unwritten(n_tokens * width);
    let mut moments = vec![Moments { mean: 0.0, factor: 1.0 }; n_tokens];
    if norm.kind == NormKind::Layer {
        let means = means(context, x, RowMeasure { moments: &moments, measure: Measure::Values }, cu_seqlens);
        moments.iter_mut().zip(means).for_each(|(moments, mean)| moments.mean = mean);
    }
    let measure = RowMeasure { moments: &moments, measure: Measure::Squares };
    let variances = means(context, x, measure, cu_seqlens);
    for (moments, variance) in moments.iter_mut().zip(variances) {
        moments.factor = 1.0 / (variance + norm.eps).sqrt();
    }
    context.pool.rows(&mut out, width, width / VALUES_PER_NS, |row, out| {
        let (x, moments) = (&x.data()[row * width..][..out.len()], &moments[row..]);
        context.isa.run(ScaleRows { x, out, moments, norm });
    });
    CpuTensor::new(out, n_tokens, width)
}

/// Mean and factor of a row: those of its sequence.
#[derive(Clone, Copy, Debug)]
struct Moments {
    mean: f32,
    factor: f32,
}

/// Rows and the measure that is summed over them.
#[derive(Clone, Copy)]
struct RowMeasure<'a> {
    /// `[n_tokens]`.
    moments: &'a [Moments],
    measure: Measure,
}

/// The mean over all values of each row's sequence, `[n_tokens]`.
fn means(context: &Context, x: &CpuTensor, of: RowMeasure<'_>, cu_seqlens: &[u32]) -> Vec<f32> {
    let (n_tokens, width) = x.dims();
    let mut sums = vec![0.0_f32; n_tokens];
    if width == 0 {
        return sums;
    }
    context.pool.rows(&mut sums, 1, width / VALUES_PER_NS, |row, sums| {
        let (x, moments) = (&x.data()[row * width..], &of.moments[row..]);
        context.isa.run(RowSums { x, moments, sums, width, measure: of.measure });
    });
    for seq in cu_seqlens.windows(2) {
        let sums = &mut sums[seq[0] as usize..seq[1] as usize];
        let total: f64 = sums.iter().map(|&sum| f64::from(sum)).sum();
        let mean = (total / (sums.len() * width) as f64) as f32;
        sums.fill(mean);
    }
    sums
}

/// Quantity that is summed over a row.
#[derive(Clone, Copy)]
enum Measure {
    Values,
    /// Squares of distances from the mean.
    Squares,
}

/// Sums of rows `[n, width]`.
struct RowSums<'a> {
    x: &'a [f32],
    /// `[n]`.
    moments: &'a [Moments],
    /// `[n]`.
    sums: &'a mut [f32],
    width: usize,
    measure: Measure,
}

impl Kernel for RowSums<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let rows = self.x.chunks_exact(self.width).zip(self.moments);
        for (out, (x, moments)) in self.sums.iter_mut().zip(rows) {
            *out = match self.measure {
                Measure::Values => sum(s, x),
                Measure::Squares => sum_of_squares(s, x, moments.mean),
            };
        }
    }
}

/// Rows `[n, width]` with the moments of each.
struct ScaleRows<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
    /// `[n]`.
    moments: &'a [Moments],
    norm: &'a CpuNorm,
}

impl Kernel for ScaleRows<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.norm.scale.len();
        let rows = self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width));
        for (row, moments) in rows.zip(self.moments) {
            scale_row(s, row, (moments.mean, moments.factor), self.norm);
        }
    }
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
