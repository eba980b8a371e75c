//! Tracing targets of spans that the log does not show.

/// Target of the spans of compute threads: a step, a forward, a batch. There are too many of them for a log or a
/// collector, so they exist only while a timeline is recorded.
pub const COMPUTE: &str = "triptych::compute";

/// Target of the spans of calls from process to process, on both sides. Their fields are attributes of OpenTelemetry's
/// semantic conventions, too many for a line of the log.
pub const CALLS: &str = "triptych::calls";

/// Target of the spans of the EC store's operations. They exist only while traces are exported or a timeline is recorded.
pub const STORE: &str = "triptych::store";
