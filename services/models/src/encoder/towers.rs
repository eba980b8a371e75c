//! Two towers that read the same image: the rows of the first, then those of the second, as rows of the second's width.
//!
//! Both are encoders of their own, one after the other in one job. A row of the first becomes as many rows as it is wider, in the
//! order of its values, so that an encoder output stays one matrix; the decoder joins them again
//! ([`CrossSpec::row_parts`](crate::spec::CrossSpec)).

use super::{Encoder, EncoderGraphConfig, TransformerEncoder};
use crate::error::ModelError;
use crate::preprocess::{EncoderInput, Features};
use crate::spec::{EncoderExtras, EncoderSpec};
use crate::weights::Weights;
use triptych_core::graph_stats::GraphStats;
use triptych_kernels::{Backend, KernelError};

/// Two towers over any back end.
pub struct TowersEncoder<B: Backend> {
    first: TransformerEncoder<B>,
    second: TransformerEncoder<B>,
    // Rows that a row of the first becomes.
    row_parts: usize,
}

impl<B: Backend> TowersEncoder<B> {
    /// Loads the tensors of both towers, of `spec` and of its second one.
    ///
    /// # Errors
    /// [`ModelError`] for a tensor that is missing or has another shape, or widths of which one is no multiple of the other.
    pub fn load(spec: &EncoderSpec, weights: &Weights, backend: &B) -> Result<Self, ModelError> {
        let alone = EncoderExtras { second: None, ..spec.extras.clone() };
        let first = EncoderSpec { extras: alone, ..spec.clone() };
        let second = spec.extras.second.as_deref().unwrap_or(&first);
        let [wide, narrow] = [first.output_width(), second.output_width()];
        if narrow == 0 || !wide.is_multiple_of(narrow) {
            return Err(shape("widths of towers", [wide, narrow]).into());
        }
        Ok(Self {
            first: TransformerEncoder::load(&first, weights, backend)?,
            second: TransformerEncoder::load(second, weights, backend)?,
            row_parts: wide / narrow,
        })
    }
}

impl<B: Backend> Encoder for TowersEncoder<B> {
    fn hidden(&self) -> usize {
        self.second.hidden()
    }

    fn use_graphs(&mut self, config: &EncoderGraphConfig) {
        self.first.use_graphs(config);
        self.second.use_graphs(config);
    }

    fn graph_stats(&self) -> GraphStats {
        let [a, b] = [self.first.graph_stats(), self.second.graph_stats()];
        GraphStats {
            replays: a.replays + b.replays,
            eager: a.eager + b.eager,
            tokens: a.tokens + b.tokens,
            padding_tokens: a.padding_tokens + b.padding_tokens,
            graphs: a.graphs + b.graphs,
            n_bytes: a.n_bytes + b.n_bytes,
        }
    }

    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        let inputs = batch.iter().map(|input| match &input.features {
            Features::Towers(inputs) => Ok((&inputs[0], &inputs[1])),
            _ => Err(shape("towers", [2, 1])),
        });
        let (of_first, of_second): (Vec<_>, Vec<_>) =
            inputs.collect::<Result<Vec<_>, KernelError>>()?.into_iter().unzip();
        let row_parts = self.row_parts;
        let first = self.first.encode_in_parts(&of_first, &mut |n_rows| before(n_rows * row_parts))?;
        let second = self.second.encode_in_parts(&of_second, before)?;
        let joined = first.into_iter().zip(second).map(|(mut rows, more)| {
            rows.extend(more);
            rows
        });
        Ok(joined.collect())
    }
}

fn shape(what: &'static str, [expected, actual]: [usize; 2]) -> KernelError {
    KernelError::Shape { op: "encode", what, expected: vec![expected], actual: vec![actual] }
}
