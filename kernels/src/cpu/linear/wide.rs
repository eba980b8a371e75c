//! Many rows by pairs of bf16, where the instruction set has no dot product of pairs: the cells of a panel are widened to
//! f32 once for all rows of a task, in the first cache, and multiplied as f32. Rows were rounded to bf16 before, so each
//! sum has the bits that a row alone gets from its pairs.

use super::product::{Block, Plain, Product, Stretch, all_rows, stretches};
use crate::cpu::CpuBackend;
use crate::cpu::cell::{Bf16Pair, FillRows, PANEL, n_cells};
use crate::cpu::matrix::CpuTensor;
use crate::cpu::simd::{Kernel, Simd};

/// Pairs of each column that are widened at a time.
const PAIRS: usize = 64;

/// Fewest rows that are worth widening for.
const FEWEST_ROWS: usize = 24;

/// Whether it is the way to multiply `(n_tokens, n_in)` rows.
pub(super) fn is_for(backend: &CpuBackend, (n_tokens, n_in): (usize, usize)) -> bool {
    !backend.isa.has_pairs() && backend.isa.is_narrow() && n_tokens >= FEWEST_ROWS && n_in > 0
}

/// Rows rounded to bf16 as f32, `[n_tokens, 2 · pairs]`.
pub(super) fn rounded(backend: &CpuBackend, x: &CpuTensor) -> Vec<f32> {
    let (n_tokens, width) = x.dims();
    let padded = n_cells::<Bf16Pair>(width) * 2;
    let mut rows = vec![0.0; n_tokens * padded];
    backend.pool.rows(&mut rows, padded, width / 8 + 1, |row, rows| {
        let values = &x.data()[row * width..][..rows.len() / padded * width];
        backend.isa.run(Round { values, width, rows });
    });
    rows
}

/// Computes a product whose `x` is [`rounded`], whose `n_in` is its width, and whose panels are `pairs`.
pub(super) fn run(
    product: &Product<'_, f32, Plain>,
    pairs: &[Bf16Pair],
    backend: &CpuBackend,
    out: &mut [f32],
) {
    product.run_blocks(backend, out, |block| backend.isa.run(Widened { block, pairs }));
}

struct Round<'a> {
    values: &'a [f32],
    width: usize,
    rows: &'a mut [f32],
}

impl Kernel for Round<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let padded = n_cells::<Bf16Pair>(self.width) * 2;
        let mut pairs = vec![0; padded / 2];
        for (row, values) in self.rows.chunks_exact_mut(padded).zip(self.values.chunks_exact(self.width)) {
            FillRows { values, width: self.width, cells: &mut pairs }.run(s);
            for (row, pair) in row.chunks_exact_mut(2).zip(&pairs) {
                row.copy_from_slice(&halves(*pair));
            }
        }
    }
}

/// Both values of a pair.
#[inline(always)]
fn halves(pair: Bf16Pair) -> [f32; 2] {
    [f32::from_bits(pair << 16), f32::from_bits(pair & 0xffff_0000)]
}

struct Widened<'a> {
    block: Block<'a, f32, Plain>,
    pairs: &'a [Bf16Pair],
}

impl Kernel for Widened<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let k_cells = n_cells::<f32>(self.block.product.size.n_in);
        let (stretches, mut waiting) = stretches(&self.block, 2 * PAIRS);
        let mut cells = vec![0.0; 2 * PAIRS * PANEL];
        for stretch in stretches {
            let Stretch { panel, first_cell, n_cells, .. } = stretch;
            let pairs = &self.pairs[(panel * k_cells + first_cell) / 2 * PANEL..][..n_cells / 2 * PANEL];
            for (cells, pairs) in cells.chunks_exact_mut(2 * PANEL).zip(pairs.chunks_exact(PANEL)) {
                let (first, second) = cells.split_at_mut(PANEL);
                for ((first, second), pair) in first.iter_mut().zip(second).zip(pairs) {
                    [*first, *second] = halves(*pair);
                }
            }
            all_rows(s, &self.block, &mut waiting, (stretch, &cells));
        }
    }
}
