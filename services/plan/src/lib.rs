//! Capacity planning: cost curves of a model on a machine, a simulator of a cluster with these costs, and the
//! planner that asks the simulator.
//!
//! ```text
//! profile ──▶ curves ──▶ simulator (the real scheduler and router, a simulated clock) ──▶ plan ──▶ recommendation
//! ```
//!
//! The simulator's requests and outcomes are those of `triptych-bench`, so one judge rules on both. Read in this order:
//!
//! - [`curves`]: costs of a worker; [`profile`] measures them, [`calibration`] scales them to a cluster in service;
//! - [`simulator`]: a cluster of such workers, on a simulated clock;
//! - [`planner`]: the cluster that meets the SLO at the highest rate, [`maps`]: who is ahead where, and [`online`]: autoscaling of a
//!   running one;
//! - [`validation`]: comparison with measurements, [`papers`]: with those of others, and [`comparison`] of topologies without any.
#![forbid(unsafe_code)]

pub mod calibration;
pub mod comparison;
pub mod curves;
pub mod maps;
pub mod online;
pub mod papers;
pub mod planner;
pub mod profile;
pub mod simulator;
pub mod validation;
