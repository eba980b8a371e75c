//! The work of one flight: ask the store, take the lease, ask again, and only then have the item encoded.

use super::attempt::AtEncoders;
use super::flight::{Due, Teller};
use super::ladder::{Fell, Ladder};
use super::lease::{Followed, Holding, Turn};
use super::{ATTEMPTS, Belief, Encoded, Job, Origin, Outcome, Parts};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};
use triptych_core::lifetime::ItemSource;
use triptych_core::{EncodedItem, Failure, FailureClass};

/// A lease's cost where nobody knows what a job takes.
const COST_UNKNOWN: Duration = Duration::from_secs(2);

/// Times a job is begun anew under a newer lease; after that it is sent without one.
const MAX_OUTRUN: u32 = 2;

/// One item to be had.
pub(super) struct Errand {
    pub(super) parts: Arc<Parts>,
    pub(super) job: Job,
    pub(super) origin: Origin,
    pub(super) teller: Teller,
    pub(super) due: Due,
}

impl Errand {
    /// To READY or to a failure. `found` is what the store says first.
    pub(super) async fn run(&self, found: impl Future<Output = Option<EncodedItem>>) -> Outcome {
        let deadline = Instant::now() + self.parts.policy.max_time;
        let outcome = timeout_at(deadline, async {
            match found.await {
                Some(item) => Ok(Encoded::cached(item, Belief::Stored)),
                None => self.make(deadline).await,
            }
        });
        let encoded = outcome.await.unwrap_or_else(|_| Err(out_of_time()))?;
        self.parts.recents.note(&encoded.item, &encoded.peers, encoded.at.into_std());
        Ok(encoded)
    }

    async fn make(&self, deadline: Instant) -> Outcome {
        let mut n_outrun = 0;
        // What a tenant has encoded is what it puts into the caches; an output that was lost is no news to them.
        let mut is_counted = self.origin == Origin::Fresh;
        loop {
            let holding = match self.parts.leases.turn(&self.job.wanted, self.origin, self.cost()).await {
                Turn::Done(item) => return Ok(made_elsewhere(item)),
                Turn::Anyones => None,
                Turn::Ours(holding, Followed(followed)) => {
                    // Somebody may have made it between the first question and the lease.
                    if (self.origin == Origin::Any || followed)
                        && let Some(item) = self.probe().await
                    {
                        return Ok(made_elsewhere(item));
                    }
                    Some(holding)
                }
            };
            if !std::mem::replace(&mut is_counted, true) {
                self.job.account.take_encode(self.job.bytes.len())?;
            }
            // A store that was restarted counts its leases anew, and encoders remember the old ones.
            let fence = holding.as_ref().filter(|_| n_outrun < MAX_OUTRUN).map_or(0, Holding::fence);
            match self.encode(holding.as_ref(), fence, deadline).await {
                Ok(encoded) => {
                    // An output at a peer is written to the store behind its answer.
                    if let Some(holding) = holding.filter(|_| !encoded.peers.is_empty()) {
                        holding.give_back_when_stored();
                    }
                    return Ok(encoded);
                }
                Err(Fell::Failed(failure)) => return Err(failure),
                Err(Fell::Outrun) if n_outrun < ATTEMPTS => n_outrun += 1,
                Err(Fell::Outrun) => {
                    return Err(Failure::unavailable("the item is encoded by another part; try again"));
                }
            }
        }
    }

    async fn encode(
        &self,
        holding: Option<&Holding>,
        fence: u64,
        deadline: Instant,
    ) -> Result<Encoded, Fell> {
        let rungs = AtEncoders {
            parts: &self.parts,
            job: &self.job,
            fence,
            deadline,
            due: self.due.latest(),
            teller: &self.teller,
            sized: watch::Sender::new(None),
        };
        let ladder = Ladder {
            rungs: &rungs,
            budget: &self.parts.budget,
            meters: &self.parts.meters,
            outrun: &|| holding.is_some_and(Holding::is_lost),
        };
        ladder.run().await
    }

    async fn probe(&self) -> Option<EncodedItem> {
        self.parts.cache.probe(&[self.job.wanted]).await.pop().flatten()
    }

    fn cost(&self) -> Duration {
        let predicted = self.parts.pace.predict(&self.job.model, self.job.wanted.modality);
        predicted.map_or(COST_UNKNOWN, |prediction| prediction.usual)
    }
}

fn made_elsewhere(item: EncodedItem) -> Encoded {
    Encoded { source: ItemSource::Shared, ..Encoded::cached(item, Belief::Stored) }
}

fn out_of_time() -> Failure {
    Failure::new(FailureClass::DeadlineExceeded, "the request's time ran out while an item was encoded")
}
