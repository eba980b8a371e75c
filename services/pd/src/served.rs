//! The models that a worker serves, by name, which change while it runs.

use crate::accepted::AcceptedEncoders;
use crate::adapters::{ServedAdapter, ServedAdapters};
use crate::driver::Driver;
use crate::grammar::GrammarCompiler;
use crate::meters::PdMeters;
use parking_lot::RwLock;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::SystemTime;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use triptych_core::prompt::ChatFormat;
use triptych_core::{Failure, FailureClass};
use triptych_models::ModelSource;
use triptych_models::lora::EncoderModules;
use triptych_models::prompt::PromptBuilder;
use triptych_models::tokenization::Tokenizer;

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
#[derive(Default)]
pub struct ServedModels(RwLock<Names>);

#[derive(Default)]
struct Names {
    served: BTreeMap<String, Arc<ServedDecoder>>,
    /// Names of models that were served before: a request for one may be served elsewhere.
    before: BTreeSet<String>,
}

impl ServedModels {
    /// A model by its own name.
    pub fn get(&self, name: &str) -> Option<Arc<ServedDecoder>> {
        self.0.read().served.get(name).cloned()
    }

    /// All of them, in the order of their names.
    pub fn all(&self) -> Vec<(String, Arc<ServedDecoder>)> {
        self.0.read().served.iter().map(|(name, model)| (name.clone(), Arc::clone(model))).collect()
    }

    /// A model by its name or that of one of its adapters.
    pub fn find(&self, name: &str) -> Option<(Arc<ServedDecoder>, Option<ServedAdapter>)> {
        if let Some(model) = self.get(name) {
            return Some((model, None));
        }
        let models = self.0.read();
        let of_adapter =
            |model: &Arc<ServedDecoder>| Some((Arc::clone(model), Some(model.adapters.get(name)?)));
        models.served.values().find_map(of_adapter)
    }

    /// Serves a model.
    pub fn insert(&self, name: String, model: ServedDecoder) {
        let mut names = self.0.write();
        names.before.remove(&name);
        names.served.insert(name, Arc::new(model));
    }

    /// Takes a model from requests to come.
    pub fn remove(&self, name: &str) -> Option<Arc<ServedDecoder>> {
        let mut names = self.0.write();
        let removed = names.served.remove(name)?;
        names.before.insert(name.to_owned());
        Some(removed)
    }

    /// The failure of a request for a name that is not served. One that was is to be tried elsewhere.
    pub fn missing(&self, name: &str) -> Failure {
        if self.0.read().before.contains(name) {
            return Failure::unavailable(format!("model {name:?} was unloaded from this worker"));
        }
        let message = format!("model {name:?} is not served by this worker");
        Failure::new(FailureClass::NotFound, message).with_param("model")
    }
}
