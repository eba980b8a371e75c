//! Chooses a token from logits in host memory: greedy, or a draw after temperature, top-k, top-p and min-p, in the order of
//! transformers' `generate`. The engine's `tests/choosing` hold the distribution against the reference.
//!
//! A choice is a function of logits, settings and a random number, and of nothing else: the rest of the batch cannot change
//! it. Log-probabilities are of the logits after their changes, before temperature and cuts. It knows no tokens' meaning, no
//! seed and no sequence.

use std::cmp::Ordering;

use crate::logits;
use crate::ops::{Choice, Choices, ChooseBatch, ChooseRow, SampleError, Sampling, TokenLogprobs, WholeRows};

/// Token id and its weight relative to the most probable token.
type WeightedToken = (u32, f32);

/// Makes all choices of a batch, whose rows are of `logits: [n_rows, vocab]`. A row that is not there allows no token.
///
/// Rows are changed in place where nobody else reads them, so that a step copies none but those of several choices.
pub fn choose_rows(mut logits: Vec<f32>, vocab: usize, batch: &ChooseBatch) -> Choices {
    let mut n_readers = vec![0_u32; logits.len() / vocab.max(1)];
    for row in batch.choices.iter().map(|asked| asked.row).chain(batch.whole.iter().copied()) {
        if let Some(n) = n_readers.get_mut(row as usize) {
            *n += 1;
        }
    }
    let mut choices = Vec::with_capacity(batch.choices.len());
    for asked in &batch.choices {
        let row = asked.row as usize;
        let values = logits.chunks_exact_mut(vocab.max(1)).nth(row).unwrap_or_default();
        let is_last = n_readers.get_mut(row).is_none_or(|n| {
            *n -= 1;
            *n == 0
        });
        choices.push(match is_last || !asked.is_changed() {
            true => choose_row(values, asked),
            false => choose_row(&mut values.to_vec(), asked),
        });
    }
    Choices { choices, rows: WholeRows::among_all(logits, vocab, &batch.whole) }
}

/// Makes one choice from `logits: [vocab]`, which are changed as it asks.
fn choose_row(logits: &mut [f32], asked: &ChooseRow) -> Result<Choice, SampleError> {
    asked.edits.iter().for_each(|edit| edit.apply(logits));
    if let Some(mask) = &asked.mask {
        apply_mask(mask, logits);
    }
    let token = choose(logits, &asked.sampling)?;
    let logprobs = asked.n_top.map(|n_top| logprobs(logits, token, n_top as usize));
    Ok(Choice { token, logprobs })
}

/// Rules out the tokens whose bits are 0; see [`ChooseRow::mask`].
fn apply_mask(mask: &[u32], logits: &mut [f32]) {
    for (word, logits) in mask.iter().zip(logits.chunks_mut(u32::BITS as usize)) {
        let ruled_out = logits.iter_mut().enumerate().filter(|(bit, _)| word >> bit & 1 == 0);
        ruled_out.for_each(|(_, logit)| *logit = f32::NEG_INFINITY);
    }
}

/// Chooses a token from `logits: [vocab]`; minus infinity rules a token out.
///
/// # Errors
/// [`SampleError`] if the logits allow no choice.
pub fn choose(logits: &[f32], how: &Sampling) -> Result<u32, SampleError> {
    let best = best(logits)?;
    if how.is_greedy() {
        return Ok(best.0);
    }
    let share = how.share();
    let drawn = if how.top_k.is_none() && how.top_p >= 1.0 && how.min_p <= 0.0 {
        draw_of_all(&logits::weights(logits, best.1, how.temperature), share)
    } else {
        let candidates = cut(how, logits, best.1);
        draw(&candidates, share * sum(&candidates))
    };
    Ok(drawn.unwrap_or(best.0))
}

/// Candidates after the cuts, with their weights.
fn cut(how: &Sampling, logits: &[f32], max: f32) -> Vec<WeightedToken> {
    let (is_nucleus, share) = (how.top_p < 1.0, f64::from(how.top_p));
    let mut candidates = if let Some(k) = how.top_k {
        let mut top = top(how, logits, max, k as usize);
        if is_nucleus {
            let mass = share * sum(&top);
            keep_nucleus(&mut top, mass);
        }
        top
    } else {
        let weights = logits::weights(logits, max, how.temperature);
        if is_nucleus { nucleus(&weights, share) } else { at_least(&weights, how.min_p) }
    };
    if how.min_p > 0.0 {
        // The most probable token weighs 1.
        candidates.retain(|c| c.1 >= how.min_p);
    }
    candidates
}

/// The top k with their weights, in the order of token ids.
fn top(how: &Sampling, logits: &[f32], max: f32, k: usize) -> Vec<WeightedToken> {
    let kept = at_least(logits, kth_largest(logits, k)).into_iter();
    let weighed = kept.map(|(token, logit)| (token, logits::exp((logit - max) / how.temperature)));
    weighed.filter(|c| c.1 > 0.0).collect()
}

/// Log-softmax of `logits [vocab]` at `token`, and its `n_top` largest values that are not ruled out.
pub fn logprobs(logits: &[f32], token: u32, n_top: usize) -> TokenLogprobs {
    let norm = logits::log_sum_exp(logits);
    let value = |logit: f32| (f64::from(logit) - norm) as f32;
    let mut top = match n_top {
        0 => Vec::new(),
        _ => at_least(logits, kth_largest(logits, n_top).max(f32::MIN)),
    };
    keep_top(&mut top, n_top);
    top.sort_unstable_by(by_weight);
    let chosen = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    TokenLogprobs {
        chosen: value(chosen),
        top: top.into_iter().map(|(t, logit)| (t, value(logit))).collect(),
    }
}

/// Turns `logits [vocab]` into log-probabilities. Logits without a finite value stay as they are.
pub fn log_softmax(logits: &mut [f32]) {
    let norm = logits::log_sum_exp(logits);
    if norm.is_finite() {
        logits.iter_mut().for_each(|logit| *logit = (f64::from(*logit) - norm) as f32);
    }
}

/// Most probable token, the lowest id of equals.
fn best(logits: &[f32]) -> Result<WeightedToken, SampleError> {
    match logits::best(logits) {
        Ok(Some((token, logit))) => Ok((token as u32, logit)),
        Ok(None) => Err(SampleError::NothingAllowed { vocab: logits.len() }),
        Err(token) => Err(SampleError::NotFinite { token, value: logits[token] }),
    }
}

/// Heaviest first, then lowest token: a total order, so that cuts and draws have one result.
fn by_weight(a: &WeightedToken, b: &WeightedToken) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// Values that are skipped together when none of them is large enough, as is usual.
const SCANNED: usize = 256;

/// Values that are at least `least`, in the order of token ids.
fn at_least(values: &[f32], least: f32) -> Vec<WeightedToken> {
    let mut found = Vec::new();
    for (i, stretch) in values.chunks(SCANNED).enumerate() {
        if logits::largest(stretch) >= least {
            let tokens = (i * SCANNED) as u32..;
            found.extend(tokens.zip(stretch.iter().copied()).filter(|c| c.1 >= least));
        }
    }
    found
}

/// The `k`-th largest value, counted with its equals, so that a cut there keeps all of them. O(n).
fn kth_largest(logits: &[f32], k: usize) -> f32 {
    if k == 0 || k >= logits.len() {
        return f32::NEG_INFINITY;
    }
    let mut kept = Vec::new();
    let mut floor = f32::NEG_INFINITY;
    let keep = |kept: &mut Vec<f32>| {
        let kth = *kept.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
        kept.truncate(k);
        kth
    };
    for stretch in logits.chunks(SCANNED) {
        // A value equal to the floor would not move it.
        if kept.len() < k || logits::largest(stretch) > floor {
            kept.extend(stretch.iter().copied().filter(|value| *value >= floor));
        }
        if kept.len() >= 2 * k {
            floor = keep(&mut kept);
        }
    }
    keep(&mut kept)
}

/// Keeps the `k` heaviest, in no order. O(n).
fn keep_top(candidates: &mut Vec<WeightedToken>, k: usize) {
    if k < candidates.len() {
        candidates.select_nth_unstable_by(k, by_weight);
        candidates.truncate(k);
    }
}

/// Keeps the fewest candidates that reach `mass`, heaviest first. Sorts only the heaviest, which hold the mass
/// as a rule.
fn keep_nucleus(candidates: &mut Vec<WeightedToken>, mass: f64) {
    let mut n_sorted = 64;
    loop {
        let n = n_sorted.min(candidates.len());
        if n < candidates.len() {
            candidates.select_nth_unstable_by(n, by_weight);
        }
        candidates[..n].sort_unstable_by(by_weight);
        let mut reached = 0.0;
        let within = candidates[..n].iter().position(|c| {
            reached += f64::from(c.1);
            reached >= mass
        });
        match within {
            Some(last) => return candidates.truncate(last + 1),
            None if n == candidates.len() => return,
            None => n_sorted *= 8,
        }
    }
}

/// Thresholds tried in turn: weights above them usually hold the mass.
const HEAVY: [f32; 2] = [1.0 / 64.0, 1.0 / 4096.0];

/// Fewest tokens that reach a share of the mass, heaviest first.
fn nucleus(weights: &[f32], share: f64) -> Vec<WeightedToken> {
    let mass = share * logits::sums(weights).sum::<f64>();
    let heavy = HEAVY.into_iter().map(|least| at_least(weights, least));
    let holding = heavy.into_iter().find(|heavy| sum(heavy) >= mass);
    let mut candidates = holding.unwrap_or_else(|| at_least(weights, f32::MIN_POSITIVE));
    keep_nucleus(&mut candidates, mass);
    candidates
}

/// Token at `share`, in `[0, 1)`, of the cumulative sum of all weights.
fn draw_of_all(weights: &[f32], share: f64) -> Option<u32> {
    let sums: Vec<f64> = logits::sums(weights).collect();
    let point = share * sums.iter().sum::<f64>();
    let mut reached = 0.0;
    for (i, (stretch, sum)) in weights.chunks(logits::STRETCH).zip(sums).enumerate() {
        if point < reached + sum {
            let tokens = (i * logits::STRETCH) as u32..;
            let candidates: Vec<_> = tokens.zip(stretch.iter().copied()).filter(|c| c.1 > 0.0).collect();
            return draw(&candidates, point - reached);
        }
        reached += sum;
    }
    weights.iter().rposition(|weight| *weight > 0.0).map(|token| token as u32)
}

fn sum(candidates: &[WeightedToken]) -> f64 {
    candidates.iter().map(|c| f64::from(c.1)).sum()
}

/// Candidate at `point` of the cumulative sum of weights; the last one when rounding leads past the end.
fn draw(candidates: &[WeightedToken], point: f64) -> Option<u32> {
    let mut reached = 0.0;
    let hit = candidates.iter().find(|c| {
        reached += f64::from(c.1);
        point < reached
    });
    hit.or(candidates.last()).map(|c| c.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::{Edit, mask_of};
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const NO: f32 = f32::NEG_INFINITY;

    /// Draws from everything.
    const ALL: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    /// The settings with random number `i`: 53 bits of SplitMix64.
    fn numbered(how: Sampling, i: u64) -> Sampling {
        let mut z = i.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Sampling { draw: (z ^ (z >> 31)) >> 11, ..how }
    }

    fn drawn(how: Sampling, logits: &[f32]) -> BTreeSet<u32> {
        (0..2000).map(|i| choose(logits, &numbered(how, i)).unwrap()).collect()
    }

    #[test]
    fn cuts_leave_what_they_should() {
        let logits = [1.0_f32, 4.0, NO, 3.0, 2.0].map(|l| l * 0.5);
        let base = ALL;
        let cases: [(Sampling, &[u32]); 10] = [
            (base, &[0, 1, 3, 4]),
            (Sampling { temperature: 0.0, ..base }, &[1]),
            (Sampling { temperature: 1e-6, ..base }, &[1]),
            (Sampling { top_k: Some(2), ..base }, &[1, 3]),
            (Sampling { top_k: Some(99), ..base }, &[0, 1, 3, 4]),
            // The probabilities are 0.46, 0.28, 0.17, 0.10.
            (Sampling { top_p: 0.4, ..base }, &[1]),
            (Sampling { top_p: 0.7, ..base }, &[1, 3]),
            // Of the two that top-k leaves the first has 0.62.
            (Sampling { top_k: Some(2), top_p: 0.6, ..base }, &[1]),
            // The weights are 1, 0.61, 0.37, 0.22.
            (Sampling { min_p: 0.5, ..base }, &[1, 3]),
            (Sampling { min_p: 1.0, ..base }, &[1]),
        ];
        for (params, expect) in cases {
            assert_eq!(drawn(params, &logits).into_iter().collect::<Vec<_>>(), expect, "{params:?}");
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.2_f32, 0.5, 0.3].map(f32::ln);
        let mut counts = [0.0_f32; 3];
        for i in 0..20_000 {
            counts[choose(&logits, &numbered(ALL, i)).unwrap() as usize] += 1.0 / 20_000.0;
        }
        for (count, expect) in counts.iter().zip([0.2, 0.5, 0.3]) {
            assert!((count - expect).abs() < 0.02, "{counts:?}");
        }
    }

    #[test]
    fn equals_at_the_edge_of_top_k_all_stay() {
        let params = Sampling { top_k: Some(2), ..ALL };
        let logits = [1.0, 2.0, 1.0, 0.0, 1.0];
        assert_eq!(drawn(params, &logits).into_iter().collect::<Vec<_>>(), [0, 1, 2, 4]);
    }

    #[test]
    fn logits_that_allow_no_choice_are_an_error() {
        let choose = |logits: &[f32]| choose(logits, &ALL);
        assert!(matches!(choose(&[0.0, f32::NAN]), Err(SampleError::NotFinite { token: 1, .. })));
        assert!(matches!(choose(&[f32::INFINITY, 0.0]), Err(SampleError::NotFinite { token: 0, .. })));
        assert_eq!(choose(&[NO, NO]), Err(SampleError::NothingAllowed { vocab: 2 }));
        assert_eq!(choose(&[]), Err(SampleError::NothingAllowed { vocab: 0 }));
    }

    #[test]
    fn log_probabilities_come_best_first_and_leave_out_what_is_ruled_out() {
        let logits = [0.1_f32.ln(), NO, 0.6_f32.ln(), 0.3_f32.ln()];
        let got = logprobs(&logits, 3, 20);
        assert!((got.chosen - 0.3_f32.ln()).abs() < 1e-6);
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 3, 0]);
        assert_eq!(logprobs(&logits, 3, 0).top, []);
    }

    /// Reference implementation of the sampler, by full sorts.
    fn drawn_plainly(how: &Sampling, logits: &[f32]) -> u32 {
        let max = logits.iter().copied().fold(NO, f32::max);
        let mut all: Vec<WeightedToken> = (0..).zip(logits.iter().copied()).collect();
        if let Some(k) = how.top_k {
            let mut sorted: Vec<f32> = logits.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            all.retain(|c| c.1 >= sorted[(k as usize).min(sorted.len()) - 1]);
        }
        all.iter_mut().for_each(|c| c.1 = logits::exp((c.1 - max) / how.temperature));
        all.retain(|c| c.1 > 0.0);
        if how.top_p < 1.0 {
            all.sort_by(by_weight);
            let (mut reached, mass) = (0.0, f64::from(how.top_p) * sum(&all));
            let end = all.iter().position(|c| {
                reached += f64::from(c.1);
                reached >= mass
            });
            all.truncate(end.map_or(all.len(), |end| end + 1));
        }
        all.retain(|c| c.1 >= how.min_p);
        draw(&all, how.share() * sum(&all)).unwrap()
    }

    #[test]
    fn a_long_vocabulary_is_drawn_from_as_by_a_plain_loop() {
        let logits: Vec<f32> =
            (0..30_000_u64).map(|i| (i * i * 7919 % 10_007) as f32 / 700.0 - 7.0).collect();
        let base = ALL;
        let settings = [
            base,
            Sampling { temperature: 0.3, ..base },
            Sampling { top_k: Some(40), ..base },
            Sampling { top_k: Some(20_000), top_p: 0.9, ..base },
            Sampling { top_p: 0.1, ..base },
            Sampling { top_p: 0.999, temperature: 2.0, min_p: 0.01, ..base },
            Sampling { min_p: 0.2, ..base },
        ];
        for params in settings {
            let differ = (0..300)
                .map(|i| numbered(params, i))
                .filter(|how| choose(&logits, how).unwrap() != drawn_plainly(how, &logits));
            // Sums are rounded in another order, so a point within rounding of an edge may fall on its other
            // side.
            assert!(differ.count() <= 1, "{params:?}");
        }
    }

    #[test]
    fn choices_of_one_row_do_not_see_each_other_and_whole_rows_stay_as_they_are() {
        let logits = vec![0.0, 3.0, 1.0, 2.0, 5.0, 4.0, 3.0, 2.0];
        let without = |row, token| ChooseRow { edits: vec![Edit::forbid(token)], ..ChooseRow::greedy(row) };
        let masked = ChooseRow { mask: Some(mask_of(&[2, 3], 4)), n_top: Some(9), ..ChooseRow::greedy(1) };
        let choices =
            vec![without(0, 1), ChooseRow::greedy(0), without(0, 3), without(1, 0), masked, without(2, 0)];
        let batch = ChooseBatch { choices, whole: vec![1] };
        let mut chosen = choose_rows(logits, 4, &batch);
        let tokens: Vec<_> = chosen.choices.iter().map(|c| c.as_ref().map(|c| c.token)).collect();
        // The last row is not there.
        assert_eq!(tokens[..5], [Ok(3), Ok(1), Ok(1), Ok(1), Ok(2)]);
        assert_eq!(tokens[5], Err(&SampleError::NothingAllowed { vocab: 0 }));
        let logprobs = chosen.choices[4].as_ref().unwrap().logprobs.as_ref().unwrap();
        assert_eq!(logprobs.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(chosen.rows.get_mut(1, 1), Some(&mut [5.0, 4.0, 3.0, 2.0][..]));
        assert_eq!(chosen.rows.get_mut(0, 1), None);
    }

    proptest! {
        #[test]
        // Equals, few and many.
        fn the_kth_largest_is_that_of_a_full_sort(values in prop::collection::vec(0u16..300, 1..2000), k in 1usize..2000) {
            let values: Vec<f32> = values.into_iter().map(f32::from).collect();
            let mut sorted = values.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let expect = if k < values.len() { sorted[k - 1] } else { NO };
            prop_assert_eq!(kth_largest(&values, k), expect);
        }

        #[test]
        // Scaled integers: proptest's own ranges of floats overflow for some seeds (proptest 1.12).
        fn nucleus_is_that_of_a_full_sort(weights in prop::collection::vec(1u16..1000, 1..1500), p in 1u32..100) {
            let weights = weights.into_iter().map(|w| f32::from(w) / 1000.0);
            let p = f64::from(p) / 100.0;
            let all: Vec<WeightedToken> = (0..).zip(weights).collect();
            let mass = p * sum(&all);
            let mut expect = all.clone();
            expect.sort_by(by_weight);
            let mut reached = 0.0;
            let end = expect.iter().position(|c| { reached += f64::from(c.1); reached >= mass });
            expect.truncate(end.map_or(expect.len(), |e| e + 1));
            let mut got = all;
            keep_nucleus(&mut got, mass);
            prop_assert_eq!(got, expect);
        }
    }
}
