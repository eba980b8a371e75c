//! The gated delta rule, token by token.
//!
//! A column of a head's state depends on no other, so columns are the lanes, and panels of them are the tasks beside sequences and
//! heads. The update by a token and the sums for the next one go over a panel together: each value is loaded and stored once a
//! token. A panel stays in the L1 cache.

use std::ops::Range;

use super::causal_conv::At;
use super::context::Context;
use super::matrix::{CpuTensor, unwritten};
use super::pool::Shared;
use super::simd::{Kernel, Simd};
use crate::check::Dims;
use crate::ops::{DeltaRows, PADDING_SLOT};
use crate::states::matrix_of;
use crate::stored::Decays;

/// Decays of the heads of the gated delta rule.
#[derive(Debug)]
pub struct CpuDecay(pub(super) Decays);

/// Columns of a panel. The matrix of a head is its panels one after another, `[key_dim, 32]` each, the last one narrower: half of a
/// small L1 cache where keys are 128 wide.
const PANEL: usize = 32;

/// Values of a state that a token passes in a nanosecond, for the cost of a task.
const STATES_PER_NS: usize = 12;

/// The gated delta rule, `[n_tokens, n_heads · value_dim]`.
pub(super) fn gated_delta_rule(
    context: &Context,
    rows: DeltaRows<'_, CpuTensor>,
    decay: &CpuDecay,
    out_dims: Dims,
    at: At<'_>,
) -> CpuTensor {
    let At { states, layer, batch } = at;
    let layout = states.layout();
    let (n_tokens, width) = out_dims;
    let mut out = unwritten(n_tokens * width);
    if out.is_empty() {
        return CpuTensor::new(out, n_tokens, width);
    }
    let tokens = Tokens::new(context, &rows, decay, layout.key_dim);
    let (n_panels, value_dim) = (layout.value_dim.div_ceil(PANEL), layout.value_dim);
    let (values, sums) = (Shared::new(states.values_mut()), Shared::new(&mut out));
    let n_tasks = batch.slots.len() * layout.n_heads * n_panels;
    let cost_ns = (n_tokens + batch.slots.len()) * layout.matrix_values() / STATES_PER_NS;
    context.pool.run(n_tasks, cost_ns, |task| {
        let [seq, head, panel] =
            [task / n_panels / layout.n_heads, task / n_panels % layout.n_heads, task % n_panels];
        let (tokens_of, slot) =
            (batch.query_start_loc[seq] as usize..batch.query_start_loc[seq + 1] as usize, batch.slots[seq]);
        let columns = panel * PANEL..value_dim.min((panel + 1) * PANEL);
        let to = Columns { sums: &sums, width, first: head * value_dim + columns.start };
        if slot == PADDING_SLOT {
            // SAFETY: rows of this sequence and columns of this panel of this head are those of this task alone.
            tokens_of.for_each(|t| unsafe { to.slice(t, 0..columns.len()) }.fill(0.0));
            return;
        }
        let matrix = matrix_of(layout, [layer, head], slot);
        let start = matrix.start + layout.key_dim * columns.start;
        // SAFETY: no slot comes twice (`StageBuilder::recurrent`), heads and panels do not overlap, and each is one task.
        let state = unsafe { values.slice(start..start + layout.key_dim * columns.len()) };
        context.isa.run(Panel { state, tokens: &tokens, head, rows: tokens_of, columns, to });
    });
    CpuTensor::new(out, n_tokens, width)
}

/// Tokens as the states of all heads take them.
struct Tokens<'a> {
    rows: &'a CpuTensor,
    /// First column of the values.
    values_at: usize,
    n_heads: usize,
    n_key_heads: usize,
    key_dim: usize,
    value_dim: usize,
    /// For each key head its query, its key and their product, then for each head the weight of the update and the factor on the
    /// state: `[n_tokens, n_key_heads · (2·key_dim + 1) + 2·n_heads]`.
    prepared: Vec<f32>,
    width: usize,
}

/// A token as the state of one head takes it.
struct Token<'a> {
    /// `[key_dim]`.
    q: &'a [f32],
    /// `[key_dim]`.
    k: &'a [f32],
    /// The product of both.
    qk: f32,
    /// `[value_dim]`.
    v: &'a [f32],
    beta: f32,
    decay: f32,
}

impl<'a> Tokens<'a> {
    fn new(context: &Context, rows: &DeltaRows<'a, CpuTensor>, decay: &CpuDecay, key_dim: usize) -> Self {
        let (qkv, gates, n_key_heads) = (rows.qkv, rows.beta_decay, rows.n_key_heads);
        let (n_tokens, n_heads) = (qkv.dims().0, decay.0.rates.len());
        let (head_width, values_at) = (2 * key_dim + 1, 2 * n_key_heads * key_dim);
        let width = n_key_heads * head_width + 2 * n_heads;
        let mut prepared = unwritten(n_tokens * width);
        context.pool.rows(&mut prepared, width, values_at + 40 * n_heads, |first, out| {
            for (t, out) in (first..).zip(out.chunks_exact_mut(width)) {
                let (heads, of_gates) = out.split_at_mut(n_key_heads * head_width);
                let (q, k) = qkv.row(t)[..values_at].split_at(values_at / 2);
                for ((out, q), k) in
                    heads.chunks_exact_mut(head_width).zip(q.chunks(key_dim)).zip(k.chunks(key_dim))
                {
                    context.isa.run(UnitVectors { q, k, out });
                }
                let (b, a) = gates.row(t).split_at(n_heads);
                for (head, out) in of_gates.chunks_exact_mut(2).enumerate() {
                    out.copy_from_slice(&gates_of(&decay.0, head, [b[head], a[head]]));
                }
            }
        });
        let value_dim = (qkv.dims().1 - values_at) / n_heads;
        Self { rows: qkv, values_at, n_heads, n_key_heads, key_dim, value_dim, prepared, width }
    }

    #[inline(always)]
    fn of_head(&self, t: usize, head: usize) -> Token<'_> {
        let (row, key_dim) = (&self.prepared[t * self.width..][..self.width], self.key_dim);
        let key_head =
            &row[head / (self.n_heads / self.n_key_heads) * (2 * key_dim + 1)..][..2 * key_dim + 1];
        let gates = &row[self.n_key_heads * (2 * key_dim + 1) + 2 * head..][..2];
        Token {
            q: &key_head[..key_dim],
            k: &key_head[key_dim..2 * key_dim],
            qk: key_head[2 * key_dim],
            v: &self.rows.row(t)[self.values_at + head * self.value_dim..][..self.value_dim],
            beta: gates[0],
            decay: gates[1],
        }
    }
}

/// Weight of a head's update and factor on its state, from the two inputs of a token.
fn gates_of(decay: &Decays, head: usize, [b, a]: [f32; 2]) -> [f32; 2] {
    let step = a + decay.dt_bias[head];
    // Above 20 the logarithm is the step itself in f32.
    let softplus = if step > 20.0 { step } else { step.exp().ln_1p() };
    [1.0 / (1.0 + (-b).exp()), (decay.rates[head] * softplus).exp()]
}

/// A query and a key over their L2 norms, the query over the root of their width too, and the product of both.
struct UnitVectors<'a> {
    q: &'a [f32],
    k: &'a [f32],
    /// `[2·key_dim + 1]`.
    out: &'a mut [f32],
}

impl Kernel for UnitVectors<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let key_dim = self.q.len();
        let factor = |square: f32| 1.0 / (square + 1e-6).sqrt();
        let of_q = factor(dot(s, self.q, self.q)) / (key_dim as f32).sqrt();
        let of_k = factor(dot(s, self.k, self.k));
        let (q, rest) = self.out.split_at_mut(key_dim);
        let (k, product) = rest.split_at_mut(key_dim);
        for (out, x, factor) in [(&mut *q, self.q, of_q), (&mut *k, self.k, of_k)] {
            for (out, x) in out.chunks_mut(S::LANES).zip(x.chunks(S::LANES)) {
                s.store_some(out, s.mul(s.load_or(x, 0.0), s.splat(factor)));
            }
        }
        product[0] = dot(s, q, k);
    }
}

/// `Σ a · b`.
#[inline(always)]
fn dot<S: Simd>(s: S, a: &[f32], b: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for (a, b) in a.chunks(S::LANES).zip(b.chunks(S::LANES)) {
        sum = s.fma(s.load_or(a, 0.0), s.load_or(b, 0.0), sum);
    }
    s.sum(sum)
}

/// Columns of the result that a task writes.
struct Columns<'a> {
    sums: &'a Shared<'a, f32>,
    /// Values of a row of the result.
    width: usize,
    first: usize,
}

impl Columns<'_> {
    /// Columns of a row, counted from the first.
    ///
    /// # Safety
    /// As [`Shared::slice`].
    #[expect(clippy::mut_from_ref, reason = "that parts are disjoint is the caller's obligation")]
    #[inline(always)]
    unsafe fn slice(&self, row: usize, columns: Range<usize>) -> &mut [f32] {
        let start = row * self.width + self.first;
        // SAFETY: the caller's obligation.
        unsafe { self.sums.slice(start + columns.start..start + columns.end) }
    }
}

/// The tokens of a sequence and columns of the state of a head.
struct Panel<'a> {
    /// `[key_dim, columns]`.
    state: &'a mut [f32],
    tokens: &'a Tokens<'a>,
    head: usize,
    rows: Range<usize>,
    /// Columns of the head.
    columns: Range<usize>,
    to: Columns<'a>,
}

impl Kernel for Panel<'_> {
    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (mut first, n) = (0, self.columns.len());
        // Four sums at least are under way, which hides how long an addition takes.
        let at_once = if S::LANES == 16 { 2 } else { 4 };
        while first + at_once * S::LANES <= n {
            let columns = first..first + at_once * S::LANES;
            first = columns.end;
            if S::LANES == 16 {
                self.walk::<S, 2, true>(s, columns);
            } else {
                self.walk::<S, 4, true>(s, columns);
            }
        }
        while first < n {
            let end = n.min(first + S::LANES);
            self.walk::<S, 1, false>(s, first..end);
            first = end;
        }
    }
}

impl Panel<'_> {
    /// All tokens over columns of the panel: `N` registers of them, or those of one that may not be `FULL`.
    #[inline(always)]
    fn walk<S: Simd, const N: usize, const FULL: bool>(&mut self, s: S, columns: Range<usize>) {
        let mut rows = self.rows.clone();
        let Some(first) = rows.next() else { return };
        let of_head = self.columns.start + columns.start..self.columns.start + columns.end;
        let mut state = Block::<N, FULL> { values: self.state, width: self.columns.len(), columns };
        let mut token = self.tokens.of_head(first, self.head);
        let mut sums = state.dots(s, &token);
        let mut t = first;
        loop {
            // SAFETY: rows of this sequence and columns of this panel of this head are those of this task alone.
            let out = unsafe { self.to.slice(t, state.columns.clone()) };
            let delta = answer(s, &token, &token.v[of_head.clone()], (&sums, out));
            let Some(next) = rows.next() else {
                state.update(s, &token, &delta);
                return;
            };
            let following = self.tokens.of_head(next, self.head);
            sums = state.update_and_dots(s, (&token, &delta), &following);
            (token, t) = (following, next);
        }
    }
}

/// `Sᵀ k` and `Sᵀ q` of a state before a token.
struct Sums<V, const N: usize> {
    of_k: [V; N],
    of_q: [V; N],
}

/// Writes the row of a token, and gives the part of its value that is new, times its weight.
#[inline(always)]
fn answer<S: Simd, const N: usize>(
    s: S,
    token: &Token<'_>,
    v: &[f32],
    (sums, out): (&Sums<S::V, N>, &mut [f32]),
) -> [S::V; N] {
    let (decay, beta, qk) = (s.splat(token.decay), s.splat(token.beta), s.splat(token.qk));
    let mut delta = [s.splat(0.0); N];
    for (n, (out, v)) in out.chunks_mut(S::LANES).zip(v.chunks(S::LANES)).enumerate() {
        delta[n] = s.mul(beta, s.sub(s.load_or(v, 0.0), s.mul(decay, sums.of_k[n])));
        s.store_some(out, s.fma(qk, delta[n], s.mul(decay, sums.of_q[n])));
    }
    delta
}

/// Columns of a panel of a state: `N` full registers, or one.
struct Block<'a, const N: usize, const FULL: bool> {
    /// The panel, `[key_dim, width]`.
    values: &'a mut [f32],
    width: usize,
    columns: Range<usize>,
}

impl<const N: usize, const FULL: bool> Block<'_, N, FULL> {
    /// Values of a key under the columns. Where registers are full the compiler knows how many, and leaves no check in loops.
    #[inline(always)]
    fn of_key<S: Simd>(&mut self, key: usize) -> &mut [f32] {
        let n = if FULL { N * S::LANES } else { self.columns.len() };
        &mut self.values[key * self.width + self.columns.start..][..n]
    }

    /// Register `n` of those values.
    #[inline(always)]
    fn load<S: Simd>(s: S, values: &[f32], n: usize) -> S::V {
        if FULL { s.load(&values[n * S::LANES..(n + 1) * S::LANES]) } else { s.load_or(values, 0.0) }
    }

    #[inline(always)]
    fn store<S: Simd>(s: S, values: &mut [f32], n: usize, v: S::V) {
        if FULL {
            s.store(&mut values[n * S::LANES..(n + 1) * S::LANES], v);
        } else {
            s.store_some(values, v);
        }
    }

    #[inline(always)]
    fn dots<S: Simd>(&mut self, s: S, token: &Token<'_>) -> Sums<S::V, N> {
        let mut sums = Sums { of_k: [s.splat(0.0); N], of_q: [s.splat(0.0); N] };
        let (k, q) = (token.k, &token.q[..token.k.len()]);
        // Indices: what an iterator over several slices calls is not inlined everywhere.
        for key in 0..k.len() {
            let (values, k, q) = (self.of_key::<S>(key), s.splat(k[key]), s.splat(q[key]));
            for n in 0..N {
                let value = Self::load(s, values, n);
                sums.of_k[n] = s.fma(value, k, sums.of_k[n]);
                sums.of_q[n] = s.fma(value, q, sums.of_q[n]);
            }
        }
        sums
    }

    /// A token's change of the state.
    #[inline(always)]
    fn update<S: Simd>(&mut self, s: S, token: &Token<'_>, delta: &[S::V; N]) {
        let decay = s.splat(token.decay);
        for (key, k) in token.k.iter().enumerate() {
            let (values, k) = (self.of_key::<S>(key), s.splat(*k));
            for (n, delta) in delta.iter().enumerate() {
                let changed = s.fma(k, *delta, s.mul(decay, Self::load(s, values, n)));
                Self::store(s, values, n, changed);
            }
        }
    }

    /// [`Self::update`], and [`Self::dots`] of the token that follows.
    #[inline(always)]
    fn update_and_dots<S: Simd>(
        &mut self,
        s: S,
        (token, delta): (&Token<'_>, &[S::V; N]),
        following: &Token<'_>,
    ) -> Sums<S::V, N> {
        let decay = s.splat(token.decay);
        let mut sums = Sums { of_k: [s.splat(0.0); N], of_q: [s.splat(0.0); N] };
        let k = token.k;
        let (next_k, next_q) = (&following.k[..k.len()], &following.q[..k.len()]);
        for key in 0..k.len() {
            let (k, next_k, next_q) = (s.splat(k[key]), s.splat(next_k[key]), s.splat(next_q[key]));
            let values = self.of_key::<S>(key);
            for (n, delta) in delta.iter().enumerate() {
                let changed = s.fma(k, *delta, s.mul(decay, Self::load(s, values, n)));
                Self::store(s, values, n, changed);
                sums.of_k[n] = s.fma(changed, next_k, sums.of_k[n]);
                sums.of_q[n] = s.fma(changed, next_q, sums.of_q[n]);
            }
        }
        sums
    }
}
