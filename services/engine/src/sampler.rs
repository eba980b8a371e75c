//! Chooses a token from logits: greedy, or a draw after temperature, top-k, top-p and min-p, in the order of
//! transformers' `generate`. `tests/choosing` holds the distribution against the reference.
//!
//! A choice is a function of logits, settings, seed, choice index and token index, and of nothing else. Neither
//! the rest of the batch nor a preemption can change it. Log-probabilities are of the model's own distribution
//! after the family's rules, before temperature and cuts. It knows no tokenizer.
//!
//! The random number of a token is 53 bits of BLAKE3 over seed, choice index and token index. A hash is
//! specified for good, as generators of libraries are not: a seed gives the same completion in every version.

use std::cmp::Ordering;
use thiserror::Error;
use triptych_core::sampling::SamplingParams;
use triptych_models::logits;

/// Logits that allow no choice. Only this sequence fails.
#[derive(Clone, Copy, Debug, Error, PartialEq)]
pub enum SampleError {
    /// NaN or positive infinity.
    #[error("the logit of token {token} is {value}")]
    NotFinite {
        /// Token id.
        token: usize,
        /// Its logit.
        value: f32,
    },
    /// Every token is ruled out.
    #[error("none of {vocab} tokens is allowed")]
    NothingAllowed {
        /// Size of the vocabulary.
        vocab: usize,
    },
}

/// Context of the hash, so that these numbers are independent of its other uses. A change of it changes every
/// completion.
const DRAW: &str = "triptych 2026-11 draw of a token";

/// Sampling settings of one completion.
#[derive(Clone, Debug)]
pub struct Sampler {
    temperature: f32,
    top_k: Option<usize>,
    top_p: f32,
    min_p: f32,
    seed: u64,
    choice: u32,
}

/// Token id and its weight relative to the most probable token.
type WeightedToken = (u32, f32);

impl Sampler {
    /// A sampler; without a seed it draws one, once.
    pub fn new(params: &SamplingParams, choice: u32) -> Self {
        Self {
            temperature: params.temperature,
            top_k: params.top_k.map(|k| k as usize),
            top_p: params.top_p,
            min_p: params.min_p,
            seed: params.seed.unwrap_or_else(rand::random),
            choice,
        }
    }

    /// Chooses token number `n_generated` of the completion from `logits [vocab]`; `-inf` rules a token out.
    ///
    /// # Errors
    /// [`SampleError`] if the logits allow no choice.
    pub fn choose(&self, logits: &[f32], n_generated: usize) -> Result<u32, SampleError> {
        let best = best(logits)?;
        if self.temperature <= 0.0 || self.top_k == Some(1) {
            return Ok(best.0);
        }
        let share = self.uniform(n_generated);
        let drawn = if self.top_k.is_none() && self.top_p >= 1.0 && self.min_p <= 0.0 {
            draw_of_all(&logits::weights(logits, best.1, self.temperature), share)
        } else {
            let candidates = self.cut(logits, best.1);
            draw(&candidates, share * sum(&candidates))
        };
        Ok(drawn.unwrap_or(best.0))
    }

    /// Candidates after the cuts, with their weights.
    fn cut(&self, logits: &[f32], max: f32) -> Vec<WeightedToken> {
        let (is_nucleus, share) = (self.top_p < 1.0, f64::from(self.top_p));
        let mut candidates = if let Some(k) = self.top_k {
            let mut top = self.top(logits, max, k);
            if is_nucleus {
                let mass = share * sum(&top);
                keep_nucleus(&mut top, mass);
            }
            top
        } else {
            let weights = logits::weights(logits, max, self.temperature);
            if is_nucleus { nucleus(&weights, share) } else { at_least(&weights, self.min_p) }
        };
        if self.min_p > 0.0 {
            // The most probable token weighs 1.
            candidates.retain(|c| c.1 >= self.min_p);
        }
        candidates
    }

    /// The top k with their weights, in the order of token ids.
    fn top(&self, logits: &[f32], max: f32, k: usize) -> Vec<WeightedToken> {
        let kept = at_least(logits, kth_largest(logits, k)).into_iter();
        let weighed = kept.map(|(token, logit)| (token, logits::exp((logit - max) / self.temperature)));
        weighed.filter(|c| c.1 > 0.0).collect()
    }

    /// A number in `[0, 1)`. Stateless, so that a preempted sequence loses nothing.
    fn uniform(&self, n_generated: usize) -> f64 {
        let mut hash = blake3::Hasher::new_derive_key(DRAW);
        hash.update(&self.seed.to_le_bytes());
        hash.update(&self.choice.to_le_bytes());
        hash.update(&(n_generated as u64).to_le_bytes());
        let mut bits = [0; 8];
        hash.finalize_xof().fill(&mut bits);
        (u64::from_le_bytes(bits) >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Natural logarithms of token probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the chosen token.
    pub chosen: f32,
    /// Most probable tokens, best first.
    pub top: Vec<(u32, f32)>,
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
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    const NO: f32 = f32::NEG_INFINITY;

    fn sampler(params: SamplingParams) -> Sampler {
        Sampler::new(&SamplingParams { seed: Some(7), ..params }, 0)
    }

    fn drawn(params: SamplingParams, logits: &[f32]) -> BTreeSet<u32> {
        let sampler = sampler(params);
        (0..2000).map(|i| sampler.choose(logits, i).unwrap()).collect()
    }

    #[test]
    fn cuts_leave_what_they_should() {
        let logits = [1.0_f32, 4.0, NO, 3.0, 2.0].map(|l| l * 0.5);
        let base = SamplingParams::default();
        let cases: [(SamplingParams, &[u32]); 10] = [
            (base.clone(), &[0, 1, 3, 4]),
            (SamplingParams { temperature: 0.0, ..base.clone() }, &[1]),
            (SamplingParams { temperature: 1e-6, ..base.clone() }, &[1]),
            (SamplingParams { top_k: Some(2), ..base.clone() }, &[1, 3]),
            (SamplingParams { top_k: Some(99), ..base.clone() }, &[0, 1, 3, 4]),
            // The probabilities are 0.46, 0.28, 0.17, 0.10.
            (SamplingParams { top_p: 0.4, ..base.clone() }, &[1]),
            (SamplingParams { top_p: 0.7, ..base.clone() }, &[1, 3]),
            // Of the two that top-k leaves the first has 0.62.
            (SamplingParams { top_k: Some(2), top_p: 0.6, ..base.clone() }, &[1]),
            // The weights are 1, 0.61, 0.37, 0.22.
            (SamplingParams { min_p: 0.5, ..base.clone() }, &[1, 3]),
            (SamplingParams { min_p: 1.0, ..base }, &[1]),
        ];
        for (params, expect) in cases {
            assert_eq!(drawn(params.clone(), &logits).into_iter().collect::<Vec<_>>(), expect, "{params:?}");
        }
    }

    #[test]
    fn draws_follow_the_probabilities() {
        let sampler = sampler(SamplingParams::default());
        let logits = [0.2_f32, 0.5, 0.3].map(f32::ln);
        let mut counts = [0.0_f32; 3];
        for i in 0..20_000 {
            counts[sampler.choose(&logits, i).unwrap() as usize] += 1.0 / 20_000.0;
        }
        for (count, expect) in counts.iter().zip([0.2, 0.5, 0.3]) {
            assert!((count - expect).abs() < 0.02, "{counts:?}");
        }
    }

    #[test]
    fn seed_choice_and_token_index_each_change_the_draw() {
        let logits = [0.0; 50];
        let run = |seed, choice| {
            let params = SamplingParams { seed: Some(seed), ..SamplingParams::default() };
            let sampler = Sampler::new(&params, choice);
            (0..20).map(|i| sampler.choose(&logits, i).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(run(1, 0), run(1, 0));
        assert_ne!(run(1, 0), run(2, 0));
        assert_ne!(run(1, 0), run(1, 1));
        assert!(run(1, 0).iter().collect::<BTreeSet<_>>().len() > 5);
    }

    /// Seeds are a contract with clients: the numbers drawn must be the same in every version.
    #[test]
    fn a_seed_draws_the_same_numbers_for_good() {
        let sampler = Sampler::new(&SamplingParams { seed: Some(42), ..SamplingParams::default() }, 3);
        let drawn = [0, 1, 1000].map(|i| sampler.uniform(i));
        assert_eq!(drawn, [0.186_036_954_736_514_27, 0.790_548_816_205_038_9, 0.610_218_415_386_439_2]);
    }

    #[test]
    fn equals_at_the_edge_of_top_k_all_stay() {
        let params = SamplingParams { top_k: Some(2), ..SamplingParams::default() };
        let logits = [1.0, 2.0, 1.0, 0.0, 1.0];
        assert_eq!(drawn(params, &logits).into_iter().collect::<Vec<_>>(), [0, 1, 2, 4]);
    }

    #[test]
    fn logits_that_allow_no_choice_are_an_error() {
        let choose = |logits: &[f32]| sampler(SamplingParams::default()).choose(logits, 0);
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
    fn drawn_plainly(sampler: &Sampler, logits: &[f32], n_generated: usize) -> u32 {
        let max = logits.iter().copied().fold(NO, f32::max);
        let mut all: Vec<WeightedToken> = (0..).zip(logits.iter().copied()).collect();
        if let Some(k) = sampler.top_k {
            let mut sorted: Vec<f32> = logits.to_vec();
            sorted.sort_by(|a, b| b.total_cmp(a));
            all.retain(|c| c.1 >= sorted[k.min(sorted.len()) - 1]);
        }
        all.iter_mut().for_each(|c| c.1 = logits::exp((c.1 - max) / sampler.temperature));
        all.retain(|c| c.1 > 0.0);
        if sampler.top_p < 1.0 {
            all.sort_by(by_weight);
            let (mut reached, mass) = (0.0, f64::from(sampler.top_p) * sum(&all));
            let end = all.iter().position(|c| {
                reached += f64::from(c.1);
                reached >= mass
            });
            all.truncate(end.map_or(all.len(), |end| end + 1));
        }
        all.retain(|c| c.1 >= sampler.min_p);
        draw(&all, sampler.uniform(n_generated) * sum(&all)).unwrap()
    }

    #[test]
    fn a_long_vocabulary_is_drawn_from_as_by_a_plain_loop() {
        let logits: Vec<f32> =
            (0..30_000_u64).map(|i| (i * i * 7919 % 10_007) as f32 / 700.0 - 7.0).collect();
        let base = SamplingParams::default();
        let settings = [
            base.clone(),
            SamplingParams { temperature: 0.3, ..base.clone() },
            SamplingParams { top_k: Some(40), ..base.clone() },
            SamplingParams { top_k: Some(20_000), top_p: 0.9, ..base.clone() },
            SamplingParams { top_p: 0.1, ..base.clone() },
            SamplingParams { top_p: 0.999, temperature: 2.0, min_p: 0.01, ..base.clone() },
            SamplingParams { min_p: 0.2, ..base },
        ];
        for params in settings {
            let sampler = sampler(params.clone());
            let differ = (0..300)
                .filter(|i| sampler.choose(&logits, *i).unwrap() != drawn_plainly(&sampler, &logits, *i));
            // Sums are rounded in another order, so a point within rounding of an edge may fall on its other
            // side.
            assert!(differ.count() <= 1, "{params:?}");
        }
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
