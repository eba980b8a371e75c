//! Asking for a key's lease: its holder encodes, and everybody else waits for the object or for the lease.
//!
//! A lease saves work and guards nothing: a proxy that cannot ask for one encodes without.

use super::event::LeaseAnswer;
use super::output::Origin;
use super::policy::{PAUSES, WAIT_SLICE};
use std::time::{Duration, Instant};
use triptych_core::EncodedItem;

/// One encode's way to the lease of its key.
#[derive(Clone, Debug)]
pub struct LeaseRequest {
    ttl: Duration,
    origin: Origin,
    /// True if another had the lease before, and so may have left the object.
    followed: bool,
    /// The next pause.
    pause: Duration,
    step: Step,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// The store is asked.
    Asking,
    /// The store was asked for the object, at this time.
    Waiting { since: Instant },
    /// It is asked again then.
    Pausing { until: Instant },
}

/// The next step on the way.
#[derive(Clone, Debug)]
pub enum LeaseStep {
    /// Ask the store for the lease, of so long.
    Acquire(Duration),
    /// Wait for the object, for so long at most.
    Wait(Duration),
    /// Wake at [`LeaseRequest::wake_at`].
    Pause,
    /// The lease is had.
    Granted {
        /// Its fencing token.
        token: u64,
        /// True if another had it before.
        followed: bool,
    },
    /// The store has no leases or does not answer: encode, and perhaps not alone.
    Without,
    /// It was another's, and the output is there.
    Found(EncodedItem),
}

impl LeaseRequest {
    /// Begins with the question for a lease of so long.
    pub fn new(origin: Origin, ttl: Duration) -> (Self, LeaseStep) {
        let request = Self { ttl, origin, followed: false, pause: PAUSES.0, step: Step::Asking };
        (request, LeaseStep::Acquire(ttl))
    }

    /// The store's answer about the lease. `None`: that was not asked.
    pub fn answered(&mut self, answer: Option<LeaseAnswer>, now: Instant) -> Option<LeaseStep> {
        let Step::Asking = self.step else { return None };
        Some(match answer {
            None => LeaseStep::Without,
            Some(LeaseAnswer::Granted { token }) => LeaseStep::Granted { token, followed: self.followed },
            Some(LeaseAnswer::Held { left }) => {
                self.followed = true;
                self.step = Step::Waiting { since: now };
                match self.origin {
                    // A little longer than the lease lasts: it is free by then if nobody renews it.
                    Origin::Any | Origin::Stored => LeaseStep::Wait((left + PAUSES.0).min(WAIT_SLICE)),
                    // What the store shows may be what was found to be bad: only the lease tells when that is over.
                    Origin::Fresh => self.nothing_found(now, now),
                }
            }
        })
    }

    /// The end of a wait. `None`: there was none.
    pub fn waited(&mut self, found: Option<Option<EncodedItem>>, now: Instant) -> Option<LeaseStep> {
        let Step::Waiting { since } = self.step else { return None };
        Some(match found {
            None => LeaseStep::Without,
            Some(Some(item)) => LeaseStep::Found(item),
            Some(None) => self.nothing_found(since, now),
        })
    }

    /// Its holder gave up or died, or the wait was short: ask again, not in a tight loop.
    fn nothing_found(&mut self, since: Instant, now: Instant) -> LeaseStep {
        if now.saturating_duration_since(since) >= self.pause {
            self.pause = PAUSES.0;
            return self.ask();
        }
        self.step = Step::Pausing { until: now + self.pause };
        self.pause = (self.pause * 2).min(PAUSES.1);
        LeaseStep::Pause
    }

    fn ask(&mut self) -> LeaseStep {
        self.step = Step::Asking;
        LeaseStep::Acquire(self.ttl)
    }

    /// Time at which it is to be woken.
    pub fn wake_at(&self) -> Option<Instant> {
        match self.step {
            Step::Pausing { until } => Some(until),
            Step::Asking | Step::Waiting { .. } => None,
        }
    }

    /// Asks again if the pause is over.
    pub fn woken(&mut self, now: Instant) -> Option<LeaseStep> {
        self.wake_at().is_some_and(|until| until <= now).then(|| self.ask())
    }
}
