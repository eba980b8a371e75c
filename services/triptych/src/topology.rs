//! Clusters to be compared: started from this binary, each worker on cores of its own, all clusters with the same total.
//!
//! ```text
//! 1e1pd      encoder │ pd            --cores 0-3: 0-1 │ 2-3
//! dp2        worker  │ worker                     0-1 │ 2-3
//! colocated  worker                               0-3
//! ```
//!
//! Proxy, store and load generator run on the same cores whatever the topology is (`--side-cores`), by default all that
//! the process may use. A worker never comes back here: one that dies makes its measurement void. Each cluster has a
//! store of its own, or what one encodes would be found by the next. Cores are given by
//! affinity, parts of a core by a CPU quota of a cgroup ([`triptych_bench::topology`]).

mod args;
mod cluster;

pub use args::TopologyArgs;
pub use cluster::Starter;
