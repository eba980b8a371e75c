//! The arrays of a step: ids, slots, offsets, block tables, rotary angles. Checked once and laid into one buffer.
//!
//! All layers of a step index with the same arrays. A caller puts them into a [`StageBuilder`] and gets a handle for each;
//! the back end takes the builder ([`Backend::stage`](super::Backend::stage)), and ops name arrays by their handles. A
//! handle holds what checks need (a length, the largest index, sums of lengths), so an op compares a few numbers and
//! scans nothing. It knows its step: an op refuses the handle of another.
//!
//! The buffer is words of 32 bits, so a device needs one copy of it. With [rooms](StageBuilder::with_rooms) every array
//! starts at a fixed word, however long it is: a captured graph reads the arrays of each step where it read those of the
//! first.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use triptych_core::shape::KV_BLOCK_TOKENS;

use super::error::{KernelError, Result};
use crate::check::sizes;

mod host;
mod recurrent;

pub use host::HostStep;
pub use recurrent::{PADDING_SLOT, RecurrentBatch, RecurrentSequences};

/// Words that every array starts at a multiple of: 16 bytes, the widest load of a device's thread.
const ALIGNMENT: usize = 4;

/// The last id that was given to a builder. Ids are compared and nothing else; no result depends on one.
static LAST_ID: AtomicU64 = AtomicU64::new(0);

/// Collects the arrays of a step, or of an encoder batch.
#[derive(Debug)]
pub struct StageBuilder {
    id: u64,
    words: Vec<u32>,
    arrays: Vec<StagedArray>,
    /// Words that each array may have, in the order in which they are added.
    rooms: Option<Vec<usize>>,
}

/// An array in the buffer of its step, as far as a captured forward must find it in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StagedArray {
    /// First word.
    pub(crate) start: usize,
    /// Words.
    pub(crate) len: usize,
    /// Bounds of its words.
    pub(crate) content: ArrayContent,
}

/// Bounds of the words of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArrayContent {
    /// Indices below `bound`.
    Indices { bound: usize },
    /// Offsets of sequences in `n_rows` rows. Queries of attention: the longest sequence has at most `max_seqlen_q` of them.
    Offsets { n_rows: usize, max_seqlen_q: Option<usize> },
    /// Offsets of sequences in block tables.
    Tables,
    /// Block ids below `bound`, as many as the tables have.
    Blocks { bound: usize },
    /// Numbers of keys, at most `max_seqlen_k`.
    SeqLens { max_seqlen_k: usize },
    /// Slots of recurrent states below `bound`, and those of padding.
    StateSlots { bound: usize },
    /// Cosines, sines, weights.
    Values,
}

/// Range of an array in the buffer of its step.
#[derive(Clone, Copy, Debug)]
struct Place {
    step: u64,
    start: usize,
    len: usize,
}

/// Rows, ids or slots, `[n]`.
#[derive(Clone, Copy, Debug)]
pub struct Indices {
    place: Place,
    /// One more than the largest; 0 of none.
    bound: usize,
}

/// Offsets of sequences in rows, `[n_seqs + 1]`: they start at 0 and never fall.
#[derive(Clone, Copy, Debug)]
pub struct Offsets {
    place: Place,
    /// The last offset.
    n_rows: usize,
}

/// Queries and keys of sequences.
#[derive(Clone, Copy, Debug)]
pub struct Sequences {
    /// Offsets of the sequences in the query rows.
    pub(crate) queries: Offsets,
    /// Offsets of the sequences in the key rows.
    pub(crate) keys: Offsets,
    /// Numbers of queries and keys.
    pub(crate) lens: SeqLens,
}

/// The sequences of a step as they lie in a paged cache, in host memory: what
/// [`StageBuilder::paged`](super::StageBuilder::paged) takes.
#[derive(Clone, Copy, Debug)]
pub struct PagedBatch<'a> {
    /// Offsets of the sequences in the query rows, `[n_seqs + 1]`.
    pub query_start_loc: &'a [u32],
    /// Offsets of the sequences in `block_tables`, `[n_seqs + 1]`.
    pub table_start_loc: &'a [u32],
    /// Block ids of all sequences one after another, each sequence's in the order of its tokens.
    pub block_tables: &'a [u32],
    /// Keys of each sequence, the ones of this step included, `[n_seqs]`.
    pub seq_lens: &'a [u32],
}

/// Sequences as they lie in a paged cache: a staged [`PagedBatch`].
#[derive(Clone, Copy, Debug)]
pub struct PagedSequences {
    /// Offsets of the sequences in the query rows.
    pub(crate) queries: Offsets,
    tables: Offsets,
    /// Block ids.
    pub(crate) blocks: Indices,
    seq_lens: Place,
    /// Numbers of queries and keys.
    pub(crate) lens: SeqLens,
    /// Bounds of every batch, for a forward that is captured.
    pub(crate) bounds: Option<PagedBounds>,
}

/// Queries and keys that a sequence in a paged cache has at most, whatever the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PagedBounds {
    /// Queries; 1 in steps of decoding.
    pub max_seqlen_q: usize,
    /// Keys. A device may keep a row's sums of every 256 of them, in f32, while it computes.
    pub max_seqlen_k: usize,
}

impl PagedBounds {
    /// Words of the four arrays of so many sequences, for [`StageBuilder::with_rooms`].
    pub fn rooms(self, n_seqs: usize) -> [usize; 4] {
        let n_blocks = self.max_seqlen_k.div_ceil(KV_BLOCK_TOKENS);
        [n_seqs + 1, n_seqs + 1, n_seqs.saturating_mul(n_blocks), n_seqs]
    }
}

/// Bounds, for checks, of the numbers of queries and keys, `(n_queries, n_keys)` of a sequence.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SeqLens {
    /// Sequences.
    pub(crate) n_seqs: usize,
    /// Queries of a sequence, at most.
    pub(crate) max_seqlen_q: usize,
    /// Products of both, summed up.
    pub(crate) n_scores: usize,
    /// The first sequence.
    pub(crate) first: Option<(usize, usize)>,
    /// One that differs from the first.
    pub(crate) other: Option<(usize, usize)>,
    /// One with more queries than keys.
    pub(crate) short: Option<(usize, usize)>,
}

/// Rows and their weights, `[n, n_terms]` each: entry `i` stands for a weighted sum of `n_terms` rows.
#[derive(Clone, Copy, Debug)]
pub struct WeightedRows {
    /// The rows.
    pub(crate) rows: Indices,
    weights: Place,
    /// Terms of a sum.
    pub(crate) n_terms: usize,
}

/// Cosines and sines, `[n_rows, n_pairs]` each.
#[derive(Clone, Copy, Debug)]
pub struct Angles {
    cos: Place,
    sin: Place,
    /// Angles of a row.
    pub(crate) n_pairs: usize,
}

impl StageBuilder {
    /// A builder that lays one array behind the other.
    pub fn new() -> Self {
        let id = LAST_ID.fetch_add(1, Ordering::Relaxed) + 1;
        Self { id, words: Vec::new(), arrays: Vec::new(), rooms: None }
    }

    /// A builder in which array `i`, in the order in which they are added, takes the place of `rooms[i]` words. Offsets take
    /// one array; sequences of their own keys or with states, weighted rows and angles two; paged sequences four.
    pub fn with_rooms(rooms: Vec<usize>) -> Self {
        Self { rooms: Some(rooms), ..Self::new() }
    }

    /// Adds rows, ids or slots.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for more than there is room for, here and in all that follow.
    pub fn indices(&mut self, indices: &[u32]) -> Result<Indices> {
        let bound = indices.iter().max().map_or(0, |&most| most as usize + 1);
        Ok(Indices { place: self.push(ArrayContent::Indices { bound }, indices.iter().copied())?, bound })
    }

    /// Adds offsets of sequences, `[n_seqs + 1]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless they start at 0 and never fall.
    pub fn offsets(&mut self, offsets: &[u32]) -> Result<Offsets> {
        let n_rows = offsets.last().map_or(0, |&end| end as usize);
        sizes::offsets("stage", "offsets", offsets, n_rows)?;
        let content = ArrayContent::Offsets { n_rows, max_seqlen_q: None };
        Ok(Offsets { place: self.push(content, offsets.iter().copied())?, n_rows })
    }

    /// Adds sequences whose queries have keys of their own, by the offsets of both, `[n_seqs + 1]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for offsets that are not, or of different numbers of sequences.
    pub fn sequences(&mut self, cu_seqlens_q: &[u32], cu_seqlens_k: &[u32]) -> Result<Sequences> {
        let first = self.arrays.len();
        let queries = self.offsets(cu_seqlens_q)?;
        let keys = self.offsets(cu_seqlens_k)?;
        sizes::same("stage", "n_seqs", &[keys.n_seqs()], &[queries.n_seqs()])?;
        let lens = SeqLens::of(lens(cu_seqlens_q).zip(lens(cu_seqlens_k)));
        self.bound_queries(first, lens.max_seqlen_q);
        Ok(Sequences { queries, keys, lens })
    }

    /// Adds sequences of at most `max_seqlen_q` queries, whatever the longest of this batch has: a captured forward takes
    /// every batch of as many sequences and rows.
    ///
    /// # Errors
    /// As [`Self::sequences`], and for a sequence that is longer.
    pub fn bounded_sequences(
        &mut self,
        cu_seqlens_q: &[u32],
        cu_seqlens_k: &[u32],
        max_seqlen_q: usize,
    ) -> Result<Sequences> {
        let first = self.arrays.len();
        let mut seqs = self.sequences(cu_seqlens_q, cu_seqlens_k)?;
        at_most("queries of a sequence", seqs.lens.max_seqlen_q, max_seqlen_q)?;
        seqs.lens.max_seqlen_q = max_seqlen_q;
        self.bound_queries(first, max_seqlen_q);
        Ok(seqs)
    }

    /// Adds sequences whose rows are queries and keys both, by their offsets, `[n_seqs + 1]`.
    ///
    /// # Errors
    /// As [`Self::offsets`].
    pub fn self_sequences(&mut self, cu_seqlens: &[u32]) -> Result<Sequences> {
        let first = self.arrays.len();
        let offsets = self.offsets(cu_seqlens)?;
        let lens = SeqLens::of(lens(cu_seqlens).map(|len| (len, len)));
        self.bound_queries(first, lens.max_seqlen_q);
        Ok(Sequences { queries: offsets, keys: offsets, lens })
    }

    /// Adds sequences in a paged cache.
    ///
    /// # Errors
    /// [`KernelError::Shape`] for arrays that do not fit each other, [`KernelError::Index`] for more keys than a table has
    /// room for.
    pub fn paged(&mut self, batch: PagedBatch<'_>) -> Result<PagedSequences> {
        let first = self.arrays.len();
        let PagedBatch { query_start_loc, table_start_loc, block_tables, seq_lens } = batch;
        let (queries, tables) = (self.offsets(query_start_loc)?, self.offsets(table_start_loc)?);
        sizes::same("stage", "blocks of the tables", &[block_tables.len()], &[tables.n_rows])?;
        sizes::same("stage", "table_start_loc", &[tables.n_seqs()], &[queries.n_seqs()])?;
        sizes::same("stage", "seq_lens", &[seq_lens.len()], &[queries.n_seqs()])?;
        for (n_blocks, &n_keys) in lens(table_start_loc).zip(seq_lens) {
            let (index, len) = (n_keys as usize, n_blocks * KV_BLOCK_TOKENS);
            if index > len {
                return Err(KernelError::Index { op: "stage", what: "key", index, len });
            }
        }
        let lens = SeqLens::of(batch.lens());
        let max_seqlen_k = seq_lens.iter().max().map_or(0, |&most| most as usize);
        let blocks = self.indices(block_tables)?;
        let seq_lens = self.push(ArrayContent::SeqLens { max_seqlen_k }, seq_lens.iter().copied())?;
        self.bound_queries(first, lens.max_seqlen_q);
        self.set_content(first + 1, ArrayContent::Tables);
        self.set_content(first + 2, ArrayContent::Blocks { bound: blocks.bound });
        Ok(PagedSequences { queries, tables, blocks, seq_lens, lens, bounds: None })
    }

    /// Adds sequences in a paged cache of at most so many queries and keys, whatever the longest of this batch has: a captured
    /// forward takes every batch of as many sequences and rows. It needs rooms, for tables are of any length.
    ///
    /// A sequence of one query and no keys is padding. Its query sees nothing, and gives zeros.
    ///
    /// # Errors
    /// As [`Self::paged`], and [`KernelError::Shape`] for a sequence that is longer.
    pub fn bounded_paged(&mut self, batch: PagedBatch<'_>, bounds: PagedBounds) -> Result<PagedSequences> {
        let first = self.arrays.len();
        let mut seqs = self.paged(batch)?;
        let PagedBounds { max_seqlen_q, max_seqlen_k } = bounds;
        at_most("queries of a sequence", seqs.lens.max_seqlen_q, max_seqlen_q)?;
        let longest = batch.seq_lens.iter().max().map_or(0, |&most| most as usize);
        at_most("keys of a sequence", longest, max_seqlen_k)?;
        self.bound_queries(first, max_seqlen_q);
        self.set_content(first + 3, ArrayContent::SeqLens { max_seqlen_k });
        seqs.lens.max_seqlen_q = max_seqlen_q;
        seqs.lens.short = batch.lens().find(|&len| len.0 > len.1 && len != (1, 0));
        seqs.bounds = Some(bounds);
        Ok(seqs)
    }

    /// Adds rows and their weights, `[n, n_terms]` each, row-major.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless both are as many, and whole sums.
    pub fn weighted_rows(&mut self, rows: &[u32], weights: &[f32], n_terms: usize) -> Result<WeightedRows> {
        sizes::same("stage", "weights of rows", &[weights.len()], &[rows.len()])?;
        sizes::divides("stage", "weighted rows", n_terms, rows.len())?;
        let rows = self.indices(rows)?;
        let weights = self.push(ArrayContent::Values, weights.iter().map(|weight| weight.to_bits()))?;
        Ok(WeightedRows { rows, weights, n_terms })
    }

    /// Adds the cosines and sines of rows, `[n_rows, n_pairs]` each, row-major.
    ///
    /// # Errors
    /// [`KernelError::Shape`] unless both are as many, and whole rows.
    pub fn angles(&mut self, cos: &[f32], sin: &[f32], n_pairs: usize) -> Result<Angles> {
        sizes::same("stage", "cos and sin", &[sin.len()], &[cos.len()])?;
        if n_pairs > 0 || !cos.is_empty() {
            sizes::divides("stage", "angles", n_pairs, cos.len())?;
        }
        let [cos, sin] = [cos, sin]
            .map(|values| self.push(ArrayContent::Values, values.iter().map(|value| value.to_bits())));
        Ok(Angles { cos: cos?, sin: sin?, n_pairs })
    }

    /// Notes the longest sequence of an array of queries, by its index.
    fn bound_queries(&mut self, array: usize, longest: usize) {
        if let Some(StagedArray { content: ArrayContent::Offsets { max_seqlen_q, .. }, .. }) =
            self.arrays.get_mut(array)
        {
            *max_seqlen_q = Some(longest);
        }
    }

    /// Notes what the words of an array are, by its index.
    fn set_content(&mut self, array: usize, content: ArrayContent) {
        if let Some(array) = self.arrays.get_mut(array) {
            array.content = content;
        }
    }

    /// Bytes that the arrays have in host memory.
    pub fn n_bytes(&self) -> usize {
        self.words.capacity() * size_of::<u32>()
    }

    /// Everything that was added, in host memory.
    pub fn finish(self) -> HostStep {
        HostStep::new(self.id, self.words, self.arrays)
    }

    /// Adds an array.
    fn push(&mut self, content: ArrayContent, words: impl Iterator<Item = u32>) -> Result<Place> {
        let start = self.words.len();
        self.words.extend(words);
        let len = self.words.len() - start;
        let room = match &self.rooms {
            Some(rooms) => rooms.get(self.arrays.len()).copied().unwrap_or(0),
            None => len,
        };
        at_most("words of an array", len, room)?;
        self.arrays.push(StagedArray { start, len, content });
        self.words.resize(start + room.next_multiple_of(ALIGNMENT), 0);
        Ok(Place { step: self.id, start, len })
    }
}

impl Default for StageBuilder {
    fn default() -> Self {
        Self::new()
    }
}

/// Lengths of the sequences of offsets that are some.
fn lens(offsets: &[u32]) -> impl Iterator<Item = usize> + '_ {
    offsets.windows(2).map(|pair| (pair[1] - pair[0]) as usize)
}

/// An error unless a length is within its bound.
fn at_most(what: &'static str, actual: usize, bound: usize) -> Result<()> {
    if actual <= bound {
        return Ok(());
    }
    let (expected, actual) = (vec![bound], vec![actual]);
    Err(KernelError::Shape { op: "stage", what, expected, actual })
}

impl PagedBatch<'_> {
    /// Queries and keys of each sequence.
    fn lens(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        lens(self.query_start_loc).zip(self.seq_lens.iter().map(|&n_keys| n_keys as usize))
    }
}

impl SeqLens {
    fn of(each: impl Iterator<Item = (usize, usize)>) -> Self {
        let mut lens = Self::default();
        for (n_queries, n_keys) in each {
            let len = (n_queries, n_keys);
            lens.n_seqs += 1;
            lens.max_seqlen_q = lens.max_seqlen_q.max(n_queries);
            lens.n_scores = lens.n_scores.saturating_add(n_queries.saturating_mul(n_keys));
            let first = *lens.first.get_or_insert(len);
            lens.other = lens.other.or((len != first).then_some(len));
            lens.short = lens.short.or((n_queries > n_keys).then_some(len));
        }
        lens
    }
}

impl Place {
    fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

impl Indices {
    /// Number of indices.
    #[expect(clippy::len_without_is_empty, reason = "whether there are any is nobody's question")]
    pub fn len(self) -> usize {
        self.place.len
    }

    /// One more than the largest; 0 of none.
    pub(crate) fn bound(self) -> usize {
        self.bound
    }

    /// Words of the step.
    pub fn words(self) -> Range<usize> {
        self.place.range()
    }
}

impl Offsets {
    /// Sequences.
    pub fn n_seqs(self) -> usize {
        self.place.len - 1
    }

    /// Rows of all sequences.
    pub fn n_rows(self) -> usize {
        self.n_rows
    }

    /// Words of the step.
    pub fn words(self) -> Range<usize> {
        self.place.range()
    }
}

impl Sequences {
    /// Offsets in the query rows and in the key rows.
    pub fn offsets(self) -> [Offsets; 2] {
        [self.queries, self.keys]
    }
}

impl PagedSequences {
    /// Sequences.
    pub fn n_seqs(self) -> usize {
        self.queries.n_seqs()
    }

    /// Words of the step: `query_start_loc`, `table_start_loc`, `block_tables`, `seq_lens`.
    pub fn words(self) -> [Range<usize>; 4] {
        [self.queries.place, self.tables.place, self.blocks.place, self.seq_lens].map(Place::range)
    }
}

impl WeightedRows {
    /// Sums.
    #[expect(clippy::len_without_is_empty, reason = "whether there are any is nobody's question")]
    pub fn len(self) -> usize {
        self.rows.len() / self.n_terms.max(1)
    }

    /// Words of the step: the weights.
    pub fn weight_words(self) -> Range<usize> {
        self.weights.range()
    }
}

impl Angles {
    /// Angles of all rows.
    pub(crate) fn len(self) -> usize {
        self.cos.len
    }

    /// Words of the step: cosines and sines.
    pub fn words(self) -> [Range<usize>; 2] {
        [self.cos, self.sin].map(Place::range)
    }
}

#[cfg(test)]
mod tests;
