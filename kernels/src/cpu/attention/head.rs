//! The attention kernel: some rows that share one key head, over all keys they see.

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::bias::{RowBias, ScoreRow};
use super::{Cell, PANEL, PagedCells, Shared, Step, Task, n_cells, queries};
use crate::cpu::kv::{Page, value_panel_len};
use crate::cpu::math::exp;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::tile::{Rows, for_height, height, multiply, strip_width, strips_per_panel, zero_sums};
use crate::ops::Mask;

/// Keys whose scores a tile holds at a time: their pages of a head fit the second cache.
const STRETCH: usize = 8 * KV_BLOCK_TOKENS;

/// Tiles up to this height read pages faster than they come by themselves, so they ask for them ahead.
const STREAMED_ROWS: usize = 4;

/// Asks for cells that will be read soon.
#[inline(always)]
fn fetch<S: Simd, C>(s: S, cells: &[C]) {
    for line in cells.chunks(PANEL / 2) {
        s.prefetch(line.as_ptr().cast());
    }
}

/// The work of one task.
pub(super) struct HeadRows<'a, C> {
    /// The cache.
    pub(super) pages: &'a PagedCells<C>,
    /// What is asked.
    pub(super) step: &'a Step<'a>,
    /// What is added to the scores.
    pub(super) bias: &'a RowBias<'a>,
    /// Which rows.
    pub(super) task: &'a Task,
    /// `[Σq, n_heads·head_dim]`.
    pub(super) out: &'a Shared<'a, f32>,
}

/// What rows carry from one stretch of keys to the next, and room for a tile.
struct State<C> {
    /// Queries times scale, `[n_rows, head_dim cells]`.
    q: Vec<C>,
    /// Weighted sums of values so far, `[n_rows, padded head_dim]`.
    sums: Vec<f32>,
    /// Largest score so far, `[n_rows]`.
    max: Vec<f32>,
    /// Sum of weights so far, `[n_rows]`.
    total: Vec<f32>,
    /// Scores, then weights, of a tile: `[tile rows, STRETCH]`.
    scores: Vec<f32>,
    /// Weights as cells, `[tile rows, STRETCH cells]`.
    weights: Vec<C>,
}

/// A stretch of keys as a tile sees it.
#[derive(Clone, Copy)]
struct Stretch {
    /// Number of its first key in the sequence, a multiple of a page.
    first_key: usize,
    /// Keys, up to the last that a row of the tile sees.
    n_keys: usize,
    /// First row of the tile, counted in the task.
    row: usize,
}

impl<C: Cell> HeadRows<'_, C> {
    /// `head_dim`, and the same in whole panels.
    fn head_dims(&self) -> (usize, usize) {
        let head_dim = self.step.shape.head_dim;
        (head_dim, head_dim.next_multiple_of(PANEL))
    }

    /// Query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.step.shape.n_heads / self.step.shape.n_kv_heads
    }

    /// Where row `row` of the task lies in `q` and in the result.
    fn place(&self, row: usize) -> std::ops::Range<usize> {
        let (row, head_dim) = (self.task.rows.start + row, self.step.shape.head_dim);
        let token = queries(self.step, self.task.seq).start + row / self.group();
        let head = self.task.kv_head * self.group() + row % self.group();
        let start = (token * self.step.shape.n_heads + head) * head_dim;
        start..start + head_dim
    }

    /// Keys of the sequence.
    pub(super) fn n_keys(&self) -> usize {
        self.step.batch.seq_lens[self.task.seq] as usize
    }

    /// Row `row` of the queries, times the scale of scores, as cells.
    #[inline(always)]
    pub(super) fn scaled_query(&self, row: usize, cells: &mut [C]) {
        let mut scaled = vec![0.0; self.step.shape.head_dim];
        for (scaled, q) in scaled.iter_mut().zip(&self.step.q.data()[self.place(row)]) {
            *scaled = q * self.step.shape.scale;
        }
        C::fill(cells, &scaled);
    }

    /// Keys that row `row` of the task sees: the first so many of the sequence.
    pub(super) fn n_visible(&self, row: usize) -> usize {
        let n_keys = self.n_keys();
        match self.step.mask {
            Mask::Full => n_keys,
            Mask::Causal => {
                let later =
                    queries(self.step, self.task.seq).len() - 1 - (self.task.rows.start + row) / self.group();
                n_keys - later
            }
        }
    }

    /// Row `row` of the task over keys from `first_key` on.
    pub(super) fn score_row(&self, row: usize, first_key: usize) -> ScoreRow {
        let (seq, row) = (self.task.seq, self.task.rows.start + row);
        ScoreRow {
            seq,
            head: self.task.kv_head * self.group() + row % self.group(),
            query: row / self.group(),
            n_queries: queries(self.step, seq).len(),
            n_keys: self.n_keys(),
            first_key,
        }
    }

    /// A page of the sequence's, counted from its first key.
    #[inline(always)]
    pub(super) fn page(&self, index: usize) -> Page<'_, C> {
        let batch = &self.step.batch;
        let block = batch.block_tables[batch.table_start_loc[self.task.seq] as usize + index];
        self.pages.page(self.step.layer, block as usize, self.task.kv_head)
    }

    /// Asks for the keys of a page of the sequence, if it has so many.
    #[inline(always)]
    fn fetch_keys<S: Simd>(&self, s: S, index: usize) {
        if index < self.n_keys().div_ceil(KV_BLOCK_TOKENS) {
            fetch(s, self.page(index).keys);
        }
    }

    /// Nothing seen yet.
    #[inline(always)]
    fn state<S: Simd>(&self) -> State<C> {
        let (head_dim, padded) = self.head_dims();
        let (n_rows, q_cells) = (self.task.rows.len(), n_cells::<C>(head_dim));
        let mut q = vec![C::default(); n_rows * q_cells];
        for (row, cells) in q.chunks_exact_mut(q_cells).enumerate() {
            self.scaled_query(row, cells);
        }
        let tile_rows = n_rows.min(S::ROWS);
        State {
            q,
            sums: vec![0.0; n_rows * padded],
            max: vec![f32::NEG_INFINITY; n_rows],
            total: vec![0.0; n_rows],
            scores: vec![0.0; tile_rows * STRETCH],
            weights: vec![C::default(); tile_rows * STRETCH / C::STEPS],
        }
    }
}

impl<C: Cell> Kernel for HeadRows<'_, C> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_rows = self.task.rows.len();
        let mut state = self.state::<S>();
        let last = self.n_visible(n_rows - 1);
        if n_rows <= STREAMED_ROWS {
            (0..STRETCH / KV_BLOCK_TOKENS).for_each(|page| self.fetch_keys(s, page));
        }
        for first_key in (0..last).step_by(STRETCH) {
            let mut row = 0;
            while row < n_rows {
                let height = height::<S>(n_rows - row);
                // Later rows see no fewer keys.
                let n_keys = self.n_visible(row + height - 1).saturating_sub(first_key).min(STRETCH);
                let stretch = Stretch { first_key, n_keys, row };
                for_height!(height, <S, C>, attend(s, &self, &mut state, stretch));
                row += height;
            }
        }
        let (head_dim, padded) = self.head_dims();
        for row in 0..n_rows {
            // SAFETY: a row of a head belongs to one task.
            let out = unsafe { self.out.slice(self.place(row)) };
            // A row that sees no key stays zero.
            let factor = if state.total[row] == 0.0 { 0.0 } else { 1.0 / state.total[row] };
            for (out, sum) in out.iter_mut().zip(&state.sums[row * padded..][..head_dim]) {
                *out = sum * factor;
            }
        }
    }
}

/// One tile over one stretch of keys.
#[inline(always)]
fn attend<S: Simd, C: Cell, const MR: usize, const NS: usize>(
    s: S,
    head: &HeadRows<'_, C>,
    state: &mut State<C>,
    stretch: Stretch,
) {
    if stretch.n_keys == 0 {
        return;
    }
    let n_pages = stretch.n_keys.div_ceil(KV_BLOCK_TOKENS);
    let n_strips = n_pages * strips_per_panel::<S>();
    let mut strip = 0;
    while strip + NS <= n_strips {
        scores::<S, C, MR, NS>(s, head, state, (stretch, strip));
        strip += NS;
    }
    while strip < n_strips {
        scores::<S, C, MR, 1>(s, head, state, (stretch, strip));
        strip += 1;
    }
    let padded = head.head_dims().1;
    for r in 0..MR {
        let row = stretch.row + r;
        let n_visible = head.n_visible(row).saturating_sub(stretch.first_key).min(stretch.n_keys);
        let scores = &mut state.scores[r * STRETCH..][..n_pages * KV_BLOCK_TOKENS];
        head.bias.add(head.score_row(row, stretch.first_key), &mut scores[..n_visible]);
        scores[n_visible..].fill(f32::NEG_INFINITY);
        let correction = soften(s, scores, &mut state.max[row], &mut state.total[row]);
        for sum in &mut state.sums[row * padded..][..padded] {
            *sum *= correction;
        }
        let n_weights = scores.len() / C::STEPS;
        C::fill(&mut state.weights[r * STRETCH / C::STEPS..][..n_weights], scores);
    }
    let n_strips = padded / strip_width::<S>();
    let mut strip = 0;
    while strip + NS <= n_strips {
        weigh::<S, C, MR, NS>(s, head, state, (stretch, strip));
        strip += NS;
    }
    // The two strips of a common head: more sums at a time than one has, where each waits for the one before.
    while NS > 2 && strip + 2 <= n_strips {
        weigh::<S, C, MR, 2>(s, head, state, (stretch, strip));
        strip += 2;
    }
    while strip < n_strips {
        weigh::<S, C, MR, 1>(s, head, state, (stretch, strip));
        strip += 1;
    }
}

/// Scores of a tile for `NS` strips of keys from `strip` on.
#[inline(always)]
fn scores<S: Simd, C: Cell, const MR: usize, const NS: usize>(
    s: S,
    head: &HeadRows<'_, C>,
    state: &mut State<C>,
    (stretch, strip): (Stretch, usize),
) {
    let per_page = strips_per_panel::<S>();
    let mut b: [&[C]; NS] = [&[]; NS];
    for (i, b) in b.iter_mut().enumerate() {
        let page = head.page(stretch.first_key / KV_BLOCK_TOKENS + (strip + i) / per_page);
        if MR <= STREAMED_ROWS && (strip + i) % per_page == 0 {
            fetch(s, page.values);
        }
        *b = &page.keys[(strip + i) % per_page * strip_width::<S>()..];
    }
    let q_cells = n_cells::<C>(head.step.shape.head_dim);
    let q = Rows { cells: &state.q, stride: q_cells }.from(stretch.row, 0);
    let mut sums = zero_sums::<S, MR, NS>(s);
    multiply(s, q, b, q_cells, &mut sums);
    for (r, strips) in sums.iter().enumerate() {
        for (i, vectors) in strips.iter().enumerate() {
            for (v, sum) in vectors.iter().enumerate() {
                let column = (strip + i) * strip_width::<S>() + v * S::LANES;
                s.store(&mut state.scores[r * STRETCH + column..], *sum);
            }
        }
    }
}

/// Turns the scores of a row, a multiple of 16, into weights `exp(score − max)`, with the largest score and the
/// sum of weights so far brought up to date. Returns the factor for what was summed under the old maximum.
#[inline(always)]
pub(super) fn soften<S: Simd>(s: S, scores: &mut [f32], max: &mut f32, total: &mut f32) -> f32 {
    let mut largest = s.splat(*max);
    for scores in scores.chunks_exact(S::LANES) {
        largest = s.max(s.load(scores), largest);
    }
    let new_max = s.largest(largest);
    if new_max == f32::NEG_INFINITY {
        scores.fill(0.0);
        return 1.0;
    }
    let mut sum = s.splat(0.0);
    for scores in scores.chunks_exact_mut(S::LANES) {
        let weight = exp(s, s.sub(s.load(scores), s.splat(new_max)));
        s.store(scores, weight);
        sum = s.add(sum, weight);
    }
    let correction = s.largest(exp(s, s.splat(*max - new_max)));
    *total = *total * correction + s.sum(sum);
    *max = new_max;
    correction
}

/// Adds the weighted values of a stretch to `NS` strips of the sums of a tile.
#[inline(always)]
fn weigh<S: Simd, C: Cell, const MR: usize, const NS: usize>(
    s: S,
    head: &HeadRows<'_, C>,
    state: &mut State<C>,
    (stretch, strip): (Stretch, usize),
) {
    let padded = head.head_dims().1;
    let place = |r: usize, i: usize, v: usize| {
        (stretch.row + r) * padded + (strip + i) * strip_width::<S>() + v * S::LANES
    };
    let mut sums = zero_sums::<S, MR, NS>(s);
    for (r, strips) in sums.iter_mut().enumerate() {
        for (i, vectors) in strips.iter_mut().enumerate() {
            for (v, sum) in vectors.iter_mut().enumerate() {
                *sum = s.load(&state.sums[place(r, i, v)..]);
            }
        }
    }
    let weights = Rows { cells: &state.weights, stride: STRETCH / C::STEPS };
    let cells_per_page = KV_BLOCK_TOKENS / C::STEPS;
    for page in 0..stretch.n_keys.div_ceil(KV_BLOCK_TOKENS) {
        let n_keys = (stretch.n_keys - page * KV_BLOCK_TOKENS).min(KV_BLOCK_TOKENS);
        let values = head.page(stretch.first_key / KV_BLOCK_TOKENS + page).values;
        if MR <= STREAMED_ROWS && strip == 0 {
            head.fetch_keys(s, (stretch.first_key + STRETCH) / KV_BLOCK_TOKENS + page);
        }
        let mut b: [&[C]; NS] = [&[]; NS];
        for (i, b) in b.iter_mut().enumerate() {
            let (panel, part) =
                ((strip + i) / strips_per_panel::<S>(), (strip + i) % strips_per_panel::<S>());
            *b = &values[panel * value_panel_len::<C>() + part * strip_width::<S>()..];
        }
        let whole = n_keys / C::STEPS;
        multiply(s, weights.from(0, page * cells_per_page), b, whole, &mut sums);
        if !n_keys.is_multiple_of(C::STEPS) {
            let lone = lone_keys::<S, C, NS>(b, whole);
            let lone = lone.each_ref().map(<[C; PANEL]>::as_slice);
            multiply(s, weights.from(0, page * cells_per_page + whole), lone, 1, &mut sums);
        }
    }
    for (r, strips) in sums.iter().enumerate() {
        for (i, vectors) in strips.iter().enumerate() {
            for (v, sum) in vectors.iter().enumerate() {
                s.store(&mut state.sums[place(r, i, v)..], *sum);
            }
        }
    }
}

/// Cells `whole` of each strip with the key that nobody wrote taken out: what lies there may not be a number,
/// and zero times that is not zero.
#[inline(always)]
fn lone_keys<S: Simd, C: Cell, const NS: usize>(strips: [&[C]; NS], whole: usize) -> [[C; PANEL]; NS] {
    let mut lone = [[C::default(); PANEL]; NS];
    for (lone, strip) in lone.iter_mut().zip(strips) {
        for (lone, cell) in lone.iter_mut().zip(&strip[whole * PANEL..][..strip_width::<S>()]) {
            *lone = cell.first_step();
        }
    }
    lone
}
