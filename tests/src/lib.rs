//! Shared by the end-to-end suites: a cluster of real processes, its clients, and a recording TCP relay.
//!
//! Nothing here is a stub: [`cluster::Cluster`] starts the product's own binary, and every guard ends what it
//! started on drop, after a failed assertion too.
#![forbid(unsafe_code)]
#![allow(missing_docs)]

pub mod client;
pub mod cluster;
pub mod faults;
pub mod net;
pub mod process;
pub mod samples;
pub mod tap;
pub mod tools;
pub mod words;
