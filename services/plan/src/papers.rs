//! Tables that others measured and published, set beside a simulation with curves of their machines.
//!
//! A [`file`] holds what was published, figure by figure, and the cluster's settings; [`simulated`] runs the same load,
//! [`page`] sets both side by side. Curves come from published figures too (`benches/papers/curves.py` names the source of each
//! number), so what is tested here is the model of a cluster: queues, batches, turns, and which of two clusters is ahead.

pub mod file;
pub mod page;
pub mod simulated;
