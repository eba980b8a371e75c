//! The repository's chores: `cargo xtask test`, and what one runs by name.
//!
//! Depends on nothing of the workspace, so that it builds in seconds and cannot be broken by what it checks.
#![forbid(unsafe_code)]

mod clients;
mod cuda;
mod cuda_check;
mod drills;
mod fuzz;
mod gate;
mod lanes;
mod needs;
mod peers;
mod rustc;
mod servers;
mod shell;
mod static_binary;
mod suites;
mod test;
mod tools;
mod vllm;
mod wheel;
mod whisper;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// The repository's chores.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Everything that CI holds a change to, or one suite, with the servers that it needs
    Test(test::TestArgs),
    /// Install the servers and tools that tests need, and nothing else
    Servers,
    /// Write the Rust of the schema, after a change of a .proto file
    Proto,
    /// Build the static binary that tests run on an empty root
    Static,
    /// Make a Hugging Face directory of the real Whisper tiny.en (75 MB) under .cache
    Whisper,
    /// Build the CUDA kernels that the crate embeds, after a change of one. Fetches the compiler (300 MB)
    Cuda,
    /// Check the CUDA back end on a GPU and time it beside torch, or pack what that takes for a machine that has one
    CudaCheck(cuda_check::CudaCheckArgs),
    /// Simulate the cluster from seeds: partitions, crashes and slow links, on virtual time
    Sim(drills::SimArgs),
    /// Break a real cluster while it works: processes killed and stopped, Redis restarted, the network partitioned. Needs root
    Chaos(drills::ChaosArgs),
    /// Fuzz every place that reads bytes from outside. Needs a C++ compiler
    Fuzz(fuzz::FuzzArgs),
    /// Run the real clients of the API against a cluster: openai, LangChain, LiteLLM, grpcio. Fetches them
    Clients(clients::ClientsArgs),
    /// Time ours beside other engines. Fetches gigabytes
    Peers(peers::PeersArgs),
    /// Test the Python package and its vLLM connector against a real vLLM. Fetches gigabytes
    Vllm(vllm::VllmArgs),
}

fn main() -> Result<()> {
    rustc::become_if_called()?;
    match Cli::parse().command {
        Command::Test(args) => test::run(&args),
        Command::Servers => servers::ensure().and_then(|()| tools::ensure()),
        Command::Proto => shell::run(&mut shell::cargo(&["run", "-q", "-p", "triptych-proto-codegen"])),
        Command::Static => static_binary::run_build(),
        Command::Whisper => whisper::run(),
        Command::Cuda => cuda::run(),
        Command::CudaCheck(args) => cuda_check::run(&args),
        Command::Sim(args) => drills::sim(&args),
        Command::Chaos(args) => drills::chaos(&args),
        Command::Fuzz(args) => fuzz::fuzz(&args),
        Command::Clients(args) => clients::clients(&args),
        Command::Peers(args) => peers::peers(&args),
        Command::Vllm(args) => vllm::vllm(&args),
    }
}
