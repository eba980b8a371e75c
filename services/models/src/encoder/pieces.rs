//! A batch of items as pieces that can be computed apart, and runs of pieces that fit in memory together.

use crate::preprocess::{EncoderInput, Features};
use crate::spec::{EncoderSpec, StemSpec};
use triptych_core::Extent;
use triptych_kernels::KernelError;

/// The least part of an item that no other part attends to: an image, a window of sound, or a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Piece<'a> {
    /// Which item of the batch.
    pub item: usize,
    /// Rows as (temporal, height, width); a window of sound or a text is a line of `(1, 1, n_rows)`, an image of tiles
    /// (tiles down, tiles across, rows of a tile).
    pub grid: [usize; 3],
    /// Input of the stem.
    pub values: Values<'a>,
}

/// What a stem reads of a piece.
#[derive(Clone, Copy, Debug)]
pub(super) enum Values<'a> {
    /// `[n_patches, patch_dim]`, `[n_mels, n_frames]` or samples.
    Floats(&'a [f32]),
    /// `[n_rows]`.
    Tokens(&'a [u32]),
}

impl<'a> Values<'a> {
    /// The numbers; none for tokens.
    pub fn floats(self) -> &'a [f32] {
        match self {
            Self::Floats(values) => values,
            Self::Tokens(_) => &[],
        }
    }

    /// The tokens; none for numbers.
    pub fn tokens(self) -> &'a [u32] {
        match self {
            Self::Floats(_) => &[],
            Self::Tokens(ids) => ids,
        }
    }
}

impl Piece<'_> {
    /// Rows the stem makes of it.
    pub fn n_rows(&self) -> usize {
        self.grid.iter().product()
    }
}

/// The pieces of item `item`, in order.
///
/// # Errors
/// [`KernelError::Shape`] if the input is not of this encoder's preprocessor.
pub(super) fn pieces<'a>(
    spec: &EncoderSpec,
    item: usize,
    input: &'a EncoderInput,
) -> Result<Vec<Piece<'a>>, KernelError> {
    match (&spec.stem, &input.features, &input.extent) {
        (StemSpec::Patches { patch }, Features::Patches(values), &Extent::Grid { t, h, w }) => {
            let grid = [t as usize, h as usize, w as usize];
            let side = spec.merger.as_ref().map_or(1, |m| m.side);
            if !grid[1].is_multiple_of(side) || !grid[2].is_multiple_of(side) {
                return Err(shape("grid", vec![side, side], vec![grid[1], grid[2]]));
            }
            let n_values = grid.iter().chain(patch).try_fold(1usize, |n, &d| n.checked_mul(d));
            if n_values != Some(values.len()) {
                return Err(shape(
                    "patches",
                    grid.iter().chain(patch).copied().collect(),
                    vec![values.len()],
                ));
            }
            Ok(vec![Piece { item, grid, values: Values::Floats(values) }])
        }
        (&StemSpec::Mel { n_mels, n_frames }, Features::Mel(values), &Extent::Windows { n_windows, .. }) => {
            let n_windows = n_windows as usize;
            if n_windows.checked_mul(n_mels * n_frames) != Some(values.len()) {
                return Err(shape("mel", vec![n_windows, n_mels, n_frames], vec![values.len()]));
            }
            let windows = values.chunks_exact(n_mels * n_frames);
            let piece = |values| Piece { item, grid: [1, 1, n_frames / 2], values: Values::Floats(values) };
            Ok(windows.map(piece).collect())
        }
        (StemSpec::Tiles(tiles), Features::Patches(values), &Extent::Grid { t: 1, h, w }) => {
            let [h, w] = [h as usize, w as usize];
            let down_across = [h / tiles.side, w / tiles.side];
            let whole = h.is_multiple_of(tiles.side) && w.is_multiple_of(tiles.side);
            if !whole || !tiles.arrangements().contains(&down_across) {
                return Err(shape("grid", vec![tiles.side, tiles.max_tiles], vec![h, w]));
            }
            let n_values = h * w * tiles.patch.iter().product::<usize>();
            if n_values != values.len() {
                return Err(shape("patches", vec![n_values], vec![values.len()]));
            }
            let [down, across] = down_across;
            Ok(vec![Piece { item, grid: [down, across, tiles.tile_rows()], values: Values::Floats(values) }])
        }
        (StemSpec::Wave(wave), Features::Samples(samples), &Extent::Windows { n_windows, .. }) => {
            let windows = samples.chunks(wave.window);
            let line = |values: &[f32]| [1, 1, wave.n_rows(values.len())];
            let pieces: Vec<Piece<'a>> =
                windows.map(|v| Piece { item, grid: line(v), values: Values::Floats(v) }).collect();
            let n_rows: usize = pieces.iter().map(Piece::n_rows).sum();
            if pieces.len() != n_windows as usize
                || n_rows != input.n_tokens as usize
                || pieces.iter().any(|p| p.n_rows() == 0)
            {
                let expected = vec![n_windows as usize, input.n_tokens as usize];
                return Err(shape("samples", expected, vec![pieces.len(), n_rows]));
            }
            Ok(pieces)
        }
        (&StemSpec::Tokens { max_tokens, .. }, Features::Tokens(ids), Extent::Tokens) => {
            if ids.is_empty() || ids.len() > max_tokens || ids.len() != input.n_tokens as usize {
                return Err(shape("tokens", vec![max_tokens], vec![ids.len(), input.n_tokens as usize]));
            }
            Ok(vec![Piece { item, grid: [1, 1, ids.len()], values: Values::Tokens(ids) }])
        }
        _ => Err(shape("features", vec![], vec![])),
    }
}

/// Splits pieces into runs of at most `max_rows` rows; a piece that is larger makes a run of its own.
pub(super) fn runs<'p, 'a>(pieces: &'p [Piece<'a>], max_rows: usize) -> Vec<&'p [Piece<'a>]> {
    let mut runs = Vec::new();
    let (mut first, mut n_rows) = (0, 0);
    for (i, piece) in pieces.iter().enumerate() {
        if i > first && n_rows + piece.n_rows() > max_rows {
            runs.push(&pieces[first..i]);
            (first, n_rows) = (i, 0);
        }
        n_rows += piece.n_rows();
    }
    if first < pieces.len() {
        runs.push(&pieces[first..]);
    }
    runs
}

fn shape(what: &'static str, expected: Vec<usize>, actual: Vec<usize>) -> KernelError {
    KernelError::Shape { op: "encode", what, expected, actual }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_hold_every_piece_once_and_stay_under_the_limit() {
        let sizes = [3, 3, 9, 1, 1, 1, 1, 4];
        let pieces: Vec<Piece<'_>> =
            sizes.iter().map(|&n| Piece { item: 0, grid: [1, 1, n], values: Values::Tokens(&[]) }).collect();
        let runs: Vec<Vec<usize>> =
            runs(&pieces, 4).iter().map(|r| r.iter().map(Piece::n_rows).collect()).collect();
        assert_eq!(runs, [vec![3], vec![3], vec![9], vec![1, 1, 1, 1], vec![4]]);
    }
}
