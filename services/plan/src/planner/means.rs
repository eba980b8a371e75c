//! Mean sizes of a demand's requests.

use super::demand::Demand;
use crate::curves::CostCurves;
use serde::Serialize;
use std::collections::HashSet;
use triptych_bench::offered::{ItemShape, Offered};

/// Sampled requests.
const SAMPLE: usize = 1000;

/// Mean request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Means {
    /// Items.
    pub items: f64,
    /// Items whose content is new in the sample.
    pub new_items: f64,
    /// Encoder output tokens of all items.
    pub item_tokens: f64,
    /// Encoder output tokens of new items.
    pub new_item_tokens: f64,
    /// Tokens of text in the prompt.
    pub text_tokens: f64,
    /// Output tokens.
    pub output_tokens: f64,
    /// Prompts repeat earlier turns.
    pub has_turns: bool,
}

impl Means {
    /// Means of the first requests; `None` if there are none.
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
        // Models scale small images up, and large ones down.
        (None, _) => f64::from(first.tokens),
        (_, None) => f64::from(last.tokens),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curves::Costs;
    use crate::curves::sample::curves;
    use triptych_core::TowerIdx;

    #[test]
    fn sizes_between_points_are_interpolated_and_sizes_beyond_are_clamped() {
        let curves = curves();
        let tokens = |side: u32| item_tokens(&curves, ItemShape::Image { width: side, height: side });
        assert_eq!((tokens(448), tokens(10), tokens(5000)), (256.0, 16.0, 1024.0));
        assert!(tokens(600) > 256.0 && tokens(600) < tokens(640));
    }

    #[test]
    fn the_simulator_and_the_bound_agree_on_item_tokens() {
        let curves = curves();
        let costs = Costs::new(&curves);
        let encoder = costs.encoder(TowerIdx::default());
        for side in [10, 112, 300, 640, 896, 5000] {
            let shape = ItemShape::Image { width: side, height: side };
            assert_eq!(f64::from(encoder.item(shape).tokens), item_tokens(&curves, shape).round(), "{side}");
        }
    }
}
