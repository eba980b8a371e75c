//! The models that a worker serves, by name, which change while it runs.

use crate::accepted::AcceptedEncoders;
use crate::adapters::{ServedAdapter, ServedAdapters};
use crate::driver::Driver;
use crate::grammar::GrammarCompiler;
use crate::meters::PdMeters;
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use triptych_core::prompt::ChatFormat;
use triptych_models::ModelSource;
use triptych_models::lora::EncoderModules;
use triptych_models::prompt::PromptBuilder;
use triptych_models::tokenization::Tokenizer;
use triptych_runtime::model_table::ModelTable;

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
    /// The encoders whose outputs it takes.
    pub encoders: AcceptedEncoders,
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

/// Models by served name.
pub type ServedModels = ModelTable<ServedDecoder>;

/// A model by its name or that of one of its adapters.
pub fn find(models: &ServedModels, name: &str) -> Option<(Arc<ServedDecoder>, Option<ServedAdapter>)> {
    if let Some(model) = models.get(name) {
        return Some((model, None));
    }
    let (model, adapter) = models.find_map(|model| model.adapters.get(name))?;
    Some((model, Some(adapter)))
}
