//! `triptych bench`: the flags of the load generator, which is [`triptych_bench`].

mod load;
mod report;
mod suite;

use crate::error::CliError;
use clap::{Args, Subcommand};
use load::RunArgs;
use report::ReportArgs;
use suite::SuiteArgs;

/// Flags of `bench`.
#[derive(Args, Debug)]
pub struct BenchArgs {
    /// Command
    #[command(subcommand)]
    pub command: BenchCommand,
}

/// Commands of `bench`.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Offer load to a server that runs already, and find its goodput
    #[command(after_help = RUN_HELP)]
    Run(Box<RunArgs>),
    /// Make a page of stored results: tables and charts in one HTML file, or tables as Markdown
    #[command(after_help = REPORT_HELP)]
    Report(ReportArgs),
    /// Start clusters with the same cores and compare them: disaggregated against colocated workers, over the workloads of
    /// the claim or any others. Results are kept, and a suite that was interrupted goes on
    #[command(visible_alias = "compare", after_help = SUITE_HELP)]
    Suite(Box<SuiteArgs>),
}

const RUN_HELP: &str = "\
Workloads, with their keys and usual values:
  text         text=1024 output=128                         no items
  random-mm    input=1024 output=128 range=0 items=1 items-range=0 limit-images=255 limit-audio=1
               buckets=256x256x1@0.5+720x1280x1@0.5         as vLLM's bench; HEIGHTxWIDTHx1@WEIGHT
  epd-short    text=400 output=150 images=1-4 size=640x640  as vLLM's blog on encoder disaggregation
  epd-long     text=2000, else the same
  mixed        with=0.5: the share of requests that have images
  reuse        pool=100 zipf=1 images=1: images of a pool, by a Zipf law
  audio        seconds=8 cv=0.7 max=30 text=0 output=64     clips; without text they are transcribed
  multi-turn   turns=2-6 images=1 more=0.3 think=10s        earlier texts and images are sent again
  servegen     clients=50 skew=1.2 cv=1.8 images=1.59       clients with their own rates and bursts
  azure        file= size=640x640 image-tokens=0            Azure's multimodal trace, CSV as published
  bailian      file= size= image-tokens=0                   Alibaba's traces, JSON lines; size gives images
  mooncake     file=                                        Kimi's traces, JSON lines
  trace:FILE   CSV: timestamp,text_tokens,output_tokens,items; items as `640x480 2.5s 640x480#7`
All but traces take share=0.9 (so many items were sent before) or pool= and zipf=; lengths vary by
range=.

A rate passes if 99 % of all offered requests meet the SLO, the 99th percentile of each latency is
within its limit, 97 % as many are served as are offered, and neither concurrency nor TTFT rises.
Goodput is the highest rate that passes with all lower ones passing; a rate is what was offered
while it was judged. Refused, failed, short and unanswered requests count as offered. Nothing is
retried.

Examples:
  triptych bench run --grpc 127.0.0.1:50051 --workload epd-short:images=2 --slo ttft=500ms,tpot=50ms
  triptych bench run --url http://127.0.0.1:8000 --model Qwen/Qwen2-VL-2B-Instruct
  triptych bench run --url http://127.0.0.1:8080 --rates 1,2,4 --requests 200 --seeds 1 \\
                 --json r.json --report r.html
  triptych bench run --url http://127.0.0.1:8080 --endpoint transcriptions \\
                 --workload audio:seconds=5

Exits with 0 when the sweep came to its end, whatever it found. Ctrl-C ends the window under way,
waits for its requests, writes what there is as a partial result, and exits with 1; a second one
ends at once.";

const REPORT_HELP: &str = "\
Examples:
  triptych bench report results/*.json --out report.html
  triptych bench report results --out report.md --title 'Goodput by topology'";

const SUITE_HELP: &str = "\
Examples:
  triptych bench suite --model benches/models/qwen2-vl-tiny --load-format dummy --quick
  triptych bench suite --model DIR --load-format dummy --out results --first-rate 4
  triptych bench compare --topology 1e1pd,dp2,colocated,colocated:budget=64 --model DIR \\
                 --workload epd-short:images=2 --slo ttft=400ms,tpot=20ms --out results
  triptych bench report results --out report.html

Workers get --cores, one share each; proxy, store and load generator get --side-cores, the same for
all. Each cluster has a store of its own. All clusters are up, one at a time is under load, and runs
are interleaved in blocks of minutes, so that a slow hour hits all alike; differences of clusters are
shown block by block, with an interval. If a worker dies, its measurement is void. Each block is kept
as it ends: the same command goes on behind the last one, whatever stopped it.";

/// Runs the command.
///
/// # Errors
/// [`CliError`] of the command.
pub async fn run(args: BenchArgs) -> Result<(), CliError> {
    match args.command {
        BenchCommand::Run(args) => load::run(*args).await,
        BenchCommand::Report(args) => report::run(&args),
        BenchCommand::Suite(args) => suite::run(*args).await,
    }
}
