//! An encoder worker in this process, over its own gRPC, with small real encoders and a store that fails on
//! demand. Nothing looks at the clock except to give up.

mod adapters;
mod jobs;
mod load;
mod memory;
mod order;
mod shared;
mod support;
mod towers;
mod watch;
