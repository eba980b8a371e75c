//! Events: everything that the machines hear of. Those of one encode, and those of one request.

use super::action::AttemptId;
use super::deaths::Lost;
use super::output::Encoded;
use std::time::Duration;
use triptych_core::{EncodedItem, Failure, ItemIdx, WorkerId};

/// Something that happened to an encode.
#[derive(Clone, Debug)]
pub enum EncodeEvent {
    /// The store's description of the output, if it has one.
    Probed(Option<EncodedItem>),
    /// The store's answer about the lease; `None`: it has no leases, or does not answer.
    Leased(Option<LeaseAnswer>),
    /// The end of a wait for an output that another makes; `None`: the store does not answer.
    Waited(Option<Option<EncodedItem>>),
    /// The lease is another's by now.
    LeaseLost,
    /// The tenant's quota was charged, or is used up.
    Charged(Result<(), Failure>),
    /// The item can be encoded in time, or is refused.
    Admitted(Result<(), Failure>),
    /// A worker for the next attempt.
    Worker(ChosenWorker),
    /// An encoder for a hedge; `None`: there is none that has not had the job.
    Spare(Option<ChosenWorker>),
    /// Description of the output that an attempt will make, and the p95 of such jobs at its worker if that is known.
    Announced {
        /// The attempt.
        attempt: AttemptId,
        /// Its output, without a checksum.
        item: EncodedItem,
        /// `host:port` of `EcObjects` services that will hold it.
        peers: Vec<String>,
        /// From being sent to READY.
        p95: Option<Duration>,
    },
    /// An attempt ended.
    Ended {
        /// The attempt.
        attempt: AttemptId,
        /// Its end.
        result: Result<Encoded, Failure>,
    },
    /// It is `wake_at`.
    Woken,
}

/// The store's answer about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseAnswer {
    /// It is had, with this fencing token.
    Granted {
        /// Grows with each grant of the key.
        token: u64,
    },
    /// Another holds it, for so long unless it is renewed.
    Held {
        /// Rest of its time.
        left: Duration,
    },
}

/// A worker that was chosen for an attempt.
#[derive(Clone, Debug)]
pub struct ChosenWorker {
    /// Its name.
    pub id: WorkerId,
    /// True if it is a PD worker that encodes because no encoder worker can.
    pub is_last_resort: bool,
    /// Its queue and the p95 of such jobs, as it measured them.
    pub expected: Option<Duration>,
}

/// Something that happened to a request.
#[derive(Clone, Debug)]
pub enum RequestEvent {
    /// An item's output is described.
    ItemAnnounced(ItemIdx),
    /// An item is READY, and only these PD workers are known to hold it; none: anybody can load it.
    ItemReady {
        /// The item.
        item: ItemIdx,
        /// The workers.
        holders: Vec<WorkerId>,
    },
    /// An item failed for good.
    ItemFailed {
        /// The item.
        item: ItemIdx,
        /// Its failure.
        failure: Failure,
    },
    /// A PD worker was chosen.
    Worker(WorkerId),
    /// The PD worker wrote a piece of the answer.
    Wrote {
        /// True if the client has it.
        went_out: bool,
    },
    /// The answer is complete.
    Answered,
    /// The PD worker's call failed.
    Broke(BrokenCall),
    /// It is `wake_at`.
    Woken,
}

/// A call to a PD worker that failed.
#[derive(Clone, Debug)]
pub struct BrokenCall {
    /// Its failure.
    pub failure: Failure,
    /// The item that the worker did not find.
    pub missing: Option<ItemIdx>,
    /// The way in which the worker was lost, if it did not say so itself: it may have died.
    pub lost: Option<Lost>,
}
