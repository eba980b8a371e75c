//! The paged cache.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::ops::{
    AttentionShape, Backend, BucketSides, FusedQkv, KvLayer, KvLayout, KvSlots, Mask, PagedBatch,
    PagedBounds, RopePairs, RopeShape, Rotation,
};

use crate::added::Added;
use crate::oracle::Seen;
use crate::sequences::{Sequences, offsets, shape};
use crate::subject::{Subject, stage, values};

/// Block tables of sequences in a cache.
pub struct Tables {
    pub layout: KvLayout,
    /// Of each sequence.
    pub blocks: Vec<Vec<u32>>,
}

impl Tables {
    /// Tables for the keys of `seqs`, blocks taken from the end of the cache in steps of `stride`, an odd
    /// number, so that they are out of order and apart.
    pub fn new(seqs: &Sequences, n_layers: usize, stride: u32) -> Self {
        let n_blocks = 64_u32;
        let mut next = (0..n_blocks).map(|i| n_blocks - 1 - i * stride % n_blocks);
        let need = |keys: usize| keys.div_ceil(KV_BLOCK_TOKENS);
        let blocks = seqs.lens.iter().map(|len| next.by_ref().take(need(len.1)).collect()).collect();
        let (n_kv_heads, head_dim) = (seqs.shape.n_kv_heads, seqs.shape.head_dim);
        Self { layout: KvLayout { n_layers, n_blocks: n_blocks as usize, n_kv_heads, head_dim }, blocks }
    }

    pub fn slots(&self, seqs: &Sequences) -> Vec<u32> {
        let block_tokens = KV_BLOCK_TOKENS as u32;
        let slot = |blocks: &[u32], key: u32| {
            blocks[(key / block_tokens) as usize] * block_tokens + key % block_tokens
        };
        let of_seq = |(blocks, len): (&Vec<u32>, &(usize, usize))| -> Vec<u32> {
            (0..len.1 as u32).map(|key| slot(blocks, key)).collect()
        };
        self.blocks.iter().zip(&seqs.lens).flat_map(of_seq).collect()
    }
}

/// A cache with the keys of `seqs` in one layer.
pub fn filled<B: Backend>(
    subject: &Subject<B>,
    seqs: &Sequences,
    tables: &Tables,
    layer: usize,
) -> B::KvCache {
    let mut cache = subject.backend.kv_cache(tables.layout).expect("a cache");
    write(subject, seqs, tables, (&mut cache, layer));
    cache
}

/// Writes the keys of `seqs`; of several sequences over one slot, those of the last.
pub fn write<B: Backend>(
    subject: &Subject<B>,
    seqs: &Sequences,
    tables: &Tables,
    to: (&mut B::KvCache, usize),
) {
    let (width, slots) = (seqs.kv_width(), tables.slots(seqs));
    let last: BTreeMap<u32, usize> = slots.iter().enumerate().map(|(row, slot)| (*slot, row)).collect();
    let rows = |x: &[f32]| {
        let rows: Vec<f32> = last.values().flat_map(|row| &x[row * width..][..width]).copied().collect();
        subject.tensor(&rows, last.len(), width)
    };
    let (k, v) = (rows(&seqs.k), rows(&seqs.v));
    let (step, slots) = subject.indices(&last.keys().copied().collect::<Vec<u32>>());
    let to = KvSlots { cache: to.0, layer: to.1, slots };
    subject.backend.write_kv(&step, to, [&k, &v]).expect("write");
}

/// Attention of the queries of `seqs` over a cache.
pub fn attend<B: Backend>(
    subject: &Subject<B>,
    seqs: &Sequences,
    tables: &Tables,
    of: (&B::KvCache, usize),
) -> B::Tensor {
    attend_within(subject, seqs, tables, of, None)
}

/// The same where the sequences have bounds.
fn attend_within<B: Backend>(
    subject: &Subject<B>,
    seqs: &Sequences,
    tables: &Tables,
    (cache, layer): (&B::KvCache, usize),
    bounds: Option<PagedBounds>,
) -> B::Tensor {
    let q = subject.tensor(&seqs.q, seqs.n_queries(), seqs.q_width());
    let seq_lens: Vec<u32> = seqs.lens.iter().map(|len| len.1 as u32).collect();
    let batch = PagedBatch {
        query_start_loc: &offsets(seqs.lens.iter().map(|len| len.0)),
        table_start_loc: &offsets(tables.blocks.iter().map(Vec::len)),
        block_tables: &tables.blocks.concat(),
        seq_lens: &seq_lens,
    };
    let (step, (paged, table_of, mask)) = stage(&subject.backend, |builder| {
        let paged = match bounds {
            Some(bounds) => builder.bounded_paged(batch, bounds)?,
            None => builder.paged(batch)?,
        };
        Ok((paged, seqs.bias.stage(builder)?, seqs.stage_mask(builder)?))
    });
    let bias = seqs.load_bias(&subject.backend);
    let kv = KvLayer { cache, layer, seqs: paged, mask, bias: bias.view(table_of) };
    subject.backend.paged_attention(&step, &q, kv, seqs.shape).expect("paged attention")
}

pub fn paged_attention_caps_its_scores<B: Backend>(subject: &Subject<B>) {
    for (n_heads, n_kv_heads, head_dim) in [(1, 1, 12), (4, 2, 33), (2, 1, 64), (2, 2, 128)] {
        let shape = AttentionShape { softcap: Some(1.5), ..shape(n_heads, n_kv_heads, head_dim) };
        let seqs = Sequences::new(&[(1, 40), (5, 33), (1, 300), (64, 64)], shape, Mask::Causal);
        let tables = Tables::new(&seqs, 1, 3);
        let cache = filled(subject, &seqs, &tables, 0);
        let out = attend(subject, &seqs, &tables, (&cache, 0));
        subject.close("capped", &out, (&seqs.expect(), seqs.n_queries(), seqs.q_width()), subject.products);
    }
}

pub fn paged_attention_has_the_bounds_of_its_mask<B: Backend>(subject: &Subject<B>) {
    let both = Seen::Causal { window: Some(64), span: [60, 300] };
    for mask in [Seen::window(1), Seen::window(31), Seen::window(520), Seen::span(3, 40), both] {
        for (n_heads, n_kv_heads, head_dim) in [(4, 2, 33), (2, 1, 128), (1, 1, 12)] {
            let lens = [(1, 1), (1, 620), (5, 270), (0, 3), (40, 40), (30, 300)];
            let seqs = Sequences::new(&lens, shape(n_heads, n_kv_heads, head_dim), mask);
            let tables = Tables::new(&seqs, 1, 3);
            let cache = filled(subject, &seqs, &tables, 0);
            let out = attend(subject, &seqs, &tables, (&cache, 0));
            let (expect, what) = (seqs.expect(), format!("{mask:?} {:?}", seqs.shape));
            subject.close(&what, &out, (&expect, seqs.n_queries(), seqs.q_width()), subject.products);
        }
    }
}

pub fn paged_attention_is_attention_whatever_the_block_tables<B: Backend>(subject: &Subject<B>) {
    let lens = prop::collection::vec((0_usize..6, 0_usize..70), 1..5);
    let heads = prop::sample::select(vec![(1, 1), (4, 2), (6, 1)]);
    let head_dims = prop::sample::select(vec![1_usize, 12, 20, 33, 64, 80, 128]);
    let strategy = (lens, heads, head_dims, any::<bool>(), 0_u32..32);
    let config = Config { cases: 24, failure_persistence: None, ..Config::default() };
    let run =
        TestRunner::new(config).run(&strategy, |(lens, (n_heads, n_kv_heads), head_dim, causal, stride)| {
            let mask = if causal { Mask::Causal } else { Mask::Full };
            let lens: Vec<_> =
                lens.into_iter().map(|(q, k)| if causal { (q, q + k) } else { (q, k) }).collect();
            let seqs = Sequences::new(&lens, shape(n_heads, n_kv_heads, head_dim), mask);
            let tables = Tables::new(&seqs, 2, 2 * stride + 1);
            let cache = filled(subject, &seqs, &tables, 1);
            let out = attend(subject, &seqs, &tables, (&cache, 1));
            let expect = seqs.expect();
            subject.close(
                "paged attention",
                &out,
                (&expect, seqs.n_queries(), seqs.q_width()),
                subject.products,
            );
            Ok(())
        });
    run.unwrap_or_else(|error| panic!("{}: {error}", subject.name));
}

/// Bounds are for launches; sequences of one query and no keys are padding.
pub fn bounds_change_no_bit_and_padding_gives_zeros<B: Backend>(subject: &Subject<B>) {
    let lens = [(1, 40), (1, 0), (3, 300), (1, 0), (1, 1), (0, 0), (9, 270)];
    for mask in [Mask::Full, Mask::Causal] {
        for bias in [Added::None, Added::alibi(4), Added::relative(4, BucketSides::Past)] {
            let seqs = Sequences::new(&lens, shape(4, 2, 33), mask).biased(bias);
            let tables = Tables::new(&seqs, 1, 3);
            let cache = filled(subject, &seqs, &tables, 0);
            let alone = |i: usize| {
                if lens[i] == (1, 0) {
                    return vec![0; seqs.q_width()];
                }
                let tables = Tables { layout: tables.layout, blocks: vec![tables.blocks[i].clone()] };
                subject.bits(&attend(subject, &seqs.alone(i), &tables, (&cache, 0)))
            };
            let alone: Vec<u32> = (0..lens.len()).flat_map(alone).collect();
            for (max_seqlen_q, max_seqlen_k) in [(9, 300), (20, 1000)] {
                let bounds = Some(PagedBounds { max_seqlen_q, max_seqlen_k });
                let together = subject.bits(&attend_within(subject, &seqs, &tables, (&cache, 0), bounds));
                assert_eq!(together, alone, "{} {mask:?} {}", subject.name, seqs.bias.name());
            }
        }
    }
}

pub fn keys_and_values_side_by_side_are_those_apart<B: Backend>(subject: &Subject<B>) {
    for head_dim in [20, 64] {
        let seqs = Sequences::new(&[(3, 70), (2, 5)], shape(4, 2, head_dim), Mask::Full);
        let tables = Tables::new(&seqs, 2, 3);
        let apart = attend(subject, &seqs, &tables, (&filled(subject, &seqs, &tables, 1), 1));
        let (n_keys, width) = (seqs.n_keys(), seqs.kv_width());
        let rows = seqs.k.chunks(width).zip(seqs.v.chunks(width));
        let kv = rows.flat_map(|(k, v)| [k, v].concat()).collect::<Vec<f32>>();
        let kv = subject.tensor(&kv, n_keys, 2 * width);
        let mut cache = subject.backend.kv_cache(tables.layout).expect("a cache");
        let (step, slots) = subject.indices(&tables.slots(&seqs));
        let to = KvSlots { cache: &mut cache, layer: 1, slots };
        subject.backend.write_fused_kv(&step, to, &kv).expect("write");
        let fused = attend(subject, &seqs, &tables, (&cache, 1));
        assert_eq!(subject.bits(&fused), subject.bits(&apart), "{}", subject.name);
    }
}

/// `(head_dim, rotary_dim)`: whole heads, parts of them, none, and heads that are padded.
const TURNED: [(usize, usize); 6] = [(80, 20), (64, 64), (20, 20), (33, 32), (20, 0), (12, 2)];

pub fn rows_of_one_projection_are_cached_as_their_parts_are<B: Backend>(subject: &Subject<B>) {
    for (i, (head_dim, rotary_dim)) in TURNED.into_iter().enumerate() {
        for pairs in [None, Some(RopePairs::Halves), Some(RopePairs::Interleaved)] {
            let turned = pairs.map(|pairs| RopeShape { head_dim, rotary_dim, pairs });
            let (n_heads, n_kv_heads) = [(4, 2), (3, 3), (2, 1)][i % 3];
            let lens = [&[(3, 70), (1, 5), (2, 2)][..], &[(1, 1)], &[]][i % 3];
            let seqs = Sequences::new(lens, shape(n_heads, n_kv_heads, head_dim), Mask::Causal);
            assert_cached_alike(subject, &seqs, turned);
        }
    }
}

/// Compares queries, and attention over what is cached, of one op and of the ops that it stands for, to the bit.
fn assert_cached_alike<B: Backend>(subject: &Subject<B>, seqs: &Sequences, turned: Option<RopeShape>) {
    let (b, n) = (&subject.backend, seqs.n_keys());
    let [width, kv_width] = seqs.shape.widths();
    let tables = Tables::new(seqs, 2, 3);
    let half = turned.map_or(0, |shape| shape.rotary_dim / 2);
    let angles = values(5, n * half);
    let [cos, sin] = [f32::cos, f32::sin].map(|f| angles.iter().map(|a| f(3.0 * a)).collect::<Vec<f32>>());
    let (step, (slots, angles)) =
        stage(b, |builder| Ok((builder.indices(&tables.slots(seqs))?, builder.angles(&cos, &sin, half)?)));
    let rotation = turned.map(|shape| Rotation { shape, angles });
    let rows = subject.tensor(&values(4, n * (width + 2 * kv_width)), n, width + 2 * kv_width);
    let [mut apart, mut fused] = [(); 2].map(|()| b.kv_cache(tables.layout).expect("a cache"));

    let columns = |start, width| b.columns(&rows, start, width).expect("columns");
    let [mut q, mut k, v] =
        [columns(0, width), columns(width, kv_width), columns(width + kv_width, kv_width)];
    if let Some(Rotation { shape, angles }) = rotation {
        b.rope(&step, &mut q, shape, angles).expect("rope");
        b.rope(&step, &mut k, shape, angles).expect("rope");
    }
    b.write_kv(&step, KvSlots { cache: &mut apart, layer: 1, slots }, [&k, &v]).expect("write");
    let to = KvSlots { cache: &mut fused, layer: 1, slots };
    let queries = b.write_fused_qkv(&step, to, FusedQkv { rows: &rows, shape: seqs.shape, rotation });
    let queries = queries.expect("write");
    let what = format!("{} {:?} {turned:?} {:?}", subject.name, seqs.shape, seqs.lens);
    assert_eq!(b.dims(&queries), (n, width), "{what}");
    assert_eq!(subject.bits(&queries), subject.bits(&q), "{what}");
    for layer in [0, 1] {
        let [apart, fused] =
            [&apart, &fused].map(|cache| subject.bits(&attend(subject, seqs, &tables, (cache, layer))));
        assert_eq!(fused, apart, "{what}: layer {layer}");
    }
}

pub fn layers_and_copied_blocks_are_kept_apart<B: Backend>(subject: &Subject<B>) {
    let first = Sequences::new(&[(3, 40)], shape(4, 2, 20), Mask::Full);
    let mut second = Sequences::new(&[(3, 40)], first.shape, Mask::Full);
    second.v = values(9, second.v.len());
    let tables = Tables::new(&first, 2, 3);
    let mut cache = filled(subject, &first, &tables, 0);
    write(subject, &second, &tables, (&mut cache, 1));

    let copies = Tables { layout: tables.layout, blocks: vec![vec![5, 6]] };
    let pairs: Vec<(u32, u32)> = tables.blocks[0].iter().copied().zip([5, 6]).collect();
    subject.backend.copy_blocks(&mut cache, &pairs).expect("copy");
    for (layer, seqs) in [&first, &second].into_iter().enumerate() {
        for tables in [&tables, &copies] {
            let out = attend(subject, seqs, tables, (&cache, layer));
            subject.close("a layer", &out, (&seqs.expect(), 3, seqs.q_width()), subject.products);
        }
    }
    write(subject, &second, &copies, (&mut cache, 0));
    let out = attend(subject, &first, &tables, (&cache, 0));
    subject.close("the block copied from", &out, (&first.expect(), 3, first.q_width()), subject.products);
}

pub fn blocks_come_back_from_the_host_as_they_were<B: Backend>(subject: &Subject<B>) {
    let first = Sequences::new(&[(3, 40)], shape(4, 2, 20), Mask::Full);
    let mut second = Sequences::new(&[(3, 40)], first.shape, Mask::Full);
    second.v = values(9, second.v.len());
    let tables = Tables::new(&first, 2, 3);
    let mut cache = filled(subject, &first, &tables, 0);
    write(subject, &second, &tables, (&mut cache, 1));
    let before = [0, 1].map(|layer| subject.bits(&attend(subject, &first, &tables, (&cache, layer))));

    let b = &subject.backend;
    let mut host = b.host_kv_cache(KvLayout { n_blocks: 3, ..tables.layout }).expect("a cache");
    let out: Vec<(u32, u32)> = tables.blocks[0].iter().copied().zip([2, 0]).collect();
    b.swap_out(&cache, &mut host, &out).expect("swap out");
    // Others take the blocks; the sequence comes back to new ones.
    let mut others = Sequences::new(&[(3, 64)], first.shape, Mask::Full);
    others.k.fill(f32::NAN);
    for layer in [0, 1] {
        write(subject, &others, &tables, (&mut cache, layer));
    }
    b.swap_in(&host, &mut cache, &[(2, 7), (0, 5)]).expect("swap in");
    let back = Tables { layout: tables.layout, blocks: vec![vec![7, 5]] };
    let after = [0, 1].map(|layer| subject.bits(&attend(subject, &first, &back, (&cache, layer))));
    assert_eq!(before, after, "{}", subject.name);
    subject.close(
        "a layer",
        &attend(subject, &second, &back, (&cache, 1)),
        (&second.expect(), 3, second.q_width()),
        subject.products,
    );
}

pub fn a_slot_written_again_has_the_later_key<B: Backend>(subject: &Subject<B>) {
    let mut seqs = Sequences::new(&[(2, 35)], shape(2, 1, 33), Mask::Causal);
    let tables = Tables::new(&seqs, 1, 5);
    let mut cache = filled(subject, &seqs, &tables, 0);
    seqs.k = values(7, seqs.k.len());
    seqs.v = values(8, seqs.v.len());
    write(subject, &seqs, &tables, (&mut cache, 0));
    let out = attend(subject, &seqs, &tables, (&cache, 0));
    subject.close("the later keys", &out, (&seqs.expect(), 2, seqs.q_width()), subject.products);
}

pub fn what_lies_beyond_the_last_key_does_not_matter<B: Backend>(subject: &Subject<B>) {
    for n_keys in [1, 31, 32, 33, 64, 65, 257] {
        let seqs = Sequences::new(&[(1, n_keys)], shape(2, 2, 20), Mask::Full);
        let tables = Tables::new(&seqs, 1, 1);
        let whole = tables.blocks[0].len() * KV_BLOCK_TOKENS;
        let mut poison = Sequences::new(&[(1, whole)], seqs.shape, Mask::Full);
        poison.k.fill(f32::NAN);
        poison.v.fill(f32::NAN);
        let mut cache = filled(subject, &poison, &tables, 0);
        write(subject, &seqs, &tables, (&mut cache, 0));
        let out = attend(subject, &seqs, &tables, (&cache, 0));
        subject.close("poisoned pages", &out, (&seqs.expect(), 1, seqs.q_width()), subject.products);
    }
}

pub fn block_bytes_add_up<B: Backend>(subject: &Subject<B>) {
    let layout = KvLayout { n_layers: 1, n_blocks: 9, n_kv_heads: 2, head_dim: 64 };
    let bytes = subject.backend.kv_block_bytes(layout);
    let values = 2 * KV_BLOCK_TOKENS * 2 * 64;
    // Of bytes, each head of a token has two scales.
    let scales = 2 * KV_BLOCK_TOKENS * 2 * size_of::<f32>();
    let known = [4 * values, 2 * values, values + scales];
    assert!(known.contains(&bytes), "{}: {bytes}", subject.name);
    let layers = KvLayout { n_layers: 3, n_blocks: 1, ..layout };
    assert_eq!(subject.backend.kv_block_bytes(layers), 3 * bytes, "{}", subject.name);
}
