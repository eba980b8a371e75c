//! LoRA adapters as PEFT saves them: a directory with `adapter_config.json` and the pairs of matrices of some linear layers.
//!
//! An adapter names the modules of transformers that it targets. Those are the names that a family's tensors have in its
//! checkpoints, so that a layer that was packed of several stored ones finds the pairs of each. Format after
//! <https://github.com/huggingface/peft/blob/v0.17.0/src/peft/tuners/lora/config.py> and `utils/save_and_load.py` beside it.
//! An adapter is split by the layers of the encoder, which are known from headers alone. It knows
//! no family; what no layer of either stage takes is refused by name.

mod adapter;
mod config;
mod loaded;
mod pairs;
mod settings;
mod stages;

pub use adapter::LoraAdapter;
pub(crate) use loaded::{Adapters, no_adapter};
pub use settings::{LoraSettings, LoraSource, check_adapter_name, refused_by_request};
pub use stages::{EncoderModules, StageAdapters, adapted_fingerprint};
