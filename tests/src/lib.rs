//! What no single crate can test: the cluster, golden files, the house rules.
