//! The prefill and decode stages: token rows to logits over paged KV.
//!
//! The engine owns the block tables; a decoder is handed a view of them for one step and writes keys and
//! values where `slot_mapping` says. Encoder-decoder models also read cross-attention blocks, which
//! [`Decoder::project_cross`] fills once per encoder output. [`TransformerDecoder`] is the only
//! implementation, over any back end, and a spec tells it which model it is.

use crate::error::ModelError;
pub use triptych_kernels::ops::PagedBatch;

mod head;
mod cross_rows;
mod transformer;

pub use transformer::TransformerDecoder;

/// What the engine must know to size pools and batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderInfo {
    /// Width of the logits.
    pub vocab: usize,
    /// Tokens that can be read: those, and after them such as are never written.
    pub n_readable: usize,
    /// Width of a row of encoder output it takes.
    pub encoder_hidden: usize,
    /// Tokens the context holds.
    pub max_context: usize,
    /// Whether it has cross-attention: items then go to cross blocks, not into the token rows.
    pub cross_attention: bool,
    /// Whether a sequence may do without it: its tokens then pass by the layers that cross-attend.
    pub cross_optional: bool,
    /// Bytes of one block of self-attention KV, all layers.
    pub self_block_bytes: usize,
    /// Bytes of one block of cross-attention KV, all layers; 0 without cross-attention.
    pub cross_block_bytes: usize,
}

/// Rows of encoder output that take the place of token embeddings in a step.
#[derive(Clone, Copy, Debug)]
pub struct EmbedRows<'a> {
    /// First row of the step they replace.
    pub first_row: usize,
    /// `[n, encoder_hidden]`, row-major.
    pub values: &'a [f32],
}

/// One step, flat: the tokens of all sequences in a line, no padding.
#[derive(Clone, Copy, Debug)]
pub struct StepInput<'a> {
    /// Token of each row, `[n_tokens]`.
    pub token_ids: &'a [u32],
    /// Position of each row as (temporal, height, width), `[n_tokens]`; all three equal for plain text.
    pub positions: &'a [[u32; 3]],
    /// Rows that are not token embeddings; ascending and disjoint.
    pub embeds: &'a [EmbedRows<'a>],
    /// Self-attention slot each row's key and value go to, `[n_tokens]`.
    pub slot_mapping: &'a [u32],
    /// Self-attention: sequences and their blocks.
    pub self_kv: triptych_kernels::ops::PagedBatch<'a>,
    /// Cross-attention: the same sequences and their blocks; `None` without cross-attention.
    ///
    /// Where cross-attention is optional, a sequence of no keys here has none.
    pub cross_kv: Option<triptych_kernels::ops::PagedBatch<'a>>,
    /// Token of each sequence from which on its tokens cross-attend, `[n_seqs]`; `None`: all of them do. Only
    /// where cross-attention is optional may a sequence start later than at 0.
    pub cross_from: Option<&'a [u32]>,
    /// Rows whose logits are wanted.
    pub logit_rows: &'a [u32],
}

/// Tokens that are known, over the encoder rows they were written from.
#[derive(Clone, Copy, Debug)]
pub struct AlignInput<'a> {
    /// The tokens, from position 0, `[n_tokens]`.
    pub tokens: &'a [u32],
    /// Encoder output rows, `[n_rows, encoder_hidden]`, row-major.
    pub rows: &'a [f32],
    /// Which heads, as (layer, head).
    pub heads: &'a [(u32, u32)],
}

/// A decoder with its weights and KV caches on a back end. One thread drives it.
pub trait Decoder: Send {
    /// Sizes.
    fn info(&self) -> DecoderInfo;

    /// Makes the caches, dropping earlier ones with their contents.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the memory cannot be had.
    fn allocate_kv(&mut self, self_blocks: usize, cross_blocks: usize) -> Result<(), ModelError>;

    /// Makes the host's cache of self-attention blocks, dropping an earlier one with its contents.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] if the memory cannot be had.
    fn allocate_host(&mut self, n_blocks: usize) -> Result<(), ModelError>;

    /// Projects encoder output rows `[slots.len(), encoder_hidden]` to keys and values of every layer and writes
    /// row `i` to cross slot `slots[i]`.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for wrong shapes or slots, or a decoder without cross-attention.
    fn project_cross(&mut self, rows: &[f32], slots: &[u32]) -> Result<(), ModelError>;

    /// Runs a step and returns logits `[logit_rows.len(), vocab]`, row-major.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a step whose parts do not fit each other.
    fn forward(&mut self, step: &StepInput<'_>) -> Result<Vec<f32>, ModelError>;

    /// Where chosen heads of cross-attention look while the tokens are read, each row summing to 1:
    /// `[heads.len(), n_tokens, n_rows]`, row-major. One pass beside the caches, which it neither reads nor writes.
    ///
    /// # Errors
    /// [`ModelError::Kernel`] for a head that is not there, rows of another width, or a decoder without
    /// cross-attention, as which one counts that does not override this.
    fn align(&mut self, input: &AlignInput<'_>) -> Result<Vec<f32>, ModelError> {
        let message = format!("no cross-attention to align {} tokens by", input.tokens.len());
        Err(triptych_kernels::KernelError::Library { op: "align", message }.into())
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
