//! Upper bound on a cluster's rate: each stage at its cheapest, without any waiting. No simulation exceeds it, so a
//! candidate whose bound is below the best result is not simulated.
//!
//! A step that prefills and decodes pays its fixed time once, so the two are not bounded apart: of all mixes of steps that prefill
//! the prompt tokens and decode the output tokens of a request the cheapest counts, which has at most two kinds of steps (a linear
//! program with two constraints).

use super::candidate::{Candidate, Shape};
use super::means::Means;
use crate::curves::{CostCurves, Costs, EncoderCurves, StepShape};
use serde::Serialize;

/// Upper bound of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// Upper bound of the rate, in requests a second.
    pub rate: f64,
    /// Least worker time for the encodes of a request, in seconds.
    pub encode_s: f64,
    /// Least worker time for its prefill and decode, in seconds.
    pub decode_s: f64,
}

/// The bound of a candidate.
pub fn of(candidate: &Candidate, means: &Means) -> Bound {
    let by_tower = encodes_s(&candidate.curves, means);
    let encode_s = by_tower.iter().sum();
    let decode_s = decode_s(candidate, means);
    let of = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { f64::MAX };
    let rate = match candidate.shape {
        Shape::Split { encoders, pds } => of(encoders, encode_s).min(of(pds, decode_s)),
        Shape::Towers { encoders, pds } => {
            let of_towers = encoders.counts().iter().zip(&by_tower).map(|(n, seconds)| of(*n, *seconds));
            of_towers.fold(of(pds, decode_s), f64::min)
        }
        Shape::Replicated { workers } | Shape::Elastic { workers } => of(workers, encode_s + decode_s),
        Shape::Colocated => of(1, encode_s + decode_s),
    };
    Bound { rate, encode_s, decode_s }
}

/// Encode time of a request for each tower: of the first at the highest token rate of any measured batch. The means are in its
/// tokens, so that of another tower is that of an item in the cheapest batch.
pub(crate) fn encodes_s(curves: &CostCurves, means: &Means) -> Vec<f64> {
    let of_tower = |(i, encoder): (usize, EncoderCurves<'_>)| match i {
        0 => {
            let each = encoder.encode.iter().map(|p| p.p50_us / p.tokens.max(1) as f64);
            means.new_item_tokens * least(each) / 1e6
        }
        _ => {
            let each = encoder.encode.iter().map(|p| p.p50_us / f64::from(p.items.max(1)));
            means.new_items * least(each) / 1e6
        }
    };
    curves.encoders().enumerate().map(of_tower).collect()
}

/// A kind of step: prompt tokens, decodes, and its time in microseconds.
type StepKind = (f64, f64, f64);

/// Least time of an engine for a request, in seconds.
fn decode_s(candidate: &Candidate, means: &Means) -> f64 {
    // What was there before may be found in the prefix cache, so only what is new is sure to be read.
    let text = if means.has_turns { 0.0 } else { means.text_tokens };
    let items = if candidate.curves.kv.cross_row_bytes == 0 { means.new_item_tokens } else { 0.0 };
    // The step that ends a prompt writes the first token.
    let needed = (text + items, (means.output_tokens - 1.0).max(0.0));
    cheapest(&step_kinds(candidate), needed) / 1e6
}

/// Measured steps, and the largest that the settings allow: what a simulation computes is among or between them.
fn step_kinds(candidate: &Candidate) -> Vec<StepKind> {
    let (curves, settings) = (&candidate.curves, &candidate.settings);
    let measured = curves.step.iter().map(|p| (p.prefill_tokens, p.decodes, p.p50_us));
    let costs = Costs::new(curves);
    let size = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let (budget, sequences) = (size(settings.token_budget), size(settings.max_sequences));
    let largest = [(budget, 0), (budget.saturating_sub(sequences), sequences), (0, sequences)];
    let largest = largest.map(|(prefill_tokens, decodes)| {
        let n = u64::from(prefill_tokens);
        let shape = StepShape {
            prefill_tokens,
            prefill_context: n.saturating_mul(n + 1) / 2,
            decodes,
            decode_context: decodes.into(),
            projected_rows: 0,
        };
        (prefill_tokens, decodes, costs.step(shape).p50_us)
    });
    let is_pipelined = matches!(candidate.shape, Shape::Split { .. } | Shape::Towers { .. });
    let kind = |(prefill, decodes, us): (u32, u32, f64)| {
        let n_choosing = decodes + u32::from(prefill > 0);
        let us = if is_pipelined { curves.pipelined_us(us, n_choosing) } else { us };
        (f64::from(prefill), f64::from(decodes), us.max(0.0))
    };
    measured.chain(largest).map(kind).collect()
}

/// The least time, in microseconds, of steps that together prefill and decode so many tokens or more.
fn cheapest(kinds: &[StepKind], (prefill, decodes): (f64, f64)) -> f64 {
    let alone = |&(p, d, us): &StepKind| {
        let times = |needed: f64, each: f64| if needed > 0.0 { needed / each } else { 0.0 };
        times(prefill, p).max(times(decodes, d)) * us
    };
    let both = |&(p, d, us): &StepKind, &(p2, d2, us2): &StepKind| {
        // As many of each as give exactly what is needed.
        let determinant = p * d2 - p2 * d;
        let n = (prefill * d2 - p2 * decodes) / determinant;
        let n2 = (p * decodes - prefill * d) / determinant;
        if n >= 0.0 && n2 >= 0.0 { n * us + n2 * us2 } else { f64::INFINITY }
    };
    let pairs = kinds.iter().enumerate().flat_map(|(i, a)| kinds[i + 1..].iter().map(move |b| both(a, b)));
    least(kinds.iter().map(alone).chain(pairs))
}

fn least(values: impl Iterator<Item = f64>) -> f64 {
    let least = values.fold(f64::INFINITY, f64::min);
    if least.is_finite() { least } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_a_worker_without_an_encoder_may_be_pipelined() {
        use crate::curves::{PipeliningSaves, sample};
        use crate::validation::candidate;
        let pipelining = Some(PipeliningSaves { fixed_us: 100.0, each_us: 10.0 });
        let curves = std::sync::Arc::new(CostCurves { pipelining, ..sample::curves() });
        let kinds =
            |topology: &str| step_kinds(&candidate(&topology.parse().expect("a topology"), &curves, None));
        let saved = kinds("dp2").into_iter().zip(kinds("1e1pd"));
        for ((prefill, decodes, us), (.., pipelined)) in saved {
            let expected = (us - 100.0 - 10.0 * (decodes + f64::from(prefill > 0.0))).max(0.0);
            assert!(
                (pipelined - expected).abs() < 1e-6,
                "{prefill} and {decodes}: {pipelined}, {us} without"
            );
        }
    }

    #[test]
    fn the_cheapest_mix_of_steps_shares_their_fixed_time() {
        // 10 fixed, 1 for each prompt token, 2 for each decode; at most 8 decodes.
        let step = |p: f64, d: f64| (p, d, 10.0 + p + 2.0 * d);
        let apart = [step(0.0, 1.0), step(0.0, 8.0), step(20.0, 0.0)];
        assert_eq!(cheapest(&apart, (20.0, 16.0)), 30.0 + 2.0 * 26.0);
        let mixed = [step(0.0, 8.0), step(20.0, 0.0), step(12.0, 8.0)];
        // A step with both, the decodes that are left and the prompt tokens that are left.
        assert_eq!(cheapest(&mixed, (12.0, 16.0)), 38.0 + 26.0);
        assert_eq!(cheapest(&mixed, (20.0, 0.0)), 30.0);
        assert_eq!(cheapest(&mixed, (0.0, 16.0)), 52.0);
        // No step prefills: nothing is known.
        assert_eq!(cheapest(&[step(0.0, 8.0)], (20.0, 8.0)), 0.0);
        assert_eq!(cheapest(&[], (1.0, 1.0)), 0.0);
    }
}
