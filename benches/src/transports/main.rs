//! Every transport of encoder outputs in one run, beside plain `memcpy` and raw TCP: put and get, each alone.
//!
//! One client, one object at a time, servers on the same machine: what is measured is the way of the bytes, not how
//! many clients fit. Each object has a key of its own and is removed after its get. The objects are real ones, made
//! before the clock starts; verifying the rows is the reader's part and not measured.
#![forbid(unsafe_code)]

mod open;
mod raw;
mod report;

use anyhow::{Result, ensure};
use clap::Parser;
use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use open::OpenTransport;
use report::TransportRow;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use triptych_ec::conformance::{fresh_key, sample_output};
use triptych_ec::object::encode;

/// As in the product: what is read is put into memory of this allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Lengths of the objects' rows.
const SIZES: [usize; 4] = [64 * KIB, 2 * MIB, 20 * MIB, 64 * MIB];
/// Of each size so many objects as have this many bytes, within [`ROUNDS`].
const BYTES_A_SIZE: usize = 512 * MIB;
const ROUNDS: (usize, usize) = (10, 200);
/// Not counted: connections are made, memory is touched.
const WARM_UP: usize = 2;

/// Measures the transports, prints a table and, with --out, stores it as Markdown and JSON.
#[derive(Debug, Parser)]
struct Args {
    /// Folder for `transports.md` and `transports.json`.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Only the transports whose name has one of these in it.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Small objects, three of each: does it run at all?
    #[arg(long)]
    smoke: bool,
    /// A folder on the disk to measure; default: one for temporary files.
    #[arg(long)]
    disk: Option<PathBuf>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let sizes: &[usize] = if args.smoke { &SIZES[..2] } else { &SIZES };
    let wanted = |name: &str| args.only.is_empty() || args.only.iter().any(|o| name.contains(o.as_str()));
    let names: Vec<_> = open::NAMES.into_iter().filter(|name| wanted(name)).collect();
    ensure!(!names.is_empty(), "--only names none of {:?}", open::NAMES);
    let total: usize = sizes.iter().map(|size| rounds(*size, args.smoke) * names.len()).sum();
    let bar = ProgressBar::new(total as u64);
    bar.set_style(ProgressStyle::with_template("{msg:24} {bar:40} {pos}/{len} objects, {eta} left")?);
    let mut rows = Vec::new();
    for name in names {
        // One at a time: no idle server takes the processor from the one that is measured.
        let mut place = OpenTransport::open(name, &runtime, args.disk.as_deref())?;
        for size in sizes {
            bar.set_message(format!("{name}, {}", report::shown(*size)));
            rows.push(measure(&mut place, *size, rounds(*size, args.smoke), &bar)?);
        }
    }
    bar.finish_and_clear();
    report::give(&rows, args.out.as_deref())
}

fn rounds(size: usize, smoke: bool) -> usize {
    let (fewest, most) = ROUNDS;
    if smoke { 3 } else { (BYTES_A_SIZE / size).clamp(fewest, most) }
}

fn measure(place: &mut OpenTransport<'_>, size: usize, n: usize, bar: &ProgressBar) -> Result<TransportRow> {
    let mut puts = Histogram::<u64>::new(3)?;
    let mut gets = Histogram::<u64>::new(3)?;
    for round in 0..n + WARM_UP {
        let key = fresh_key();
        let object = encode(&sample_output(key, size));
        let start = Instant::now();
        place.put(&key, &object)?;
        let put = start.elapsed();
        let start = Instant::now();
        let read = place.get(&key)?;
        let get = start.elapsed();
        ensure!(read == object, "{}: other bytes came back", place.name());
        place.remove(&key, read)?;
        if round >= WARM_UP {
            puts.record(nanos(put))?;
            gets.record(nanos(get))?;
            bar.inc(1);
        }
    }
    Ok(TransportRow {
        name: place.name(),
        size,
        n,
        put: report::Times::of(&puts),
        get: report::Times::of(&gets),
    })
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1)
}
