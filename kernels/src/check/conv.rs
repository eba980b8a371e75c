//! Checks of the pieces that convolutions are made of.

use super::{Dims, divides, same};
use crate::ops::{Conv2d, KernelError, Result, Unfold};

/// Values that a result can have at all.
const MAX_VALUES: usize = isize::MAX as usize / 4;

/// Sizes of an unfold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Windows {
    /// Rows of a sequence.
    pub(crate) t: usize,
    /// Windows of a sequence.
    pub(crate) t_out: usize,
    /// Values of a window.
    pub(crate) width: usize,
}

/// Checks of `unfold`. A sequence too short for one window has none.
pub(crate) fn unfold(x: Dims, conv: Unfold) -> Result<Windows> {
    let error = |what, actual| KernelError::Shape { op: "unfold", what, expected: vec![], actual };
    if conv.kernel == 0 || conv.stride == 0 {
        return Err(error("kernel and stride", vec![conv.kernel, conv.stride]));
    }
    let t = if conv.n_seqs == 0 && x.0 == 0 { 0 } else { divides("unfold", "rows", conv.n_seqs, x.0)? };
    let t_out = n_windows(t, conv.kernel, conv.stride, conv.padding);
    let width = x.1.checked_mul(conv.kernel);
    let n_values = t_out.and_then(|n| n.checked_mul(conv.n_seqs)).and_then(|n| n.checked_mul(width?));
    match (t_out, width, n_values) {
        (Some(t_out), Some(width), Some(n)) if n <= MAX_VALUES => Ok(Windows { t, t_out, width }),
        _ => Err(error("padding and kernel", vec![conv.padding, conv.kernel])),
    }
}

/// Windows along an axis of `n`; `None` if they cannot be counted.
fn n_windows(n: usize, kernel: usize, stride: usize, padding: usize) -> Option<usize> {
    let padded = padding.checked_mul(2)?.checked_add(n)?;
    Some(if padded < kernel { 0 } else { (padded - kernel) / stride + 1 })
}

/// Sizes of a 2-D convolution's result.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Planes {
    /// Windows down and across.
    pub(crate) out: [usize; 2],
    /// Rows of the result, all images together.
    pub(crate) n_rows: usize,
    /// Values of a row of the result.
    pub(crate) width: usize,
}

/// Checks of `unfold2d`.
pub(crate) fn unfold2d(x: Dims, conv: Conv2d) -> Result<Planes> {
    let width = x.1.checked_mul(conv.kernel[0]).and_then(|w| w.checked_mul(conv.kernel[1]));
    planes("unfold2d", x, conv, width)
}

/// Checks of `depthwise2d`.
pub(crate) fn depthwise2d(x: Dims, channels: usize, kernel: [usize; 2], conv: Conv2d) -> Result<Planes> {
    same("depthwise2d", "x width", &[x.1], &[channels])?;
    same("depthwise2d", "kernel", &conv.kernel, &kernel)?;
    planes("depthwise2d", x, conv, Some(channels))
}

/// Sizes of the result, rows of `width` values; an error unless the rows of `x` are the pixels.
fn planes(op: &'static str, x: Dims, conv: Conv2d, width: Option<usize>) -> Result<Planes> {
    let Conv2d { n_images, size, kernel, stride, padding } = conv;
    let error = |what, actual: [[usize; 2]; 2]| KernelError::Shape {
        op,
        what,
        expected: vec![],
        actual: actual.concat(),
    };
    if kernel.contains(&0) || stride.contains(&0) {
        return Err(error("kernel and stride", [kernel, stride]));
    }
    let n_pixels = size[0].saturating_mul(size[1]);
    same(op, "rows", &[x.0], &[n_images.saturating_mul(n_pixels)])?;
    let axis = |i: usize| n_windows(size[i], kernel[i], stride[i], padding[i]);
    if let (Some(down), Some(across), Some(width)) = (axis(0), axis(1), width) {
        let n_rows = down.checked_mul(across).and_then(|n| n.checked_mul(n_images));
        let n_values = n_rows.and_then(|n| n.checked_mul(width));
        if let (Some(n_rows), Some(0..=MAX_VALUES)) = (n_rows, n_values) {
            return Ok(Planes { out: [down, across], n_rows, width });
        }
    }
    Err(error("padding and kernel", [padding, kernel]))
}
