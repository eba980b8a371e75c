//! Pieces of convolutions: windows laid out for a product, and channels convolved each by itself.

use super::context::Context;
use super::matrix::{CpuTensor, zeroed};
use super::simd::{Kernel, Simd};
use crate::check::{Planes, Windows};
use crate::ops::{Conv2d, Unfold};
use crate::stored::Taps;

/// Taps of a depthwise convolution.
#[derive(Debug)]
pub struct CpuDepthwise(pub(super) Taps);

/// Windows of each sequence, zeros outside: `[n_seqs · t_out, channels · kernel]`.
pub(super) fn unfold(context: &Context, x: &CpuTensor, conv: Unfold, windows: Windows) -> CpuTensor {
    let Windows { t, t_out, width } = windows;
    let n_rows = conv.n_seqs * t_out;
    let mut out = zeroed(n_rows * width);
    context.pool.rows(&mut out, width, width, |first, rows| {
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

/// Windows of each image, zeros outside: `[n_images · out, channels · kernel · kernel]`.
pub(super) fn unfold2d(context: &Context, x: &CpuTensor, conv: Conv2d, planes: Planes) -> CpuTensor {
    let Planes { n_rows, width, .. } = planes;
    let n_taps = conv.kernel[0] * conv.kernel[1];
    let mut out = zeroed(n_rows * width);
    context.pool.rows(&mut out, width, width, |first, rows| {
        for (i, out) in (first..).zip(rows.chunks_exact_mut(width)) {
            for (tap, pixel) in window(conv, planes, i) {
                for (out, x) in out[tap..].iter_mut().step_by(n_taps).zip(x.row(pixel)) {
                    *out = *x;
                }
            }
        }
    });
    CpuTensor::new(out, n_rows, width)
}

/// The taps of window `i` that lie in its image, as `(tap, row of x)`.
fn window(conv: Conv2d, planes: Planes, i: usize) -> impl Iterator<Item = (usize, usize)> {
    let Conv2d { size: [height, width], kernel, stride, padding, .. } = conv;
    let [down, across] = planes.out;
    let (image, y, x) = (i / (down * across), i / across % down, i % across);
    let inside = move |at: usize, tap: usize, axis: usize, len: usize| {
        (at * stride[axis] + tap).checked_sub(padding[axis]).filter(|&pixel| pixel < len)
    };
    (0..kernel[0] * kernel[1]).filter_map(move |tap| {
        let row = inside(y, tap / kernel[1], 0, height)?;
        let column = inside(x, tap % kernel[1], 1, width)?;
        Some((tap, (image * height + row) * width + column))
    })
}

/// Convolves each channel by itself: `[n_images · out, channels]`.
pub(super) fn depthwise2d(
    context: &Context,
    x: &CpuTensor,
    w: &CpuDepthwise,
    conv: Conv2d,
    planes: Planes,
) -> CpuTensor {
    let Planes { n_rows, width, .. } = planes;
    let mut out = zeroed(n_rows * width);
    context.pool.rows(&mut out, width, width * conv.kernel[0] * conv.kernel[1] / 4, |first, rows| {
        for (i, out) in (first..).zip(rows.chunks_exact_mut(width)) {
            if let Some(bias) = &w.0.bias {
                out.copy_from_slice(bias);
            }
            for (tap, pixel) in window(conv, planes, i) {
                let w = &w.0.weight[tap * width..][..width];
                context.isa.run(AddProduct { x: x.row(pixel), w, out });
            }
        }
    });
    CpuTensor::new(out, n_rows, width)
}

/// `out += x · w` over slices of one length.
struct AddProduct<'a> {
    x: &'a [f32],
    w: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for AddProduct<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let vectors = self.x.chunks(S::LANES).zip(self.w.chunks(S::LANES));
        for (out, (x, w)) in self.out.chunks_mut(S::LANES).zip(vectors) {
            let sum = s.fma(s.load_or(x, 0.0), s.load_or(w, 0.0), s.load_or(out, 0.0));
            s.store_some(out, sum);
        }
    }
}
