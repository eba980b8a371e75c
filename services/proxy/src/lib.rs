//! The frontend: requests arrive over OpenAI's HTTP API and over gRPC, their items go to encoder workers, and the
//! requests go to prefill/decode (PD) workers with content keys and metadata only.
//!
//! It computes nothing and knows no model: workers announce the models they serve and the encoders they have. Item
//! bytes leave this process in one direction only, to encoder workers, and to workers of other engines that have to be given
//! them (`fleet::foreign`). Modules, in reading order:
#![forbid(unsafe_code)]

pub mod config;
mod request;
mod bounds;

mod admission;
pub mod auth;
mod fleet;
pub mod request_machine;
mod wire;
mod tool_calls;

mod budget;
mod cache;
mod encode;

pub mod fetch;
mod items;
mod rows;

mod observe;
mod request_log;
mod running;
mod accounting;
mod orchestrate;

mod grpc;
mod openai;
mod admin;

mod embedded;
mod serve;

/// Decisions without clock, lock or network. The planner's simulator runs the same, on a clock of its own.
pub mod decisions {
    pub use crate::admission::{Admission, Permit, in_time};
    pub use crate::fleet::{elastic, prefix, reservation, score, size, view};
}

pub use admin::token::{AdminToken, AdminTokenError};
pub use bounds::{ConnectionBounds, RequestBounds, SessionBounds};
pub use config::{ClientTimes, ProxyConfig, ProxyError};
pub use embedded::{Embedded, EmbeddedConfig};
pub use fleet::roles::{ElasticRole, NotRoles, Roles};
pub use openai::cors::{AllowedOrigin, NotAnOrigin};
pub use request_log::{NotARequestLog, RequestLog};
pub use request_machine::policy::EncodePolicy;
pub use request_machine::retry_budget::RetryPolicy;
pub use serve::run;
