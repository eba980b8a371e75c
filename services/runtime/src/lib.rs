//! Runtime that every process of the cluster shares: telemetry, metrics, server and channel settings, drain, discovery,
//! and the table from failures to statuses.
//!
//! It knows the wire and no model: nothing here computes.
#![forbid(unsafe_code)]

pub mod status;
pub mod deadline;
pub mod telemetry;
pub mod timeline;
pub mod trace_context;
pub mod spans;
pub mod server_spans;
pub mod metrics;
pub mod drain;
pub mod watch_shutdown;
pub mod single_flight;
pub mod graph_meters;
pub mod grpc;
pub mod discovery;
pub mod admin;
pub mod listener;
pub mod serve;
pub mod compute_arbiter;
pub mod core_share;
pub mod reload;
pub mod model_table;
pub mod start_journal;
pub mod watchdog;
pub mod memory_budget;
pub mod worker_admin;
pub mod tls;

pub use drain::Drain;
pub use metrics::MetricsRegistry;
