//! Relative position biases of image patches, laid out as attention reads them.
//!
//! A stored table has an entry for each offset; attention adds a number for each pair of rows. The pairs are laid out
//! once: for 577 rows and 12 heads that is 16 MB a layer, and a lookup in each forward would cost a tenth of the
//! layer. After `BeitRelativePositionBias` of
//! <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/beit/modeling_beit.py> and
//! `SwinSelfAttention` of `swin/modeling_swin.py` beside it.

use crate::error::ModelError;
use crate::layers::Loader;
use crate::spec::{PositionBiasSpec, PositionBiasTable};
use std::sync::Arc;
use triptych_kernels::Backend;
use triptych_kernels::ops::StoredBias;

/// Entries beside those of offsets: learned row to patch, patch to learned row, learned row to itself.
const LEARNED: usize = 3;

/// Entries of a table over offsets in a grid of `[down, across]` patches.
pub(super) fn n_offsets([down, across]: [usize; 2]) -> usize {
    (2 * down).saturating_sub(1) * (2 * across).saturating_sub(1)
}

/// The entry for the offset from patch `to` to patch `from`, both counted row by row.
pub(super) fn offset([down, across]: [usize; 2], from: usize, to: usize) -> usize {
    let y = from / across + down - 1 - to / across;
    let x = from % across + across - 1 - to % across;
    y * (2 * across - 1) + x
}

/// The bias of a layer, one table `[n_heads, n, n]`, with `n` patches and the learned row before them. `shared` is that of an
/// earlier layer.
///
/// # Errors
/// [`ModelError`] for a table that is missing or has another shape.
pub(super) fn load<B: Backend>(
    top: &Loader<'_, B>,
    layer: &Loader<'_, B>,
    spec: &PositionBiasSpec,
    n_heads: usize,
    shared: Option<&Arc<B::Bias>>,
) -> Result<Arc<B::Bias>, ModelError> {
    let shape = [n_offsets(spec.grid) + LEARNED, n_heads];
    let table = match (spec.table, shared) {
        (PositionBiasTable::Shared(_), Some(bias)) => return Ok(bias.clone()),
        (PositionBiasTable::Shared(name), None) => top.bare_values(name, &shape)?,
        (PositionBiasTable::PerLayer(name), _) => layer.bare_values(name, &shape)?,
    };
    let n = spec.grid[0] * spec.grid[1] + 1;
    let values = with_learned_row(&table, spec.grid, n_heads);
    let bias = StoredBias::Tables { values, dims: [1, n_heads, n, n] };
    Ok(Arc::new(top.backend().load_bias(bias)?))
}

fn with_learned_row(table: &[f32], grid: [usize; 2], n_heads: usize) -> Vec<f32> {
    let n = grid[0] * grid[1] + 1;
    let learned = n_offsets(grid);
    let entry = |row: usize, column: usize| match (row.checked_sub(1), column.checked_sub(1)) {
        (Some(from), Some(to)) => offset(grid, from, to),
        (None, Some(_)) => learned,
        (Some(_), None) => learned + 1,
        (None, None) => learned + 2,
    };
    let entries: Vec<usize> = (0..n * n).map(|i| entry(i / n, i % n)).collect();
    (0..n_heads).flat_map(|head| entries.iter().map(move |e| table[e * n_heads + head])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_counts_down_first_and_from_the_far_corner() {
        // Two down, three across: patches 0 1 2 over 3 4 5, offsets three by five.
        assert_eq!(n_offsets([2, 3]), 15);
        let check = |from, to, expect| assert_eq!(offset([2, 3], from, to), expect, "{from} to {to}");
        check(0, 0, 7);
        check(0, 5, 0);
        check(5, 0, 14);
        check(2, 0, 9);
        check(3, 0, 12);
    }

    #[test]
    fn the_learned_row_has_entries_of_its_own() {
        // One patch: its offset to itself is entry 0; two heads.
        let table: Vec<f32> = (0..8).map(|i| i as f32).collect();
        assert_eq!(with_learned_row(&table, [1, 1], 2), [6.0, 2.0, 4.0, 0.0, 7.0, 3.0, 5.0, 1.0]);
    }
}
