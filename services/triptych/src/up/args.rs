//! Flags of `triptych up`.

use super::encoders::EncoderWorkers;
use crate::args::api::ApiArgs;
use crate::args::bounds::BoundArgs;
use crate::args::drain::DrainArgs;
use crate::args::encoder_weights::EncoderWeightsArgs;
use crate::args::engine::EngineArgs;
use crate::args::limits::LimitArgs;
use crate::args::lora::LoraArgs;
use crate::args::memory::MemoryArgs;
use crate::args::model_updates::ModelUpdateArgs;
use crate::args::operator::OperatorArgs;
use crate::args::watchdog::WatchdogArgs;
use crate::args::{EcArgs, FetchArgs, LogArgs, ModelArgs};
use crate::config::ConfigArgs;
use clap::Args;
use clap::builder::FalseyValueParser;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::net::SocketAddr;

/// Flags of `up`.
#[derive(Args, Debug)]
pub struct UpArgs {
    /// Address of the OpenAI API, /health, /readyz and /metrics
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_HTTP", default_value = "127.0.0.1:8080")]
    pub http: String,
    /// Address of the gRPC API
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_GRPC", default_value = "127.0.0.1:50051")]
    pub grpc: String,
    /// Address of the proxy's admin API. Default: a free port of the loopback address, which its log says
    #[arg(long, value_name = "ADDR", env = "TRIPTYCH_ADMIN")]
    pub admin: Option<SocketAddr>,
    /// Encoder workers; 0 only with --with-encoder, and for models without an encoder, which need none. Of a model whose images
    /// are read by several towers also a number for each tower, as in low:1,high:1: its workers hold that tower alone
    #[arg(long, value_name = "N|TOWERS", default_value_t = EncoderWorkers::Alike(1))]
    pub encoders: EncoderWorkers,
    /// MiB of memory that each encoder worker divides, as its --memory-mib. 0: each part takes what it takes
    #[arg(long, value_name = "MIB", env = "TRIPTYCH_ENCODER_MEMORY_MIB", default_value_t = 0)]
    pub encoder_memory_mib: u32,
    /// Prefill/decode workers
    #[arg(long, value_name = "M", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub pds: u16,
    /// PD workers hold the encoders too: they help out when no encoder worker can
    #[arg(long, env = "TRIPTYCH_WITH_ENCODER", value_parser = FalseyValueParser::new())]
    pub with_encoder: bool,
    /// APIs
    #[command(flatten)]
    pub api: ApiArgs,
    /// The store
    #[command(flatten)]
    pub ec: EcArgs,
    /// Encoder weights of PD workers
    #[command(flatten)]
    pub weights: EncoderWeightsArgs,
    /// Models and computation; without a model: the sample models in this binary
    #[command(flatten)]
    pub models: ModelArgs,
    /// Adapters
    #[command(flatten)]
    pub lora: LoraArgs,
    /// Items by URL
    #[command(flatten)]
    pub fetch: FetchArgs,
    /// Changes of models
    #[command(flatten)]
    pub updates: ModelUpdateArgs,
    /// Memory of PD workers
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Engines of PD workers
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Limits of the workers
    #[command(flatten)]
    pub watchdog: WatchdogArgs,
    /// Limits of a request
    #[command(flatten)]
    pub limits: LimitArgs,
    /// Stop of the processes
    #[command(flatten)]
    pub drain: DrainArgs,
    /// Bounds of the proxy
    #[command(flatten)]
    pub bounds: BoundArgs,
    /// Admin API and accounting
    #[command(flatten)]
    pub operator: OperatorArgs,
    /// Logs
    #[command(flatten)]
    pub log: LogArgs,
    /// Config file, also of the processes that are started
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Flags that neither the command line nor the environment nor the file gives: the file's sections of the roles hold for
    /// them
    #[arg(skip)]
    pub unset: BTreeSet<String>,
}

impl UpArgs {
    /// Flags for a child, without those whose values here are defaults: the child has the same, or what the config file says in
    /// the section of its role.
    pub fn given<const N: usize>(&self, groups: [Vec<OsString>; N]) -> Vec<OsString> {
        let mut is_given = true;
        let mut given = groups.concat();
        given.retain(|word| {
            if let Some(flag) = word.to_str().and_then(|word| word.strip_prefix("--")) {
                is_given = !self.unset.contains(flag);
            }
            is_given
        });
        given
    }
}
