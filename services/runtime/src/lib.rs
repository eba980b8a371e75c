//! What every process of the cluster shares: telemetry, metrics, servers and channels with the right
//! settings, drain, and the one table that turns a failure into a status.
//!
//! It knows the wire and no model: nothing here computes.
#![forbid(unsafe_code)]

pub mod status;
pub mod deadline;
pub mod telemetry;
pub mod timeline;
pub mod trace_context;
pub mod metrics;
pub mod drain;
pub mod ending;
pub mod flights;
pub mod grpc;
pub mod discovery;
pub mod admin;
pub mod door;
pub mod serve;
pub mod turnstile;
pub mod reload;
pub mod tls;

pub use drain::Drain;
pub use metrics::MetricsRegistry;
