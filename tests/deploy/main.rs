//! `deploy/`: its files are checked by the tools that read them and by the product's own parsers, the static binary runs
//! on an empty root, and the compose file runs with real processes in network namespaces.
#![forbid(unsafe_code)]

mod authority;
mod chart;
mod compose;
mod container;
mod dns;
mod files;
mod image;
mod compose_cluster;
mod metrics;
mod page;
mod pods;
mod probes;
mod promql;
mod refused;
mod rules;
mod settings;
