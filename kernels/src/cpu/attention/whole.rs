//! How pages are multiplied with queries and weights: as floating point values ([`FloatMath`]), or, where machines have the
//! dot product of bytes, pages of bytes as whole numbers ([`Bytes`]).
//!
//! There a query is bytes with a sign and one scale, and meets keys without one: a key's byte is read as 128 more than it
//! is, and 128 times the sum of the query's bytes is taken off again. Weights have no sign: those of a page of keys, times
//! the scales of their values, are bytes with one scale. A scale for each page of them, and not one for all keys, keeps
//! many small weights beside a large one: attention sinks (Xiao et al. 2023, "Efficient Streaming Language Models with
//! Attention Sinks") would otherwise push all others below half a step.

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::{Cell, FloatMath, Word};
use crate::cpu::cell::{ByteQuad, LARGEST_BYTE, Math, TO_LOW_BITS};
use crate::cpu::kv::{inverse, scale};
use crate::cpu::linear::Quads;
use crate::cpu::simd::{FoundIsa, Kernel, Simd};

/// The largest byte without a sign.
const LARGEST_WEIGHT: f32 = 255.0;

/// What a key's byte is read as more than it is.
const SHIFT: f32 = 128.0;

/// How sums of a row are read: `scale · (sum − shift)`.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cpu) struct Unit {
    pub(super) scale: f32,
    pub(super) shift: f32,
}

/// How pages are attended to.
pub(in crate::cpu) trait PageMath: Copy + Send + Sync + 'static {
    /// What pages are made of.
    type Word: Cell;
    /// What queries and weights are made of: one for each word along `k`.
    type Row: Copy + Default + Send + Sync + 'static;
    /// How keys are multiplied with queries.
    type Keys: Math<Word = Self::Word, Row = Self::Row>;
    /// How values are multiplied with weights.
    type Values: Math<Word = Self::Word, Row = Self::Row>;
    /// Whether sums are whole numbers that units turn into values.
    const IS_WHOLE: bool;
    /// Rounds a query; how its sums are read.
    fn fill_query(row: &mut [Self::Row], values: &[f32]) -> Unit;
    /// Rounds weights of whole pages of keys; the scale of each page's.
    fn fill_weights<S: Simd>(s: S, row: &mut [Self::Row], weights: &[f32], scales: &mut [f32]);
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
    fn fill_query(row: &mut [M::Row], values: &[f32]) -> Unit {
        M::fill(row, values);
        Unit::default()
    }

    #[inline(always)]
    fn fill_weights<S: Simd>(_s: S, row: &mut [M::Row], weights: &[f32], _scales: &mut [f32]) {
        M::fill(row, weights);
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        M::run(isa, kernel);
    }
}

/// Pages of bytes as whole numbers.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Bytes;

/// Bytes with a sign by bytes that are read as 128 more than they are.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct ShiftedQuads;

impl Math for ShiftedQuads {
    type Word = ByteQuad;
    type Row = ByteQuad;
    const PARTS: usize = 1;

    #[inline(always)]
    fn columns<S: Simd>(s: S, words: S::V, _part: usize) -> S::V {
        s.shift_bytes(words)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(s: S, row: ByteQuad, _part: usize, columns: S::V, acc: S::V) -> S::V {
        s.dot_signed_quad(acc, row as u32, columns)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run_quads(kernel);
    }
}

impl PageMath for Bytes {
    type Word = ByteQuad;
    type Row = ByteQuad;
    type Keys = ShiftedQuads;
    type Values = Quads;
    const IS_WHOLE: bool = true;

    #[inline(always)]
    fn fill_query(row: &mut [ByteQuad], values: &[f32]) -> Unit {
        let scale = scale(values);
        let factor = inverse(scale);
        let mut sum = 0.0;
        for (quad, values) in row.iter_mut().zip(values.chunks(ByteQuad::STEPS)) {
            let mut bytes = [0; ByteQuad::STEPS];
            for (byte, value) in bytes.iter_mut().zip(values) {
                let whole = (value * factor).round_ties_even().clamp(-LARGEST_BYTE, LARGEST_BYTE);
                *byte = whole as i8 as u8;
                sum += whole;
            }
            *quad = i32::from_le_bytes(bytes);
        }
        Unit { scale, shift: SHIFT * sum }
    }

    #[inline(always)]
    fn fill_weights<S: Simd>(s: S, row: &mut [ByteQuad], weights: &[f32], scales: &mut [f32]) {
        let pages = weights.chunks_exact(KV_BLOCK_TOKENS).zip(row.chunks_exact_mut(KV_BLOCK_TOKENS / 4));
        for ((weights, quads), scale) in pages.zip(scales) {
            let (mut largest, mut odd) = (s.splat(0.0), s.splat(0.0));
            for weights in weights.chunks_exact(S::LANES) {
                let weights = s.load(weights);
                largest = s.max(weights, largest);
                // Zero times what is not finite is not a number.
                odd = s.fma(weights, s.splat(0.0), odd);
            }
            let step = s.largest(largest) / LARGEST_WEIGHT;
            let factor = s.splat(inverse(step));
            *scale = step + s.sum(odd);
            let quads = quads.chunks_exact_mut(S::LANES / ByteQuad::STEPS);
            for (quads, weights) in quads.zip(weights.chunks_exact(S::LANES)) {
                let mut bytes = [0; 16];
                s.store_low_bytes(&mut bytes, s.fma(s.load(weights), factor, s.splat(TO_LOW_BITS)));
                for (quad, bytes) in quads.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *quad = i32::from_le_bytes(*bytes);
                }
            }
        }
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run_quads_alone(kernel);
    }
}
