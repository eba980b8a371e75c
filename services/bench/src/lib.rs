//! The load generator: what is offered, how it is sent, what came back, and whether that was good enough.
//!
//! ```text
//! workload ──▶ offered ──▶ client (gRPC, or any OpenAI-compatible HTTP server) ──▶ outcome ──▶ judge ──▶ report
//! ```
//!
//! Open loop: a request is sent when its time has come, whether or not earlier ones were answered. It knows no model
//! and no worker; the planner's simulator takes the same [`offered`] requests and gives the same [`outcome`]s. Read in
//! this order:
//!
//! - [`offered`], [`outcome`]: one request, and what became of it;
//! - [`workload`], [`arrivals`]: what is offered and when, from a text and a seed;
//! - [`slo`], [`judge`]: what was promised, and whether a run kept it;
//! - [`topology`], [`suite`]: which workers are compared, on which cores, and under which workloads;
//! - [`report`]: the page that is made of results.
#![forbid(unsafe_code)]

pub mod offered;
pub mod outcome;
pub mod text;
pub mod seed;
pub mod arrivals;
pub mod workload;
pub mod slo;
pub mod judge;
pub mod search;
pub mod result;
pub mod goodput;
pub mod topology;
pub mod suite;
pub mod report;
pub mod media;
pub mod prompt;
pub mod client;
pub mod scrape;
pub mod run;
pub mod host;
pub mod sweep;
pub mod race;
