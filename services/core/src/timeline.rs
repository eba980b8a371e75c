//! Tracing target of compute spans.

/// Target of the spans of compute threads: a step, a forward, a batch. There are too many of them for a log or a
/// collector, so they exist only while a timeline is recorded.
pub const COMPUTE: &str = "triptych::compute";
