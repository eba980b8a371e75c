//! Products and attention through the back end's ops, as a device runs them: many launches, one wait at the end.
//!
//! A case is written `linear:ROWSxINxOUT`, `logits:ROWSxINxOUT`, `attention:` or `causal:SEQSxTOKENSxHEADSxKV_HEADSxWIDTH`, or
//! `decode:` with the same numbers: one query for each sequence, over as many keys in pages. `benches/device/torch_side.py`
//! reads the same words.
#![forbid(unsafe_code)]

mod values;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde_json::json;
use std::time::{Duration, Instant};
use triptych_core::DType;
use triptych_core::shape::KV_BLOCK_TOKENS;
use triptych_kernels::ops::{
    Activation, AttentionShape, Backend, ForwardInputs, KernelError, KvLayer, KvLayout, KvSlots, LinearPart,
    Mask, PagedBatch, PagedSequences, Qkv, ScoreBias, Sequences, StageBuilder, Varlen, WeightView,
};
use triptych_kernels::{CpuBackend, CpuConfig, CudaBackend, CudaConfig, Precision};
use triptych_models::compute::Device;
use values::values;

/// The allocator of the product.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Times ops in bf16 and prints one line of JSON.
#[derive(Debug, Parser)]
struct Args {
    /// Cases, as `linear:1500x1280x5120`.
    #[arg(required = true)]
    cases: Vec<String>,
    /// Device that computes: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cuda", value_parser = Device::named)]
    device: Device,
    /// Milliseconds of each of three measurements, of which the best counts.
    #[arg(long, default_value_t = 30)]
    ms: u64,
}

/// Measurements of a case.
const RUNS: usize = 3;
/// Launches of a measurement, at most.
const MOST_LAUNCHES: usize = 4096;
/// Launches of a graph.
const GRAPH_LAUNCHES: usize = 16;

fn main() -> Result<()> {
    let args = Args::parse();
    let precision = Precision::Bf16;
    match args.device {
        Device::Cuda(device) => print(&CudaBackend::new(CudaConfig { device, precision })?, &args),
        Device::Cpu => print(&CpuBackend::new(CpuConfig { precision, ..CpuConfig::default() })?, &args),
        other => bail!("{other}: there are cpu and cuda"),
    }
}

fn print<B: Backend>(backend: &B, args: &Args) -> Result<()> {
    let mut ops = Vec::new();
    for case in &args.cases {
        let operands = Operands::new(backend, case).with_context(|| case.clone())?;
        let bench = OpBench { backend, operands, last: backend.zeros(1, 8)? };
        let mut note = |mode: &str, time: Duration| {
            ops.push(json!({"op": case, "mode": mode, "ms": time.as_secs_f64() * 1e3}));
        };
        note("eager", bench.eager(args.ms)?);
        // Not every op can be captured.
        match bench.graphs(args.ms) {
            Ok(time) => note("graphs", time),
            Err(error) => eprintln!("{case} has no graph: {error}"),
        }
        println!("{}", json!({"ops": ops}));
    }
    Ok(())
}

/// An op with its operands on a back end.
struct OpBench<'a, B: Backend> {
    backend: &'a B,
    operands: Operands<B>,
    /// A row whose download waits for all work before it.
    last: B::Tensor,
}

enum Operands<B: Backend> {
    Linear { x: B::Tensor, weights: B::Linear },
    Attention { of: Attended, mask: Mask, qkv: [B::Tensor; 3] },
    Decode { of: Attended, q: B::Tensor, cache: B::KvCache },
}

/// Sequences of one length, and their heads.
#[derive(Clone, Copy)]
struct Attended {
    n_seqs: usize,
    n_tokens: usize,
    shape: AttentionShape,
}

/// Handles of the arrays of an op.
#[derive(Clone, Copy)]
enum Handles {
    None,
    Whole(Sequences),
    Paged(PagedSequences),
}

impl<B: Backend> Operands<B> {
    fn new(backend: &B, case: &str) -> Result<Self> {
        let (kind, sizes) = case.split_once(':').context("no case")?;
        let sizes: Vec<usize> = sizes.split('x').map(str::parse).collect::<Result<_, _>>()?;
        match (kind, &sizes[..]) {
            ("linear" | "logits", &[n_rows, n_in, n_out]) => {
                let data: Vec<u8> = values(n_in * n_out).into_iter().flat_map(bf16).collect();
                let view = WeightView { dtype: DType::Bf16, shape: &[n_out, n_in], data: &data };
                let part = [LinearPart::new(view, None)];
                let is_last = kind == "logits";
                let load = if is_last { backend.load_logits(&part) } else { backend.load_linear(&part) };
                Ok(Self::Linear { x: rows(backend, n_rows, n_in)?, weights: load? })
            }
            ("attention" | "causal" | "decode", &[n_seqs, n_tokens, n_heads, n_kv_heads, head_dim]) => {
                let scale = 1.0 / (head_dim as f32).sqrt();
                let shape = AttentionShape { n_heads, n_kv_heads, head_dim, scale, softcap: None };
                let of = Attended { n_seqs, n_tokens, shape };
                match kind {
                    "causal" => Self::attention(backend, of, Mask::Causal),
                    "attention" => Self::attention(backend, of, Mask::Full),
                    _ => Self::decode(backend, of),
                }
            }
            _ => bail!("no case"),
        }
    }

    fn attention(backend: &B, of: Attended, mask: Mask) -> Result<Self> {
        let ([q, kv], n) = (of.shape.widths(), of.n_seqs * of.n_tokens);
        let qkv = [rows(backend, n, q)?, rows(backend, n, kv)?, rows(backend, n, kv)?];
        Ok(Self::Attention { of, mask, qkv })
    }

    fn decode(backend: &B, of: Attended) -> Result<Self> {
        let AttentionShape { n_kv_heads, head_dim, .. } = of.shape;
        let n_blocks = of.n_seqs * of.n_blocks();
        let mut cache = backend.kv_cache(KvLayout { n_layers: 1, n_blocks, n_kv_heads, head_dim })?;
        let ([q, kv], n_slots) = (of.shape.widths(), n_blocks * KV_BLOCK_TOKENS);
        let mut builder = StageBuilder::new();
        let slots = builder.indices(&(0..n_slots as u32).collect::<Vec<_>>())?;
        let step = backend.stage(builder)?;
        let kv = rows(backend, n_slots, kv)?;
        backend.write_kv(&step, KvSlots { cache: &mut cache, layer: 0, slots }, [&kv, &kv])?;
        Ok(Self::Decode { of, q: rows(backend, of.n_seqs, q)?, cache })
    }

    /// The arrays that the op indexes with.
    fn stage(&self) -> Result<(StageBuilder, Handles), KernelError> {
        let mut builder = StageBuilder::new();
        let handles = match self {
            Self::Linear { .. } => Handles::None,
            Self::Attention { of, .. } => {
                Handles::Whole(builder.self_sequences(&offsets(of.n_seqs, of.n_tokens))?)
            }
            Self::Decode { of, .. } => Handles::Paged(builder.paged(PagedBatch {
                query_start_loc: &offsets(of.n_seqs, 1),
                table_start_loc: &offsets(of.n_seqs, of.n_blocks()),
                block_tables: &(0..(of.n_seqs * of.n_blocks()) as u32).collect::<Vec<_>>(),
                seq_lens: &vec![of.n_tokens as u32; of.n_seqs],
            })?),
        };
        Ok((builder, handles))
    }

    /// Submits the op once.
    fn submit(&self, on: &B, step: &B::Step, handles: Handles) -> Result<B::Tensor, KernelError> {
        let bias = ScoreBias::None;
        match (self, handles) {
            (Self::Linear { x, weights }, _) => on.linear(x, weights, Activation::None, None),
            (Self::Attention { of, mask, qkv: [q, k, v] }, Handles::Whole(seqs)) => {
                on.attention(step, Qkv { q, k, v }, of.shape, Varlen { seqs, mask: *mask, bias })
            }
            (Self::Decode { of, q, cache }, Handles::Paged(seqs)) => {
                let kv = KvLayer { cache, layer: 0, seqs, mask: Mask::Causal, bias };
                on.paged_attention(step, q, kv, of.shape)
            }
            _ => Err(KernelError::NotCapturable { op: "bench" }),
        }
    }
}

impl Attended {
    fn n_blocks(self) -> usize {
        self.n_tokens.div_ceil(KV_BLOCK_TOKENS)
    }
}

impl<B: Backend> OpBench<'_, B> {
    /// Time of a launch among many.
    fn eager(&self, ms: u64) -> Result<Duration> {
        let (builder, handles) = self.operands.stage()?;
        let step = self.backend.stage(builder)?;
        best(ms, |n| {
            for _ in 0..n {
                self.operands.submit(self.backend, &step, handles)?;
            }
            self.backend.download(&self.last)?;
            Ok(())
        })
    }

    /// The same in a graph of several.
    fn graphs(&self, ms: u64) -> Result<Duration> {
        let inputs = || -> Result<(ForwardInputs, Handles), KernelError> {
            let (arrays, handles) = self.operands.stage()?;
            Ok((ForwardInputs { arrays, features: vec![0.0; 8], dims: (1, 8) }, handles))
        };
        let (first, handles) = inputs()?;
        let mut graph = self.backend.capture(first, &mut |on, step, _| -> Result<_, KernelError> {
            let mut result = self.operands.submit(on, step, handles)?;
            for _ in 1..GRAPH_LAUNCHES {
                result = self.operands.submit(on, step, handles)?;
            }
            Ok(result)
        })?;
        best(ms, |n| {
            for _ in 0..n.div_ceil(GRAPH_LAUNCHES) {
                graph.replay(inputs()?.0, 1)?;
            }
            Ok(())
        })
    }
}

/// Time of a launch, the best of several measurements of about `ms` milliseconds. `run` submits so many, or up to a graph more,
/// and waits for them.
fn best(ms: u64, mut run: impl FnMut(usize) -> Result<()>) -> Result<Duration> {
    let mut timed = |n: usize| -> Result<Duration> {
        let start = Instant::now();
        run(n)?;
        Ok(start.elapsed())
    };
    // The first loads kernels and takes memory.
    timed(1)?;
    let one = timed(GRAPH_LAUNCHES)?.div_f64(GRAPH_LAUNCHES as f64).max(Duration::from_nanos(100));
    let wanted = (Duration::from_millis(ms).as_secs_f64() / one.as_secs_f64()) as usize;
    let n = (wanted.clamp(1, MOST_LAUNCHES)).next_multiple_of(GRAPH_LAUNCHES);
    let mut shortest = Duration::MAX;
    for _ in 0..RUNS {
        shortest = shortest.min(timed(n)?);
    }
    ensure!(shortest < Duration::MAX, "nothing was timed");
    Ok(shortest.div_f64(n as f64))
}

/// Offsets of sequences of one length.
fn offsets(n_seqs: usize, len: usize) -> Vec<u32> {
    (0..=n_seqs).map(|i| (i * len) as u32).collect()
}

fn rows<B: Backend>(backend: &B, n_rows: usize, width: usize) -> Result<B::Tensor> {
    Ok(backend.upload(values(n_rows * width), n_rows, width)?)
}

/// A value cut to bf16.
fn bf16(value: f32) -> [u8; 2] {
    ((value.to_bits() >> 16) as u16).to_le_bytes()
}
