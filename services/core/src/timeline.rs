//! The name under which compute is drawn.

/// Target of the spans of threads that compute: a step, a forward, a batch. There are too many of them for a log or a
/// collector, so they are made only where a timeline is written.
pub const COMPUTE: &str = "triptych::compute";
