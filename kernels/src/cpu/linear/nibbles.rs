//! Linear layers in four bits a weight, for decoders: a step of decoding takes as long as its weights take to be read.
//!
//! A weight is `scale · q` with `q` in −8 ..= 7 and one bf16 scale for each 32 of an output, set so that −8 stands for the
//! value that is farthest from zero (as `Q4_0` of ggml does) and then moved to where the squared errors are least. Rows
//! are the bytes of [`bytes`](super::bytes). The sum over 32 steps is an integer, exact on every instruction set; it
//! is read as f32 and multiplied with its scale, group after group from first to last.
//!
//! Nibbles are kept without a sign, as `q + 8`: one instruction takes them out of a byte, and what is too much, eight
//! times the sum of the row's 32 bytes, is where the sum begins.

use std::ops::Range;

use super::bytes::{Int8Dot, RowScale, quantize};
use super::product::{Finish, Output, ProductArgs, TileBuffer, TileSums, Units, in_tasks};
use crate::cpu::cell::{ByteQuad, Math, PANEL};
use crate::cpu::context::Context;
use crate::cpu::matrix::CpuTensor;
use crate::cpu::panels::{self, Panels};
use crate::cpu::pool::Shared;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::tile::{
    STRIP_VECTORS, Sums, for_tile, height, strip_width, strips, strips_per_panel, zero_sums,
};
use crate::stored::Stacked;

/// Steps of `k` that share a scale.
const GROUP: usize = 32;

/// Groups of a span: the scales of two fill a word.
const SPAN_GROUPS: usize = 2;

/// Steps of a span.
const SPAN: usize = GROUP * SPAN_GROUPS;

/// Words of an output in a span: eight nibbles each, and one of the two scales.
const SPAN_WORDS: usize = SPAN / NIBBLES + 1;

/// Nibbles of a word: of steps 0 to 3 the low ones of its bytes, of steps 4 to 7 the high ones.
const NIBBLES: usize = 8;

/// Cells of a row in a span.
const SPAN_CELLS: usize = SPAN / 4;

/// Offset of a stored nibble over the integer that it encodes.
const SHIFT: i32 = 8;

/// Rows of the largest tile: whole and read sums of more do not fit in 32 registers.
const TALLEST: usize = 6;

/// Spans that a low tile asks for ahead of use.
const AHEAD: usize = 2;

/// Words of a cache line.
const LINE_WORDS: usize = 16;

/// A span of a panel: eight words of nibbles, then one of scales, of 32 outputs each.
type Span = [u32; SPAN_WORDS * PANEL];

/// A weight in nibbles.
#[derive(Debug)]
pub(crate) struct NibblePanels {
    /// `[n_panels][n_spans]`, each a [`Span`].
    panels: Panels<u32>,
    /// Sums of the weights of each output, `[n_panels · 32]`.
    sums: Vec<f32>,
}

impl NibblePanels {
    /// Zeros for a weight.
    pub(super) fn blank(stacked: &Stacked<'_>) -> Self {
        let panels = Panels::blank(stacked, n_spans(stacked.n_in) * SPAN_WORDS);
        Self { panels, sums: vec![0.0; stacked.n_out.next_multiple_of(PANEL)] }
    }

    /// Quantizes a weight and packs it into zeros.
    pub(super) fn fill(&mut self, context: &Context, stacked: &Stacked<'_>) {
        let shared = &Shared::new(&mut self.sums);
        let n_words = n_spans(stacked.n_in) * SPAN_WORDS;
        panels::pack(&mut self.panels, &context.pool, stacked, n_words, |out, values, words| {
            // SAFETY: each output is filled once.
            let sum = unsafe { shared.slice(out..out + 1) };
            context.isa.run(QuantizeOutput { values, words, sum });
        });
    }

    /// Its arrays as bytes, to be saved or filled.
    pub(super) fn records(&mut self) -> Vec<&mut [u8]> {
        let Self { panels, sums } = self;
        vec![panels::bytes_mut(panels.cells_mut()), panels::bytes_mut(sums)]
    }

    /// `act(x Wᵀ + b) + residual`, `out: [n_tokens, n_out]`.
    pub(super) fn multiply(
        &self,
        context: &Context,
        x: &CpuTensor,
        ProductArgs { size, epilogue }: ProductArgs<'_>,
        out: &mut [f32],
    ) {
        let n_spans = n_spans(size.n_in);
        let (cells, scales) = quantize(context, x, n_spans * SPAN_CELLS);
        let starts = starts(context, &cells, size.n_tokens);
        let units = Groups { rows: &scales, sums: &self.sums };
        let out = &Shared::new(out);
        let output = Output { n_out: size.n_out, units, epilogue, values: out };
        let rows = (cells.as_chunks().0, starts.as_chunks().0);
        let spans = self.panels.cells().as_chunks().0;
        in_tasks(context, size, n_spans * SPAN_WORDS, |rows_of_task, panels| {
            let block = Block { rows, spans, n_spans, output, range: rows_of_task, panels };
            Int8Dot::run(context.isa, block);
        });
    }
}

/// Spans of `k` values.
fn n_spans(k: usize) -> usize {
    k.div_ceil(SPAN)
}

/// Initial integer sums of each row, `[n_tokens, n_groups]`.
fn starts(context: &Context, cells: &[ByteQuad], n_tokens: usize) -> Vec<i32> {
    let row_cells = cells.len() / n_tokens.max(1);
    let n_groups = row_cells / (GROUP / 4);
    let mut starts = vec![0; n_tokens * n_groups];
    context.pool.rows(&mut starts, n_groups, row_cells / 4 + 1, |row, starts| {
        context.isa.run(Starts { cells: &cells[row * row_cells..], starts });
    });
    starts
}

/// Eight times the sums of groups of bytes, less than zero.
struct Starts<'a> {
    cells: &'a [ByteQuad],
    starts: &'a mut [i32],
}

impl Kernel for Starts<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        for (start, cells) in self.starts.iter_mut().zip(self.cells.as_chunks::<{ GROUP / 4 }>().0) {
            let mut sum = 0;
            for cell in cells {
                for byte in cell.to_le_bytes() {
                    sum += i32::from(byte);
                }
            }
            *start = -SHIFT * sum;
        }
    }
}

/// The weights of one output to nibbles and scales.
struct QuantizeOutput<'a> {
    values: &'a [f32],
    /// As many spans as the values take.
    words: &'a mut [u32],
    /// The sum of the weights as they are read: of one value.
    sum: &'a mut [f32],
}

impl Kernel for QuantizeOutput<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let mut total = 0.0;
        for (values, words) in self.values.chunks(SPAN).zip(self.words.as_chunks_mut::<SPAN_WORDS>().0) {
            let mut padded = [0.0; SPAN];
            padded[..values.len()].copy_from_slice(values);
            let mut scales = 0;
            for (group, values) in padded.as_chunks::<GROUP>().0.iter().enumerate() {
                let (scale, whole) = quantized(values);
                scales |= (scale.to_bits() >> 16) << (16 * group);
                let mut sum = 0.0;
                for q in whole {
                    sum += q;
                }
                total += scale * sum;
                for (word, steps) in words[group * GROUP / NIBBLES..].iter_mut().zip(whole.as_chunks().0) {
                    *word = nibbles(steps);
                }
            }
            words[SPAN_WORDS - 1] = scales;
        }
        self.sum[0] = total;
    }
}

/// A group's scale, a bf16, and what its values are in it; a scale that is not a number unless all values are finite.
#[inline(always)]
fn quantized(values: &[f32; GROUP]) -> (f32, [f32; GROUP]) {
    let (mut low, mut high, mut odd) = (0.0_f32, 0.0_f32, 0.0_f32);
    for &value in values {
        low = low.min(value);
        high = high.max(value);
        // Zero times what is not finite is not a number.
        odd += value * 0.0;
    }
    let farthest = if -low > high { low } else { high };
    let first = round_to_bf16(farthest / -(SHIFT as f32) + odd);
    let whole = in_steps(values, first);
    let (mut with_values, mut with_itself) = (0.0, 0.0);
    for (value, q) in values.iter().zip(whole) {
        with_values += value * q;
        with_itself += q * q;
    }
    if with_itself == 0.0 || first.is_nan() {
        return (first, whole);
    }
    let best = round_to_bf16(with_values / with_itself);
    (best, in_steps(values, best))
}

/// Values in steps of a scale, each the nearest integer in −8 ..= 7.
#[inline(always)]
fn in_steps(values: &[f32; GROUP], scale: f32) -> [f32; GROUP] {
    let inverse = if scale.abs() < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
    let mut whole = [0.0; GROUP];
    for (q, value) in whole.iter_mut().zip(values) {
        // What is not a number becomes the bound.
        *q = (value * inverse).round_ties_even().min((SHIFT - 1) as f32).max(-SHIFT as f32);
    }
    whole
}

/// The nearest bf16; a half to the even one.
#[inline(always)]
fn round_to_bf16(value: f32) -> f32 {
    half::bf16::from_f32(value).to_f32()
}

/// Eight steps in a word.
#[inline(always)]
fn nibbles(steps: &[f32; NIBBLES]) -> u32 {
    let mut word = 0;
    for (i, q) in steps.iter().enumerate() {
        let (byte, half) = (i % 4, i / 4);
        word |= ((*q as i32 + SHIFT) as u32) << (8 * byte + 4 * half);
    }
    word
}

/// Sums that are in units of the weights already.
#[derive(Clone, Copy)]
struct Groups<'a> {
    /// `[n_tokens]`.
    rows: &'a [RowScale],
    /// As in [`NibblePanels`].
    sums: &'a [f32],
}

impl Units for Groups<'_> {
    type Row = RowScale;
    /// Sums of weights.
    type Columns<V: Copy> = V;

    #[inline(always)]
    fn row(self, row: usize) -> RowScale {
        self.rows[row]
    }

    #[inline(always)]
    fn columns<S: Simd>(self, s: S, column: usize) -> S::V {
        s.load(&self.sums[column..])
    }

    #[inline(always)]
    fn values<S: Simd>(s: S, row: RowScale, weights: S::V, sums: S::V) -> S::V {
        s.fma(sums, s.splat(row.scale), s.mul(s.splat(row.offset), weights))
    }
}

/// A row's spans and where their sums begin.
type RowSpans<'a> = (&'a [[ByteQuad; SPAN_CELLS]], &'a [[i32; SPAN_GROUPS]]);

/// Some rows by some panels of a product.
struct Block<'a> {
    /// Of all rows, `[n_tokens, n_spans]`.
    rows: RowSpans<'a>,
    /// `[n_panels, n_spans]`.
    spans: &'a [Span],
    n_spans: usize,
    output: Output<'a, Groups<'a>>,
    range: Range<usize>,
    panels: Range<usize>,
}

impl Kernel for Block<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums = TileBuffer::new();
        let used = self.output.n_out.div_ceil(strip_width::<S>());
        let end = used.min(self.panels.end * strips_per_panel::<S>());
        let mut row = self.range.start;
        while row < self.range.end {
            let n_rows = height::<S>((self.range.end - row).min(TALLEST));
            let mut strip = self.panels.start * strips_per_panel::<S>();
            while strip < end {
                let n_strips = strips(n_rows, end - strip);
                for_tile!(low S, (n_rows, n_strips), |MR, NS| s.call(Tile::<MR, NS> {
                    block: &self,
                    place: (row, strip),
                    sums: &mut sums.0,
                }));
                let stride = n_strips * strip_width::<S>();
                let tile = TileSums { sums: &sums.0, stride, n_rows, n_strips };
                s.call(Finish { output: self.output, place: (row, strip * strip_width::<S>()), tile });
                strip += n_strips;
            }
            row += n_rows;
        }
    }
}

/// One register tile.
struct Tile<'a, const MR: usize, const NS: usize> {
    block: &'a Block<'a>,
    /// The first row and strip.
    place: (usize, usize),
    /// `[MR, NS strips]`.
    sums: &'a mut [f32],
}

impl<const MR: usize, const NS: usize> Kernel for Tile<'_, MR, NS> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (block, (row, strip)) = (self.block, self.place);
        let n = block.n_spans;
        let mut a: [RowSpans<'_>; MR] = [(&[], &[]); MR];
        for (r, a) in a.iter_mut().enumerate() {
            let spans = (row + r) * n..(row + r + 1) * n;
            *a = (&block.rows.0[spans.clone()], &block.rows.1[spans]);
        }
        let mut b: [&[Span]; NS] = [&[]; NS];
        for (i, b) in b.iter_mut().enumerate() {
            *b = &block.spans[(strip + i) / strips_per_panel::<S>() * n..][..n];
        }
        let mut sums = zero_sums::<S, MR, NS>(s);
        for k in 0..n {
            ahead::<S, MR, NS>(s, b, k);
            add_group::<S, MR, NS, 0>(s, (a, b, strip), k, &mut sums);
            add_group::<S, MR, NS, 1>(s, (a, b, strip), k, &mut sums);
        }
        let to = &mut self.sums[..MR * NS * strip_width::<S>()];
        for (to, sum) in to.chunks_exact_mut(S::LANES).zip(sums.as_flattened().as_flattened()) {
            s.store(to, *sum);
        }
    }
}

/// Asks for spans that a low tile, which is as fast as memory, will need soon.
#[inline(always)]
fn ahead<S: Simd, const MR: usize, const NS: usize>(s: S, b: [&[Span]; NS], k: usize) {
    if MR > 4 {
        return;
    }
    for spans in b {
        let from = spans.as_ptr().wrapping_add(k + AHEAD).cast::<u32>();
        for line in 0..SPAN_WORDS * PANEL / LINE_WORDS {
            s.prefetch(from.wrapping_add(line * LINE_WORDS).cast());
        }
    }
}

/// Adds one group of a span to a tile's sums.
#[inline(always)]
fn add_group<S: Simd, const MR: usize, const NS: usize, const G: usize>(
    s: S,
    (a, b, strip): ([RowSpans<'_>; MR], [&[Span]; NS], usize),
    k: usize,
    sums: &mut Sums<S::V, MR, NS>,
) {
    let mut whole = zero_sums::<S, MR, NS>(s);
    for row in 0..MR {
        let start = s.splat(f32::from_bits(a[row].1[k][G] as u32));
        whole[row] = [[start; STRIP_VECTORS]; NS];
    }
    for word in G * GROUP / NIBBLES..(G + 1) * GROUP / NIBBLES {
        for i in 0..NS {
            for v in 0..STRIP_VECTORS {
                let words = s.load_bits(&b[i][k][word * PANEL + first_column::<S>(strip + i, v)..]);
                let (low, high) = (s.low_nibbles(words), s.high_nibbles(words));
                for row in 0..MR {
                    let quad = a[row].0[k][2 * word];
                    whole[row][i][v] = s.dot_bytes(whole[row][i][v], quad as u32, low);
                }
                for row in 0..MR {
                    let quad = a[row].0[k][2 * word + 1];
                    whole[row][i][v] = s.dot_bytes(whole[row][i][v], quad as u32, high);
                }
            }
        }
    }
    for i in 0..NS {
        for v in 0..STRIP_VECTORS {
            let words = s.load_bits(&b[i][k][(SPAN_WORDS - 1) * PANEL + first_column::<S>(strip + i, v)..]);
            let scale = if G == 0 { s.low_halves(words) } else { s.high_halves(words) };
            for row in 0..MR {
                sums[row][i][v] = s.fma(s.whole(whole[row][i][v]), scale, sums[row][i][v]);
            }
        }
    }
}

/// The column of its panel that a register of a strip begins with.
#[inline(always)]
fn first_column<S: Simd>(strip: usize, vector: usize) -> usize {
    strip % strips_per_panel::<S>() * strip_width::<S>() + vector * S::LANES
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuBackend, CpuConfig, Isa};
    use crate::ops::{Activation, Backend, LinearPart, WeightView};
    use crate::precision::Precision;
    use triptych_core::DType;

    /// Weights that four bits hold as they are: the first of each 32 is −8 steps, and a step is a power of two.
    fn weights(n_out: usize, n_in: usize) -> Vec<f32> {
        let q = |i: usize| if i.is_multiple_of(GROUP) { -8 } else { (i * 7 % 16) as i32 - 8 };
        let step = |out: usize, i: usize| if (out + i / GROUP).is_multiple_of(2) { 0.5 } else { 0.125 };
        (0..n_out * n_in).map(|i| (i / n_in, i % n_in)).map(|(out, i)| q(i) as f32 * step(out, i)).collect()
    }

    /// Rows that bytes hold as they are.
    fn rows(n: usize, n_in: usize) -> Vec<f32> {
        let value = |i: usize| match i % n_in {
            0 => 255,
            1 => 0,
            _ => i * 37 % 256,
        };
        (0..n * n_in).map(|i| value(i) as f32).collect()
    }

    fn apply(isa: Isa, weights: &[f32], rows: &[f32], n_in: usize) -> Vec<f32> {
        let config =
            CpuConfig { threads: 2, precision: Precision::Int4, isa: Some(isa), ..CpuConfig::default() };
        let backend = CpuBackend::new(config).expect("an available set");
        let data: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
        let shape = [weights.len() / n_in, n_in];
        let view = WeightView { dtype: DType::F32, shape: &shape, data: &data };
        let w = backend.load_linear(&[LinearPart::new(view, None)]).expect("a layer");
        let x = backend.upload(rows.to_vec(), rows.len() / n_in, n_in).expect("rows");
        let y = backend.linear(&x, &w, Activation::None, None).expect("a product");
        backend.download(&y).expect("values")
    }

    #[test]
    fn what_four_bits_hold_is_multiplied_exactly_on_every_set() {
        // Sizes around those of groups, spans, strips and tiles.
        for (n, n_out, n_in) in
            [(1, 33, 64), (1, 130, 96), (2, 5, 32), (3, 70, 160), (7, 32, 65), (13, 100, 257)]
        {
            let (weights, rows) = (weights(n_out, n_in), rows(n, n_in));
            let expected: Vec<f32> = rows
                .chunks_exact(n_in)
                .flat_map(|row| {
                    weights.chunks_exact(n_in).map(move |w| w.iter().zip(row).map(|(w, x)| w * x).sum())
                })
                .collect();
            for isa in Isa::available() {
                let what = format!("{} [{n}, {n_in}] by {n_out}", isa.as_str());
                assert_eq!(apply(isa, &weights, &rows, n_in), expected, "{what}");
            }
        }
    }

    #[test]
    fn a_group_is_as_near_as_its_steps_allow() {
        let mut state = 1_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        for _ in 0..200 {
            // More small values than large ones, as weights are.
            let values: [f32; GROUP] = std::array::from_fn(|_| next().powi(3));
            let squares = |scale: f32, whole: [f32; GROUP]| -> f32 {
                values.iter().zip(whole).map(|(v, q)| (v - scale * q).powi(2)).sum()
            };
            let (scale, whole) = quantized(&values);
            assert!(whole.iter().all(|q| (-8.0..=7.0).contains(q) && q.fract() == 0.0), "{whole:?}");
            let farthest = values.into_iter().fold(0.0_f32, |a, b| if b.abs() > a.abs() { b } else { a });
            let plain = round_to_bf16(farthest / -8.0);
            // Rounding the better scale to a bf16 may lose a little of what it gained.
            assert!(squares(scale, whole) <= 1.01 * squares(plain, in_steps(&values, plain)));
        }
        assert_eq!(quantized(&[0.0; GROUP]), (0.0, [0.0; GROUP]));
    }

    #[test]
    fn what_is_not_finite_in_a_weight_or_a_row_is_seen_in_all_it_gives() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for isa in Isa::available() {
                let (mut weights, rows) = (weights(2, 64), rows(2, 64));
                weights[70] = bad;
                let y = apply(isa, &weights, &rows, 64);
                assert!(
                    y[0].is_finite() && !y[1].is_finite() && y[2].is_finite() && !y[3].is_finite(),
                    "{y:?}"
                );
                let (weights, mut rows) = (self::weights(2, 64), rows);
                rows[3] = bad;
                let y = apply(isa, &weights, &rows, 64);
                assert!(
                    !y[0].is_finite() && !y[1].is_finite() && y[2].is_finite() && y[3].is_finite(),
                    "{y:?}"
                );
            }
        }
    }
}
