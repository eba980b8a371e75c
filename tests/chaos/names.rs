//! Names of the members of the cluster.

/// Proxies; names are those of network namespaces too.
pub const PROXIES: [&str; 2] = ["proxy0", "proxy1"];
/// Encoder workers.
pub const ENCODERS: [&str; 3] = ["enc0", "enc1", "enc2"];
/// PD workers.
pub const PDS: [&str; 3] = ["pd0", "pd1", "pd2"];
