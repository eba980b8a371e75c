//! Encoder forwards of one, two, four and eight items: what items gain and lose by sharing one.
//!
//! All cases run in turn, round after round, and the best time of each counts: another process then slows down a round,
//! not a case. Weights are random, which times do not depend on. Results: `benches/results/batching.md`.
#![forbid(unsafe_code)]

mod items;
mod values;

use anyhow::{Context, Result, ensure};
use clap::Parser;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use triptych_kernels::Precision;
use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::encoder::Encoder;
use triptych_models::preprocess::EncoderInput;
use triptych_models::spec::{EncoderSpec, StemSpec};
use triptych_models::{LoadFormat, Model, ModelSource};

/// The allocator of the product.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Prints a table for one model directory.
#[derive(Debug, Parser)]
struct Args {
    /// The model directory; its weights are not read.
    model: PathBuf,
    /// Sizes of items: sides of square images in pixels, or tokens of texts; audio windows have one size.
    #[arg(long, value_delimiter = ',', default_value = "112,224,336")]
    sizes: Vec<usize>,
    /// Items of a forward.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8")]
    batches: Vec<usize>,
    /// Rounds.
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Compute threads; 0: as many as the machine has cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Precision of the weights.
    #[arg(long, default_value = "f32", value_parser = precision)]
    precision: Precision,
}

fn precision(name: &str) -> Result<Precision, String> {
    let all = [Precision::F32, Precision::Bf16, Precision::Int8, Precision::Int4];
    all.into_iter().find(|p| p.as_str() == name).ok_or_else(|| format!("{name:?} is no precision"))
}

/// Forwards of `n` items of one size.
struct BatchCase {
    size: usize,
    n: usize,
    input: EncoderInput,
    best: Duration,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.rounds > 0 && !args.batches.contains(&0), "rounds and batches begin at 1");
    let source = ModelSource {
        dir: args.model.clone(),
        name: None,
        format: LoadFormat::Dummy { seed: 1 },
        packed: None,
    };
    let model = Model::open(&source)?;
    let config =
        ComputeConfig { threads: args.threads, precision: args.precision, ..ComputeConfig::default() };
    let modality = *model.modalities().first().context("a model without an encoder")?;
    let mut encoder = Compute::new(config)?.load_encoder(&model, modality)?;
    let mut cases = cases(&args, model.spec().encoder.as_ref().context("a model without an encoder")?)?;
    for _ in 0..args.rounds {
        for case in &mut cases {
            case.best = case.best.min(forward(encoder.as_mut(), case)?);
        }
    }
    print(&cases);
    Ok(())
}

fn cases(args: &Args, spec: &EncoderSpec) -> Result<Vec<BatchCase>> {
    let sizes = if matches!(spec.stem, StemSpec::Mel { .. }) { &args.sizes[..1] } else { &args.sizes };
    let mut cases = Vec::new();
    for &size in sizes {
        let input = items::random(spec, size)?;
        cases.extend(args.batches.iter().map(|&n| BatchCase {
            size,
            n,
            input: input.clone(),
            best: Duration::MAX,
        }));
    }
    Ok(cases)
}

fn forward(encoder: &mut dyn Encoder, case: &BatchCase) -> Result<Duration> {
    let batch = vec![&case.input; case.n];
    let start = Instant::now();
    encoder.encode(&batch)?;
    Ok(start.elapsed())
}

/// The mean time to an item's output while `n` wait: as one forward all wait for its end, one after the other the
/// first is done after one forward, the last after `n`.
fn print(cases: &[BatchCase]) {
    println!("| size | tokens | batch | forward ms | items/s | beside batch 1 | mean wait ms | one by one |");
    println!("|---|---|---|---|---|---|---|---|");
    for case in cases {
        let BatchCase { size, n, input, best } = case;
        let alone = cases.iter().find(|other| other.size == *size && other.n == 1).unwrap_or(case);
        let [ms, one] = [best, &alone.best].map(|time| time.as_secs_f64() * 1000.0);
        println!(
            "| {size} | {} | {n} | {ms:.2} | {:.1} | {:.2} | {ms:.2} | {:.2} |",
            input.n_tokens,
            *n as f64 / ms * 1000.0,
            one * *n as f64 / ms,
            one * (n + 1) as f64 / 2.0,
        );
    }
}
