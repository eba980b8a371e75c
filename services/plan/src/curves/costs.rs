//! Costs of any input, from the measured points.

use super::fit::{FitPoint, Quality, Surface};
use super::{CostCurves, EncodePoint, EncoderCurves, ItemPoint, Point, Stage};
use rand::{Rng, RngExt};
use std::time::Duration;
use triptych_bench::offered::ItemShape;
use triptych_core::TowerIdx;

/// Standard deviations between median and 95th percentile.
const Z95: f64 = 1.644_853_6;
/// Largest deviation of a drawn time, in standard deviations: measurements do not reach further.
const FARTHEST: f64 = 3.0;

/// A time that varies, by its median and 95th percentile.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 95th percentile, in microseconds.
    pub p95_us: f64,
}

/// Contents of an encoder forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchShape {
    /// Items.
    pub items: u32,
    /// Output tokens of all of them.
    pub tokens: u64,
    /// Squares of the items' output tokens, summed.
    pub squares: u64,
}

/// Contents of an engine step; see [`StepPoint`](super::StepPoint).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepShape {
    /// Prompt tokens read in the step.
    pub prefill_tokens: u32,
    /// Keys that those attend to.
    pub prefill_context: u64,
    /// Sequences that write a token.
    pub decodes: u32,
    /// Keys that those attend to.
    pub decode_context: u64,
    /// Rows of encoder outputs that are projected.
    pub projected_rows: u32,
}

/// Sizes of an item.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sized {
    /// Pixels, or milliseconds.
    pub size: f64,
    /// Output tokens.
    pub tokens: u32,
    /// Bytes of the file.
    pub bytes: u64,
}

/// The costs of one model on one kind of machine.
#[derive(Clone, Debug)]
pub struct Costs {
    /// One for each tower, at least one.
    encoders: Vec<EncoderCosts>,
    step: Surface<7>,
    curves: CostCurves,
}

/// The costs of one encoder of a model.
#[derive(Clone, Debug)]
pub struct EncoderCosts {
    encode: Surface<4>,
    preprocess: Vec<Point>,
    items: Vec<ItemPoint>,
    row_bytes: usize,
    /// Parts of a forward.
    pub encode_parts: usize,
    /// True if its rows are cross-attended to beside those of another tower.
    pub is_cross_attended: bool,
}

impl Spread {
    /// A time that does not vary.
    pub const fn fixed(us: f64) -> Self {
        Self { p50_us: us, p95_us: us }
    }

    /// Median and 95th percentile of samples in microseconds; zero of none.
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let last = samples.len().saturating_sub(1);
            samples.get((last as f64 * share).round() as usize).copied().unwrap_or(0.0)
        };
        Self { p50_us: at(0.5), p95_us: at(0.95) }
    }

    /// Log-normal, as times of compute are: never less than nothing, and late more often than early.
    pub fn draw(self, rng: &mut impl Rng) -> Duration {
        if self.p50_us <= 0.0 || self.p95_us <= self.p50_us {
            return micros(self.p50_us);
        }
        let sigma = (self.p95_us / self.p50_us).ln() / Z95;
        micros(self.p50_us * (sigma * normal(rng).clamp(-FARTHEST, FARTHEST)).exp())
    }

    /// So many times as long.
    pub fn times(self, factor: f64) -> Self {
        Self { p50_us: self.p50_us * factor, p95_us: self.p95_us * factor }
    }
}

impl BatchShape {
    /// A batch of items with so many output tokens each.
    pub fn of(tokens: impl IntoIterator<Item = u32>) -> Self {
        tokens.into_iter().fold(Self::default(), |shape, n| {
            let n = u64::from(n);
            Self { items: shape.items + 1, tokens: shape.tokens + n, squares: shape.squares + n * n }
        })
    }

    fn terms(self) -> [f64; 4] {
        [1.0, f64::from(self.items), self.tokens as f64, self.squares as f64]
    }
}

impl StepShape {
    /// The stage that it counts for: prompt tokens outweigh those that are written.
    pub fn stage(self) -> Stage {
        if self.prefill_tokens > 0 || self.projected_rows > 0 { Stage::Prefill } else { Stage::Decode }
    }

    /// True if nothing is computed.
    pub fn is_empty(self) -> bool {
        self.prefill_tokens == 0 && self.decodes == 0 && self.projected_rows == 0
    }

    fn terms(self) -> [f64; 7] {
        [
            1.0,
            f64::from(self.prefill_tokens),
            self.prefill_context as f64,
            f64::from(self.decodes),
            self.decode_context as f64,
            f64::from(self.projected_rows),
            // The first row of a prompt turns a product with a vector into one with a matrix.
            if self.prefill_tokens > 0 { 1.0 } else { 0.0 },
        ]
    }
}

impl Costs {
    /// Costs of curves without [`mistakes`](CostCurves::mistakes).
    pub fn new(curves: &CostCurves) -> Self {
        let step = curves.step.iter().map(|p| {
            let shape = StepShape {
                prefill_tokens: p.prefill_tokens,
                prefill_context: p.prefill_context,
                decodes: p.decodes,
                decode_context: p.decode_context,
                projected_rows: p.projected_rows,
            };
            FitPoint { terms: shape.terms(), p50_us: p.p50_us, p95_us: p.p95_us }
        });
        let step: Vec<_> = step.collect();
        let encoders = curves.encoders().map(|encoder| EncoderCosts::new(&encoder)).collect();
        Self { encoders, step: Surface::through(&step), curves: curves.clone() }
    }

    /// The curves.
    pub fn curves(&self) -> &CostCurves {
        &self.curves
    }

    /// The encoder of a tower; the first for one that there is not.
    pub fn encoder(&self, tower: TowerIdx) -> &EncoderCosts {
        self.encoders.get(usize::from(tower.0)).unwrap_or(&self.encoders[0])
    }

    /// Encoders by their towers.
    pub fn encoders(&self) -> impl Iterator<Item = (TowerIdx, &EncoderCosts)> {
        (0..TowerIdx::LIMIT).map(TowerIdx).zip(&self.encoders)
    }

    /// An engine step.
    pub fn step(&self, shape: StepShape) -> Spread {
        if shape.is_empty() { Spread::default() } else { spread(self.step.at(&shape.terms())) }
    }

    /// Publishing rows of so many bytes.
    pub fn publish(&self, bytes: u64) -> Spread {
        along(&self.curves.publish, bytes as f64)
    }

    /// Loading them.
    pub fn load(&self, bytes: u64) -> Spread {
        along(&self.curves.load, bytes as f64)
    }

    /// Errors of the sums of terms for forwards and engine steps; the costs themselves pass through what was measured. Of several
    /// towers the largest errors.
    pub fn quality(&self) -> (Quality, Quality) {
        let all = self.encoders.iter().map(|encoder| encoder.encode.quality());
        let larger =
            |a: Quality, b: Quality| Quality { median: a.median.max(b.median), worst: a.worst.max(b.worst) };
        (all.reduce(larger).unwrap_or_default(), self.step.quality())
    }
}

impl EncoderCosts {
    fn new(curves: &EncoderCurves<'_>) -> Self {
        let point = |p: &EncodePoint| FitPoint {
            terms: BatchShape { items: p.items, tokens: p.tokens, squares: p.squares }.terms(),
            p50_us: p.p50_us,
            p95_us: p.p95_us,
        };
        let encode: Vec<_> = curves.encode.iter().map(point).collect();
        Self {
            encode: Surface::through(&encode),
            preprocess: curves.preprocess.to_vec(),
            items: curves.items.to_vec(),
            row_bytes: curves.row_bytes,
            encode_parts: curves.encode_parts,
            is_cross_attended: curves.is_cross_attended,
        }
    }

    /// A forward.
    pub fn encode(&self, batch: BatchShape) -> Spread {
        match batch.items {
            0 => Spread::default(),
            _ => spread(self.encode.at(&batch.terms())),
        }
    }

    /// Preprocessing an item.
    pub fn preprocess(&self, item: Sized) -> Spread {
        along(&self.preprocess, item.size)
    }

    /// Sizes of an item.
    pub fn item(&self, shape: ItemShape) -> Sized {
        let size = match shape {
            ItemShape::Image { width, height } => f64::from(width) * f64::from(height),
            ItemShape::Audio { millis } => f64::from(millis),
        };
        let curve = |of: fn(&ItemPoint) -> f64| -> Vec<(f64, f64)> {
            self.items.iter().map(|p| (p.size, of(p))).collect()
        };
        // Models scale small images up, and large ones down: beyond the measured sizes it is the nearest one's tokens.
        let sizes = || self.items.iter().map(|p| p.size);
        let within = size.min(sizes().fold(0.0, f64::max)).max(sizes().fold(f64::INFINITY, f64::min));
        let tokens = line(&curve(|p| f64::from(p.tokens)), within);
        let bytes = line(&curve(|p| p.bytes as f64), size);
        Sized { size, tokens: (tokens.round() as u32).max(1), bytes: bytes.round() as u64 }
    }

    /// Bytes of the rows of an item of so many output tokens, as they are published.
    pub fn row_bytes(&self, tokens: u32) -> u64 {
        u64::from(tokens) * self.row_bytes as u64
    }
}

fn spread((p50_us, p95_us): (f64, f64)) -> Spread {
    Spread { p50_us, p95_us }
}

fn micros(us: f64) -> Duration {
    Duration::try_from_secs_f64(us.max(0.0) / 1e6).unwrap_or_default()
}

/// Box and Muller, one of the two.
fn normal(rng: &mut impl Rng) -> f64 {
    let (u, v): (f64, f64) = (rng.random(), rng.random());
    (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()
}

fn along(curve: &[Point], of: f64) -> Spread {
    let by =
        |value: fn(&Point) -> f64| -> Vec<(f64, f64)> { curve.iter().map(|p| (p.of, value(p))).collect() };
    let p50_us = line(&by(|p| p.p50_us), of);
    Spread { p50_us, p95_us: line(&by(|p| p.p95_us), of).max(p50_us) }
}

/// Linear between points, and on from the last two, but never falling nor below nothing. One point alone is a constant
/// before it and a proportion after it.
fn line(places: &[(f64, f64)], x: f64) -> f64 {
    let through = |(x0, y0): (f64, f64), (x1, y1): (f64, f64)| {
        let slope = if x1 > x0 { (y1 - y0) / (x1 - x0) } else { 0.0 };
        y0 + slope * (x - x0)
    };
    match places {
        [] => 0.0,
        [(x0, y0)] => y0 * if *x0 > 0.0 { (x / x0).max(1.0) } else { 1.0 },
        [first, second, ..] if x <= first.0 => through(*first, *second).clamp(0.0, first.1),
        [.., before, last] if x >= last.0 => through(*before, *last).max(last.1),
        _ => {
            let i = places.partition_point(|p| p.0 < x).clamp(1, places.len() - 1);
            through(places[i - 1], places[i])
        }
    }
}
