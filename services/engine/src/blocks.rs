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
//! `free + used = total` always; cached blocks count as free. `audit` recounts it in the tests.
//!
//! The paging is that of PagedAttention (<https://arxiv.org/abs/2309.06180>).

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
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
    n_released: u64,
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
            n_released: 0,
        };
        Self { total, state: Arc::new(Mutex::new(state)) }
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

    /// New blocks in place of those of `tables`, which may be of another pool. Blocks that the tables share are
    /// shared in the copy too. Returns the tables and the block copies to make.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn mirror(&self, tables: &[&[BlockId]]) -> Result<(Vec<BlockTable>, Vec<BlockPair>), OutOfBlocks> {
        let mut copy_idx: HashMap<BlockId, usize> = HashMap::new();
        let mut distinct: Vec<BlockId> = Vec::new();
        for block in tables.iter().copied().flatten() {
            copy_idx.entry(*block).or_insert_with(|| {
                distinct.push(*block);
                distinct.len() - 1
            });
        }
        let fresh = self.table(distinct.len() * KV_BLOCK_TOKENS)?;
        let mut state = self.state.lock();
        let mut mirrored = Vec::with_capacity(tables.len());
        for table in tables {
            let blocks: Vec<BlockId> = table.iter().map(|b| fresh.blocks[copy_idx[b]]).collect();
            blocks.iter().for_each(|block| state.hold(*block));
            mirrored.push(BlockTable { blocks, state: Arc::clone(&self.state) });
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
        BlockTable { blocks: Vec::new(), state: Arc::clone(&self.state) }
    }
}

impl PoolState {
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
        let at = self.n_released;
        let meta = self.meta(block);
        meta.ref_count -= 1;
        if meta.ref_count > 0 {
            return;
        }
        if meta.key.is_none() {
            return self.empty.push(block);
        }
        meta.cached_at = Some(at);
        self.n_released += 1;
        self.cached.insert(at, block);
    }
}

/// Blocks of one sequence, in the order of its tokens. Gives them back when dropped.
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
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

    /// Block ids, in the order of tokens.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
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

    /// Another table over the first `n_blocks` blocks, or all if there are fewer.
    pub fn fork_first(&self, n_blocks: usize) -> Self {
        let blocks = self.blocks[..n_blocks.min(self.blocks.len())].to_vec();
        let mut state = self.state.lock();
        blocks.iter().for_each(|block| state.hold(*block));
        drop(state);
        Self { blocks, state: Arc::clone(&self.state) }
    }

    /// True if another table holds the block of token `token` too.
    pub fn is_shared_at(&self, token: usize) -> bool {
        let block = self.blocks.get(token / KV_BLOCK_TOKENS);
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
        self.blocks[block_idx] = to;
        Ok(Some(BlockPair { from, to }))
    }

    /// Publishes block number `block_idx`, which is full and will not be written again. No effect past the last
    /// block, or when another block has the key.
    pub fn publish(&self, block_idx: usize, key: PrefixKey) {
        let Some(block) = self.blocks.get(block_idx).copied() else { return };
        let mut state = self.state.lock();
        if state.meta(block).key.is_none() && !state.by_key.contains_key(&key) {
            state.meta(block).key = Some(key);
            state.by_key.insert(key, block);
        }
    }

    /// True if another table holds any of these blocks.
    pub fn is_shared(&self) -> bool {
        let mut state = self.state.lock();
        self.blocks.iter().any(|b| state.meta(*b).ref_count > 1)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        let mut state = self.state.lock();
        for block in self.blocks.drain(..).rev() {
            state.release(block);
        }
    }
}

#[cfg(test)]
mod tests;
