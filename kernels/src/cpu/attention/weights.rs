//! The weights themselves, of a few heads: what alignment reads. One row at a time, since nobody waits for it.

use std::ops::Range;

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::head::HeadRows;
use super::softmax::soften;
use crate::cpu::cell::{FloatMath, n_cells};
use crate::cpu::math::softcap;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::tile::{Rows, multiply, strip_width, strips_per_panel, zero_sums};

/// One head of one sequence.
pub(super) struct HeadWeights<'a, M: FloatMath> {
    /// All rows that share its key head; `out` is `[sequences, heads, n_queries, n_keys]`.
    pub(super) rows: HeadRows<'a, M>,
    /// Index of the head among the query heads that share the key head.
    pub(super) member: usize,
    /// Range of its weights in `out`.
    pub(super) place: Range<usize>,
}

impl<M: FloatMath> Kernel for HeadWeights<'_, M> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, member, place } = self;
        let n_keys = rows.n_keys();
        if place.is_empty() {
            return;
        }
        // SAFETY: the weights of a head of a sequence are its task's own.
        let out = unsafe { rows.out.slice(place) };
        let n_pages = n_keys.div_ceil(KV_BLOCK_TOKENS);
        let head_dim = rows.step.shape.head_dim;
        let (mut q, mut scaled) =
            (vec![M::Row::default(); n_cells::<M::Word>(head_dim)], vec![0.0; head_dim]);
        let mut scores = vec![0.0; n_pages * KV_BLOCK_TOKENS];
        for (query, out) in out.chunks_exact_mut(n_keys).enumerate() {
            let row = query * rows.group() + member;
            rows.scaled_query(s, row, (&mut scaled, &mut q));
            for (i, scores) in scores.chunks_exact_mut(KV_BLOCK_TOKENS).enumerate() {
                page_scores::<S, M>(s, &q, rows.page(i).keys, scores);
            }
            if let Some(c) = rows.step.shape.softcap {
                softcap(s, &mut scores, c);
            }
            let visible = rows.visible(row);
            rows.bias.add(rows.score_row(row, 0), &mut scores[..visible.end]);
            scores[visible.end..].fill(f32::NEG_INFINITY);
            scores[..visible.start].fill(f32::NEG_INFINITY);
            let (mut max, mut total) = (f32::NEG_INFINITY, 0.0);
            soften(s, &mut scores, &mut max, &mut total);
            let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
            for (out, weight) in out.iter_mut().zip(&scores) {
                *out = weight * factor;
            }
        }
    }
}

/// Scores of one query for the keys of a page.
#[inline(always)]
fn page_scores<S: Simd, M: FloatMath>(s: S, q: &[M::Row], keys: &[M::Word], scores: &mut [f32]) {
    for strip in 0..strips_per_panel::<S>() {
        let first = strip * strip_width::<S>();
        let mut sums = zero_sums::<S, 1, 1>(s);
        let row = Rows { cells: q, stride: q.len() };
        multiply::<S, M, 1, 1>(s, row, ([&keys[first..]], q.len(), false), &mut sums);
        for (v, sum) in sums[0][0].iter().enumerate() {
            s.store(&mut scores[first + v * S::LANES..], *sum);
        }
    }
}
