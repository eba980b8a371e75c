//! The proxy alone: its overhead between a client and workers that compute nothing.
//!
//! A real `triptych proxy` and `triptych store`, and in this process a null encoder and a null PD worker that answer at
//! once. Each request is sent through the proxy, and the same work straight to the workers, in turn: the difference is
//! what the proxy adds (reading, hashing, probing, leasing, routing, streaming). Every image is new, so nothing is cached.
//!
//! `cargo run --release -p triptych-benches --bin proxy` after `cargo build --release`; writes Markdown to standard output.
#![forbid(unsafe_code)]

mod load;
mod workers;

use anyhow::{Context, Result, bail};
use clap::Parser;
use load::{Client, Measured};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use triptych_ec::testing::free_port;

/// Measures the proxy between null workers.
#[derive(Debug, Parser)]
struct Args {
    /// The binary whose proxy is measured
    #[arg(long, default_value = "target/release/triptych")]
    binary: PathBuf,
    /// Requests of each kind, one at a time, for latencies
    #[arg(long, default_value_t = 400)]
    requests: usize,
    /// Requests of each kind, many at a time, for rates
    #[arg(long, default_value_t = 2000)]
    burst: usize,
    /// Concurrent requests of a burst
    #[arg(long, default_value_t = 32)]
    at_once: usize,
}

/// Kinds of requests: name and number of images of 1 MiB.
const KINDS: [(&str, usize); 3] = [("text", 0), ("1 image of 1 MiB", 1), ("4 images of 1 MiB", 4)];
/// Limit for the start of the processes.
const START: Duration = Duration::from_secs(30);

/// A process that ends with this one.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // An error means that it is gone already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(binary: &PathBuf, args: &[String]) -> Result<Running> {
    let child = Command::new(binary).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let child = child.with_context(|| format!("cannot start {}; build it first", binary.display()))?;
    Ok(Running(child))
}

#[tokio::main]
async fn main() -> Result<()> {
    let args = Args::parse();
    let encoder = workers::encoder().await?;
    let pd = workers::pd().await?;
    let [store, grpc, http] = std::array::from_fn(|_| format!("127.0.0.1:{}", free_port()));
    let words = |text: String| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let _store = start(&args.binary, &words(format!("store --grpc {store}")))?;
    let flags =
        format!("proxy --grpc {grpc} --http {http} --ec grpc://{store} --encoder {encoder} --pd {pd}");
    let _proxy = start(&args.binary, &words(flags))?;
    let client = Client::connect(&grpc, &encoder, &pd).await?;
    wait_for_answers(&client).await?;
    println!(
        "| request | straight p50 / p99 ms | through the proxy p50 / p99 ms | added p50 / p99 ms | requests/s, {} at once |",
        args.at_once
    );
    println!("|---|---|---|---|---|");
    for (name, n_images) in KINDS {
        // In turn, so that whatever else the machine does meets both.
        let mut straight = Measured::new()?;
        let mut through = Measured::new()?;
        for i in 0..args.requests {
            straight.time(client.straight(n_images, i)).await?;
            through.time(client.through(n_images, i)).await?;
        }
        let rate = client.burst(n_images, args.burst / (1 + n_images), args.at_once).await?;
        let added = |share: f64| through.ms(share) - straight.ms(share);
        println!(
            "| {name} | {:.2} / {:.2} | {:.2} / {:.2} | {:.2} / {:.2} | {rate:.0} |",
            straight.ms(0.5),
            straight.ms(0.99),
            through.ms(0.5),
            through.ms(0.99),
            added(0.5),
            added(0.99),
        );
    }
    Ok(())
}

/// The proxy has found its workers when it answers.
async fn wait_for_answers(client: &Client) -> Result<()> {
    let started = Instant::now();
    while let Err(e) = client.through(1, usize::MAX).await {
        if started.elapsed() > START {
            bail!("the proxy does not answer: {e}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
