//! What each op should give: plain loops in f64, one obvious line each.

use triptych_kernels::ops::{Activation, AttentionShape, Mask, NormKind, Unfold};

/// The error function, by its Maclaurin series where that is exact enough.
fn erf(x: f64) -> f64 {
    if x.abs() > 5.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..150 {
        term *= -x * x / f64::from(n);
        sum += term / f64::from(2 * n + 1);
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

pub fn activation(act: Activation, x: f64) -> f64 {
    match act {
        Activation::None => x,
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / 2.0_f64.sqrt())),
        Activation::GeluTanh => {
            0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
        }
        Activation::QuickGelu => x / (1.0 + (-1.702 * x).exp()),
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::Relu => x.max(0.0),
    }
}

/// `act(x Wᵀ + b)`, `weight: [n_out, n_in]`.
pub fn linear(x: &[f32], weight: &[f32], bias: Option<&[f32]>, n_in: usize, act: Activation) -> Vec<f32> {
    let n_out = bias.map_or_else(|| weight.len() / n_in, <[f32]>::len);
    let mut out = Vec::new();
    for x in x.chunks(n_in) {
        for o in 0..n_out {
            let dot: f64 = (0..n_in).map(|k| f64::from(x[k]) * f64::from(weight[o * n_in + k])).sum();
            out.push(activation(act, dot + bias.map_or(0.0, |b| f64::from(b[o]))) as f32);
        }
    }
    out
}

pub fn norm(x: &[f32], kind: NormKind, scale: &[f32], bias: Option<&[f32]>, eps: f32) -> Vec<f32> {
    let mut out = Vec::new();
    let width = scale.len();
    for x in x.chunks(width) {
        let mean = match kind {
            NormKind::Layer => x.iter().map(|&v| f64::from(v)).sum::<f64>() / width as f64,
            NormKind::Rms => 0.0,
        };
        let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / width as f64;
        for i in 0..width {
            let y = (f64::from(x[i]) - mean) / (variance + f64::from(eps)).sqrt() * f64::from(scale[i]);
            out.push((y + bias.map_or(0.0, |b| f64::from(b[i]))) as f32);
        }
    }
    out
}

/// `x: [n_seqs, t, channels]` to `[n_seqs, t_out, channels, kernel]`.
pub fn unfold(x: &[f32], channels: usize, conv: Unfold) -> Vec<f32> {
    let t = x.len() / channels / conv.n_seqs;
    let t_out = (t + 2 * conv.padding - conv.kernel) / conv.stride + 1;
    let mut out = Vec::new();
    for seq in 0..conv.n_seqs {
        for window in 0..t_out {
            for channel in 0..channels {
                for tap in 0..conv.kernel {
                    let row = (window * conv.stride + tap) as isize - conv.padding as isize;
                    let inside = (0..t as isize).contains(&row);
                    out.push(if inside { x[(seq * t + row as usize) * channels + channel] } else { 0.0 });
                }
            }
        }
    }
    out
}

/// One sequence: `q: [n_queries, n_heads, head_dim]`, `k`, `v: [n_keys, n_kv_heads, head_dim]`.
pub fn attention(q: &[f32], k: &[f32], v: &[f32], shape: AttentionShape, mask: Mask) -> Vec<f32> {
    let AttentionShape { n_heads, n_kv_heads, head_dim, scale } = shape;
    let (n_queries, n_keys) = (q.len() / n_heads / head_dim, k.len() / n_kv_heads / head_dim);
    let mut out = Vec::new();
    for query in 0..n_queries {
        let n_visible = if mask == Mask::Causal { n_keys + query + 1 - n_queries } else { n_keys };
        for head in 0..n_heads {
            let kv_head = head * n_kv_heads / n_heads;
            let at = |x: &[f32], row: usize, heads: usize, head: usize, d: usize| {
                f64::from(x[(row * heads + head) * head_dim + d])
            };
            let score = |key: usize| {
                let dot = |d| at(q, query, n_heads, head, d) * at(k, key, n_kv_heads, kv_head, d);
                (0..head_dim).map(dot).sum::<f64>() * f64::from(scale)
            };
            let scores: Vec<f64> = (0..n_visible).map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..head_dim {
                let sum: f64 =
                    (0..n_visible).map(|key| weights[key] * at(v, key, n_kv_heads, kv_head, d)).sum();
                out.push(if n_visible == 0 { 0.0 } else { (sum / total) as f32 });
            }
        }
    }
    out
}
