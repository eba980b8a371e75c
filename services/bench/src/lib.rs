//! The load generator: workloads, open-loop clients, verdicts and reports.
//!
//! ```text
//! workload ──▶ offered ──▶ client (gRPC, or any OpenAI-compatible HTTP server) ──▶ outcome ──▶ judge ──▶ report
//! ```
//!
//! Open loop: a request is sent when it is due, whether or not earlier ones were answered. It knows no model
//! and no worker; the planner's simulator takes the same [`offered`] requests and gives the same [`outcome`]s. Read in
//! this order:
//!
//! - [`offered`], [`outcome`]: one request and its outcome;
//! - [`workload`], [`arrivals`]: requests and arrival times, from a text and a seed;
//! - [`slo`], [`judge`]: latency limits, and the verdict on a run;
//! - [`topology`], [`cluster`], [`side_by_side`], [`suite`]: comparison of clusters under the same workloads;
//! - [`overhead`]: cost of the proxy;
//! - [`report`]: the page of results.
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
pub mod rates;
pub mod repeat;
pub mod result;
pub mod blocks;
pub mod paired;
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
pub mod cpu_time;
pub mod sweep;
pub mod interleave;
pub mod error;
pub mod cluster;
pub mod side_by_side;
pub mod overhead;
