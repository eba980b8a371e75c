//! Actions: everything that the machines have done for them. Those of one encode, and those of one request.

use super::output::{Announced, Outcome};
use std::time::{Duration, Instant};
use triptych_core::{Failure, ItemIdx, WorkerId};

/// An attempt at one encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AttemptId(pub u32);

/// Something to be done for an encode. The driver answers with the event that is named.
#[derive(Clone, Debug)]
pub enum EncodeAction {
    /// Ask the store for the output: `Probed`.
    Probe,
    /// Ask the store for the key's lease: `Leased`.
    Acquire {
        /// Its time; it is renewed until it is released.
        ttl: Duration,
    },
    /// Wait until the store has the output: `Waited`.
    Wait {
        /// The longest wait.
        patience: Duration,
    },
    /// Give the lease back.
    Release(Release),
    /// Charge the tenant for an encode: `Charged`.
    Charge,
    /// Predict the end of the encode, and refuse what would be late: `Admitted`.
    Admit {
        /// Time at which the output is needed.
        due: Instant,
    },
    /// Choose a worker, those in `tried` last, as soon as there is one: `Worker`.
    Choose {
        /// Workers that had the job.
        tried: Vec<WorkerId>,
    },
    /// Choose an encoder worker that is not in `tried` and is there now: `Spare`.
    ChooseSpare {
        /// Workers that had the job.
        tried: Vec<WorkerId>,
    },
    /// The chosen worker is not used.
    GiveBack,
    /// Send the job to the chosen worker: `Announced`, then `Ended`.
    Send {
        /// Name of the attempt.
        attempt: AttemptId,
        /// Fencing token of the lease; 0: without one.
        fence: u64,
        /// End of its time.
        until: Instant,
        /// The reason.
        why: SendReason,
    },
    /// Cancel an attempt; its end is not reported.
    Cancel {
        /// The attempt.
        attempt: AttemptId,
        /// The reason.
        why: CancelReason,
    },
    /// Describe the output to those who wait for it.
    Announce(Announced),
    /// Count this.
    Count(Counted),
    /// Report the end. No action follows.
    Finish(Outcome),
}

/// The moment at which a lease is given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// At once.
    Now,
    /// Once the durable copy, which is written behind the answer, is in the store.
    WhenStored,
}

/// The reason for which a job is sent to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendReason {
    /// The output was nowhere.
    First,
    /// The worker before failed.
    Retry,
    /// The worker before is slow.
    Hedge,
    /// No encoder could, so a PD worker that holds one is asked.
    Fallback,
}

/// The reason for which an attempt is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// Its worker did not answer in its time.
    TimedOut,
    /// Nobody needs it any more.
    Unneeded,
}

/// Something that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// The end of asking for a key's lease.
    Lease(LeaseOutcome),
    /// A retry that the budget did not pay.
    UnpaidRetry,
    /// A hedge that the budget did not pay.
    UnpaidHedge,
}

/// The end of asking for a key's lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LeaseOutcome {
    /// It was free.
    Granted,
    /// Somebody else had it, and then the object was there.
    Followed,
    /// Somebody else had it, gave up or died, and it was had then.
    TakenOver,
    /// The store has none, or did not answer.
    Without,
    /// It went to another while the job ran.
    Lost,
}

/// Something to be done for a request.
#[derive(Clone, Debug)]
pub enum RequestAction {
    /// All items are announced: nothing more will be given to the placed worker for them.
    Supplied,
    /// Choose a PD worker as soon as there is one, those in `tried` last, those in `holders` first: `Worker`.
    Choose {
        /// Workers that had the request.
        tried: Vec<WorkerId>,
        /// Workers that hold items which nobody else is known to have, or encoded them for this request.
        holders: Vec<WorkerId>,
    },
    /// Choose a PD worker that has nothing else, as soon as there is one, and give it nothing else: `Worker`.
    ChooseIdle {
        /// Workers that had the request.
        tried: Vec<WorkerId>,
    },
    /// The chosen worker is not used.
    GiveBack,
    /// Send the request to the chosen worker, with what went out before: `Wrote`, then `Answered` or `Broke`.
    Send {
        /// From 1.
        attempt: u32,
    },
    /// The worker's answer ended without a summary, and the request is sent again.
    Retry {
        /// The attempt that failed.
        attempt: u32,
        /// Its failure.
        failure: Failure,
        /// True if the client has a part of the answer.
        resumed: bool,
    },
    /// Have an item encoded again that a PD worker did not find: `ItemReady` or `ItemFailed`.
    Renew {
        /// The item.
        item: ItemIdx,
        /// True if it was READY; otherwise its encode is only waited for.
        was_ready: bool,
    },
    /// The answer is complete, and so is all that is known of its items. No action follows.
    Finish,
    /// The request failed. No action follows.
    Fail {
        /// Its failure.
        failure: Failure,
        /// The item at fault.
        item: Option<ItemIdx>,
        /// The fate of items that are being encoded for it.
        items: LeftItems,
    },
}

/// The fate of items whose request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftItems {
    /// They go on for the next request.
    GoOn,
    /// They are given up, unless another request waits for them.
    Dropped,
}
