//! A learned grid of positions, resampled to the grid of an image: the four rows around each position, and their weights.
//!
//! Bilinear with aligned corners, in f32, as transformers' `get_vision_interpolation_indices_and_weights`
//! (<https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/vision_utils.py>).

use triptych_kernels::KernelError;
use triptych_kernels::ops::{StageBuilder, WeightedRows};

/// Corners around a position.
const N_CORNERS: usize = 4;

/// Rows of the table and their weights, [`N_CORNERS`] for each position.
#[derive(Debug, Default, PartialEq)]
pub(in crate::encoder) struct GridRows {
    /// Positions on a side of the table.
    side: usize,
    rows: Vec<u32>,
    weights: Vec<f32>,
}

/// Place on an axis of the table: a position, and the weights of it and of the next.
#[derive(Clone, Copy)]
struct Taps {
    first: usize,
    next: usize,
    weights: [f32; 2],
}

impl GridRows {
    /// None yet, of a table of `side · side` positions.
    pub fn new(side: usize) -> Self {
        Self { side, ..Self::default() }
    }

    /// Adds the positions of an image's rows, each (temporal, height, width), in a grid of so many rows down and across.
    pub fn extend(&mut self, positions: &[[u32; 3]], [height, width]: [usize; 2]) {
        for [_, y, x] in positions {
            let down = Taps::of(*y, height, self.side);
            let across = Taps::of(*x, width, self.side);
            for (row, down_weight) in [down.first, down.next].into_iter().zip(down.weights) {
                for (column, weight) in [across.first, across.next].into_iter().zip(across.weights) {
                    self.rows.push((row * self.side + column) as u32);
                    self.weights.push(down_weight * weight);
                }
            }
        }
    }

    /// Fills up to `n` positions with padding that weighs nothing.
    pub fn resize(&mut self, n: usize) {
        self.rows.resize(n * N_CORNERS, 0);
        self.weights.resize(n * N_CORNERS, 0.0);
    }

    /// Adds the rows to a step.
    ///
    /// # Errors
    /// [`KernelError::Shape`] if the step has no room for them.
    pub fn stage(&self, builder: &mut StageBuilder) -> Result<WeightedRows, KernelError> {
        builder.weighted_rows(&self.rows, &self.weights, N_CORNERS)
    }
}

impl Taps {
    /// Those of position `index` of `n` on an axis of `side`.
    fn of(index: u32, n: usize, side: usize) -> Self {
        let last = side.saturating_sub(1);
        let place = index as f32 * last as f32 / n.saturating_sub(1).max(1) as f32;
        let first = (place.floor() as usize).min(last);
        let distance = place - place.floor();
        Self { first, next: (first + 1).min(last), weights: [1.0 - distance, distance] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of a table whose row is its place down and across, at each position of a grid.
    fn resampled(side: usize, grid: [usize; 2]) -> Vec<[f32; 2]> {
        let positions: Vec<[u32; 3]> =
            (0..grid[0]).flat_map(|y| (0..grid[1]).map(move |x| [0, y as u32, x as u32])).collect();
        let mut rows = GridRows::new(side);
        rows.extend(&positions, grid);
        let terms: Vec<(&u32, &f32)> = rows.rows.iter().zip(&rows.weights).collect();
        let sum = |terms: &[(&u32, &f32)], of: fn(usize, usize) -> usize| {
            terms.iter().map(|(row, weight)| of(**row as usize, side) as f32 * **weight).sum::<f32>()
        };
        let place =
            |terms: &[(&u32, &f32)]| [sum(terms, |row, side| row / side), sum(terms, |row, side| row % side)];
        terms.chunks_exact(N_CORNERS).map(place).collect()
    }

    #[test]
    fn corners_are_aligned_and_what_lies_between_is_even() {
        assert_eq!(resampled(3, [3, 3])[5], [1.0, 2.0]);
        assert_eq!(
            resampled(5, [3, 2]),
            [[0.0, 0.0], [0.0, 4.0], [2.0, 0.0], [2.0, 4.0], [4.0, 0.0], [4.0, 4.0]]
        );
        let fine = resampled(3, [1, 5]);
        assert_eq!(fine, [[0.0, 0.0], [0.0, 0.5], [0.0, 1.0], [0.0, 1.5], [0.0, 2.0]]);
    }

    #[test]
    fn padding_weighs_nothing() {
        let mut rows = GridRows::new(3);
        rows.extend(&[[0, 1, 1]], [2, 2]);
        rows.resize(3);
        assert_eq!(rows.weights.len(), 12);
        assert!(rows.weights[4..].iter().all(|weight| *weight == 0.0));
    }
}
