//! `deploy/` as it is used: files read by the tools they are for and by the product's own parsers, the static binary on an
//! empty root, and the compose file lived out with real processes in network namespaces.
#![forbid(unsafe_code)]

mod authority;
mod chart;
mod compose;
mod container;
mod dns;
mod files;
mod image;
mod lived;
mod metrics;
mod page;
mod pods;
mod probes;
mod promql;
mod refused;
mod rules;
mod settings;
