//! What a cluster could do at most: each stage at its cheapest, nobody ever waiting. No simulation passes it, so what is
//! below the best that was found need not be simulated.

use super::candidate::{Candidate, Shape};
use super::demand::Demand;
use crate::curves::CostCurves;
use serde::Serialize;
use std::collections::HashSet;
use triptych_bench::offered::{ItemShape, Offered};

/// Requests that the means are taken of.
const SAMPLE: usize = 1000;

/// What a request is, in the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Means {
    /// Items.
    pub items: f64,
    /// Items whose content was not there before in the sample.
    pub new_items: f64,
    /// Encoder output tokens of all items.
    pub item_tokens: f64,
    /// Those of new items.
    pub new_item_tokens: f64,
    /// Tokens of text in the prompt.
    pub text_tokens: f64,
    /// Tokens to write.
    pub output_tokens: f64,
    /// Whether prompts begin with what an earlier turn said.
    pub has_turns: bool,
}

impl Means {
    /// Of the first requests; `None` of none.
    pub fn of(demand: &dyn Demand, curves: &CostCurves) -> Option<Self> {
        let mut seen = HashSet::new();
        let mut sums = Self::default();
        let mut n = 0.0;
        for Offered { items, text_tokens, output_tokens, session, .. } in demand.requests(1.0, 0).take(SAMPLE)
        {
            n += 1.0;
            sums.has_turns |= session.is_some();
            sums.text_tokens += f64::from(text_tokens);
            sums.output_tokens += f64::from(output_tokens);
            for item in items {
                let tokens = item_tokens(curves, item.shape);
                sums.items += 1.0;
                sums.item_tokens += tokens;
                if seen.insert(item) {
                    sums.new_items += 1.0;
                    sums.new_item_tokens += tokens;
                }
            }
        }
        (n > 0.0).then(|| Self {
            items: sums.items / n,
            new_items: sums.new_items / n,
            item_tokens: sums.item_tokens / n,
            new_item_tokens: sums.new_item_tokens / n,
            text_tokens: sums.text_tokens / n,
            output_tokens: sums.output_tokens / n,
            has_turns: sums.has_turns,
        })
    }
}

/// Output tokens of an item: on the line between the measured sizes around it, beyond them in proportion.
pub fn item_tokens(curves: &CostCurves, shape: ItemShape) -> f64 {
    let size = match shape {
        ItemShape::Image { width, height } => f64::from(width) * f64::from(height),
        ItemShape::Audio { millis } => f64::from(millis),
    };
    let items = &curves.items;
    let (Some(first), Some(last)) = (items.first(), items.last()) else { return 0.0 };
    let after = items.partition_point(|p| p.size < size);
    match (after.checked_sub(1).and_then(|i| items.get(i)), items.get(after)) {
        (Some(below), Some(above)) => {
            let part = (size - below.size) / (above.size - below.size);
            f64::from(below.tokens) + part * (f64::from(above.tokens) - f64::from(below.tokens))
        }
        // Models scale small pictures up, and large ones down.
        (None, _) => f64::from(first.tokens),
        (_, None) => f64::from(last.tokens),
    }
}

/// What limits a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Bound {
    /// Requests a second that it cannot pass.
    pub rate: f64,
    /// Seconds of a worker that the encodes of a request take at least.
    pub encode_s: f64,
    /// The same of reading its prompt and writing its answer.
    pub decode_s: f64,
}

/// Of a candidate.
pub fn of(candidate: &Candidate, means: &Means) -> Bound {
    let (encode_s, decode_s) = (encode_s(&candidate.curves, means), decode_s(&candidate.curves, means));
    let of = |n: usize, seconds: f64| if seconds > 0.0 { n as f64 / seconds } else { f64::MAX };
    let rate = match candidate.shape {
        Shape::Split { encoders, pds } => of(encoders, encode_s).min(of(pds, decode_s)),
        Shape::Replicated { workers } => of(workers, encode_s + decode_s),
        Shape::Colocated => of(1, encode_s + decode_s),
    };
    Bound { rate, encode_s, decode_s }
}

/// At the best rate of tokens that any measured batch had.
fn encode_s(curves: &CostCurves, means: &Means) -> f64 {
    let each = curves.encode.iter().map(|p| p.p50_us / p.tokens.max(1) as f64);
    means.new_item_tokens * least(each) / 1e6
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::Costs;
    use crate::curves::sample::curves;

    #[test]
    fn sizes_between_measured_ones_lie_on_the_line_and_sizes_beyond_are_the_last() {
        let curves = curves();
        let tokens = |side: u32| item_tokens(&curves, ItemShape::Image { width: side, height: side });
        assert_eq!((tokens(448), tokens(10), tokens(5000)), (256.0, 16.0, 1024.0));
        assert!(tokens(600) > 256.0 && tokens(600) < tokens(640));
    }

    #[test]
    fn the_simulator_takes_an_item_for_what_the_bound_takes_it() {
        let curves = curves();
        let costs = Costs::new(&curves);
        for side in [10, 112, 300, 640, 896, 5000] {
            let shape = ItemShape::Image { width: side, height: side };
            assert_eq!(f64::from(costs.item(shape).tokens), item_tokens(&curves, shape).round(), "{side}");
        }
    }
}
