//! Autoscaling of a running cluster: the load in the proxy's metrics as a demand, the workers that it needs, and when to
//! change them; and the division of workers that hold encoder and decoder. All but [`watch`], `proxies` and [`apply`] is pure:
//! texts and times are arguments.
//!
//! ```text
//! /metrics ──▶ reading ──(two of them)──▶ load ──▶ fitted demand ──▶ needed replicas ──▶ controller ──▶ change
//!                                                        └─────────▶ division ─────────▶ controller ──▶ roles
//! /admin/workers ──▶ flexible workers ────────────────────────────────▲
//! ```

pub mod apply;
pub mod controller;
mod exposition;
mod fitted;
mod load;
mod needed;
mod division;
mod flexible;
pub mod proxies;
pub mod roles;
pub mod watch;

pub use controller::{Controller, Decision, Replicas, Rules};
pub use exposition::{Exposition, NotMetrics};
pub use fitted::Fitted;
pub use load::{Load, Reading};
pub use needed::needed;
