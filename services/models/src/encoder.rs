//! The encode stage: features of items to encoder output rows.
//!
//! [`Encoder`] is what a worker drives. [`TransformerEncoder`] implements it over any back end; its spec makes it one
//! model or another. Where several towers read the same item, each is an encoder of its own.

use crate::error::ModelError;
use crate::lora::{LoraAdapter, no_adapter};
use crate::preprocess::EncoderInput;
use triptych_core::AdapterId;
use triptych_core::graph_stats::GraphStats;

mod added;
mod adapters;
mod graphs;
mod layout;
mod outputs;
mod units;
mod pool;
mod position_bias;
mod projector;
mod reduction;
mod stem;
mod second_stack;
mod tiles;
mod transformer;

pub use graphs::EncoderGraphConfig;
pub use transformer::TransformerEncoder;

/// An encoder with its weights on a back end.
///
/// Sync and single-threaded from outside: one forward at a time, from one thread. The rows of an item do not
/// depend on what else is in the batch.
pub trait Encoder: Send {
    /// Width of an output row.
    fn hidden(&self) -> usize;

    /// Captures forwards as graphs from now on, where the back end has them and the model's forwards allow it; else nothing
    /// changes. Rows are the same with graphs and without.
    fn use_graphs(&mut self, _config: &EncoderGraphConfig) {}

    /// Forwards with and without graphs so far; zeros without graphs.
    fn graph_stats(&self) -> GraphStats {
        GraphStats::default()
    }

    /// Encodes a batch. Result `i` holds the rows of `batch[i]`: `[n_tokens, hidden]`, row-major.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] only if an input does not come from this model's own preprocessor.
    fn encode(&mut self, batch: &[&EncoderInput]) -> Result<Vec<Vec<f32>>, ModelError> {
        self.encode_in_parts(batch, &mut |_| ())
    }

    /// The same in parts, which end between two layers. `before` is called before each part with its share of the
    /// batch's output tokens, and may block; the shares add up to the batch's tokens, of tiles to those of whole tiles.
    ///
    /// # Errors
    /// As [`Self::encode`].
    fn encode_in_parts(
        &mut self,
        batch: &[&EncoderInput],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError>;

    /// The same of items with adapters: `adapters[i]` is that of `batch[i]`. The rows of an item do not depend on the adapters
    /// of others.
    ///
    /// # Errors
    /// As [`Self::encode`], and [`ModelError::Kernel`] for an adapter that is not loaded.
    fn encode_adapted(
        &mut self,
        batch: &[&EncoderInput],
        adapters: &[Option<AdapterId>],
        before: &mut dyn FnMut(usize),
    ) -> Result<Vec<Vec<f32>>, ModelError> {
        match adapters.iter().flatten().next() {
            None => self.encode_in_parts(batch, before),
            Some(id) => Err(no_adapter(*id)),
        }
    }

    /// Loads an adapter's part for the encoder; items may name it from then on. One that is loaded stays as it is.
    ///
    /// # Errors
    /// [`ModelError::Config`] for an adapter of layers that the encoder does not have, [`ModelError::TensorShape`], or
    /// [`ModelError::Kernel`] without memory or for an encoder that takes none.
    fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        Err(no_adapter(adapter.id()))
    }

    /// Drops an adapter.
    fn unload_adapter(&mut self, _id: AdapterId) {}
}

/// Splits `n_tokens` into `n_parts` integer shares that differ by at most 1.
pub(crate) fn shares(n_tokens: usize, n_parts: usize) -> impl Iterator<Item = usize> {
    let upto = move |i: usize| n_tokens * i / n_parts.max(1);
    (0..n_parts).map(move |i| upto(i + 1) - upto(i))
}

#[cfg(test)]
mod tests {
    use super::shares;

    #[test]
    fn shares_are_about_equal_and_lose_nothing() {
        for (n_tokens, n_parts, expect) in [
            (529, 3, &[176, 176, 177][..]),
            (2, 4, &[0, 1, 0, 1]),
            (0, 2, &[0, 0]),
            (7, 1, &[7]),
            (7, 0, &[]),
        ] {
            assert_eq!(shares(n_tokens, n_parts).collect::<Vec<_>>(), expect, "{n_tokens} over {n_parts}");
        }
    }
}
