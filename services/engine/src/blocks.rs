//! KV blocks: a pool of ids, tables that hold some of them, and contents that outlive their tables.
//!
//! A block is a number here; its bytes live in a decoder's cache, and nothing here knows what they mean. Ids
//! leave the pool only inside a [`BlockTable`], and a table gives its blocks back when it is dropped, so an
//! error path cannot lose one. A block may be held by several tables: [`BlockTable::fork`] shares all of them,
//! and [`BlockTable::own`] takes a block of one's own before it is written (copy-on-write). A full block can be
//! published under a key; when nobody holds it any more it is *idle*: free to be taken, and until then found
//! again by [`BlockPool::find`]. The one idle for longest is taken first, and of one table its end before its
//! beginning, since a prefix serves more than what follows it.
//!
//! `free + used = total` always, idle blocks being free; `audit` recounts it in the tests.
//!
//! The paging is that of PagedAttention (<https://arxiv.org/abs/2309.06180>).

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use thiserror::Error;
use triptych_core::PrefixKey;
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

/// A block and the one that its contents go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPair {
    /// Read.
    pub from: BlockId,
    /// Written.
    pub to: BlockId,
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
    /// Blocks without a holder and without contents worth keeping; the last one is handed out next.
    blank: Vec<BlockId>,
    /// Blocks without a holder whose contents can be found, by the moment they lost their last holder.
    idle: BTreeMap<u64, BlockId>,
    /// `[n_blocks]`.
    pages: Vec<Page>,
    /// Published blocks, held or idle.
    by_key: HashMap<PrefixKey, BlockId>,
    /// Counts blocks that became idle.
    n_released: u64,
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Page {
    /// Tables that hold it.
    holders: u32,
    /// What it is published as.
    key: Option<PrefixKey>,
    /// Its place in `idle`, while it is there.
    idle_at: Option<u64>,
}

impl BlockPool {
    /// A pool of `n_blocks` free blocks, at most [`MAX_BLOCKS`].
    pub fn new(n_blocks: usize) -> Self {
        let total = n_blocks.min(MAX_BLOCKS);
        let books = Books {
            blank: (0..total as u32).rev().map(BlockId).collect(),
            idle: BTreeMap::new(),
            pages: vec![Page::default(); total],
            by_key: HashMap::new(),
            n_released: 0,
        };
        Self { total, books: Arc::new(Mutex::new(books)) }
    }

    /// Blocks, free or not.
    pub fn total(&self) -> usize {
        self.total
    }

    /// Blocks that nobody holds, idle ones among them.
    pub fn free(&self) -> usize {
        open(&self.books).free()
    }

    /// Blocks that nobody holds and whose contents can be found.
    pub fn idle(&self) -> usize {
        open(&self.books).idle.len()
    }

    /// Blocks that somebody holds.
    pub fn used(&self) -> usize {
        self.total - self.free()
    }

    /// Whether there is room for `n_tokens` tokens.
    pub fn can_allocate(&self, n_tokens: usize) -> bool {
        blocks_for(n_tokens) <= self.free()
    }

    /// A table with room for `n_tokens` tokens.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn table(&self, n_tokens: usize) -> Result<BlockTable, OutOfBlocks> {
        let mut table = self.empty();
        table.grow(n_tokens)?;
        Ok(table)
    }

    /// A share of the published blocks that `keys` begin with, up to the first that is not there.
    pub fn find(&self, keys: &[PrefixKey]) -> BlockTable {
        let mut table = self.empty();
        let mut books = open(&self.books);
        let known = keys.iter().map_while(|key| books.by_key.get(key).copied());
        table.blocks = known.collect();
        for block in &table.blocks {
            books.hold(*block);
        }
        drop(books);
        table
    }

    /// New blocks in the place of those of `tables`, which may be of another pool and may share blocks: the
    /// copies share them alike. Returns the tables and the contents that have to move.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn mirror(&self, tables: &[&[BlockId]]) -> Result<(Vec<BlockTable>, Vec<BlockPair>), OutOfBlocks> {
        let mut places: HashMap<BlockId, usize> = HashMap::new();
        let mut distinct: Vec<BlockId> = Vec::new();
        for block in tables.iter().copied().flatten() {
            places.entry(*block).or_insert_with(|| {
                distinct.push(*block);
                distinct.len() - 1
            });
        }
        let fresh = self.table(distinct.len() * KV_BLOCK_TOKENS)?;
        let mut books = open(&self.books);
        let mut mirrored = Vec::with_capacity(tables.len());
        for table in tables {
            let blocks: Vec<BlockId> = table.iter().map(|b| fresh.blocks[places[b]]).collect();
            blocks.iter().for_each(|block| books.hold(*block));
            mirrored.push(BlockTable { blocks, books: Arc::clone(&self.books) });
        }
        let pairs = distinct.iter().zip(&fresh.blocks).map(|(from, to)| BlockPair { from: *from, to: *to });
        let pairs = pairs.collect();
        drop(books);
        Ok((mirrored, pairs))
    }

    /// Forgets the contents of all blocks: nothing published so far is found again. Tables keep their blocks.
    pub fn reset(&self) {
        let mut books = open(&self.books);
        books.by_key.clear();
        let idle = std::mem::take(&mut books.idle);
        books.blank.extend(idle.into_values());
        for page in &mut books.pages {
            (page.key, page.idle_at) = (None, None);
        }
    }

    fn empty(&self) -> BlockTable {
        BlockTable { blocks: Vec::new(), books: Arc::clone(&self.books) }
    }
}

impl Books {
    fn free(&self) -> usize {
        self.blank.len() + self.idle.len()
    }

    fn page(&mut self, block: BlockId) -> &mut Page {
        &mut self.pages[block.0 as usize]
    }

    /// A block for one new holder: a blank one, or the one idle for longest, whose contents are forgotten.
    fn take(&mut self) -> Option<BlockId> {
        let block = self.blank.pop().or_else(|| {
            let (_, block) = self.idle.pop_first()?;
            let key = self.page(block).key.take();
            key.and_then(|key| self.by_key.remove(&key));
            Some(block)
        })?;
        *self.page(block) = Page { holders: 1, ..Page::default() };
        Some(block)
    }

    /// One more holder of a block that has one, or is idle.
    fn hold(&mut self, block: BlockId) {
        let page = self.page(block);
        page.holders += 1;
        if let Some(at) = page.idle_at.take() {
            self.idle.remove(&at);
        }
    }

    /// One holder less.
    fn release(&mut self, block: BlockId) {
        let at = self.n_released;
        let page = self.page(block);
        page.holders -= 1;
        if page.holders > 0 {
            return;
        }
        if page.key.is_none() {
            return self.blank.push(block);
        }
        page.idle_at = Some(at);
        self.n_released += 1;
        self.idle.insert(at, block);
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
        let free = books.free();
        if needed > free {
            return Err(OutOfBlocks { needed, free });
        }
        self.blocks.extend((0..needed).filter_map(|_| books.take()));
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

    /// Another holder of the same blocks. Growth adds blocks to one table only; before a shared block is
    /// written, its writer must [`own`](Self::own) it.
    pub fn fork(&self) -> Self {
        self.fork_first(self.blocks.len())
    }

    /// Another holder of the first `n_blocks` blocks, or of all if there are fewer.
    pub fn fork_first(&self, n_blocks: usize) -> Self {
        let blocks = self.blocks[..n_blocks.min(self.blocks.len())].to_vec();
        let mut books = open(&self.books);
        blocks.iter().for_each(|block| books.hold(*block));
        drop(books);
        Self { blocks, books: Arc::clone(&self.books) }
    }

    /// Whether token `token` lies in a block that another table holds too.
    pub fn is_shared_at(&self, token: usize) -> bool {
        let block = self.blocks.get(token / KV_BLOCK_TOKENS);
        block.is_some_and(|b| open(&self.books).page(*b).holders > 1)
    }

    /// Makes the block of token `token` the table's own. If others hold it, a new one takes its place, and its
    /// contents have to be copied before it is read or written.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; the table is unchanged then.
    pub fn own(&mut self, token: usize) -> Result<Option<BlockPair>, OutOfBlocks> {
        let place = token / KV_BLOCK_TOKENS;
        if !self.is_shared_at(token) {
            return Ok(None);
        }
        let mut books = open(&self.books);
        let from = self.blocks[place];
        let to = books.take().ok_or(OutOfBlocks { needed: 1, free: 0 })?;
        books.release(from);
        self.blocks[place] = to;
        Ok(Some(BlockPair { from, to }))
    }

    /// Publishes block number `place`, which is full and will not be written again. Without effect when there is
    /// no such block, or the key is another block's already.
    pub fn publish(&self, place: usize, key: PrefixKey) {
        let Some(block) = self.blocks.get(place).copied() else { return };
        let mut books = open(&self.books);
        if books.page(block).key.is_none() && !books.by_key.contains_key(&key) {
            books.page(block).key = Some(key);
            books.by_key.insert(key, block);
        }
    }

    /// Whether another table holds any of these blocks.
    pub fn is_shared(&self) -> bool {
        let mut books = open(&self.books);
        self.blocks.iter().any(|b| books.page(*b).holders > 1)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        let mut books = open(&self.books);
        for block in self.blocks.drain(..).rev() {
            books.release(block);
        }
    }
}

/// A panic elsewhere while the lock was held leaves the books whole: each change above is complete before
/// anything that can panic.
fn open(books: &SharedBooks) -> MutexGuard<'_, Books> {
    books.lock().unwrap_or_else(|e| e.into_inner())
}

#[cfg(test)]
mod tests;
