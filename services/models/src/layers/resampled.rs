//! A stored grid of positions, resampled to the grid of the images that a model reads.
//!
//! After `interpolate_pos_encoding` of
//! <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/dinov2/modeling_dinov2.py> and
//! `dinov2_with_registers/modeling_dinov2_with_registers.py` beside it, and torch's `interpolate`, which has another constant with
//! antialiasing than without. It happens once, when a model is loaded: every image has the same grid.

use super::Loader;
use crate::error::ModelError;
use crate::spec::{GridFilter, ResampledSpec};
use triptych_core::DType;
use triptych_kernels::Backend;
use triptych_kernels::ops::WeightView;

/// Loads the table `name`, `[n_placed + n_unplaced + to[0] · to[1], hidden]`: rows without a position are zeros.
///
/// # Errors
/// [`ModelError`] for a tensor that is missing or has another shape.
pub(super) fn table<B: Backend>(
    loader: &Loader<'_, B>,
    spec: &ResampledSpec,
    (name, hidden): (&str, usize),
) -> Result<B::Table, ModelError> {
    let n_stored = spec.n_placed + spec.from[0] * spec.from[1];
    let stored = match spec.bare {
        true => loader.bare_values(name, &[1, n_stored, hidden])?,
        false => loader.matrix(name, &[n_stored, hidden])?.values(),
    };
    let (placed, grid) = stored.split_at(spec.n_placed * hidden);
    let mut rows = placed.to_vec();
    rows.resize((spec.n_placed + spec.n_unplaced) * hidden, 0.0);
    match spec.from == spec.to {
        true => rows.extend_from_slice(grid),
        false => rows.extend(resample(grid, spec, hidden)),
    }
    let data: Vec<u8> = rows.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = [spec.n_placed + spec.n_unplaced + spec.to[0] * spec.to[1], hidden];
    Ok(loader.backend().load_table(WeightView { dtype: DType::F32, shape: &shape, data: &data }, 1.0)?)
}

/// `[to[0] · to[1], hidden]` of `[from[0] · from[1], hidden]`, both row by row.
fn resample(grid: &[f32], spec: &ResampledSpec, hidden: usize) -> Vec<f32> {
    let [down, across] = [0, 1].map(|axis| taps(spec.from[axis], spec.to[axis], spec.filter));
    let mut values = Vec::with_capacity(down.len() * across.len() * hidden);
    let mut sum = vec![0.0; hidden];
    for (rows, columns) in down.iter().flat_map(|rows| across.iter().map(move |columns| (rows, columns))) {
        sum.fill(0.0);
        for ((y, of_row), (x, of_column)) in rows.iter().flat_map(|r| columns.iter().map(move |c| (r, c))) {
            let first = (y * spec.from[1] + x) * hidden;
            for (sum, value) in sum.iter_mut().zip(&grid[first..first + hidden]) {
                *sum += of_row * of_column * f64::from(*value);
            }
        }
        values.extend(sum.iter().map(|v| *v as f32));
    }
    values
}

/// Places on an axis of `from`, and their weights, for each place on one of `to`.
fn taps(from: usize, to: usize, filter: GridFilter) -> Vec<Vec<(usize, f64)>> {
    let scale = from as f64 / to.max(1) as f64;
    let last = from.saturating_sub(1) as f64;
    let center = |i: usize| scale * (i as f64 + 0.5);
    match filter {
        GridFilter::Bicubic => {
            let tap = |at: f64, place: f64| (place.clamp(0.0, last) as usize, cubic(-0.75, at - place));
            let of = |at: f64| (-1..=2).map(|k| tap(at, at.floor() + f64::from(k))).collect();
            (0..to).map(|i| of(center(i) - 0.5)).collect()
        }
        GridFilter::AntialiasedBicubic => {
            let width = scale.max(1.0);
            let of = |center: f64| {
                let first = (center - 2.0 * width + 0.5).max(0.0) as usize;
                let end = ((center + 2.0 * width + 0.5) as usize).min(from);
                let weight = |place: usize| cubic(-0.5, (place as f64 - center + 0.5) / width);
                let total: f64 = (first..end).map(weight).sum();
                (first..end).map(|place| (place, weight(place) / total)).collect()
            };
            (0..to).map(|i| of(center(i))).collect()
        }
    }
}

/// Cubic convolution kernel (Keys, 1981) of constant `a` at a distance.
fn cubic(a: f64, distance: f64) -> f64 {
    let x = distance.abs();
    match x {
        _ if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
        _ if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
        _ => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_of_a_place_add_up_to_one() {
        for filter in [GridFilter::Bicubic, GridFilter::AntialiasedBicubic] {
            for (from, to) in [(1, 1), (1, 5), (4, 4), (4, 3), (4, 7), (37, 16), (2, 1)] {
                let all = taps(from, to, filter);
                assert_eq!(all.len(), to);
                for taps in all {
                    let total: f64 = taps.iter().map(|(_, weight)| weight).sum();
                    assert!((total - 1.0).abs() < 1e-12, "{filter:?} {from} to {to}: {taps:?}");
                    assert!(
                        taps.iter().all(|(place, _)| *place < from),
                        "{filter:?} {from} to {to}: {taps:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn places_are_those_of_torch() {
        // `interpolate` of (1, 4, 2, 8) to three places, as torch 2.11 computes it in double precision.
        let check = |filter, expect: [f64; 3]| {
            let row = [1.0, 4.0, 2.0, 8.0];
            let value = |taps: &Vec<(usize, f64)>| taps.iter().map(|(place, w)| w * row[*place]).sum::<f64>();
            for (taps, expect) in taps(4, 3, filter).iter().zip(expect) {
                assert!((value(taps) - expect).abs() < 1e-6, "{filter:?}: {} {expect}", value(taps));
            }
        };
        check(GridFilter::Bicubic, [1.465_277_8, 2.718_75, 7.104_166_7]);
        check(GridFilter::AntialiasedBicubic, [1.855_835, 2.894_397, 6.402_746]);
    }
}
