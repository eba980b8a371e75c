//! The table of one group of layers.

use super::{BlockId, BlockPair, KvGroup, OutOfBlocks, SharedPoolState, TableBlocks, blocks_for};
use std::sync::Arc;
use triptych_core::PrefixKey;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Blocks of one sequence, in the order of its tokens. Gives them back when dropped.
#[derive(Debug)]
pub struct BlockTable {
    /// In the place of each block that was given back stands the first that was not, so that a kernel that reads more than it
    /// uses reads computed keys of the same sequence.
    blocks: Vec<BlockId>,
    /// Blocks from the first on that were given back.
    n_released: usize,
    group: KvGroup,
    state: SharedPoolState,
}

impl BlockTable {
    /// A table without blocks.
    pub(super) fn new(group: KvGroup, state: SharedPoolState) -> Self {
        Self { blocks: Vec::new(), n_released: 0, group, state }
    }

    /// Sets the blocks of an empty table to `n_released` that were given back, and `held` for which it counts as a holder.
    pub(super) fn set_blocks(&mut self, n_released: usize, held: &[BlockId]) {
        self.n_released = n_released;
        self.blocks = held.iter().take(1).cycle().take(n_released).chain(held).copied().collect();
    }

    /// State of its pool.
    pub(super) fn state(&self) -> &SharedPoolState {
        &self.state
    }

    /// True if its group gives blocks back that are behind a window.
    pub(super) fn has_window(&self) -> bool {
        self.group.window.is_some()
    }

    /// Blocks that it lacks for `n_tokens` tokens.
    pub(super) fn n_missing(&self, n_tokens: usize) -> usize {
        blocks_for(n_tokens).saturating_sub(self.blocks.len())
    }

    /// Grows to room for `n_tokens` tokens in all; never shrinks.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the table is unchanged then.
    pub fn grow(&mut self, n_tokens: usize) -> Result<(), OutOfBlocks> {
        let needed = self.n_missing(n_tokens);
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
            true => TableBlocks { blocks, n_released: self.n_released, group: self.group },
            false => TableBlocks { blocks: &[], n_released: 0, group: self.group },
        }
    }

    /// Blocks that it holds.
    pub fn n_held(&self) -> usize {
        self.blocks.len() - self.n_released
    }

    /// Gives back the blocks that neither token `next` nor any after it sees. The last block stays. No effect without a window.
    pub fn release_unseen(&mut self, next: usize) {
        let mut state = self.state.lock();
        let first_seen = self.group.first_seen(next).min(self.blocks.len().saturating_sub(1));
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
        Self {
            blocks: first.blocks.to_vec(),
            n_released: first.n_released,
            group: self.group,
            state: Arc::clone(&self.state),
        }
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
        let key = (self.group.idx, key);
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
