//! Settings of a PD worker. Validated where the configuration is read; here they are plain data.

use crate::driver::SequenceHook;
use crate::engine_settings::EngineSettings;
use crate::grammar::TrialProgram;
use crate::memory_needs::ColocatedEncoders;
use futures::future::BoxFuture;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;
use triptych_core::limits::Limits;
use triptych_core::prompt::ToolSyntax;
use triptych_core::{RowTypes, WorkerId};
use triptych_ec::connector::WorkerRole;
use triptych_ec::object::MacKeys;
use triptych_ec::store::EcStore;
use triptych_models::ModelSource;
use triptych_models::compute::{ComputeConfig, Precision};
use triptych_models::lora::LoraSettings;
use triptych_runtime::compute_arbiter::ComputeArbiter;
use triptych_runtime::core_share::CoreShare;
use triptych_runtime::grpc::Dialer;
use triptych_runtime::listener::Listener;
use triptych_runtime::serve::ColocatedServices;
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;

/// Settings of a PD worker.
pub struct PdConfig {
    /// Name in logs and Describe.
    pub worker_id: WorkerId,
    /// Listener for gRPC.
    pub grpc: Listener,
    /// Listener for `/metrics` and the probes; `None`: none.
    pub admin: Option<TcpListener>,
    /// Models to serve.
    pub models: Vec<ModelSource>,
    /// Directory below which operators may name models to load; `None`: models are those of the start.
    pub model_updates: Option<PathBuf>,
    /// Draft models, each under the name of the model it drafts for.
    pub drafts: Vec<ModelSource>,
    /// LoRA adapters, and limits on them.
    pub lora: LoraSettings,
    /// Syntax of calls of tools; `None`: what each model's chat template tells.
    pub tool_syntax: Option<ToolSyntax>,
    /// Store of encoder outputs.
    pub store: Arc<dyn EcStore>,
    /// Dialer to the encoder workers that hold outputs in memory.
    pub dialer: Dialer,
    /// Compute settings.
    pub compute: ComputeConfig,
    /// Element type in which encoders publish rows; part of the fingerprint both sides must share.
    pub encoder_dtype: RowTypes,
    /// Precision in which encoders compute; part of the fingerprint too.
    pub encoder_precision: Precision,
    /// Keys that verify outputs.
    pub mac_keys: MacKeys,
    /// Limits on requests.
    pub limits: Limits,
    /// Bytes of encoder outputs in memory: those of requests, and those kept for later ones. A request waits for room.
    pub ec_cache_bytes: usize,
    /// Sizes of each model's engine.
    pub engine: EngineSettings,
    /// Bytes of memory to divide among weights, activations, caches and encoder outputs; `None`: sizes are those set.
    pub memory_bytes: Option<usize>,
    /// Program that tries out a request's grammar before it is compiled here.
    pub grammar_trial: TrialProgram,
    /// Encoders in the process, as far as its memory depends on them.
    pub encoder_memory: ColocatedEncoders,
    /// Services colocated with this one, such as encoders; `None`: none.
    pub colocated: Option<MakeColocated>,
    /// Compute arbiter between engines and colocated encoders; `None`: no encoders.
    pub arbiter: Option<ComputeArbiter>,
    /// Share of the host's cores; `None`: all of them.
    pub cores: Option<CoreShare>,
    /// Requests that are being started, for this process's successor.
    pub journal: StartJournal,
    /// Watches steps, and work on blocking threads.
    pub watchdog: Watchdog,
    /// Called on an engine's thread with each sequence that starts. `None` outside tests, which plant faults with it.
    pub fault: Option<SequenceHook>,
}

/// Makes the colocated services over the connector whose rows they share, with so many bytes for activations of encoders; `None`:
/// they take what they take.
pub type MakeColocated = Box<dyn FnOnce(WorkerRole, Option<usize>) -> ColocatedFuture + Send>;
/// Result of [`MakeColocated`].
pub type ColocatedFuture =
    BoxFuture<'static, Result<ColocatedServices, Box<dyn std::error::Error + Send + Sync>>>;
