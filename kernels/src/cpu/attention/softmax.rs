//! Weights of scores, a stretch of keys at a time.

use crate::cpu::math::exp;
use crate::cpu::simd::Simd;

/// Turns the scores of a row, whole pages of them, into weights `exp(score − max)`, with the largest score and the sum of
/// weights so far brought up to date.
#[inline(always)]
pub(super) fn soften<S: Simd>(s: S, scores: &mut [f32], max: &mut f32, total: &mut f32) {
    let correction = s.largest(exp(s, s.splat(raise(s, scores, max))));
    *total = *total * correction + weights(s, scores, *max);
}

/// Brings the largest score up to date. Returns the logarithm of the factor for what was summed under the old one.
#[inline(always)]
pub(super) fn raise<S: Simd>(s: S, scores: &[f32], max: &mut f32) -> f32 {
    // Two at a time, since each waits for the one before.
    let mut largest = [s.splat(*max); 2];
    for pair in scores.chunks_exact(2 * S::LANES) {
        largest[0] = s.max(s.load(pair), largest[0]);
        largest[1] = s.max(s.load(&pair[S::LANES..]), largest[1]);
    }
    let old = std::mem::replace(max, s.largest(s.max(largest[0], largest[1])));
    if *max == f32::NEG_INFINITY { 0.0 } else { old - *max }
}

/// The exponential of each value, as many as `S::LANES` divides.
#[inline(always)]
pub(super) fn exponentials<S: Simd>(s: S, values: &mut [f32]) {
    for values in values.chunks_exact_mut(S::LANES) {
        let exponential = exp(s, s.load(values));
        s.store(values, exponential);
    }
}

/// Turns scores into weights, to the last place. Returns their sum.
#[inline(always)]
pub(super) fn weights<S: Simd>(s: S, scores: &mut [f32], max: f32) -> f32 {
    if max == f32::NEG_INFINITY {
        scores.fill(0.0);
        return 0.0;
    }
    let max = s.splat(max);
    let mut sums = [s.splat(0.0); 2];
    for pair in scores.chunks_exact_mut(2 * S::LANES) {
        let (first, second) = pair.split_at_mut(S::LANES);
        let weight = exp(s, s.sub(s.load(first), max));
        s.store(first, weight);
        sums[0] = s.add(sums[0], weight);
        let weight = exp(s, s.sub(s.load(second), max));
        s.store(second, weight);
        sums[1] = s.add(sums[1], weight);
    }
    s.sum(s.add(sums[0], sums[1]))
}
