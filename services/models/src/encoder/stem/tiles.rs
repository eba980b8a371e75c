//! Patches of tiles as rows, with a class row before those of each tile, and filling.

use super::input::{StemInput, patch_rows};
use crate::encoder::tiles::{TileRows, images};
use crate::encoder::units::EncodeUnit;
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader};
use crate::spec::{NormSpec, TilesSpec};
use triptych_core::DType;
use triptych_kernels::ops::{Activation, Indices, StageBuilder, WeightView};
use triptych_kernels::{Backend, KernelError};

/// The stem of [`StemSpec::Tiles`](crate::spec::StemSpec::Tiles).
pub(crate) struct TileStem<B: Backend> {
    tiles: TilesSpec,
    hidden: usize,
    patches: B::Linear,
    embeddings: TileEmbeddings<B>,
    norm: B::Norm,
}

/// Position embeddings, multiplied by their gates.
struct TileEmbeddings<B: Backend> {
    /// Before the stack: a row for each tile of each arrangement, from 1, for patches; then one for class rows.
    before: B::Table,
    /// A row for each row of a tile, `[tile_rows, hidden]`.
    places: B::Table,
    /// A row for each row of each tile of each arrangement, from 1.
    tile_places: B::Table,
}

/// Row indices of a run in a step; the fields are those of [`TileRows`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct StagedTiles {
    n_rows: usize,
    placed: Indices,
    patches: Indices,
    before: Indices,
    places: Indices,
    tile_places: Indices,
}

impl<B: Backend> TileStem<B> {
    /// Loads the projection of patches, `name`, embeddings and norm.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        name: &str,
        (tiles, hidden): (&TilesSpec, usize),
    ) -> Result<Self, ModelError> {
        let [channels, height, width] = tiles.patch;
        let shape = [hidden, channels, height, width];
        Ok(Self {
            patches: loader.linear(&[LinearShape { name, shape: &shape, bias: false }])?,
            embeddings: TileEmbeddings::load(loader, tiles, hidden)?,
            norm: loader.norm(tiles.names.norms[0], NormSpec::layer(tiles.norm_eps), hidden)?,
            tiles: tiles.clone(),
            hidden,
        })
    }

    /// Adds the places of rows to a step.
    ///
    /// # Errors
    /// [`KernelError`] if the step has no room for them.
    pub fn stage(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<StagedTiles, KernelError> {
        StagedTiles::of(builder, &TileRows::of(&self.tiles, &images(&self.tiles, units)))
    }

    /// The same of so many images in a captured forward.
    ///
    /// # Errors
    /// As [`Self::stage`].
    pub fn stage_in(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
        n_images: usize,
    ) -> Result<StagedTiles, KernelError> {
        StagedTiles::of(builder, &TileRows::padded(&self.tiles, &images(&self.tiles, units), n_images))
    }

    /// Patches of units, and zeros for tiles that images do not have, in a captured forward of so many: values, and
    /// `(n_patches, patch_values)`.
    pub fn features(&self, units: &[EncodeUnit<'_>], n_images: usize) -> (Vec<f32>, (usize, usize)) {
        let n_patches = self.tiles.max_tiles * self.tiles.side * self.tiles.side;
        let of_image = n_patches * self.patch_values();
        let mut values = Vec::with_capacity(n_images * of_image);
        for (i, unit) in units.iter().enumerate() {
            values.extend_from_slice(unit.values.floats());
            values.resize((i + 1) * of_image, 0.0);
        }
        (values, (n_images * n_patches, self.patch_values()))
    }

    /// Rows of all images, each its tiles, then filling: `[n_rows, hidden]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if a back end refuses the shapes.
    pub fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        input: StemInput<'_, B>,
        rows: StagedTiles,
    ) -> Result<B::Tensor, ModelError> {
        let patches = patch_rows(backend, input, self.patch_values())?;
        let patches = backend.linear(&patches, &self.patches, Activation::None, None)?;
        let zeros = |n: usize| backend.zeros(n, self.hidden);
        // Rows of tiles first; filling rows stay zero.
        let mut x = zeros(rows.placed.len())?;
        backend.scatter_rows(step, &mut x, rows.patches, &patches)?;
        let tables = [&self.embeddings.before, &self.embeddings.places, &self.embeddings.tile_places];
        for (table, ids) in tables.into_iter().zip([rows.before, rows.places, rows.tile_places]) {
            backend.add(&mut x, &backend.embed(step, table, ids)?)?;
        }
        let normed = backend.norm(&x, &self.norm)?;
        let mut x = zeros(rows.n_rows)?;
        backend.scatter_rows(step, &mut x, rows.placed, &normed)?;
        Ok(x)
    }

    /// Values of a patch.
    fn patch_values(&self) -> usize {
        self.tiles.patch.iter().product()
    }
}

impl StagedTiles {
    fn of(builder: &mut StageBuilder, rows: &TileRows) -> Result<Self, KernelError> {
        Ok(Self {
            n_rows: rows.n_rows,
            placed: builder.indices(&rows.placed)?,
            patches: builder.indices(&rows.patches)?,
            before: builder.indices(&rows.before)?,
            places: builder.indices(&rows.places)?,
            tile_places: builder.indices(&rows.tile_places)?,
        })
    }
}

impl<B: Backend> TileEmbeddings<B> {
    fn load(loader: &Loader<'_, B>, tiles: &TilesSpec, hidden: usize) -> Result<Self, ModelError> {
        let names = tiles.names;
        let n_ids = tiles.arrangements().len() + 1;
        let n_tiles = tiles.max_tiles;
        let n_rows = tiles.tile_rows();
        let gate = loader.gate(names.position_gate)?;
        let mut before = gated_tiles(loader, tiles, (0, hidden))?;
        before.extend(loader.bare_values(names.class, &[hidden])?);
        let places = loader.bare_values(names.positions, &[n_rows, hidden])?;
        let places = places.iter().map(|v| v * (1.0 - gate)).collect();
        let tile_dims = [n_ids, n_tiles * n_rows * hidden];
        let table = |values: Vec<f32>| table_of(loader.backend(), &values, hidden);
        Ok(Self {
            before: table(before)?,
            places: table(places)?,
            tile_places: loader.rows_table(names.tile_positions, tile_dims, hidden, gate)?,
        })
    }
}

/// Embeddings of the tiles of each arrangement, before the stack or after it, times their gate: `[n_arrangements · n_tiles, hidden]`.
pub(in crate::encoder) fn gated_tiles<B: Backend>(
    loader: &Loader<'_, B>,
    tiles: &TilesSpec,
    (place, hidden): (usize, usize),
) -> Result<Vec<f32>, ModelError> {
    let n_ids = tiles.arrangements().len() + 1;
    let factor = loader.gate(tiles.names.tile_gates[place])?;
    let table = loader.bare_values(tiles.names.tiles[place], &[n_ids, tiles.max_tiles * hidden])?;
    Ok(table.iter().map(|v| v * factor).collect())
}

/// A table of computed rows, `[n, hidden]`.
pub(in crate::encoder) fn table_of<B: Backend>(
    backend: &B,
    values: &[f32],
    hidden: usize,
) -> Result<B::Table, ModelError> {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let shape = [values.len() / hidden, hidden];
    Ok(backend.load_table(WeightView { dtype: DType::F32, shape: &shape, data: &bytes }, 1.0)?)
}
