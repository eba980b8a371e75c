//! Planning beside a running cluster: what the proxy's metrics say of the load, as a demand; how many workers that needs;
//! and when a change is worth making. Pure: texts and times are arguments.
//!
//! ```text
//! /metrics ──▶ reading ──(two of them)──▶ load ──▶ fitted demand ──▶ needed replicas ──▶ controller ──▶ change
//! ```

pub mod controller;
mod exposition;
mod fitted;
mod load;
mod needed;

pub use controller::{Controller, Decision, Replicas, Rules};
pub use exposition::{Exposition, NotMetrics};
pub use fitted::Fitted;
pub use load::{Load, Reading};
pub use needed::needed;
