//! The prefill/decode worker: hashes and a prompt in, a stream of tokens out.
//!
//! ```text
//! Generate ──▶ generation (one task a request) ──▶ driver (one thread a model: the engine)
//!                   │                                  ▲
//!                   └──▶ loads (EC connector) ─────────┘  encoder outputs, beside compute
//! ```
//!
//! It loads decoder weights only and never sees an item's bytes: encoder outputs come from the EC store by key.
//! A request is one engine sequence for all its choices, or for each window of long audio.
#![forbid(unsafe_code)]

mod request;
mod generation;
mod assemble;
mod coalesce;
mod adapters;
mod accepted;
mod adapter_updates;
mod driver;
pub mod lending;
pub mod grammar;
mod loads;
mod request_rows;
mod meters;
mod resume;
mod blocking;
mod service;
mod tokens;
mod truncation;
mod speech;
mod state;
mod served;
mod error;
mod config;
mod loader;
mod updates;
mod model_updates;
mod warm;
pub mod watch;
mod engine_settings;
pub mod memory_plan;
mod memory_needs;
mod worker;

pub use config::{ColocatedFuture, MakeColocated, PdConfig};
pub use driver::SequenceHook;
pub use engine_settings::EngineSettings;
pub use error::PdError;
pub use memory_needs::ColocatedEncoders;
pub use triptych_models::lora::LoraSettings;
pub use worker::run;
