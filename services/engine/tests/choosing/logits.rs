//! Logits processors and draws.

use crate::golden::{Golden, ids, params, processors};
use triptych_core::sampling::SamplingParams;
use triptych_engine::sampler::Sampler;
use triptych_models::rules::LogitRules;

/// As many as the check of the distribution draws.
const N_DRAWS: usize = 10_000;

#[test]
fn processed_logits_are_those_of_the_reference() {
    let golden = Golden::open();
    for (i, case) in golden.cases("processors").iter().enumerate() {
        let (prompt, written) = (ids(&case["prompt"]), ids(&case["written"]));
        let setting = &case["setting"];
        let mut logits = golden.f32(&format!("processors.{i}.logits"));
        processors(setting, &prompt, &golden.end_tokens()).apply(&written, &mut logits);
        let list = |name: &str| setting.get(name).map(ids).unwrap_or_default().into();
        let rules = LogitRules {
            suppress: list("suppress"),
            begin_suppress: list("begin_suppress"),
            ..LogitRules::default()
        };
        rules.apply(&written, &mut logits);
        let expected = golden.f32(&format!("processors.{i}.processed"));
        for (token, (a, e)) in logits.iter().zip(&expected).enumerate() {
            assert!(a == e || (a - e).abs() < 1e-5, "case {i}, token {token}: {a} for {e}, {case}");
        }
    }
}

/// The value that chi-square with `k` degrees of freedom exceeds once in a hundred thousand, by Wilson and
/// Hilferty. The draws are the same in every run, so a test that passes always passes.
fn critical(k: f64) -> f64 {
    let (z, a) = (4.265, 2.0 / (9.0 * k));
    k * (1.0 - a + z * a.sqrt()).powi(3)
}

/// Pearson's statistic and its degrees of freedom; places expected less than five times count as one.
fn chi_square(counts: &[usize], probabilities: &[f32]) -> (f64, f64) {
    let (mut statistic, mut n_bins) = (0.0, 0.0);
    let (mut rare_count, mut rare_expected) = (0.0, 0.0);
    for (count, p) in counts.iter().zip(probabilities) {
        let (count, expected) = (*count as f64, f64::from(*p) * N_DRAWS as f64);
        if expected < 5.0 {
            (rare_count, rare_expected) = (rare_count + count, rare_expected + expected);
        } else {
            statistic += (count - expected).powi(2) / expected;
            n_bins += 1.0;
        }
    }
    if rare_expected > 0.5 {
        statistic += (rare_count - rare_expected).powi(2) / rare_expected;
        n_bins += 1.0;
    }
    (statistic, n_bins - 1.0)
}

#[test]
fn draws_follow_the_distribution_of_the_reference() {
    let golden = Golden::open();
    for (i, case) in golden.cases("cuts").iter().enumerate() {
        let (prompt, written) = (ids(&case["prompt"]), ids(&case["written"]));
        let mut logits = golden.f32(&format!("cuts.{i}.logits"));
        processors(&case["setting"], &prompt, &golden.end_tokens()).apply(&written, &mut logits);
        let expected = golden.f32(&format!("cuts.{i}.probabilities"));
        let sampler = Sampler::new(&SamplingParams { seed: Some(i as u64), ..params(&case["setting"]) }, 0);
        let mut counts = vec![0; logits.len()];
        for place in 0..N_DRAWS {
            counts[sampler.choose(&logits, place).expect("finite logits") as usize] += 1;
        }
        for (token, count) in counts.iter().enumerate() {
            assert!(*count == 0 || expected[token] > 0.0, "case {i}: token {token} is cut, {case}");
        }
        let (statistic, freedom) = chi_square(&counts, &expected);
        println!("case {i}: chi-square {statistic:.1} with {freedom} degrees of freedom");
        assert!(statistic < critical(freedom), "case {i}: {statistic} with {freedom}, {case}");
    }
}
