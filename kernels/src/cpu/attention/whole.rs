//! Products of pages with queries and weights: as floating point values ([`FloatMath`]), or, where machines have the
//! dot product of bytes, pages of bytes as integers ([`Int8Pages`]).
//!
//! There a query is signed bytes with one scale, and keys are read without a sign: a key's byte is read as 128 more than it
//! is, and 128 times the sum of the query's bytes is taken off again. Weights have no sign: those of two pages of keys, a
//! quantization group, times the scales of their values, are bytes with one scale. A scale for each group, and not one for
//! all keys, keeps many small weights beside a large one: attention sinks (Xiao et al. 2023, "Efficient Streaming Language
//! Models with Attention Sinks") would otherwise push all others below half a step.

use std::f32::consts::LOG2_E;

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::softmax::weights;
use super::step::GROUP_PAGES;
use crate::cpu::cell::{ByteQuad, Cell, FloatMath, Math, TO_LOW_BITS, Word};
use crate::cpu::kv::{inverse, scale};
use crate::cpu::linear::Int8Dot;
use crate::cpu::math::exp_coarse;
use crate::cpu::simd::{FoundIsa, Kernel, Simd};

/// The largest byte without a sign.
const LARGEST_WEIGHT: f32 = 255.0;

/// The fewest lanes that a register has.
const FEWEST_LANES: usize = 4;

/// Offset that is added to a key's signed byte to read it as an unsigned one.
const SHIFT: f32 = 128.0;

/// Conversion of a row's sums to values: `scale · sum + shift`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unit {
    pub(super) scale: f32,
    pub(super) shift: f32,
}

/// Scores of a row over whole pages of keys.
#[derive(Debug)]
pub(crate) struct RowScores<'a> {
    /// Minus infinity where a key is not seen.
    pub(super) scores: &'a mut [f32],
    /// The largest so far, of these and of pages before.
    pub(super) max: f32,
    /// Scale of the bytes of each key's values, zero where a key is not seen: the bits there may be NaN.
    /// Empty unless cells are scaled.
    pub(super) value_scales: &'a [f32],
}

/// Destination of a row's weights.
#[derive(Debug)]
pub(crate) struct Weights<'a, R> {
    /// As many keys as there are scores.
    pub(super) cells: &'a mut [R],
    /// Scale of the weights of each quantization group where these are integers, and else empty.
    pub(super) steps: &'a mut [f32],
}

/// Arithmetic of attention over pages.
pub(crate) trait PageMath: Copy + Send + Sync + 'static {
    /// Element of pages.
    type Word: Cell;
    /// Element of queries and weights: one for each word along `k`.
    type Row: Copy + Default + Send + Sync + 'static;
    /// Product of keys with queries.
    type Keys: Math<Word = Self::Word, Row = Self::Row>;
    /// Product of values with weights.
    type Values: Math<Word = Self::Word, Row = Self::Row>;
    /// `true` if sums are integers that units turn into values.
    const IS_WHOLE: bool;
    /// Rounds a query. Returns the conversion of its sums to values.
    fn fill_query<S: Simd>(s: S, row: &mut [Self::Row], values: &[f32]) -> Unit;
    /// Turns scores into weights `exp(score − max)`, and these, times the scales of their values, into cells. Returns their
    /// sum before the scales.
    fn weigh<S: Simd>(s: S, of: RowScores<'_>, to: Weights<'_, Self::Row>) -> f32;
    /// Runs a kernel that multiplies so.
    fn run<K: Kernel>(isa: FoundIsa, kernel: K);
}

impl<M: FloatMath> PageMath for M {
    type Word = M::Word;
    type Row = M::Row;
    type Keys = M;
    type Values = M;
    const IS_WHOLE: bool = false;

    #[inline(always)]
    fn fill_query<S: Simd>(s: S, row: &mut [M::Row], values: &[f32]) -> Unit {
        M::fill(s, row, values);
        Unit::default()
    }

    #[inline(always)]
    fn weigh<S: Simd>(s: S, of: RowScores<'_>, to: Weights<'_, M::Row>) -> f32 {
        if M::Word::STEPS == 1 {
            let total = weights(s, of.scores, of.max);
            M::fill(s, to.cells, of.scores);
            return total;
        }
        if of.max == f32::NEG_INFINITY {
            to.cells.fill(M::Row::default());
            return 0.0;
        }
        let (shift, mut total) = (s.splat(-of.max * LOG2_E), s.splat(0.0));
        let cells = to.cells.chunks_exact_mut(S::LANES / M::Word::STEPS);
        for (i, (scores, cells)) in of.scores.chunks_exact(S::LANES).zip(cells).enumerate() {
            // Cells that round to less than the coarse function's error gain nothing from a finer one.
            let mut weights = exp_coarse(s, s.load(scores), shift);
            total = s.add(total, weights);
            if M::Word::IS_SCALED {
                weights = s.mul(weights, s.load(&of.value_scales[i * S::LANES..]));
            }
            M::put(s, cells, weights);
        }
        s.sum(total)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        M::run(isa, kernel);
    }
}

/// Pages of bytes, multiplied as integers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8Pages;

/// Signed bytes by bytes that are read as 128 more than they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8ShiftedDot;

impl Math for Int8ShiftedDot {
    type Word = ByteQuad;
    type Row = ByteQuad;
    const PARTS: usize = 1;

    #[inline(always)]
    fn columns<S: Simd>(s: S, words: S::V, _part: usize) -> S::V {
        s.shift_bytes(words)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(s: S, row: ByteQuad, _part: usize, columns: S::V, acc: S::V) -> S::V {
        s.dot_signed_bytes(acc, row as u32, columns)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run_byte_dot(kernel);
    }
}

impl PageMath for Int8Pages {
    type Word = ByteQuad;
    type Row = ByteQuad;
    type Keys = Int8ShiftedDot;
    type Values = Int8Dot;
    const IS_WHOLE: bool = true;

    #[inline(always)]
    fn fill_query<S: Simd>(s: S, row: &mut [ByteQuad], values: &[f32]) -> Unit {
        let scale = scale(values);
        ByteQuad::fill(s, row, values, inverse(scale));
        // What fills up the last quad is zero.
        let sum: i32 = row.iter().flat_map(|quad| quad.to_le_bytes()).map(|byte| i32::from(byte as i8)).sum();
        Unit { scale, shift: -scale * SHIFT * sum as f32 }
    }

    #[inline(always)]
    fn weigh<S: Simd>(s: S, of: RowScores<'_>, to: Weights<'_, ByteQuad>) -> f32 {
        if of.max == f32::NEG_INFINITY {
            to.cells.fill(0);
            to.steps.fill(0.0);
            return 0.0;
        }
        let (shift, mut total) = (s.splat(-of.max * LOG2_E), s.splat(0.0));
        let mut pages = PagesToWeigh {
            scores: of.scores.as_chunks().0,
            scales: of.value_scales.as_chunks().0,
            quads: to.cells.as_chunks_mut().0,
            steps: to.steps,
        };
        // Four groups at a time where there are registers for them.
        if S::LANES == 16 {
            while pages.scores.len() >= 4 * GROUP_PAGES {
                total = weigh_pages::<S, { 4 * GROUP_PAGES }>(s, &mut pages, shift, total);
            }
        }
        while pages.scores.len() >= GROUP_PAGES {
            total = weigh_pages::<S, GROUP_PAGES>(s, &mut pages, shift, total);
        }
        // Half of a group is left, if any.
        if !pages.scores.is_empty() {
            total = weigh_pages::<S, 1>(s, &mut pages, shift, total);
        }
        s.sum(total)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run_byte_dot_only(kernel);
    }
}

/// Keys of a page.
const KEYS: usize = KV_BLOCK_TOKENS;

/// Pages whose weights are to be bytes.
struct PagesToWeigh<'a> {
    scores: &'a [[f32; KEYS]],
    /// Scales of the values of their keys.
    scales: &'a [[f32; KEYS]],
    quads: &'a mut [[ByteQuad; KEYS / ByteQuad::STEPS]],
    /// Scales of the weights of each quantization group.
    steps: &'a mut [f32],
}

/// Turns the scores of the first `N` pages, half a group or up to four of them, into weights `exp(score) · 2ⁿ` for `n` in
/// `shift`, and these into bytes. Returns `total` with the weights added.
#[inline(always)]
fn weigh_pages<S: Simd, const N: usize>(
    s: S,
    pages: &mut PagesToWeigh<'_>,
    shift: S::V,
    mut total: S::V,
) -> S::V {
    let (scores, rest) = pages.scores.split_at(N);
    pages.scores = rest;
    let (scales, rest) = pages.scales.split_at(N);
    pages.scales = rest;
    let (quads, rest) = std::mem::take(&mut pages.quads).split_at_mut(N);
    pages.quads = rest;
    let (steps, rest) = std::mem::take(&mut pages.steps).split_at_mut(N.div_ceil(GROUP_PAGES));
    pages.steps = rest;
    let mut scaled = [[s.splat(0.0); KEYS / FEWEST_LANES]; N];
    let mut largest = [s.splat(0.0); 4];
    for page in 0..N {
        for i in 0..KEYS / S::LANES {
            let weights = exp_coarse(s, s.load(&scores[page][i * S::LANES..]), shift);
            total = s.add(total, weights);
            scaled[page][i] = s.mul(weights, s.load(&scales[page][i * S::LANES..]));
            largest[page / GROUP_PAGES] = s.max(scaled[page][i], largest[page / GROUP_PAGES]);
        }
    }
    let largest = if N > GROUP_PAGES { s.largest_of_four(largest) } else { [s.largest(largest[0]); 4] };
    for page in 0..N {
        let step = largest[page / GROUP_PAGES] * (1.0 / LARGEST_WEIGHT);
        steps[page / GROUP_PAGES] = step;
        let factor = s.splat(inverse(step));
        for i in 0..KEYS / S::LANES {
            let mut bytes = [0; 16];
            s.store_low_bytes(&mut bytes, s.fma(scaled[page][i], factor, s.splat(TO_LOW_BITS)));
            let quads = &mut quads[page][i * S::LANES / ByteQuad::STEPS..][..S::LANES / ByteQuad::STEPS];
            for (quad, bytes) in quads.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *quad = i32::from_le_bytes(*bytes);
            }
        }
    }
    total
}
