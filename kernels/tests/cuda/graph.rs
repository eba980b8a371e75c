//! Captured forwards: a replay gives what eager work gives, whatever was replayed before, and a capture that fails leaves
//! nothing behind.
//!
//! In this build every piece of an arena, every input and every result is NaN before a replay (`poison` in `graph.rs`), and so
//! is every activation when the graph takes it: a value that a replay forgets to write is a NaN in the result.

use triptych_core::DType;
use triptych_cuda_standin::{Left, Standin};
use triptych_kernels::cuda::{CudaBias, CudaLinear, CudaNorm, CudaStep, CudaTable, CudaTensor};
use triptych_kernels::ops::{
    Activation, AttentionShape, Backend, BucketRule, BucketSides, CapturedForward, ForwardInputs, Indices,
    LinearPart, Mask, NormKind, Offsets, ScoreBias, Sequences, StageBuilder, StoredBias, Varlen, WeightView,
};
use triptych_kernels::{CudaBackend, CudaConfig, KernelError, Precision};

use crate::element::values;

const WIDTH: usize = 64;
/// Rows of the captured forward.
const ROWS: usize = 24;
/// Sequences of it, that of padding included.
const SEQS: usize = 4;
const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];
/// `CUDA_ERROR_ILLEGAL_ADDRESS`, after which the device is lost.
const ILLEGAL_ADDRESS: i32 = 700;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: i32 = 1;

/// A small encoder: a table's rows on features, attention with a bias, a norm of whole sequences.
struct Model {
    backend: CudaBackend,
    table: CudaTable,
    qkv: CudaLinear,
    out: CudaLinear,
    norm: CudaNorm,
    bias: CudaBias,
}

/// Handles of a batch.
#[derive(Clone, Copy)]
struct Batch {
    ids: Indices,
    seqs: Sequences,
    normed: Offsets,
    order: Indices,
}

fn bytes(seed: u64, n: usize) -> Vec<u8> {
    values(seed, n).iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Model {
    fn new(device: usize, precision: Precision) -> Self {
        let backend = CudaBackend::new(CudaConfig { device, precision }).expect("a device").for_encoders();
        let linear = |seed, n_out| {
            let data = bytes(seed, n_out * WIDTH);
            let view = WeightView { dtype: DType::F32, shape: &[n_out, WIDTH], data: &data };
            let own = bytes(seed + 1, n_out);
            let bias = WeightView { dtype: DType::F32, shape: &[n_out], data: &own };
            backend.load_linear(&[LinearPart::new(view, Some(bias))]).expect("a layer")
        };
        let matrix = |data, shape| WeightView { dtype: DType::F32, shape, data };
        let rule = BucketRule { max_distance: 20, sides: BucketSides::Both };
        Self {
            table: backend.load_table(matrix(&bytes(3, 9 * WIDTH), &[9, WIDTH]), 1.0).expect("a table"),
            qkv: linear(4, 3 * WIDTH),
            out: linear(6, WIDTH),
            norm: backend
                .load_norm(NormKind::Layer, matrix(&bytes(8, WIDTH), &[WIDTH]), None, 1e-5)
                .expect("a norm"),
            bias: backend
                .load_bias(StoredBias::Relative { table: matrix(&bytes(9, 16), &[8, 2]), rule })
                .expect("a bias"),
            backend,
        }
    }

    fn forward(
        &self,
        backend: &CudaBackend,
        step: &CudaStep,
        (features, batch): (&CudaTensor, Batch),
    ) -> Result<CudaTensor, KernelError> {
        let mut x = backend.linear(features, &self.out, Activation::Gelu, None)?;
        backend.add(&mut x, &backend.embed(step, &self.table, batch.ids)?)?;
        let qkv = backend.linear(&x, &self.qkv, Activation::None, None)?;
        let shape =
            AttentionShape { n_heads: 2, n_kv_heads: 2, head_dim: WIDTH / 2, scale: 0.2, softcap: None };
        let seqs = Varlen { seqs: batch.seqs, mask: Mask::Full, bias: ScoreBias::Loaded(&self.bias) };
        let context = backend.fused_attention(step, &qkv, shape, seqs)?;
        let x = backend.linear(&context, &self.out, Activation::None, Some(&x))?;
        let x = backend.group_norm(step, &x, &self.norm, batch.normed)?;
        backend.gather_rows(step, &x, batch.order)
    }

    /// Rows of sequences of these lengths, computed as they are.
    fn eager(&self, lens: &[usize], seed: u64) -> Vec<f32> {
        let n_rows = lens.iter().sum();
        let (mut builder, offsets) = (StageBuilder::new(), offsets(lens));
        let batch = Batch {
            ids: builder.indices(&ids(n_rows, seed)).expect("ids"),
            seqs: builder.self_sequences(&offsets).expect("sequences"),
            normed: builder.offsets(&offsets).expect("offsets"),
            order: builder.indices(&order(n_rows)).expect("an order"),
        };
        let step = self.backend.stage(builder).expect("a step");
        let x = self.backend.upload(values(seed, n_rows * WIDTH), n_rows, WIDTH).expect("features");
        let y = self.forward(&self.backend, &step, (&x, batch)).expect("a forward");
        self.backend.download(&y).expect("rows")
    }

    fn capture(&self, lens: &[usize], seed: u64) -> Result<Box<dyn CapturedForward>, KernelError> {
        let (inputs, batch) = padded(lens, seed);
        let graph =
            self.backend.capture(inputs, &mut |backend, step, x| self.forward(backend, step, (x, batch)))?;
        Ok(graph)
    }
}

fn offsets(lens: &[usize]) -> Vec<u32> {
    let mut end = 0;
    let ends = lens.iter().map(|len| {
        end += *len as u32;
        end
    });
    std::iter::once(0).chain(ends).collect()
}

fn ids(n_rows: usize, seed: u64) -> Vec<u32> {
    (0..n_rows as u64).map(|i| ((i * 5 + seed) % 9) as u32).collect()
}

/// The last row first.
fn order(n_rows: usize) -> Vec<u32> {
    (0..n_rows as u32).rev().collect()
}

/// The inputs of a batch with padding up to the captured shape.
fn padded(lens: &[usize], seed: u64) -> (ForwardInputs, Batch) {
    let (n_rows, rows) = (lens.iter().sum::<usize>(), ROWS as u32);
    let real = offsets(lens);
    let [mut queries, mut keys] = [real.clone(), real.clone()];
    queries.resize(SEQS + 2, rows);
    keys.resize(SEQS + 1, n_rows as u32);
    keys.push(rows);
    let mut ids = ids(n_rows, seed);
    ids.resize(ROWS, 0);
    let mut order = order(n_rows);
    order.resize(ROWS, rows - 1);
    let mut arrays = StageBuilder::new();
    let batch = Batch {
        ids: arrays.indices(&ids).expect("ids"),
        seqs: arrays.bounded_sequences(&queries, &keys, ROWS).expect("sequences"),
        normed: arrays.offsets(&queries).expect("offsets"),
        order: arrays.indices(&order).expect("an order"),
    };
    let mut features = values(seed, n_rows * WIDTH);
    features.resize(ROWS * WIDTH, 0.0);
    (ForwardInputs { arrays, features, dims: (ROWS, WIDTH) }, batch)
}

/// Batches of other sizes, each after one that left other values behind.
const BATCHES: [&[usize]; 7] = [&[24], &[1], &[3, 9, 2], &[7, 7, 7], &[1, 1, 1], &[20, 4], &[23]];

#[test]
fn a_replay_is_what_eager_work_gives_to_the_bit() {
    for precision in PRECISIONS {
        let device = Standin::get().new_device(precision as u64);
        let model = Model::new(device, precision);
        let mut graph = model.capture(&[5, 2], 1).expect("a graph");
        assert!(graph.n_bytes() > 0);
        for (i, lens) in BATCHES.iter().enumerate() {
            let (seed, n_rows) = (10 + i as u64, lens.iter().sum());
            let replayed = graph.replay(padded(lens, seed).0, n_rows).expect("a replay");
            assert_eq!(replayed, model.eager(lens, seed), "{precision:?} {lens:?}");
        }
        drop((graph, model));
        assert_eq!(Standin::get().left(device), Left::default(), "{precision:?}");
    }
}

#[test]
fn padding_rows_are_written() {
    let device = Standin::get().new_device(5);
    let model = Model::new(device, Precision::F32);
    let mut graph = model.capture(&[5, 2], 1).expect("a graph");
    let all = graph.replay(padded(&[3], 2).0, ROWS).expect("a replay");
    assert!(all.iter().all(|value| value.is_finite()));
    assert_eq!(graph.replay(padded(&[3], 2).0, 0), Ok(vec![]));
}

#[test]
fn a_replay_allocates_nothing_and_frees_nothing() {
    let device = Standin::get().new_device(6);
    let model = Model::new(device, Precision::Bf16);
    let mut graph = model.capture(&[5, 2], 1).expect("a graph");
    let calls =
        || ["cuMemAlloc_v2", "cuMemFree_v2", "cuLaunchKernel"].map(|e| Standin::get().calls(device, e));
    let (before, bytes) = (calls(), graph.n_bytes());
    for seed in 0..5 {
        graph.replay(padded(&[3, 1], seed).0, 4).expect("a replay");
    }
    assert_eq!((calls(), graph.n_bytes()), (before, bytes));
    // Memory that eager work gives back, or lacks, is not the graph's.
    let expected = graph.replay(padded(&[3, 1], 7).0, 4).expect("a replay");
    drop(model.backend.zeros(1000, WIDTH).expect("zeros"));
    Standin::get().fail(device, "cuMemAlloc_v2", 1, 2);
    model.backend.zeros(5000, WIDTH).expect("the second attempt");
    assert_eq!(graph.replay(padded(&[3, 1], 7).0, 4), Ok(expected));
}

#[test]
fn inputs_that_the_launches_do_not_allow_are_refused() {
    let device = Standin::get().new_device(7);
    let model = Model::new(device, Precision::F32);
    let mut graph = model.capture(&[5, 2], 1).expect("a graph");
    let good = graph.replay(padded(&[3], 2).0, 3).expect("a replay");
    let mut refused = |change: &dyn Fn(&mut ForwardInputs), n_rows: usize| {
        let mut inputs = padded(&[3], 2).0;
        change(&mut inputs);
        graph.replay(inputs, n_rows).expect_err("inputs of another forward")
    };
    let shape = |error| matches!(error, KernelError::Shape { .. });
    assert!(shape(refused(&|inputs| inputs.arrays = StageBuilder::new(), 3)));
    assert!(shape(refused(&|inputs| inputs.dims = (ROWS / 2, 2 * WIDTH), 3)));
    assert!(shape(refused(&|inputs| inputs.features.truncate(1), 3)));
    let extra = |inputs: &mut ForwardInputs| drop(inputs.arrays.indices(&[0]));
    assert!(shape(refused(&extra, 3)));
    assert!(matches!(refused(&|_| (), ROWS + 1), KernelError::Index { .. }));
    // A row that the table does not have, sequences that are too long for the grid, and an end elsewhere.
    let staged = |ids: &[u32], queries: &[u32], max_seqlen: usize| {
        let (mut arrays, keys) = (StageBuilder::new(), [0, 3, 3, 3, 3, queries[5]]);
        let _ = arrays.indices(ids).expect("ids");
        let _ = arrays.bounded_sequences(queries, &keys, max_seqlen).expect("sequences");
        let _ = arrays.offsets(queries).expect("offsets");
        let _ = arrays.indices(&[0; ROWS]).expect("an order");
        move |inputs: &mut ForwardInputs| inputs.arrays = arrays
    };
    let queries = [0, 3, 24, 24, 24, 24];
    let mut check = |change: Box<dyn FnOnce(&mut ForwardInputs)>| {
        let mut inputs = padded(&[3], 2).0;
        change(&mut inputs);
        graph.replay(inputs, 3)
    };
    assert!(matches!(check(Box::new(staged(&[9; ROWS], &queries, ROWS))), Err(KernelError::Index { .. })));
    let longer = check(Box::new(staged(&[8; ROWS], &queries, ROWS + 1)));
    assert!(matches!(longer, Err(KernelError::Shape { .. })));
    let elsewhere = check(Box::new(staged(&[8; ROWS], &[0, 3, 20, 20, 20, 20], ROWS)));
    assert!(matches!(elsewhere, Err(KernelError::Shape { .. })));
    assert!(check(Box::new(staged(&[8; ROWS], &queries, ROWS))).is_ok());
    assert_eq!(check(Box::new(|_| ())), Ok(good), "the graph is as it was");
}

#[test]
fn what_goes_through_the_host_is_not_captured() {
    type Forward<'a> = &'a dyn Fn(&CudaBackend, &CudaTensor) -> Result<CudaTensor, KernelError>;
    let device = Standin::get().new_device(8);
    let model = Model::new(device, Precision::F32);
    let forwards: [(&str, Forward<'_>); 3] = [
        ("download", &|b, x| b.download(x).map(|_| x.clone())),
        ("upload", &|b, _| b.upload(vec![0.0; WIDTH], 1, WIDTH)),
        ("stage", &|b, x| {
            let mut builder = StageBuilder::new();
            builder.indices(&[1])?;
            b.stage(builder).map(|_| x.clone())
        }),
    ];
    for (op, forward) in forwards {
        let (inputs, _) = padded(&[3], 2);
        let refused = model.backend.capture(inputs, &mut |b, _, x| forward(b, x)).map(|_| ());
        assert_eq!(refused, Err(KernelError::NotCapturable { op }));
    }
    // What was not in the run before has no memory.
    let mut n_calls = 0;
    let (inputs, _) = padded(&[3], 2);
    let grown = model.backend.capture(inputs, &mut |b, _, x| {
        n_calls += 1;
        if n_calls > 1 { b.zeros(999, WIDTH) } else { Ok::<_, KernelError>(x.clone()) }
    });
    assert_eq!(grown.map(|_| ()), Err(KernelError::NotCapturable { op: "zeros" }));
    assert!(model.capture(&[5], 1).is_ok(), "the back end is as it was");
    drop(model);
    assert_eq!(Standin::get().left(device), Left::default());
}

#[test]
fn a_bias_that_a_batch_chooses_is_the_same_in_every_replay() {
    let device = Standin::get().new_device(9);
    let model = Model::new(device, Precision::F32);
    let tables = StoredBias::Tables { values: values(4, 2 * 2 * 9), dims: [2, 2, 3, 3] };
    let bias = model.backend.load_bias(tables).expect("a bias");
    let inputs = |tables: &[u32]| {
        let mut arrays = StageBuilder::new();
        let seqs = arrays.self_sequences(&[0, 3, 6]).expect("sequences");
        let table_of = arrays.indices(tables).expect("tables");
        (ForwardInputs { arrays, features: values(3, 6 * WIDTH), dims: (6, WIDTH) }, seqs, table_of)
    };
    let (captured, seqs, table_of) = inputs(&[1, 0]);
    let shape = AttentionShape { n_heads: 2, n_kv_heads: 2, head_dim: WIDTH / 2, scale: 0.2, softcap: None };
    let graph = model.backend.capture(captured, &mut |backend, step, x| {
        let qkv = backend.linear(x, &model.qkv, Activation::None, None)?;
        let bias = ScoreBias::Chosen(&bias, table_of);
        backend.fused_attention(step, &qkv, shape, Varlen { seqs, mask: Mask::Full, bias })
    });
    let mut graph = graph.map_err(|error: KernelError| error).expect("a graph");
    assert!(graph.replay(inputs(&[1, 0]).0, 6).is_ok());
    let other = graph.replay(inputs(&[0, 1]).0, 6);
    assert!(matches!(other, Err(KernelError::Shape { .. })), "{other:?}");
}

#[test]
fn a_constant_keeps_no_memory_that_the_capture_needs() {
    let device = Standin::get().new_device(14);
    let model = Model::new(device, Precision::F32);
    let (inputs, batch) = padded(&[3], 2);
    let graph = model.backend.capture(inputs, &mut |backend, step, x| {
        // As small as the offsets of the bias, and given back before those are there.
        drop(backend.zeros(1, SEQS)?);
        model.forward(backend, step, (x, batch))
    });
    assert!(graph.map_err(|error: KernelError| error).is_ok());
}

#[test]
fn a_capture_that_fails_leaves_nothing_and_the_back_end_goes_on() {
    let entries = [
        "cuStreamCreate",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
        "cuMemAlloc_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemsetD8Async",
        "cuLaunchKernel",
    ];
    for entry in entries {
        let mut n_failed = 0;
        // Early in the first run, late in it, and in the capture.
        for nth in [1, 4, 11, 13, 20, 31] {
            let device = Standin::get().new_device(u64::from(nth));
            let model = Model::new(device, Precision::F32);
            let expected = model.eager(&[3, 9, 2], 4);
            Standin::get().fail(device, entry, nth, INVALID_VALUE);
            if let Err(error) = model.capture(&[5, 2], 1).map(|_| ()) {
                assert!(matches!(error, KernelError::Library { .. }), "{entry} {nth}: {error}");
                n_failed += 1;
                assert_eq!(model.eager(&[3, 9, 2], 4), expected, "{entry} {nth}");
                let mut graph = model.capture(&[5, 2], 1).expect("the second attempt");
                assert_eq!(graph.replay(padded(&[3, 9, 2], 4).0, 14), Ok(expected), "{entry} {nth}");
            }
            drop(model);
            assert_eq!(Standin::get().left(device), Left::default(), "{entry} {nth}");
        }
        assert!(n_failed > 0, "{entry} is never called");
    }
}

#[test]
fn a_replay_on_a_lost_device_says_so() {
    let device = Standin::get().new_device(12);
    let model = Model::new(device, Precision::F32);
    let mut graph = model.capture(&[5, 2], 1).expect("a graph");
    Standin::get().fail(device, "cuGraphLaunch", 1, ILLEGAL_ADDRESS);
    let lost = graph.replay(padded(&[3], 2).0, 3);
    assert!(matches!(lost, Err(KernelError::DeviceLost { .. })), "{lost:?}");
    drop((graph, model));
    assert_eq!(Standin::get().left(device), Left::default());
}

#[test]
fn another_thread_works_while_one_captures() {
    let device = Standin::get().new_device(13);
    let model = Model::new(device, Precision::Bf16);
    let expected = model.eager(&[3, 9, 2], 4);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| (0..6).map(|_| model.eager(&[3, 9, 2], 4)).collect::<Vec<_>>());
        for seed in 0..3 {
            let mut graph = model.capture(&[5, 2], seed).expect("a graph");
            assert_eq!(graph.replay(padded(&[3, 9, 2], 4).0, 14), Ok(expected.clone()));
        }
        let all = other.join().expect("the other thread");
        assert!(all.iter().all(|rows| *rows == expected));
    });
}
