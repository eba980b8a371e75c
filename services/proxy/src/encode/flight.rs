//! An item on its way: what a request sees of it.

use crate::encode::{Encoded, Job, Outcome};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use triptych_core::lifetime::{ItemSource, StageTimes};
use triptych_core::{EncodedItem, Failure};
use triptych_runtime::single_flight::{CallRole, Subscription};

/// The most, and the share of its time, that a request keeps back so that a failure still reaches the client in time.
const MARGIN: Duration = Duration::from_millis(250);
const MARGIN_SHARE: u32 = 20;

/// What is known of an item before its output is READY, or when it is.
#[derive(Clone, Debug)]
pub struct Announced {
    /// What the output is; while it is pending without its checksum.
    pub item: EncodedItem,
    /// `host:port` of `EcObjects` services that hold it in memory, or will.
    pub peers: Vec<String>,
    /// Whether it is still being encoded.
    pub pending: bool,
}

/// How far the work on an item is.
#[derive(Clone, Debug)]
pub(super) struct Progress {
    pub(super) announced: Option<Announced>,
    pub(super) outcome: Option<Outcome>,
    /// When it is due for the most patient of those who wait.
    pub(super) due: Due,
}

/// The latest of several deadlines. Clones share it.
#[derive(Clone, Debug)]
pub(super) struct Due(Arc<Mutex<Instant>>);

impl Due {
    pub(super) fn new(deadline: Instant) -> Self {
        Self(Arc::new(Mutex::new(deadline)))
    }

    pub(super) fn extend(&self, deadline: Instant) {
        let mut latest = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *latest = deadline.max(*latest);
    }

    pub(super) fn latest(&self) -> Instant {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the work tells how far it is.
#[derive(Clone)]
pub(super) struct Teller(pub(super) Arc<watch::Sender<Progress>>);

impl Teller {
    /// What the output will be; the first word stands.
    pub(super) fn announce(&self, item: EncodedItem, peers: Vec<String>) {
        self.0.send_if_modified(|progress| {
            let first = progress.announced.is_none();
            if first {
                progress.announced = Some(Announced { item, peers, pending: true });
            }
            first
        });
    }

    /// The end.
    pub(super) fn end(&self, outcome: Outcome) {
        self.0.send_modify(|progress| progress.outcome = Some(outcome));
    }
}

/// An item's way to READY, seen from one request. Dropping it gives the item up, unless another request waits too.
pub struct Flight {
    way: Way,
    /// When the request's answer is due, and when it arrived here.
    deadline: Instant,
    began: Instant,
}

enum Way {
    /// It was there.
    Landed(Box<Encoded>),
    /// It is being looked for or made.
    Flying(Subscription<Progress>, CallRole),
}

impl Flight {
    pub(super) fn landed(job: &Job, encoded: Encoded) -> Self {
        Self { way: Way::Landed(Box::new(encoded)), deadline: job.deadline, began: Instant::now() }
    }

    pub(super) fn flying(job: &Job, seat: Subscription<Progress>, boarding: CallRole) -> Self {
        Self { way: Way::Flying(seat, boarding), deadline: job.deadline, began: Instant::now() }
    }

    /// What the output will be, as soon as that is known: a PD worker can begin with it.
    ///
    /// # Errors
    /// [`Failure`] of the item, or Unavailable shortly before the request's time is over.
    pub async fn announced(&mut self) -> Result<Announced, Failure> {
        let (known, boarding) = match &mut self.way {
            Way::Landed(encoded) => return Ok(encoded.announced()),
            Way::Flying(seat, boarding) => {
                let known = seat.until(|p| p.announced.is_some() || p.outcome.is_some());
                (in_time(self.began, self.deadline, known).await?, *boarding)
            }
        };
        match known {
            Some(Progress { outcome: Some(outcome), .. }) => Ok(seen(outcome, boarding)?.announced()),
            Some(Progress { announced: Some(announced), .. }) => Ok(announced),
            _ => Err(lost()),
        }
    }

    /// The end: the output is READY, or why not.
    ///
    /// # Errors
    /// As [`Self::announced`].
    pub async fn ready(&mut self) -> Outcome {
        match &mut self.way {
            Way::Landed(encoded) => Ok((**encoded).clone()),
            Way::Flying(seat, boarding) => {
                let ended = seat.until(|p| p.outcome.is_some());
                let ended = in_time(self.began, self.deadline, ended).await?;
                seen(ended.and_then(|p| p.outcome).ok_or_else(lost)?, *boarding)
            }
        }
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        match &self.way {
            Way::Landed(_) => true,
            Way::Flying(seat, _) => seat.now().outcome.is_some(),
        }
    }

    /// The request ends, and the work on this item goes on for whoever asks again, until `limit` ends.
    pub(super) fn detach_until(self, limit: impl Future<Output = ()> + Send + 'static) {
        if let Way::Flying(seat, _) = self.way {
            seat.detach_until(limit);
        }
    }
}

/// An outcome as the request sees it that began the flight or joined it.
fn seen(outcome: Outcome, boarding: CallRole) -> Outcome {
    let mut encoded = outcome?;
    if boarding == CallRole::Follower {
        encoded.times = StageTimes::default();
        if encoded.source == ItemSource::Encoded {
            encoded.source = ItemSource::Shared;
        }
    }
    Ok(encoded)
}

async fn in_time<T>(began: Instant, deadline: Instant, wait: impl Future<Output = T>) -> Result<T, Failure> {
    let margin = (deadline.saturating_duration_since(began) / MARGIN_SHARE).min(MARGIN);
    let end = deadline.checked_sub(margin).unwrap_or(deadline);
    timeout_at(end, wait)
        .await
        .map_err(|_| Failure::unavailable("an item was not encoded within the request's time; try again"))
}

fn lost() -> Failure {
    Failure::internal("an encode ended without a word")
}
