//! A request's part in an encode: progress as it is reported, and the interest that keeps the encode alive.

use super::parts::Parts;
use super::progress::Progress;
use crate::request_machine::encodes::{EncodeId, Leave};
use crate::request_machine::output::{Announced, Encoded, Outcome};
use std::sync::Arc;
use tokio::sync::watch;
use triptych_core::Failure;

/// An item's way to READY, seen from one request. Dropping it gives the item up, unless another request waits too.
pub struct Subscription(Source);

enum Source {
    /// The output is there.
    Ready(Box<Encoded>),
    /// It is being looked for or made.
    InFlight(Interest),
}

/// An interest in an in-flight encode.
pub(super) struct Interest {
    pub(super) parts: Arc<Parts>,
    pub(super) id: EncodeId,
    pub(super) progress: watch::Receiver<Progress>,
    /// True if the encode was begun by another request.
    pub(super) joined: bool,
    /// The way in which it ends.
    pub(super) leave: Leave,
}

impl Drop for Interest {
    fn drop(&mut self) {
        self.parts.leave(self.id, self.leave);
    }
}

impl Subscription {
    pub(super) fn ready_now(encoded: Encoded) -> Self {
        Self(Source::Ready(Box::new(encoded)))
    }

    pub(super) fn in_flight(interest: Interest) -> Self {
        Self(Source::InFlight(interest))
    }

    /// Description of the output, as soon as it is known: a PD worker can begin with it.
    ///
    /// # Errors
    /// [`Failure`] of the item.
    pub async fn announced(&mut self) -> Result<Announced, Failure> {
        match &mut self.0 {
            Source::Ready(encoded) => Ok(encoded.announced()),
            Source::InFlight(interest) => {
                let known = |p: &Progress| p.announced.is_some() || p.outcome.is_some();
                match interest.until(known).await? {
                    Progress { outcome: Some(outcome), .. } => Ok(outcome?.announced()),
                    Progress { announced: Some(announced), .. } => Ok(announced),
                    Progress { .. } => Err(lost()),
                }
            }
        }
    }

    /// The end: the output is READY, or a failure.
    ///
    /// # Errors
    /// [`Failure`] of the item.
    pub async fn ready(&mut self) -> Outcome {
        match &mut self.0 {
            Source::Ready(encoded) => Ok((**encoded).clone()),
            Source::InFlight(interest) => {
                let ended = interest.until(|p| p.outcome.is_some()).await?;
                let encoded = ended.outcome.ok_or_else(lost)??;
                Ok(if interest.joined { encoded.joined() } else { encoded })
            }
        }
    }

    /// The request failed: the work on this item goes on for the next request, as far as there is room for such.
    pub fn leave_behind(mut self) {
        if let Source::InFlight(interest) = &mut self.0 {
            interest.leave = Leave::GoOn;
        }
    }
}

impl Interest {
    async fn until(&mut self, so: impl FnMut(&Progress) -> bool) -> Result<Progress, Failure> {
        self.progress.wait_for(so).await.map(|progress| progress.clone()).map_err(|_| lost())
    }
}

fn lost() -> Failure {
    Failure::internal("an encode ended without a word")
}
