//! Steps of decoding as graphs: one for each bucket of sequences and of keys, captured at its first use.
//!
//! A step in which every sequence has one row is padded to the next power of two and replayed. Rows of padding see no key, and
//! write to blocks of their own behind those that the engine knows. Buckets of keys bound the work of attention, since launches
//! of a graph are the same for every batch. The idea of buckets of rows is vLLM's
//! (<https://docs.vllm.ai/en/v0.11.0/design/cuda_graphs.html>).

use super::staged_step::{StepArrays, StepBounds};
use crate::decoder::{DecodeGraphConfig, StepInput};
use std::collections::HashMap;
use triptych_core::graph_stats::GraphStats;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::Backend;
use triptych_kernels::ops::{Captured, PagedBounds};

/// The smallest bucket of keys; each further one has four times as many.
const MIN_KEYS: usize = 512;

/// Shape of a captured step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StepShape {
    /// Sequences, each of one row, padding included.
    pub n_seqs: usize,
    /// Most keys of a sequence in self-attention.
    pub max_keys: usize,
    /// The same in cross-attention; `None`: there is none.
    pub max_cross_keys: Option<usize>,
}

impl StepShape {
    /// The bucket of a step; `None` unless each of its sequences has one token and none an adapter.
    pub fn of(step: &StepInput<'_>) -> Option<Self> {
        let n = step.token_ids.len();
        let decodes = step.embeds.is_empty() && step.adapters.is_empty();
        let seqs = step.sequences();
        let decodes = decodes && seqs.query_start_loc.len() == n + 1;
        let is_one_each = seqs.query_start_loc.windows(2).all(|pair| pair[1] - pair[0] == 1);
        let max_keys = |lens: &[u32]| bucket(lens.iter().max().map_or(0, |len| *len as usize));
        (decodes && is_one_each && n > 0).then(|| Self {
            n_seqs: n.next_power_of_two(),
            max_keys: max_keys(seqs.seq_lens),
            max_cross_keys: step.cross_kv.map(|kv| max_keys(kv.seq_lens)),
        })
    }

    /// Queries and keys of its sequences, at most.
    pub fn bounds(self) -> StepBounds {
        let of = |max_seqlen_k| PagedBounds { max_seqlen_q: 1, max_seqlen_k };
        StepBounds { own: of(self.max_keys), cross: of(self.max_cross_keys.unwrap_or(0)) }
    }
}

/// The smallest bucket that holds so many keys.
fn bucket(n_keys: usize) -> usize {
    let mut bucket = MIN_KEYS;
    while bucket < n_keys {
        bucket *= 4;
    }
    bucket
}

/// The graphs of a decoder. None by default: every step runs without.
pub(super) struct DecodeGraphs<B: Backend> {
    pub config: Option<DecodeGraphConfig>,
    /// By their shapes; `None`: a capture or a replay failed.
    pub graphs: HashMap<StepShape, Option<DecodeGraph<B>>>,
    /// The first block of padding rows.
    pub spare_block: usize,
    /// Steps so far.
    pub counts: GraphStats,
}

/// A captured step.
pub(super) struct DecodeGraph<B: Backend> {
    /// The step.
    pub forward: Box<Captured<B>>,
    /// Handles of its arrays.
    pub arrays: StepArrays,
}

impl<B: Backend> Default for DecodeGraphs<B> {
    fn default() -> Self {
        Self { config: None, graphs: HashMap::new(), spare_block: 0, counts: GraphStats::default() }
    }
}

impl<B: Backend> DecodeGraphs<B> {
    /// Drops all graphs. New ones are within these limits; `None`: there are none.
    pub fn set(&mut self, config: Option<DecodeGraphConfig>) {
        self.graphs.clear();
        self.config = config;
    }

    /// Blocks of self-attention KV for rows of padding: one slot for each.
    pub fn n_spare_blocks(&self) -> usize {
        // More than half of a bucket's rows are no padding.
        self.config.map_or(0, |config| (config.max_sequences / 2).div_ceil(KV_BLOCK_TOKENS).max(1))
    }

    /// Drops all graphs, for their caches go. New ones have so many blocks before those of padding rows.
    pub fn start(&mut self, n_blocks: usize) {
        self.graphs.clear();
        self.spare_block = n_blocks;
    }

    /// Drops all graphs for good. `false` if there are none.
    pub fn make_room(&mut self) -> bool {
        let had_any = self.graphs.values().any(Option::is_some);
        self.graphs.clear();
        self.config = self.config.filter(|_| !had_any);
        had_any
    }

    /// Steps so far, and memory.
    pub fn stats(&self) -> GraphStats {
        let captured = || self.graphs.values().flatten();
        GraphStats {
            graphs: captured().count(),
            n_bytes: captured().map(|one| one.forward.n_bytes()).sum(),
            ..self.counts
        }
    }
}
