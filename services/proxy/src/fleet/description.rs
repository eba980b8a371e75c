//! A worker's description of itself.

use super::catalog::Served;
use bytes::Bytes;
use triptych_core::RequestId;

/// The models that a worker serves, whether it encodes items of them, and which process it is.
pub(super) struct Description {
    pub(super) models: Vec<Served>,
    pub(super) encodes: bool,
    /// Name of the process; empty: it has none.
    pub(super) instance: Bytes,
    /// Requests that the process before was starting when it died.
    pub(super) suspects: Vec<RequestId>,
}
