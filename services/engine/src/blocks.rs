//! KV blocks: a pool of ids, tables that hold some of them, and contents that outlive their tables.
//!
//! A block is a number here; its bytes live in a decoder's cache. Ids leave the pool only inside a
//! [`BlockTable`], and a table gives its blocks back when it is dropped, so an error path cannot lose one.
//! Several tables may hold a block: [`BlockTable::fork`] shares all blocks, and [`BlockTable::own`] replaces a
//! shared block before it is written (copy-on-write). A full block can be published under a prefix key. When no
//! table holds it any more it is *cached*: free to be taken, and until then found by [`BlockPool::find`]. The
//! least recently used one is taken first; of one table the last block goes first, since a prefix serves more
//! sequences than its continuation.
//!
//! Where every layer attends within a sliding window, a pool knows the longest one. A table then gives back the blocks that no
//! layer sees any more ([`BlockTable::release_unseen`]), and a prefix is found by the blocks that its continuation sees.
//!
//! `free + used = total` always; cached blocks count as free. `audit` recounts it in the tests.
//!
//! The paging is that of PagedAttention (<https://arxiv.org/abs/2309.06180>).

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;
use thiserror::Error;
use triptych_core::PrefixKey;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Most blocks of a pool, so that every slot number fits `u32`.
pub const MAX_BLOCKS: usize = u32::MAX as usize / KV_BLOCK_TOKENS;

/// Id of a block in one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u32);

impl BlockId {
    /// Index of the block in the kernels' cache.
    pub fn index(self) -> u32 {
        self.0
    }
}

/// Source and destination of a block copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPair {
    /// Source.
    pub from: BlockId,
    /// Destination.
    pub to: BlockId,
}

/// Fewer blocks are free than needed. Nothing was taken.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{needed} blocks are needed, {free} are free")]
pub struct OutOfBlocks {
    /// Needed blocks.
    pub needed: usize,
    /// Free blocks.
    pub free: usize,
}

/// The blocks of a table.
#[derive(Clone, Copy, Debug)]
pub struct TableBlocks<'a> {
    /// Blocks in the order of tokens. In the place of each that was given back stands the first that was not.
    pub blocks: &'a [BlockId],
    /// Blocks from the first on that were given back.
    pub n_released: usize,
}

impl<'a> TableBlocks<'a> {
    /// Blocks that the table holds.
    pub fn held(self) -> &'a [BlockId] {
        self.blocks.get(self.n_released..).unwrap_or(&[])
    }
}

/// Blocks that `n_tokens` tokens take.
pub fn blocks_for(n_tokens: usize) -> usize {
    n_tokens.div_ceil(KV_BLOCK_TOKENS)
}

/// A fixed number of blocks.
#[derive(Debug)]
pub struct BlockPool {
    total: usize,
    state: SharedPoolState,
}

/// One thread uses a pool. The lock makes tables `Send` and is never contended.
type SharedPoolState = Arc<Mutex<PoolState>>;

#[derive(Debug)]
struct PoolState {
    /// Free blocks without cached contents; the last one is handed out next.
    empty: Vec<BlockId>,
    /// Free blocks with cached contents, by the count of releases at which each became free.
    cached: BTreeMap<u64, BlockId>,
    /// Accounting of each block, `[n_blocks]`.
    meta: Vec<BlockMeta>,
    /// Published blocks, held or cached.
    by_key: HashMap<PrefixKey, BlockId>,
    /// Releases so far of published blocks.
    n_releases: u64,
    /// Keys that a query sees at most, its own included; `None`: all.
    window: Option<NonZeroU32>,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct BlockMeta {
    /// Number of tables that hold it.
    ref_count: u32,
    /// Prefix key under which it is published.
    key: Option<PrefixKey>,
    /// Its key in `cached`, while it is there.
    cached_at: Option<u64>,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks, at most [`MAX_BLOCKS`].
    pub fn new(n_blocks: usize) -> Self {
        let total = n_blocks.min(MAX_BLOCKS);
        let state = PoolState {
            empty: (0..total as u32).rev().map(BlockId).collect(),
            cached: BTreeMap::new(),
            meta: vec![BlockMeta::default(); total],
            by_key: HashMap::new(),
            n_releases: 0,
            window: None,
        };
        Self { total, state: Arc::new(Mutex::new(state)) }
    }

    /// The same for layers whose queries see at most `window` keys, their own included; `None`: all.
    #[must_use]
    pub fn with_window(self, window: Option<NonZeroU32>) -> Self {
        self.state.lock().window = window;
        self
    }

    /// Number of all blocks.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Number of blocks that no table holds, cached ones included.
    pub fn free(&self) -> usize {
        self.state.lock().free()
    }

    /// Number of free blocks with cached contents.
    pub fn cached(&self) -> usize {
        self.state.lock().cached.len()
    }

    /// Number of blocks that a table holds.
    pub fn used(&self) -> usize {
        self.total - self.free()
    }

    /// True if `n_tokens` tokens fit the free blocks.
    pub fn can_allocate(&self, n_tokens: usize) -> bool {
        blocks_for(n_tokens) <= self.free()
    }

    /// A table with room for `n_tokens` tokens.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn table(&self, n_tokens: usize) -> Result<BlockTable, OutOfBlocks> {
        let mut table = self.empty_table();
        table.grow(n_tokens)?;
        Ok(table)
    }

    /// A table over the longest published prefix of `keys`.
    pub fn find(&self, keys: &[PrefixKey]) -> BlockTable {
        let mut table = self.empty_table();
        let mut state = self.state.lock();
        let known = keys.iter().map_while(|key| state.by_key.get(key).copied());
        table.blocks = known.collect();
        for block in &table.blocks {
            state.hold(*block);
        }
        drop(state);
        table
    }

    /// A table over the longest prefix of `keys` of which everything is published that its continuation sees: without a
    /// window the same as [`find`](Self::find).
    pub fn find_seen(&self, keys: &[PrefixKey]) -> BlockTable {
        let mut table = self.empty_table();
        let mut state = self.state.lock();
        let known: Vec<Option<BlockId>> = keys.iter().map(|key| state.by_key.get(key).copied()).collect();
        // For each prefix, the published blocks in a row that it ends with.
        let mut n_last = 0;
        let mut longest = (0, 0);
        for (block_idx, block) in known.iter().enumerate() {
            n_last = if block.is_some() { n_last + 1 } else { 0 };
            let n_blocks = block_idx + 1;
            let first_seen = state.first_seen(n_blocks * KV_BLOCK_TOKENS).min(block_idx);
            if n_blocks - first_seen <= n_last {
                longest = (first_seen, n_blocks);
            }
        }
        let held: Vec<BlockId> = known[longest.0..longest.1].iter().copied().flatten().collect();
        held.iter().for_each(|block| state.hold(*block));
        drop(state);
        table.n_released = longest.0;
        table.blocks = held.first().into_iter().cycle().take(longest.0).chain(&held).copied().collect();
        table
    }

    /// New blocks in place of those of `tables`, which may be of another pool. Blocks that the tables share are
    /// shared in the copy too. Returns the tables and the block copies to make.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn mirror(
        &self,
        tables: &[TableBlocks<'_>],
    ) -> Result<(Vec<BlockTable>, Vec<BlockPair>), OutOfBlocks> {
        let mut copy_idx: HashMap<BlockId, usize> = HashMap::new();
        let mut distinct: Vec<BlockId> = Vec::new();
        for block in tables.iter().flat_map(|table| table.held()) {
            copy_idx.entry(*block).or_insert_with(|| {
                distinct.push(*block);
                distinct.len() - 1
            });
        }
        let fresh = self.table(distinct.len() * KV_BLOCK_TOKENS)?;
        let mut state = self.state.lock();
        let mut mirrored = Vec::with_capacity(tables.len());
        for table in tables {
            let held = table.held().iter().map(|b| fresh.blocks[copy_idx[b]]);
            held.clone().for_each(|block| state.hold(block));
            let n_released = table.blocks.len() - table.held().len();
            let blocks = held.clone().take(1).cycle().take(n_released).chain(held).collect();
            mirrored.push(BlockTable { blocks, n_released, state: Arc::clone(&self.state) });
        }
        let pairs = distinct.iter().zip(&fresh.blocks).map(|(from, to)| BlockPair { from: *from, to: *to });
        let pairs = pairs.collect();
        drop(state);
        Ok((mirrored, pairs))
    }

    /// Clears the cached contents: nothing published so far is found again. Tables keep their blocks.
    pub fn reset(&self) {
        let mut state = self.state.lock();
        state.by_key.clear();
        let cached = std::mem::take(&mut state.cached);
        state.empty.extend(cached.into_values());
        for meta in &mut state.meta {
            (meta.key, meta.cached_at) = (None, None);
        }
    }

    fn empty_table(&self) -> BlockTable {
        BlockTable { blocks: Vec::new(), n_released: 0, state: Arc::clone(&self.state) }
    }
}

impl PoolState {
    /// Index of the first block that the query of token `token` sees.
    fn first_seen(&self, token: usize) -> usize {
        self.window.map_or(0, |window| (token + 1).saturating_sub(window.get() as usize) / KV_BLOCK_TOKENS)
    }

    fn free(&self) -> usize {
        self.empty.len() + self.cached.len()
    }

    fn meta(&mut self, block: BlockId) -> &mut BlockMeta {
        &mut self.meta[block.0 as usize]
    }

    /// Takes a block for one table: one without contents, or the least recently used cached one.
    fn take(&mut self) -> Option<BlockId> {
        let block = self.empty.pop().or_else(|| {
            let (_, block) = self.cached.pop_first()?;
            let key = self.meta(block).key.take();
            key.and_then(|key| self.by_key.remove(&key));
            Some(block)
        })?;
        *self.meta(block) = BlockMeta { ref_count: 1, ..BlockMeta::default() };
        Some(block)
    }

    /// Adds a holder to a held or cached block.
    fn hold(&mut self, block: BlockId) {
        let meta = self.meta(block);
        meta.ref_count += 1;
        if let Some(at) = meta.cached_at.take() {
            self.cached.remove(&at);
        }
    }

    /// Removes a holder.
    fn release(&mut self, block: BlockId) {
        let at = self.n_releases;
        let meta = self.meta(block);
        meta.ref_count -= 1;
        if meta.ref_count > 0 {
            return;
        }
        if meta.key.is_none() {
            return self.empty.push(block);
        }
        meta.cached_at = Some(at);
        self.n_releases += 1;
        self.cached.insert(at, block);
    }
}

/// Blocks of one sequence, in the order of its tokens. Gives them back when dropped.
#[derive(Debug)]
pub struct BlockTable {
    /// In the place of each block that was given back stands the first that was not, so that a kernel that reads more than it
    /// uses reads computed keys of the same sequence.
    blocks: Vec<BlockId>,
    /// Blocks from the first on that were given back.
    n_released: usize,
    state: SharedPoolState,
}

impl BlockTable {
    /// Grows to room for `n_tokens` tokens in all; never shrinks.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the table is unchanged then.
    pub fn grow(&mut self, n_tokens: usize) -> Result<(), OutOfBlocks> {
        let needed = blocks_for(n_tokens).saturating_sub(self.blocks.len());
        let mut state = self.state.lock();
        let free = state.free();
        if needed > free {
            return Err(OutOfBlocks { needed, free });
        }
        self.blocks.extend((0..needed).filter_map(|_| state.take()));
        Ok(())
    }

    /// Block ids, in the order of tokens. In the place of each that was given back stands the first that was not.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// The first `n_blocks` blocks, or all if there are fewer; none if all of them were given back.
    pub fn first(&self, n_blocks: usize) -> TableBlocks<'_> {
        let blocks = &self.blocks[..n_blocks.min(self.blocks.len())];
        match self.n_released < blocks.len() {
            true => TableBlocks { blocks, n_released: self.n_released },
            false => TableBlocks { blocks: &[], n_released: 0 },
        }
    }

    /// Blocks that it holds.
    pub fn n_held(&self) -> usize {
        self.blocks.len() - self.n_released
    }

    /// Gives back the blocks that neither token `next` nor any after it sees. The last block stays. No effect without a window.
    pub fn release_unseen(&mut self, next: usize) {
        let mut state = self.state.lock();
        let first_seen = state.first_seen(next).min(self.blocks.len().saturating_sub(1));
        for block in self.blocks.get(self.n_released..first_seen).unwrap_or(&[]).iter().rev() {
            state.release(*block);
        }
        drop(state);
        self.n_released = self.n_released.max(first_seen);
        self.fill_released();
    }

    /// Puts the first block that it holds in the place of each that was given back.
    fn fill_released(&mut self) {
        if let Some(first) = self.blocks.get(self.n_released).copied() {
            self.blocks[..self.n_released].fill(first);
        }
    }

    /// Slot of the key and value of token `token`. `None` past the table's room.
    pub fn slot(&self, token: usize) -> Option<u32> {
        let block = self.blocks.get(token / KV_BLOCK_TOKENS)?;
        Some(block.0 * KV_BLOCK_TOKENS as u32 + (token % KV_BLOCK_TOKENS) as u32)
    }

    /// Another table over the same blocks. Growth adds blocks to one table only; before a shared block is
    /// written, its writer must [`own`](Self::own) it.
    pub fn fork(&self) -> Self {
        self.fork_first(self.blocks.len())
    }

    /// Another table over the first `n_blocks` blocks, or all if there are fewer; an empty one if all of them were given back.
    pub fn fork_first(&self, n_blocks: usize) -> Self {
        let first = self.first(n_blocks);
        let mut state = self.state.lock();
        first.held().iter().for_each(|block| state.hold(*block));
        drop(state);
        Self { blocks: first.blocks.to_vec(), n_released: first.n_released, state: Arc::clone(&self.state) }
    }

    /// True if another table holds the block of token `token` too.
    pub fn is_shared_at(&self, token: usize) -> bool {
        let block = self.blocks.get(token / KV_BLOCK_TOKENS).filter(|_| !self.is_released_at(token));
        block.is_some_and(|b| self.state.lock().meta(*b).ref_count > 1)
    }

    /// Makes the block of token `token` exclusive. A shared block is replaced by a new one, to which its
    /// contents must be copied before it is read or written.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the table is unchanged then.
    pub fn own(&mut self, token: usize) -> Result<Option<BlockPair>, OutOfBlocks> {
        let block_idx = token / KV_BLOCK_TOKENS;
        if !self.is_shared_at(token) {
            return Ok(None);
        }
        let mut state = self.state.lock();
        let from = self.blocks[block_idx];
        let to = state.take().ok_or(OutOfBlocks { needed: 1, free: 0 })?;
        state.release(from);
        drop(state);
        self.blocks[block_idx] = to;
        self.fill_released();
        Ok(Some(BlockPair { from, to }))
    }

    /// True if the block of token `token` was given back.
    fn is_released_at(&self, token: usize) -> bool {
        token / KV_BLOCK_TOKENS < self.n_released
    }

    /// Publishes block number `block_idx`, which is full and will not be written again. No effect past the last
    /// block, for one that was given back, or when another block has the key.
    pub fn publish(&self, block_idx: usize, key: PrefixKey) {
        let held = self.blocks.get(block_idx).filter(|_| block_idx >= self.n_released);
        let Some(block) = held.copied() else { return };
        let mut state = self.state.lock();
        if state.meta(block).key.is_none() && !state.by_key.contains_key(&key) {
            state.meta(block).key = Some(key);
            state.by_key.insert(key, block);
        }
    }

    /// True if another table holds any of these blocks.
    pub fn is_shared(&self) -> bool {
        let mut state = self.state.lock();
        self.blocks[self.n_released..].iter().any(|b| state.meta(*b).ref_count > 1)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        for block in self.blocks.drain(self.n_released..).rev() {
            state.release(block);
        }
    }
}

#[cfg(test)]
mod tests;
