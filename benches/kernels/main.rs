//! Kernels by back end: the oracle's plain loops, then each instruction set and precision of the CPU back end, over
//! the shapes of the models that the peers are compared with.
//!
//! ```text
//! cargo bench --package triptych-benches --bench kernels                    all
//! cargo bench --package triptych-benches --bench kernels -- 'linear/1500'   some
//! ```
//!
//! Throughput is in multiply-adds ("elem"), or in bytes of weights where memory is the limit. The first lines give
//! the machine's peaks, so that each number can be read as a share of one.
#![forbid(unsafe_code)]

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::black_box;
use std::time::Duration;
use triptych_core::DType;
use triptych_kernels::ops::{
    Activation, AttentionShape, Backend, DeltaRows, LinearPart, Mask, Qkv, ScoreBias, StageBuilder,
    StateLayout, StateSlots, Varlen, WeightView,
};
use triptych_kernels::reference::ReferenceBackend;
use triptych_kernels::{CpuBackend, CpuConfig, Isa, Precision};

/// Rows, inputs, outputs: encoder layers of Whisper-base, a layer and the logits of its decoder.
const LINEAR: [(usize, usize, usize); 6] = [
    (1500, 512, 2048),
    (1500, 2048, 512),
    (1500, 512, 512),
    (8, 512, 2048),
    (1, 512, 2048),
    (1, 512, 51_865),
];
/// Tokens, heads, width of a head: Whisper's encoder, an image of 640×640 in Qwen2-VL, a short text.
const ATTENTION: [(usize, usize, usize); 3] = [(1500, 8, 64), (2116, 16, 80), (128, 8, 64)];
/// Tokens, heads and width of keys and values of a layer with the gated delta rule: a prompt and a token of Qwen3.5-0.8B.
const DELTA: [(usize, usize, usize); 2] = [(512, 16, 128), (1, 16, 128)];
/// Multiply-adds that the oracle is asked for at most.
const ORACLE: usize = 1 << 24;
const PRECISIONS: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4];

fn values(seed: u32, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).max(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    (0..n).map(|_| next()).collect()
}

fn backends() -> Vec<(String, CpuBackend)> {
    let sets = Isa::available().flat_map(|isa| PRECISIONS.map(|precision| (isa, precision)));
    let made = sets.filter_map(|(isa, precision)| {
        let config = CpuConfig { isa: Some(isa), precision, ..CpuConfig::default() };
        let name = format!("{}-{}", isa.as_str(), precision.as_str());
        CpuBackend::new(config).ok().map(|backend| (name, backend))
    });
    made.collect()
}

/// Adds a function to a group. `make` makes its inputs once it runs: most functions are left out by a filter.
fn add<F: FnMut()>(group: &mut BenchmarkGroup<'_, WallTime>, name: &str, make: impl Fn() -> F) {
    let mut run = None;
    group.bench_function(BenchmarkId::from_parameter(name), |b| b.iter(run.get_or_insert_with(&make)));
}

fn peak(_: &mut Criterion) {
    for (name, backend) in backends() {
        let peak = backend.peak();
        println!(
            "peak {name}: {:.1} G multiply-adds/s, {:.1} GB/s",
            peak.multiply_adds_per_s / 1e9,
            peak.bytes_per_s / 1e9
        );
    }
}

fn linear_of<B: Backend>(backend: &B, (n, n_in, n_out): (usize, usize, usize)) -> impl FnMut() + use<B> {
    let bytes: Vec<u8> = values(1, n_in * n_out).into_iter().flat_map(f32::to_le_bytes).collect();
    let view = WeightView { dtype: DType::F32, shape: &[n_out, n_in], data: &bytes };
    let layer = backend.load_linear(&[LinearPart::new(view, None)]).expect("a layer");
    let x = backend.upload(values(2, n * n_in), n, n_in).expect("rows");
    let backend = backend.clone();
    move || drop(black_box(backend.linear(&x, &layer, Activation::None, None).expect("a product")))
}

fn linear(c: &mut Criterion) {
    for size in LINEAR {
        let (n, n_in, n_out) = size;
        let mut group = c.benchmark_group(format!("linear/{n}x{n_in}x{n_out}"));
        group.throughput(Throughput::Elements((n * n_in * n_out) as u64));
        if n * n_in * n_out <= ORACLE {
            add(&mut group, "oracle", || linear_of(&ReferenceBackend, size));
        }
        for (name, backend) in backends() {
            add(&mut group, &name, || linear_of(&backend, size));
        }
        group.finish();
    }
}

fn attention_of<B: Backend>(backend: &B, (n, heads, dim): (usize, usize, usize)) -> impl FnMut() + use<B> {
    let tensor = |seed| backend.upload(values(seed, n * heads * dim), n, heads * dim).expect("rows");
    let (q, k, v) = (tensor(1), tensor(2), tensor(3));
    let backend = backend.clone();
    let mut builder = StageBuilder::new();
    let seqs = builder.self_sequences(&[0, u32::try_from(n).expect("few tokens")]).expect("a sequence");
    let step = backend.stage(builder).expect("a step");
    move || {
        let shape =
            AttentionShape { n_heads: heads, n_kv_heads: heads, head_dim: dim, scale: 0.125, softcap: None };
        let seqs = Varlen { seqs, mask: Mask::Full, bias: ScoreBias::None };
        let qkv = Qkv { q: &q, k: &k, v: &v };
        drop(black_box(backend.attention(&step, qkv, shape, seqs).expect("attention")));
    }
}

fn attention(c: &mut Criterion) {
    for size in ATTENTION {
        let (n, heads, dim) = size;
        let mut group = c.benchmark_group(format!("attention/{n}x{heads}x{dim}"));
        group.throughput(Throughput::Elements((2 * n * n * heads * dim) as u64));
        if 2 * n * n * heads * dim <= ORACLE {
            add(&mut group, "oracle", || attention_of(&ReferenceBackend, size));
        }
        for (name, backend) in backends() {
            add(&mut group, &name, || attention_of(&backend, size));
        }
        group.finish();
    }
}

fn delta_of<B: Backend>(backend: &B, (n, n_heads, dim): (usize, usize, usize)) -> impl FnMut() + use<B> {
    let (n_layers, n_slots, conv_channels, conv_kernel) = (1, 1, 3 * n_heads * dim, 4);
    let layout =
        StateLayout { n_layers, n_slots, conv_channels, conv_kernel, n_heads, key_dim: dim, value_dim: dim };
    let mut cache = backend.state_cache(layout).expect("a cache");
    let bytes: Vec<u8> = values(1, n_heads).into_iter().flat_map(f32::to_le_bytes).collect();
    let of_heads = WeightView { dtype: DType::F32, shape: &[n_heads], data: &bytes };
    let decay = backend.load_decay(of_heads, of_heads).expect("decays");
    let tensor = |seed, width| backend.upload(values(seed, n * width), n, width).expect("rows");
    let (qkv, beta_decay) = (tensor(2, conv_channels), tensor(3, 2 * n_heads));
    let mut builder = StageBuilder::new();
    let starts = [0, u32::try_from(n).expect("few tokens")];
    let seqs = builder.recurrent(&starts, &[0]).expect("a sequence");
    let step = backend.stage(builder).expect("a step");
    let backend = backend.clone();
    move || {
        let rows = DeltaRows { qkv: &qkv, beta_decay: &beta_decay, n_key_heads: n_heads };
        let at = StateSlots { cache: &mut cache, layer: 0, seqs };
        drop(black_box(backend.gated_delta_rule(&step, at, rows, &decay).expect("rows")));
    }
}

fn delta(c: &mut Criterion) {
    for size in DELTA {
        let (n, n_heads, dim) = size;
        let mut group = c.benchmark_group(format!("delta/{n}x{n_heads}x{dim}"));
        // Two products with the state and its update.
        group.throughput(Throughput::Elements((3 * n * n_heads * dim * dim) as u64));
        if 3 * n * n_heads * dim * dim <= ORACLE {
            add(&mut group, "oracle", || delta_of(&ReferenceBackend, size));
        }
        for (name, backend) in backends() {
            // States are f32 in every precision.
            if backend.precision() == Precision::F32 {
                add(&mut group, &name, || delta_of(&backend, size));
            }
        }
        group.finish();
    }
}

fn quick() -> Criterion {
    let criterion = Criterion::default().sample_size(10);
    criterion
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .configure_from_args()
}

criterion_group! {name = kernels; config = quick(); targets = peak, linear, attention, delta}
criterion_main!(kernels);
