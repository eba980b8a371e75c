//! Splits of keys that several sequences have in common, as beams over one encoder output and prompts that begin alike: a plan
//! in which a block of the decoding kernel has the queries of all of them, so that it reads a page once.
//!
//! What a row gives does not depend on the plan: splits are the same, and rows of a product do not see each other.

use std::collections::BTreeMap;

use triptych_core::shape::KV_BLOCK_TOKENS;

use crate::ops::PagedBatch;

/// Keys of a split of the decoding kernel.
pub(super) const SPLIT_KEYS: usize = 256;

/// Blocks of a table in a split.
const SPLIT_BLOCKS: usize = SPLIT_KEYS / KV_BLOCK_TOKENS;

/// Blocks of the decoding kernel: the split of each, and the queries that read it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct SharingPlan {
    /// Number of the split, first query, and queries.
    splits: Vec<[u32; 3]>,
    /// Sequence of each query, its number there, and its row.
    queries: Vec<[u32; 3]>,
}

/// A sequence that is decoded.
#[derive(Clone, Copy)]
struct Member<'a> {
    seq: u32,
    first_row: u32,
    n_queries: usize,
    n_keys: usize,
    table: &'a [u32],
}

impl<'a> Member<'a> {
    /// Blocks of a split and the keys in it; `None` behind the last.
    fn split(&self, split: usize) -> Option<(&'a [u32], usize)> {
        let n_keys = self.n_keys.checked_sub(split * SPLIT_KEYS).filter(|&left| left > 0)?.min(SPLIT_KEYS);
        let first = split * SPLIT_BLOCKS;
        Some((self.table.get(first..first + n_keys.div_ceil(KV_BLOCK_TOKENS))?, n_keys))
    }
}

impl SharingPlan {
    /// The plan for the sequences of at most `most` queries; `None` where none have a split in common.
    ///
    /// Sequences that have no split in common have no later one: a table names blocks by what they and all before hold. So
    /// sequences that share nothing cost a look at their first blocks.
    pub(super) fn of(batch: &PagedBatch<'_>, most: usize) -> Option<Self> {
        let members = members(batch, most);
        let (mut plan, mut alone) = (Self::default(), Vec::new());
        let mut together = vec![(0..members.len()).collect::<Vec<_>>()];
        let mut split = 0;
        while !together.is_empty() {
            let mut next = Vec::new();
            for same in together.iter().flat_map(|group| alike(&members, group, split)) {
                match same[..] {
                    [one] => alone.push((one, split)),
                    _ => {
                        plan.share(split, same.iter().map(|i| members[*i]), most);
                        next.push(same);
                    }
                }
            }
            (together, split) = (next, split + 1);
        }
        if plan.splits.is_empty() {
            return None;
        }
        for (member, first) in alone {
            let member = members[member];
            for split in first..member.n_keys.div_ceil(SPLIT_KEYS) {
                plan.share(split, std::iter::once(member), most);
            }
        }
        Some(plan)
    }

    /// Adds a split that these sequences read, in as few blocks as their queries fit into.
    fn share<'a>(&mut self, split: usize, members: impl Iterator<Item = Member<'a>>, most: usize) {
        let mut block = [split as u32, self.queries.len() as u32, 0];
        for member in members {
            if block[2] as usize + member.n_queries > most {
                self.splits.push(block);
                block = [split as u32, self.queries.len() as u32, 0];
            }
            self.queries.extend((0..member.n_queries as u32).map(|i| [member.seq, i, member.first_row + i]));
            block[2] += member.n_queries as u32;
        }
        self.splits.push(block);
    }

    /// Number of blocks of each key head.
    pub(super) fn n_splits(&self) -> usize {
        self.splits.len()
    }

    /// All words: those of the splits, then those of the queries.
    pub(super) fn words(&self) -> Vec<u32> {
        [self.splits.as_flattened(), self.queries.as_flattened()].concat()
    }
}

/// The sequences of at most `most` queries.
fn members<'a>(batch: &PagedBatch<'a>, most: usize) -> Vec<Member<'a>> {
    let PagedBatch { query_start_loc, table_start_loc, block_tables, seq_lens } = *batch;
    let of_seq = |starts: &[u32], seq: usize| starts[seq] as usize..starts[seq + 1] as usize;
    let member = |(seq, &n_keys): (usize, &u32)| {
        let (rows, table) = (of_seq(query_start_loc, seq), of_seq(table_start_loc, seq));
        Member {
            seq: seq as u32,
            first_row: rows.start as u32,
            n_queries: rows.len(),
            n_keys: n_keys as usize,
            table: &block_tables[table],
        }
    };
    let all = seq_lens.iter().enumerate().map(member);
    all.filter(|member| (1..=most).contains(&member.n_queries)).collect()
}

/// Members of a group by what they read of a split: the same blocks, up to the same key. Those that have ended are left out.
fn alike(members: &[Member<'_>], group: &[usize], split: usize) -> Vec<Vec<usize>> {
    let mut by_blocks = BTreeMap::<_, Vec<usize>>::new();
    for &member in group {
        if let Some(read) = members[member].split(split) {
            by_blocks.entry(read).or_default().push(member);
        }
    }
    by_blocks.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequences of `(queries, keys)` with their tables.
    struct Batch {
        starts: [Vec<u32>; 2],
        tables: Vec<u32>,
        seq_lens: Vec<u32>,
    }

    impl Batch {
        fn new(seqs: &[(usize, usize, Vec<u32>)]) -> Self {
            let starts = |len: fn(&(usize, usize, Vec<u32>)) -> usize| {
                let ends = seqs.iter().scan(0, |end, seq| {
                    *end += len(seq) as u32;
                    Some(*end)
                });
                std::iter::once(0).chain(ends).collect()
            };
            Self {
                starts: [starts(|seq| seq.0), starts(|seq| seq.2.len())],
                tables: seqs.iter().flat_map(|seq| seq.2.clone()).collect(),
                seq_lens: seqs.iter().map(|seq| seq.1 as u32).collect(),
            }
        }

        fn paged(&self) -> PagedBatch<'_> {
            let [query_start_loc, table_start_loc] = self.starts.each_ref().map(|starts| &starts[..]);
            let (block_tables, seq_lens) = (&self.tables[..], &self.seq_lens[..]);
            PagedBatch { query_start_loc, table_start_loc, block_tables, seq_lens }
        }

        /// Pages that blocks read of each key head: with a plan, and where each sequence has blocks of its own.
        fn pages_read(&self, most: usize) -> [usize; 2] {
            let batch = self.paged();
            let members = members(&batch, most);
            let own: usize = members.iter().map(|member| member.n_keys.div_ceil(KV_BLOCK_TOKENS)).sum();
            let Some(plan) = SharingPlan::of(&batch, most) else { return [own, own] };
            let pages = |&[split, first, n]: &[u32; 3]| {
                let read = |&[seq, ..]: &[u32; 3]| {
                    members.iter().find(|member| member.seq == seq).and_then(|m| m.split(split as usize))
                };
                let mut queries = plan.queries[first as usize..][..n as usize].iter();
                let first = queries.next().and_then(read).expect("keys of the split");
                assert!(queries.all(|query| read(query) == Some(first)), "one block reads the same keys");
                first.0.len()
            };
            [plan.splits.iter().map(pages).sum(), own]
        }
    }

    fn table(first: u32, n_keys: usize) -> Vec<u32> {
        (first..first + n_keys.div_ceil(KV_BLOCK_TOKENS) as u32).collect()
    }

    /// Five beams over one encoder output of 1500 rows.
    #[test]
    fn beams_read_an_encoder_output_once() {
        let batch = Batch::new(&vec![(1, 1500, table(7, 1500)); 5]);
        assert_eq!(batch.pages_read(16), [47, 5 * 47]);
        // Four query heads of a key head: four beams to a tile of 16 rows.
        assert_eq!(batch.pages_read(4), [2 * 47, 5 * 47]);
    }

    /// Eight prompts with 1024 tokens in common, then 300 of their own.
    #[test]
    fn a_common_prefix_is_read_once() {
        let seq = |i: u32| (1, 1324, [table(0, 1024), table(100 + 50 * i, 300)].concat());
        let batch = Batch::new(&(0..8).map(seq).collect::<Vec<_>>());
        assert_eq!(batch.pages_read(16), [32 + 8 * 10, 8 * 42]);
    }

    #[test]
    fn every_query_reads_every_split_of_its_sequence_once() {
        let first = table(0, 512);
        let seqs = [
            (1, 700, table(0, 700)),
            (1, 700, table(0, 700)),
            (3, 600, [&first[..], &table(60, 88)].concat()),
            (0, 700, table(0, 700)),
            (9, 700, table(0, 700)),
            (2, 513, [&first[..], &[99]].concat()),
            (1, 0, vec![]),
            (2, 512, first.clone()),
            (1, 100, table(0, 100)),
            (1, 290, table(0, 290)),
            (1, 280, table(200, 280)),
        ];
        let batch = Batch::new(&seqs);
        let plan = SharingPlan::of(&batch.paged(), 4).expect("splits in common");
        let mut read: Vec<[u32; 4]> = Vec::new();
        for &[split, first, n] in &plan.splits {
            assert!((1..=4).contains(&n));
            read.extend(
                plan.queries[first as usize..][..n as usize]
                    .iter()
                    .map(|&[seq, i, row]| [seq, i, row, split]),
            );
        }
        let mut expected = Vec::new();
        for member in members(&batch.paged(), 4) {
            for split in 0..member.n_keys.div_ceil(SPLIT_KEYS) as u32 {
                let queries = 0..member.n_queries as u32;
                expected.extend(queries.map(|i| [member.seq, i, member.first_row + i, split]));
            }
        }
        read.sort_unstable();
        expected.sort_unstable();
        assert_eq!(read, expected);
        let [shared, own] = batch.pages_read(4);
        assert!(shared < own, "{shared} of {own}");
    }

    #[test]
    fn sequences_that_have_nothing_in_common_have_no_plan() {
        let apart = Batch::new(&[(1, 300, table(0, 300)), (1, 300, table(20, 300))]);
        assert_eq!(SharingPlan::of(&apart.paged(), 16), None);
        // Fewer common tokens than a split, and splits that end at other keys.
        let short = Batch::new(&[(1, 100, table(0, 100)), (1, 101, table(0, 101))]);
        assert_eq!(SharingPlan::of(&short.paged(), 16), None);
        let long = Batch::new(&[(17, 300, table(0, 300)), (17, 300, table(0, 300))]);
        assert_eq!(SharingPlan::of(&long.paged(), 16), None);
    }
}
