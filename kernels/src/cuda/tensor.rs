//! Activations on a device, and the arrays of a step.

use std::collections::HashMap;
use std::sync::Arc;

use half::bf16;
use parking_lot::Mutex;

use super::arguments::{Rotation, SharedSplits};
use super::element::Element;
use super::memory::Piece;
use super::queue::{Queue, as_bytes};
use super::sharing::SharingPlan;
use crate::check::Dims;
use crate::ops::{
    self, HostStep, Indices, Offsets, PagedSequences, RecurrentSequences, Result, RopePairs, StageBuilder,
    WeightedRows,
};

/// An activation, `[n_tokens, width]`. Clones share its memory until one of them is written.
#[derive(Clone, Debug)]
pub struct CudaTensor {
    data: Arc<Piece>,
    n_tokens: usize,
    width: usize,
}

impl CudaTensor {
    /// One whose values are undefined, in the element of the queue.
    pub(super) fn new(op: &'static str, queue: &Queue, dims: Dims) -> Result<Self> {
        Self::of(op, queue, queue.element(), dims)
    }

    /// The same in another element.
    pub(super) fn of(op: &'static str, queue: &Queue, element: Element, dims: Dims) -> Result<Self> {
        let (n_tokens, width) = dims;
        let n_bytes = n_tokens.saturating_mul(width).saturating_mul(element.size());
        Ok(Self { data: Arc::new(queue.take(op, n_bytes)?), n_tokens, width })
    }

    /// `(n_tokens, width)`.
    pub(super) fn dims(&self) -> Dims {
        (self.n_tokens, self.width)
    }

    /// Number of values.
    pub(super) fn n_values(&self) -> usize {
        self.n_tokens * self.width
    }

    /// Address on the device.
    pub(super) fn address(&self) -> u64 {
        self.data.address()
    }

    /// Rows `first ..` from values in f32, which a stream copies in its order.
    pub(super) fn fill_rows(
        &self,
        op: &'static str,
        queue: &Queue,
        first: usize,
        values: &[f32],
    ) -> Result<()> {
        let at = self.address() + (first * self.width * queue.element().size()) as u64;
        match queue.element() {
            Element::F32 => queue.upload_to(op, at, as_bytes(values)),
            Element::Bf16 => {
                let rounded: Vec<bf16> = values.iter().map(|value| bf16::from_f32(*value)).collect();
                queue.upload_to(op, at, as_bytes(&rounded))
            }
        }
    }

    /// The same values in other dimensions of as many.
    pub(super) fn reshape(self, (n_tokens, width): Dims) -> Self {
        Self { n_tokens, width, ..self }
    }

    /// The first rows alone.
    pub(super) fn first_rows(self, n_tokens: usize) -> Self {
        Self { n_tokens: n_tokens.min(self.n_tokens), ..self }
    }

    /// The address, to write to; a clone keeps the values that it has.
    pub(super) fn write(&mut self, op: &'static str, queue: &Queue) -> Result<u64> {
        if Arc::get_mut(&mut self.data).is_none() {
            let own = Self::new(op, queue, self.dims())?;
            queue.copy(op, self.address(), own.address(), self.n_values() * queue.element().size())?;
            *self = own;
        }
        Ok(self.address())
    }
}

/// The arrays of a step, in host memory for their sizes and on the device for kernels.
#[derive(Debug)]
pub struct CudaStep {
    host: HostStep,
    words: Piece,
    /// Splits that sequences share, by the first word of the sequences and the queries of a block: all layers have the same.
    shared: Mutex<HashMap<(usize, usize), MaybeShared>>,
}

/// A plan, unless sequences share nothing.
type MaybeShared = Option<Arc<StagedSharing>>;

/// A plan on a device.
#[derive(Debug)]
pub(super) struct StagedSharing {
    words: Piece,
    n_splits: usize,
}

impl StagedSharing {
    /// Blocks of each key head.
    pub(super) fn n_splits(&self) -> usize {
        self.n_splits
    }

    /// The plan as a kernel has it.
    pub(super) fn argument(&self) -> SharedSplits {
        let splits = self.words.address();
        SharedSplits { splits, queries: splits + (3 * self.n_splits * size_of::<u32>()) as u64 }
    }
}

impl CudaStep {
    /// Takes them to the device.
    pub(super) fn new(queue: &Queue, builder: StageBuilder) -> Result<Self> {
        let host = builder.finish();
        let words = queue.upload("stage", host.words())?;
        Ok(Self::at(host, words))
    }

    /// Arrays whose words are at an address of the device, or will be.
    pub(super) fn at(host: HostStep, words: Piece) -> Self {
        Self { host, words, shared: Mutex::default() }
    }

    /// The splits that sequences of at most `most` queries share, for blocks of as many; `None` if they share none.
    pub(super) fn shared_splits(
        &self,
        op: &'static str,
        queue: &Queue,
        seqs: PagedSequences,
        most: usize,
    ) -> Result<MaybeShared> {
        let batch = self.host.paged(op, seqs)?;
        let [queries, ..] = seqs.words();
        let mut shared = self.shared.lock();
        if let Some(known) = shared.get(&(queries.start, most)) {
            return Ok(known.clone());
        }
        let staged = match SharingPlan::of(&batch, most) {
            Some(plan) => {
                let words = queue.upload(op, &plan.words())?;
                Some(Arc::new(StagedSharing { words, n_splits: plan.n_splits() }))
            }
            None => None,
        };
        shared.insert((queries.start, most), staged.clone());
        Ok(staged)
    }

    /// Address of the words of all arrays.
    pub(super) fn address(&self) -> u64 {
        self.words.address()
    }

    /// The arrays in host memory.
    pub(super) fn host(&self) -> &HostStep {
        &self.host
    }

    /// Address of a word.
    fn word(&self, word: usize) -> u64 {
        self.words.address() + (word * size_of::<u32>()) as u64
    }

    /// Address of indices.
    pub(super) fn indices(&self, op: &'static str, indices: Indices) -> Result<u64> {
        self.host.indices(op, indices)?;
        Ok(self.word(indices.words().start))
    }

    /// Address of offsets.
    pub(super) fn offsets(&self, op: &'static str, offsets: Offsets) -> Result<u64> {
        self.host.offsets(op, offsets)?;
        Ok(self.word(offsets.words().start))
    }

    /// Address of the weights of rows.
    pub(super) fn weights(&self, op: &'static str, rows: WeightedRows) -> Result<u64> {
        self.host.weighted(op, rows)?;
        Ok(self.word(rows.weight_words().start))
    }

    /// A rotation with the addresses of its cosines and sines.
    pub(super) fn rotation(&self, op: &'static str, rotation: ops::Rotation) -> Result<Rotation> {
        let ops::Rotation { shape, angles } = rotation;
        self.host.angles(op, angles)?;
        let [cos, sin] = angles.words().map(|words| self.word(words.start));
        let is_interleaved = u32::from(shape.pairs == RopePairs::Interleaved);
        Ok(Rotation { cos, sin, rotary_dim: shape.rotary_dim as u32, is_interleaved })
    }

    /// Addresses of `query_start_loc` and of the slots of states.
    pub(super) fn recurrent(&self, op: &'static str, seqs: RecurrentSequences) -> Result<[u64; 2]> {
        self.host.recurrent(op, seqs)?;
        Ok(seqs.words().map(|words| self.word(words.start)))
    }

    /// Addresses of `query_start_loc`, `table_start_loc`, `block_tables`, `seq_lens`.
    pub(super) fn paged(&self, op: &'static str, seqs: PagedSequences) -> Result<[u64; 4]> {
        self.host.paged(op, seqs)?;
        Ok(seqs.words().map(|words| self.word(words.start)))
    }
}
