//! The front door: requests come in over OpenAI's HTTP interface and over gRPC, their items go to encoder workers,
//! and the requests go on to prefill/decode (PD) workers with hashes and metadata only.
//!
//! It computes nothing and knows no model: what a model reads, and which encoder makes it, is what the workers
//! say of themselves. Item bytes leave this process in one direction only, to encoder workers. Read in this order:
#![forbid(unsafe_code)]

pub mod config;
mod request;

mod admission;
pub mod auth;
mod fleet;
mod wire;

pub mod machine;

mod budget;
mod cache;
mod encode;

pub mod fetch;
mod items;

mod observe;
mod orchestrate;

mod grpc;
mod openai;

mod embedded;
mod serve;

/// Decisions without clock, lock or network. The planner's simulator runs the same, on a clock of its own.
pub mod decisions {
    pub use crate::admission::{Admission, Permit, in_time};
    pub use crate::fleet::{prefix, reservation, score, size, view};
}

pub use config::{ClientTimes, ProxyConfig, ProxyError};
pub use embedded::{Embedded, EmbeddedConfig};
pub use machine::policy::EncodePolicy;
pub use machine::retry_budget::RetryPolicy;
pub use serve::run;
