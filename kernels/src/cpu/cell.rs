//! What a multiply-add consumes at a time: an f32, a pair of bf16 or four bytes that meet in one dot product.
//!
//! All are four bytes, so packed weights, KV pages and tiles have one shape for every precision: a *panel*
//! is `[k_cells][32]` cells, and a cell of a pair holds two steps of `k`, the first in its low half. Values
//! become cells of f32 and bf16 by rounding ([`Cell`]); cells of bytes need a scale, which `quantized` knows.

use super::simd::{FoundIsa, Kernel, Simd};

/// Columns of a panel. A KV block is one panel of keys.
pub(super) const PANEL: usize = triptych_core::shape::KV_BLOCK_TOKENS;

/// Two bf16. A plain integer, since the allocator gives those out zeroed without touching them.
pub(super) type Bf16Pair = u32;

/// Four bytes of one or more values along `k`, as a register tile multiplies them.
///
/// # Safety
/// An implementation must be four bytes, of which any bits are a value.
pub(super) unsafe trait Word: Copy + Default + Send + Sync + 'static {
    /// Steps of `k` in a cell.
    const STEPS: usize;
    /// `acc + self · b` in each lane, where `b` holds the bits of a register of cells. What the bits of `acc`
    /// mean is the cell's own; all zeros are nothing summed.
    fn multiply_add<S: Simd>(self, s: S, b: S::V, acc: S::V) -> S::V;
    /// Runs a kernel that multiplies such cells.
    fn run<K: Kernel>(isa: FoundIsa, kernel: K);
}

/// A cell of floating point values: sums are f32.
pub(super) trait Cell: Word {
    /// Writes the value of one step.
    fn set(&mut self, step: usize, value: f32);
    /// The cell with all steps but the first set to zero.
    fn first_step(self) -> Self;
    /// Rounds values to cells; a last lone value is paired with zero. There are `n_cells` of them.
    fn fill(cells: &mut [Self], values: &[f32]);
}

/// Cells of `k` values.
pub(super) fn n_cells<C: Word>(k: usize) -> usize {
    k.div_ceil(C::STEPS)
}

// SAFETY: f32 is four bytes and takes any bits.
unsafe impl Word for f32 {
    const STEPS: usize = 1;

    #[inline(always)]
    fn multiply_add<S: Simd>(self, s: S, b: S::V, acc: S::V) -> S::V {
        s.fma(s.splat(self), b, acc)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run(kernel);
    }
}

impl Cell for f32 {
    #[inline(always)]
    fn set(&mut self, _step: usize, value: f32) {
        *self = value;
    }

    #[inline(always)]
    fn first_step(self) -> Self {
        self
    }

    #[inline(always)]
    fn fill(cells: &mut [Self], values: &[f32]) {
        cells.copy_from_slice(values);
    }
}

// SAFETY: u32 is four bytes and takes any bits.
unsafe impl Word for Bf16Pair {
    const STEPS: usize = 2;

    #[inline(always)]
    fn multiply_add<S: Simd>(self, s: S, b: S::V, acc: S::V) -> S::V {
        s.dot_pair(acc, self, b)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run_pairs(kernel);
    }
}

impl Cell for Bf16Pair {
    #[inline(always)]
    fn set(&mut self, step: usize, value: f32) {
        let shift = 16 * step;
        *self = *self & !(0xffff << shift) | bf16_bits(value) << shift;
    }

    #[inline(always)]
    fn first_step(self) -> Self {
        self & 0xffff
    }

    #[inline(always)]
    fn fill(cells: &mut [Self], values: &[f32]) {
        let (pairs, lone) = values.as_chunks::<2>();
        for (cell, pair) in cells.iter_mut().zip(pairs) {
            *cell = bf16_bits(pair[0]) | bf16_bits(pair[1]) << 16;
        }
        if let (Some(cell), Some(&value)) = (cells.last_mut(), lone.first()) {
            *cell = bf16_bits(value);
        }
    }
}

/// A value of bf16 kept as f32: what half of a pair is, for instruction sets that would take pairs apart at each use. Its
/// products and sums have the bits of the pair's.
#[derive(Clone, Copy, Debug, Default)]
#[repr(transparent)]
pub(super) struct WideBf16(f32);

impl WideBf16 {
    #[inline(always)]
    fn of(value: f32) -> Self {
        Self(f32::from_bits(bf16_bits(value) << 16))
    }
}

// SAFETY: it is an f32, which is four bytes and takes any bits.
unsafe impl Word for WideBf16 {
    const STEPS: usize = 1;

    #[inline(always)]
    fn multiply_add<S: Simd>(self, s: S, b: S::V, acc: S::V) -> S::V {
        s.fma(s.splat(self.0), b, acc)
    }

    fn run<K: Kernel>(isa: FoundIsa, kernel: K) {
        isa.run(kernel);
    }
}

impl Cell for WideBf16 {
    #[inline(always)]
    fn set(&mut self, _step: usize, value: f32) {
        *self = Self::of(value);
    }

    #[inline(always)]
    fn first_step(self) -> Self {
        self
    }

    #[inline(always)]
    fn fill(cells: &mut [Self], values: &[f32]) {
        for (cell, value) in cells.iter_mut().zip(values) {
            *cell = Self::of(*value);
        }
    }
}

/// The nearest bf16, ties to even, as its bits. Like `half::bf16::from_f32`, which the test below holds, but
/// without a branch, so that loops over it become vectors.
#[inline(always)]
fn bf16_bits(value: f32) -> u32 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet = bits >> 16 | 0x40;
    if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded }
}

/// Rounds rows of values to rows of cells: `[n, width]` to `[n, n_cells]`.
pub(super) struct FillRows<'a, C> {
    /// The values.
    pub(super) values: &'a [f32],
    /// Their width, not zero.
    pub(super) width: usize,
    /// The cells.
    pub(super) cells: &'a mut [C],
}

impl<C: Cell> Kernel for FillRows<'_, C> {
    #[inline(always)]
    fn run<S: Simd>(self, _s: S) {
        let rows = self.values.chunks_exact(self.width);
        for (cells, values) in self.cells.chunks_exact_mut(n_cells::<C>(self.width)).zip(rows) {
            C::fill(cells, values);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn rounding_to_bf16_is_that_of_the_library() {
        let bits = (0..=u32::MAX).step_by(65_521).chain([0x7f80_0000, 0x7f80_0001, 0xff80_0000, 0x3f80_8000]);
        for value in bits.map(f32::from_bits) {
            assert_eq!(bf16_bits(value), u32::from(bf16::from_f32(value).to_bits()), "{value}");
        }
    }

    #[test]
    fn a_lone_last_value_is_paired_with_zero() {
        let mut cells = [u32::MAX; 2];
        Bf16Pair::fill(&mut cells, &[1.0, 2.0, 3.0]);
        let mut expect = [0_u32; 2];
        expect[0].set(0, 1.0);
        expect[0].set(1, 2.0);
        expect[1].set(0, 3.0);
        assert_eq!(cells, expect);
    }
}
