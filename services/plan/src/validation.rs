//! Validation: error of the simulation against a machine, and regret of the plan against the best measured cluster.
//!
//! [`measured`] starts clusters and measures them, [`stored`] takes results that the bench stored; both fill a [`Validation`].

mod bars;
mod choice;
pub mod measured;
mod page;
mod report;
pub mod stored;
mod tables;

pub use bars::Bar;
pub use report::{
    ClusterGoodput, DRIFT, DriftCounts, JUDGED, LOADS, LoadComparison, MeasuredGoodput, PercentilePair,
    REGRET, Regret, Validation, candidate, compare, encoder_budget, goal, pairs, shape,
};
