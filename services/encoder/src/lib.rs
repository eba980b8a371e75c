//! The encoder worker: item bytes in, a READY encoder output in the EC store out.
//!
//! A job passes three stages, each with its own bound:
//!
//! ```text
//! Encode ──▶ admission ──▶ preprocess (CPU pool) ──▶ batcher (one thread a model) ──▶ publish (EC connector)
//! ```
//!
//! Jobs that wait for a thread, or for a forward, go in one order ([`order`]): by request, the least work left first.
//!
//! Concurrent jobs for one key share one encode; a job whose output is cached skips it. The cost of jobs is
//! learned, and reported to watchers of the worker's load. Where its memory is stated, preprocessed items and forwards wait for room
//! in bytes, and what would never fit is refused.
//!
//! It loads encoder weights only, knows no decoder and no prompt, and never keeps an item's bytes past
//! preprocessing. Jobs are idempotent by content key: the same job twice publishes the same object.
#![forbid(unsafe_code)]

mod service;
mod job;
mod served;
mod towers;
mod adapters;
mod adapter_updates;
mod fences;

mod thread_turns;
mod pool;
mod weights;
mod slot;
mod batcher;
mod bound;
mod room;
mod memory;

pub mod load;
pub mod cost;
pub mod order;
mod meters;

mod error;
mod loader;
mod updates;
mod model_updates;
mod worker;
mod upkeep;
mod warm;

pub use batcher::{BatchLimits, n_in_batch};
pub use error::EncoderError;
pub use memory::{EncoderMemory, MemorySettings};
pub use pool::ItemHook;
pub use towers::TowerChoice;
pub use triptych_models::lora::LoraSettings;
pub use weights::{LazyRules, WeightsPolicy};
pub use worker::{EmbeddedConfig, EncoderConfig, embedded, run};
