//! A job among the encoders, and what is done when one fails or is slow.
//!
//! Another encoder (a job is idempotent by key) → a second one beside the first after the 95th percentile of what the
//! job should take, of which the first READY wins and the other is cancelled → a PD worker that holds the encoder,
//! where the catalog has one → a typed, retryable failure. Whatever is sent a second time is paid from the retry budget.
//! It knows workers only as [`Rungs`], so that its timing can be tested without any.

use super::meters::{EncodeMeters, Sent};
use super::{ATTEMPTS, Encoded, backoff};
use crate::budget::RetryBudget;
use crate::wire::CallFailure;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use std::pin::pin;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};
use triptych_core::{Failure, WorkerId};

/// The field that an encoder names when it refuses a job since it has seen a newer lease.
const FENCE: &str = "fence";

/// What a ladder stands on: encoders, and tries of one job at them.
pub(super) trait Rungs: Sync {
    /// A worker that was given the job and has not begun.
    type Worker: Send;

    /// The best worker, preferably one that has not had the job. Waits while there is none, for a bounded time.
    fn worker(&self, seen: &[WorkerId]) -> impl Future<Output = Result<Self::Worker, Failure>> + Send;

    /// An encoder that has not had the job, if there is one now.
    fn spare(&self, seen: &[WorkerId]) -> Option<Self::Worker>;

    /// Which it is.
    fn id(worker: &Self::Worker) -> &WorkerId;

    /// Whether it is a PD worker that helps out.
    fn is_last_resort(worker: &Self::Worker) -> bool;

    /// How long it is waited for before a second one is asked beside it.
    fn patience(&self, worker: &Self::Worker) -> Duration;

    /// Ends when it is known better how long the job takes at the worker that had it first: the same as [`Self::patience`],
    /// from the same moment. Never, if that does not become known.
    fn revised(&self) -> impl Future<Output = Duration> + Send;

    /// One try, within its own time. Dropping it cancels the job.
    fn attempt(&self, worker: Self::Worker) -> BoxFuture<'_, Result<Encoded, CallFailure>>;
}

/// How a job that could not be done ended.
#[derive(Debug)]
pub(super) enum Fell {
    /// With this failure.
    Failed(Failure),
    /// Its lease is another's: whoever holds it does the job.
    Outrun,
}

/// One job on its way down.
pub(super) struct Ladder<'a, R> {
    pub(super) rungs: &'a R,
    pub(super) budget: &'a RetryBudget,
    pub(super) meters: &'a EncodeMeters,
    /// Whether the lease under which it is done is lost.
    pub(super) outrun: &'a (dyn Fn() -> bool + Sync),
}

/// Tries under way, and what was learned from those that ended.
struct Climb<'a> {
    running: FuturesUnordered<BoxFuture<'a, Result<Encoded, CallFailure>>>,
    /// Workers that have or had the job.
    seen: Vec<WorkerId>,
    n_failed: u32,
    /// When the latest worker was asked that is not a hedge.
    sent: Instant,
    /// When a second worker is asked; once in the life of a job.
    hedge_at: Option<Instant>,
    hedged: bool,
}

impl<'a, R: Rungs> Ladder<'a, R> {
    /// Has the job done. Dropping it cancels all that is under way.
    pub(super) async fn run(&self) -> Result<Encoded, Fell> {
        self.budget.first_try();
        let (running, seen) = (FuturesUnordered::new(), Vec::new());
        let sent = Instant::now();
        let mut climb = Climb { running, seen, n_failed: 0, sent, hedge_at: None, hedged: false };
        let mut revised = pin!(self.rungs.revised().fuse());
        loop {
            if climb.running.is_empty() {
                let worker = self.rungs.worker(&climb.seen).await.map_err(Fell::Failed)?;
                let patience = self.rungs.patience(&worker);
                climb.sent = Instant::now();
                climb.hedge_at = (!climb.hedged).then(|| climb.sent + patience);
                let why = if climb.n_failed == 0 { Sent::First } else { Sent::Retry };
                self.send(&mut climb, worker, why);
            }
            let hedge_at = climb.hedge_at;
            let hedge = async move {
                match hedge_at {
                    Some(at) => sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            let tried = tokio::select! {
                // What has ended counts before what is due.
                biased;
                tried = climb.running.next() => tried,
                patience = &mut revised => {
                    climb.hedge_at = climb.hedge_at.map(|_| climb.sent + patience);
                    continue;
                }
                () = hedge => {
                    climb.hedge_at = None;
                    self.hedge(&mut climb);
                    continue;
                }
            };
            match tried {
                Some(Ok(encoded)) => return Ok(encoded),
                Some(Err(failed)) => self.fallen(&mut climb, failed.failure).await?,
                None => {}
            }
        }
    }

    /// After a try that failed: whether and when there is another.
    async fn fallen(&self, climb: &mut Climb<'a>, failure: Failure) -> Result<(), Fell> {
        climb.n_failed += 1;
        if (self.outrun)() || failure.param.as_deref() == Some(FENCE) {
            return Err(Fell::Outrun);
        }
        if !failure.class.is_retryable() {
            return Err(Fell::Failed(failure));
        }
        if !climb.running.is_empty() {
            // Another try is under way: no reason to begin one more.
            return Ok(());
        }
        if climb.n_failed >= ATTEMPTS {
            return Err(Fell::Failed(failure));
        }
        if !self.budget.try_spend() {
            self.meters.exhausted("retry");
            return Err(Fell::Failed(failure));
        }
        tracing::warn!(attempt = climb.n_failed, failure = %failure, "encoder job sent again");
        sleep(backoff(climb.n_failed)).await;
        Ok(())
    }

    /// A second try beside the first, if there is a worker that has not had the job and the budget pays.
    fn hedge(&self, climb: &mut Climb<'a>) {
        let Some(worker) = self.rungs.spare(&climb.seen) else { return };
        if !self.budget.try_spend() {
            return self.meters.exhausted("hedge");
        }
        tracing::info!(encoder = %R::id(&worker), "a slow encoder job is sent to a second encoder");
        climb.hedged = true;
        self.send(climb, worker, Sent::Hedge);
    }

    fn send(&self, climb: &mut Climb<'a>, worker: R::Worker, why: Sent) {
        self.meters.sent(if R::is_last_resort(&worker) { Sent::Fallback } else { why });
        climb.seen.push(R::id(&worker).clone());
        climb.running.push(self.rungs.attempt(worker));
    }
}

#[cfg(test)]
mod tests;
