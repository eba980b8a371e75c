//! Parts: the maximum, the sum and the weighted values that rows have of a segment of keys, and their places in memory.

use std::ops::Range;

use super::softmax::exponentials;
use super::step::{SEGMENT, Step, n_rows, padded};
use crate::cpu::simd::Simd;

/// Result of rows over some keys, before it is divided by the sum of weights.
#[derive(Debug, Default)]
pub(super) struct Part {
    /// Largest score, `[n_rows]`.
    pub(super) max: Vec<f32>,
    /// Sum of weights, `[n_rows]`.
    pub(super) total: Vec<f32>,
    /// Weighted sums of values, `[n_rows, padded head_dim]`.
    pub(super) sums: Vec<f32>,
}

/// Rows that are joined at a time; lanes divide it.
const JOINED: usize = 16;

/// The segment that a task is of, where there is a task for each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    pub(super) index: usize,
    pub(super) places: &'a Places,
}

impl Segment<'_> {
    /// Index of the segment's first key.
    pub(super) fn first_key(&self) -> usize {
        self.index * SEGMENT
    }

    /// Range of the part of a row of a sequence.
    pub(super) fn place(&self, step: &Step<'_>, kv_head: usize, of_seq: (usize, usize)) -> Range<usize> {
        let (start, len) = (self.places.row(step, kv_head, of_seq).start, self.places.part_len);
        start + self.index * len..start + (self.index + 1) * len
    }
}

impl Part {
    /// The result over no keys.
    pub(super) fn new(n_rows: usize, padded: usize) -> Self {
        let (max, total) = (vec![f32::NEG_INFINITY; n_rows], vec![0.0; n_rows]);
        Self { max, total, sums: vec![0.0; n_rows * padded] }
    }

    /// Values of a row's part.
    pub(super) fn len(padded: usize) -> usize {
        2 + padded
    }

    /// Writes that of a row, as many values as [`Self::len`] says.
    pub(super) fn store(&self, row: usize, to: &mut [f32]) {
        let (front, sums) = to.split_at_mut(2);
        (front[0], front[1]) = (self.max[row], self.total[row]);
        sums.copy_from_slice(&self.sums[row * sums.len()..][..sums.len()]);
    }

    /// Reads what [`Self::store`] wrote of each row.
    pub(super) fn load<'b>(rows: impl Iterator<Item = &'b [f32]>) -> Self {
        let mut part = Self::default();
        for row in rows {
            part.max.push(row[0]);
            part.total.push(row[1]);
            part.sums.extend(&row[2..]);
        }
        part
    }

    /// Adds the result of rows over later keys; `sees` is true of a row that sees any of these.
    #[inline(always)]
    pub(super) fn join<S: Simd>(&mut self, s: S, later: &Self, sees: impl Fn(usize) -> bool) {
        for first in (0..self.max.len()).step_by(JOINED) {
            self.join_rows(s, later, (first..self.max.len().min(first + JOINED), &sees));
        }
    }

    /// The same of some rows, [`JOINED`] at most.
    #[inline(always)]
    fn join_rows<S: Simd>(
        &mut self,
        s: S,
        later: &Self,
        (rows, sees): (Range<usize>, &impl Fn(usize) -> bool),
    ) {
        let padded = self.sums.len() / self.max.len().max(1);
        let mut factors = [[0.0; JOINED]; 2];
        for (i, row) in rows.clone().enumerate() {
            let max = self.max[row].max(later.max[row]);
            (factors[0][i], factors[1][i]) =
                (log_factor(self.max[row], max), log_factor(later.max[row], max));
        }
        exponentials(s, factors.as_flattened_mut());
        for (i, row) in rows.enumerate().filter(|(_, row)| sees(*row)) {
            let factors = [factors[0][i], factors[1][i]];
            self.max[row] = self.max[row].max(later.max[row]);
            self.total[row] = self.total[row] * factors[0] + later.total[row] * factors[1];
            let factors = factors.map(|factor| s.splat(factor));
            let sums = self.sums[row * padded..][..padded].chunks_exact_mut(S::LANES);
            for (sums, later) in sums.zip(later.sums[row * padded..][..padded].chunks_exact(S::LANES)) {
                let joined = s.fma(s.load(later), factors[1], s.mul(s.load(sums), factors[0]));
                s.store(sums, joined);
            }
        }
    }
}

/// Logarithm of the factor that brings sums taken under the largest score `of` to the largest score `max`.
#[inline(always)]
fn log_factor(of: f32, max: f32) -> f32 {
    // Where all scores are minus infinity, what was summed is zero or not a number.
    if of == f32::NEG_INFINITY { 0.0 } else { of - max }
}

/// Places of parts in memory: of each sequence, key head, row and segment, in this order.
#[derive(Debug, Default)]
pub(super) struct Places {
    /// Index of the first value of each sequence, and the end, `[n_seqs + 1]`.
    pub(super) starts: Vec<usize>,
    /// Segments of each sequence.
    pub(super) n_segments: Vec<usize>,
    pub(super) part_len: usize,
}

impl Places {
    pub(super) fn new(step: &Step<'_>) -> Self {
        let part_len = Part::len(padded(step.shape.head_dim));
        let n_segments: Vec<usize> = step.batch.seq_lens.iter().map(|keys| n_segments(*keys)).collect();
        let mut starts = vec![0];
        for (seq, n_segments) in n_segments.iter().enumerate() {
            starts.push(starts[seq] + step.shape.n_kv_heads * n_rows(step, seq) * n_segments * part_len);
        }
        Self { starts, n_segments, part_len }
    }

    /// Range of the parts of a row of a sequence.
    pub(super) fn row(&self, step: &Step<'_>, kv_head: usize, (seq, row): (usize, usize)) -> Range<usize> {
        let len = self.n_segments[seq] * self.part_len;
        let start = self.starts[seq] + (kv_head * n_rows(step, seq) + row) * len;
        start..start + len
    }
}

/// Segments of so many keys: at least one.
pub(super) fn n_segments(n_keys: u32) -> usize {
    (n_keys as usize).div_ceil(SEGMENT).max(1)
}
