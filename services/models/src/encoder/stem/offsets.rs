//! Attention inside squares of rows whose scores have a bias by the offset down and one by the offset across, both products of
//! the query with a learned row.
//!
//! After `SamVisionAttention.get_decomposed_rel_pos` of
//! <https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/models/sam/modeling_sam.py>. A bias for each pair of
//! 4096 rows would be 800 MB. Here queries and keys grow by twice the side instead: a query has its bias for each line and each
//! column of the square there, a key a 1 for its line and one for its column, so that their product adds both. The products
//! with all offsets become those with lines when the rows of an axis are read as one flat row that is one value shorter a line.

use super::windows::{StagedWindows, WindowPartition};
use crate::error::ModelError;
use crate::layers::{Loader, SelfAttention};
use triptych_core::DType;
use triptych_kernels::ops::{
    Activation, AttentionShape, Indices, LinearPart, Mask, Qkv, ScoreBias, StageBuilder, Varlen, WeightView,
};
use triptych_kernels::{Backend, KernelError};

/// Zeros and ones that all layers with squares of one side share.
pub(super) struct Placements<B: Backend> {
    /// Rows on a side.
    side: usize,
    // `[head_dim + 2·side, head_dim]`: a head, then zeros.
    head: B::Linear,
    // Down, across: `[head_dim + 2·side, 2·side − 2]`, the first `side` values at the place of the axis.
    biases: [B::Linear; 2],
    // `[side², head_dim + 2·side]`: a 1 for the line and one for the column of each row of a square.
    places: B::Table,
}

/// The learned rows of a layer for squares of one side, down and across.
pub(super) struct OffsetBiases<B: Backend> {
    // `[2·side − 1, head_dim]`, the farthest offset back first, over the scale of scores.
    axes: [B::Linear; 2],
}

/// Squares in a step.
#[derive(Clone, Copy)]
pub(super) struct StagedSquares {
    windows: StagedWindows,
    /// Place in its square of each head of each row.
    places: Indices,
    /// Down, across.
    axes: [StagedAxis; 2],
}

/// Heads of rows in an order in which those along an axis follow each other.
#[derive(Clone, Copy)]
struct StagedAxis {
    order: Indices,
    /// Place in that order of each.
    back: Indices,
}

impl<B: Backend> Placements<B> {
    /// Those of squares of a side of 2 or more and heads of `head_dim`.
    ///
    /// # Errors
    /// [`KernelError`] if the back end has no room for them.
    pub fn new(backend: &B, side: usize, head_dim: usize) -> Result<Self, KernelError> {
        let width = head_dim + 2 * side;
        let ones = |[n_rows, n_columns]: [usize; 2], at: &dyn Fn(usize) -> [usize; 2], n: usize| {
            let mut values = vec![0.0; n_rows * n_columns];
            for [row, column] in (0..n).map(at) {
                values[row * n_columns + column] = 1.0;
            }
            values
        };
        let linear = |at: &dyn Fn(usize) -> [usize; 2], n_in: usize, n: usize| {
            load_exact(backend, &ones([width, n_in], at, n), [width, n_in], 1.0)
        };
        let of_axis = |first: usize| linear(&|i| [first + i, i], 2 * side - 2, side);
        let mut places = ones([side * side, width], &|i| [i, head_dim + i / side], side * side);
        for (i, row) in places.chunks_exact_mut(width).enumerate() {
            row[head_dim + side + i % side] = 1.0;
        }
        let data = bytes(&places);
        let places = WeightView { dtype: DType::F32, shape: &[side * side, width], data: &data };
        Ok(Self {
            side,
            head: linear(&|i| [i, i], head_dim, head_dim)?,
            biases: [of_axis(head_dim)?, of_axis(head_dim + side)?],
            places: backend.load_table(places, 1.0)?,
        })
    }
}

impl<B: Backend> OffsetBiases<B> {
    /// The rows under two names, `[n_stored, head_dim]` each, resampled (linear) where squares are smaller or larger.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        names: [&str; 2],
        [n_stored, side]: [usize; 2],
        shape: AttentionShape,
    ) -> Result<Self, ModelError> {
        let axis = |name| {
            let stored = loader.bare_values(name, &[n_stored, shape.head_dim])?;
            let n = 2 * side - 1;
            let rows = resampled(&stored, [n_stored, n], shape.head_dim);
            let reversed: Vec<f32> = rows.chunks_exact(shape.head_dim).rev().flatten().copied().collect();
            Ok::<_, ModelError>(load_exact(
                loader.backend(),
                &reversed,
                [n, shape.head_dim],
                1.0 / shape.scale,
            )?)
        };
        let [down, across] = names.map(axis);
        Ok(Self { axes: [down?, across?] })
    }
}

impl StagedSquares {
    /// Adds the squares of a grid, for `n_heads` heads, to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        builder: &mut StageBuilder,
        windows: WindowPartition,
        n_heads: usize,
    ) -> Result<Self, KernelError> {
        let side = windows.side;
        let [down, across] = windows.counts();
        let n_squares = down * across;
        let n = n_squares * windows.area() * n_heads;
        let head = |square: usize, [y, x]: [usize; 2], head: usize| {
            (((square * side + y) * side + x) * n_heads + head) as u32
        };
        let mut axis = |place: &dyn Fn(usize, usize) -> [usize; 2]| {
            let lines = (0..n_squares).flat_map(|square| (0..side).map(move |line| (square, line)));
            let order: Vec<u32> = lines
                .flat_map(|(square, line)| (0..n_heads).map(move |h| (square, line, h)))
                .flat_map(|(square, line, h)| (0..side).map(move |i| head(square, place(line, i), h)))
                .collect();
            let mut back = vec![0; n];
            order.iter().enumerate().for_each(|(i, from)| back[*from as usize] = i as u32);
            Ok::<_, KernelError>(StagedAxis {
                order: builder.indices(&order)?,
                back: builder.indices(&back)?,
            })
        };
        let axes = [axis(&|column, y| [y, column])?, axis(&|line, x| [line, x])?];
        let places: Vec<u32> = (0..n).map(|i| (i / n_heads % windows.area()) as u32).collect();
        Ok(Self { windows: windows.stage(builder)?, places: builder.indices(&places)?, axes })
    }
}

/// Attention of a layer inside squares.
pub(super) struct SquareAttention<'a, B: Backend> {
    /// Its projections.
    pub attention: &'a SelfAttention<B>,
    /// Its learned rows for squares of this side.
    pub biases: &'a OffsetBiases<B>,
    /// The placements for squares of this side.
    pub placements: &'a Placements<B>,
}

impl<B: Backend> SquareAttention<'_, B> {
    /// Rows of the grid `x: [n_rows, hidden]` before the output projection: `[n_rows, n_heads·head_dim]`. Rows of padding are
    /// zeros, whose keys and values are the biases of the projection.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        x: &B::Tensor,
        squares: &StagedSquares,
    ) -> Result<B::Tensor, ModelError> {
        let shape = self.attention.shape();
        let AttentionShape { n_heads, head_dim, .. } = shape;
        let cut = squares.windows.cut.apply(backend, step, x)?;
        let [q, k, v] = self.attention.project(backend, step, &cut, None)?;
        let place = |x: B::Tensor, residual: Option<&B::Tensor>| {
            let heads = backend.split_rows(x, n_heads)?;
            let placed = backend.linear(&heads, &self.placements.head, Activation::None, residual)?;
            backend.merge_rows(placed, n_heads)
        };
        let places = backend.embed(step, &self.placements.places, squares.places)?;
        let [q, k, v] = &[self.biased(backend, step, q, squares)?, place(k, Some(&places))?, place(v, None)?];
        let wide = AttentionShape { head_dim: head_dim + 2 * self.placements.side, ..shape };
        let seqs = Varlen { seqs: squares.windows.seqs, mask: Mask::Full, bias: ScoreBias::None };
        let context = backend.attention(step, Qkv { q, k, v }, wide, seqs)?;
        let heads = backend.columns(&backend.split_rows(context, n_heads)?, 0, head_dim)?;
        let context = backend.merge_rows(heads, n_heads)?;
        Ok(backend.gather_rows(step, &context, squares.windows.back)?)
    }

    /// Queries `[n_rows, n_heads·head_dim]`, each head with its biases behind it.
    fn biased(
        &self,
        backend: &B,
        step: &B::Step,
        q: B::Tensor,
        squares: &StagedSquares,
    ) -> Result<B::Tensor, ModelError> {
        let (n_heads, side) = (self.attention.shape().n_heads, self.placements.side);
        let q = backend.split_rows(q, n_heads)?;
        let mut placed = backend.linear(&q, &self.placements.head, Activation::None, None)?;
        let axes = self.biases.axes.iter().zip(&self.placements.biases).zip(squares.axes);
        for ((offsets, biases), StagedAxis { order, back }) in axes {
            let along = backend.gather_rows(step, &q, order)?;
            // `[.., 2·side − 1]`: of row `i` the bias of line `j` is value `side − 1 − i + j`.
            let all = backend.linear(&along, offsets, Activation::None, None)?;
            let flat = backend.merge_rows(all, side)?;
            let flat = backend.columns(&flat, side - 1, side * (2 * side - 2))?;
            let lines = backend.gather_rows(step, &backend.split_rows(flat, side)?, back)?;
            placed = backend.linear(&lines, biases, Activation::None, Some(&placed))?;
        }
        Ok(backend.merge_rows(placed, n_heads)?)
    }
}

/// A matrix `[out, in]` times a factor, in as many bits as activations have: it is part of scores.
fn load_exact<B: Backend>(
    backend: &B,
    values: &[f32],
    shape: [usize; 2],
    scale: f32,
) -> Result<B::Linear, KernelError> {
    let data = bytes(values);
    let weight = WeightView { dtype: DType::F32, shape: &shape, data: &data };
    backend.load_router(LinearPart { weight, bias: None, scale })
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Rows `[from, width]` as `[to, width]`: linear, corners not aligned, as torch's `interpolate`.
fn resampled(rows: &[f32], [from, to]: [usize; 2], width: usize) -> Vec<f32> {
    let scale = from as f32 / to as f32;
    let row = |i: usize| &rows[i.min(from - 1) * width..][..width];
    let at = |i: usize| {
        let place = ((i as f32 + 0.5) * scale - 0.5).max(0.0);
        let first = place as usize;
        let weight = place - first as f32;
        row(first).iter().zip(row(first + 1)).map(move |(a, b)| (1.0 - weight) * a + weight * b)
    };
    (0..to).flat_map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_keep_their_values_at_their_own_number_and_are_means_at_half_of_it() {
        let rows = [0.0, 10.0, 1.0, 11.0, 2.0, 12.0, 3.0, 13.0];
        assert_eq!(resampled(&rows, [4, 4], 2), rows);
        assert_eq!(resampled(&rows, [4, 2], 2), [0.5, 10.5, 2.5, 12.5]);
    }
}
