//! One in-flight encode: an item on its way to READY, or to a failure, for everybody who waits for it.
//!
//! The store is asked first; then the key's lease is taken, or its holder is waited for ([`super::lease`]), the store is
//! asked again, and only then the item is encoded ([`super::attempts`]). An attempt whose lease was lost begins again.

use super::action::{Counted, EncodeAction, LeaseOutcome, Release};
use super::attempts::{Attempts, AttemptsEnd, out_of_time};
use super::event::EncodeEvent;
use super::failures::not_stored;
use super::lease::{LeaseRequest, LeaseStep};
use super::output::{Announced, Belief, Encoded, Origin, Outcome, Wanted};
use super::policy::{ATTEMPTS, EncodePolicy, MAX_LOST_LEASES, lease_ttl};
use super::surroundings::Surroundings;
use std::sync::Arc;
use std::time::Instant;
use triptych_core::{EncodedItem, Failure, ModelName};

/// An output to be had, for a model.
#[derive(Clone, Debug)]
pub struct EncodeTarget {
    /// The model that asks.
    pub model: ModelName,
    /// The output.
    pub wanted: Wanted,
    /// Name of its tower; empty: no other reads the item.
    pub tower_name: Arc<str>,
    /// True if the store may have it.
    pub origin: Origin,
}

/// The failure of an item that no worker can encode.
fn no_encoder(target: &EncodeTarget) -> Failure {
    let EncodeTarget { model, wanted, tower_name, .. } = target;
    let modality = wanted.modality;
    Failure::unavailable(match &**tower_name {
        "" => format!("no encoder that reads {modality} for model {model:?} is there now; try again"),
        tower => format!(
            "no worker of the encoder pool holds tower {tower} of {modality} for model {model:?} now; try again"
        ),
    })
}

/// An encode that has not ended.
#[derive(Clone, Debug)]
pub struct InFlightEncode {
    target: EncodeTarget,
    policy: EncodePolicy,
    /// End of its time.
    deadline: Instant,
    /// Time at which the most patient of those who wait needs it.
    due: Instant,
    stage: Stage,
    lease: Option<HeldLease>,
    n_lost_leases: u32,
    /// True if the tenant was charged. An output that was lost is no news to the caches.
    is_charged: bool,
    is_announced: bool,
}

#[derive(Clone, Debug)]
enum Stage {
    /// The store is asked what it has.
    Probing,
    /// The lease is asked for.
    Leasing(LeaseRequest),
    /// The lease is held, and the store is asked again.
    ProbingAgain,
    /// The tenant is charged.
    Charging,
    /// The end is predicted.
    Admitting,
    /// Workers are asked.
    Attempting(Box<Attempts>),
    /// It has ended.
    Ended,
}

#[derive(Clone, Copy, Debug)]
struct HeldLease {
    token: u64,
    is_lost: bool,
}

impl InFlightEncode {
    /// Begins, for somebody who needs the output at `due`.
    pub fn new(
        target: EncodeTarget,
        policy: EncodePolicy,
        due: Instant,
        around: &mut Surroundings<'_>,
    ) -> (Self, Vec<EncodeAction>) {
        let origin = target.origin;
        let mut encode = Self {
            target,
            policy,
            deadline: around.now + policy.max_time,
            due,
            stage: Stage::Probing,
            lease: None,
            n_lost_leases: 0,
            is_charged: origin == Origin::Fresh,
            is_announced: false,
        };
        let mut actions = Vec::new();
        match origin {
            Origin::Any | Origin::Stored => actions.push(EncodeAction::Probe),
            Origin::Fresh => encode.ask_lease(around, &mut actions),
        }
        (encode, actions)
    }

    /// Somebody else waits too, until then.
    pub fn extend(&mut self, due: Instant) {
        self.due = self.due.max(due);
    }

    /// Its output and origin.
    pub fn target(&self) -> &EncodeTarget {
        &self.target
    }

    /// True if it has ended.
    pub fn has_ended(&self) -> bool {
        matches!(self.stage, Stage::Ended)
    }

    /// True if its output has been described.
    pub fn is_announced(&self) -> bool {
        self.is_announced
    }

    /// Time at which it is to be woken; `None` when it has ended.
    pub fn wake_at(&self) -> Option<Instant> {
        let step = match &self.stage {
            Stage::Leasing(request) => request.wake_at(),
            Stage::Attempting(attempts) => attempts.wake_at(),
            Stage::Ended => return None,
            Stage::Probing | Stage::ProbingAgain | Stage::Charging | Stage::Admitting => None,
        };
        Some(step.map_or(self.deadline, |step| step.min(self.deadline)))
    }

    /// Takes an event. One that fits no question is ignored: its answer was not waited for any more.
    pub fn on(&mut self, event: EncodeEvent, around: &mut Surroundings<'_>) -> Vec<EncodeAction> {
        let mut actions = Vec::new();
        match event {
            EncodeEvent::Probed(found) => self.probed(found, around, &mut actions),
            EncodeEvent::Leased(answer) => {
                let Stage::Leasing(request) = &mut self.stage else { return actions };
                let step = request.answered(answer, around.now);
                self.lease_step(step, around, &mut actions);
            }
            EncodeEvent::Waited(found) => {
                let Stage::Leasing(request) = &mut self.stage else { return actions };
                let step = request.waited(found, around.now);
                self.lease_step(step, around, &mut actions);
            }
            EncodeEvent::LeaseLost => {
                if let Some(lease) = &mut self.lease {
                    lease.is_lost = true;
                }
            }
            EncodeEvent::Charged(charged) if matches!(self.stage, Stage::Charging) => match charged {
                Ok(()) => self.admit(around, &mut actions),
                Err(failure) => self.finish(Err(failure), &mut actions),
            },
            EncodeEvent::Admitted(admitted) if matches!(self.stage, Stage::Admitting) => match admitted {
                Ok(()) => self.attempt(around, &mut actions),
                Err(failure) => self.finish(Err(failure), &mut actions),
            },
            EncodeEvent::Charged(_) | EncodeEvent::Admitted(_) => {}
            EncodeEvent::Worker(worker) => {
                let seen = around.pace.predict(&self.target.model, self.target.wanted.encoder());
                match &mut self.stage {
                    Stage::Attempting(attempts) => {
                        actions = attempts.worker(worker, seen.map(|seen| seen.p95), around.now);
                    }
                    _ => actions.push(EncodeAction::GiveBack),
                }
            }
            EncodeEvent::Spare(worker) => match &mut self.stage {
                Stage::Attempting(attempts) => actions = attempts.spare(worker, around),
                _ if worker.is_some() => actions.push(EncodeAction::GiveBack),
                _ => {}
            },
            EncodeEvent::Announced { attempt, item, peers, p95 } => {
                let Stage::Attempting(attempts) = &mut self.stage else { return actions };
                if !attempts.is_running(attempt) {
                    return actions;
                }
                if let Some(p95) = p95 {
                    attempts.sized(p95);
                }
                // The first description stands.
                if !std::mem::replace(&mut self.is_announced, true) {
                    actions.push(EncodeAction::Announce(Announced { item, peers, pending: true }));
                }
            }
            EncodeEvent::Ended { attempt, result } => {
                let lease_lost = self.is_lease_lost();
                let Stage::Attempting(attempts) = &mut self.stage else { return actions };
                let end = match result {
                    Ok(encoded) => attempts.made(attempt, encoded, around.now),
                    Err(failure) => {
                        let (more, end) = attempts.failed(attempt, failure, lease_lost, around);
                        actions.extend(more);
                        end
                    }
                };
                self.attempts_end(end, around, &mut actions);
            }
            EncodeEvent::Woken => self.woken(around, &mut actions),
        }
        actions
    }

    /// Nobody waits any more: gives back what it has.
    pub fn abandon(&mut self) -> Vec<EncodeAction> {
        let mut actions = Vec::new();
        self.let_go(Release::Now, &mut actions);
        actions
    }

    fn probed(
        &mut self,
        found: Option<EncodedItem>,
        around: &mut Surroundings<'_>,
        actions: &mut Vec<EncodeAction>,
    ) {
        match (&self.stage, found) {
            (Stage::Probing, Some(item)) => {
                self.finish(Ok(Encoded::found(item, Belief::Stored, around.now)), actions);
            }
            (Stage::Probing, None) if self.target.origin == Origin::Stored => {
                self.finish(Err(not_stored()), actions);
            }
            (Stage::Probing, None) => self.ask_lease(around, actions),
            (Stage::ProbingAgain, Some(item)) => {
                self.finish(Ok(Encoded::made_elsewhere(item, around.now)), actions);
            }
            (Stage::ProbingAgain, None) => self.charge(around, actions),
            _ => {}
        }
    }

    fn ask_lease(&mut self, around: &Surroundings<'_>, actions: &mut Vec<EncodeAction>) {
        let predicted = around.pace.predict(&self.target.model, self.target.wanted.encoder());
        let ttl = lease_ttl(predicted.map(|prediction| prediction.usual));
        let (request, _) = LeaseRequest::new(self.target.origin, ttl);
        self.stage = Stage::Leasing(request);
        actions.push(EncodeAction::Acquire { ttl });
    }

    fn lease_step(
        &mut self,
        step: Option<LeaseStep>,
        around: &mut Surroundings<'_>,
        actions: &mut Vec<EncodeAction>,
    ) {
        let mut count = |outcome| actions.push(EncodeAction::Count(Counted::Lease(outcome)));
        match step {
            None | Some(LeaseStep::Pause) => {}
            Some(LeaseStep::Acquire(ttl)) => actions.push(EncodeAction::Acquire { ttl }),
            Some(LeaseStep::Wait(patience)) => actions.push(EncodeAction::Wait { patience }),
            Some(LeaseStep::Found(item)) => {
                count(LeaseOutcome::Followed);
                self.finish(Ok(Encoded::made_elsewhere(item, around.now)), actions);
            }
            Some(LeaseStep::Without) => {
                count(LeaseOutcome::Without);
                self.charge(around, actions);
            }
            Some(LeaseStep::Granted { token, followed }) => {
                count(if followed { LeaseOutcome::TakenOver } else { LeaseOutcome::Granted });
                self.lease = Some(HeldLease { token, is_lost: false });
                // Somebody may have made it between the first question and the lease.
                if self.target.origin == Origin::Any || followed {
                    self.stage = Stage::ProbingAgain;
                    actions.push(EncodeAction::Probe);
                } else {
                    self.charge(around, actions);
                }
            }
        }
    }

    fn charge(&mut self, around: &mut Surroundings<'_>, actions: &mut Vec<EncodeAction>) {
        if std::mem::replace(&mut self.is_charged, true) {
            return self.admit(around, actions);
        }
        self.stage = Stage::Charging;
        actions.push(EncodeAction::Charge);
    }

    fn admit(&mut self, around: &mut Surroundings<'_>, actions: &mut Vec<EncodeAction>) {
        around.budget.first_try(around.now);
        self.stage = Stage::Admitting;
        actions.push(EncodeAction::Admit { due: self.deadline.min(self.due) });
    }

    fn attempt(&mut self, around: &Surroundings<'_>, actions: &mut Vec<EncodeAction>) {
        // A store that was restarted counts its leases anew, and encoders remember the old ones.
        let lease = self.lease.filter(|_| self.n_lost_leases < MAX_LOST_LEASES);
        let fence = lease.map_or(0, |lease| lease.token);
        let (attempts, choose) = Attempts::new(self.policy, fence, self.deadline, around.now);
        self.stage = Stage::Attempting(Box::new(attempts));
        actions.push(choose);
    }

    fn woken(&mut self, around: &mut Surroundings<'_>, actions: &mut Vec<EncodeAction>) {
        let lease_lost = self.is_lease_lost();
        match &mut self.stage {
            Stage::Leasing(request) => {
                let step = request.woken(around.now);
                if around.now < self.deadline {
                    self.lease_step(step, around, actions);
                }
            }
            Stage::Attempting(attempts) => {
                let (more, end) = attempts.woken(lease_lost, around);
                actions.extend(more);
                self.attempts_end(end, around, actions);
            }
            Stage::Ended => return,
            Stage::Probing | Stage::ProbingAgain | Stage::Charging | Stage::Admitting => {}
        }
        if !self.has_ended() && around.now >= self.deadline {
            self.finish(Err(out_of_time()), actions);
        }
    }

    fn attempts_end(
        &mut self,
        end: Option<AttemptsEnd>,
        around: &mut Surroundings<'_>,
        actions: &mut Vec<EncodeAction>,
    ) {
        match end {
            None => {}
            Some(AttemptsEnd::Made(encoded, took)) => {
                around.pace.saw(&self.target.model, self.target.wanted.encoder(), took);
                self.finish(Ok(*encoded), actions);
            }
            Some(AttemptsEnd::Failed(failure)) => self.finish(Err(failure), actions),
            Some(AttemptsEnd::NoWorker) => {
                self.finish(Err(no_encoder(&self.target)), actions);
            }
            Some(AttemptsEnd::LostLease) if self.n_lost_leases < ATTEMPTS => {
                self.n_lost_leases += 1;
                self.let_go(Release::Now, actions);
                self.ask_lease(around, actions);
            }
            Some(AttemptsEnd::LostLease) => {
                let failure = Failure::unavailable("the item is encoded by another part; try again");
                self.finish(Err(failure), actions);
            }
        }
    }

    fn is_lease_lost(&self) -> bool {
        self.lease.is_some_and(|lease| lease.is_lost)
    }

    /// Ends it: nothing is under way any more, and the lease goes back.
    fn finish(&mut self, outcome: Outcome, actions: &mut Vec<EncodeAction>) {
        // An output at a peer is written to the store behind its answer.
        let is_behind = outcome.as_ref().is_ok_and(|encoded| !encoded.peers.is_empty());
        self.let_go(if is_behind { Release::WhenStored } else { Release::Now }, actions);
        self.is_announced = true;
        actions.push(EncodeAction::Finish(outcome));
    }

    fn let_go(&mut self, release: Release, actions: &mut Vec<EncodeAction>) {
        if let Stage::Attempting(attempts) = &mut self.stage {
            actions.extend(attempts.cancel());
        }
        if self.lease.take().is_some() {
            actions.push(EncodeAction::Release(release));
        }
        self.stage = Stage::Ended;
    }
}
