//! One request from its items to its answer.
//!
//! A PD worker can begin as soon as it knows what every item will be: it lays the prompt out and reads up to the first
//! item whose rows are not there. So the request is forwarded when all items are announced, and the ends of those that
//! are still being encoded are heard while the answer is awaited. A request whose worker went away is sent again, to
//! another one, and so is one whose worker did not find an item, which is encoded again first. Once text has gone out,
//! the next worker goes on from there, unless the client does not want that; then it gets a failure that says so.
//! A request that workers died of waits for what their successors report, is tried once more alone, and is then refused
//! ([`super::deaths`]).

use super::action::{LeftItems, RequestAction};
use super::deaths::{Aboard, Lost, RequestFingerprint, Stage, Trial, Verdict};
use super::event::{BrokenCall, RequestEvent};
use super::failures::{broken_off, out_of_time, quarantined};
use super::policy::{
    ATTEMPTS, IDLE_WAIT, LAST_REPORTS, RENEWALS_PER_ITEM, SETTLE_PAUSE, TRIAL_PAUSE, WORKER_WAIT, backoff,
    item_patience, renewal_pause,
};
use super::surroundings::RequestSurroundings;
use std::time::Instant;
use triptych_core::{Failure, ItemIdx, ModelName, RequestId, WorkerId};

/// The facts of a request that decide what is done for it.
#[derive(Clone, Debug)]
pub struct RequestFacts {
    /// Its id.
    pub id: RequestId,
    /// Hash of what it asks for.
    pub fingerprint: RequestFingerprint,
    /// Its model.
    pub model: ModelName,
    /// Number of its items.
    pub n_items: usize,
    /// The PD worker that encodes its items, if PD workers do.
    pub placed: Option<WorkerId>,
    /// True if another worker may go on with a stream that broke off.
    pub is_resumable: bool,
    /// Time of its arrival.
    pub arrived: Instant,
    /// Time at which its answer must be complete.
    pub deadline: Instant,
}

/// A request that has not ended.
#[derive(Clone, Debug)]
pub struct RequestMachine {
    facts: RequestFacts,
    items: Vec<ItemProgress>,
    phase: Phase,
    /// From 1.
    attempt: u32,
    /// PD workers that had it.
    tried: Vec<WorkerId>,
    /// True if the client has a part of the answer.
    text_out: bool,
    /// The way in which it is being tried, if workers died of it.
    trial: Option<Trial>,
    /// Time until which a worker that has nothing else is waited for, once that began.
    idle_until: Option<Instant>,
}

#[derive(Clone, Debug)]
struct ItemProgress {
    state: ItemState,
    /// PD workers that hold it, if nobody else is known to.
    holders: Vec<WorkerId>,
    n_renewals: u32,
    /// Time until which it is waited for.
    until: Instant,
}

#[derive(Clone, Debug)]
enum ItemState {
    /// Nothing is known of its output.
    Unknown,
    /// Its output is described, and not there yet.
    Announced,
    /// Its output is there.
    Ready,
    /// It failed after it was read.
    Failed(Failure),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Its items are announced one after the other.
    Supplying,
    /// A PD worker is being chosen, until then.
    Choosing { until: Instant },
    /// A PD worker has it.
    Answering {
        /// True if it has written: then it has read all items, whatever is reported of them.
        wrote: bool,
    },
    /// It is sent again then.
    BackingOff { until: Instant },
    /// An item is encoded again.
    Renewing(usize),
    /// The answer is complete; reports on items that were read already are waited for until then.
    Settling { until: Instant },
    /// It has ended.
    Ended,
}

impl RequestMachine {
    /// Begins to wait for the items.
    pub fn new(facts: RequestFacts, around: &mut RequestSurroundings<'_>) -> (Self, Vec<RequestAction>) {
        let item = ItemProgress {
            state: ItemState::Unknown,
            holders: Vec::new(),
            n_renewals: 0,
            until: item_patience(around.now, facts.deadline),
        };
        let items = vec![item; facts.n_items];
        let (phase, tried) = (Phase::Supplying, Vec::new());
        let (trial, idle_until) = (None, None);
        let mut machine = Self { facts, items, phase, attempt: 1, tried, text_out: false, trial, idle_until };
        let mut actions = Vec::new();
        machine.forward_if_supplied(around, &mut actions);
        (machine, actions)
    }

    /// True if it has ended.
    pub fn has_ended(&self) -> bool {
        self.phase == Phase::Ended
    }

    /// True if a PD worker has it.
    pub fn is_answering(&self) -> bool {
        matches!(self.phase, Phase::Answering { .. })
    }

    /// Time at which it is to be woken; `None` when it has ended.
    pub fn wake_at(&self) -> Option<Instant> {
        let step = match self.phase {
            Phase::Ended => return None,
            Phase::Choosing { until } | Phase::BackingOff { until } | Phase::Settling { until } => {
                Some(until)
            }
            Phase::Supplying | Phase::Answering { .. } | Phase::Renewing(_) => {
                self.awaited().map(|(_, item)| item.until).min()
            }
        };
        Some(step.map_or(self.facts.deadline, |step| step.min(self.facts.deadline)))
    }

    /// Takes an event. One that fits nothing that is under way is ignored.
    pub fn on(&mut self, event: RequestEvent, around: &mut RequestSurroundings<'_>) -> Vec<RequestAction> {
        let mut actions = Vec::new();
        if self.has_ended() {
            return actions;
        }
        self.take(event, around, &mut actions);
        if self.has_ended() {
            self.end_trial(around);
        }
        actions
    }

    fn take(
        &mut self,
        event: RequestEvent,
        around: &mut RequestSurroundings<'_>,
        actions: &mut Vec<RequestAction>,
    ) {
        match event {
            RequestEvent::ItemAnnounced(item) => {
                if let Some(item) = self.item(item).filter(|item| matches!(item.state, ItemState::Unknown)) {
                    item.state = ItemState::Announced;
                }
                self.forward_if_supplied(around, actions);
            }
            RequestEvent::ItemReady { item: idx, holders } => {
                if let Some(item) = self.item(idx) {
                    (item.state, item.holders) = (ItemState::Ready, holders);
                }
                self.item_ended(idx, around, actions);
            }
            RequestEvent::ItemFailed { item, failure } => self.item_failed(item, failure, actions),
            RequestEvent::Worker(id) => self.chosen(id, around, actions),
            RequestEvent::Wrote { went_out } => {
                if let Phase::Answering { wrote } = &mut self.phase {
                    *wrote = true;
                    self.text_out |= went_out;
                    match went_out {
                        // The next worker would go on after it.
                        true => around.deaths.answered(&self.facts.fingerprint),
                        false => around.deaths.wrote(&self.facts.fingerprint),
                    }
                    self.end_trial(around);
                }
            }
            RequestEvent::Answered if self.is_answering() => {
                around.deaths.answered(&self.facts.fingerprint);
                self.phase = Phase::Settling { until: around.now + LAST_REPORTS };
                self.finish_if_settled(actions);
            }
            RequestEvent::Broke(call) if self.is_answering() => self.broke(call, around, actions),
            RequestEvent::Answered | RequestEvent::Broke(_) => {}
            RequestEvent::Woken => self.woken(around, actions),
        }
    }

    fn item(&mut self, idx: ItemIdx) -> Option<&mut ItemProgress> {
        self.items.get_mut(idx.0 as usize)
    }

    /// Items whose next report is waited for.
    fn awaited(&self) -> impl Iterator<Item = (usize, &ItemProgress)> {
        let phase = self.phase;
        self.items.iter().enumerate().filter(move |(i, item)| match (phase, &item.state) {
            (Phase::Supplying, ItemState::Unknown) => true,
            (Phase::Answering { wrote: false }, ItemState::Unknown | ItemState::Announced) => true,
            (Phase::Renewing(renewed), ItemState::Unknown | ItemState::Announced) => *i == renewed,
            _ => false,
        })
    }

    fn forward_if_supplied(
        &mut self,
        around: &mut RequestSurroundings<'_>,
        actions: &mut Vec<RequestAction>,
    ) {
        let is_known = |item: &ItemProgress| !matches!(item.state, ItemState::Unknown);
        if self.phase == Phase::Supplying && self.items.iter().all(is_known) {
            actions.push(RequestAction::Supplied);
            around.budget.first_try(around.now);
            self.choose(around, actions);
        }
    }

    /// A worker was chosen: it has the request, unless something became known meanwhile that speaks against that.
    fn chosen(
        &mut self,
        worker: WorkerId,
        around: &mut RequestSurroundings<'_>,
        actions: &mut Vec<RequestAction>,
    ) {
        let Phase::Choosing { .. } = self.phase else { return };
        self.fail_of_item(actions);
        if self.has_ended() {
            return;
        }
        let is_free = |around: &mut RequestSurroundings<'_>| {
            around.deaths.verdict(&self.facts.fingerprint, around.now) == Verdict::Free
        };
        if self.trial.is_none() && !is_free(around) {
            actions.push(RequestAction::GiveBack);
            return self.choose(around, actions);
        }
        self.phase = Phase::Answering { wrote: false };
        self.idle_until = None;
        self.tried.push(worker);
        actions.push(RequestAction::Send { attempt: self.attempt });
    }

    /// Chooses a worker, as far as the deaths of others allow it.
    fn choose(&mut self, around: &mut RequestSurroundings<'_>, actions: &mut Vec<RequestAction>) {
        let now = around.now;
        match around.deaths.verdict(&self.facts.fingerprint, now) {
            Verdict::Free => self.choose_any(now, actions),
            Verdict::Unsettled => self.phase = Phase::BackingOff { until: now + SETTLE_PAUSE },
            Verdict::Later => self.phase = Phase::BackingOff { until: now + TRIAL_PAUSE },
            Verdict::Refused => self.fail(quarantined(), None, LeftItems::GoOn, actions),
            Verdict::Alone => self.try_alone(around, actions),
        }
    }

    /// Chooses a worker that has nothing else; after a while any, if nobody else is tried in that way.
    fn try_alone(&mut self, around: &mut RequestSurroundings<'_>, actions: &mut Vec<RequestAction>) {
        let now = around.now;
        let until = *self.idle_until.get_or_insert(now + IDLE_WAIT);
        let trial = if now < until { Trial::Alone } else { Trial::Beside };
        if !around.deaths.begin_trial(self.facts.fingerprint, self.facts.id, trial, now) {
            return self.phase = Phase::BackingOff { until: now + TRIAL_PAUSE };
        }
        self.trial = Some(trial);
        match trial {
            Trial::Alone => {
                self.phase = Phase::Choosing { until };
                actions.push(RequestAction::ChooseIdle { tried: self.tried.clone() });
            }
            Trial::Beside => self.choose_any(now, actions),
        }
    }

    fn end_trial(&mut self, around: &mut RequestSurroundings<'_>) {
        if self.trial.take().is_some() {
            around.deaths.end_trial(&self.facts.fingerprint, self.facts.id);
        }
    }

    fn choose_any(&mut self, now: Instant, actions: &mut Vec<RequestAction>) {
        self.phase = Phase::Choosing { until: now + WORKER_WAIT };
        let held = self.items.iter().map(|item| &item.holders).find(|holders| !holders.is_empty());
        // Without such, the worker at which its items were encoded, if one was chosen for it.
        let holders = held.cloned().unwrap_or_else(|| self.facts.placed.iter().cloned().collect());
        actions.push(RequestAction::Choose { tried: self.tried.clone(), holders });
    }

    fn item_ended(
        &mut self,
        idx: ItemIdx,
        around: &mut RequestSurroundings<'_>,
        actions: &mut Vec<RequestAction>,
    ) {
        match self.phase {
            Phase::Supplying => self.forward_if_supplied(around, actions),
            Phase::Renewing(renewed) if renewed == idx.0 as usize => self.renewed(renewed, around, actions),
            Phase::Settling { .. } => self.finish_if_settled(actions),
            _ => {}
        }
    }

    /// An item was encoded again: the request is sent, after a pause if that has happened before.
    fn renewed(
        &mut self,
        item: usize,
        around: &mut RequestSurroundings<'_>,
        actions: &mut Vec<RequestAction>,
    ) {
        let pause = renewal_pause(self.items.get(item).map_or(0, |item| item.n_renewals));
        match pause.is_zero() {
            true => self.choose(around, actions),
            false => self.phase = Phase::BackingOff { until: around.now + pause },
        }
    }

    fn item_failed(&mut self, idx: ItemIdx, failure: Failure, actions: &mut Vec<RequestAction>) {
        let Some(item) = self.item(idx) else { return };
        item.state = ItemState::Failed(failure);
        match self.phase {
            // Without it an item's source is not known, and that is all.
            Phase::Settling { .. } => self.finish_if_settled(actions),
            Phase::Answering { wrote: true } => {}
            _ => self.fail_of_item(actions),
        }
    }

    /// Fails if an item has: nobody can read it any more.
    fn fail_of_item(&mut self, actions: &mut Vec<RequestAction>) {
        let failed = self.items.iter().enumerate().find_map(|(i, item)| match &item.state {
            ItemState::Failed(failure) => Some((ItemIdx(i as u32), failure.clone())),
            _ => None,
        });
        if let Some((item, failure)) = failed {
            self.fail(failure, Some(item), LeftItems::GoOn, actions);
        }
    }

    fn finish_if_settled(&mut self, actions: &mut Vec<RequestAction>) {
        let is_pending =
            |item: &ItemProgress| matches!(item.state, ItemState::Unknown | ItemState::Announced);
        let has_failed = |item: &ItemProgress| matches!(item.state, ItemState::Failed(_));
        if self.items.iter().any(has_failed) || !self.items.iter().any(is_pending) {
            self.finish(actions);
        }
    }

    fn broke(
        &mut self,
        call: BrokenCall,
        around: &mut RequestSurroundings<'_>,
        actions: &mut Vec<RequestAction>,
    ) {
        let BrokenCall { failure, missing, lost } = call;
        if let Some(lost) = lost {
            self.note_death(lost, around);
        }
        let died_alone = self.trial == Some(Trial::Alone) && lost == Some(Lost::Closed);
        self.end_trial(around);
        if died_alone {
            return self.fail(quarantined().with_detail(failure), None, LeftItems::GoOn, actions);
        }
        if self.text_out && !self.facts.is_resumable {
            return self.fail(broken_off(failure), None, LeftItems::GoOn, actions);
        }
        if let Some(item) = missing {
            // The worker is as good as any other for the next attempt.
            self.tried.pop();
            return self.renew(item, failure, around.now, actions);
        }
        let is_last = self.attempt == ATTEMPTS || !failure.class.is_retryable();
        // What a worker had that went away is not done twice, and the budget need not pay for it.
        if is_last || !(lost.is_some() || around.budget.try_spend(around.now)) {
            return self.fail(self.tell_apart(failure), None, LeftItems::GoOn, actions);
        }
        let (attempt, resumed) = (self.attempt, self.text_out);
        actions.push(RequestAction::Retry { attempt, failure, resumed });
        self.phase = Phase::BackingOff { until: around.now + backoff(attempt) };
        self.attempt += 1;
    }

    /// The worker that has it went away, and may have died of it.
    fn note_death(&self, lost: Lost, around: &mut RequestSurroundings<'_>) {
        let Some(worker) = self.tried.last() else { return };
        let stage = match self.phase {
            _ if self.trial == Some(Trial::Alone) => Stage::Alone,
            Phase::Answering { wrote: true } => Stage::Answering,
            _ => Stage::Starting,
        };
        let RequestFacts { id: request, fingerprint, .. } = self.facts;
        around.deaths.broke(worker, Aboard { request, fingerprint, stage }, lost, around.now);
    }

    fn renew(&mut self, idx: ItemIdx, failure: Failure, now: Instant, actions: &mut Vec<RequestAction>) {
        let (n, until) = (self.items.len(), item_patience(now, self.facts.deadline));
        let Some(item) = self.item(idx) else {
            let failure = Failure::internal(format!("a PD worker misses item {} of {n}", idx.0));
            return self.fail(failure, None, LeftItems::GoOn, actions);
        };
        if item.n_renewals == RENEWALS_PER_ITEM {
            return self.fail(failure, None, LeftItems::GoOn, actions);
        }
        item.n_renewals += 1;
        let was_ready = matches!(item.state, ItemState::Ready);
        if was_ready {
            (item.state, item.until) = (ItemState::Announced, until);
            item.holders.clear();
        }
        self.phase = Phase::Renewing(idx.0 as usize);
        actions.push(RequestAction::Renew { item: idx, was_ready });
        self.fail_of_item(actions);
    }

    fn woken(&mut self, around: &mut RequestSurroundings<'_>, actions: &mut Vec<RequestAction>) {
        let now = around.now;
        let late = self.awaited().find(|(_, item)| item.until <= now).map(|(i, _)| ItemIdx(i as u32));
        if now >= self.facts.deadline {
            let failure = out_of_time(self.facts.deadline.saturating_duration_since(self.facts.arrived));
            return self.fail(failure, None, LeftItems::Dropped, actions);
        }
        if let Some(item) = late {
            let failure = "an item was not encoded within the request's time; try again";
            return self.item_failed(item, Failure::unavailable(failure), actions);
        }
        match self.phase {
            Phase::Choosing { until } if until <= now && self.trial == Some(Trial::Alone) => {
                self.end_trial(around);
                self.choose(around, actions);
            }
            Phase::Choosing { until } if until <= now => {
                let failure = Failure::unavailable(format!(
                    "no decoder worker for model {:?} is there now; try again",
                    self.facts.model
                ));
                self.fail(self.tell_apart(failure), None, LeftItems::GoOn, actions);
            }
            Phase::BackingOff { until } if until <= now => self.choose(around, actions),
            Phase::Settling { until } if until <= now => self.finish(actions),
            _ => {}
        }
    }

    /// A client that has a part of the answer has to know that it is incomplete.
    fn tell_apart(&self, failure: Failure) -> Failure {
        if self.text_out { broken_off(failure) } else { failure }
    }

    fn finish(&mut self, actions: &mut Vec<RequestAction>) {
        self.phase = Phase::Ended;
        actions.push(RequestAction::Finish);
    }

    fn fail(
        &mut self,
        failure: Failure,
        item: Option<ItemIdx>,
        items: LeftItems,
        actions: &mut Vec<RequestAction>,
    ) {
        self.phase = Phase::Ended;
        actions.push(RequestAction::Fail { failure, item, items });
    }
}
