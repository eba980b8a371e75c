//! A surface through measured points: a sum of terms that never falls, bent so that it passes through what was measured.
//!
//! Far from any point the sum rules, whose terms are what costs are made of (a constant, tokens, keys); near one the
//! ratio of what was measured there to the sum does, by the inverse of the distance (Shepard 1968, "A two-dimensional
//! interpolation function for irregularly-spaced data"). Times are fitted by their relative errors: a step of 5 ms counts
//! as much as one of 500.

/// A measured point: what was given, and the time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FitPoint<const N: usize> {
    pub(crate) terms: [f64; N],
    pub(crate) p50_us: f64,
    pub(crate) p95_us: f64,
}

/// Error of the sum without corrections.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Quality {
    /// Median of the relative errors, where 0.1 is ten percent off.
    pub median: f64,
    /// The largest.
    pub worst: f64,
}

/// The surface over `N` terms.
#[derive(Clone, Debug)]
pub(super) struct Surface<const N: usize> {
    /// Weight of each term, in microseconds; the first term is a constant 1.
    weights: [f64; N],
    /// Logarithms of terms are divided by these, so that each reaches from 0 to 1 over the points.
    scales: [f64; N],
    points: Vec<LocalCorrection<N>>,
}

/// Correction at a measured point.
#[derive(Clone, Copy, Debug)]
struct LocalCorrection<const N: usize> {
    at: [f64; N],
    ratio: f64,
    spread: f64,
}

impl<const N: usize> Surface<N> {
    /// Through these points. Every time in them is positive.
    pub(super) fn through(points: &[FitPoint<N>]) -> Self {
        let weights = least_squares(points);
        let mut surface = Self { weights, scales: [1.0; N], points: Vec::with_capacity(points.len()) };
        for i in 0..N {
            let most = points.iter().map(|p| p.terms[i].max(0.0).ln_1p()).fold(0.0, f64::max);
            surface.scales[i] = most.max(1.0);
        }
        let bends = points.iter().map(|p| LocalCorrection {
            at: surface.coordinates(&p.terms),
            ratio: p.p50_us / surface.sum(&p.terms),
            spread: p.p95_us / p.p50_us,
        });
        surface.points = bends.collect();
        surface
    }

    /// Median and 95th percentile.
    pub(super) fn at(&self, terms: &[f64; N]) -> (f64, f64) {
        let here = self.coordinates(terms);
        let mut ratio = 0.0;
        let mut spread = 0.0;
        let mut all = 0.0;
        for point in &self.points {
            let distance: f64 = point.at.iter().zip(&here).map(|(a, b)| (a - b) * (a - b)).sum();
            let weight = 1.0 / (distance * distance + 1e-12);
            ratio += weight * point.ratio;
            spread += weight * point.spread;
            all += weight;
        }
        let p50 = self.sum(terms) * if all > 0.0 { ratio / all } else { 1.0 };
        (p50, p50 * if all > 0.0 { spread / all } else { 1.0 })
    }

    /// Error of the sum without corrections.
    pub(super) fn quality(&self) -> Quality {
        let mut errors: Vec<f64> = self.points.iter().map(|p| (1.0 / p.ratio - 1.0).abs()).collect();
        errors.sort_by(f64::total_cmp);
        let median = errors.get(errors.len().saturating_sub(1) / 2).copied().unwrap_or(0.0);
        Quality { median, worst: errors.last().copied().unwrap_or(0.0) }
    }

    fn sum(&self, terms: &[f64; N]) -> f64 {
        // A surface that is nothing somewhere has no ratio there.
        self.weights.iter().zip(terms).map(|(w, t)| w * t).sum::<f64>().max(1e-3)
    }

    fn coordinates(&self, terms: &[f64; N]) -> [f64; N] {
        std::array::from_fn(|i| terms[i].max(0.0).ln_1p() / self.scales[i])
    }
}

/// Weights that are not negative and make the sum of squared relative errors least: the most negative one is held at
/// nothing until none is.
pub(crate) fn least_squares<const N: usize>(points: &[FitPoint<N>]) -> [f64; N] {
    let largest: [f64; N] =
        std::array::from_fn(|i| points.iter().map(|p| p.terms[i].abs()).fold(0.0, f64::max));
    let mut free: [bool; N] = std::array::from_fn(|i| largest[i] > 0.0);
    loop {
        let scaled =
            |p: &FitPoint<N>, i: usize| if free[i] { p.terms[i] / largest[i] / p.p50_us } else { 0.0 };
        let mut system = [[0.0; N]; N];
        let mut right = [0.0; N];
        for point in points {
            for i in 0..N {
                right[i] += scaled(point, i);
                for (j, cell) in system[i].iter_mut().enumerate() {
                    *cell += scaled(point, i) * scaled(point, j);
                }
            }
        }
        let trace: f64 = (0..N).map(|i| system[i][i]).sum();
        for (i, row) in system.iter_mut().enumerate() {
            // Terms that always occur in proportion cannot be separated: each gets a part.
            row[i] += if free[i] { trace.max(f64::MIN_POSITIVE) * 1e-9 } else { 1.0 };
        }
        let solved = solve(system, right);
        let lowest =
            (0..N).filter(|i| free[*i] && solved[*i] < 0.0).min_by(|a, b| solved[*a].total_cmp(&solved[*b]));
        match lowest {
            Some(i) => free[i] = false,
            None => return std::array::from_fn(|i| if free[i] { solved[i] / largest[i] } else { 0.0 }),
        }
    }
}

/// Gauss, with the largest pivot. A row without one is left out.
fn solve<const N: usize>(mut system: [[f64; N]; N], mut right: [f64; N]) -> [f64; N] {
    for column in 0..N {
        let pivot = (column..N).max_by(|a, b| system[*a][column].abs().total_cmp(&system[*b][column].abs()));
        let pivot = pivot.unwrap_or(column);
        system.swap(column, pivot);
        right.swap(column, pivot);
        if system[column][column].abs() < f64::MIN_POSITIVE {
            continue;
        }
        for row in column + 1..N {
            let factor = system[row][column] / system[column][column];
            let above = system[column];
            for (value, above) in system[row].iter_mut().zip(above).skip(column) {
                *value -= factor * above;
            }
            right[row] -= factor * right[column];
        }
    }
    let mut solved = [0.0; N];
    for row in (0..N).rev() {
        let known: f64 = (row + 1..N).map(|k| system[row][k] * solved[k]).sum();
        if system[row][row].abs() >= f64::MIN_POSITIVE {
            solved[row] = (right[row] - known) / system[row][row];
        }
    }
    solved
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(cost: impl Fn(f64, f64) -> f64) -> Vec<FitPoint<3>> {
        let grid = [1.0, 8.0, 64.0, 512.0];
        let point = |(a, b): (f64, f64)| {
            let p50_us = cost(a, b);
            FitPoint { terms: [1.0, a, b], p50_us, p95_us: p50_us * 1.5 }
        };
        grid.iter().flat_map(|a| grid.iter().map(move |b| (*a, *b))).map(point).collect()
    }

    #[test]
    fn a_sum_is_found_and_holds_far_outside_of_what_was_measured() {
        let surface = Surface::through(&points(|a, b| 100.0 + 3.0 * a + 0.5 * b));
        assert!(surface.quality().worst < 1e-6, "{:?}", surface.quality());
        for (a, b) in [(0.0, 0.0), (30.0, 100.0), (10_000.0, 10_000.0)] {
            let ((p50, p95), expect) = (surface.at(&[1.0, a, b]), 100.0 + 3.0 * a + 0.5 * b);
            assert!((p50 / expect - 1.0).abs() < 1e-3 && (p95 / p50 - 1.5).abs() < 1e-6, "{a} {b}: {p50}");
        }
    }

    #[test]
    fn what_no_sum_describes_is_met_where_it_was_measured_and_between() {
        let cost = |a: f64, b: f64| 50.0 + 40.0 * a.sqrt() + b;
        let surface = Surface::through(&points(cost));
        assert!(surface.quality().worst > 0.1, "it is no sum");
        for p in points(cost) {
            let (p50, _) = surface.at(&p.terms);
            assert!((p50 / p.p50_us - 1.0).abs() < 1e-3, "{:?}: {p50}", p.terms);
        }
        let (p50, _) = surface.at(&[1.0, 22.0, 64.0]);
        assert!((p50 / cost(22.0, 64.0) - 1.0).abs() < 0.15, "{p50}");
    }

    #[test]
    fn no_term_is_ever_worth_less_than_nothing() {
        let surface = Surface::through(&points(|a, b| 1000.0 - a + 0.1 * b));
        assert!(surface.weights.iter().all(|w| *w >= 0.0), "{:?}", surface.weights);
        let one = Surface::through(&[FitPoint { terms: [1.0, 5.0, 0.0], p50_us: 10.0, p95_us: 10.0 }]);
        assert!((one.at(&[1.0, 5.0, 0.0]).0 - 10.0).abs() < 1e-3);
    }
}
