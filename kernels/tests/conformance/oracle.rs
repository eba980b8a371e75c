//! Expected results of each op: plain loops in f64, one obvious line each.

use std::ops::Range;

use triptych_kernels::ops::{Activation, AttentionShape, Conv2d, Mask, NormKind, Unfold};

/// The keys that a query may attend to.
#[derive(Clone, Copy, Debug)]
pub enum Seen {
    All,
    /// Those up to its own, at most so many of them, and those of the span that its own is in.
    Causal {
        window: Option<u32>,
        span: [usize; 2],
    },
}

impl Seen {
    /// A sliding window.
    pub fn window(keys: u32) -> Self {
        Self::Causal { window: Some(keys), span: [0; 2] }
    }

    /// Keys `start..end` of every sequence attend to each other.
    pub fn span(start: usize, end: usize) -> Self {
        Self::Causal { window: None, span: [start, end] }
    }

    /// Range of the keys that a query sees.
    pub fn keys(self, (n_queries, n_keys): (usize, usize), query: usize) -> Range<usize> {
        let Self::Causal { window, .. } = self else { return 0..n_keys };
        let end = n_keys + query + 1 - n_queries;
        let start = window.map_or(0, |window| end.saturating_sub(window as usize));
        start..end + self.ahead((n_queries, n_keys), query)
    }

    /// Keys after its own that a query sees.
    pub fn ahead(self, (n_queries, n_keys): (usize, usize), query: usize) -> usize {
        let Self::Causal { span: [start, end], .. } = self else { return 0 };
        // Of padding there are more queries than keys.
        let position =
            (n_keys + query).checked_sub(n_queries).filter(|position| (start..end).contains(position));
        position.map_or(0, |position| end.min(n_keys) - 1 - position)
    }
}

impl From<Mask> for Seen {
    fn from(mask: Mask) -> Self {
        match mask {
            Mask::Full => Self::All,
            Mask::Causal => Self::span(0, 0),
            Mask::Bounded(_) => panic!("bounds are a step's"),
        }
    }
}

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
        Activation::Tanh => x.tanh(),
        Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
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

/// One image after another, `x: [n_images, height, width, channels]` to
/// `[n_images, out, out, channels, kernel, kernel]`.
pub fn unfold2d(x: &[f32], channels: usize, conv: Conv2d) -> Vec<f32> {
    let Conv2d { n_images, size: [height, width], kernel, stride, padding } = conv;
    let out_len = |axis: usize| (conv.size[axis] + 2 * padding[axis] - kernel[axis]) / stride[axis] + 1;
    let mut out = Vec::new();
    for image in 0..n_images {
        for y in 0..out_len(0) {
            for x_out in 0..out_len(1) {
                for channel in 0..channels {
                    for down in 0..kernel[0] {
                        for across in 0..kernel[1] {
                            let row = (y * stride[0] + down) as isize - padding[0] as isize;
                            let column = (x_out * stride[1] + across) as isize - padding[1] as isize;
                            let inside =
                                (0..height as isize).contains(&row) && (0..width as isize).contains(&column);
                            let pixel = (image * height) as isize + row;
                            let at = (pixel * width as isize + column) * channels as isize + channel as isize;
                            out.push(if inside { x[at as usize] } else { 0.0 });
                        }
                    }
                }
            }
        }
    }
    out
}

/// Each sequence normalised as a whole.
pub fn group_norm(x: &[f32], kind: NormKind, [scale, bias]: [&[f32]; 2], rows: &[usize]) -> Vec<f32> {
    let (width, mut rest, mut out) = (scale.len(), x, Vec::new());
    for n in rows {
        let (seq, after) = rest.split_at(n * width);
        let ones = vec![1.0; seq.len().max(1)];
        let whole = norm(seq, kind, &ones, None, 1e-5);
        out.extend(whole.iter().enumerate().map(|(i, y)| y * scale[i % width] + bias[i % width]));
        rest = after;
    }
    out
}

/// A score of a sequence of `n_queries` and `n_keys`.
#[derive(Clone, Copy)]
pub struct Score {
    pub head: usize,
    pub query: usize,
    pub key: usize,
    pub n_queries: usize,
    pub n_keys: usize,
}

impl Score {
    /// Position of the key minus that of the query, the last query standing at the last key.
    pub fn distance(self) -> i64 {
        (self.key + self.n_queries) as i64 - (self.query + self.n_keys) as i64
    }
}

/// Softmax weights of each query for the keys, `[n_queries, n_heads, n_keys]`; zero for keys that it does not see. `q` and `k`
/// as in [`attention`].
pub fn weights(
    [q, k]: [&[f32]; 2],
    shape: AttentionShape,
    mask: Seen,
    bias: impl Fn(Score) -> f64,
) -> Vec<f64> {
    let AttentionShape { n_heads, n_kv_heads, head_dim, scale, softcap } = shape;
    let (n_queries, n_keys) = (q.len() / n_heads / head_dim, k.len() / n_kv_heads / head_dim);
    let mut out = Vec::new();
    for query in 0..n_queries {
        let seen = mask.keys((n_queries, n_keys), query);
        for head in 0..n_heads {
            let kv_head = head * n_kv_heads / n_heads;
            let score = |key: usize| {
                let (q, k) = (
                    &q[(query * n_heads + head) * head_dim..],
                    &k[(key * n_kv_heads + kv_head) * head_dim..],
                );
                let dot: f64 = (0..head_dim).map(|d| f64::from(q[d]) * f64::from(k[d])).sum();
                let capped = match softcap.map(f64::from) {
                    Some(cap) => cap * (dot * f64::from(scale) / cap).tanh(),
                    None => dot * f64::from(scale),
                };
                capped + bias(Score { head, query, key, n_queries, n_keys })
            };
            let scores: Vec<f64> = seen.clone().map(score).collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exp = |s: &f64| if max == f64::NEG_INFINITY { 0.0 } else { (s - max).exp() };
            let total: f64 = scores.iter().map(exp).sum();
            out.resize(out.len() + seen.start, 0.0);
            out.extend(scores.iter().map(|s| if total == 0.0 { 0.0 } else { exp(s) / total }));
            out.resize(out.len() + n_keys - seen.end, 0.0);
        }
    }
    out
}

/// One sequence: `q: [n_queries, n_heads, head_dim]`, `k`, `v: [n_keys, n_kv_heads, head_dim]`; `bias` is added
/// to the scores.
pub fn attention(
    [q, k, v]: [&[f32]; 3],
    shape: AttentionShape,
    mask: Seen,
    bias: impl Fn(Score) -> f64,
) -> Vec<f32> {
    let AttentionShape { n_heads, n_kv_heads, head_dim, .. } = shape;
    let n_keys = k.len() / n_kv_heads / head_dim;
    let mut out = Vec::new();
    // No key gives no weights to cut, and zeros.
    if n_keys == 0 {
        return vec![0.0; q.len()];
    }
    for (i, weights) in weights([q, k], shape, mask, bias).chunks(n_keys).enumerate() {
        let kv_head = i % n_heads * n_kv_heads / n_heads;
        let value = |key: usize, d: usize| f64::from(v[(key * n_kv_heads + kv_head) * head_dim + d]);
        out.extend(
            (0..head_dim).map(|d| (0..n_keys).map(|key| weights[key] * value(key, d)).sum::<f64>() as f32),
        );
    }
    out
}
