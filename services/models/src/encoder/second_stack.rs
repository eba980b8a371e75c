//! A second stack behind the first, for images of tiles, and the rows of several layers joined in a projection.

use super::stem::{gated_tiles, table_of};
use crate::error::ModelError;
use crate::layers::{LinearShape, Loader, StoredLinear};
use crate::spec::{EncoderSpec, NormSpec, StemSpec, TilesSpec};
use crate::weights::Weights;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Activation, Indices};

/// Parts of an encoder with two stacks, beside their layers.
pub(super) struct SecondStack<B: Backend> {
    /// Number of layers before it.
    n_before: usize,
    norm: B::Norm,
    /// A row for each tile of each arrangement, from 1.
    tiles: B::Table,
    /// Layers of the first stack whose rows are projected, too.
    taps: Vec<usize>,
    // For the last layer's rows, then for those of each tap.
    projections: Vec<B::Linear>,
}

impl<B: Backend> SecondStack<B> {
    /// Loads what is between the stacks and behind them; `None` for an encoder of one stack.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape.
    pub fn load(
        loader: &Loader<'_, B>,
        weights: &Weights,
        spec: &EncoderSpec,
    ) -> Result<Option<Self>, ModelError> {
        let StemSpec::Tiles(tiles) = &spec.stem else { return Ok(None) };
        let hidden = spec.stack.hidden;
        let projection = Loader::new(loader.backend(), weights, tiles.names.projection);
        Ok(Some(Self {
            n_before: spec.stack.n_layers,
            norm: loader.norm(tiles.names.norms[1], NormSpec::layer(tiles.norm_eps), hidden)?,
            tiles: table_of(loader.backend(), &gated_tiles(loader, tiles, (1, hidden))?, hidden)?,
            taps: tiles.taps.clone(),
            projections: projections(&projection, tiles, hidden)?,
        }))
    }

    /// True for its first layer.
    pub fn begins_at(&self, layer: usize) -> bool {
        layer == self.n_before
    }

    /// Its input, from the output of the first stack; `tiles` are the rows of the table.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for other rows than were staged.
    pub fn input(
        &self,
        (backend, step): (&B, &B::Step),
        x: &B::Tensor,
        tiles: Indices,
    ) -> Result<B::Tensor, ModelError> {
        let mut x = backend.norm(x, &self.norm)?;
        backend.add(&mut x, &backend.embed(step, &self.tiles, tiles)?)?;
        Ok(x)
    }

    /// Places of a layer's rows among those that are projected.
    pub fn taps_of(&self, layer: usize) -> impl Iterator<Item = usize> {
        self.taps.iter().enumerate().filter(move |(_, tapped)| **tapped == layer).map(|(place, _)| place)
    }

    /// Output rows of the last layer's rows and those of each tap.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a wrong width.
    pub fn output(
        &self,
        backend: &B,
        last: &B::Tensor,
        taps: &[(usize, B::Tensor)],
    ) -> Result<B::Tensor, ModelError> {
        let (first, others) = self.projections.split_first().ok_or_else(no_projection)?;
        let mut sum = backend.linear(last, first, Activation::None, None)?;
        for (place, projection) in others.iter().enumerate() {
            if let Some((_, rows)) = taps.iter().find(|(tap, _)| *tap == place) {
                sum = backend.linear(rows, projection, Activation::None, Some(&sum))?;
            }
        }
        Ok(sum)
    }
}

fn no_projection() -> ModelError {
    ModelError::missing_key("config.json", "vision_config", "an encoder whose rows are projected")
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
