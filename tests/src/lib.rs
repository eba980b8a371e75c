//! What the end-to-end suites share: a cluster of real processes, clients for it, and a recording wire-tap.
//!
//! Nothing here is a stub: [`cluster::Cluster`] starts the product's own binary, and every guard ends what it
//! started when it is dropped, on a failed assertion too.
#![forbid(unsafe_code)]
#![allow(missing_docs)]

pub mod client;
pub mod cluster;
pub mod net;
pub mod process;
pub mod samples;
pub mod tap;
pub mod tools;
