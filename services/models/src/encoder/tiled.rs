//! The encoder of images that are cut into tiles: two stacks, and output rows that join the rows of several layers.
//!
//! After <https://github.com/huggingface/transformers/blob/v4.57.0/src/transformers/models/mllama/modeling_mllama.py>
//! (`MllamaVisionModel`). Every image is computed with the full number of tiles, and each tile is filled up with rows:
//! real rows attend to all of them, filling rows to real rows only. So the filling is not padding that could be left out,
//! and it does not depend on the other items of the batch.

mod layer;
mod rows;

use super::graphs::{
    EncoderGraphConfig, EncoderGraphs, GraphEncoder, GraphShape, GraphUnits, UnitSize, append, by_item,
};
use super::units::{EncodeUnit, units};
use super::{Encoder, shares};
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader, StoredLinear};
use crate::preprocess::EncoderInput;
use crate::spec::{EncoderSpec, NormSpec, StemSpec, TilesSpec};
use crate::weights::Weights;
use layer::{StagedTileSequences, TileSequences, TiledLayer};
use rows::{StagedTileRows, TileRows, TiledImage};
use triptych_core::DType;
use triptych_core::graph_stats::GraphStats;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, CapturedForward, ForwardInputs, StageBuilder, WeightView};

/// Rows computed at once, as in the other encoder.
const RUN_ROWS: usize = 8192;

/// An encoder of tiles over any back end.
pub struct TiledEncoder<B: Backend> {
    // Dropped before the weights that they name.
    graphs: EncoderGraphs,
    backend: B,
    spec: EncoderSpec,
    tiles: TilesSpec,
    patches: B::Linear,
    embeddings: TileEmbeddings<B>,
    norms: [B::Norm; 2],
    local: Vec<TiledLayer<B>>,
    global: Vec<TiledLayer<B>>,
    // For the last layer's rows, then for those of each tap.
    projections: Vec<B::Linear>,
}

/// Arrays of a run in a step.
#[derive(Clone, Copy)]
struct StagedTiles {
    sequences: StagedTileSequences,
    rows: StagedTileRows,
}

/// Position embeddings, multiplied by their gates.
struct TileEmbeddings<B: Backend> {
    /// Before the stack: a row for each tile of each arrangement, from 1, for patches; then one for class rows.
    before: B::Table,
    /// A row for each row of a tile, `[tile_rows, hidden]`.
    places: B::Table,
    /// A row for each row of each tile of each arrangement, from 1.
    tile_places: B::Table,
    /// After the stack: a row for each tile of each arrangement, from 1.
    after: B::Table,
}

impl<B: Backend> TiledEncoder<B> {
    /// Loads the encoder's tensors, and no others.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape, or a spec without tiles.
    pub fn load(spec: &EncoderSpec, weights: &Weights, backend: &B) -> Result<Self, ModelError> {
        let StemSpec::Tiles(tiles) = &spec.stem else {
            return Err(ModelError::missing_key("config.json", "vision_config", "an encoder of tiles"));
        };
        let loader = Loader::new(backend, weights, spec.names.prefixes);
        let hidden = spec.stack.hidden;
        let [channels, height, width] = tiles.patch;
        let name = spec.names.stem.first().copied().unwrap_or_default();
        let shape = [hidden, channels, height, width];
        let norm = |name| loader.norm(name, NormSpec::layer(tiles.norm_eps), hidden);
        let [norm_before, norm_after] = tiles.names.norms;
        let local = |i| TiledLayer::load(&loader.layer(spec.names.stack.layers, i), spec, None);
        let gates = tiles.names.global_gates;
        let global = |i| TiledLayer::load(&loader.layer(tiles.names.global_layers, i), spec, Some(gates));
        Ok(Self {
            graphs: EncoderGraphs::default(),
            patches: loader.linear(&[LinearShape { name, shape: &shape, bias: false }])?,
            embeddings: TileEmbeddings::load(&loader, tiles, hidden)?,
            norms: [norm(norm_before)?, norm(norm_after)?],
            local: (0..spec.stack.n_layers).map(local).collect::<Result<_, _>>()?,
            global: (0..tiles.n_global_layers).map(global).collect::<Result<_, _>>()?,
            projections: projections(&Loader::new(backend, weights, tiles.names.projection), tiles, hidden)?,
            tiles: tiles.clone(),
            spec: spec.clone(),
            backend: backend.clone(),
        })
    }

    /// Output rows of the images of one run, concatenated: `[n_rows, hidden]`. A part is a layer of either stack with what
    /// precedes it; the last part also has what follows.
    fn run(&self, run: &[EncodeUnit<'_>], before: &mut dyn FnMut(usize)) -> Result<Vec<f32>, ModelError> {
        let backend = &self.backend;
        let n_tokens = run.iter().map(EncodeUnit::n_rows).sum();
        let mut parts = shares(n_tokens, self.local.len() + self.global.len());
        let mut part = || parts.next().map_or((), &mut *before);
        part();
        let rows = TileRows::of(&self.tiles, &self.images(run));
        let mut builder = StageBuilder::new();
        let staged = StagedTiles {
            sequences: TileSequences::of(&rows).stage(&mut builder)?,
            rows: rows.stage(&mut builder)?,
        };
        let step = &backend.stage(builder)?;
        let values: Vec<f32> = run.iter().flat_map(|unit| unit.values.floats()).copied().collect();
        let patches = backend.upload(values, staged.rows.patches.len(), self.patch_values())?;
        Ok(backend.take_values(self.forward(backend, step, (&patches, staged), &mut part)?)?)
    }

    /// Output rows from patches `[n_patches, patch_values]`. `part` is called before every layer but the first.
    fn forward(
        &self,
        backend: &B,
        step: &B::Step,
        (patches, staged): (&B::Tensor, StagedTiles),
        part: &mut dyn FnMut(),
    ) -> Result<B::Tensor, ModelError> {
        let StagedTiles { sequences, rows } = staged;
        let mut x = self.stem(backend, step, patches, &rows)?;
        let mut taps = vec![None; self.tiles.taps.len()];
        for (i, layer) in self.local.iter().enumerate() {
            if i > 0 {
                part();
            }
            x = layer.forward(backend, step, &x, sequences)?;
            for (tap, _) in taps.iter_mut().zip(&self.tiles.taps).filter(|(_, tapped)| **tapped == i) {
                *tap = Some(backend.gather_rows(step, &x, rows.output)?);
            }
        }
        x = backend.norm(&x, &self.norms[1])?;
        backend.add(&mut x, &backend.embed(step, &self.embeddings.after, rows.after)?)?;
        for layer in &self.global {
            part();
            x = layer.forward(backend, step, &x, sequences)?;
        }
        let last = Some(backend.gather_rows(step, &x, rows.output)?);
        let mut projected: Option<B::Tensor> = None;
        for (part, projection) in std::iter::once(&last).chain(&taps).zip(&self.projections) {
            if let Some(part) = part {
                projected = Some(backend.linear(part, projection, Activation::None, projected.as_ref())?);
            }
        }
        match projected {
            Some(rows) => Ok(rows),
            None => Ok(backend.zeros(0, self.tiles.out)?),
        }
    }

    /// Input rows of the first layer, all images: patches, classes, filling; `[n_rows, hidden]`.
    fn stem(
        &self,
        backend: &B,
        step: &B::Step,
        patches: &B::Tensor,
        rows: &StagedTileRows,
    ) -> Result<B::Tensor, ModelError> {
        let hidden = self.spec.stack.hidden;
        let patches = backend.linear(patches, &self.patches, Activation::None, None)?;
        let zeros = |n: usize| backend.zeros(n, hidden);
        // Rows of tiles first; filling rows stay zero.
        let mut x = zeros(rows.placed.len())?;
        backend.scatter_rows(step, &mut x, rows.patches, &patches)?;
        let tables = [&self.embeddings.before, &self.embeddings.places, &self.embeddings.tile_places];
        for (table, ids) in tables.into_iter().zip([rows.before, rows.places, rows.tile_places]) {
            backend.add(&mut x, &backend.embed(step, table, ids)?)?;
        }
        let normed = backend.norm(&x, &self.norms[0])?;
        let mut x = zeros(rows.n_rows)?;
        backend.scatter_rows(step, &mut x, rows.placed, &normed)?;
        Ok(x)
    }

    fn images(&self, units: &[EncodeUnit<'_>]) -> Vec<TiledImage> {
        units.iter().map(|unit| TiledImage::of(&self.tiles, unit)).collect()
    }

    /// Values of a patch.
    fn patch_values(&self) -> usize {
        self.tiles.patch.iter().product()
    }

    /// Output rows of an image with all tiles.
    fn whole_rows(&self) -> usize {
        self.tiles.max_tiles * self.tiles.tile_rows()
    }

    /// Inputs of a captured forward and the arrays in them.
    fn staged_in(
        &self,
        shape: GraphShape,
        units: &[EncodeUnit<'_>],
    ) -> Result<(ForwardInputs, StagedTiles), ModelError> {
        let rows = TileRows::padded(&self.tiles, &self.images(units), shape.max_units);
        let mut arrays = StageBuilder::new();
        let sequences = TileSequences::padded(&rows, self.whole_rows()).stage(&mut arrays)?;
        let staged = StagedTiles { sequences, rows: rows.stage(&mut arrays)? };
        let of_image = self.tiles.max_tiles * self.tiles.side * self.tiles.side * self.patch_values();
        let mut features = Vec::with_capacity(shape.max_units * of_image);
        for (i, unit) in units.iter().enumerate() {
            features.extend_from_slice(unit.values.floats());
            // Tiles that the image does not have.
            features.resize((i + 1) * of_image, 0.0);
        }
        features.resize(shape.max_units * of_image, 0.0);
        let dims = (staged.rows.patches.len(), self.patch_values());
        Ok((ForwardInputs { arrays, features, dims }, staged))
    }
}

impl<B: Backend> GraphEncoder for TiledEncoder<B> {
    fn size(&self, unit: &EncodeUnit<'_>) -> UnitSize {
        // An image with few tiles costs as much as one with all.
        UnitSize { n_tokens: self.whole_rows(), n_seqs: 1, n_rows: unit.n_rows() }
    }

    fn eager(&self, units: &[EncodeUnit<'_>], before: &mut dyn FnMut(usize)) -> Result<Vec<f32>, ModelError> {
        let mut rows = Vec::new();
        for run in units.chunks((RUN_ROWS / self.whole_rows().max(1)).max(1)) {
            append(&mut rows, self.run(run, before)?);
        }
        Ok(rows)
    }

    fn inputs(&self, shape: GraphShape, units: &[EncodeUnit<'_>]) -> Result<ForwardInputs, ModelError> {
        Ok(self.staged_in(shape, units)?.0)
    }

    fn capture(
        &self,
        shape: GraphShape,
        units: &[EncodeUnit<'_>],
    ) -> Result<Box<dyn CapturedForward>, ModelError> {
        let (inputs, staged) = self.staged_in(shape, units)?;
        let graph = self.backend.capture(inputs, &mut |backend, step, patches| {
            self.forward(backend, step, (patches, staged), &mut || ())
        })?;
        Ok(graph)
    }

    fn width(&self) -> usize {
        self.tiles.out
    }
}

impl<B: Backend> Encoder for TiledEncoder<B> {
    fn hidden(&self) -> usize {
        self.tiles.out
    }

    fn use_graphs(&mut self, config: &EncoderGraphConfig) {
        if self.backend.captures() {
            let units = GraphUnits::Fixed(self.whole_rows().max(1));
            self.graphs = EncoderGraphs::new(config, units, RUN_ROWS);
        }
    }

    fn graph_stats(&self) -> GraphStats {
        self.graphs.stats()
    }

    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let mut all = Vec::new();
        for (i, input) in batch.iter().enumerate() {
            all.extend(units(&self.spec, i, input)?);
        }
        let mut graphs = std::mem::take(&mut self.graphs);
        let rows = graphs.encode(&*self, &all, before);
        self.graphs = graphs;
        Ok(by_item(&all, rows?, batch.len()))
    }
}

impl<B: Backend> TileEmbeddings<B> {
    fn load(loader: &Loader<'_, B>, tiles: &TilesSpec, hidden: usize) -> Result<Self, ModelError> {
        let names = tiles.names;
        let n_ids = tiles.arrangements().len() + 1;
        let n_tiles = tiles.max_tiles;
        let n_rows = tiles.tile_rows();
        let gate = loader.gate(names.position_gate)?;
        let gated_tiles = |i: usize| -> Result<Vec<f32>, ModelError> {
            let factor = loader.gate(names.tile_gates[i])?;
            let table = loader.bare_values(names.tiles[i], &[n_ids, n_tiles * hidden])?;
            Ok(table.iter().map(|v| v * factor).collect())
        };
        let mut before = gated_tiles(0)?;
        before.extend(loader.bare_values(names.class, &[hidden])?);
        let places = loader.bare_values(names.positions, &[n_rows, hidden])?;
        let places = places.iter().map(|v| v * (1.0 - gate)).collect();
        let tile_dims = [n_ids, n_tiles * n_rows * hidden];
        let table = |values: Vec<f32>| -> Result<B::Table, ModelError> {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let shape = [values.len() / hidden, hidden];
            let view = WeightView { dtype: DType::F32, shape: &shape, data: &bytes };
            Ok(loader.backend().load_table(view, 1.0)?)
        };
        Ok(Self {
            before: table(before)?,
            places: table(places)?,
            tile_places: loader.rows_table(names.tile_positions, tile_dims, hidden, gate)?,
            after: table(gated_tiles(1)?)?,
        })
    }
}

/// The projection of joined rows, split into one for each part; their results are added. The last layer's comes first,
/// then each tap's. In the stored matrix the columns of the taps are interleaved.
fn projections<B: Backend>(
    loader: &Loader<'_, B>,
    tiles: &TilesSpec,
    hidden: usize,
) -> Result<Vec<B::Linear>, ModelError> {
    let n_taps = tiles.taps.len();
    let shape = [tiles.out, hidden * (1 + n_taps)];
    let whole = loader.stored(&LinearShape { name: "", shape: &shape, bias: true })?;
    let columns = |first, step| whole.inputs((first..).step_by(step).take(hidden));
    let last: StoredLinear<'_> = columns(0, 1);
    let taps = (0..n_taps).map(|tap| columns(hidden + tap, n_taps).without_bias());
    std::iter::once(last).chain(taps).map(|part| loader.pack(&[part])).collect()
}
