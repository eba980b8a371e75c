//! Reductions over all logits of a vocabulary: the largest, weights, and sums of weights.
//!
//! They run for every sequence at every step, on the thread that runs steps. With a call of the library's `exp` for each
//! token they are a fifth of a step of 32 sequences of a small Whisper. These loops have no branch and no call, and sum in
//! separate lanes, so that compilers vectorise them. They round every operation, so they give the same bits on every
//! machine.

/// Independent sums, and maxima, of a loop.
const LANES: usize = 16;

/// Weights that are summed in f32; these sums are added up in f64.
pub const STRETCH: usize = 256;

/// Below this, [`exp`] returns 0: the least normal number, 2⁻¹²⁶, is e^−87.34.
const LEAST: f32 = -87.3;

/// Added to a small value, it leaves the nearest integer in the low bits: 1.5 · 2²³.
const TO_LOW_BITS: f32 = 12_582_912.0;

/// `eˣ` for `x` up to 0, with a relative error below 3e-7: exactly 1 at 0, exactly 0 below −87.3, NaN for NaN.
/// The polynomial is that of Cephes' `expf`.
#[inline]
pub fn exp(x: f32) -> f32 {
    let above = if x < LEAST { LEAST } else { x };
    let shifted = above * std::f32::consts::LOG2_E + TO_LOW_BITS;
    let n = shifted - TO_LOW_BITS;
    // ln 2 in two parts, the first short enough that its product with n is exact.
    let r = above - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut y = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0] {
        y = y * r + c;
    }
    let exponent = shifted.to_bits().wrapping_sub(TO_LOW_BITS.to_bits()).wrapping_add(127);
    let power = f32::from_bits(exponent << 23);
    if x < LEAST { 0.0 } else { y * power }
}

/// The largest of `logits: [vocab]`, without NaN; minus infinity if there is none.
pub fn largest(logits: &[f32]) -> f32 {
    let larger = |max: f32, value: &f32| if *value > max { *value } else { max };
    let (lanes, rest) = logits.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    for values in lanes {
        most.iter_mut().zip(values).for_each(|(max, value)| *max = larger(*max, value));
    }
    most.iter().chain(rest).fold(f32::NEG_INFINITY, larger)
}

/// Index of the first NaN or positive infinity in `logits: [vocab]`; no token can be chosen from such logits.
pub fn first_broken(logits: &[f32]) -> Option<usize> {
    let is_broken = |value: f32| value.is_nan() || value == f32::INFINITY;
    let any = logits.iter().fold(false, |any, value| any | is_broken(*value));
    if any { logits.iter().position(|value| is_broken(*value)) } else { None }
}

/// The largest of `logits: [vocab]` with its first index; `None` if all are minus infinity. One pass, since the logits of a
/// vocabulary exceed an L1 cache.
///
/// # Errors
/// The index of the first that is broken ([`first_broken`]).
pub fn best(logits: &[f32]) -> Result<Option<(usize, f32)>, usize> {
    let mut best = f32::NEG_INFINITY;
    let mut place = None;
    for (i, stretch) in logits.chunks(STRETCH).enumerate() {
        if let Some(broken) = first_broken(stretch) {
            return Err(i * STRETCH + broken);
        }
        let largest = largest(stretch);
        if largest > best {
            (best, place) = (largest, Some(i));
        }
    }
    let within = |i: usize| logits[i * STRETCH..].iter().position(|logit| *logit == best);
    Ok(place.and_then(|i| Some((i * STRETCH + within(i)?, best))))
}

/// `exp((logit − max) / temperature)` of each, `[vocab]`; `max` is the largest.
pub fn weights(logits: &[f32], max: f32, temperature: f32) -> Vec<f32> {
    logits.iter().map(|logit| exp((logit - max) / temperature)).collect()
}

/// The sum of each [`STRETCH`] of `weights: [vocab]`.
pub fn sums(weights: &[f32]) -> impl Iterator<Item = f64> {
    weights.chunks(STRETCH).map(|stretch| sum_of(stretch, |weight| weight))
}

/// `ln Σ exp` of `logits: [vocab]`; minus infinity if all are, NaN if one is broken.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = largest(logits);
    if max == f32::NEG_INFINITY && first_broken(logits).is_none() {
        return f64::NEG_INFINITY;
    }
    let sums = logits.chunks(STRETCH).map(|stretch| sum_of(stretch, |logit| exp(logit - max)));
    f64::from(max) + sums.sum::<f64>().ln()
}

/// Sets `ids` to minus infinity in `logits: [vocab]`; ids past the vocabulary are passed over.
pub fn forbid(ids: &[u32], logits: &mut [f32]) {
    for id in ids {
        if let Some(logit) = logits.get_mut(*id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

/// Sum of `weight` over `values`, in lanes.
#[inline]
fn sum_of(values: &[f32], weight: impl Fn(f32) -> f32) -> f64 {
    let (lanes, rest) = values.as_chunks::<LANES>();
    let mut sums = [0.0_f32; LANES];
    for values in lanes {
        sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += weight(*value));
    }
    sums.iter().copied().chain(rest.iter().map(|value| weight(*value))).map(f64::from).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO: f32 = f32::NEG_INFINITY;

    #[test]
    fn the_exponential_is_that_of_the_library() {
        for i in 0..=873_000 {
            let x = -(i as f32) * 1e-4;
            let expect = f64::from(x).exp();
            let error = (f64::from(exp(x)) - expect).abs() / expect;
            assert!(error < 3e-7, "of {x}: {} for {expect}", exp(x));
        }
        assert_eq!([0.0, -87.4, -1e30, NO].map(exp), [1.0, 0.0, 0.0, 0.0]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn sums_and_largest_are_those_of_a_plain_loop_whatever_the_length() {
        for n in [1_usize, 15, 16, 17, 255, 256, 257, 5000] {
            let logits: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1009) as f32 / 50.0 - 12.0).collect();
            let max = logits.iter().copied().fold(NO, f32::max);
            assert_eq!(largest(&logits), max);
            let plain: Vec<f64> = logits.iter().map(|l| f64::from((l - max) / 0.7).exp()).collect();
            let weights = weights(&logits, max, 0.7);
            let total: f64 = sums(&weights).sum();
            assert!((total / plain.iter().sum::<f64>() - 1.0).abs() < 1e-6, "{n}");
            assert_eq!(sums(&weights).count(), n.div_ceil(STRETCH));
            let expect = logits.iter().map(|l| f64::from(*l).exp()).sum::<f64>().ln();
            assert!((log_sum_exp(&logits) - expect).abs() < 1e-6, "{n}");
        }
    }

    #[test]
    fn the_best_is_the_first_of_the_largest() {
        for n in [1, 255, 256, 257, 1000] {
            for at in [0, n / 2, n - 1] {
                let mut logits = vec![-3.0_f32; n];
                logits[at..].fill(2.0);
                assert_eq!(best(&logits), Ok(Some((at, 2.0))), "{at} of {n}");
                logits[n - 1] = f32::NAN;
                assert_eq!(best(&logits), Err(n - 1), "{at} of {n}");
                logits[at] = f32::INFINITY;
                assert_eq!(best(&logits), Err(at), "{at} of {n}");
            }
        }
        assert_eq!([best(&[]), best(&[NO; 300])], [Ok(None), Ok(None)]);
    }

    #[test]
    fn broken_logits_are_found_and_forbidden_ones_weigh_nothing() {
        assert_eq!(first_broken(&[0.0, NO, 1.0]), None);
        assert_eq!(first_broken(&[0.0, f32::NAN, f32::INFINITY]), Some(1));
        assert_eq!(first_broken(&[f32::INFINITY]), Some(0));
        assert_eq!(weights(&[NO, 2.0], 2.0, 1.0), [0.0, 1.0]);
        assert_eq!(log_sum_exp(&[NO; 40]), f64::NEG_INFINITY);
        assert_eq!(log_sum_exp(&[]), f64::NEG_INFINITY);
        assert!(log_sum_exp(&[0.0, f32::NAN]).is_nan());
        assert!(log_sum_exp(&[f32::NAN]).is_nan());
        assert!(log_sum_exp(&[0.0, f32::INFINITY]).is_nan());
        assert_eq!(largest(&[f32::NAN, 1.0]), 1.0);
        assert_eq!(largest(&[]), NO);
    }
}
