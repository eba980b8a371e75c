//! A demand that is like the load that was seen: each number drawn from its own histogram.

use super::load::Load;
use crate::curves::CostCurves;
use crate::planner::Demand;
use crate::planner::demand::{Draws, Requests};
use std::time::Duration;
use triptych_bench::offered::{ItemShape, Offered, OfferedItem};

/// Contents that come again.
const POOL: usize = 64;
/// A bucket without an upper end is taken to end at so many times its lower one.
const LAST: f64 = 2.0;

/// The demand.
#[derive(Clone, Debug, PartialEq)]
pub struct Fitted {
    items: Vec<(f64, f64)>,
    /// Pixels or milliseconds.
    sizes: Vec<(f64, f64)>,
    text: Vec<(f64, f64)>,
    output: Vec<(f64, f64)>,
    reused: f64,
}

impl Fitted {
    /// A demand like a load, for a measured model. `None` if the load lacks sizes.
    pub fn of(load: &Load, curves: &CostCurves) -> Option<Self> {
        let has = |buckets: &[(f64, f64)]| buckets.iter().any(|(_, n)| *n > 0.0);
        if !has(&load.output_tokens) || !has(&load.text_tokens) {
            return None;
        }
        let items: Vec<(f64, f64)> = load.by_items.iter().map(|(n, count)| (*n as f64, *count)).collect();
        let sizes = load.item_tokens.iter().map(|(tokens, n)| (size_of(curves, *tokens), *n)).collect();
        Some(Self {
            items,
            sizes,
            text: load.text_tokens.clone(),
            output: load.output_tokens.clone(),
            reused: load.reused.clamp(0.0, 1.0),
        })
    }
}

/// The size of an item that becomes so many tokens: that of the nearest measured one, in proportion.
fn size_of(curves: &CostCurves, tokens: f64) -> f64 {
    let distance = |of: u32| (f64::from(of) - tokens).abs();
    let nearest = curves.items.iter().min_by(|a, b| distance(a.tokens).total_cmp(&distance(b.tokens)));
    let Some(nearest) = nearest else { return tokens };
    if tokens.is_finite() { nearest.size * tokens / f64::from(nearest.tokens.max(1)) } else { f64::INFINITY }
}

/// A value of a histogram: a bucket by its count, then anywhere in it.
fn draw(buckets: &[(f64, f64)], draws: &mut Draws) -> f64 {
    let all: f64 = buckets.iter().map(|(_, n)| n).sum();
    let mut left = draws.unit() * all;
    let mut from = 0.0;
    for (bound, n) in buckets {
        if left < *n {
            let to = if bound.is_finite() { *bound } else { from * LAST };
            return from + (to - from) * draws.unit();
        }
        left -= n;
        from = *bound;
    }
    if from.is_finite() { from } else { 0.0 }
}

/// One of the values themselves.
fn pick(values: &[(f64, f64)], draws: &mut Draws) -> usize {
    let all: f64 = values.iter().map(|(_, n)| n).sum();
    let mut left = draws.unit() * all;
    for (value, n) in values {
        if left < *n {
            return *value as usize;
        }
        left -= n;
    }
    0
}

impl Demand for Fitted {
    fn name(&self) -> String {
        "as observed".to_owned()
    }

    fn requests(&self, rate: f64, seed: u64) -> Requests<'_> {
        // Gaps and contents have draws of their own, so that rates differ in their gaps alone.
        let mut gaps = Draws::new(seed);
        let mut draws = Draws::new(!seed);
        let mut at = 0.0;
        let mut next_content = POOL as u64;
        let pool: Vec<OfferedItem> = (0..POOL as u64).map(|content| self.item(content, &mut draws)).collect();
        Box::new((0..).map(move |index| {
            at += -(1.0 - gaps.unit()).ln() / rate.max(f64::MIN_POSITIVE);
            let n_items = pick(&self.items, &mut draws);
            let items = (0..n_items).map(|_| {
                if draws.unit() < self.reused {
                    return pool[draws.below(POOL)];
                }
                next_content += 1;
                self.item(next_content, &mut draws)
            });
            let items = items.collect();
            Offered {
                index,
                at: Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX),
                text_tokens: draw(&self.text, &mut draws).round() as u32,
                output_tokens: (draw(&self.output, &mut draws).round() as u32).max(1),
                items,
                session: None,
                blocks: None,
                slo: None,
            }
        }))
    }
}

impl Fitted {
    fn item(&self, content: u64, draws: &mut Draws) -> OfferedItem {
        let side = (draw(&self.sizes, draws).sqrt().round() as u32).max(1);
        OfferedItem { content, shape: ItemShape::Image { width: side, height: side } }
    }
}

#[cfg(test)]
mod tests {
    use super::super::load::Reading;
    use super::super::load::tests::metrics;
    use super::*;
    use crate::curves::sample::curves;
    use std::collections::HashSet;

    #[test]
    fn the_demand_is_like_the_load_and_the_same_for_a_seed() {
        let at = |n| Reading::of(&metrics(n)).unwrap();
        let load = at(1000).since(&at(0), Duration::from_secs(100)).unwrap();
        let fitted = Fitted::of(&load, &curves()).unwrap();
        let drawn: Vec<Offered> = fitted.requests(10.0, 3).take(2000).collect();
        assert_eq!(drawn, fitted.requests(10.0, 3).take(2000).collect::<Vec<_>>());
        let last = drawn.last().unwrap().at.as_secs_f64();
        assert!((150.0..250.0).contains(&last), "2000 requests at 10 a second end at {last} s");
        assert!(drawn.iter().all(|o| o.items.len() == 1 && o.text_tokens <= 32 && o.output_tokens <= 16));
        let tokens = |o: &Offered| crate::planner::means::item_tokens(&curves(), o.items[0].shape);
        let mean = drawn.iter().map(tokens).sum::<f64>() / 2000.0;
        assert!((60.0..140.0).contains(&mean), "items of {mean} tokens, seen were 64 to 128");
        let distinct: HashSet<_> = drawn.iter().map(|o| o.items[0].content).collect();
        assert!((900..1200).contains(&distinct.len()), "half of 2000 are new, these are {}", distinct.len());
    }

    #[test]
    fn a_load_without_sizes_is_no_demand() {
        assert_eq!(Fitted::of(&Load::default(), &curves()), None);
    }
}
