//! Models as specs over shared layers.
//!
//! A model here is data: its encoder, its decoder, the names of its tensors, its processor and its prompt layout. It
//! knows no network, no scheduler and no block tables: the engine hands it a view of them. Read in this order:
//!
//! - [`model`]: a Hugging Face directory, opened; the stages take the following four parts from it:
//! - [`preprocess`]: item bytes to encoder input (encoder worker, CPU pool);
//! - [`encoder`]: encoder input to rows (encoder worker);
//! - [`prompt`]: a prompt and item metadata to decoder sequences (PD worker);
//! - [`decoder`]: token rows to logits over paged KV (PD worker);
//! - [`sampling`]: choices by logits, as a decoder is asked for them;
//! - [`speech`]: what is particular to speech, of all these stages.
// One function of `weights` maps files and is the exception.
#![deny(unsafe_code)]

pub mod model;
pub mod error;
mod files;
pub mod quantization;
mod checkpoint;
pub mod source;
mod packed;
pub mod spec;
pub mod weights;
pub mod layers;
pub mod lora;
pub mod family;
pub mod preprocess;
pub mod encoder;
pub mod decoder;
pub mod compute;
pub mod prompt;
pub mod rules;
pub mod sampling;
pub mod speech;
pub mod tokenization;

pub use error::{ItemError, ModelError, PromptError};
pub use model::Model;
pub use source::{LoadFormat, ModelSource, PackedFolder};
