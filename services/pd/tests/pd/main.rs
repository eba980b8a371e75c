//! A PD worker in this process, over its own gRPC, with small real decoders and a store that fails on demand.
//!
//! Encoder outputs are made up: a decoder reads any rows. Nothing looks at the clock except to give up.

mod completions;
mod health;
mod drain;
mod grammar;
mod loads;
mod models;
mod pending;
mod refusals;
mod resumed;
mod rows;
mod admission;
mod speech;
mod support;
mod watch;
