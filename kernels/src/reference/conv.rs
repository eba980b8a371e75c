//! Reference pieces of convolutions: each value fetched by its indices.

use candle_core::Tensor;

use super::tensor::{dims, matrix, values};
use crate::check::{Planes, Windows};
use crate::ops::{Conv2d, Result, Unfold};
use crate::stored::Taps;

/// Windows of each sequence, zeros outside: `[n_seqs · t_out, channels · kernel]`.
pub(super) fn unfold(x: &Tensor, conv: Unfold, windows: Windows) -> Result<Tensor> {
    let Windows { t, t_out, width } = windows;
    let channels = dims(x).1;
    let x = values("unfold", x)?;
    let mut out = Vec::with_capacity(conv.n_seqs * t_out * width);
    for seq in 0..conv.n_seqs {
        for window in 0..t_out {
            for channel in 0..channels {
                for tap in 0..conv.kernel {
                    let row = (window * conv.stride + tap).checked_sub(conv.padding).filter(|&row| row < t);
                    out.push(row.map_or(0.0, |row| x[(seq * t + row) * channels + channel]));
                }
            }
        }
    }
    matrix("unfold", out, (conv.n_seqs * t_out, width))
}

/// Windows of each image, zeros outside: `[n_images · out, channels · kernel · kernel]`.
pub(super) fn unfold2d(x: &Tensor, conv: Conv2d, planes: Planes) -> Result<Tensor> {
    let channels = dims(x).1;
    let x = values("unfold2d", x)?;
    let mut out = Vec::with_capacity(planes.n_rows * planes.width);
    for window in 0..planes.n_rows {
        for channel in 0..channels {
            for tap in 0..conv.kernel[0] * conv.kernel[1] {
                out.push(pixel(conv, planes, window, tap).map_or(0.0, |row| x[row * channels + channel]));
            }
        }
    }
    matrix("unfold2d", out, (planes.n_rows, planes.width))
}

/// Each channel convolved by itself: `[n_images · out, channels]`.
pub(super) fn depthwise2d(x: &Tensor, w: &Taps, conv: Conv2d, planes: Planes) -> Result<Tensor> {
    let channels = w.channels;
    let x = values("depthwise2d", x)?;
    let mut out = Vec::with_capacity(planes.n_rows * channels);
    for window in 0..planes.n_rows {
        for channel in 0..channels {
            let product = |tap: usize| {
                let row = pixel(conv, planes, window, tap)?;
                Some(x[row * channels + channel] * w.weight[tap * channels + channel])
            };
            let sum: f32 = (0..conv.kernel[0] * conv.kernel[1]).filter_map(product).sum();
            out.push(sum + w.bias.as_ref().map_or(0.0, |bias| bias[channel]));
        }
    }
    matrix("depthwise2d", out, (planes.n_rows, channels))
}

/// The row of `x` under a tap of a window, if it is inside the image.
fn pixel(conv: Conv2d, planes: Planes, window: usize, tap: usize) -> Option<usize> {
    let [down, across] = planes.out;
    let place = [window / across % down, window % across];
    let tap = [tap / conv.kernel[1], tap % conv.kernel[1]];
    let [row, column] = [0, 1].map(|axis| {
        let at = place[axis] * conv.stride[axis] + tap[axis];
        at.checked_sub(conv.padding[axis]).filter(|&at| at < conv.size[axis])
    });
    Some((window / (down * across) * conv.size[0] + row?) * conv.size[1] + column?)
}
