//! KV blocks: a pool of ids, and tables that hold some of them.
//!
//! A block is a number here; its bytes live in the decoder's cache, and nothing here knows what they mean.
//! Ids leave the pool only inside a [`BlockTable`], and a table gives its blocks back when it is dropped, so
//! an error path cannot lose one. A block may be held by several tables ([`BlockTable::share`]) and is free
//! again when the last of them is gone. `free + used = total` always; `audit` recounts it in the tests below.
//!
//! The paging is that of PagedAttention (<https://arxiv.org/abs/2309.06180>).

use std::sync::{Arc, Mutex, MutexGuard};
use thiserror::Error;
use triptych_core::shape::KV_BLOCK_TOKENS;

/// Most blocks of a pool: every slot number then fits `u32`.
pub const MAX_BLOCKS: usize = u32::MAX as usize / KV_BLOCK_TOKENS;

/// Names a block of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(u32);

impl BlockId {
    /// The number the kernels know it by.
    pub fn index(self) -> u32 {
        self.0
    }
}

/// Fewer blocks are free than were asked for. Nothing was taken.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{needed} blocks are needed, {free} are free")]
pub struct OutOfBlocks {
    /// Asked for.
    pub needed: usize,
    /// Free at that moment.
    pub free: usize,
}

/// Blocks that hold `n_tokens` tokens.
pub fn blocks_for(n_tokens: usize) -> usize {
    n_tokens.div_ceil(KV_BLOCK_TOKENS)
}

/// A fixed number of blocks.
#[derive(Debug)]
pub struct BlockPool {
    total: usize,
    books: SharedBooks,
}

/// Only one thread uses a pool; the lock makes tables `Send`, and is never contended.
type SharedBooks = Arc<Mutex<Books>>;

#[derive(Debug)]
struct Books {
    /// Blocks without a holder; the last one is handed out next.
    free: Vec<BlockId>,
    /// Tables that hold each block, `[n_blocks]`.
    holders: Vec<u32>,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks, at most [`MAX_BLOCKS`].
    pub fn new(n_blocks: usize) -> Self {
        let total = n_blocks.min(MAX_BLOCKS);
        let free = (0..total as u32).rev().map(BlockId).collect();
        Self { total, books: Arc::new(Mutex::new(Books { free, holders: vec![0; total] })) }
    }

    /// Blocks, free or not.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Blocks that nobody holds.
    pub fn free(&self) -> usize {
        open(&self.books).free.len()
    }

    /// Blocks that somebody holds.
    pub fn used(&self) -> usize {
        self.total - self.free()
    }

    /// A table with room for `n_tokens` tokens.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn table(&self, n_tokens: usize) -> Result<BlockTable, OutOfBlocks> {
        let mut table = BlockTable { blocks: Vec::new(), books: Arc::clone(&self.books) };
        table.grow(n_tokens)?;
        Ok(table)
    }
}

/// The blocks of one sequence, in the order of its tokens. Gives them back when dropped.
#[derive(Debug)]
pub struct BlockTable {
    blocks: Vec<BlockId>,
    books: SharedBooks,
}

impl BlockTable {
    /// Makes room for `n_tokens` tokens in all; room that is there already stays.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the table is unchanged then.
    pub fn grow(&mut self, n_tokens: usize) -> Result<(), OutOfBlocks> {
        let needed = blocks_for(n_tokens).saturating_sub(self.blocks.len());
        let mut books = open(&self.books);
        let free = books.free.len();
        let rest = free.checked_sub(needed).ok_or(OutOfBlocks { needed, free })?;
        let taken = books.free.split_off(rest);
        for block in &taken {
            books.holders[block.0 as usize] = 1;
        }
        self.blocks.extend(taken.into_iter().rev());
        Ok(())
    }

    /// The blocks.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Where the key and value of token `token` go. `None` past the room the table has.
    pub fn slot(&self, token: usize) -> Option<u32> {
        let block = self.blocks.get(token / KV_BLOCK_TOKENS)?;
        Some(block.0 * KV_BLOCK_TOKENS as u32 + (token % KV_BLOCK_TOKENS) as u32)
    }

    /// Another holder of the same blocks. Neither may [`grow`](Self::grow) into the other's sight: growth adds
    /// blocks to one table only.
    pub fn share(&self) -> Self {
        let mut books = open(&self.books);
        for block in &self.blocks {
            books.holders[block.0 as usize] += 1;
        }
        Self { blocks: self.blocks.clone(), books: Arc::clone(&self.books) }
    }

    /// Whether another table holds any of these blocks.
    pub fn is_shared(&self) -> bool {
        let books = open(&self.books);
        self.blocks.iter().any(|b| books.holders[b.0 as usize] > 1)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        let mut books = open(&self.books);
        for block in self.blocks.drain(..).rev() {
            let holders = &mut books.holders[block.0 as usize];
            *holders -= 1;
            if *holders == 0 {
                books.free.push(block);
            }
        }
    }
}

/// A panic elsewhere while the lock was held leaves the books whole: each change above is complete before
/// anything that can panic.
fn open(books: &SharedBooks) -> MutexGuard<'_, Books> {
    books.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Move {
        Take(usize),
        Grow(usize, usize),
        Share(usize),
        Drop(usize),
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        prop::collection::vec(
            prop_oneof![
                (0usize..200).prop_map(Move::Take),
                (any::<usize>(), 0usize..400).prop_map(|(i, n)| Move::Grow(i, n)),
                any::<usize>().prop_map(Move::Share),
                any::<usize>().prop_map(Move::Drop),
            ],
            0..80,
        )
    }

    /// Recounts holders from the tables and compares with the books.
    fn audit(pool: &BlockPool, tables: &[BlockTable]) {
        let mut holders = vec![0; pool.total()];
        for block in tables.iter().flat_map(|t| t.blocks()) {
            holders[block.0 as usize] += 1;
        }
        let used = holders.iter().filter(|h| **h > 0).count();
        let books = open(&pool.books);
        assert_eq!(books.holders, holders);
        let mut free = books.free.clone();
        free.sort();
        free.dedup();
        assert_eq!(free.len() + used, pool.total(), "free + used = total");
        assert!(free.iter().all(|b| holders[b.0 as usize] == 0));
    }

    proptest! {
        #[test]
        fn books_balance_over_any_schedule(n_blocks in 0usize..24, moves in moves()) {
            let pool = BlockPool::new(n_blocks);
            let mut tables: Vec<BlockTable> = Vec::new();
            for step in moves {
                let n_tables = tables.len();
                match step {
                    Move::Take(n) => {
                        let free = pool.free();
                        match pool.table(n) {
                            Ok(table) => tables.push(table),
                            Err(e) => prop_assert_eq!(e, OutOfBlocks { needed: blocks_for(n), free }),
                        }
                    }
                    _ if n_tables == 0 => {}
                    Move::Grow(i, n) => {
                        let table = &mut tables[i % n_tables];
                        let before = table.blocks().to_vec();
                        match table.grow(n) {
                            Ok(()) => prop_assert!(table.blocks().starts_with(&before) && table.blocks().len() >= blocks_for(n)),
                            Err(_) => prop_assert_eq!(table.blocks(), &before[..]),
                        }
                    }
                    Move::Share(i) => {
                        let shared = tables[i % n_tables].share();
                        prop_assert_eq!(shared.is_shared(), !shared.blocks().is_empty());
                        tables.push(shared);
                    }
                    Move::Drop(i) => drop(tables.swap_remove(i % n_tables)),
                }
                audit(&pool, &tables);
            }
            tables.clear();
            prop_assert_eq!(pool.free(), pool.total());
        }
    }

    #[test]
    fn slots_follow_the_blocks_and_end_with_them() {
        let pool = BlockPool::new(3);
        let first = pool.table(1).unwrap();
        let table = pool.table(KV_BLOCK_TOKENS + 1).unwrap();
        let width = KV_BLOCK_TOKENS as u32;
        assert_eq!((first.slot(0), first.slot(KV_BLOCK_TOKENS)), (Some(0), None));
        assert_eq!(table.slot(0), Some(width));
        assert_eq!(table.slot(KV_BLOCK_TOKENS), Some(2 * width));
        assert_eq!(table.slot(2 * KV_BLOCK_TOKENS), None);
    }
}
