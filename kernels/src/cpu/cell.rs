//! Words, the elements of panels, and their products.
//!
//! A *word* is four bytes along `k`: an f32, a pair of bf16 or four bytes. All words are four bytes, so packed weights, KV
//! pages and tiles have one shape for every precision: a *panel* is `[k_cells][32]` words, and a word of a pair holds two
//! steps of `k`, the first in its low half. Values become words of f32 and bf16 by rounding ([`Cell`]); words of bytes need
//! a scale, which the linear layers keep.
//!
//! [`Math`] is the product of a word with a row: pairs have a dot product on some machines, and are taken apart on others.

use super::bf16::bf16_bits;
pub(crate) use super::bf16::{Bf16Pair, unpack_pair};
use super::simd::{FoundIsa, Kernel, Simd};

/// Columns of a panel. A KV block is one panel of keys.
pub(crate) const PANEL: usize = triptych_core::shape::KV_BLOCK_TOKENS;

/// Four bytes of one or more values along `k`.
///
/// # Safety
/// An implementation must be four bytes, of which any bits are a value.
pub(crate) unsafe trait Word: Copy + Default + Send + Sync + 'static {
    /// Steps of `k` in a word.
    const STEPS: usize;
}

/// A word that values are written to one by one.
pub(crate) trait Cell: Word {
    /// `true` if it holds integers up to [`LARGEST_BYTE`], to be read times a scale that is kept elsewhere.
    const IS_SCALED: bool;
    /// Writes the value of one step.
    fn set(&mut self, step: usize, value: f32);
    /// The word with all steps but the first set to zero.
    fn first_step(self) -> Self;
    /// A word with the bits of an f32.
    fn with_bits(of: f32) -> Self;
    /// Makes words of values times a factor, which is 1 unless they are scaled; the rest of the last word is zero.
    fn fill<S: Simd>(s: S, words: &mut [Self], values: &[f32], factor: f32);
    /// Writes the values of all steps of words, those of a step from a row of its own and times a factor of its own. Rows are as
    /// long as `words`.
    #[inline(always)]
    fn fill_steps<'a>(words: &mut [Self], row: impl Fn(usize) -> &'a [f32], factors: &[f32]) {
        for (step, factor) in factors.iter().enumerate().take(Self::STEPS) {
            for (word, value) in words.iter_mut().zip(row(step)) {
                word.set(step, value * factor);
            }
        }
    }
}

/// Four bytes, the first lowest: signed ones in panels and pages, unsigned ones in the rows of linear layers. A plain
/// integer, as pairs are.
pub(crate) type ByteQuad = i32;

/// The largest signed byte that is used; its negative is the smallest, so that scales are symmetric.
pub(crate) const LARGEST_BYTE: f32 = 127.0;

/// Added to a value of which the nearest integer is a byte, it leaves that in the low bits: 1.5 · 2²³.
pub(crate) const TO_LOW_BITS: f32 = 12_582_912.0;

/// Words of bytes that are made at a time.
const QUADS: usize = 16;

/// Words of `k` values.
pub(crate) fn n_cells<C: Word>(k: usize) -> usize {
    k.div_ceil(C::STEPS)
}

/// Product of the words of a panel with rows.
pub(crate) trait Math: Copy + Send + Sync + 'static {
    /// Element of panels.
    type Word: Word;
    /// Element of rows: one for each word along `k`.
    type Row: Copy + Default + Send + Sync + 'static;
    /// Multiply-adds that a word takes, one after the other: one, two or four.
    const PARTS: usize;
    /// Operand of the multiply-add `part` from a register of words: all of it, unless they are taken apart.
    #[inline(always)]
    fn columns<S: Simd>(_s: S, words: S::V, _part: usize) -> S::V {
        words
    }
    /// `acc + row · columns` in each lane. What the bits of `acc` mean is its own; all zeros are nothing summed.
    fn multiply_add<S: Simd>(s: S, row: Self::Row, part: usize, columns: S::V, acc: S::V) -> S::V;
    /// Runs a kernel that multiplies so.
    fn run<K: Kernel>(isa: FoundIsa, kernel: K);
}

/// The same of floating point values: sums are f32.
pub(crate) trait FloatMath: Math<Word: Cell> {
    /// Rounds values to a row; a last lone value is paired with zero. There are `n_cells` of the row.
    fn fill<S: Simd>(s: S, row: &mut [Self::Row], values: &[f32]);
    /// Rounds weights, a register of them, to the cells that they fill. What is smaller than any normal number may become zero.
    fn put<S: Simd>(s: S, row: &mut [Self::Row], weights: S::V);
}

/// f32 by f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct F32Fma;

/// Pairs of bf16 by their dot product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Dot;

/// Bytes in pages taken apart, by rows of f32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Int8Fma;

/// Pairs of bf16 taken apart, for machines where two multiply-adds of f32 take no longer than one dot product of pairs,
/// or that have none. Rows are taken apart once, words once for all rows of a tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16Fma;

// SAFETY: f32 is four bytes and takes any bits.
unsafe impl Word for f32 {
    const STEPS: usize = 1;
}

impl Cell for f32 {
    const IS_SCALED: bool = false;

    #[inline(always)]
    fn set(&mut self, _step: usize, value: f32) {
        *self = value;
    }

    #[inline(always)]
    fn first_step(self) -> Self {
        self
    }

    fn with_bits(of: f32) -> Self {
        of
    }

    #[inline(always)]
    fn fill<S: Simd>(_s: S, words: &mut [Self], values: &[f32], _factor: f32) {
        words.copy_from_slice(values);
    }
}

// SAFETY: u32 is four bytes and takes any bits.
unsafe impl Word for Bf16Pair {
    const STEPS: usize = 2;
}

impl Cell for Bf16Pair {
    const IS_SCALED: bool = false;

    #[inline(always)]
    fn set(&mut self, step: usize, value: f32) {
        let shift = 16 * step;
        *self = *self & !(0xffff << shift) | bf16_bits(value) << shift;
    }

    #[inline(always)]
    fn first_step(self) -> Self {
        self & 0xffff
    }

    fn with_bits(of: f32) -> Self {
        of.to_bits()
    }

    #[inline(always)]
    fn fill<S: Simd>(s: S, words: &mut [Self], values: &[f32], _factor: f32) {
        for (words, values) in words.chunks_mut(S::LANES / Self::STEPS).zip(values.chunks(S::LANES)) {
            let mut halves = [0; 16];
            s.store_high_halves(&mut halves, s.round_to_bf16(s.load_or(values, 0.0)));
            for (word, [low, high]) in words.iter_mut().zip(halves.as_chunks().0) {
                *word = u32::from(*low) | u32::from(*high) << 16;
            }
        }
    }

    #[inline(always)]
    fn fill_steps<'a>(words: &mut [Self], row: impl Fn(usize) -> &'a [f32], _factors: &[f32]) {
        for ((word, low), high) in words.iter_mut().zip(row(0)).zip(row(1)) {
            *word = bf16_bits(*low) | bf16_bits(*high) << 16;
        }
    }
}

// SAFETY: i32 is four bytes and takes any bits.
unsafe impl Word for ByteQuad {
    const STEPS: usize = 4;
}

impl Cell for ByteQuad {
    const IS_SCALED: bool = true;

    #[inline(always)]
    fn set(&mut self, step: usize, value: f32) {
        let (byte, shift) = (value.round_ties_even() as i8, 8 * step);
        *self = *self & !(0xff << shift) | i32::from(byte as u8) << shift;
    }

    #[inline(always)]
    fn first_step(self) -> Self {
        self & 0xff
    }

    fn with_bits(of: f32) -> Self {
        of.to_bits() as i32
    }

    #[inline(always)]
    fn fill<S: Simd>(_s: S, words: &mut [Self], values: &[f32], factor: f32) {
        for (words, values) in words.chunks_mut(QUADS).zip(values.chunks(QUADS * Self::STEPS)) {
            let mut bytes = [0; QUADS * Self::STEPS];
            for (byte, value) in bytes.iter_mut().zip(values) {
                *byte = (value * factor + TO_LOW_BITS).to_bits() as u8;
            }
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
                *word = Self::from_le_bytes(*bytes);
            }
        }
    }

    #[inline(always)]
    fn fill_steps<'a>(words: &mut [Self], row: impl Fn(usize) -> &'a [f32], factors: &[f32]) {
        let [a, b, c, d] = [row(0), row(1), row(2), row(3)];
        let byte = |value: f32, step: usize| (value * factors[step] + TO_LOW_BITS).to_bits() & 0xff;
        for ((((word, a), b), c), d) in words.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            let bytes = byte(*a, 0) | byte(*b, 1) << 8 | byte(*c, 2) << 16 | byte(*d, 3) << 24;
            *word = bytes.cast_signed();
        }
    }
}

impl Math for F32Fma {
    type Word = f32;
    type Row = f32;
    const PARTS: usize = 1;

    #[inline(always)]
    fn multiply_add<S: Simd>(s: S, row: f32, _part: usize, columns: S::V, acc: S::V) -> S::V {
        s.fma(s.splat(row), columns, acc)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run(kernel);
    }
}

impl FloatMath for F32Fma {
    #[inline(always)]
    fn fill<S: Simd>(s: S, row: &mut [f32], values: &[f32]) {
        Cell::fill(s, row, values, 1.0);
    }

    #[inline(always)]
    fn put<S: Simd>(s: S, row: &mut [f32], weights: S::V) {
        s.store(row, weights);
    }
}

impl Math for Bf16Dot {
    type Word = Bf16Pair;
    type Row = Bf16Pair;
    const PARTS: usize = 1;

    #[inline(always)]
    fn multiply_add<S: Simd>(s: S, row: Bf16Pair, _part: usize, columns: S::V, acc: S::V) -> S::V {
        s.dot_bf16(acc, row, columns)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run_bf16_dot(kernel);
    }
}

impl FloatMath for Bf16Dot {
    #[inline(always)]
    fn fill<S: Simd>(s: S, row: &mut [Bf16Pair], values: &[f32]) {
        Cell::fill(s, row, values, 1.0);
    }

    #[inline(always)]
    fn put<S: Simd>(s: S, row: &mut [Bf16Pair], weights: S::V) {
        let mut halves = [0; 16];
        s.store_bf16(&mut halves, weights);
        for (word, [low, high]) in row.iter_mut().zip(halves.as_chunks().0) {
            *word = u32::from(*low) | u32::from(*high) << 16;
        }
    }
}

impl Math for Bf16Fma {
    type Word = Bf16Pair;
    type Row = [f32; 2];
    const PARTS: usize = 2;

    #[inline(always)]
    fn columns<S: Simd>(s: S, words: S::V, part: usize) -> S::V {
        if part == 0 { s.low_halves(words) } else { s.high_halves(words) }
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(s: S, row: [f32; 2], part: usize, columns: S::V, acc: S::V) -> S::V {
        s.fma(s.splat(row[part]), columns, acc)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run(kernel);
    }
}

impl FloatMath for Bf16Fma {
    #[inline(always)]
    fn fill<S: Simd>(s: S, row: &mut [[f32; 2]], values: &[f32]) {
        let row = row.as_flattened_mut();
        for (rounded, values) in row.chunks_mut(S::LANES).zip(values.chunks(S::LANES)) {
            s.store_some(rounded, s.round_to_bf16(s.load_or(values, 0.0)));
        }
    }

    #[inline(always)]
    fn put<S: Simd>(s: S, row: &mut [[f32; 2]], weights: S::V) {
        s.store(row.as_flattened_mut(), s.round_to_bf16(weights));
    }
}

impl Math for Int8Fma {
    type Word = ByteQuad;
    type Row = [f32; 4];
    const PARTS: usize = 4;

    #[inline(always)]
    fn columns<S: Simd>(s: S, words: S::V, part: usize) -> S::V {
        s.signed_bytes(words, part)
    }

    #[inline(always)]
    fn multiply_add<S: Simd>(s: S, row: [f32; 4], part: usize, columns: S::V, acc: S::V) -> S::V {
        s.fma(s.splat(row[part]), columns, acc)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run(kernel);
    }
}

impl FloatMath for Int8Fma {
    #[inline(always)]
    fn fill<S: Simd>(_s: S, row: &mut [[f32; 4]], values: &[f32]) {
        let (quads, rest) = values.as_chunks::<4>();
        for (cell, quad) in row.iter_mut().zip(quads) {
            *cell = *quad;
        }
        if let (Some(cell), false) = (row.last_mut(), rest.is_empty()) {
            *cell = [0.0; 4];
            cell[..rest.len()].copy_from_slice(rest);
        }
    }

    #[inline(always)]
    fn put<S: Simd>(s: S, row: &mut [[f32; 4]], weights: S::V) {
        s.store(row.as_flattened_mut(), weights);
    }
}

/// Rounds rows of values: `[n, width]` to `[n, stride]`, of which a row takes `n_cells`.
pub(crate) struct FillRows<'a, M: Math> {
    /// The values.
    pub(super) values: &'a [f32],
    /// Their width, not zero.
    pub(super) width: usize,
    /// The rows.
    pub(super) rows: &'a mut [M::Row],
}

impl<M: FloatMath> Kernel for FillRows<'_, M> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let values = self.values.chunks_exact(self.width);
        let (stride, n_cells) = (self.rows.len() / values.len().max(1), n_cells::<M::Word>(self.width));
        for (row, values) in self.rows.chunks_exact_mut(stride.max(1)).zip(values) {
            M::fill(s, &mut row[..n_cells], values);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::super::simd::Isa;
    use super::*;

    /// A row of values, as every set of this machine makes it.
    fn rows<M: FloatMath>(values: &[f32]) -> Vec<Vec<M::Row>> {
        let row = |isa| {
            let mut row = vec![M::Row::default(); n_cells::<M::Word>(values.len())];
            let fill = FillRows::<M> { values, width: values.len(), rows: &mut row };
            FoundIsa::new(Some(isa)).expect("an available set").run(fill);
            row
        };
        Isa::available().map(row).collect()
    }

    #[test]
    fn rounding_to_bf16_is_that_of_the_library_on_every_set() {
        let bits = (0..=u32::MAX).step_by(65_521).chain([0x7f80_0000, 0x7f80_0001, 0xff80_0000, 0x3f80_8000]);
        let values: Vec<f32> = bits.map(f32::from_bits).collect();
        let expect: Vec<u32> = values.iter().map(|v| u32::from(bf16::from_f32(*v).to_bits())).collect();
        for (value, expect) in values.iter().zip(&expect) {
            assert_eq!(bf16_bits(*value), *expect, "{value}");
        }
        let (pairs, lone) = expect.as_chunks::<2>();
        let pairs: Vec<Bf16Pair> =
            pairs.iter().map(|[a, b]| a | b << 16).chain(lone.iter().copied()).collect();
        for row in rows::<Bf16Dot>(&values) {
            assert!(row == pairs);
        }
        for row in rows::<Bf16Fma>(&values) {
            let bits = row.as_flattened().iter().map(|value| value.to_bits() >> 16);
            assert!(bits.zip(&expect).all(|(bits, expect)| bits == *expect));
        }
    }

    #[test]
    fn a_lone_last_value_is_paired_with_zero() {
        let mut expect = [0_u32; 2];
        expect[0].set(0, 1.0);
        expect[0].set(1, 2.0);
        expect[1].set(0, 3.0);
        for row in rows::<Bf16Dot>(&[1.0, 2.0, 3.0]) {
            assert_eq!(row, expect);
        }
        for row in rows::<Bf16Fma>(&[1.0, 2.0, 3.0]) {
            assert_eq!(row, expect.map(unpack_pair));
        }
    }
}
