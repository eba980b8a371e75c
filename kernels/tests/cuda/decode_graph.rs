//! A step of decoding as a captured forward: over any sequences within its bounds it gives what eager work gives, and it writes
//! the slots of its own rows alone.

use std::collections::BTreeSet;

use triptych_core::DType;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_cuda_standin::{Left, Standin};
use triptych_kernels::cuda::{CudaBias, CudaKvCache, CudaLinear, CudaStep, CudaTable, CudaTensor};
use triptych_kernels::ops::{
    Activation, Angles, AttentionShape, Backend, BucketRule, BucketSides, Captured, ForwardInputs, FusedQkv,
    Indices, KvLayer, KvLayout, KvSlots, LinearPart, Mask, PagedBatch, PagedBounds, PagedSequences,
    RopeShape, Rotation, ScoreBias, StageBuilder, StoredBias, WeightView,
};
use triptych_kernels::{CudaBackend, CudaConfig, KernelError, Precision};

use crate::element::values;

/// Rows of the captured step.
const BUCKET: usize = 8;
/// Keys of a sequence, at most: two splits of the decoding kernel.
const MAX_KEYS: usize = 300;
/// Blocks of a sequence, at most.
const SEQ_BLOCKS: usize = MAX_KEYS.div_ceil(KV_BLOCK_TOKENS);
/// The block of padding rows, behind those of the sequences.
const SPARE: usize = BUCKET * SEQ_BLOCKS;
/// Encoder outputs of three blocks each.
const ENCODED: usize = 3;
const BOUNDS: PagedBounds = PagedBounds { max_seqlen_q: 1, max_seqlen_k: MAX_KEYS };
const WIDTH: usize = 64;
const VOCAB: usize = 11;
const SHAPE: AttentionShape =
    AttentionShape { n_heads: 4, n_kv_heads: 2, head_dim: 32, scale: 0.2, softcap: None };
const OWN: KvLayout = KvLayout { n_layers: 2, n_blocks: SPARE + 1, n_kv_heads: 2, head_dim: 32 };
const CROSS: KvLayout = KvLayout { n_layers: 1, n_blocks: 3 * ENCODED, ..OWN };
/// The layer of self-attention.
const LAYER: usize = 1;

/// A decoder of one layer: self-attention, and attention over encoder outputs.
struct Model {
    backend: CudaBackend,
    table: CudaTable,
    qkv: CudaLinear,
    query: CudaLinear,
    out: CudaLinear,
    logits: CudaLinear,
    bias: Option<CudaBias>,
}

struct Caches {
    own: CudaKvCache,
    cross: CudaKvCache,
}

/// Handles of a step.
#[derive(Clone, Copy)]
struct Batch {
    ids: Indices,
    angles: Angles,
    slots: Indices,
    own: PagedSequences,
    cross: PagedSequences,
    logit_rows: Indices,
}

/// Biases of self-attention.
#[derive(Clone, Copy, Debug)]
enum Added {
    Nothing,
    Relative,
    Alibi,
    /// A table for sequences of one size.
    Table,
}

fn bytes(seed: u64, n: usize) -> Vec<u8> {
    values(seed, n).iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn matrix<'a>(data: &'a [u8], shape: &'a [usize]) -> WeightView<'a> {
    WeightView { dtype: DType::F32, shape, data }
}

impl Model {
    fn new(device: usize, precision: Precision, added: Added) -> Self {
        let backend = CudaBackend::new(CudaConfig { device, precision }).expect("a device");
        let linear = |seed, n_in, n_out| {
            let data = bytes(seed, n_in * n_out);
            backend.load_linear(&[LinearPart::new(matrix(&data, &[n_out, n_in]), None)]).expect("a layer")
        };
        let [width, kv] = SHAPE.widths();
        let rule = BucketRule { max_distance: 40, sides: BucketSides::Past };
        let table = bytes(9, 16 * SHAPE.n_heads);
        let stored = match added {
            Added::Nothing => None,
            Added::Relative => {
                Some(StoredBias::Relative { table: matrix(&table, &[16, SHAPE.n_heads]), rule })
            }
            Added::Alibi => Some(StoredBias::Alibi(&[0.5, 0.25, 0.1, 0.01])),
            Added::Table => {
                Some(StoredBias::Tables { values: vec![0.0; SHAPE.n_heads * 7], dims: [1, 4, 1, 7] })
            }
        };
        Self {
            table: backend
                .load_table(matrix(&bytes(1, VOCAB * WIDTH), &[VOCAB, WIDTH]), 1.0)
                .expect("a table"),
            qkv: linear(2, WIDTH, width + 2 * kv),
            query: linear(3, WIDTH, width),
            out: linear(4, width, WIDTH),
            logits: linear(5, WIDTH, VOCAB),
            bias: stored.map(|stored| backend.load_bias(stored).expect("a bias")),
            backend,
        }
    }

    /// Caches in which every slot has a key and a value.
    fn caches(&self) -> Caches {
        let filled = |layout: KvLayout, seed| {
            let mut cache = self.backend.kv_cache(layout).expect("a cache");
            let n_slots = layout.n_blocks * KV_BLOCK_TOKENS;
            let mut builder = StageBuilder::new();
            let slots = builder.indices(&(0..n_slots as u32).collect::<Vec<_>>()).expect("slots");
            let step = self.backend.stage(builder).expect("a step");
            for layer in 0..layout.n_layers {
                let rows = |seed| {
                    let values = values(seed, n_slots * SHAPE.widths()[1]);
                    self.backend.upload(values, n_slots, SHAPE.widths()[1]).expect("rows")
                };
                let (k, v) = (rows(seed + layer as u64), rows(seed + 10 + layer as u64));
                let to = KvSlots { cache: &mut cache, layer, slots };
                self.backend.write_kv(&step, to, [&k, &v]).expect("write");
            }
            cache
        };
        Caches { own: filled(OWN, 20), cross: filled(CROSS, 40) }
    }

    /// Logits of the rows, `[n_rows, VOCAB]`.
    fn forward(
        &self,
        backend: &CudaBackend,
        step: &CudaStep,
        (batch, caches): (Batch, &mut Caches),
    ) -> Result<CudaTensor, KernelError> {
        let none = Activation::None;
        let x = backend.embed(step, &self.table, batch.ids)?;
        let rows = &backend.linear(&x, &self.qkv, none, None)?;
        let to = KvSlots { cache: &mut caches.own, layer: LAYER, slots: batch.slots };
        let rotation = Some(Rotation { shape: RopeShape::whole(SHAPE.head_dim), angles: batch.angles });
        let q = backend.write_fused_qkv(step, to, FusedQkv { rows, shape: SHAPE, rotation })?;
        let bias = self.bias.as_ref().map_or(ScoreBias::None, ScoreBias::Loaded);
        let kv = KvLayer { cache: &caches.own, layer: LAYER, seqs: batch.own, mask: Mask::Causal, bias };
        let context = backend.paged_attention(step, &q, kv, SHAPE)?;
        let x = backend.linear(&context, &self.out, none, Some(&x))?;
        let q = backend.linear(&x, &self.query, none, None)?;
        let (seqs, bias) = (batch.cross, ScoreBias::None);
        let kv = KvLayer { cache: &caches.cross, layer: 0, seqs, mask: Mask::Full, bias };
        let context = backend.paged_attention(step, &q, kv, SHAPE)?;
        let x = backend.linear(&context, &self.out, none, Some(&x))?;
        let x = backend.gather_rows(step, &x, batch.logit_rows)?;
        backend.linear(&x, &self.logits, none, None)
    }

    /// The logits of a step as it is.
    fn eager(&self, lens: &[usize], caches: &mut Caches) -> Vec<f32> {
        let mut builder = StageBuilder::new();
        let batch = stage(&mut builder, lens, None).expect("a step");
        let step = self.backend.stage(builder).expect("a step");
        let logits = self.forward(&self.backend, &step, (batch, caches)).expect("a forward");
        self.backend.download(&logits).expect("logits")
    }

    fn capture(
        &self,
        (inputs, batch): (ForwardInputs, Batch),
        caches: &mut Caches,
    ) -> Result<Box<Captured<CudaBackend>>, KernelError> {
        self.backend
            .capture(inputs, &mut |backend, step, _| self.forward(backend, step, (batch, &mut *caches)))
    }

    /// Bits of attention over each block of a layer by itself: they depend on every key and value in it.
    fn contents(&self, cache: &CudaKvCache, layout: KvLayout, layer: usize) -> Vec<Vec<u32>> {
        let n = layout.n_blocks;
        let starts: Vec<u32> = (0..=n as u32).collect();
        let batch = PagedBatch {
            query_start_loc: &starts,
            table_start_loc: &starts,
            block_tables: &starts[..n],
            seq_lens: &vec![KV_BLOCK_TOKENS as u32; n],
        };
        let mut builder = StageBuilder::new();
        let seqs = builder.paged(batch).expect("sequences");
        let step = self.backend.stage(builder).expect("a step");
        let width = SHAPE.widths()[0];
        let q = self.backend.upload(values(6, n * width), n, width).expect("queries");
        let kv = KvLayer { cache, layer, seqs, mask: Mask::Full, bias: ScoreBias::None };
        let out = self.backend.paged_attention(&step, &q, kv, SHAPE).expect("attention");
        let out = self.backend.download(&out).expect("values");
        out.chunks(width).map(|row| row.iter().map(|value| value.to_bits()).collect()).collect()
    }
}

/// Block `i` of a sequence.
fn block(seq: usize, i: usize) -> u32 {
    // Out of order, and each once.
    ((seq * SEQ_BLOCKS + i) * 7 % SPARE) as u32
}

/// The slot of the last key of a sequence.
fn slot(seq: usize, n_keys: usize) -> u32 {
    let last = n_keys - 1;
    block(seq, last / KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS as u32 + (last % KV_BLOCK_TOKENS) as u32
}

fn offsets(lens: impl Iterator<Item = usize>) -> Vec<u32> {
    let mut offsets = vec![0];
    for len in lens {
        offsets.push(offsets[offsets.len() - 1] + len as u32);
    }
    offsets
}

/// Adds sequences of one row each, whose tables and numbers of keys these are.
fn stage_pages(
    builder: &mut StageBuilder,
    seqs: &[(Vec<u32>, usize)],
    bounds: Option<PagedBounds>,
) -> Result<PagedSequences, KernelError> {
    let batch = PagedBatch {
        query_start_loc: &offsets(seqs.iter().map(|_| 1)),
        table_start_loc: &offsets(seqs.iter().map(|seq| seq.0.len())),
        block_tables: &seqs.iter().flat_map(|seq| seq.0.clone()).collect::<Vec<_>>(),
        seq_lens: &seqs.iter().map(|seq| seq.1 as u32).collect::<Vec<_>>(),
    };
    match bounds {
        Some(bounds) => builder.bounded_paged(batch, bounds),
        None => builder.paged(batch),
    }
}

/// Adds a step of sequences of so many keys; with bounds, padded to the bucket.
fn stage(
    builder: &mut StageBuilder,
    lens: &[usize],
    bounds: Option<PagedBounds>,
) -> Result<Batch, KernelError> {
    let (n, half) = (lens.len(), SHAPE.head_dim / 2);
    let n_rows = if bounds.is_some() { BUCKET } else { n };
    let padded = |real: Vec<u32>, padding: &dyn Fn(usize) -> u32| -> Vec<u32> {
        real.into_iter().chain((n..n_rows).map(padding)).collect()
    };
    let ids = lens.iter().map(|len| (len % VOCAB) as u32).collect();
    let turns = |f: fn(f32) -> f32| -> Vec<f32> {
        let angle = |len: &usize, pair: usize| *len as f32 / (1 + pair) as f32;
        let real = lens.iter().flat_map(|len| (0..half).map(move |pair| f(angle(len, pair))));
        real.chain(std::iter::repeat_n(f(0.0), (n_rows - n) * half)).collect()
    };
    let slots = lens.iter().enumerate().map(|(seq, len)| slot(seq, *len)).collect();
    // Padding sees nothing, or a block of its own.
    let alone = |row: usize| if row.is_multiple_of(2) { (vec![], 0) } else { (vec![SPARE as u32], 1) };
    let own = lens
        .iter()
        .enumerate()
        .map(|(seq, len)| ((0..len.div_ceil(KV_BLOCK_TOKENS)).map(|i| block(seq, i)).collect(), *len));
    let own: Vec<_> = own.chain((n..n_rows).map(alone)).collect();
    let cross = (0..n_rows).map(|row| {
        let first = (row % ENCODED * 3) as u32;
        if row < n { (vec![first, first + 1, first + 2], 20 + 30 * (row % ENCODED)) } else { (vec![], 0) }
    });
    let spare = (SPARE * KV_BLOCK_TOKENS) as u32;
    Ok(Batch {
        ids: builder.indices(&padded(ids, &|_| 0))?,
        angles: builder.angles(&turns(f32::cos), &turns(f32::sin), half)?,
        slots: builder.indices(&padded(slots, &|row| spare + row as u32))?,
        own: stage_pages(builder, &own, bounds)?,
        cross: stage_pages(builder, &cross.collect::<Vec<_>>(), bounds)?,
        logit_rows: builder.indices(&padded((0..n as u32).rev().collect(), &|row| row as u32))?,
    })
}

/// Rooms of the arrays of a captured step, in the order of [`stage`].
fn rooms() -> Vec<usize> {
    let half = SHAPE.head_dim / 2;
    let pages = BOUNDS.rooms(BUCKET);
    let rows = [BUCKET, BUCKET * half, BUCKET * half, BUCKET];
    [&rows[..], &pages, &pages, &[BUCKET]].concat()
}

fn captured(arrays: StageBuilder) -> ForwardInputs {
    ForwardInputs { arrays, features: Vec::new(), dims: (0, WIDTH) }
}

/// The inputs of a step, padded to the captured shape.
fn inputs(lens: &[usize]) -> (ForwardInputs, Batch) {
    let mut arrays = StageBuilder::with_rooms(rooms());
    let batch = stage(&mut arrays, lens, Some(BOUNDS)).expect("a step");
    (captured(arrays), batch)
}

/// Steps of one to eight sequences of any lengths, each after one that left other values behind.
fn steps(seed: usize) -> impl Iterator<Item = Vec<usize>> {
    let n_keys = move |step: usize, seq: usize| 1 + (step * 131 + seq * 89 + seed * 57) % MAX_KEYS;
    [8, 1, 2, 5, 3, 7, 4, 6]
        .into_iter()
        .enumerate()
        .map(move |(step, n)| (0..n).map(|seq| n_keys(step, seq)).collect())
}

#[test]
fn a_replayed_step_is_the_eager_step_to_the_bit() {
    let cases = [
        (Precision::F32, Added::Relative),
        (Precision::Bf16, Added::Nothing),
        (Precision::Bf16, Added::Alibi),
        (Precision::Int8, Added::Relative),
    ];
    for (i, (precision, added)) in cases.into_iter().enumerate() {
        let device = Standin::get().new_device(i as u64);
        let model = Model::new(device, precision, added);
        let [mut replayed, mut eager] = [model.caches(), model.caches()];
        let of_all = |caches: &Caches| {
            let own = [LAYER, 0].map(|layer| model.contents(&caches.own, OWN, layer));
            (own, model.contents(&caches.cross, CROSS, 0))
        };
        let ([before, unused], encoded) = of_all(&replayed);
        let mut graph = model.capture(inputs(&[]), &mut replayed).expect("a graph");
        let mut written = BTreeSet::new();
        for lens in steps(i) {
            let logits =
                graph.replay_on_device(inputs(&lens).0, lens.len(), &mut |_| Ok(())).expect("a replay");
            assert_eq!(model.backend.dims(&logits), (lens.len(), VOCAB));
            let logits = model.backend.download(&logits).expect("logits");
            assert_eq!(logits, model.eager(&lens, &mut eager), "{precision:?} {added:?} {lens:?}");
            written
                .extend(lens.iter().enumerate().map(|(seq, len)| slot(seq, *len) as usize / KV_BLOCK_TOKENS));
        }
        let what = format!("{precision:?} {added:?}");
        let ([after, still_unused], still_encoded) = of_all(&replayed);
        let ([expected, ..], _) = of_all(&eager);
        assert_eq!(after[..SPARE], expected[..SPARE], "{what}");
        assert!(written.len() > SPARE / 4 && written.len() < SPARE, "{what}");
        let mut others = (0..SPARE).filter(|block| !written.contains(block));
        assert!(others.all(|block| after[block] == before[block]), "{what}");
        assert_eq!((still_unused, still_encoded), (unused, encoded), "{what}");
        drop((graph, model, replayed, eager));
        assert_eq!(Standin::get().left(device), Left::default(), "{what}");
    }
}

#[test]
fn padding_is_finite_and_writes_its_own_block() {
    for precision in [Precision::F32, Precision::Bf16] {
        let model = Model::new(Standin::get().new_device(20), precision, Added::Relative);
        let mut caches = model.caches();
        let before = model.contents(&caches.own, OWN, LAYER);
        let mut graph = model.capture(inputs(&[]), &mut caches).expect("a graph");
        let logits = graph.replay(inputs(&[]).0, BUCKET).expect("a replay");
        assert!(logits.iter().all(|value| value.is_finite()), "{precision:?}");
        assert_eq!(model.contents(&caches.own, OWN, LAYER)[..SPARE], before[..SPARE], "{precision:?}");
        // A real row is the same whatever pads the step.
        let full = graph.replay(inputs(&[5, 7, 299]).0, BUCKET).expect("a replay");
        assert!(full.iter().all(|value| value.is_finite()), "{precision:?}");
        assert_eq!(graph.replay(inputs(&[5, 7, 299]).0, 3), Ok(full[..3 * VOCAB].to_vec()), "{precision:?}");
    }
}

#[test]
fn a_result_on_the_device_outlives_the_next_replay() {
    let device = Standin::get().new_device(21);
    let model = Model::new(device, Precision::Bf16, Added::Nothing);
    let mut caches = model.caches();
    let mut graph = model.capture(inputs(&[]), &mut caches).expect("a graph");
    let download = |x: &CudaTensor| model.backend.download(x).expect("logits");
    let first = graph.replay_on_device(inputs(&[40, 3]).0, 2, &mut |_| Ok(())).expect("a replay");
    let kept = download(&first);
    let second = graph.replay_on_device(inputs(&[9, 299, 33]).0, 3, &mut |_| Ok(())).expect("a replay");
    assert_eq!(download(&first), kept);
    assert_ne!(download(&second)[..kept.len()], kept);
    assert_eq!(
        model.backend.dims(&graph.replay_on_device(inputs(&[9]).0, 0, &mut |_| Ok(())).expect("a replay")),
        (0, VOCAB)
    );
    drop((first, second));
    let allocated = Standin::get().calls(device, "cuMemAlloc_v2");
    for _ in 0..5 {
        graph.replay_on_device(inputs(&[40, 3]).0, 2, &mut |_| Ok(())).expect("a replay");
    }
    assert_eq!(Standin::get().calls(device, "cuMemAlloc_v2"), allocated);
}

#[test]
fn steps_that_the_launches_do_not_allow_are_refused() {
    let model = Model::new(Standin::get().new_device(22), Precision::Bf16, Added::Nothing);
    let mut caches = model.caches();
    let mut graph = model.capture(inputs(&[]), &mut caches).expect("a graph");
    let good = graph.replay(inputs(&[100]).0, 1).expect("a replay");
    let (lens, half) = ([100; BUCKET], SHAPE.head_dim / 2);
    let slots: Vec<u32> = (0..BUCKET).map(|row| (SPARE * KV_BLOCK_TOKENS + row) as u32).collect();
    // A step as the captured one but for what is given.
    let mut replay = |rooms, slots: &[u32], (own, bounds): (&[(Vec<u32>, usize)], PagedBounds), n_encoded| {
        let mut arrays = StageBuilder::with_rooms(rooms);
        let cross = vec![((0..n_encoded).collect::<Vec<u32>>(), 2); BUCKET];
        arrays.indices(&[0; BUCKET])?;
        arrays.angles(&vec![1.0; BUCKET * half], &vec![0.0; BUCKET * half], half)?;
        arrays.indices(slots)?;
        stage_pages(&mut arrays, own, Some(bounds))?;
        stage_pages(&mut arrays, &cross, Some(bounds))?;
        arrays.indices(&[0; BUCKET])?;
        graph.replay(captured(arrays), 1)
    };
    let own = |last: u32, n_keys: usize| -> Vec<(Vec<u32>, usize)> {
        lens.iter()
            .map(|_| ((0..n_keys.div_ceil(KV_BLOCK_TOKENS) as u32 - 1).chain([last]).collect(), n_keys))
            .collect()
    };
    let last = SPARE as u32;
    assert!(replay(rooms(), &slots, (&own(last, 100), BOUNDS), 1).is_ok());
    let index = |result: Result<_, KernelError>| matches!(result, Err(KernelError::Index { .. }));
    let shape = |result: Result<_, KernelError>| matches!(result, Err(KernelError::Shape { .. }));
    // That of the last row is the first behind the cache.
    let beyond: Vec<u32> = slots.iter().map(|slot| slot + (KV_BLOCK_TOKENS + 1 - BUCKET) as u32).collect();
    assert!(index(replay(rooms(), &beyond, (&own(last, 100), BOUNDS), 1)));
    assert!(index(replay(rooms(), &slots, (&own(last + 1, 100), BOUNDS), 1)));
    assert!(index(replay(rooms(), &slots, (&own(last, 100), BOUNDS), CROSS.n_blocks as u32 + 1)));
    let longer = PagedBounds { max_seqlen_k: MAX_KEYS + 1, ..BOUNDS };
    assert!(shape(replay(rooms(), &slots, (&own(last, 301), longer), 1)));
    assert!(shape(replay(rooms(), &slots, (&own(last, 100), longer), 1)), "bounds are the captured ones");
    // An array elsewhere, and more words than there is memory for.
    let with = |array: usize, more: usize| {
        let mut rooms = rooms();
        rooms[array] += more;
        rooms
    };
    assert!(shape(replay(with(6, 4), &slots, (&own(last, 100), BOUNDS), 1)));
    assert!(shape(replay(with(12, 400), &slots, (&own(last, 100), BOUNDS), 1)));
    assert_eq!(graph.replay(inputs(&[100]).0, 1), Ok(good), "the graph is as it was");
}

#[test]
fn attention_over_pages_without_bounds_is_not_captured() {
    let model = Model::new(Standin::get().new_device(23), Precision::Bf16, Added::Nothing);
    let mut caches = model.caches();
    let mut arrays = StageBuilder::new();
    let batch = stage(&mut arrays, &[7, 9], None).expect("a step");
    let refused = model.capture((captured(arrays), batch), &mut caches).map(drop);
    assert_eq!(refused, Err(KernelError::NotCapturable { op: "paged_attention" }));
    // A table is for sequences of one size.
    let model = Model::new(Standin::get().new_device(24), Precision::F32, Added::Table);
    let mut caches = model.caches();
    let refused = model.capture(inputs(&[7; BUCKET]), &mut caches).map(drop);
    assert_eq!(refused, Err(KernelError::NotCapturable { op: "paged_attention" }));
    assert_eq!(model.eager(&[7, 7], &mut caches).len(), 2 * VOCAB);
}
