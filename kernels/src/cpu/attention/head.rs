//! The attention kernel: some rows that share one key head, over all keys they see.
//!
//! One file over 600 lines: its parts are inlined into one loop, and stand in the order in which they run.

use std::ops::Range;

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::bias::{RowBias, ScoreRow};
use super::part::{Part, Segment};
use super::softmax::{exponentials, raise};
use super::step::{GROUP_PAGES, GROUPS, SEGMENT, STRETCH, STRETCH_PAGES, Step, padded, queries, visible};
use super::task::Task;
use super::whole::{PageMath, RowScores, Unit, Weights};
use crate::cpu::cell::{Cell, PANEL, Word, n_cells};
use crate::cpu::kv::{Page, PagedCells, value_panel_len};
use crate::cpu::math::softcap;
use crate::cpu::pool::Shared;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::tile::{
    Rows, STRIP_VECTORS, Sums, for_tile, height, multiply, multiply_panels, strip_width, strips,
    strips_per_panel, zero_sums,
};

/// Tiles up to this height read pages faster than they come by themselves, so they ask for them ahead.
const STREAMED_ROWS: usize = 4;

/// Queries of the next task that are prefetched for each tile.
const FETCHED_QUERIES: usize = 4;

/// The work of one task.
pub(super) struct HeadRows<'a, M: PageMath> {
    /// The cache.
    pub(super) pages: &'a PagedCells<M::Word>,
    /// Arguments of the attention.
    pub(super) step: &'a Step<'a>,
    /// Bias added to the scores.
    pub(super) bias: &'a RowBias<'a>,
    /// Rows to compute.
    pub(super) task: &'a Task<'a>,
    /// `[Σq, n_heads·head_dim]`, or the parts of tasks of one segment.
    pub(super) out: &'a Shared<'a, f32>,
}

/// Running state of rows from one stretch of keys to the next, and room for a tile.
struct State<M: PageMath> {
    /// Queries times scale, `[n_rows, head_dim cells]`.
    q: Vec<M::Row>,
    /// Conversion of their sums to values where these are integers, `[n_rows]`.
    units: Vec<Unit>,
    /// Result of the rows over the segment so far.
    part: Part,
    /// Queries behind the task's that were prefetched.
    fetched: usize,
    /// Range of the keys that each row sees, `[n_rows]`.
    visible: Vec<Range<usize>>,
    /// Scores, then weights, of a tile: `[tile rows, STRETCH]`.
    scores: Vec<f32>,
    /// Weights as cells, `[tile rows, STRETCH cells]`.
    weights: Vec<M::Row>,
    /// Scale of the weights of a quantization group where they are integers, `[tile rows, GROUPS]`.
    steps: Vec<f32>,
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
    /// Rows of the tile.
    height: usize,
}

impl Stretch {
    /// The part of a range of keys that lies in the stretch, counted from its first key.
    #[inline(always)]
    fn visible(&self, keys: &Range<usize>) -> Range<usize> {
        let [start, end] =
            [keys.start, keys.end].map(|key| key.saturating_sub(self.first_key).min(self.n_keys));
        start..end
    }
}

impl<M: PageMath> HeadRows<'_, M> {
    /// `head_dim`, and the same in whole panels.
    pub(super) fn head_dims(&self) -> (usize, usize) {
        let head_dim = self.step.shape.head_dim;
        (head_dim, padded(head_dim))
    }

    /// Query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.step.shape.n_heads / self.step.shape.n_kv_heads
    }

    /// The sequence of row `row` of the task, and the row's index in it.
    #[inline(always)]
    pub(super) fn of_seq(&self, row: usize) -> (usize, usize) {
        let (members, row) = (self.task.members, self.task.rows.start + row);
        let member = members[members.partition_point(|member| member.first_row <= row) - 1];
        (member.seq, row - member.first_row)
    }

    /// Range of row `row` of the task in the result.
    fn place(&self, row: usize) -> Range<usize> {
        let ((seq, row), head_dim) = (self.of_seq(row), self.step.shape.head_dim);
        let token = queries(self.step, seq).start + row / self.group();
        let head = self.task.kv_head * self.group() + row % self.group();
        let start = (token * self.step.shape.n_heads + head) * head_dim;
        start..start + head_dim
    }

    /// A sequence whose pages these are: any of the members.
    fn seq(&self) -> usize {
        self.task.members[0].seq
    }

    /// Keys of that sequence.
    pub(super) fn n_keys(&self) -> usize {
        self.step.batch.seq_lens[self.seq()] as usize
    }

    /// Row `row` of the queries, times the scale of scores, as cells; `scaled` is room for its values.
    #[inline(always)]
    pub(super) fn scaled_query<S: Simd>(
        &self,
        s: S,
        row: usize,
        (scaled, cells): (&mut [f32], &mut [M::Row]),
    ) -> Unit {
        let place = self.place(row);
        let width = self.step.shape.n_heads * self.step.shape.head_dim;
        let (token, column) = (place.start / width, place.start % width);
        let values = &self.step.q.of.row(token)[self.step.q.first + column..][..place.len()];
        for (scaled, q) in scaled.iter_mut().zip(values) {
            *scaled = q * self.step.shape.scale;
        }
        M::fill_query(s, cells, scaled)
    }

    /// Range of the keys of its sequence that row `row` of the task sees.
    pub(super) fn visible(&self, row: usize) -> Range<usize> {
        let (seq, row) = self.of_seq(row);
        visible(self.step, seq, row)
    }

    /// Row `row` of the task over keys from `first_key` on.
    pub(super) fn score_row(&self, row: usize, first_key: usize) -> ScoreRow {
        let (seq, row) = self.of_seq(row);
        ScoreRow {
            seq,
            head: self.task.kv_head * self.group() + row % self.group(),
            query: row / self.group(),
            n_queries: queries(self.step, seq).len(),
            n_keys: self.step.batch.seq_lens[seq] as usize,
            first_key,
        }
    }

    /// A page of the sequence's, counted from its first key.
    #[inline(always)]
    pub(super) fn page(&self, index: usize) -> Page<'_, M::Word> {
        let batch = &self.step.batch;
        let block = batch.block_tables[batch.table_start_loc[self.seq()] as usize + index];
        self.pages.page(self.step.layer, block as usize, self.task.kv_head)
    }

    /// Asks for the keys of a page of the sequence, if it has so many.
    #[inline(always)]
    fn fetch_keys<S: Simd>(&self, s: S, index: usize) {
        if index < self.n_keys().div_ceil(KV_BLOCK_TOKENS) {
            s.prefetch_all(self.page(index).keys);
        }
    }

    /// Asks for some queries of the rows behind the task's, which are likely to be the next task: they are as far apart as
    /// tokens are, and do not come by themselves.
    #[inline(always)]
    fn fetch_queries<S: Simd>(&self, s: S, state: &mut State<M>) {
        let (Task { members: [member], rows, .. }, 1) = (self.task, self.group()) else { return };
        if rows.len() <= STREAMED_ROWS || state.fetched >= rows.len() {
            return;
        }
        let head_dim = self.step.shape.head_dim;
        let column = self.step.q.first + self.task.kv_head * head_dim;
        let queries = queries(self.step, member.seq);
        let first = queries.start + rows.end + state.fetched;
        for token in first..queries.end.min(first + FETCHED_QUERIES) {
            s.prefetch_all(&self.step.q.of.row(token)[column..][..head_dim]);
        }
        state.fetched += FETCHED_QUERIES;
    }

    /// The state before the first key.
    #[inline(always)]
    fn state<S: Simd>(&self, s: S) -> State<M> {
        let head_dim = self.head_dims().0;
        let (n_rows, q_cells) = (self.task.rows.len(), n_cells::<M::Word>(head_dim));
        let mut q = vec![M::Row::default(); n_rows * q_cells];
        let mut scaled = vec![0.0; head_dim];
        let mut units = vec![Unit::default(); n_rows];
        for (row, (cells, unit)) in q.chunks_exact_mut(q_cells).zip(&mut units).enumerate() {
            *unit = self.scaled_query(s, row, (&mut scaled, cells));
        }
        let tile_rows = n_rows.min(S::ROWS);
        State {
            q,
            units,
            part: Part::default(),
            fetched: 0,
            visible: (0..n_rows).map(|row| self.visible(row)).collect(),
            scores: vec![0.0; tile_rows * STRETCH],
            weights: vec![M::Row::default(); tile_rows * STRETCH / M::Word::STEPS],
            steps: vec![0.0; if M::IS_WHOLE { tile_rows * GROUPS } else { 0 }],
        }
    }
}

impl<M: PageMath> HeadRows<'_, M> {
    /// Result of the rows over a segment of keys that begins with `first_key`.
    #[inline(always)]
    fn segment<S: Simd>(&self, s: S, state: &mut State<M>, first_key: usize) -> Part {
        let n_rows = self.task.rows.len();
        state.part = Part::new(n_rows, self.head_dims().1);
        let end = state.visible[n_rows - 1].end.min(first_key + SEGMENT);
        for first_key in (first_key..end).step_by(STRETCH) {
            let mut row = 0;
            while row < n_rows {
                let height = height::<S>(n_rows - row);
                self.fetch_queries(s, state);
                let rows = &state.visible[row..row + height];
                // Later rows of a sequence see no less far, and those of several see as far in a segment.
                let n_keys = rows[height - 1].end.saturating_sub(first_key).min(STRETCH);
                if rows.iter().any(|visible| visible.start < first_key + n_keys) {
                    attend(s, self, state, Stretch { first_key, n_keys, row, height });
                }
                row += height;
            }
        }
        std::mem::take(&mut state.part)
    }

    /// Writes the result of rows that have seen all their keys.
    #[inline(always)]
    pub(super) fn write(&self, seen: &Part) {
        let (head_dim, padded) = self.head_dims();
        for row in 0..self.task.rows.len() {
            // SAFETY: a row of a head belongs to one task.
            let out = unsafe { self.out.slice(self.place(row)) };
            // A row that sees no key stays zero.
            let factor = if seen.total[row] == 0.0 { 0.0 } else { 1.0 / seen.total[row] };
            for (out, sum) in out.iter_mut().zip(&seen.sums[row * padded..][..head_dim]) {
                *out = sum * factor;
            }
        }
    }
}

impl<M: PageMath> Kernel for HeadRows<'_, M> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_rows = self.task.rows.len();
        let mut state = self.state(s);
        let first = self.task.part.as_ref().map_or(0, Segment::first_key);
        if n_rows <= STREAMED_ROWS {
            let page = first / KV_BLOCK_TOKENS;
            (page..page + STRETCH_PAGES).for_each(|page| self.fetch_keys(s, page));
        }
        let mut seen = self.segment(s, &mut state, first);
        if let Some(part) = &self.task.part {
            for row in 0..n_rows {
                let place = part.place(self.step, self.task.kv_head, self.of_seq(row));
                // SAFETY: a segment of a row of a head belongs to one task.
                seen.store(row, unsafe { self.out.slice(place) });
            }
            return;
        }
        for first_key in (SEGMENT..state.visible[n_rows - 1].end).step_by(SEGMENT) {
            let part = self.segment(s, &mut state, first_key);
            seen.join(s, &part, |row| state.visible[row].end > first_key);
        }
        self.write(&seen);
    }
}

/// Rows of the tallest tile of any set, as many as lanes divide.
const TALLEST: usize = 16;

/// One tile over one stretch of keys.
#[inline(always)]
fn attend<S: Simd, M: PageMath>(s: S, head: &HeadRows<'_, M>, state: &mut State<M>, stretch: Stretch) {
    if stretch.n_keys == 0 {
        return;
    }
    let n_pages = stretch.n_keys.div_ceil(KV_BLOCK_TOKENS);
    let end = n_pages * strips_per_panel::<S>();
    let mut strip = 0;
    while strip < end {
        let n_strips = strips(stretch.height, end - strip);
        // As many as there are in one call.
        let last = strip + (end - strip) / n_strips * n_strips;
        for_tile!(S, (stretch.height, n_strips), |MR, NS| s.call(Scores::<M, MR, NS> {
            head,
            state: &mut *state,
            stretch,
            strips: strip..last,
        }));
        strip = last;
    }
    let padded = head.head_dims().1;
    let mut corrections = [0.0; TALLEST];
    // One thing after the other for all rows: what one row waits for is hidden by the others.
    for (r, correction) in corrections[..stretch.height].iter_mut().enumerate() {
        let row = stretch.row + r;
        let visible = stretch.visible(&state.visible[row]);
        let scores = &mut state.scores[r * STRETCH..][..n_pages * KV_BLOCK_TOKENS];
        finish_scores(s, head, (row, stretch.first_key), visible, scores);
        *correction = raise(s, scores, &mut state.part.max[row]);
    }
    exponentials(s, &mut corrections[..stretch.height.next_multiple_of(S::LANES)]);
    let (mut value_scales, mut odd) = ([0.0; STRETCH], 0.0);
    if M::Word::IS_SCALED {
        odd = read_value_scales(s, head, stretch, &mut value_scales);
    }
    // Of the last row first, since those before it see no more.
    for (r, &correction) in corrections[..stretch.height].iter().enumerate().rev() {
        let row = stretch.row + r;
        for sums in state.part.sums[row * padded..][..padded].chunks_exact_mut(S::LANES) {
            let corrected = s.mul(s.load(sums), s.splat(correction));
            s.store(sums, corrected);
        }
        let visible = stretch.visible(&state.visible[row]);
        if M::Word::IS_SCALED && visible.end < stretch.n_keys {
            value_scales[visible.end..].fill(0.0);
            odd = oddity(s, &value_scales);
        }
        let n_keys = n_pages * KV_BLOCK_TOKENS;
        let scores = RowScores {
            scores: &mut state.scores[r * STRETCH..][..n_keys],
            max: state.part.max[row],
            value_scales: if M::Word::IS_SCALED { &value_scales[..n_keys] } else { &[] },
        };
        let weights = Weights {
            cells: &mut state.weights[r * STRETCH / M::Word::STEPS..][..n_keys / M::Word::STEPS],
            steps: if M::IS_WHOLE {
                &mut state.steps[r * GROUPS..][..n_pages.div_ceil(GROUP_PAGES)]
            } else {
                &mut []
            },
        };
        state.part.total[row] = state.part.total[row] * correction + M::weigh(s, scores, weights) + odd;
    }
    let end = padded / strip_width::<S>();
    let mut strip = 0;
    while strip < end {
        // The two strips of a common head: more sums at a time than one has, where each waits for the one before.
        let n_strips = strips(stretch.height, end - strip);
        for_tile!(S, (stretch.height, n_strips), |MR, NS| s.call(AddValues::<M, MR, NS> {
            head,
            state: &mut *state,
            stretch,
            strip,
        }));
        strip += n_strips;
    }
}

/// Scores of row `row` of the task from products: capped, biased, minus infinity where a key is not seen.
#[inline(always)]
fn finish_scores<S: Simd, M: PageMath>(
    s: S,
    head: &HeadRows<'_, M>,
    (row, first_key): (usize, usize),
    visible: Range<usize>,
    scores: &mut [f32],
) {
    if let Some(c) = head.step.shape.softcap {
        softcap(s, scores, c);
    }
    if !head.bias.is_none() {
        head.bias.add(head.score_row(row, first_key), &mut scores[..visible.end]);
    }
    scores[visible.end..].fill(f32::NEG_INFINITY);
    scores[..visible.start].fill(f32::NEG_INFINITY);
}

/// Scores of a tile for some strips of keys, `NS` at a time.
struct Scores<'a, 'b, M: PageMath, const MR: usize, const NS: usize> {
    head: &'a HeadRows<'b, M>,
    state: &'a mut State<M>,
    stretch: Stretch,
    /// As many as `NS` divides.
    strips: Range<usize>,
}

impl<M: PageMath, const MR: usize, const NS: usize> Kernel for Scores<'_, '_, M, MR, NS> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { head, state, stretch, strips } = self;
        for strip in strips.step_by(NS) {
            scores::<S, M, MR, NS>(s, head, state, (stretch, strip));
        }
    }
}

/// Scores of a tile for `NS` strips of keys from `strip` on.
#[inline(always)]
fn scores<S: Simd, M: PageMath, const MR: usize, const NS: usize>(
    s: S,
    head: &HeadRows<'_, M>,
    state: &mut State<M>,
    (stretch, strip): (Stretch, usize),
) {
    let per_page = strips_per_panel::<S>();
    let mut b: [&[M::Word]; NS] = [&[]; NS];
    let mut scales = b;
    for (i, (b, scales)) in b.iter_mut().zip(&mut scales).enumerate() {
        let page = head.page(stretch.first_key / KV_BLOCK_TOKENS + (strip + i) / per_page);
        if MR <= STREAMED_ROWS && (strip + i) % per_page == 0 {
            s.prefetch_all(page.values);
        }
        let key = (strip + i) % per_page * strip_width::<S>();
        *b = &page.keys[key..];
        if M::Word::IS_SCALED {
            *scales = &page.scales[key..];
        }
    }
    let q_cells = n_cells::<M::Word>(head.step.shape.head_dim);
    let q = Rows { cells: &state.q, stride: q_cells }.from(stretch.row, 0);
    let mut sums = zero_sums::<S, MR, NS>(s);
    multiply::<S, M::Keys, MR, NS>(s, q, (b, q_cells, false), &mut sums);
    // As long as the tile is high, which is known here: nothing is checked row by row, and the sums stay in their registers.
    let rows = &mut state.scores.as_chunks_mut::<STRETCH>().0[..MR];
    let units = &state.units[stretch.row..][..MR];
    for i in 0..NS {
        for v in 0..STRIP_VECTORS {
            let column = (strip + i) * strip_width::<S>() + v * S::LANES;
            let mut key_scales = s.splat(1.0);
            if M::Word::IS_SCALED {
                key_scales = load_scales(s, &scales[i][v * S::LANES..]);
            }
            for r in 0..MR {
                let mut score = sums[r][i][v];
                if M::IS_WHOLE {
                    score = s.fma(s.whole(score), s.splat(units[r].scale), s.splat(units[r].shift));
                }
                if M::Word::IS_SCALED {
                    score = s.mul(score, key_scales);
                }
                s.store(&mut rows[r][column..], score);
            }
        }
    }
}

/// The scales of as many keys as there are lanes.
#[inline(always)]
fn load_scales<S: Simd, C: Word>(s: S, scales: &[C]) -> S::V {
    let scales = &scales[..S::LANES];
    // SAFETY: the slice was just cut to LANES words, and a word is four bytes of any bits.
    unsafe { s.load_ptr(scales.as_ptr().cast()) }
}

/// Scales of the values of a stretch, zero behind its keys: what lies there may not be a number. Returns zero, or what is
/// not a number if one of them is not finite.
#[inline(always)]
fn read_value_scales<S: Simd, M: PageMath>(
    s: S,
    head: &HeadRows<'_, M>,
    stretch: Stretch,
    to: &mut [f32; STRETCH],
) -> f32 {
    let pages = to.as_chunks_mut::<KV_BLOCK_TOKENS>().0.iter_mut().enumerate();
    for (i, to) in pages.take(stretch.n_keys.div_ceil(KV_BLOCK_TOKENS)) {
        let scales = &head.page(stretch.first_key / KV_BLOCK_TOKENS + i).scales[KV_BLOCK_TOKENS..];
        for (to, scales) in to.chunks_exact_mut(S::LANES).zip(scales.chunks_exact(S::LANES)) {
            s.store(to, load_scales(s, scales));
        }
    }
    to[stretch.n_keys..].fill(0.0);
    oddity(s, to)
}

/// Zero, or what is not a number if one of the values is not finite: zero times that is none.
#[inline(always)]
fn oddity<S: Simd>(s: S, values: &[f32; STRETCH]) -> f32 {
    let mut odd = s.splat(0.0);
    for values in values.chunks_exact(S::LANES) {
        odd = s.fma(s.load(values), s.splat(0.0), odd);
    }
    s.sum(odd)
}

/// The values of a stretch for `NS` strips of columns: page after page, each with its cells of keys.
struct ValueStrips<'a, 'b, S, M: PageMath, const NS: usize> {
    s: S,
    head: &'a HeadRows<'b, M>,
    /// The next page of the sequence.
    page: usize,
    strip: usize,
    /// Keys that are left.
    n_keys: usize,
    /// `true` if keys of the next stretch are prefetched meanwhile.
    fetches: bool,
    /// The last key by itself, if it shares its cells with one that nobody wrote.
    lone: Option<&'a [[M::Word; PANEL]; NS]>,
}

impl<'a, S: Simd, M: PageMath, const NS: usize> Iterator for ValueStrips<'a, '_, S, M, NS> {
    type Item = ([&'a [M::Word]; NS], usize);

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.n_keys == 0 {
            return self.lone.take().map(|lone| (lone.each_ref().map(<[M::Word; PANEL]>::as_slice), 1));
        }
        if self.fetches {
            self.head.fetch_keys(self.s, self.page + STRETCH / KV_BLOCK_TOKENS);
        }
        let n_keys = self.n_keys.min(KV_BLOCK_TOKENS);
        let strips = value_strips::<S, M, NS>(self.head, self.page, self.strip);
        (self.page, self.n_keys) = (self.page + 1, self.n_keys - n_keys);
        // Bytes that nobody wrote are numbers, and weigh zero.
        let whole =
            if M::Word::IS_SCALED { n_keys.div_ceil(M::Word::STEPS) } else { n_keys / M::Word::STEPS };
        Some((strips, whole))
    }
}

/// `NS` strips of columns of the values of a page of the sequence, from `strip` on.
#[inline(always)]
fn value_strips<'a, S: Simd, M: PageMath, const NS: usize>(
    head: &'a HeadRows<'_, M>,
    page: usize,
    strip: usize,
) -> [&'a [M::Word]; NS] {
    let values = head.page(page).values;
    let mut strips: [&[M::Word]; NS] = [&[]; NS];
    for (i, to) in strips.iter_mut().enumerate() {
        let (panel, part) = ((strip + i) / strips_per_panel::<S>(), (strip + i) % strips_per_panel::<S>());
        *to = &values[panel * value_panel_len::<M::Word>() + part * strip_width::<S>()..];
    }
    strips
}

/// Adds the weighted values of a stretch to `NS` strips of the sums of a tile.
struct AddValues<'a, 'b, M: PageMath, const MR: usize, const NS: usize> {
    head: &'a HeadRows<'b, M>,
    state: &'a mut State<M>,
    stretch: Stretch,
    strip: usize,
}

impl<M: PageMath, const MR: usize, const NS: usize> Kernel for AddValues<'_, '_, M, MR, NS> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { head, state, stretch, strip } = self;
        let padded = head.head_dims().1;
        let place = |r: usize| (stretch.row + r) * padded + strip * strip_width::<S>();
        let mut sums = zero_sums::<S, MR, NS>(s);
        for (r, strips) in sums.iter_mut().enumerate() {
            let from = &state.part.sums[place(r)..][..NS * strip_width::<S>()];
            for (i, sum) in strips.as_flattened_mut().iter_mut().enumerate() {
                *sum = s.load(&from[i * S::LANES..]);
            }
        }
        let weights = Rows { cells: &state.weights, stride: STRETCH / M::Word::STEPS };
        let first_page = stretch.first_key / KV_BLOCK_TOKENS;
        let mut lone = [[M::Word::default(); PANEL]; NS];
        let has_lone = !M::Word::IS_SCALED && !stretch.n_keys.is_multiple_of(M::Word::STEPS);
        if has_lone {
            let (page, key) = (stretch.n_keys / KV_BLOCK_TOKENS, stretch.n_keys % KV_BLOCK_TOKENS);
            let strips = value_strips::<S, M, NS>(head, first_page + page, strip);
            lone = lone_keys::<S, M::Word, NS>(strips, key / M::Word::STEPS);
        }
        let strips = ValueStrips::<S, M, NS> {
            s,
            head,
            page: first_page,
            strip,
            n_keys: stretch.n_keys,
            fetches: MR <= STREAMED_ROWS && strip == 0,
            lone: has_lone.then_some(&lone),
        };
        if M::IS_WHOLE {
            weigh_whole::<S, M, MR, NS>(s, weights, strips, (&state.steps, &mut sums));
        } else {
            multiply_panels::<S, M::Values, MR, NS>(s, weights, strips, &mut sums);
        }
        for (r, strips) in sums.iter().enumerate() {
            let to = &mut state.part.sums[place(r)..][..NS * strip_width::<S>()];
            for (i, sum) in strips.as_flattened().iter().enumerate() {
                s.store(&mut to[i * S::LANES..], *sum);
            }
        }
    }
}

/// Adds values weighted in integers, group of pages by group, each with the scale of its weights.
#[inline(always)]
fn weigh_whole<'a, S: Simd, M: PageMath, const MR: usize, const NS: usize>(
    s: S,
    weights: Rows<'_, M::Row>,
    mut pages: impl Iterator<Item = ([&'a [M::Word]; NS], usize)>,
    (steps, sums): (&[f32], &mut Sums<S::V, MR, NS>),
) {
    const { assert!(GROUP_PAGES == 2, "a group is a page and the next one, if there is one") };
    let steps = &steps.as_chunks::<GROUPS>().0[..MR];
    let page_weights = |page| weights.from(0, page * (KV_BLOCK_TOKENS / M::Word::STEPS));
    let (mut local, mut page, mut next) = (*sums, 0, pages.next());
    while let Some((strips, n_cells)) = next {
        let mut whole = zero_sums::<S, MR, NS>(s);
        multiply::<S, M::Values, MR, NS>(s, page_weights(page), (strips, n_cells, false), &mut whole);
        next = pages.next();
        if let Some((strips, n_cells)) = next {
            multiply::<S, M::Values, MR, NS>(s, page_weights(page + 1), (strips, n_cells, false), &mut whole);
            next = pages.next();
        }
        for r in 0..MR {
            let step = s.splat(steps[r][page / GROUP_PAGES]);
            for i in 0..NS {
                for v in 0..STRIP_VECTORS {
                    local[r][i][v] = s.fma(s.whole(whole[r][i][v]), step, local[r][i][v]);
                }
            }
        }
        page += GROUP_PAGES;
    }
    *sums = local;
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
