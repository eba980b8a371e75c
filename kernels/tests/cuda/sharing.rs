//! Steps of decoding whose sequences have pages in common: beams over one encoder output, prompts that begin alike. A row is the
//! same as where its sequence is alone, which has blocks of its own.

use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_cuda_standin::Standin;
use triptych_kernels::cuda::CudaKvCache;
use triptych_kernels::ops::{
    AttentionShape, Backend, KvLayer, KvLayout, KvSlots, Mask, PagedBatch, ScoreBias, StageBuilder,
    StoredBias,
};
use triptych_kernels::{CudaBackend, CudaConfig, Precision};

use crate::element::values;

const N_BLOCKS: usize = 40;

/// A sequence: queries, keys, and its blocks.
type Seq = (usize, usize, Vec<u32>);

struct Case {
    backend: CudaBackend,
    shape: AttentionShape,
    mask: Mask,
    cache: CudaKvCache,
    seqs: Vec<Seq>,
    q: Vec<f32>,
}

fn offsets(lens: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut offsets = vec![0];
    for len in lens {
        offsets.push(offsets[offsets.len() - 1] + len as u32);
    }
    offsets
}

impl Case {
    fn new(seed: u64, shape: AttentionShape, mask: Mask) -> Self {
        let device = Standin::get().new_device(seed);
        let config = CudaConfig { device, precision: Precision::Bf16 };
        let backend = CudaBackend::new(config).expect("a device");
        let (n_kv_heads, head_dim) = (shape.n_kv_heads, shape.head_dim);
        let layout = KvLayout { n_layers: 1, n_blocks: N_BLOCKS, n_kv_heads, head_dim };
        let mut cache = backend.kv_cache(layout).expect("a cache");
        let n_slots = N_BLOCKS * KV_BLOCK_TOKENS;
        let mut builder = StageBuilder::new();
        let slots = builder.indices(&(0..n_slots as u32).collect::<Vec<_>>()).expect("slots");
        let step = backend.stage(builder).expect("a step");
        let width = shape.widths()[1];
        let rows = |seed| backend.upload(values(seed, n_slots * width), n_slots, width).expect("rows");
        let to = KvSlots { cache: &mut cache, layer: 0, slots };
        backend.write_kv(&step, to, [&rows(1), &rows(2)]).expect("write");
        let seqs = sequences();
        let n_queries: usize = seqs.iter().map(|seq| seq.0).sum();
        Self { backend, shape, mask, cache, seqs, q: values(3, n_queries * shape.widths()[0]) }
    }

    /// Bits of attention of some sequences, which begin at a row of the queries.
    fn attend(&self, seqs: &[Seq], first_row: usize) -> Vec<u32> {
        let batch = PagedBatch {
            query_start_loc: &offsets(seqs.iter().map(|seq| seq.0)),
            table_start_loc: &offsets(seqs.iter().map(|seq| seq.2.len())),
            block_tables: &seqs.iter().flat_map(|seq| seq.2.clone()).collect::<Vec<_>>(),
            seq_lens: &seqs.iter().map(|seq| seq.1 as u32).collect::<Vec<_>>(),
        };
        let mut builder = StageBuilder::new();
        let staged = builder.paged(batch).expect("sequences");
        let step = self.backend.stage(builder).expect("a step");
        let (n_rows, width) = (seqs.iter().map(|seq| seq.0).sum::<usize>(), self.shape.widths()[0]);
        let rows = self.q[first_row * width..][..n_rows * width].to_vec();
        let q = self.backend.upload(rows, n_rows, width).expect("queries");
        let slopes = [0.3, 0.1, 0.05, 0.01];
        let bias = StoredBias::Alibi(&slopes[..self.shape.n_heads]);
        let bias = self.backend.load_bias(bias).expect("a bias");
        let attend = || {
            let bias = ScoreBias::Loaded(&bias);
            let kv = KvLayer { cache: &self.cache, layer: 0, seqs: staged, mask: self.mask, bias };
            let out = self.backend.paged_attention(&step, &q, kv, self.shape).expect("attention");
            self.backend.download(&out).expect("values").into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        let first = attend();
        assert_eq!(attend(), first, "a layer after the first");
        first
    }
}

/// Five beams over 9 blocks, of which the last is not full, and sequences that begin alike.
fn sequences() -> Vec<Seq> {
    let beam = |n_queries| (n_queries, 270, (0..9).collect());
    let prefix = |first: u32, n_queries, n_keys: usize| {
        let n_own = n_keys.div_ceil(KV_BLOCK_TOKENS) as u32 - 8;
        (n_queries, n_keys, (20..28).chain(first..first + n_own).collect())
    };
    vec![
        beam(1),
        prefix(30, 2, 300),
        beam(1),
        beam(3),
        (1, 20, vec![39]),
        prefix(35, 1, 257),
        beam(2),
        beam(1),
        prefix(36, 1, 256),
        (0, 9, vec![39]),
    ]
}

#[test]
fn sequences_with_pages_in_common_are_the_same_alone() {
    let shapes = [(4, 4, 32), (4, 2, 64), (2, 1, 200)];
    for (seed, (n_heads, n_kv_heads, head_dim)) in shapes.into_iter().enumerate() {
        for mask in [Mask::Full, Mask::Causal] {
            let shape = AttentionShape { n_heads, n_kv_heads, head_dim, scale: 0.3, softcap: None };
            let case = Case::new(seed as u64, shape, mask);
            let together = case.attend(&case.seqs, 0);
            let mut first_row = 0;
            let alone: Vec<u32> = case
                .seqs
                .iter()
                .flat_map(|seq| {
                    let bits = case.attend(std::slice::from_ref(seq), first_row);
                    first_row += seq.0;
                    bits
                })
                .collect();
            assert_eq!(together, alone, "{shape:?} {mask:?}");
        }
    }
}
