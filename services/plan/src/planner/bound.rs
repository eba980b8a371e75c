//! Upper bound on a cluster's rate: each stage at its cheapest, without any waiting. No simulation exceeds it, so a
//! candidate whose bound is below the best result is not simulated.

use super::candidate::{Candidate, Shape};
use super::means::Means;
use crate::curves::{CostCurves, EncoderCurves};
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
    let decode_s = decode_s(&candidate.curves, means);
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

/// Prompt tokens at the best rate that any measured step had, and answers in the largest measured batch.
fn decode_s(curves: &CostCurves, means: &Means) -> f64 {
    let of_prompt = curves.step.iter().filter(|p| p.decodes == 0 && p.prefill_tokens > 0);
    let prefill = least(of_prompt.map(|p| p.p50_us / f64::from(p.prefill_tokens)));
    let of_answers = curves.step.iter().filter(|p| p.decodes > 0 && p.prefill_tokens == 0);
    let decode = least(of_answers.map(|p| p.p50_us / f64::from(p.decodes)));
    // What was there before may be found in the prefix cache, so only what is new is sure to be read.
    let text = if means.has_turns { 0.0 } else { means.text_tokens };
    let items = if curves.kv.cross_row_bytes == 0 { means.new_item_tokens } else { 0.0 };
    ((text + items) * prefill + means.output_tokens * decode) / 1e6
}

fn least(values: impl Iterator<Item = f64>) -> f64 {
    let least = values.fold(f64::INFINITY, f64::min);
    if least.is_finite() { least } else { 0.0 }
}
