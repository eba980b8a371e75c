//! Keys in segments: what rows have seen of each is a part, and parts are joined in order. So few rows over many keys, as a
//! step of one long sequence has, are shared by more threads than there are heads (Dao et al. 2023, "Flash-Decoding for
//! long-context inference"). Segments are counted from the first key and joined alike by one task and by many: who computes
//! them does not change a bit.

use std::ops::Range;

use super::head::{HeadRows, STRETCH};
use super::whole::PageMath;
use super::{CpuBackend, Step, Task, padded};
use crate::cpu::math::exp_below;
use crate::cpu::simd::{Kernel, Simd};

/// Keys of a segment.
pub(super) const SEGMENT: usize = 2 * STRETCH;

/// Tasks that a thread should find: fewer are cut into segments.
const TASKS_PER_THREAD: usize = 2;

/// What rows have seen of some keys.
#[derive(Debug, Default)]
pub(super) struct Part {
    /// Largest score, `[n_rows]`.
    pub(super) max: Vec<f32>,
    /// Sum of weights, `[n_rows]`.
    pub(super) total: Vec<f32>,
    /// Weighted sums of values, `[n_rows, padded head_dim]`.
    pub(super) sums: Vec<f32>,
}

/// The segment that a task is of, where there is a task for each.
#[derive(Clone, Debug)]
pub(super) struct Segment {
    pub(super) first_key: usize,
    /// Where its part lies among those of the step.
    pub(super) place: Range<usize>,
}

impl Part {
    /// Nothing seen.
    pub(super) fn new(n_rows: usize, padded: usize) -> Self {
        let (max, total) = (vec![f32::NEG_INFINITY; n_rows], vec![0.0; n_rows]);
        Self { max, total, sums: vec![0.0; n_rows * padded] }
    }

    /// Values of a part.
    fn len(n_rows: usize, padded: usize) -> usize {
        n_rows * (2 + padded)
    }

    /// Writes it, as many values as [`Self::len`] says.
    pub(super) fn store(&self, to: &mut [f32]) {
        let (max, rest) = to.split_at_mut(self.max.len());
        let (total, sums) = rest.split_at_mut(self.total.len());
        max.copy_from_slice(&self.max);
        total.copy_from_slice(&self.total);
        sums.copy_from_slice(&self.sums);
    }

    /// Reads what [`Self::store`] wrote.
    fn load(from: &[f32], n_rows: usize) -> Self {
        let (max, rest) = from.split_at(n_rows);
        let (total, sums) = rest.split_at(n_rows);
        Self { max: max.to_vec(), total: total.to_vec(), sums: sums.to_vec() }
    }

    /// Adds what rows have seen of later keys; `sees` tells of a row whether it sees any of these.
    #[inline(always)]
    pub(super) fn join<S: Simd>(&mut self, s: S, later: &Self, sees: impl Fn(usize) -> bool) {
        let padded = self.sums.len() / self.max.len().max(1);
        for row in (0..self.max.len()).filter(|row| sees(*row)) {
            let max = self.max[row].max(later.max[row]);
            let factors = [factor(s, self.max[row], max), factor(s, later.max[row], max)];
            self.max[row] = max;
            self.total[row] = self.total[row] * factors[0] + later.total[row] * factors[1];
            let factors = [s.splat(factors[0]), s.splat(factors[1])];
            let sums = self.sums[row * padded..][..padded].chunks_exact_mut(S::LANES);
            for (sums, later) in sums.zip(later.sums[row * padded..][..padded].chunks_exact(S::LANES)) {
                let joined = s.fma(s.load(later), factors[1], s.mul(s.load(sums), factors[0]));
                s.store(sums, joined);
            }
        }
    }
}

/// What is summed under the largest score `of` is multiplied with, to stand under `max`.
#[inline(always)]
fn factor<S: Simd>(s: S, of: f32, max: f32) -> f32 {
    // Where all scores are minus infinity, what was summed is zero or not a number.
    if of == f32::NEG_INFINITY { 1.0 } else { s.largest(exp_below(s, s.splat(of - max))) }
}

/// The tasks of a step, cut.
#[derive(Debug, Default)]
pub(super) struct Split {
    /// One for each segment of each task.
    pub(super) tasks: Vec<Task>,
    /// Where the parts of each task lie.
    pub(super) places: Vec<Range<usize>>,
    /// Values of all parts.
    pub(super) len: usize,
}

/// Cuts the tasks of a step into segments; `None` where there are enough of them, or no long sequence.
pub(super) fn split(backend: &CpuBackend, step: &Step<'_>, tasks: &[Task]) -> Option<Split> {
    let n_threads = backend.pool.n_threads();
    let n_segments = |task: &Task| (step.batch.seq_lens[task.seq] as usize).div_ceil(SEGMENT).max(1);
    if n_threads == 1
        || tasks.len() >= TASKS_PER_THREAD * n_threads
        || tasks.iter().all(|task| n_segments(task) == 1)
    {
        return None;
    }
    let padded = padded(step.shape.head_dim);
    let mut split = Split::default();
    for task in tasks {
        let (start, part_len) = (split.len, Part::len(task.rows.len(), padded));
        for segment in 0..n_segments(task) {
            let place = split.len..split.len + part_len;
            split.len = place.end;
            split
                .tasks
                .push(Task { part: Some(Segment { first_key: segment * SEGMENT, place }), ..task.clone() });
        }
        split.places.push(start..split.len);
    }
    Some(split)
}

/// A task whose segments others have seen.
pub(super) struct Joined<'a, M: PageMath> {
    /// The task as it would be alone.
    pub(super) rows: HeadRows<'a, M>,
    /// The parts of its segments, in order.
    pub(super) parts: &'a [f32],
}

impl<M: PageMath> Kernel for Joined<'_, M> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, parts } = self;
        let n_rows = rows.task.rows.len();
        let mut parts = parts.chunks_exact(Part::len(n_rows, rows.head_dims().1));
        let mut seen = parts.next().map_or_else(Part::default, |part| Part::load(part, n_rows));
        for (first_key, part) in (SEGMENT..).step_by(SEGMENT).zip(parts) {
            seen.join(s, &Part::load(part, n_rows), |row| rows.n_visible(row) > first_key);
        }
        rows.write(&seen);
    }
}
