//! Our side of `benches/throughput.py` and `benches/peers/run.py`: encode time, tokens per second of the engine at
//! several batch sizes, and what preprocessing takes.
//!
//! No network and no store: one encoder and one engine in this process, as an encoder worker and a PD worker hold
//! them. Every sequence of a batch has an encoder output of its own, so nothing is shared that the rival could not
//! share. What a rate counts is said in [`generation`].
#![forbid(unsafe_code)]

mod items;
mod values;
#[path = "throughput/generation.rs"]
mod generation;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use generation::{Begin, Generation, Item, Mode};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use triptych_core::limits::Limits;
use triptych_core::{ItemOptions, Modality};
use triptych_kernels::{CpuBackend, CpuConfig, Isa, Precision};
use triptych_models::compute::{Compute, ComputeConfig, Device};
use triptych_models::encoder::{Encoder, EncoderGraphConfig};
use triptych_models::preprocess::EncoderInput;
use triptych_models::{LoadFormat, Model, ModelSource, PackedFolder};

/// The allocator of the product.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures one model directory and prints one line of JSON, on a device one after each measurement.
#[derive(Debug, Parser)]
struct Args {
    /// The model directory.
    model: PathBuf,
    /// The item that the encoder reads: a file; or a size, the number of token ids for a text model, the side of a square
    /// image in pixels, of random values.
    #[arg(long)]
    item: String,
    /// Batch sizes.
    #[arg(long, value_delimiter = ',', default_value = "1,8,32")]
    batches: Vec<usize>,
    /// Beams of a search that is timed too, for one sequence; 1: none.
    #[arg(long, default_value_t = 1)]
    beams: u32,
    /// Tokens of text behind the item, where a model's prompt holds the item's rows.
    #[arg(long, default_value_t = 0)]
    text_tokens: u32,
    /// A file of the model's kind: times its way from bytes to what the encoder reads, too.
    #[arg(long)]
    preprocess: Option<PathBuf>,
    /// Tokens that each sequence writes.
    #[arg(long, default_value_t = 64)]
    new_tokens: u32,
    /// Temperature of the draw of each token; 0: the most probable one, as peers are measured.
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Compute threads; 0: as many as the machine has cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Of weights and KV: f32, bf16, int8 or int4.
    #[arg(long, default_value = "f32", value_parser = precision)]
    precision: Precision,
    /// Runs of each, of which the best counts.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
    /// Instruction set to force, as `avx2`; the fastest of the machine if nothing is said.
    #[arg(long, value_parser = Isa::named)]
    isa: Option<Isa>,
    /// Device that computes: cpu, cuda or cuda:N.
    #[arg(long, default_value = "cpu", value_parser = Device::named)]
    device: Device,
    /// Weights: stored in safetensors, or random of the configured shapes (dummy).
    #[arg(long, default_value = "safetensors", value_parser = load_format)]
    load_format: LoadFormat,
    /// Items of a forward of the encoder, each timed.
    #[arg(long, value_delimiter = ',')]
    encode_batches: Vec<usize>,
    /// Ways of submitting work to a device, each timed; what the device, or the engine, has no such way for is left out.
    #[arg(long, value_delimiter = ',', default_value = "eager")]
    modes: Vec<Mode>,
    /// Time decoding from the first token of every sequence on, for models that cross-attend too.
    #[arg(long)]
    from_first_token: bool,
    /// A folder for packed weights, as the product has one: from the second start on they are read from it.
    #[arg(long)]
    packed: Option<PathBuf>,
}

/// Preprocessing is short: so many times the runs of the rest.
const PREPROCESS_RUNS: usize = 4;

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.repeats > 0, "--repeats is 0, at least one run is needed");
    let packed = args.packed.clone().map(|dir| PackedFolder { dir, min_bytes: 0, max_bytes: u64::MAX });
    let source = ModelSource { dir: args.model.clone(), name: None, format: args.load_format, packed };
    let model = Model::open(&source)?;
    let mut result = measure(&args, &model)?;
    if let Some(path) = &args.preprocess {
        result["preprocess_ms"] = preprocess_ms(&model, path, args.repeats)?.into();
    }
    let Args { threads, precision, isa, device, .. } = args;
    if device != Device::Cpu {
        println!("{result}");
        return Ok(());
    }
    let backend = CpuConfig { threads, precision, isa, ..CpuConfig::default() };
    let peak = CpuBackend::new(backend)?.peak();
    result["multiply_adds_per_s"] = peak.multiply_adds_per_s.into();
    result["bytes_per_s"] = peak.bytes_per_s.into();
    println!("{result}");
    Ok(())
}

/// Measures the costs of the model: start, encode, prefill, decode, memory.
fn measure(args: &Args, model: &Model) -> Result<Value> {
    let &Args { threads, precision, isa, device, .. } = args;
    let config = ComputeConfig { device, threads, precision, isa, ..ComputeConfig::default() };
    let compute = Compute::new(config)?;
    let modality = *model.modalities().first().context("a model without an encoder")?;
    let mut encoder = compute.load_encoder(model, modality)?;
    // A worker that holds both stages is ready with both.
    let decoder = compute.load_decoder(model)?;
    let ready_ms = since_start().map(|time| time.as_secs_f64() * 1e3);
    let input = input(model, modality, &args.item)?;
    // The first touches memory; no peer's first one counts either.
    encoder.encode(&[&input])?;
    let (encode, rows) = best(args.repeats, || Ok(encoder.encode(&[&input])?))?;
    let rows = rows.into_iter().next().context("an encoder that gives no rows")?;
    let encodes = encodes(args, encoder.as_mut(), &input)?;
    print_so_far(args, json!({"encode": encodes}));
    let item = Item { input, modality, rows, hidden: encoder.hidden() };
    drop(encoder);
    let generation = Generation {
        model,
        compute: &compute,
        decoder: RefCell::new(Some(decoder)),
        text_tokens: args.text_tokens,
        new_tokens: args.new_tokens,
        temperature: args.temperature,
        repeats: args.repeats,
        from: if args.from_first_token { Begin::FirstToken } else { Begin::Arrival },
        modes: args.modes.clone(),
        after_each: &|decode| print_so_far(args, json!({"encode": encodes, "decode": decode})),
    };
    let mut result = generation.measure(&item, &args.batches, args.beams)?;
    result["encode_ms"] = (encode.as_secs_f64() * 1e3).into();
    result["encode"] = json!(encodes);
    result["item_tokens"] = item.input.n_tokens.into();
    result["ready_ms"] = json!(ready_ms);
    result["peak_mb"] = json!(peak_mb());
    Ok(result)
}

/// On a device a line for what was measured so far: a run that is cut off is none in vain. The last line has all.
fn print_so_far(args: &Args, result: Value) {
    if args.device != Device::Cpu {
        println!("{result}");
    }
}

/// Forwards of several items, from features in host memory to rows in host memory: `[{"batch", "mode", "ms"}, …]`.
fn encodes(args: &Args, encoder: &mut dyn Encoder, input: &EncoderInput) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for &mode in &args.modes {
        if mode == Mode::Graphs {
            encoder.use_graphs(&EncoderGraphConfig::default());
        }
        for &n_items in &args.encode_batches {
            let batch = vec![input; n_items];
            let replays_before = encoder.graph_stats().replays;
            encoder.encode(&batch)?;
            let (time, _) = best(args.repeats, || Ok(encoder.encode(&batch)?))?;
            if mode == Mode::Eager || encoder.graph_stats().replays > replays_before {
                all.push(json!({"batch": n_items, "mode": mode.as_str(), "ms": time.as_secs_f64() * 1e3}));
            }
        }
    }
    Ok(all)
}

/// From a file's bytes, in memory already, to what the encoder reads.
fn preprocess_ms(model: &Model, path: &Path, repeats: usize) -> Result<f64> {
    let modality = *model.modalities().first().context("a model without an encoder")?;
    let bytes = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
    let (options, limits) = (ItemOptions::default(), Limits::default());
    let run = || Ok(model.preprocess().preprocess(modality, &bytes, &options, &limits)?);
    run()?;
    let (took, _) = best(repeats * PREPROCESS_RUNS, run)?;
    Ok(took.as_secs_f64() * 1e3)
}

/// Time since the start that the parent process sets, as seconds since the epoch in `STARTED_AT`.
fn since_start() -> Option<Duration> {
    let started: f64 = std::env::var("STARTED_AT").ok()?.parse().ok()?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    now.checked_sub(Duration::try_from_secs_f64(started).ok()?)
}

/// The most memory this process held, as its peers tell it, in MiB; `None` where there is no `/proc`.
fn peak_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? / 1024)
}

fn precision(text: &str) -> Result<Precision, String> {
    let all = [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4];
    let found = all.into_iter().find(|p| p.as_str() == text);
    found.ok_or_else(|| format!("there are {}", all.map(Precision::as_str).join(", ")))
}

fn load_format(text: &str) -> Result<LoadFormat, String> {
    match text {
        "safetensors" => Ok(LoadFormat::Safetensors),
        "dummy" => Ok(LoadFormat::Dummy { seed: 1 }),
        _ => Err("there are safetensors and dummy".to_owned()),
    }
}

/// The shortest of several runs, and what the last one gave.
fn best<T>(repeats: usize, mut run: impl FnMut() -> Result<T>) -> Result<(Duration, T)> {
    let mut shortest = Duration::MAX;
    let mut last = None;
    for _ in 0..repeats {
        let start = Instant::now();
        last = Some(run()?);
        shortest = shortest.min(start.elapsed());
    }
    Ok((shortest, last.context("no run")?))
}

fn input(model: &Model, modality: Modality, item: &str) -> Result<EncoderInput> {
    if let Ok(size) = item.parse() {
        return items::random(model.spec().encoder.as_ref().context("a model without an encoder")?, size);
    }
    let bytes = std::fs::read(item).with_context(|| format!("reading {item}"))?;
    Ok(model.preprocess().preprocess(modality, &bytes, &ItemOptions::default(), &Limits::default())?)
}
