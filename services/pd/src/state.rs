//! State that the requests of a PD worker share: its models, its connector, and the bounds on requests.

use crate::adapters::ServedAdapters;
use crate::driver::Driver;
use crate::grammar::GrammarCompiler;
use crate::loads::EcLoads;
use crate::meters::PdMeters;
use crate::model_updates::ModelUpdates;
use crate::served::ServedModels;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::{Mutex, Semaphore};
use tokio_util::sync::CancellationToken;
use triptych_core::limits::Limits;
use triptych_core::prompt::ChatFormat;
use triptych_core::{Fingerprint, Modality, WorkerId};
use triptych_ec::store::EcStore;
use triptych_models::ModelSource;
use triptych_models::lora::{EncoderModules, LoraSettings};
use triptych_models::prompt::PromptBuilder;
use triptych_models::tokenization::Tokenizer;
use triptych_runtime::Drain;
use triptych_runtime::serve::ColocatedLoad;
use triptych_runtime::start_journal::StartJournal;
use triptych_runtime::watchdog::Watchdog;

/// A model that this worker serves.
pub struct ServedDecoder {
    /// Its directory.
    pub source: ModelSource,
    /// Bytes of a divided memory that are its own.
    pub share: usize,
    /// Cancelled when its requests must end.
    pub abort: CancellationToken,
    /// Cancelled when its engine's thread has ended and its memory is free.
    pub ended: CancellationToken,
    /// Hugging Face's `model_type`.
    pub family: String,
    /// Prompt builder.
    pub prompts: Arc<dyn PromptBuilder>,
    /// Format of its conversations; `None`: it has no chat template.
    pub chat: Option<ChatFormat>,
    /// Tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Compiler of constraints.
    pub grammars: GrammarCompiler,
    /// Its adapters.
    pub adapters: ServedAdapters,
    /// Layers of its encoder that adapters may have a part for.
    pub encoder_modules: EncoderModules,
    /// Driver of the engine.
    pub driver: Driver,
    /// Metrics.
    pub meters: PdMeters,
    /// Fingerprints of the encoders whose outputs it takes.
    pub encoders: BTreeMap<Modality, Fingerprint>,
    /// True if its encoder reads text together with an item.
    pub encoder_takes_prompt: bool,
    /// Most tokens of the context.
    pub max_context: usize,
    /// Load time.
    pub created: SystemTime,
    /// Permits of sequences, running and waiting. The engine's queue holds as many, so that it never refuses one
    /// of a request's sequences after it took others.
    pub sequence_permits: Arc<Semaphore>,
    /// Number of sequence permits.
    pub max_live: usize,
}

/// State shared by the requests of the service.
pub struct PdWorkerState {
    /// Name of the worker.
    pub worker_id: WorkerId,
    /// True if the process has encoders too.
    pub encodes: bool,
    /// Load of the colocated encoders.
    pub colocated_load: Option<ColocatedLoad>,
    /// Models by served name.
    pub models: ServedModels,
    /// Loading of others.
    pub updates: ModelUpdates,
    /// Limits on adapters.
    pub lora: LoraSettings,
    /// Held while an adapter is loaded or unloaded.
    pub adapter_updates: Mutex<()>,
    /// EC connector.
    pub loads: EcLoads,
    /// Store, for the worker's description.
    pub store: Arc<dyn EcStore>,
    /// Limits on requests.
    pub limits: Limits,
    /// Permits of requests.
    pub request_permits: Arc<Semaphore>,
    /// Number of request permits.
    pub max_requests: usize,
    /// Metrics of requests for unknown models.
    pub unknown: PdMeters,
    /// Shutdown state and task group.
    pub drain: Drain,
    /// Requests that are being started, for this process's successor.
    pub journal: StartJournal,
    /// Watches work on blocking threads.
    pub watchdog: Watchdog,
}
