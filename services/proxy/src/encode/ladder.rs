//! A job among the encoders, and what is done when one fails or is slow.
//!
//! Another encoder (a job is idempotent by key) → a second one beside the first after the 95th percentile of what the
//! job should take, of which the first READY wins and the other is cancelled → a PD worker that holds the encoder,
//! where the catalog has one → a typed, retryable failure. Whatever is sent a second time is paid from the retry budget.

use super::attempt::{Attempt, Tried};
use super::flight::Teller;
use super::meters::Sent;
use super::{ATTEMPTS, Encoded, Job, Parts, WORKER_WAIT, backoff};
use crate::fleet::catalog::Want;
use crate::fleet::{Forecast, Lease, Size};
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use futures::{FutureExt, StreamExt};
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout_at};
use triptych_core::{Failure, WorkerId};

/// The field that an encoder names when it refuses a job since it has seen a newer lease.
const FENCE: &str = "fence";

/// How a job that could not be done ended.
#[derive(Debug)]
pub(super) enum Fell {
    /// With this failure.
    Failed(Failure),
    /// Its lease is another's: whoever holds it does the job.
    Outrun,
}

/// One job on its way down.
pub(super) struct Ladder<'a> {
    pub(super) parts: &'a Parts,
    pub(super) job: &'a Job,
    /// Token of the lease under which it is done; 0: without one.
    pub(super) fence: u64,
    /// Whether that lease is lost.
    pub(super) outrun: &'a (dyn Fn() -> bool + Sync),
    pub(super) deadline: Instant,
    pub(super) teller: &'a Teller,
}

/// Attempts under way, and what was learned from those that ended.
struct Climb<'a> {
    running: FuturesUnordered<BoxFuture<'a, Tried>>,
    /// Workers that have or had the job.
    seen: Vec<WorkerId>,
    n_failed: u32,
    hedge_at: Option<Instant>,
}

impl<'a> Ladder<'a> {
    /// Has the job done.
    pub(super) async fn run(&self) -> Result<Encoded, Fell> {
        let (bytes, deadline) = (self.job.bytes.len() as u64, self.deadline.min(self.job.deadline));
        self.parts.fleet.admit(&self.want(), bytes, deadline).map_err(Fell::Failed)?;
        self.parts.budget.first_try();
        let mut climb =
            Climb { running: FuturesUnordered::new(), seen: Vec::new(), n_failed: 0, hedge_at: None };
        let mut why = Sent::First;
        loop {
            if climb.running.is_empty() {
                let worker = self.worker(&climb.seen).await.map_err(Fell::Failed)?;
                climb.hedge_at = Some(Instant::now() + self.patience(worker.forecast()));
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
                () = hedge => {
                    climb.hedge_at = None;
                    self.hedge(&mut climb);
                    continue;
                }
            };
            match tried {
                Some(Tried { result: Ok(encoded), .. }) => return Ok(encoded),
                Some(Tried { worker, result: Err(failed) }) => {
                    drop(worker);
                    why = Sent::Retry;
                    self.fallen(&mut climb, failed.failure).await?;
                }
                None => {}
            }
        }
    }

    /// After an attempt that failed: whether and when there is another.
    async fn fallen(&self, climb: &mut Climb<'_>, failure: Failure) -> Result<(), Fell> {
        climb.n_failed += 1;
        if (self.outrun)() || (self.fence > 0 && failure.param.as_deref() == Some(FENCE)) {
            return Err(Fell::Outrun);
        }
        if !failure.class.is_retryable() {
            return Err(Fell::Failed(failure));
        }
        if !climb.running.is_empty() {
            // Another attempt is under way: no reason to begin one more.
            return Ok(());
        }
        if climb.n_failed >= ATTEMPTS {
            return Err(Fell::Failed(failure));
        }
        if !self.parts.budget.try_spend() {
            self.parts.meters.exhausted("retry");
            return Err(Fell::Failed(failure));
        }
        tracing::warn!(attempt = climb.n_failed, failure = %failure, "encoder job sent again");
        tokio::time::sleep(backoff(climb.n_failed)).await;
        Ok(())
    }

    /// A second job beside the first, if there is an encoder that has not had it and the budget pays.
    fn hedge(&self, climb: &mut Climb<'a>) {
        let asked = self.parts.fleet.lease(&self.want(), self.size(), &climb.seen).now_or_never();
        let Some(worker) = asked.filter(|worker| !climb.seen.contains(worker.id())) else { return };
        if !self.parts.budget.try_spend() {
            return self.parts.meters.exhausted("hedge");
        }
        tracing::info!(encoder = %worker.id(), key = ?self.job.wanted.key, "slow encoder job hedged");
        self.send(climb, worker, Sent::Hedge);
    }

    fn send(&self, climb: &mut Climb<'a>, worker: Lease, why: Sent) {
        self.parts.meters.sent(why);
        climb.seen.push(worker.id().clone());
        let attempt = Attempt {
            parts: self.parts,
            job: self.job,
            fence: self.fence,
            deadline: self.deadline,
            teller: self.teller,
        };
        climb.running.push(attempt.run(worker).boxed());
    }

    async fn worker(&self, seen: &[WorkerId]) -> Result<Lease, Failure> {
        let wait = (Instant::now() + WORKER_WAIT).min(self.deadline);
        let (want, modality) = (self.want(), self.job.wanted.modality);
        timeout_at(wait, self.parts.fleet.lease(&want, self.size(), seen)).await.map_err(|_| {
            Failure::unavailable(format!(
                "no encoder that reads {modality} for model {:?} is there now; try again",
                self.job.model
            ))
        })
    }

    fn want(&self) -> Want {
        let Job { model, wanted, .. } = self.job;
        Want::Encoder { model: model.clone(), modality: wanted.modality, fingerprint: wanted.fingerprint }
    }

    fn size(&self) -> Size {
        Size::Item { key: Some(self.job.wanted.key), bytes: self.job.bytes.len() as u64 }
    }

    /// How long a job is waited for before a second one is sent beside it.
    fn patience(&self, forecast: Option<Forecast>) -> Duration {
        let policy = self.parts.policy;
        if let Some(forecast) = forecast {
            return forecast.queue.saturating_add(forecast.p95).max(policy.hedge_after_at_least);
        }
        match self.parts.pace.predict(&self.job.model, self.job.wanted.modality) {
            Some(prediction) => prediction.p95.max(policy.hedge_after_at_least),
            None => policy.hedge_after_unknown,
        }
    }
}
