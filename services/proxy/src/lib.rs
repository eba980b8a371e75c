//! The proxy: requests come in over OpenAI's HTTP interface and over gRPC, their items go to encoder workers, and the
//! requests go on to prefill/decode (PD) workers with hashes and metadata only.
//!
//! It computes nothing and knows no model: the workers describe the models that they serve, and their encoders. Item
//! bytes leave this process in one direction only, to encoder workers. Read in this order:
#![forbid(unsafe_code)]

pub mod config;
mod request;

mod admission;
pub mod auth;
mod fleet;
pub mod request_machine;
mod wire;

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
pub use request_machine::policy::EncodePolicy;
pub use request_machine::retry_budget::RetryPolicy;
pub use serve::run;
