//! Memory of activations, foretold: forwards over tensors that are sizes alone ([`FootprintBackend`]).

use super::example::{example_inputs, example_text};
use super::{FootprintBackend, Model};
use crate::encoder::{Encoder, TransformerEncoder};
use crate::error::ModelError;
use crate::preprocess::{EncoderInput, Features};
use crate::spec::EncoderSpec;
use crate::weights::Weights;
use std::collections::VecDeque;
use triptych_core::{Extent, TowerIdx};
use triptych_kernels::{Backend, Precision};

/// Shapes of items whose forecasts are kept.
const MOST_SHAPES: usize = 64;

/// Forecasts of an encoder's memory on the CPU back end. Nothing is read or computed.
pub struct MemoryForecast {
    backend: FootprintBackend,
    // Not behind `dyn`: the code of a forward is compiled for this back end once, and that of graphs not at all.
    encoder: TransformerEncoder<FootprintBackend>,
    weight_bytes: usize,
    /// Activations of items by their shapes, the latest last.
    known: VecDeque<(InputShape, usize)>,
}

/// The sizes of an item, on which its activations depend.
#[derive(Clone, Debug, PartialEq)]
struct InputShape {
    extent: Extent,
    n_tokens: u32,
    sizes: Vec<usize>,
}

impl MemoryForecast {
    /// Loads the sizes of a tower's weights.
    ///
    /// # Errors
    /// As [`Model::load_encoder`].
    pub fn load(tower: &EncoderSpec, weights: &Weights, precision: Precision) -> Result<Self, ModelError> {
        let backend = FootprintBackend::new(precision)?.for_encoders();
        let encoder = TransformerEncoder::load(tower, weights, &backend)?;
        let weight_bytes = backend.footprint().n_bytes;
        Ok(Self { backend, encoder, weight_bytes, known: VecDeque::new() })
    }

    /// Bytes of its weights.
    pub fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    /// Width of its rows.
    pub fn hidden(&self) -> usize {
        self.encoder.hidden()
    }

    /// Most bytes of activations that a forward of a batch has at once, its outputs included. It runs twice: a thread keeps memory
    /// of the first for the second.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for inputs of another encoder.
    pub fn batch_bytes(&mut self, batch: &[&EncoderInput]) -> Result<usize, ModelError> {
        self.backend.restart();
        // Rows of tiles are put together from those that the layers made, and items of a batch have values of their own.
        let is_put_together = |input: &&&EncoderInput| {
            batch.len() > 1 || matches!(input.features, Features::Tiles { .. } | Features::Views { .. })
        };
        let n_rows: usize = batch.iter().filter(is_put_together).map(|input| input.n_tokens as usize).sum();
        let put_together = n_rows.saturating_mul(self.encoder.hidden()).saturating_mul(size_of::<f32>());
        for _ in 0..2 {
            self.encoder.encode(batch)?;
            self.backend.hold_briefly(put_together);
            self.backend.drop_results();
        }
        Ok(self.backend.activation_bytes())
    }

    /// The same of one item, kept for others of its shape. A batch has no more than its items together: what an op takes grows with
    /// the rows.
    ///
    /// # Errors
    /// As [`Self::batch_bytes`].
    pub fn item_bytes(&mut self, input: &EncoderInput) -> Result<usize, ModelError> {
        let shape = InputShape::of(input);
        if let Some((_, n_bytes)) = self.known.iter().find(|(known, _)| *known == shape) {
            return Ok(*n_bytes);
        }
        let n_bytes = self.batch_bytes(&[input])?;
        if self.known.len() == MOST_SHAPES {
            self.known.pop_front();
        }
        self.known.push_back((shape, n_bytes));
        Ok(n_bytes)
    }
}

impl Model {
    /// Forecasts of a tower's memory; `None` for a model without it.
    ///
    /// # Errors
    /// As [`Model::load_encoder`].
    pub fn memory_forecast(
        &self,
        tower: TowerIdx,
        precision: Precision,
    ) -> Result<Option<MemoryForecast>, ModelError> {
        let mut towers = self.spec.encoder.iter().flat_map(EncoderSpec::towers);
        let Some(tower) = towers.nth(tower.0.into()) else { return Ok(None) };
        MemoryForecast::load(tower, &Weights::survey(&self.source.dir)?, precision).map(Some)
    }

    /// A plain item of the model's kind as a tower reads it, and its description. `None` where its processor refuses a plain item.
    pub fn example_input(&self, tower: TowerIdx) -> Option<(String, EncoderInput)> {
        let spec = self.spec.encoder.as_ref()?;
        let inputs = example_inputs(spec, &self.processors);
        Some((example_text(spec), inputs.into_iter().nth(tower.0.into())??))
    }
}

impl InputShape {
    fn of(input: &EncoderInput) -> Self {
        let sizes = match &input.features {
            Features::Patches(values) | Features::Mel(values) | Features::Samples(values) => {
                vec![values.len()]
            }
            Features::Tiles { patches, rows } => vec![patches.len(), rows.places.len(), rows.weights.len()],
            Features::Views { patches, sides, rows } => {
                let sides = sides.iter().map(|side| *side as usize);
                [patches.len(), rows.places.len(), rows.weights.len()].into_iter().chain(sides).collect()
            }
            Features::Captioned { patches, tokens } => vec![patches.len(), tokens.len()],
            Features::MaskedMel { mel, n_valid } => vec![mel.len(), *n_valid as usize],
            Features::Tokens(tokens) => vec![tokens.len()],
        };
        Self { extent: input.extent.clone(), n_tokens: input.n_tokens, sizes }
    }
}

/// Most bytes of activations of a batch, as [`MemoryForecast::batch_bytes`].
///
/// # Errors
/// As [`MemoryForecast::load`] and [`MemoryForecast::batch_bytes`].
pub fn activation_bytes(
    tower: &EncoderSpec,
    weights: &Weights,
    precision: Precision,
    batch: &[&EncoderInput],
) -> Result<usize, ModelError> {
    MemoryForecast::load(tower, weights, precision)?.batch_bytes(batch)
}
