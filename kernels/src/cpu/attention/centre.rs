//! Keys less their mean: what all keys of a sequence have in common adds the same to every score of a query, which the
//! weights do not see, and would take bits from what tells keys apart where these become bytes (Zhang et al. 2024,
//! "SageAttention: Accurate 8-Bit Attention for Plug-and-play Inference Acceleration").

use std::ops::Range;

use crate::cpu::context::Context;
use crate::cpu::kv::Columns;
use crate::cpu::matrix::{CpuTensor, unwritten};
use crate::cpu::pool::Shared;
use crate::cpu::simd::{Kernel, Simd};

/// Columns of a task.
const STRIPE: usize = 64;

/// Rows that are prefetched ahead: parts of rows do not come by themselves.
const AHEAD: usize = 8;

/// The first `width` columns of each sequence less their mean over its rows, `[n_tokens, width]`. A column whose mean is not finite stays as it is.
pub(super) fn centred(context: &Context, rows: Columns<'_>, width: usize, cu_seqlens: &[u32]) -> CpuTensor {
    let n_tokens = rows.of.dims().0;
    let mut out = unwritten(n_tokens * width);
    let shared = &Shared::new(&mut out);
    let n_stripes = width.div_ceil(STRIPE);
    let n_seqs = cu_seqlens.len().saturating_sub(1);
    context.pool.run(n_seqs * n_stripes, n_tokens * width / 4, |i| {
        let (seq, first) = (i / n_stripes, i % n_stripes * STRIPE);
        let tokens = cu_seqlens[seq] as usize..cu_seqlens[seq + 1] as usize;
        context.isa.run(Centre {
            rows,
            tokens,
            columns: first..width.min(first + STRIPE),
            width,
            out: shared,
        });
    });
    CpuTensor::new(out, n_tokens, width)
}

/// The work of a task: some columns of a sequence.
struct Centre<'a> {
    rows: Columns<'a>,
    tokens: Range<usize>,
    columns: Range<usize>,
    /// Columns of all tasks.
    width: usize,
    out: &'a Shared<'a, f32>,
}

impl Centre<'_> {
    /// Prefetches the task's columns of a row.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S, token: usize) {
        if token < self.tokens.end {
            s.prefetch_all(self.part(token));
        }
    }

    /// The task's columns of a row.
    #[inline(always)]
    fn part(&self, token: usize) -> &[f32] {
        &self.rows.of.row(token)[self.rows.first..][self.columns.clone()]
    }
}

impl Kernel for Centre<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n_columns = self.columns.len();
        let mut means = [0.0; STRIPE];
        for token in self.tokens.clone() {
            self.fetch(s, token + AHEAD);
            for (mean, value) in means.iter_mut().zip(self.part(token)) {
                *mean += value;
            }
        }
        let share = 1.0 / self.tokens.len() as f32;
        for mean in &mut means[..n_columns] {
            let of_all = *mean * share;
            *mean = if of_all.is_finite() { of_all } else { 0.0 };
        }
        for token in self.tokens.clone() {
            self.fetch(s, token + AHEAD);
            let start = token * self.width + self.columns.start;
            // SAFETY: the columns of a sequence belong to one task.
            let out = unsafe { self.out.slice(start..start + n_columns) };
            for ((out, value), mean) in out.iter_mut().zip(self.part(token)).zip(&means) {
                *out = value - mean;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{CpuBackend, CpuConfig};

    #[test]
    fn each_sequence_is_centred_alone_and_what_is_odd_stays() {
        let backend = CpuBackend::new(CpuConfig::default()).expect("a back end");
        let width = STRIPE + 3;
        let mut values: Vec<f32> = (0..5 * width).map(|i| (i % width) as f32 + (i / width) as f32).collect();
        values[2 * width + 1] = f32::INFINITY;
        let rows = CpuTensor::new(values.clone(), 5, width);
        let centred = centred(&backend.context, Columns::all(&rows), width, &[0, 2, 2, 5]);
        for (token, less) in [0.5, 0.5, 3.0, 3.0, 3.0].into_iter().enumerate() {
            for column in 0..width {
                let (from, to) = (values[token * width + column], centred.row(token)[column]);
                let is_odd = token >= 2 && column == 1;
                let expect = if is_odd { from } else { from - column as f32 - less };
                assert_eq!(to, expect, "row {token}, column {column}");
            }
        }
    }
}
