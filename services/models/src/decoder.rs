//! The prefill and decode stages: token rows to logits over paged KV, and the tokens that are chosen by them.
//!
//! The engine owns the block tables; a decoder is handed a view of them for one step and writes keys and
//! values where slot mappings say. Encoder-decoder models also read cross-attention blocks, which
//! [`Decoder::project_cross`] fills once per encoder output. [`TransformerDecoder`] is the only
//! implementation; its spec makes it one model or another, over any back end.

use crate::error::ModelError;
use crate::lora::{LoraAdapter, no_adapter};
pub use crate::spec::{KvCacheGroups, MAX_KV_GROUPS};
use std::num::NonZeroUsize;
use triptych_core::graph_stats::GraphStats;
use triptych_core::{AdapterId, EncodedRows};
use triptych_kernels::KernelError;
pub use triptych_kernels::ops::PagedBatch;
use triptych_kernels::ops::{CarriedToken, Choices, ChooseBatch};

mod head;
mod cross_rows;
mod graph_config;
mod pending;
mod transformer;

pub use graph_config::DecodeGraphConfig;
pub use pending::Pending;
pub use transformer::TransformerDecoder;

/// Sizes that the engine needs for its pools and batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderInfo {
    /// Width of the logits.
    pub vocab: usize,
    /// Rows of the token table: `vocab`, and after them tokens that are only ever input.
    pub n_readable: usize,
    /// Width of a row of encoder output it takes: with cross-attention, of those that it attends to.
    pub encoder_hidden: usize,
    /// Width of a row that stands for a token of a span; another one only where a second tower's rows are cross-attended to.
    pub embedded_hidden: usize,
    /// Tokens the context holds.
    pub max_context: usize,
    /// True for cross-attention: items then go to cross blocks, not into the token rows, or their first rows alone do that.
    pub cross_attention: bool,
    /// True if a sequence may have no encoder rows: its tokens then skip the layers that cross-attend.
    pub cross_optional: bool,
    /// True if encoder rows of a span attend to each other: one step then has all of them that are not in the cache.
    pub mutual_items: bool,
    /// Groups of layers by the keys that a query of self-attention sees; each has block tables of its own.
    pub kv_groups: KvCacheGroups,
    /// Bytes of one block of self-attention KV, all layers of a group.
    pub self_block_bytes: usize,
    /// Bytes of one block of cross-attention KV, all layers; 0 without cross-attention.
    pub cross_block_bytes: usize,
    /// Bytes of the recurrent states of one sequence, all layers; `None`: no layer has one.
    pub state_slot_bytes: Option<NonZeroUsize>,
    /// Encoder rows whose projection costs as much as one token of a prompt, at least 1.
    pub cross_rows_per_token: usize,
}

/// Rows of encoder output that replace token embeddings in a step.
#[derive(Clone, Copy, Debug)]
pub struct EmbedRows<'a> {
    /// First row of the step they replace.
    pub first_row: usize,
    /// `[n, embedded_hidden]`, as they are stored.
    pub rows: EncodedRows<'a>,
    /// True if the last of them is the last of its span.
    pub ends_span: bool,
}

/// Self-attention KV of the layers of one group. The sequences of a step are the same in each group.
#[derive(Clone, Copy, Debug)]
pub struct GroupKv<'a> {
    /// Slot for the key and value of each row, `[n_tokens]`.
    pub slot_mapping: &'a [u32],
    /// Sequences and their blocks.
    pub tables: PagedBatch<'a>,
}

/// Rows of a step that an adapter is added to.
#[derive(Clone, Copy, Debug)]
pub struct AdapterRows<'a> {
    /// The adapter, which is loaded.
    pub adapter: AdapterId,
    /// The rows, ascending; each has one adapter at most.
    pub rows: &'a [u32],
}

/// One step, flat: the tokens of all sequences concatenated, without padding.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Token of each row, `[n_tokens]`.
    pub token_ids: &'a [u32],
    /// Position of each row as (temporal, height, width), `[n_tokens]`; all three equal for plain text.
    pub positions: &'a [[u32; 3]],
    /// Rows that are not token embeddings; ascending and disjoint. Where [`DecoderInfo::mutual_items`] holds each is the whole
    /// of a span, or its end if the cache has the rest.
    pub embeds: &'a [EmbedRows<'a>],
    /// Self-attention KV of each group of [`DecoderInfo::kv_groups`].
    pub self_kv: &'a [GroupKv<'a>],
    /// The same sequences and their blocks of cross-attention KV; `None` without cross-attention.
    ///
    /// With `cross_rows` they are runs of those rows that attend to the same keys.
    pub cross_kv: Option<triptych_kernels::ops::PagedBatch<'a>>,
    /// Rows that cross-attend, ascending; `None`: every row does. The others skip the layers that cross-attend, which only a
    /// decoder with optional cross-attention can do.
    pub cross_rows: Option<&'a [u32]>,
    /// Slot of each sequence's recurrent state, `[n_seqs]`, none twice; `None` for a decoder without such states. A slot holds the
    /// state after the sequence's tokens before this step, and then that after those of it.
    pub state_slots: Option<&'a [u32]>,
    /// Rows with adapters; those that are in none have none.
    pub adapters: &'a [AdapterRows<'a>],
    /// Rows to compute logits of, `[n_logit_rows]`.
    pub logit_rows: &'a [u32],
    /// Choices by those logits, `[n_logit_rows, vocab]`.
    pub choose: &'a ChooseBatch,
}

impl<'a> StepInput<'a> {
    /// Sequences of the step, with the blocks of the first group; none without a group, which no decoder takes.
    pub(crate) fn sequences(&self) -> PagedBatch<'a> {
        let none =
            PagedBatch { query_start_loc: &[0], table_start_loc: &[0], block_tables: &[], seq_lens: &[] };
        self.self_kv.first().map_or(none, |group| group.tables)
    }
}

/// Known tokens, and the encoder rows that they were generated from.
#[derive(Clone, Copy, Debug)]
pub struct AlignInput<'a> {
    /// The tokens, from position 0, `[n_tokens]`.
    pub tokens: &'a [u32],
    /// Encoder output rows, `[n_rows, encoder_hidden]`, as they are stored.
    pub rows: EncodedRows<'a>,
    /// Heads to report, as (layer, head), `[n_heads]`.
    pub heads: &'a [(u32, u32)],
    /// Adapter of the tokens.
    pub adapter: Option<AdapterId>,
}

/// The refusal of a pass for cross-attention weights.
fn no_align(message: &str) -> ModelError {
    KernelError::Library { op: "align", message: message.to_owned() }.into()
}

/// The refusal of slots by a decoder without recurrent states.
fn no_states(op: &'static str) -> ModelError {
    KernelError::Library { op, message: "this decoder has no recurrent states".to_owned() }.into()
}

/// The refusal of a step that goes on from one that is not under way.
pub(crate) fn no_step(op: &'static str) -> KernelError {
    KernelError::Library { op, message: "no such step is under way".to_owned() }
}

/// A decoder with its weights and KV caches on a back end. One thread drives it.
pub trait Decoder: Send {
    /// Sizes of the decoder.
    fn info(&self) -> DecoderInfo;

    /// Allocates the KV caches; earlier ones are dropped with their contents.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the memory cannot be had.
    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError>;

    /// Allocates the host's cache of self-attention blocks; an earlier one is dropped with its contents.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the memory cannot be had.
    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError>;

    /// Allocates the cache of recurrent states; an earlier one is dropped with its contents. Nothing to do for a decoder without.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the memory cannot be had.
    fn allocate_states(&mut self, _n_slots: usize) -> Result<(), ModelError> {
        Ok(())
    }

    /// Copies recurrent states, each a whole slot, in order: `(from, to)`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a slot out of range, which every slot of a decoder without such states is.
    fn copy_states(&mut self, _pairs: &[(u32, u32)]) -> Result<(), ModelError> {
        Err(no_states("copy_states"))
    }

    /// Sets recurrent states to those before a sequence's first token.
    ///
    /// # Errors
    /// As [`Self::copy_states`].
    fn reset_states(&mut self, _slots: &[u32]) -> Result<(), ModelError> {
        Err(no_states("reset_states"))
    }

    /// Projects encoder output to the keys and values of every layer that cross-attends.
    ///
    /// `rows` are taken as they are stored, `[slots.len(), encoder_hidden]` in all; row `i` goes to cross slot `slots[i]`.
    /// Rows are independent: of one or several encoder outputs, in one call or several, each gives the same keys and
    /// values.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for wrong shapes or slots, or a decoder without cross-attention.
    fn project_cross(&mut self, rows: &[EncodedRows<'_>], slots: &[u32]) -> Result<(), ModelError>;

    /// As [`Self::project_cross`], for sequences with an adapter.
    ///
    /// # Errors
    /// As [`Self::project_cross`], and [`ModelError::Kernel`] for an adapter that is not loaded.
    fn project_cross_adapted(
        &mut self,
        adapter: AdapterId,
        _rows: &[EncodedRows<'_>],
        _slots: &[u32],
    ) -> Result<(), ModelError> {
        Err(no_adapter(adapter))
    }

    /// Loads an adapter; steps may name it from then on. One that is loaded stays as it is.
    ///
    /// # Errors
    /// [`ModelError::Config`] for an adapter of layers that the decoder does not have, or a decoder that takes none;
    /// [`ModelError::TensorShape`], or [`ModelError::Kernel`] without memory.
    fn load_adapter(&mut self, adapter: &LoraAdapter) -> Result<(), ModelError> {
        Err(no_adapter(adapter.id()))
    }

    /// Drops an adapter. No step under way may name it.
    fn unload_adapter(&mut self, _id: AdapterId) {}

    /// Runs a step and chooses tokens by its logits, `[logit_rows.len(), vocab]`; rows of them that are asked for whole come
    /// along.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a step whose parts do not fit each other.
    fn forward(&mut self, step: &StepInput<'_>) -> Result<Choices, ModelError>;

    /// Begins a step and returns without waiting for a device. Ids of `carried` rows are tokens that the step submitted before
    /// this one chooses; that step must be under way.
    ///
    /// Steps run in the order in which they are submitted, as everything else that is asked of the decoder meanwhile. Where
    /// nothing can overlap the step is computed at once.
    ///
    /// # Errors
    /// As [`Self::forward`], and [`ModelError::Kernel`] without the step before.
    fn submit(&mut self, step: &StepInput<'_>, carried: &[CarriedToken]) -> Result<Pending, ModelError> {
        match carried {
            [] => Ok(Pending::Done(self.forward(step)?)),
            _ => Err(no_step("submit").into()),
        }
    }

    /// Waits for a submitted step, and for no later one. Steps are waited for in their order; one that is not is dropped with
    /// the next.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the device fails, or for a step of another decoder.
    fn wait(&mut self, pending: Pending) -> Result<Choices, ModelError> {
        match pending {
            Pending::Done(choices) => Ok(choices),
            Pending::UnderWay(_) => Err(no_step("wait").into()),
        }
    }

    /// From now on steps of decoding are captured as graphs where the back end does so; `None`: they run without. Caches
    /// have room for the padding of graphs as large as were asked for before they were allocated.
    fn use_graphs(&mut self, _config: Option<DecodeGraphConfig>) {}

    /// Steps of decoding with and without graphs so far.
    fn graph_stats(&self) -> GraphStats {
        GraphStats::default()
    }

    /// Begins a pass over known tokens for the cross-attention weights of chosen heads. An earlier pass that has not
    /// ended is dropped. It neither reads nor writes the caches: steps may run between its layers.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a head that is not there, rows of another width, or a decoder without
    /// cross-attention, which includes every decoder that does not override this.
    fn begin_align(&mut self, input: &AlignInput<'_>) -> Result<(), ModelError> {
        Err(no_align(&format!("no cross-attention to align {} tokens by", input.tokens.len())))
    }

    /// Runs one layer of the pass. After the last one the weights, `[heads.len(), n_tokens, n_rows]`, row-major; each
    /// row sums to 1.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if no pass has begun, or the back end fails; then the pass has ended.
    fn align_layer(&mut self) -> Result<Option<Vec<f32>>, ModelError> {
        Err(no_align("no pass has begun"))
    }

    /// All layers of a pass at once.
    ///
    /// # Errors
    /// As [`begin_align`](Self::begin_align) and [`align_layer`](Self::align_layer).
    fn align(&mut self, input: &AlignInput<'_>) -> Result<Vec<f32>, ModelError> {
        self.begin_align(input)?;
        loop {
            if let Some(weights) = self.align_layer()? {
                return Ok(weights);
            }
        }
    }

    /// Copies self-attention blocks `(from, to)`, for forks.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a block out of range.
    fn copy_blocks(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError>;

    /// Copies self-attention blocks to the host: `(device block, host block)`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a block out of range.
    fn swap_out(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError>;

    /// Copies self-attention blocks back: `(host block, device block)`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a block out of range.
    fn swap_in(&mut self, pairs: &[(u32, u32)]) -> Result<(), ModelError>;
}
