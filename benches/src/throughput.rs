//! Our side of `benches/throughput.py`: encode time, and tokens per second of the engine at several batch sizes.
//!
//! No network and no store: one encoder and one engine in this process, as an encoder worker and a PD worker hold
//! them. Every sequence of a batch has an encoder output of its own, so nothing is shared that the rival could not
//! share. What is timed includes the projection of cross-attention keys and values, and prefill.
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use clap::Parser;
use serde_json::json;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};
use triptych_core::clock::SystemClock;
use triptych_core::item::from_f32;
use triptych_core::limits::Limits;
use triptych_core::prompt::{Prompt, TextOrTokens};
use triptych_core::sampling::SamplingParams;
use triptych_core::{
    ContentKey, DType, EncodedItem, EncoderOutput, Fingerprint, ItemForm, ItemOptions, Modality, TenantId,
};
use triptych_engine::{
    Arrival, Engine, EngineConfig, Event, KvBudget, Output, PrefixCache, Readiness, SequenceId,
};
use triptych_kernels::cpu::{CpuBackend, CpuConfig, Precision};
use triptych_models::compute::{Compute, ComputeConfig};
use triptych_models::preprocess::EncoderInput;
use triptych_models::{LoadFormat, Model, ModelSource};

/// The allocator of the product.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures one model directory and prints one line of JSON.
#[derive(Debug, Parser)]
struct Args {
    /// The model directory.
    model: PathBuf,
    /// The item that the encoder reads: a file, or for a text model the number of token ids.
    #[arg(long)]
    item: String,
    /// Batch sizes.
    #[arg(long, value_delimiter = ',', default_value = "1,8,32")]
    batches: Vec<usize>,
    /// Tokens that each sequence writes.
    #[arg(long, default_value_t = 64)]
    new_tokens: u32,
    /// Compute threads; 0: as many as the machine has cores.
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Of weights and KV: f32, bf16 or int8.
    #[arg(long, default_value = "f32", value_parser = precision)]
    precision: Precision,
    /// Runs of each, of which the best counts.
    #[arg(long, default_value_t = 3)]
    repeats: usize,
}

fn main() -> Result<()> {
    let args = Args::parse();
    ensure!(args.repeats > 0, "--repeats is 0, at least one run is needed");
    let source = ModelSource { dir: args.model.clone(), name: None, format: LoadFormat::Safetensors };
    let model = Model::open(&source)?;
    let config =
        ComputeConfig { threads: args.threads, precision: args.precision, ..ComputeConfig::default() };
    let compute = Compute::new(config)?;
    let modality = *model.modalities().first().context("a model without an encoder")?;
    let mut encoder = compute.load_encoder(&model, modality)?;
    // A worker that holds both stages is ready with both.
    drop(compute.load_decoder(&model)?);
    let ready_ms = since_start().map(|time| time.as_secs_f64() * 1e3);
    let input = input(&model, modality, &args.item)?;
    // The first touches memory; no peer's first one counts either.
    encoder.encode(&[&input])?;
    let (encode, rows) = best(args.repeats, || Ok(encoder.encode(&[&input])?))?;
    let rows = rows.into_iter().next().context("an encoder that gives no rows")?;
    let hidden = encoder.hidden();
    drop(encoder);
    let mut decode = Vec::new();
    for &batch in &args.batches {
        let mut bench = Bench::new(&model, &compute, batch)?;
        let outputs =
            (0..batch).map(|i| output(&input, modality, &rows, hidden, i)).collect::<Result<Vec<_>>>()?;
        let (time, n_tokens) = best(args.repeats, || bench.run(&model, &outputs, args.new_tokens))?;
        decode.push(json!({"batch": batch, "tokens_per_s": n_tokens as f64 / time.as_secs_f64()}));
    }
    let encode_ms = encode.as_secs_f64() * 1e3;
    let peak_mb = peak_mb();
    let backend = CpuConfig { threads: args.threads, precision: args.precision, ..CpuConfig::default() };
    let roofs = CpuBackend::new(backend)?.roofs();
    println!(
        "{}",
        json!({
            "encode_ms": encode_ms, "decode": decode, "ready_ms": ready_ms, "peak_mb": peak_mb,
            "multiply_adds_per_s": roofs.multiply_adds_per_s, "bytes_per_s": roofs.bytes_per_s,
        })
    );
    Ok(())
}

/// Time since whoever started this process says that it did, as seconds since the epoch in `STARTED_AT`.
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
    let all = [Precision::F32, Precision::Bf16, Precision::Int8];
    let found = all.into_iter().find(|p| p.as_str() == text);
    found.ok_or_else(|| format!("there are {}", all.map(Precision::as_str).join(", ")))
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
    let (bytes, form) = if modality == Modality::Text {
        let n: u32 = item.parse().context("--item is a number of token ids for a text model")?;
        // Small ids exist in every vocabulary; the first few are special.
        ((0..n).flat_map(|i| (10 + i % 80).to_le_bytes()).collect(), ItemForm::TokenIds)
    } else {
        (std::fs::read(item).with_context(|| format!("reading {item}"))?, ItemForm::Plain)
    };
    let options = ItemOptions { form, ..ItemOptions::default() };
    Ok(model.preprocess().preprocess(modality, &bytes, &options, &Limits::default())?)
}

/// The same rows under a key of their own.
fn output(
    input: &EncoderInput,
    modality: Modality,
    rows: &[f32],
    hidden: usize,
    i: usize,
) -> Result<EncoderOutput> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&(i as u64).to_le_bytes());
    let item = EncodedItem {
        key: ContentKey::from_bytes(key),
        fingerprint: Fingerprint::from_bytes([0; 32]),
        modality,
        n_tokens: input.n_tokens,
        hidden: u32::try_from(hidden)?,
        dtype: DType::F32,
        extent: input.extent.clone(),
        checksum: [0; 32],
    };
    Ok(EncoderOutput::seal(item, from_f32(rows, DType::F32))?)
}

/// An engine with room for one batch size.
struct Bench {
    engine: Engine,
    clock: SystemClock,
    next_id: u64,
}

impl Bench {
    fn new(model: &Model, compute: &Compute, batch: usize) -> Result<Self> {
        let decoder = compute.load_decoder(model)?;
        let kv = KvBudget::Bytes { self_attention: 1 << 30, cross_attention: 4 << 30, host: 0 };
        let (token_budget, max_waiting) = (2048.max(batch), batch);
        let config = EngineConfig {
            kv,
            token_budget,
            max_sequences: batch,
            max_waiting,
            // Every request is computed whole, as the other side does.
            prefix_cache: PrefixCache::Off,
            ..EngineConfig::default()
        };
        let engine = Engine::new(decoder, model.tokenizer().clone(), config)?;
        Ok(Self { engine, clock: SystemClock, next_id: 0 })
    }

    /// Answers to all items at once; returns the number of tokens written.
    fn run(&mut self, model: &Model, items: &[EncoderOutput], new_tokens: u32) -> Result<usize> {
        let now = Instant::now();
        for output in items {
            let prompt = Prompt::Singleton(TextOrTokens::Tokens(Vec::new()));
            let items = vec![output.item().clone()];
            let prepared =
                model.prompts().prepare(&prompt, &items)?.into_iter().next().context("a sequence")?;
            let sampling = SamplingParams {
                temperature: 0.0,
                max_tokens: Some(new_tokens),
                ignore_eos: true,
                ..SamplingParams::default()
            };
            let id = SequenceId(self.next_id);
            self.next_id += 1;
            let arrival = Arrival {
                ids: vec![id],
                prepared,
                items,
                sampling,
                constraint: None,
                priority: 0,
                tenant: TenantId::SHARED,
                deadline: now + Duration::from_secs(3600),
                resumed: None,
            };
            let outputs = self.engine.handle(Event::Arrive(Box::new(arrival)), now);
            ensure!(outputs.is_empty(), "the engine refused: {outputs:?}");
            let ready = Event::ItemReady { key: output.item().key, output: output.clone() };
            self.engine.handle(ready, now);
        }
        let mut n_tokens = 0;
        while self.engine.readiness() == Readiness::Now {
            for output in self.engine.step(&self.clock) {
                match output {
                    Output::Delta(_, delta) => n_tokens += delta.token_ids.len(),
                    Output::Failed(_, failure) => anyhow::bail!("a sequence failed: {failure}"),
                    _ => {}
                }
            }
        }
        ensure!(self.engine.is_idle(), "the engine stopped before the end");
        Ok(n_tokens)
    }
}
