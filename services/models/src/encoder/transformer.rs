//! The encoder of every family: stem, positions, transformer layers, merger, all by its spec.
//!
//! One file over 600 lines: eager runs, parts and graphs go through the same layers, which stand beside them.

use super::adapters::AdaptedRows;
use super::added::{AddedRows, StagedAdded};
use super::graphs::{EncoderGraphConfig, EncoderGraphs, GraphEncoder, GraphShape, GraphUnits, UnitSize};
use super::layout::{Room, RowLayout, SeqRoom, StagedLayout};
use super::pool;
use super::position_bias;
use super::projector::{Levels, Projector, StagedGate};
use super::reduction::{Reduction, StagedReduction};
use super::second_stack::SecondStack;
use super::stem::{StagedStem, Stem, StemInput};
use super::tiles::{StagedTileSequences, TileRows, TileSequences, images};
use super::units::{EncodeUnit, filled, runs, units};
use super::{Encoder, shares};
use crate::error::ModelError;
use crate::layers::{
    Adapted, AttentionRows, FeedForward, InputLayer, LinearSite, Loader, Residual, SelfAttention,
    StackAndNames,
};
use crate::lora::{Adapters, LoraAdapter};
use crate::preprocess::{EncoderInput, Features};
use crate::spec::{EncoderSpec, MelWindows, ProjectedRows, StemSpec};
use crate::weights::Weights;
use std::sync::Arc;
use triptych_core::AdapterId;
use triptych_core::graph_stats::GraphStats;
use triptych_kernels::Backend;
use triptych_kernels::ops::{CapturedForward, ForwardInputs, Indices, Mask, ScoreBias, StageBuilder, Varlen};

/// Rows computed at once. Bounds the activations of long audio (168 MB at a feed-forward of 5120), and is more rows than
/// any back end needs to be busy.
const RUN_ROWS: usize = 8192;

/// An encoder of any family over any back end.
pub struct TransformerEncoder<B: Backend> {
    // Dropped before the weights that they name.
    graphs: EncoderGraphs,
    backend: B,
    spec: EncoderSpec,
    stem: Stem<B>,
    input_layer: InputLayer<B>,
    // Those of the first stack, then those of the second.
    layers: Vec<EncoderLayer<B>>,
    second_stack: Option<SecondStack<B>>,
    adapters: Adapters<B>,
    final_norm: Option<B::Norm>,
    projector: Option<Projector<B>>,
    reduction: Option<Reduction<B>>,
    levels: Levels<B>,
    // A grid of positions, resampled to each image.
    grid_positions: Option<B::Table>,
    added: AddedRows<B>,
    // One under the other, `[n, out]`.
    learned_rows: Vec<f32>,
}

/// Arrays of a run in a step.
struct StagedRun<'a, B: Backend> {
    stem: StagedStem<'a, B>,
    rows: StagedRows,
}

/// Arrays that the layers of a run, and what follows them, index with.
struct StagedRows {
    layout: StagedLayout,
    // Rows that are averaged, those of a mean one after another; `None`: no rows are.
    pooled: Option<Indices>,
    // Rows that the projector reads; `None`: all, in their order.
    projected: Option<Indices>,
    // Rows of each level among those of all.
    levels: Vec<Indices>,
    // Of the projector, where it has a gated feed-forward.
    gate: Option<StagedGate>,
    // Of the convolution behind the projector, where there is one.
    reduction: Option<StagedReduction>,
    added: StagedAdded,
    // Rows of the table between two stacks.
    second_stack: Option<Indices>,
    adapted: AdaptedRows,
}

struct EncoderLayer<B: Backend> {
    attention_norm: Residual<B>,
    attention: SelfAttention<B>,
    // Of the heads, before the output projection.
    context_norm: Option<B::Norm>,
    feed_forward_norm: Residual<B>,
    feed_forward: FeedForward<B>,
    full_attention: bool,
    // `[n_heads, n, n]`, the same for every image.
    bias: Option<Arc<B::Bias>>,
}

impl<B: Backend> TransformerEncoder<B> {
    /// Loads the encoder's tensors, and no others.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(spec: &EncoderSpec, weights: &Weights, backend: &B) -> Result<Self, ModelError> {
        let loader = Loader::new(backend, weights, spec.names.prefixes);
        let stack = &spec.stack;
        let names = &spec.names.stack;
        let final_norm = match stack.final_norm {
            true => Some(loader.norm(names.final_norm, pool::norm_of_sums(spec), stack.hidden)?),
            false => None,
        };
        let projector = match &spec.projector {
            Some(projector) => Some(Projector::load(&loader, projector, stack.hidden)?),
            None => None,
        };
        let grid_positions = match spec.extras.interpolated {
            Some(grid) => Some(loader.table(grid.name, grid.side * grid.side, stack.hidden)?),
            None => None,
        };
        let layers = load_layers(&loader, spec)?;
        let levels = Levels::load(&loader, spec.extras.levels.as_ref(), stack.hidden)?;
        let second_stack = SecondStack::load(&loader, weights, spec)?;
        Ok(Self {
            graphs: EncoderGraphs::default(),
            stem: Stem::load(&loader, spec, weights)?,
            input_layer: InputLayer::load(
                &loader,
                &spec.positions,
                spec.names.positions,
                StackAndNames { spec: stack, names },
            )?,
            layers,
            // Adapters of images of tiles, or of two sizes, are refused.
            adapters: Adapters::new(match second_stack.is_some() || spec.extras.reduction.is_some() {
                true => Vec::new(),
                false => loader.sites(),
            }),
            second_stack,
            final_norm,
            projector,
            reduction: Reduction::load(&loader, spec)?,
            levels,
            grid_positions,
            added: AddedRows::load(&loader, spec)?,
            learned_rows: learned_rows(spec, weights, backend)?,
            spec: spec.clone(),
            backend: backend.clone(),
        })
    }

    /// The layers that adapters can be added to.
    pub(crate) fn sites(&self) -> &[LinearSite] {
        self.adapters.sites()
    }

    /// Output rows of the units of one run, concatenated: `[n_rows, hidden]`. A part is a layer, the first one with what
    /// precedes it; the last part is what follows the layers.
    fn run(&self, run: &[EncodeUnit<'_>], before: &mut dyn FnMut(usize)) -> Result<Vec<f32>, ModelError> {
        let backend = &self.backend;
        let n_tokens = run.iter().map(|unit| self.n_tokens(unit)).sum::<usize>();
        let mut parts = shares(n_tokens, self.layers.len() + 1);
        let mut part = || parts.next().map_or((), &mut *before);
        part();
        let mut builder = StageBuilder::new();
        let stem = self.stem.stage(&mut builder, run)?;
        let rows = match &self.spec.stem {
            StemSpec::Tiles(tiles) => {
                let rows = TileRows::of(tiles, &images(tiles, run));
                let sequences = TileSequences::of(&rows).stage(&mut builder)?;
                self.stage_tiles(&mut builder, &rows, sequences)?
            }
            _ => self.stage_rows(&mut builder, run, n_tokens)?,
        };
        let staged = StagedRun { stem, rows };
        let step = &backend.stage(builder)?;
        let x = staged.stem.forward(backend, step, StemInput::Units(run))?;
        Ok(backend.take_values(self.layers(backend, step, (x, &staged.rows), &mut part)?)?)
    }

    /// Adds what the layers of a run of `n_tokens` output rows index with to a step.
    fn stage_rows(
        &self,
        builder: &mut StageBuilder,
        run: &[EncodeUnit<'_>],
        n_tokens: usize,
    ) -> Result<StagedRows, ModelError> {
        Ok(StagedRows {
            layout: RowLayout::of(&self.spec, run).stage(builder, &self.input_layer)?,
            pooled: pool::stage(&self.spec, builder, run, n_tokens)?,
            projected: self.stage_projected(builder, run)?,
            levels: self.levels.stage(builder, n_tokens)?,
            gate: self.stage_gate(builder, n_tokens)?,
            reduction: self.reduction.as_ref().map(|last| last.stage(builder, run)).transpose()?,
            added: self.added.stage(builder, run)?,
            second_stack: None,
            adapted: AdaptedRows::stage(builder, run, |unit| self.n_tokens(unit))?,
        })
    }

    /// The same of images of tiles.
    fn stage_tiles(
        &self,
        builder: &mut StageBuilder,
        rows: &TileRows,
        sequences: StagedTileSequences,
    ) -> Result<StagedRows, ModelError> {
        let StagedTileSequences { seqs, key_rows } = sequences;
        let n_tokens = rows.output.len();
        let layout = StagedLayout {
            whole: seqs,
            windows: seqs,
            positions: self.input_layer.stage(builder, std::iter::empty(), &[])?,
            order: None,
            grid_rows: None,
            key_rows: Some(key_rows),
            mask: Mask::Full,
        };
        Ok(StagedRows {
            layout,
            pooled: None,
            projected: Some(builder.indices(&rows.output)?),
            levels: self.levels.stage(builder, n_tokens)?,
            gate: self.stage_gate(builder, n_tokens)?,
            reduction: None,
            added: self.added.stage(builder, &[])?,
            second_stack: Some(builder.indices(&rows.after)?),
            adapted: AdaptedRows::default(),
        })
    }

    /// Output rows of the stem's rows: the layers, and what follows them. `part` is called before every layer but the first,
    /// and after the last.
    fn layers(
        &self,
        backend: &B,
        step: &B::Step,
        (mut x, rows): (B::Tensor, &StagedRows),
        part: &mut dyn FnMut(),
    ) -> Result<B::Tensor, ModelError> {
        let StagedRows {
            layout, pooled, projected, levels: places, gate, added, second_stack, adapted, ..
        } = rows;
        let [of_rows, of_outputs] = &adapted.groups(&self.adapters)?;
        let [on, on_outputs] = [of_rows, of_outputs].map(|groups| Adapted::new(backend, step, groups));
        if let Some([stem_rows, _]) = layout.order {
            x = backend.gather_rows(step, &x, stem_rows)?;
        }
        if let (Some(table), Some(rows)) = (&self.grid_positions, layout.grid_rows) {
            backend.add(&mut x, &backend.embed_weighted(step, table, rows)?)?;
        }
        self.added.to_stem((backend, step), &mut x, *added)?;
        x = self.input_layer.forward(backend, step, x, layout.positions)?;
        let mut levels = Vec::new();
        let mut taps = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            if i > 0 {
                part();
            }
            if let (Some(second), Some(tiles)) = (&self.second_stack, *second_stack)
                && second.begins_at(i)
            {
                x = second.input((backend, step), &x, tiles)?;
            }
            let seqs = if layer.full_attention { layout.whole } else { layout.windows };
            let seqs = Varlen { seqs, mask: layout.mask, bias: self.input_layer.score_bias(i) };
            let rotation = self.input_layer.rotation(i, layout.positions);
            let rows = AttentionRows { seqs, rotation, key_rows: layout.key_rows };
            x = layer.forward(on, step, &x, rows)?;
            levels.extend(self.levels.of_layer(on_outputs, i, &x)?);
            for place in self.second_stack.iter().flat_map(|second| second.taps_of(i)) {
                if let Some(rows) = *projected {
                    taps.push((place, backend.gather_rows(step, &x, rows)?));
                }
            }
        }
        part();
        if let Some(rows) = *pooled {
            x = pool::sums(&self.spec, backend, step, (&x, rows))?;
        }
        if let Some(norm) = &self.final_norm {
            x = backend.norm(&x, norm)?;
        }
        if let Some(rows) = *projected {
            x = backend.gather_rows(step, &x, rows)?;
        }
        if let Some(second) = &self.second_stack {
            x = second.output(backend, &x, &taps)?;
        }
        self.added.to_patches((backend, step), &mut x, *added)?;
        if let Some(projector) = &self.projector {
            x = projector.forward_staged(on_outputs, step, &x, gate.as_ref())?;
        }
        if let (Some(last), Some(staged)) = (&self.reduction, &rows.reduction) {
            x = last.forward((backend, step), &x, staged)?;
        }
        levels.insert(0, x);
        x = self.levels.side_by_side(backend, step, levels, places)?;
        if let Some([_, output_rows]) = layout.order {
            x = backend.gather_rows(step, &x, output_rows)?;
        }
        Ok(x)
    }

    /// Units that a captured forward takes; `None` if forwards cannot be captured.
    fn graph_units(&self) -> Option<GraphUnits> {
        match &self.spec.stem {
            StemSpec::Mel { windows: MelWindows::Masked, .. } => Some(GraphUnits::Ragged),
            StemSpec::Mel { n_frames, .. } => Some(GraphUnits::Fixed((n_frames / 2 / self.group()).max(1))),
            StemSpec::PrefixedPatches { grid, .. } => {
                Some(GraphUnits::Fixed(self.spec.image_tokens(*grid).unwrap_or(1).max(1)))
            }
            StemSpec::Patches { .. } | StemSpec::Wave(_) | StemSpec::Tokens { .. } => {
                Some(GraphUnits::Ragged)
            }
            StemSpec::Swin(_) | StemSpec::Captioned(_) => Some(GraphUnits::OneGrid),
            StemSpec::Tiles(tiles) => Some(GraphUnits::Fixed(tiles.image_rows().max(1))),
            StemSpec::MelChunks(_) | StemSpec::Sam(_) | StemSpec::SquareViews(_) => None,
        }
    }

    /// Rows and sequences of a captured forward.
    fn room(&self, shape: GraphShape) -> Room {
        let group = self.group();
        let max_units = shape.max_units;
        let n_rows = match &self.spec.stem {
            // Some of which may be no part of the output.
            StemSpec::PrefixedPatches { grid, .. } => {
                max_units * self.spec.stem.image_rows(*grid).unwrap_or_default()
            }
            // Of a unit some rows may be left when the others are averaged.
            _ => shape.n_tokens * group + max_units * (self.spec.extras.pooled.unwrap_or(1) - 1),
        };
        let whole = match self.graph_units() {
            Some(GraphUnits::Fixed(_)) => {
                SeqRoom { n_seqs: max_units, max_seqlen: n_rows / max_units.max(1) }
            }
            // One more for padding.
            _ => SeqRoom { n_seqs: max_units + 1, max_seqlen: n_rows },
        };
        let windows = self.spec.windows.as_ref().map_or(whole, |windows| {
            // `⌈h / side⌉ · ⌈w / side⌉ ≤ (h w + side − 1) / side` windows of a frame, and whole ones of padding.
            let side = windows.side.max(1);
            let n_seqs = (shape.n_tokens + max_units * (side - 1)).div_ceil(side) + 1;
            SeqRoom { n_seqs, max_seqlen: side * side * group }
        });
        Room { n_rows, max_units, group, whole, windows }
    }

    /// Arrays of a captured forward.
    fn stage_in(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
        shape: GraphShape,
    ) -> Result<StagedRun<'_, B>, ModelError> {
        let room = self.room(shape);
        let stem = self.stem.stage_in(builder, units, room)?;
        if let StemSpec::Tiles(tiles) = &self.spec.stem {
            let rows = TileRows::padded(tiles, &images(tiles, units), shape.max_units);
            let sequences = TileSequences::padded(&rows, tiles.image_rows()).stage(builder)?;
            return Ok(StagedRun { stem, rows: self.stage_tiles(builder, &rows, sequences)? });
        }
        // Tables of scores are of whole images, so padding is too.
        let layout = match (self.spec.extras.position_bias.is_some(), shape.grid) {
            (true, _) => {
                RowLayout::of(&self.spec, &filled(units, room.max_units)).stage(builder, &self.input_layer)?
            }
            (false, Some(_)) => RowLayout::of(&self.spec, units).stage(builder, &self.input_layer)?,
            (false, None) => RowLayout::of(&self.spec, units).stage_in(builder, &self.input_layer, room)?,
        };
        let pooled = pool::stage(&self.spec, builder, units, shape.n_tokens)?;
        let projected = self.stage_projected(builder, &filled(units, room.max_units))?;
        let levels = self.levels.stage(builder, shape.n_tokens)?;
        let gate = self.stage_gate(builder, shape.n_tokens)?;
        let added = self.added.stage(builder, &filled(units, room.max_units))?;
        let second_stack = None;
        // Units with adapters run without graphs.
        let adapted = AdaptedRows::default();
        let rows = StagedRows {
            layout,
            pooled,
            projected,
            levels,
            gate,
            reduction: None,
            added,
            second_stack,
            adapted,
        };
        Ok(StagedRun { stem, rows })
    }

    /// Adds what the projector indexes with, for `n_tokens` output rows, to a step.
    fn stage_gate(
        &self,
        builder: &mut StageBuilder,
        n_tokens: usize,
    ) -> Result<Option<StagedGate>, ModelError> {
        match &self.projector {
            Some(projector) => Ok(projector.stage(builder, n_tokens)?),
            None => Ok(None),
        }
    }

    /// Output rows of a unit.
    fn n_tokens(&self, unit: &EncodeUnit<'_>) -> usize {
        if self.reduction.is_some() {
            return self.spec.image_tokens(unit.patches).unwrap_or_default();
        }
        match self.projected_rows() {
            ProjectedRows::All | ProjectedRows::Line | ProjectedRows::Queries => unit.n_rows() / self.group(),
            ProjectedRows::Patches => unit.patches[0] * unit.patches[1] / self.group(),
        }
    }

    fn projected_rows(&self) -> ProjectedRows {
        self.spec.projector.as_ref().map_or(ProjectedRows::All, |projector| projector.rows)
    }

    /// Adds the rows of units that the projector reads to a step; `None` if it reads all as they are.
    fn stage_projected(
        &self,
        builder: &mut StageBuilder,
        units: &[EncodeUnit<'_>],
    ) -> Result<Option<Indices>, ModelError> {
        let side = self.spec.merged_side();
        match self.projected_rows() {
            ProjectedRows::Patches => {}
            ProjectedRows::Queries => return Ok(Some(builder.indices(&query_rows(units))?)),
            ProjectedRows::All | ProjectedRows::Line => return Ok(None),
        }
        let mut rows = Vec::new();
        let mut end = 0;
        for unit in units {
            end += unit.n_rows();
            let [down, across] = unit.patches;
            let first = end - (down * across).min(end);
            let corners = (0..down / side).flat_map(|y| (0..across / side).map(move |x| [y, x]));
            for [y, x] in corners {
                let square = (0..side).flat_map(|dy| (0..side).map(move |dx| [y * side + dy, x * side + dx]));
                rows.extend(square.map(|[y, x]| (first + y * across + x) as u32));
            }
        }
        Ok(Some(builder.indices(&rows)?))
    }

    /// Output rows of an item, from those of its tiles.
    fn assembled(&self, input: &EncoderInput, tiles: Vec<f32>) -> Vec<f32> {
        let (Features::Tiles { rows, .. } | Features::Views { rows, .. }) = &input.features else {
            return tiles;
        };
        let width = self.spec.output_width();
        let n_rows = tiles.len() / width.max(1);
        let row = |place: &u32| {
            let place = *place as usize;
            let found = match place.checked_sub(n_rows) {
                None => tiles.get(place * width..(place + 1) * width),
                Some(learned) => self.learned_rows.get(learned * width..(learned + 1) * width),
            };
            found.unwrap_or_default()
        };
        if rows.weights.is_empty() {
            // Not collected, which would grow to twice as much.
            let mut out = Vec::with_capacity(rows.n_rows() * width);
            rows.places.iter().for_each(|place| out.extend_from_slice(row(place)));
            return out;
        }
        let mut out = vec![0.0; rows.n_rows() * width];
        let terms = rows.places.chunks(rows.n_terms()).zip(rows.weights.chunks(rows.n_terms()));
        for (out, (places, weights)) in out.chunks_exact_mut(width.max(1)).zip(terms) {
            for (place, weight) in places.iter().zip(weights) {
                out.iter_mut().zip(row(place)).for_each(|(sum, value)| *sum += weight * value);
            }
        }
        out
    }

    /// Rows that become one output row.
    fn group(&self) -> usize {
        self.spec.merged_rows()
    }
}

impl<B: Backend> GraphEncoder for TransformerEncoder<B> {
    fn size(&self, unit: &EncodeUnit<'_>) -> UnitSize {
        let n_rows = self.n_tokens(unit);
        match &self.spec.stem {
            // An image with few tiles costs as much as one with all.
            StemSpec::Tiles(tiles) => UnitSize { n_tokens: tiles.image_rows(), n_seqs: 1, n_rows },
            // Frames of an image are sequences of their own.
            _ => UnitSize { n_tokens: n_rows, n_seqs: unit.grid[0], n_rows },
        }
    }

    fn eager(&self, units: &[EncodeUnit<'_>], before: &mut dyn FnMut(usize)) -> Result<Vec<f32>, ModelError> {
        let rows_of = |unit: &EncodeUnit<'_>| match &self.spec.stem {
            StemSpec::Tiles(tiles) => tiles.image_rows(),
            _ => unit.n_rows(),
        };
        let runs = runs(units, RUN_ROWS, rows_of);
        // One run's values are not copied.
        if let [run] = runs[..] {
            return self.run(run, before);
        }
        let n_rows: usize = units.iter().map(|unit| self.n_tokens(unit)).sum();
        let mut rows = Vec::with_capacity(n_rows.saturating_mul(self.spec.output_width()));
        for run in runs {
            rows.extend(self.run(run, before)?);
        }
        Ok(rows)
    }

    fn inputs(&self, shape: GraphShape, units: &[EncodeUnit<'_>]) -> Result<ForwardInputs, ModelError> {
        let mut arrays = StageBuilder::new();
        self.stage_in(&mut arrays, units, shape)?;
        let (features, dims) = self.stem.features(units, self.room(shape));
        Ok(ForwardInputs { arrays, features, dims })
    }

    fn capture(
        &self,
        shape: GraphShape,
        units: &[EncodeUnit<'_>],
    ) -> Result<Box<dyn CapturedForward>, ModelError> {
        let mut arrays = StageBuilder::new();
        let staged = self.stage_in(&mut arrays, units, shape)?;
        let (features, dims) = self.stem.features(units, self.room(shape));
        let inputs = ForwardInputs { arrays, features, dims };
        let graph = self.backend.capture(inputs, &mut |backend, step, features| {
            let x = staged.stem.forward(backend, step, StemInput::Rows(features))?;
            self.layers(backend, step, (x, &staged.rows), &mut || ())
        })?;
        Ok(graph)
    }

    fn width(&self) -> usize {
        self.spec.output_width()
    }
}

impl<B: Backend> Encoder for TransformerEncoder<B> {
    fn hidden(&self) -> usize {
        self.spec.output_width()
    }

    fn use_graphs(&mut self, config: &EncoderGraphConfig) {
        if !self.backend.captures() {
            return;
        }
        match self.graph_units() {
            Some(units) => self.graphs = EncoderGraphs::new(config, units, RUN_ROWS / self.group()),
            None => tracing::info!("forwards of this encoder cannot be captured; they run without graphs"),
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
        self.encode_adapted(batch, &[], before)
    }

    fn encode_adapted(
        &mut self,
        batch: &[&EncoderInput],
        adapters: &[Option<AdapterId>],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let mut all = Vec::new();
        for (i, input) in batch.iter().enumerate() {
            let adapter = adapters.get(i).copied().flatten();
            all.extend(units(&self.spec, i, input)?.into_iter().map(|unit| EncodeUnit { adapter, ..unit }));
        }
        let mut graphs = std::mem::take(&mut self.graphs);
        let outputs = graphs.encode(&*self, &all, before);
        self.graphs = graphs;
        let items = outputs?.by_item(&all, batch.len());
        Ok(batch.iter().zip(items).map(|(input, rows)| self.assembled(input, rows)).collect())
    }

    fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        self.adapters.load(&self.backend, adapter)
    }

    fn unload_adapter(&mut self, id: AdapterId) {
        self.adapters.unload(id);
    }
}

/// The second half of the rows of each unit.
fn query_rows(units: &[EncodeUnit<'_>]) -> Vec<u32> {
    let mut end = 0;
    let of_unit = |unit: &EncodeUnit<'_>| {
        end += unit.n_rows() as u32;
        end - unit.n_rows() as u32 / 2..end
    };
    units.iter().flat_map(of_unit).collect()
}

/// Learned output rows, one under the other: `[n, out]`.
fn learned_rows<B: Backend>(
    spec: &EncoderSpec,
    weights: &Weights,
    backend: &B,
) -> Result<Vec<f32>, ModelError> {
    let width = spec.output_width();
    let mut rows = Vec::with_capacity(spec.extras.learned_rows.len() * width);
    for names in &spec.extras.learned_rows {
        rows.extend(Loader::new(backend, weights, names).row_values("", width)?);
    }
    Ok(rows)
}

fn load_layers<B: Backend>(
    loader: &Loader<'_, B>,
    spec: &EncoderSpec,
) -> Result<Vec<EncoderLayer<B>>, ModelError> {
    let mut layers: Vec<EncoderLayer<B>> = Vec::with_capacity(spec.stack.n_layers);
    for idx in 0..spec.stack.n_layers {
        let own = loader.layer(spec.names.stack.layers, idx);
        let full_attention = spec.windows.as_ref().is_none_or(|w| w.full_attention_layers.contains(&idx));
        let mut layer = EncoderLayer { full_attention, ..EncoderLayer::load(own, spec, None)? };
        if let Some(bias) = &spec.extras.position_bias {
            let own = loader.layer(spec.names.stack.layers, idx);
            let shared = layers.first().and_then(|first| first.bias.as_ref());
            let n_heads = spec.stack.attention.shape.n_heads;
            layer.bias = Some(position_bias::load(loader, &own, bias, n_heads, shared)?);
        }
        layers.push(layer);
    }
    if let StemSpec::Tiles(tiles) = &spec.stem {
        let names = tiles.names;
        for idx in 0..tiles.n_global_layers {
            let own = loader.layer(names.global_layers, idx);
            layers.push(EncoderLayer::load(own, spec, Some(names.global_gates))?);
        }
    }
    Ok(layers)
}

impl<B: Backend> EncoderLayer<B> {
    /// Loads the layer under `loader`, with the gates of these names, on attention and feed-forward.
    fn load(
        mut loader: Loader<'_, B>,
        spec: &EncoderSpec,
        gates: Option<[&str; 2]>,
    ) -> Result<Self, ModelError> {
        let stack = &spec.stack;
        let names = &spec.names.stack;
        let [on_attention, on_feed_forward] = match gates {
            Some([first, second]) => [loader.gate(first)?, loader.gate(second)?],
            None => [1.0; 2],
        };
        if let Some([attention, feed_forward]) = spec.extras.scales {
            let scales = vec![[names.attention.out, attention], [names.feed_forward_outer, feed_forward]];
            loader = loader.scaling(scales);
        }
        let mut feed_forward = FeedForward::load_gated(&loader, names, stack, on_feed_forward)?;
        let mut context_norm = None;
        if let Some([context, inner]) = spec.extras.sub_norms {
            let width = stack.attention.shape.widths()[0];
            context_norm = Some(loader.norm(context, stack.norm, width)?);
            let norm = loader.norm(inner, stack.norm, stack.feed_forward.width)?;
            feed_forward = feed_forward.with_inner_norm(norm);
        }
        Ok(Self {
            attention_norm: Residual::of_attention(&loader, names.attention.norm, stack)?,
            attention: SelfAttention::load_gated(&loader, &names.attention, stack, on_attention)?,
            feed_forward_norm: Residual::of_feed_forward(&loader, names.feed_forward_norm, stack)?,
            feed_forward,
            context_norm,
            full_attention: true,
            bias: None,
        })
    }

    fn forward(
        &self,
        on: Adapted<'_, B>,
        step: &B::Step,
        x: &B::Tensor,
        rows: AttentionRows<'_, B>,
    ) -> Result<B::Tensor, ModelError> {
        let backend = on.backend;
        let bias = match &self.bias {
            Some(bias) => ScoreBias::Loaded(bias.as_ref()),
            None => rows.seqs.bias,
        };
        let seqs = Varlen { bias, ..rows.seqs };
        let x = self.attention_norm.around(backend, x, |input, residual| {
            let rows = AttentionRows { seqs, ..rows };
            let mut context = self.attention.inside(on, step, input, rows)?;
            if let Some(norm) = &self.context_norm {
                context = backend.norm(&context, norm)?;
            }
            self.attention.output(on, &context, residual)
        })?;
        self.feed_forward_norm
            .around(backend, &x, |input, residual| self.feed_forward.forward(on, input, residual))
    }
}
