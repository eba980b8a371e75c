//! The tables of one sequence: one for each group of layers, all of one pool.

use super::{BlockPair, BlockTable, OutOfBlocks, TableBlocks};
use triptych_core::PrefixKey;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Block tables of one sequence in the order of the groups. Those of groups with windows may be shorter than others while a prompt
/// is computed.
#[derive(Debug)]
pub struct KvTables {
    tables: Vec<BlockTable>,
}

impl KvTables {
    /// From the table of each group, in order.
    pub(super) fn new(tables: Vec<BlockTable>) -> Self {
        Self { tables }
    }

    /// The table of each group.
    pub fn groups(&self) -> &[BlockTable] {
        &self.tables
    }

    /// Blocks for which every group has room; those given back count.
    pub fn n_blocks(&self) -> usize {
        self.tables.iter().map(|table| table.blocks().len()).min().unwrap_or(0)
    }

    /// Tokens for which every group has room.
    pub fn n_room(&self) -> usize {
        self.n_blocks() * KV_BLOCK_TOKENS
    }

    /// Blocks that they hold.
    pub fn n_held(&self) -> usize {
        self.tables.iter().map(BlockTable::n_held).sum()
    }

    /// Grows to room for `n_tokens` tokens in all; never shrinks.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the tables are unchanged then.
    pub fn grow(&mut self, n_tokens: usize) -> Result<(), OutOfBlocks> {
        self.grow_prefill(n_tokens, n_tokens)
    }

    /// Grows to room for a prompt of `n_tokens` tokens: for all of them where there is no window, for those before token
    /// `chunk_end` where later blocks can take the place of earlier ones. Never shrinks.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the tables are unchanged then.
    pub fn grow_prefill(&mut self, n_tokens: usize, chunk_end: usize) -> Result<(), OutOfBlocks> {
        let room = |table: &BlockTable| match table.has_window() {
            true => chunk_end.min(n_tokens),
            false => n_tokens,
        };
        let needed = self.tables.iter().map(|table| table.n_missing(room(table))).sum();
        let free = self.tables.first().map_or(0, |table| table.state().lock().free());
        if needed > free {
            return Err(OutOfBlocks { needed, free });
        }
        self.tables.iter_mut().try_for_each(|table| table.grow(room(table)))
    }

    /// Makes the blocks of token `token` exclusive. Each shared one is replaced by a new one, to which its contents must be copied
    /// before it is read or written: the pair is added to `copies`.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; groups before the one that found none have their new blocks.
    pub fn own(&mut self, token: usize, copies: &mut impl Extend<BlockPair>) -> Result<(), OutOfBlocks> {
        self.tables.iter_mut().try_for_each(|table| {
            copies.extend(table.own(token)?);
            Ok(())
        })
    }

    /// Gives back the blocks that neither token `next` nor any after it sees. The last block stays.
    pub fn release_unseen(&mut self, next: usize) {
        for table in self.tables.iter_mut().filter(|table| table.has_window()) {
            table.release_unseen(next);
        }
    }

    /// Publishes block number `block_idx` of each group, as [`BlockTable::publish`].
    pub fn publish(&self, block_idx: usize, key: PrefixKey) {
        self.tables.iter().for_each(|table| table.publish(block_idx, key));
    }

    /// The first `n_blocks` blocks of each group, as [`BlockTable::first`].
    pub fn first(&self, n_blocks: usize) -> Vec<TableBlocks<'_>> {
        self.tables.iter().map(|table| table.first(n_blocks)).collect()
    }

    /// Other tables over the same blocks, as [`BlockTable::fork`].
    pub fn fork(&self) -> Self {
        Self { tables: self.tables.iter().map(BlockTable::fork).collect() }
    }

    /// Other tables over the first `n_blocks` blocks, as [`BlockTable::fork_first`].
    pub fn fork_first(&self, n_blocks: usize) -> Self {
        Self { tables: self.tables.iter().map(|table| table.fork_first(n_blocks)).collect() }
    }
}
