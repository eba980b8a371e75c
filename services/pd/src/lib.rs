//! The prefill/decode worker: hashes and a prompt in, a stream of tokens out.
//!
//! ```text
//! Generate ──▶ answer (one task a request) ──▶ driver (one thread a model: the engine)
//!                   │                              ▲
//!                   └──▶ loads (EC connector) ─────┘  encoder outputs, beside compute
//! ```
//!
//! It loads decoder weights only and never sees an item's bytes: encoder outputs come from the EC store by
//! key. A request is one engine sequence for each answer, or for each window of a long sound.
#![forbid(unsafe_code)]

mod answer;
mod assemble;
mod driver;
mod loads;
mod meters;
mod resume;
mod service;
mod speech;
mod warm;
pub mod watching;
mod worker;

pub use worker::{EngineSettings, MakeBeside, MakingBeside, PdConfig, PdError, run};
