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
//! Layers are in KV cache groups, and a sequence has a table for each ([`KvTables`]), all of one pool. A group with a sliding
//! window gives back the blocks that it sees no more ([`KvTables::release_unseen`]), and a prefix is found by the blocks that its
//! continuation sees ([`BlockPool::find_seen`]). A key is published for each group by itself.
//!
//! `free + used = total` always; cached blocks count as free. `audit` recounts it in the tests.
//!
//! The paging is that of PagedAttention (<https://arxiv.org/abs/2309.06180>).

mod kv_tables;
mod table;

pub use kv_tables::KvTables;
pub use table::BlockTable;

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU32;
use std::sync::Arc;
use thiserror::Error;
use triptych_core::PrefixKey;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_models::decoder::KvCacheGroups;

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
    /// The table's group.
    group: KvGroup,
}

/// Group of layers that a table is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct KvGroup {
    idx: u8,
    /// Keys that a query sees at most, its own included; `None`: all.
    window: Option<NonZeroU32>,
}

impl KvGroup {
    /// The groups of a decoder, in order.
    fn all(groups: &KvCacheGroups) -> impl Iterator<Item = Self> {
        (0..).zip(groups.windows()).map(|(idx, window)| Self { idx, window: *window })
    }

    /// Index of the first block that the query of token `token` sees.
    fn first_seen(self, token: usize) -> usize {
        self.window.map_or(0, |window| (token + 1).saturating_sub(window.get() as usize) / KV_BLOCK_TOKENS)
    }
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
    groups: KvCacheGroups,
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
    by_key: HashMap<GroupKey, BlockId>,
    /// Releases so far of published blocks.
    n_releases: u64,
}

/// A prefix key of a group's blocks.
type GroupKey = (u8, PrefixKey);

#[derive(Clone, Debug, Default, PartialEq)]
struct BlockMeta {
    /// Number of tables that hold it.
    ref_count: u32,
    /// Key under which it is published.
    key: Option<GroupKey>,
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
        };
        Self { total, groups: KvCacheGroups::FULL, state: Arc::new(Mutex::new(state)) }
    }

    /// The same for layers in these groups.
    #[must_use]
    pub fn with_groups(self, groups: KvCacheGroups) -> Self {
        Self { groups, ..self }
    }

    /// Groups of layers that its blocks are for.
    pub fn groups(&self) -> &KvCacheGroups {
        &self.groups
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

    /// A table of the first group with room for `n_tokens` tokens.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn table(&self, n_tokens: usize) -> Result<BlockTable, OutOfBlocks> {
        let mut table = self.empty_table(self.first_group());
        table.grow(n_tokens)?;
        Ok(table)
    }

    /// A table of the first group over the longest published prefix of `keys`.
    pub fn find(&self, keys: &[PrefixKey]) -> BlockTable {
        let group = self.first_group();
        let n_known = self.state.lock().n_published(group, keys);
        self.hold_published(group, &keys[..n_known], 0)
    }

    /// Empty tables, one for each group.
    pub fn tables(&self) -> KvTables {
        KvTables::new(KvGroup::all(&self.groups).map(|group| self.empty_table(group)).collect())
    }

    /// Tables over the longest prefix of `keys` that is published whole in every group.
    pub fn find_whole(&self, keys: &[PrefixKey]) -> KvTables {
        let state = self.state.lock();
        let known = KvGroup::all(&self.groups).map(|group| state.n_published(group, keys));
        let n_known = known.min().unwrap_or(0);
        drop(state);
        let held = KvGroup::all(&self.groups).map(|group| self.hold_published(group, &keys[..n_known], 0));
        KvTables::new(held.collect())
    }

    /// Tables over the longest prefix of `keys` of which each group has published everything that its continuation sees: without
    /// windows the same as [`find_whole`](Self::find_whole).
    pub fn find_seen(&self, keys: &[PrefixKey]) -> KvTables {
        let n_blocks = self.state.lock().n_seen(&self.groups, keys);
        let held = KvGroup::all(&self.groups).map(|group| {
            let first_seen = group.first_seen(n_blocks * KV_BLOCK_TOKENS).min(n_blocks.saturating_sub(1));
            self.hold_published(group, &keys[..n_blocks], first_seen)
        });
        KvTables::new(held.collect())
    }

    /// A table over published blocks, of which those before number `first` stay where they are.
    fn hold_published(&self, group: KvGroup, keys: &[PrefixKey], first: usize) -> BlockTable {
        let mut table = self.empty_table(group);
        let mut state = self.state.lock();
        let held: Vec<BlockId> =
            keys[first..].iter().filter_map(|key| state.by_key.get(&(group.idx, *key)).copied()).collect();
        held.iter().for_each(|block| state.hold(*block));
        drop(state);
        table.set_blocks(first, &held);
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
            let held: Vec<BlockId> = table.held().iter().map(|b| fresh.blocks()[copy_idx[b]]).collect();
            held.iter().for_each(|block| state.hold(*block));
            let mut copy = self.empty_table(table.group);
            copy.set_blocks(table.blocks.len() - held.len(), &held);
            mirrored.push(copy);
        }
        let pairs = distinct.iter().zip(fresh.blocks()).map(|(from, to)| BlockPair { from: *from, to: *to });
        let pairs = pairs.collect();
        drop(state);
        Ok((mirrored, pairs))
    }

    /// [`mirror`](Self::mirror) for the tables of each branch of a sequence.
    ///
    /// # Errors
    /// [`OutOfBlocks`]; nothing is taken then.
    pub fn mirror_branches(
        &self,
        branches: &[Vec<TableBlocks<'_>>],
    ) -> Result<(Vec<KvTables>, Vec<BlockPair>), OutOfBlocks> {
        let (tables, pairs) = self.mirror(&branches.concat())?;
        let mut tables = tables.into_iter();
        let of_branch = |branch: &Vec<_>| KvTables::new(tables.by_ref().take(branch.len()).collect());
        Ok((branches.iter().map(of_branch).collect(), pairs))
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

    fn first_group(&self) -> KvGroup {
        KvGroup::all(&self.groups).next().unwrap_or_default()
    }

    fn empty_table(&self, group: KvGroup) -> BlockTable {
        BlockTable::new(group, Arc::clone(&self.state))
    }
}

impl PoolState {
    /// Blocks of the longest published prefix of `keys`.
    fn n_published(&self, group: KvGroup, keys: &[PrefixKey]) -> usize {
        keys.iter().take_while(|key| self.by_key.contains_key(&(group.idx, **key))).count()
    }

    /// Blocks of the longest prefix of `keys` of which each group has published everything that its continuation sees.
    fn n_seen(&self, groups: &KvCacheGroups, keys: &[PrefixKey]) -> usize {
        let whole = KvGroup::all(groups).filter(|group| group.window.is_none());
        let n_most = whole.map(|group| self.n_published(group, keys)).min().unwrap_or(keys.len());
        let windowed: Vec<KvGroup> = KvGroup::all(groups).filter(|group| group.window.is_some()).collect();
        // For each prefix and group, the published blocks in a row that it ends with.
        let mut n_last = vec![0; windowed.len()];
        let mut longest = 0;
        for (block_idx, key) in keys[..n_most].iter().enumerate() {
            let n_blocks = block_idx + 1;
            let mut sees_all = true;
            for (group, n_last) in windowed.iter().zip(&mut n_last) {
                let is_known = self.by_key.contains_key(&(group.idx, *key));
                *n_last = if is_known { *n_last + 1 } else { 0 };
                let first_seen = group.first_seen(n_blocks * KV_BLOCK_TOKENS).min(block_idx);
                sees_all &= n_blocks - first_seen <= *n_last;
            }
            longest = if sees_all { n_blocks } else { longest };
        }
        longest
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

#[cfg(test)]
mod tests;
