//! What every process of the cluster shares: telemetry, metrics, servers and channels with the right
//! settings, drain, and the one table that turns a failure into a status.
//!
//! It knows the wire and no model: nothing here computes.
#![forbid(unsafe_code)]

pub mod admin;
pub mod drain;
pub mod grpc;
pub mod metrics;
pub mod serve;
pub mod status;
pub mod telemetry;
pub mod tls;
pub mod trace_context;

pub use drain::Drain;
pub use metrics::MetricsRegistry;
