//! The proxy's work on a request, as two state machines without clock, lock, network or randomness.
//!
//! [`encodes`] looks for encoder outputs and has each made once, for all who wait: probe, single-flight, lease,
//! attempts with backoff and hedge, fallback to a PD worker. [`request`] takes a request from its items to its answer:
//! announce, forward, retry, resume, encode again; [`deaths`] tells it which requests workers died of. Both take what happened and when, and answer with what is to be
//! done: `on(event, now) -> actions`. Tasks carry the actions out in the product ([`crate::encode`],
//! [`crate::orchestrate`]); the planner's simulator answers them from its curves, on virtual time. The shape is that of
//! sans-I/O protocol libraries, such as quinn-proto.
//!
//! A machine keeps no timers. Its driver asks `wake_at` after each event, and sends `Woken` at that time; one
//! that comes early, late or twice does no harm. The choice of a worker is an action too: it is made from the views of
//! the fleet ([`crate::fleet::score`]).

pub mod action;
pub mod attempts;
pub mod deaths;
pub mod encode;
pub mod encodes;
pub mod event;
pub mod failures;
pub mod lease;
pub mod output;
pub mod pace;
pub mod policy;
pub mod recents;
pub mod request;
pub mod retry_budget;
pub mod roles;
pub mod surroundings;

#[cfg(test)]
pub(crate) mod tests;
