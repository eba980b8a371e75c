//! Autoscaling of a running cluster: the load in the proxy's metrics as a demand, the workers that it needs, and when to
//! change them. All but [`watch`] and [`apply`] is pure: texts and times are arguments.
//!
//! ```text
//! /metrics ──▶ reading ──(two of them)──▶ load ──▶ fitted demand ──▶ needed replicas ──▶ controller ──▶ change
//! ```

pub mod apply;
pub mod controller;
mod exposition;
mod fitted;
mod load;
mod needed;
pub mod watch;

pub use controller::{Controller, Decision, Replicas, Rules};
pub use exposition::{Exposition, NotMetrics};
pub use fitted::Fitted;
pub use load::{Load, Reading};
pub use needed::needed;
