//! Reference ops that treat each row alone.

use std::ops::{Add, Mul};

use candle_core::{D, Tensor};

use super::tensor::{InOp, dims, matrix, values, zeros};
use super::weights::{ReferenceLinear, ReferenceNorm};
use crate::ops::{Activation, NormKind, Result, RopePairs, RopeShape};

/// Rows of every product of matrices. The library picks its algorithm by shape; products of one shape keep a
/// row's value the same whatever else is in the batch.
const TILE_ROWS: usize = 16;

/// `x w`: `[n_tokens, n_in] · [n_in, n_out]`, rows in tiles of [`TILE_ROWS`] filled up with zeros.
pub(super) fn product(x: &Tensor, w: &Tensor) -> candle_core::Result<Tensor> {
    let ((n_tokens, n_in), (_, n_out)) = (x.dims2()?, w.dims2()?);
    if n_tokens == 0 || n_in == 0 || n_out == 0 {
        return Tensor::zeros((n_tokens, n_out), x.dtype(), x.device());
    }
    let padded = n_tokens.next_multiple_of(TILE_ROWS);
    let x = x.pad_with_zeros(0, 0, padded - n_tokens)?.contiguous()?;
    let tiles = (0..padded)
        .step_by(TILE_ROWS)
        .map(|row| x.narrow(0, row, TILE_ROWS)?.matmul(w))
        .collect::<candle_core::Result<Vec<_>>>()?;
    Tensor::cat(&tiles, 0)?.narrow(0, 0, n_tokens)?.contiguous()
}

/// `act(x Wᵀ + b) + residual`, `[n_tokens, n_out]`.
pub(super) fn linear(
    x: &Tensor,
    w: &ReferenceLinear,
    act: Activation,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let op = "linear";
    let mut y = product(x, &w.weight).op(op)?;
    if let Some(bias) = &w.bias {
        y = y.broadcast_add(bias).op(op)?;
    }
    y = activation(&y, act).op(op)?;
    match residual {
        Some(residual) => y.add(residual).op(op),
        None => Ok(y),
    }
}

/// The function of each element.
pub(super) fn activation(x: &Tensor, act: Activation) -> candle_core::Result<Tensor> {
    match act {
        Activation::None => Ok(x.clone()),
        Activation::Gelu => x.gelu_erf(),
        Activation::GeluTanh => x.gelu(),
        Activation::QuickGelu => x.div(&x.affine(-1.702, 0.0)?.exp()?.affine(1.0, 1.0)?),
        Activation::Silu => x.silu(),
        Activation::Relu => x.relu(),
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => x.affine(-1.0, 0.0)?.exp()?.affine(1.0, 1.0)?.recip(),
    }
}

/// `(x − mean) / √(variance + eps) · scale + bias`, or without the mean, of each row of `[n_tokens, width]`.
pub(super) fn norm(x: &Tensor, norm: &ReferenceNorm) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    let scaled = || -> candle_core::Result<Tensor> {
        let centred = match norm.kind {
            NormKind::Layer => x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?,
            NormKind::Rms => x.clone(),
        };
        let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
        let y = centred.broadcast_div(&variance.affine(1.0, f64::from(norm.eps))?.sqrt()?)?;
        let y = y.broadcast_mul(&norm.scale)?;
        norm.bias.as_ref().map_or(Ok(y.clone()), |bias| y.broadcast_add(bias))
    };
    scaled().op("norm")
}

/// As [`norm`], with mean and variance of all rows of a sequence.
pub(super) fn group_norm(x: &Tensor, norm: &ReferenceNorm, cu_seqlens: &[u32]) -> Result<Tensor> {
    let (op, (_, width)) = ("group_norm", dims(x));
    let scale = values(op, &norm.scale)?;
    let bias = norm.bias.as_ref().map(|bias| values(op, bias)).transpose()?;
    let mut out = values(op, x)?;
    for seq in cu_seqlens.windows(2) {
        let rows = &mut out[seq[0] as usize * width..seq[1] as usize * width];
        let mean_of = |rows: &[f32], term: &dyn Fn(f64) -> f64| {
            rows.iter().map(|&x| term(f64::from(x))).sum::<f64>() / rows.len() as f64
        };
        let mean = match norm.kind {
            NormKind::Layer => mean_of(rows, &|x| x),
            NormKind::Rms => 0.0,
        };
        let variance = mean_of(rows, &|x| (x - mean).powi(2));
        let factor = 1.0 / (variance + f64::from(norm.eps)).sqrt();
        for (i, x) in rows.iter_mut().enumerate() {
            let y = (f64::from(*x) - mean) * factor * f64::from(scale[i % width]);
            *x = (y + bias.as_ref().map_or(0.0, |bias| f64::from(bias[i % width]))) as f32;
        }
    }
    matrix(op, out, dims(x))
}

/// `c · tanh(x / c)` of each element.
pub(super) fn softcap(x: &Tensor, c: f32) -> candle_core::Result<Tensor> {
    x.affine(1.0 / f64::from(c), 0.0)?.tanh()?.affine(f64::from(c), 0.0)
}

/// `act(x[:, ..width]) · x[:, width..]`: `[n_tokens, 2 · width]` to `[n_tokens, width]`.
pub(super) fn gate(x: &Tensor, width: usize, act: Activation) -> Result<Tensor> {
    let half = |start| x.narrow(1, start, width).and_then(|half| half.contiguous()).op("gate");
    activation(&half(0)?, act).op("gate")?.mul(&half(width)?).op("gate")
}

/// `x · act(gate)`, both `[n_tokens, width]`.
pub(super) fn multiply_gated(x: &Tensor, gate: &Tensor, act: Activation) -> candle_core::Result<Tensor> {
    x.mul(&activation(gate, act)?)
}

/// Rows `rows` of `x`, `[rows.len(), width]`.
pub(super) fn gather(op: &'static str, x: &Tensor, rows: &[u32]) -> Result<Tensor> {
    if rows.is_empty() || dims(x).1 == 0 {
        return zeros(op, (rows.len(), dims(x).1));
    }
    let rows = Tensor::new(rows, x.device()).op(op)?;
    x.index_select(&rows, 0).op(op)
}

/// Sums of `n_terms` consecutive rows of `x` times their weights, `[weights.len() / n_terms, width]`.
pub(super) fn weighted_sums(op: &'static str, x: &Tensor, weights: &[f32], n_terms: usize) -> Result<Tensor> {
    let width = dims(x).1;
    let n_sums = weights.len() / n_terms.max(1);
    let mut out = vec![0.0; n_sums * width];
    for (i, (row, weight)) in values(op, x)?.chunks_exact(width.max(1)).zip(weights).enumerate() {
        let sum = &mut out[i / n_terms * width..][..width];
        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
    }
    matrix(op, out, (n_sums, width))
}

/// `x` with row `rows[i]` replaced by row `i` of `src`, `[rows.len(), width]`.
pub(super) fn scatter(x: &Tensor, rows: &[u32], src: &Tensor) -> Result<Tensor> {
    let op = "scatter_rows";
    let width = dims(x).1;
    let (mut out, src) = (values(op, x)?, values(op, src)?);
    for (i, &row) in rows.iter().enumerate() {
        let row = row as usize;
        out[row * width..][..width].copy_from_slice(&src[i * width..][..width]);
    }
    matrix(op, out, dims(x))
}

/// Rotates the pairs of each head of `[n_tokens, n_heads·head_dim]` by their angles.
pub(super) fn rope(x: &Tensor, shape: RopeShape, cos: &[f32], sin: &[f32]) -> Result<Tensor> {
    let (_, width) = dims(x);
    let half = shape.rotary_dim / 2;
    let mut out = values("rope", x)?;
    for (i, row) in out.chunks_exact_mut(width.max(1)).enumerate() {
        for head in row.chunks_exact_mut(shape.head_dim) {
            for pair in 0..half {
                let (cos, sin) = (cos[i * half + pair], sin[i * half + pair]);
                let (first, second) = match shape.pairs {
                    RopePairs::Halves => (pair, pair + half),
                    RopePairs::Interleaved => (2 * pair, 2 * pair + 1),
                };
                let (a, b) = (head[first], head[second]);
                head[first] = a * cos - b * sin;
                head[second] = b * cos + a * sin;
            }
        }
    }
    matrix("rope", out, dims(x))
}
