//! A cluster on a simulated clock: proxy, encoders, store and PD workers as they are, and time from measured curves.
//!
//! The decisions are the product's own code: the scheduler of `triptych-engine`, the packing and the learned costs of
//! `triptych-encoder`, the choices and the memory of `triptych-proxy`, with what the workers report between them. What
//! takes time is made up: a forward, a step, a transfer last as long as a [curve](crate::curves) says, drawn with a
//! seed. Tokens are made up too; which of them are the same as others' is not.
//!
//! ```text
//! offered ──▶ proxy ──jobs──▶ encoders ──rows──▶ store        reports ▲ of encoders and PD workers
//!               └────request, before its items are READY────▶ PD workers ──tokens──▶ outcome
//! ```
//!
//! One event after the other, from a heap; no threads, no clock, no network. The same seed gives the same run.

mod event_queue;
mod encoding;
mod encodes;
mod proxy;
mod loading;
mod output;
mod neighbours;
mod prompts;
mod reports;
mod request;
mod requests;
pub mod result;
mod serving;
mod sharing;
mod source;
pub mod spec;
mod store;
mod totals;
pub mod trace;
mod worker;
mod world;

pub use result::Simulation;
pub use spec::{ClusterSpec, SpecError};

use triptych_bench::offered::Offered;
use world::World;

/// Runs a workload on a cluster, from the first arrival until everything has ended or its patience has passed.
///
/// # Errors
/// [`SpecError`] for a cluster that cannot run.
pub fn simulate(
    cluster: &ClusterSpec,
    offered: impl Iterator<Item = Offered>,
    seed: u64,
) -> Result<Simulation, SpecError> {
    cluster.check()?;
    let mut world = World::new(cluster, seed)?;
    world.run(offered);
    Ok(world.totals())
}
