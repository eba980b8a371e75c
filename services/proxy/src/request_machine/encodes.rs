//! All encodes of a proxy: outputs that it knows of, and single-flight for those that it does not.
//!
//! From the cheapest to the dearest: an output that was READY a moment ago, one that a PD worker holds, and at last an
//! [`InFlightEncode`], of which there is one for each key at most. Requests subscribe to it; when the last one leaves,
//! its work is cancelled, unless it was left behind by a request that failed, since that will be sent again.

use super::action::EncodeAction;
use super::encode::{EncodeTarget, InFlightEncode};
use super::event::EncodeEvent;
use super::output::{Belief, Encoded, Origin};
use super::pace::Pace;
use super::policy::{EncodePolicy, LEFT_BEHIND};
use super::recents::Recents;
use super::retry_budget::RetryWindow;
use super::surroundings::Surroundings;
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;
use triptych_core::lifetime::ItemSource;
use triptych_core::{ContentKey, EncodedItem, WorkerId};

/// Name of an in-flight encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EncodeId(pub u64);

/// The encodes of a proxy.
#[derive(Debug)]
pub struct Encodes {
    policy: EncodePolicy,
    recents: Recents,
    pace: Pace,
    by_key: HashMap<(ContentKey, Origin), EncodeId>,
    in_flight: HashMap<EncodeId, Shared>,
    n_begun: u64,
    /// Encodes that go on for requests that failed.
    n_left_behind: usize,
    /// True if the process stops: then nothing goes on for requests that failed.
    is_stopping: bool,
}

/// An encode, and who has an interest in it. It is in the table for as long as anybody has.
#[derive(Debug)]
struct Shared {
    encode: InFlightEncode,
    n_subscribers: usize,
    n_left_behind: usize,
}

/// A request's part in an encode.
#[derive(Clone, Debug)]
pub struct Subscribed {
    /// The encode.
    pub id: EncodeId,
    /// Its first actions, if the request began it; `None`: it joined one that is in flight.
    pub begun: Option<Vec<EncodeAction>>,
}

/// The way in which a request leaves an encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// It needs the output no more.
    GiveUp,
    /// It failed, and the client that sends it again will need the output.
    GoOn,
}

/// The way to an output that a PD worker did not find.
#[derive(Clone, Debug)]
pub enum Renewal {
    /// It was made again meanwhile.
    Ready(Box<Encoded>),
    /// It has to be encoded.
    Encode(Origin),
}

impl Encodes {
    /// No encodes.
    pub fn new(policy: EncodePolicy) -> Self {
        Self {
            policy,
            recents: Recents::new(policy.remembered, policy.believed_for),
            pace: Pace::default(),
            by_key: HashMap::new(),
            in_flight: HashMap::new(),
            n_begun: 0,
            n_left_behind: 0,
            is_stopping: false,
        }
    }

    /// Outputs that need no question to the store: those that were READY a moment ago, and those of which a PD worker
    /// holds as many of the others as any does. `holders` names the PD workers that hold an output.
    pub fn known(
        &self,
        keys: &[ContentKey],
        holders: impl Fn(&ContentKey) -> Vec<WorkerId>,
        now: Instant,
    ) -> Vec<Option<Encoded>> {
        let young = |key: &ContentKey| {
            let (item, peers) = self.recents.young(key, now)?;
            Some(Encoded { peers, ..Encoded::found(item, Belief::Remembered, now) })
        };
        let mut known: Vec<_> = keys.iter().map(young).collect();
        let held = |(key, known): (&ContentKey, &Option<Encoded>)| match self.recents.described(key) {
            Some(item) if known.is_none() => Some((item, holders(key))),
            _ => None,
        };
        let held: Vec<Option<(EncodedItem, Vec<WorkerId>)>> = keys.iter().zip(&known).map(held).collect();
        let all: Vec<_> = held.iter().flatten().map(|(_, by)| by.as_slice()).collect();
        let Some(best) = holder_of_most(&all) else { return known };
        for (known, held) in known.iter_mut().zip(held) {
            if let Some((item, _)) = held.filter(|(_, by)| by.contains(&best)) {
                let holders = vec![best.clone()];
                *known = Some(Encoded { holders, ..Encoded::found(item, Belief::Resident, now) });
            }
        }
        known
    }

    /// The way to an output again that a PD worker did not find, or found corrupt; `lost` is what the request believed
    /// of it.
    pub fn renewal(&mut self, lost: &Encoded, now: Instant) -> Renewal {
        if let Some((item, peers)) = self.recents.renewed(&lost.item.key, lost.at) {
            let found = Encoded::found(item, Belief::Remembered, now);
            return Renewal::Ready(Box::new(Encoded { peers, source: ItemSource::Shared, ..found }));
        }
        Renewal::Encode(match lost.belief {
            // The store was not asked: it may have it.
            Belief::Remembered | Belief::Resident => Origin::Any,
            Belief::Stored | Belief::Made => Origin::Fresh,
        })
    }

    /// Joins the encode of a key, or begins it. The output is needed at `due`.
    pub fn subscribe(
        &mut self,
        target: EncodeTarget,
        due: Instant,
        budget: &mut RetryWindow,
        now: Instant,
    ) -> Subscribed {
        let key = (target.wanted.key, target.origin);
        let id = self.by_key.get(&key).copied();
        if let Some((id, shared)) = id.and_then(|id| Some((id, self.in_flight.get_mut(&id)?))) {
            shared.n_subscribers += 1;
            shared.encode.extend(due);
            return Subscribed { id, begun: None };
        }
        let id = EncodeId(self.n_begun);
        self.n_begun += 1;
        let mut around = Surroundings { now, budget, pace: &mut self.pace };
        let (encode, actions) = InFlightEncode::new(target, self.policy, due, &mut around);
        self.by_key.insert(key, id);
        self.in_flight.insert(id, Shared { encode, n_subscribers: 1, n_left_behind: 0 });
        Subscribed { id, begun: Some(actions) }
    }

    /// Takes an event of an encode. One that has ended, or that nobody waits for, has no actions.
    pub fn on(
        &mut self,
        id: EncodeId,
        event: EncodeEvent,
        budget: &mut RetryWindow,
        now: Instant,
    ) -> Vec<EncodeAction> {
        let Some(shared) = self.in_flight.get_mut(&id) else {
            let has_worker = matches!(event, EncodeEvent::Worker(_) | EncodeEvent::Spare(Some(_)));
            return if has_worker { vec![EncodeAction::GiveBack] } else { Vec::new() };
        };
        let mut around = Surroundings { now, budget, pace: &mut self.pace };
        let actions = shared.encode.on(event, &mut around);
        if let Some(EncodeAction::Finish(outcome)) = actions.last() {
            if let Ok(encoded) = outcome {
                self.recents.note(&encoded.item, &encoded.peers, encoded.at);
            }
            self.remove(id);
        }
        actions
    }

    /// A request leaves. When nobody is left, the encode is cancelled.
    pub fn leave(&mut self, id: EncodeId, leave: Leave) -> Vec<EncodeAction> {
        let has_room = !self.is_stopping && self.n_left_behind < LEFT_BEHIND;
        let Some(shared) = self.in_flight.get_mut(&id) else { return Vec::new() };
        shared.n_subscribers = shared.n_subscribers.saturating_sub(1);
        if leave == Leave::GoOn && has_room {
            shared.n_left_behind += 1;
            self.n_left_behind += 1;
        }
        self.cancel_if_unneeded(id)
    }

    /// The process stops: what only goes on for requests that failed ends. The encodes that it cancelled.
    pub fn stop_left_behind(&mut self) -> Vec<(EncodeId, Vec<EncodeAction>)> {
        let mut left: Vec<_> =
            self.in_flight.iter().filter(|(_, one)| one.n_left_behind > 0).map(|(id, _)| *id).collect();
        left.sort_unstable();
        self.n_left_behind = 0;
        self.is_stopping = true;
        let stop = |id| {
            if let Some(shared) = self.in_flight.get_mut(&id) {
                shared.n_left_behind = 0;
            }
            (id, self.cancel_if_unneeded(id))
        };
        left.into_iter().map(stop).collect()
    }

    /// The work on an encode is gone without an end: the next request begins anew.
    pub fn forget(&mut self, id: EncodeId) {
        self.remove(id);
    }

    /// Time at which an encode is to be woken; `None` if it is not in flight.
    pub fn wake_at(&self, id: EncodeId) -> Option<Instant> {
        self.in_flight.get(&id)?.encode.wake_at()
    }

    /// An encode, while it is in flight.
    pub fn get(&self, id: EncodeId) -> Option<&InFlightEncode> {
        self.in_flight.get(&id).map(|shared| &shared.encode)
    }

    /// The encode of a key that is in flight.
    pub fn of_key(&self, key: &ContentKey, origin: Origin) -> Option<EncodeId> {
        self.by_key.get(&(*key, origin)).copied()
    }

    /// Number of encodes in flight.
    pub fn len(&self) -> usize {
        self.in_flight.len()
    }

    /// True if no encode is in flight.
    pub fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }

    fn cancel_if_unneeded(&mut self, id: EncodeId) -> Vec<EncodeAction> {
        let is_unneeded = |one: &&mut Shared| one.n_subscribers == 0 && one.n_left_behind == 0;
        let Some(shared) = self.in_flight.get_mut(&id).filter(is_unneeded) else { return Vec::new() };
        let actions = shared.encode.abandon();
        self.remove(id);
        actions
    }

    fn remove(&mut self, id: EncodeId) {
        let Some(shared) = self.in_flight.remove(&id) else { return };
        self.n_left_behind = self.n_left_behind.saturating_sub(shared.n_left_behind);
        let target = shared.encode.target();
        let key = (target.wanted.key, target.origin);
        if self.by_key.get(&key) == Some(&id) {
            self.by_key.remove(&key);
        }
    }
}

/// The worker that holds most of the outputs, each of which has a list of holders; the first by name if several do.
pub fn holder_of_most(held: &[&[WorkerId]]) -> Option<WorkerId> {
    let mut n_held: BTreeMap<&WorkerId, usize> = BTreeMap::new();
    for holder in held.iter().copied().flatten() {
        *n_held.entry(holder).or_default() += 1;
    }
    // Of equals `max_by_key` takes the last.
    n_held.into_iter().rev().max_by_key(|(_, n)| *n).map(|(id, _)| id.clone())
}
