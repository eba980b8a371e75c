//! Layers with cross-attention in the place of self-attention: the rows of a step that go through them, and the cache
//! layers of their keys and values.
//!
//! A token skips such a layer if its sequence has no encoder rows, or if it comes before the first token that attends to
//! them. After the published code of Llama 3.2 Vision
//! (<https://github.com/meta-llama/llama-models/blob/v0.1.0/models/llama3/reference_impl/multimodal/model.py>).

use super::StepInput;
use crate::error::ModelError;
use crate::spec::CrossSpec;
use triptych_kernels::Backend;
use triptych_kernels::ops::PagedBatch;

/// Indices of a decoder layer in the two KV caches; `None` where it has no such attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CacheLayers {
    /// Layer of the self-attention cache.
    pub own: Option<usize>,
    /// Layer of the cross-attention cache.
    pub cross: Option<usize>,
}

impl CacheLayers {
    /// Cache layers of decoder layer `idx`.
    pub fn of(cross: &CrossSpec, idx: usize) -> Self {
        let Some(instead) = cross.instead() else { return Self { own: Some(idx), cross: Some(idx) } };
        let before = instead.layers.iter().filter(|layer| **layer < idx).count();
        match instead.layers.contains(&idx) {
            true => Self { own: None, cross: Some(before) },
            false => Self { own: Some(idx - before), cross: None },
        }
    }
}

/// The rows of a step that attend to encoder rows.
#[derive(Debug)]
pub(super) struct CrossRows<'a> {
    n_rows: usize,
    rows: Vec<u32>,
    /// Offsets of the sequences in `rows`, `[n_seqs + 1]`.
    query_start_loc: Vec<u32>,
    kv: Option<PagedBatch<'a>>,
}

impl<'a> CrossRows<'a> {
    /// Selects the rows of a checked step.
    pub fn of(step: &StepInput<'a>) -> Self {
        let mut rows = Vec::new();
        let mut query_start_loc = vec![0];
        let n_seqs = step.self_kv.seq_lens.len();
        for i in 0..n_seqs {
            let [first, end] = [0, 1].map(|k| step.self_kv.query_start_loc.get(i + k).copied().unwrap_or(0));
            let n_queries = end.saturating_sub(first);
            let first_token = step.self_kv.seq_lens[i].saturating_sub(n_queries);
            let from = step.cross_from.map_or(0, |from| from[i]);
            let sees = step.cross_kv.is_some_and(|kv| kv.seq_lens[i] > 0);
            let blind = if sees { from.saturating_sub(first_token).min(n_queries) } else { n_queries };
            rows.extend(first + blind..end);
            query_start_loc.push(rows.len() as u32);
        }
        Self { n_rows: step.token_ids.len(), rows, query_start_loc, kv: step.cross_kv }
    }

    /// Runs `layer` on the selected rows of `x: [n_tokens, hidden]`, with their own batch; the other rows are unchanged.
    ///
    /// # Errors
    /// Those of `layer`, and of the back end.
    pub fn run<B: Backend>(
        &self,
        backend: &B,
        mut x: B::Tensor,
        layer: impl FnOnce(&B::Tensor, Option<PagedBatch<'_>>) -> Result<B::Tensor, ModelError>,
    ) -> Result<B::Tensor, ModelError> {
        let batch = self.kv.map(|kv| PagedBatch { query_start_loc: &self.query_start_loc, ..kv });
        if self.rows.is_empty() {
            return Ok(x);
        }
        if self.rows.len() == self.n_rows {
            return layer(&x, batch);
        }
        let seen = layer(&backend.gather_rows(&x, &self.rows)?, batch)?;
        backend.scatter_rows(&mut x, &self.rows, &seen)?;
        Ok(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch<'a>(query_start_loc: &'a [u32], seq_lens: &'a [u32]) -> PagedBatch<'a> {
        PagedBatch { query_start_loc, table_start_loc: &[], block_tables: &[], seq_lens }
    }

    /// Three sequences: tokens 2 to 4 of one that cross-attends from 3 on, a token far past its image, two of a text.
    #[test]
    fn tokens_before_the_image_and_texts_do_not_see() {
        let starts = [0, 3, 4, 6];
        let step = |cross_from| StepInput {
            token_ids: &[0; 6],
            positions: &[[0; 3]; 6],
            embeds: &[],
            slot_mapping: &[0; 6],
            self_kv: batch(&starts, &[5, 9, 2]),
            cross_kv: Some(batch(&starts, &[10, 10, 0])),
            cross_from,
            logit_rows: &[],
        };
        let from = [3, 1, 0];
        let cross_rows = CrossRows::of(&step(Some(&from)));
        assert_eq!((cross_rows.rows, cross_rows.query_start_loc), (vec![1, 2, 3], vec![0, 2, 3, 3]));
        let cross_rows = CrossRows::of(&step(None));
        assert_eq!((cross_rows.rows, cross_rows.query_start_loc), (vec![0, 1, 2, 3], vec![0, 3, 4, 4]));
        let nothing = StepInput { cross_kv: None, ..step(None) };
        assert!(CrossRows::of(&nothing).rows.is_empty());
    }
}
