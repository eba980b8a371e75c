//! A batch of items as units that do not attend to each other, and runs of units that are computed at once.

use crate::preprocess::{EncoderInput, Features, TileRows};
use crate::spec::{CaptionedSpec, EncoderSpec, MelChunksSpec, StemSpec, TilesSpec, WaveSpec};
use triptych_core::{AdapterId, Extent};
use triptych_kernels::KernelError;

/// The smallest part of an item that no other part attends to: an image, a frame of a video, an audio window, or a text.
#[derive(Clone, Copy, Debug)]
pub(super) struct EncodeUnit<'a> {
    /// Index of its item in the batch.
    pub item: usize,
    /// Adapter of its item.
    pub adapter: Option<AdapterId>,
    /// Rows as (temporal, height, width). An audio window, a text, and an image whose rows are not its patches are
    /// `(1, 1, n_rows)`; a tiled image is (tiles down, tiles across, rows of a tile).
    pub grid: [usize; 3],
    /// Patches of an image down and across, before the stem; zeros of anything else.
    pub patches: [usize; 2],
    /// Input of the stem.
    pub values: UnitValues<'a>,
}

/// Input of a stem for one unit.
#[derive(Clone, Copy, Debug)]
pub(super) enum UnitValues<'a> {
    /// `[n_patches, patch_dim]`, `[n_mels, n_frames]` or samples.
    Floats(&'a [f32]),
    /// `[n_rows]`.
    Tokens(&'a [u32]),
    /// Patches `[n_patches, patch_dim]`, and tokens `[n_tokens]`.
    Both(&'a [f32], &'a [u32]),
}

impl<'a> UnitValues<'a> {
    /// The floats; empty for tokens.
    pub fn floats(self) -> &'a [f32] {
        match self {
            Self::Floats(values) | Self::Both(values, _) => values,
            Self::Tokens(_) => &[],
        }
    }

    /// The tokens; empty for floats.
    pub fn tokens(self) -> &'a [u32] {
        match self {
            Self::Floats(_) => &[],
            Self::Tokens(ids) | Self::Both(_, ids) => ids,
        }
    }
}

impl<'a> EncodeUnit<'a> {
    /// A unit of an item without an adapter.
    fn plain(item: usize, grid: [usize; 3], patches: [usize; 2], values: UnitValues<'a>) -> Self {
        Self { item, adapter: None, grid, patches, values }
    }

    /// Rows that the stem makes of it.
    pub fn n_rows(&self) -> usize {
        self.grid.iter().product()
    }
}

/// The units of item `item`, in order.
///
/// # Errors
/// [`KernelError::Shape`] if the input is not of this encoder's preprocessor.
pub(super) fn units<'a>(
    spec: &EncoderSpec,
    item: usize,
    input: &'a EncoderInput,
) -> Result<Vec<EncodeUnit<'a>>, KernelError> {
    match (&spec.stem, &input.features, &input.extent) {
        (StemSpec::Patches { patch, .. }, Features::Patches(values), &Extent::Grid { t, h, w }) => {
            let grid = [t as usize, h as usize, w as usize];
            check_grid(spec, grid, patch, values.len())?;
            let patches = [grid[1], grid[2]];
            Ok(vec![EncodeUnit::plain(item, grid, patches, UnitValues::Floats(values))])
        }
        (StemSpec::Patches { patch, .. }, Features::Patches(values), &Extent::Video { t, h, w, .. }) => {
            let grid = [t as usize, h as usize, w as usize];
            check_grid(spec, grid, patch, values.len())?;
            Ok(frames(item, grid, values))
        }
        (
            StemSpec::Captioned(spec),
            Features::Captioned { patches, tokens },
            &Extent::Grid { t: 1, h, w },
        ) => captioned_unit(spec, (item, input), [h as usize, w as usize], (patches, tokens))
            .map(|unit| vec![unit]),
        (
            &StemSpec::Mel { n_mels, n_frames, .. },
            Features::Mel(_) | Features::MaskedMel { .. },
            &Extent::Windows { n_windows, .. },
        ) => mel_units(spec, (item, input), [n_windows as usize, n_mels, n_frames]),
        (StemSpec::MelChunks(chunks), Features::MaskedMel { mel, n_valid }, &Extent::Windows { .. }) => {
            chunk_units(chunks, (item, input), (mel, *n_valid as usize))
        }
        (StemSpec::Tiles(tiles), Features::Patches(values), &Extent::Grid { t: 1, h, w }) => {
            let patches = [h as usize, w as usize];
            let grid = tiles_grid(tiles, patches, values.len())?;
            Ok(vec![EncodeUnit::plain(item, grid, patches, UnitValues::Floats(values))])
        }
        (StemSpec::Wave(wave), Features::Samples(samples), &Extent::Windows { n_windows, .. }) => {
            wave_units(wave, (item, input), (samples, n_windows as usize))
        }
        (&StemSpec::Tokens { max_tokens, .. }, Features::Tokens(ids), Extent::Tokens) => {
            if ids.is_empty() || ids.len() > max_tokens || ids.len() != input.n_tokens as usize {
                return Err(shape("tokens", vec![max_tokens], vec![ids.len(), input.n_tokens as usize]));
            }
            let grid = [1, 1, ids.len()];
            Ok(vec![EncodeUnit::plain(item, grid, [0; 2], UnitValues::Tokens(ids))])
        }
        (&StemSpec::PrefixedPatches { grid, .. }, Features::Tiles { patches, rows }, Extent::Grid { .. }) => {
            check_tiles(spec, grid, [patches.len(), input.n_tokens as usize], rows)?;
            let of_tile = grid[0] * grid[1] * spec.stem.patch_values();
            let grid_rows = [1, 1, spec.stem.image_rows(grid).unwrap_or(0)];
            let unit = |v| EncodeUnit::plain(item, grid_rows, grid, UnitValues::Floats(v));
            Ok(patches.chunks_exact(of_tile.max(1)).map(unit).collect())
        }
        (StemSpec::Sam(_) | StemSpec::SquareViews(_), Features::Views { patches, sides, rows }, _) => {
            checked_views(spec, (item, input), (patches, sides, rows))
        }
        (stem, Features::Patches(values), &Extent::Grid { t: 1, h, w }) => {
            let patches = [h as usize, w as usize];
            let n_rows = plane_rows(stem, patches, values.len())?;
            Ok(vec![EncodeUnit::plain(item, [1, 1, n_rows], patches, UnitValues::Floats(values))])
        }
        _ => Err(shape("features", vec![], vec![])),
    }
}

/// The unit of an image and its text.
fn captioned_unit<'a>(
    spec: &CaptionedSpec,
    (item, input): (usize, &EncoderInput),
    grid: [usize; 2],
    (patches, tokens): (&'a [f32], &'a [u32]),
) -> Result<EncodeUnit<'a>, KernelError> {
    let n_rows = captioned_rows(spec, grid, [patches.len(), tokens.len()])?;
    if n_rows != input.n_tokens as usize {
        return Err(shape("image and text", vec![input.n_tokens as usize], vec![n_rows]));
    }
    Ok(EncodeUnit::plain(item, [1, 1, n_rows], grid, UnitValues::Both(patches, tokens)))
}

/// The units of a video whose grid was checked: its frames, which do not attend to each other, so that a long video is no large
/// unit.
fn frames(item: usize, [n_frames, h, w]: [usize; 3], values: &[f32]) -> Vec<EncodeUnit<'_>> {
    let unit = |values| EncodeUnit::plain(item, [1, h, w], [h, w], UnitValues::Floats(values));
    values.chunks_exact((values.len() / n_frames.max(1)).max(1)).map(unit).collect()
}

/// The units of an audio: its windows, or the part of its only one before the silence. `dims` are windows, mel bins, frames.
fn mel_units<'a>(
    spec: &EncoderSpec,
    (item, input): (usize, &'a EncoderInput),
    dims: [usize; 3],
) -> Result<Vec<EncodeUnit<'a>>, KernelError> {
    let [n_windows, n_mels, n_frames] = dims;
    let (values, n_rows) = match &input.features {
        Features::Mel(values) => (values.as_slice(), n_frames / 2),
        Features::MaskedMel { mel, n_valid } => {
            let n_rows = n_valid.div_ceil(2) as usize;
            let is_known = n_windows == 1 && (1..=n_frames / 2).contains(&n_rows);
            if !is_known || n_rows / spec.merged_rows() != input.n_tokens as usize {
                return Err(shape("mel", dims.to_vec(), vec![n_rows, input.n_tokens as usize]));
            }
            (mel.as_slice(), n_rows)
        }
        _ => (&[][..], 0),
    };
    if n_windows.checked_mul(n_mels * n_frames) != Some(values.len()) {
        return Err(shape("mel", dims.to_vec(), vec![values.len()]));
    }
    let unit = |values| EncodeUnit::plain(item, [1, 1, n_rows], [0; 2], UnitValues::Floats(values));
    Ok(values.chunks_exact((n_mels * n_frames).max(1)).map(unit).collect())
}

/// The units of an audio in samples: its windows.
fn wave_units<'a>(
    wave: &WaveSpec,
    (item, input): (usize, &EncoderInput),
    (samples, n_windows): (&'a [f32], usize),
) -> Result<Vec<EncodeUnit<'a>>, KernelError> {
    let line = |values: &[f32]| [1, 1, wave.n_rows(values.len())];
    let unit = |v| EncodeUnit::plain(item, line(v), [0; 2], UnitValues::Floats(v));
    let units: Vec<EncodeUnit<'a>> = samples.chunks(wave.window).map(unit).collect();
    let n_units = units.len();
    let n_rows = units.iter().map(EncodeUnit::n_rows).sum::<usize>();
    let expected = [n_windows, input.n_tokens as usize];
    if [n_units, n_rows] != expected || units.iter().any(|p| p.n_rows() == 0) {
        return Err(shape("samples", expected.to_vec(), vec![n_units, n_rows]));
    }
    Ok(units)
}

/// The units of an audio in chunks of log-mel, `n_valid` frames of which are not silence: the chunks that attend to each other.
fn chunk_units<'a>(
    chunks: &MelChunksSpec,
    (item, input): (usize, &EncoderInput),
    (mel, n_valid): (&'a [f32], usize),
) -> Result<Vec<EncodeUnit<'a>>, KernelError> {
    let n_rows = chunks.n_rows(n_valid);
    if n_valid == 0 || chunks.n_values(n_valid) != Some(mel.len()) || n_rows != input.n_tokens as usize {
        return Err(shape("mel", vec![n_valid, chunks.n_mels], vec![mel.len(), input.n_tokens as usize]));
    }
    let n_frames = chunks.n_chunks * chunks.n_frames;
    let unit = |(i, values): (usize, &'a [f32])| {
        let n_rows = chunks.n_rows((n_valid - i * n_frames).min(n_frames));
        let grid = [1, 1, n_rows];
        EncodeUnit::plain(item, grid, [0; 2], UnitValues::Floats(values))
    };
    Ok(mel.chunks((n_frames * chunks.n_mels).max(1)).enumerate().map(unit).collect())
}

/// Checks a grid of patches, of frames, and the values of all.
fn check_grid(
    spec: &EncoderSpec,
    grid: [usize; 3],
    patch: &[usize; 4],
    n_values: usize,
) -> Result<(), KernelError> {
    let side = spec.merged_side();
    if !grid[1].is_multiple_of(side) || !grid[2].is_multiple_of(side) {
        return Err(shape("grid", vec![side, side], vec![grid[1], grid[2]]));
    }
    let dims = [&grid[..], &patch[..]].concat();
    match dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)) == Some(n_values) {
        true => Ok(()),
        false => Err(shape("patches", dims, vec![n_values])),
    }
}

/// Checks tiles of `n_values` values, and the `n_tokens` output rows that are taken of them.
fn check_tiles(
    spec: &EncoderSpec,
    grid: [usize; 2],
    [n_values, n_tokens]: [usize; 2],
    rows: &TileRows,
) -> Result<(), KernelError> {
    let of_tile = grid[0] * grid[1] * spec.stem.patch_values();
    let n_tiles = n_values / of_tile.max(1);
    if n_tiles * of_tile != n_values {
        return Err(shape("tiles", vec![n_tiles, of_tile], vec![n_values]));
    }
    check_rows(spec, [n_tiles * spec.image_tokens(grid).unwrap_or(0), n_tokens], rows)
}

/// Checks the `n_tokens` output rows that are taken of `n_rows` rows of tiles and of the learned rows.
fn check_rows(
    spec: &EncoderSpec,
    [n_rows, n_tokens]: [usize; 2],
    rows: &TileRows,
) -> Result<(), KernelError> {
    let n_known = n_rows + spec.extras.learned_rows.len();
    let is_known = rows.places.iter().all(|place| (*place as usize) < n_known);
    let is_weighed = rows.weights.is_empty() || rows.weights.len() == rows.places.len();
    match rows.n_rows() == n_tokens && is_known && is_weighed {
        true => Ok(()),
        false => Err(shape("rows of tiles", vec![n_known, n_tokens], vec![rows.n_rows()])),
    }
}

/// The units of an image in views, whose output rows are as many as the item's.
fn checked_views<'a>(
    spec: &EncoderSpec,
    (item, input): (usize, &EncoderInput),
    (patches, sides, rows): (&'a [f32], &[u32], &TileRows),
) -> Result<Vec<EncodeUnit<'a>>, KernelError> {
    let units = view_units(&spec.stem, item, (patches, sides))?;
    let n_rows = units.iter().filter_map(|unit| spec.image_tokens(unit.patches)).sum();
    check_rows(spec, [n_rows, input.n_tokens as usize], rows)?;
    Ok(units)
}

/// The units of an image in views, each of so many patches a side.
fn view_units<'a>(
    stem: &StemSpec,
    item: usize,
    (mut patches, sides): (&'a [f32], &[u32]),
) -> Result<Vec<EncodeUnit<'a>>, KernelError> {
    let of_patch = stem.patch_values();
    let mut units = Vec::with_capacity(sides.len());
    for side in sides {
        let grid = [*side as usize; 2];
        let n_rows = stem.image_rows(grid).ok_or_else(|| shape("view", vec![], grid.to_vec()))?;
        let n_values = grid[0] * grid[1] * of_patch;
        let Some((values, rest)) = patches.split_at_checked(n_values) else {
            return Err(shape("patches", vec![n_values], vec![patches.len()]));
        };
        patches = rest;
        let values = UnitValues::Floats(values);
        units.push(EncodeUnit { item, adapter: None, grid: [1, 1, n_rows], patches: grid, values });
    }
    match patches.is_empty() {
        true => Ok(units),
        false => Err(shape("patches", vec![], vec![patches.len()])),
    }
}

/// Tiles down and across an image of `patches`, and rows of a tile.
fn tiles_grid(tiles: &TilesSpec, patches: [usize; 2], n_values: usize) -> Result<[usize; 3], KernelError> {
    let [down, across] = patches.map(|n| n / tiles.side);
    let whole = patches.iter().all(|n| n.is_multiple_of(tiles.side));
    if !whole || !tiles.arrangements().contains(&[down, across]) {
        return Err(shape("grid", vec![tiles.side, tiles.max_tiles], patches.to_vec()));
    }
    let expected = patches.iter().chain(&tiles.patch).product::<usize>();
    match expected == n_values {
        true => Ok([down, across, tiles.tile_rows()]),
        false => Err(shape("patches", vec![expected], vec![n_values])),
    }
}

/// Rows of an image of `patches` down and across that holds `n_values`.
fn plane_rows(stem: &StemSpec, patches: [usize; 2], n_values: usize) -> Result<usize, KernelError> {
    let n_rows = stem.image_rows(patches).ok_or_else(|| shape("grid", vec![], patches.to_vec()))?;
    let patch = stem.patch_values();
    match patches.iter().try_fold(patch, |n, &d| n.checked_mul(d)) == Some(n_values) {
        true => Ok(n_rows),
        false => Err(shape("patches", vec![patches[0], patches[1], patch], vec![n_values])),
    }
}

/// Rows of an image and a text of `n_values` and `n_tokens`.
fn captioned_rows(
    spec: &CaptionedSpec,
    pixels: [usize; 2],
    [n_values, n_tokens]: [usize; 2],
) -> Result<usize, KernelError> {
    let expected = pixels.iter().try_fold(spec.tower.channels(), |n, &d| n.checked_mul(d));
    if expected != Some(n_values) {
        return Err(shape("pixels", pixels.to_vec(), vec![n_values]));
    }
    let n_rows = spec.image_rows(pixels).map_or(0, |n| n + n_tokens);
    match (1..=spec.max_rows).contains(&n_rows) {
        true => Ok(n_rows),
        false => Err(shape("image and text", vec![spec.max_rows], vec![n_rows])),
    }
}

/// The units, and units of padding up to `n`: as large as the first, without values.
pub(super) fn filled<'a>(units: &[EncodeUnit<'a>], n: usize) -> Vec<EncodeUnit<'a>> {
    let mut all = units.to_vec();
    if let Some(first) = units.first() {
        all.resize(n.max(units.len()), EncodeUnit { values: UnitValues::Floats(&[]), ..*first });
    }
    all
}

/// Splits units of `rows_of` rows into runs of at most `max_rows`; a unit that is larger makes a run of its own.
pub(super) fn runs<'p, 'a>(
    units: &'p [EncodeUnit<'a>],
    max_rows: usize,
    rows_of: impl Fn(&EncodeUnit<'a>) -> usize,
) -> Vec<&'p [EncodeUnit<'a>]> {
    let mut runs = Vec::new();
    let mut first = 0;
    let mut n_rows = 0;
    for (i, unit) in units.iter().enumerate() {
        let of_unit = rows_of(unit);
        if i > first && n_rows + of_unit > max_rows {
            runs.push(&units[first..i]);
            (first, n_rows) = (i, 0);
        }
        n_rows += of_unit;
    }
    if first < units.len() {
        runs.push(&units[first..]);
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
        let unit = |&n| EncodeUnit::plain(0, [1, 1, n], [0; 2], UnitValues::Tokens(&[]));
        let units: Vec<EncodeUnit<'_>> = sizes.iter().map(unit).collect();
        let runs: Vec<Vec<usize>> = runs(&units, 4, EncodeUnit::n_rows)
            .iter()
            .map(|r| r.iter().map(EncodeUnit::n_rows).collect())
            .collect();
        assert_eq!(runs, [vec![3], vec![3], vec![9], vec![1, 1, 1, 1], vec![4]]);
    }
}
