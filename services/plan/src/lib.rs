//! How many workers of which kind: cost curves of a model on a machine, a simulator of a cluster made of them, and the
//! planner that asks the simulator.
//!
//! ```text
//! profile ──▶ curves ──▶ simulator (the real scheduler and router, a simulated clock) ──▶ plan ──▶ recommendation
//! ```
//!
//! The simulator's requests and outcomes are those of `triptych-bench`, so one judge rules on both. Read in this order:
//!
//! - [`curves`]: what a worker takes for things; [`profile`] measures it;
//! - [`simulator`]: a cluster of such workers, on a simulated clock;
//! - [`planner`]: which cluster keeps the promises at the highest rate, and [`online`]: beside a running one;
//! - [`validation`]: how far all that is from a machine.
#![forbid(unsafe_code)]

pub mod curves;
pub mod online;
pub mod planner;
pub mod profile;
pub mod simulator;
pub mod validation;
