//! The source of an item's output, as a run counts it.

use triptych_core::lifetime::ItemSource;
use triptych_proxy::request_machine::output::{Belief, Encoded};

/// The source of an item's output. Of several towers' outputs the last in this order is the item's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Source {
    /// READY a moment ago.
    Remembered,
    /// On a PD worker.
    Resident,
    /// In the store.
    Stored,
    /// Encoded for another request.
    Shared,
    /// Asked of an encoder for this request, which still had the rows.
    Kept,
    /// Encoded for this request.
    Encoded,
}

impl Source {
    /// Of an output that the proxy knew of.
    pub(super) fn known(encoded: &Encoded) -> Self {
        if encoded.belief == Belief::Resident { Self::Resident } else { Self::Remembered }
    }

    /// Of an encode that has ended, for a request that joined it or began it.
    pub(super) fn of(encoded: &Encoded, joined: bool, kept: bool) -> Self {
        match (encoded.belief, encoded.source) {
            _ if joined => Self::Shared,
            (Belief::Made, _) if kept => Self::Kept,
            (Belief::Made, _) => Self::Encoded,
            (_, ItemSource::Shared) => Self::Shared,
            _ => Self::Stored,
        }
    }
}
