//! Accounting of a pool over random schedules, and its rules one by one.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Move {
    Take(usize),
    Grow(usize, usize),
    GrowPrefill(usize, usize, usize),
    Fork(usize),
    ForkFirst(usize, usize),
    Own(usize, usize),
    Publish(usize, usize),
    Find(usize),
    Mirror(usize, usize),
    FindSeen(usize),
    Release(usize, usize),
    Drop(usize),
    Reset,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let any = any::<usize>;
    let one = prop_oneof![
        4 => (0usize..200).prop_map(Move::Take),
        4 => (any(), 0usize..400).prop_map(|(i, n)| Move::Grow(i, n)),
        3 => (any(), 0usize..200, 0usize..200).prop_map(|(i, n, end)| Move::GrowPrefill(i, n, end)),
        2 => any().prop_map(Move::Fork),
        2 => (any(), 0usize..9).prop_map(|(i, n)| Move::ForkFirst(i, n)),
        4 => (any(), 0usize..200).prop_map(|(i, n)| Move::Own(i, n)),
        4 => (any(), 0usize..9).prop_map(|(i, n)| Move::Publish(i, n)),
        3 => any().prop_map(Move::Find),
        3 => any().prop_map(Move::FindSeen),
        4 => (any(), 0usize..200).prop_map(|(i, n)| Move::Release(i, n)),
        2 => (any(), any()).prop_map(|(i, j)| Move::Mirror(i, j)),
        5 => any().prop_map(Move::Drop),
        1 => Just(Move::Reset),
    ];
    prop::collection::vec(one, 0..100)
}

/// Keys of chain `n % 3`: few chains, so that schedules meet the same keys again.
fn keys(n: usize) -> Vec<PrefixKey> {
    (0..9).map(|block_idx| key(n % 3, block_idx)).collect()
}

fn key(chain: usize, block_idx: usize) -> PrefixKey {
    PrefixKey::from_bytes([(chain * 9 + block_idx) as u8; 32])
}

/// Recounts holders from the tables and compares with the pool's state.
fn audit(pool: &BlockPool, tables: &[KvTables]) {
    let mut ref_count = vec![0; pool.total()];
    for block in tables.iter().flat_map(|t| t.first(usize::MAX)).flat_map(|t| t.held()) {
        ref_count[block.0 as usize] += 1;
    }
    let used = ref_count.iter().filter(|h| **h > 0).count();
    assert_eq!((pool.free() + used, pool.used()), (pool.total(), used), "free + used = total");
    let state = pool.state.lock();
    assert!(state.meta.iter().zip(&ref_count).all(|(meta, ref_count)| meta.ref_count == *ref_count));
    let mut free: Vec<BlockId> = state.empty.iter().chain(state.cached.values()).copied().collect();
    free.sort();
    free.dedup();
    assert_eq!(free.len() + used, pool.total(), "nothing is free twice");
    assert!(free.iter().all(|b| ref_count[b.0 as usize] == 0));
    assert!(state.empty.iter().all(|b| state.meta[b.0 as usize] == BlockMeta::default()));
    assert!(state.cached.iter().all(|(at, b)| state.meta[b.0 as usize].cached_at == Some(*at)));
    for (key, block) in &state.by_key {
        assert_eq!(state.meta[block.0 as usize].key, Some(*key));
    }
    assert_eq!(state.by_key.len(), state.meta.iter().filter(|p| p.key.is_some()).count());
}

/// Applies one move; `Err` carries a shortage, after which the audit checks that nothing was taken.
fn play(pool: &BlockPool, tables: &mut Vec<KvTables>, step: Move) -> Result<(), OutOfBlocks> {
    let n = tables.len();
    match step {
        Move::Take(n_tokens) => {
            tables.push(pool.tables());
            tables[n].grow(n_tokens)?;
        }
        Move::Find(chain) => tables.push(pool.find_whole(&keys(chain))),
        Move::FindSeen(chain) => tables.push(pool.find_seen(&keys(chain))),
        Move::Reset => pool.reset(),
        _ if n == 0 => {}
        Move::Grow(i, n_tokens) => tables[i % n].grow(n_tokens)?,
        Move::GrowPrefill(i, n_tokens, end) => {
            tables[i % n].grow_prefill(n_tokens, end)?;
            assert!(tables[i % n].n_room() >= n_tokens.min(end));
        }
        Move::Fork(i) => tables.push(tables[i % n].fork()),
        Move::ForkFirst(i, n_blocks) => tables.push(tables[i % n].fork_first(n_blocks)),
        Move::Own(i, token) => {
            let n_shared = tables[i % n].groups().iter().filter(|table| table.is_shared_at(token)).count();
            let mut copies = Vec::new();
            let owned = tables[i % n].own(token, &mut copies);
            let n_left = tables[i % n].groups().iter().filter(|table| table.is_shared_at(token)).count();
            assert_eq!((n_shared - copies.len(), owned.is_err()), (n_left, n_left > 0));
        }
        Move::Publish(i, block_idx) => tables[i % n].publish(block_idx, key(i % 3, block_idx)),
        Move::Mirror(i, j) => {
            let branches = [i, j].map(|i| tables[i % n].first(usize::MAX));
            let (mirrored, pairs) = pool.mirror_branches(&branches)?;
            let copies = mirrored.iter().flat_map(|t| t.first(usize::MAX)).flat_map(|t| t.held());
            for (from, to) in branches.iter().flatten().flat_map(|t| t.held()).zip(copies) {
                assert!(pairs.contains(&BlockPair { from: *from, to: *to }));
            }
            tables.extend(mirrored);
        }
        // Tables of a sequence are given their blocks back as it is computed.
        Move::Release(i, token) => tables[i % n].release_unseen(token),
        Move::Drop(i) => drop(tables.swap_remove(i % n)),
    }
    Ok(())
}

fn blocks_of(tables: &[KvTables]) -> Vec<Vec<BlockId>> {
    tables.iter().flat_map(|t| t.groups()).map(|t| t.blocks().to_vec()).collect()
}

fn groups(windows: &[u32]) -> KvCacheGroups {
    let windows: Vec<_> = windows.iter().map(|window| NonZeroU32::new(*window)).collect();
    KvCacheGroups::of(&windows).unwrap()
}

proptest! {
    #[test]
    fn books_balance_over_any_schedule(
        n_blocks in 0usize..24,
        windows in prop::collection::vec(0u32..90, 1..4),
        moves in moves(),
    ) {
        let pool = BlockPool::new(n_blocks).with_groups(groups(&windows));
        let mut tables: Vec<KvTables> = Vec::new();
        for step in moves {
            let (free, before, n) = (pool.free(), blocks_of(&tables), tables.len());
            if let Err(e) = play(&pool, &mut tables, step) {
                tables.truncate(n);
                prop_assert!(e.needed > e.free && e.free == free, "{e}");
                prop_assert_eq!(blocks_of(&tables), before);
            }
            audit(&pool, &tables);
        }
        tables.clear();
        audit(&pool, &tables);
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

#[test]
fn what_was_published_is_found_until_its_block_is_needed_and_its_end_goes_first() {
    let pool = BlockPool::new(4);
    let table = pool.table(3 * KV_BLOCK_TOKENS).unwrap();
    let blocks = table.blocks().to_vec();
    (0..3).for_each(|block_idx| table.publish(block_idx, key(0, block_idx)));
    drop(table);
    assert_eq!((pool.used(), pool.cached(), pool.free()), (0, 3, 4));
    assert_eq!(pool.find(&keys(0)).blocks(), blocks);
    assert_eq!(pool.find(&keys(1)).blocks(), []);
    let _other = pool.table(2 * KV_BLOCK_TOKENS).unwrap();
    assert_eq!(
        pool.find(&keys(0)).blocks(),
        &blocks[..2],
        "a empty block goes first, then the end of the prefix"
    );
    let held = pool.find(&keys(0));
    assert_eq!(pool.table(KV_BLOCK_TOKENS).unwrap_err(), OutOfBlocks { needed: 1, free: 0 });
    pool.reset();
    assert_eq!(pool.find(&keys(0)).blocks(), []);
    assert_eq!(held.blocks(), &blocks[..2]);
}

#[test]
fn a_forked_table_gets_a_block_of_its_own_before_it_writes() {
    let pool = BlockPool::new(3);
    let mut first = pool.table(KV_BLOCK_TOKENS + 5).unwrap();
    let mut second = first.fork();
    let shared = first.blocks().to_vec();
    let pair = second.own(KV_BLOCK_TOKENS + 5).unwrap().unwrap();
    assert_eq!(pair.from, shared[1]);
    assert_eq!((first.blocks(), second.blocks()), (&shared[..], &[shared[0], pair.to][..]));
    assert_eq!(first.own(KV_BLOCK_TOKENS + 5), Ok(None), "no other table holds it");
    assert_eq!(first.own(0), Err(OutOfBlocks { needed: 1, free: 0 }));
}

#[test]
fn tables_that_share_blocks_share_them_in_the_other_pool_too() {
    let device = BlockPool::new(4);
    let host = BlockPool::new(3);
    let first = device.table(2 * KV_BLOCK_TOKENS).unwrap();
    let mut second = first.fork();
    second.own(KV_BLOCK_TOKENS).unwrap();
    let (mirrored, pairs) = host.mirror(&[first.first(usize::MAX), second.first(usize::MAX)]).unwrap();
    assert_eq!((pairs.len(), host.used()), (3, 3));
    assert_eq!(mirrored[0].blocks()[0], mirrored[1].blocks()[0]);
    assert_eq!(host.mirror(&[first.first(usize::MAX)]).unwrap_err(), OutOfBlocks { needed: 2, free: 0 });
}

#[test]
fn a_table_gives_back_what_no_later_token_sees() {
    let pool = BlockPool::new(8).with_groups(groups(&[KV_BLOCK_TOKENS as u32 + 1]));
    let mut table = pool.table(5 * KV_BLOCK_TOKENS).unwrap();
    let blocks = table.blocks().to_vec();
    table.release_unseen(2 * KV_BLOCK_TOKENS - 1);
    assert_eq!(pool.used(), 5, "the query of the last token of block 1 sees the last key of block 0");
    table.release_unseen(2 * KV_BLOCK_TOKENS);
    assert_eq!((pool.used(), table.n_held()), (4, 4));
    table.release_unseen(3 * KV_BLOCK_TOKENS + 1);
    assert_eq!(table.blocks(), [blocks[2], blocks[2], blocks[2], blocks[3], blocks[4]]);
    let fork = table.fork();
    let host = BlockPool::new(3);
    let (mirrored, pairs) = host.mirror(&[fork.first(usize::MAX)]).unwrap();
    assert_eq!((pairs.len(), mirrored[0].n_held(), mirrored[0].blocks().len()), (3, 3, 5));
    table.release_unseen(usize::MAX / 2);
    assert_eq!(table.n_held(), 1, "the last block stays");
    drop((table, fork));
    assert_eq!((pool.used(), pool.free()), (0, 8));
}

#[test]
fn a_prefix_is_found_by_the_blocks_that_its_continuation_sees() {
    let pool = BlockPool::new(8).with_groups(groups(&[KV_BLOCK_TOKENS as u32 + 1]));
    let mut table = pool.table(4 * KV_BLOCK_TOKENS).unwrap();
    (0..4).for_each(|block_idx| table.publish(block_idx, key(0, block_idx)));
    let blocks = table.blocks().to_vec();
    table.release_unseen(4 * KV_BLOCK_TOKENS);
    // Three of the cached blocks are taken by another table.
    let _others = pool.table(7 * KV_BLOCK_TOKENS).unwrap();
    assert_eq!(pool.find(&keys(0)).blocks(), []);
    let found = pool.find_seen(&keys(0));
    assert_eq!((found.groups()[0].blocks(), found.n_held()), (&[blocks[3]; 4][..], 1));
    assert_eq!(pool.find_seen(&keys(0)[..3]).n_blocks(), 0);
}

#[test]
fn a_prefix_is_found_if_every_group_has_what_its_continuation_sees() {
    let window = KV_BLOCK_TOKENS as u32 + 1;
    let pool = BlockPool::new(16).with_groups(groups(&[0, window]));
    let mut tables = pool.tables();
    tables.grow(4 * KV_BLOCK_TOKENS).unwrap();
    (0..4).for_each(|block_idx| tables.publish(block_idx, key(0, block_idx)));
    tables.release_unseen(4 * KV_BLOCK_TOKENS);
    assert_eq!(
        (pool.used(), pool.cached(), tables.n_held()),
        (5, 3, 5),
        "three blocks of one group are behind its window"
    );
    // Others take two of them, the last ones of the prefix.
    let mut others = pool.tables();
    others.grow(4 * KV_BLOCK_TOKENS).unwrap();
    others.grow_prefill(6 * KV_BLOCK_TOKENS, 0).unwrap();
    assert_eq!((pool.free(), pool.cached()), (1, 1));
    assert_eq!(
        pool.find_seen(&keys(0)[..3]).n_blocks(),
        1,
        "the group with a window has its first block alone"
    );
    assert_eq!(pool.find_whole(&keys(0)).n_blocks(), 1);
    let found = pool.find_seen(&keys(0));
    let [full, windowed] = found.groups() else { panic!("two groups") };
    assert_eq!((full.n_held(), windowed.n_held()), (4, 1));
    assert_eq!(windowed.blocks(), [tables.groups()[1].blocks()[3]; 4]);
    assert_eq!(full.blocks(), tables.groups()[0].blocks());
}

#[test]
fn a_prompt_takes_blocks_of_a_chunk_where_there_is_a_window_and_all_where_there_is_none() {
    let pool = BlockPool::new(16).with_groups(groups(&[0, 20]));
    let mut tables = pool.tables();
    tables.grow_prefill(10 * KV_BLOCK_TOKENS, 2 * KV_BLOCK_TOKENS).unwrap();
    assert_eq!((pool.used(), tables.n_room()), (12, 2 * KV_BLOCK_TOKENS));
    assert_eq!(
        tables.grow_prefill(10 * KV_BLOCK_TOKENS, 7 * KV_BLOCK_TOKENS),
        Err(OutOfBlocks { needed: 5, free: 4 })
    );
    tables.release_unseen(2 * KV_BLOCK_TOKENS + 10);
    tables.grow_prefill(10 * KV_BLOCK_TOKENS, 7 * KV_BLOCK_TOKENS).unwrap();
    assert_eq!((pool.free(), tables.n_room()), (0, 7 * KV_BLOCK_TOKENS));
}
