//! Rules that hold for every order of events: each thing ends once, nothing is left over, nothing is sent too often.

use super::{item, made, wanted};
use crate::request_machine::action::{AttemptId, EncodeAction, RequestAction, SendReason};
use crate::request_machine::deaths::{Deaths, Life, Lost, RequestFingerprint};
use crate::request_machine::encode::EncodeTarget;
use crate::request_machine::encodes::{EncodeId, Encodes, Leave};
use crate::request_machine::event::{BrokenCall, ChosenWorker, EncodeEvent, LeaseAnswer, RequestEvent};
use crate::request_machine::output::Origin;
use crate::request_machine::policy::{ATTEMPTS, EncodePolicy, IDLE_WAIT, RENEWALS_PER_ITEM};
use crate::request_machine::request::{RequestFacts, RequestMachine};
use crate::request_machine::retry_budget::{RetryPolicy, RetryWindow};
use crate::request_machine::surroundings::RequestSurroundings;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};
use triptych_core::{Failure, ItemIdx, ModelName, RequestId, WorkerId};

const POLICY: RetryPolicy = RetryPolicy { share: 0.2, per_second: 0.5 };
const HEDGE_AT_LEAST: Duration = Duration::from_millis(100);

/// A question that a machine asked and that was not answered yet.
#[derive(Clone, Debug)]
enum Question {
    Probe,
    Lease,
    Wait,
    Charge,
    Admit,
    Choose,
    Spare,
    Attempt(AttemptId),
}

/// The things that one encode has under way, as its actions and answers add up.
#[derive(Debug, Default)]
struct Account {
    questions: Vec<Question>,
    running: BTreeSet<AttemptId>,
    has_worker: bool,
    holds_lease: bool,
    n_leases: u32,
    n_ends: u32,
    /// Hedges since the latest question for a lease, and when the latest attempt was sent that is none.
    n_hedges: u32,
    n_sent: u32,
    sent: Option<Instant>,
    deadline: Option<Instant>,
}

struct World {
    encodes: Encodes,
    budget: RetryWindow,
    began: Instant,
    now: Instant,
    accounts: BTreeMap<EncodeId, Account>,
    subscriptions: Vec<EncodeId>,
    n_first: u64,
    n_second: u64,
}

impl World {
    fn new() -> Self {
        let policy =
            EncodePolicy { retries: POLICY, hedge_after_at_least: HEDGE_AT_LEAST, ..EncodePolicy::default() };
        let began = Instant::now();
        Self {
            encodes: Encodes::new(policy),
            budget: RetryWindow::new(POLICY, began),
            began,
            now: began,
            accounts: BTreeMap::new(),
            subscriptions: Vec::new(),
            n_first: 0,
            n_second: 0,
        }
    }

    fn subscribe(&mut self, seed: u8, origin: Origin) {
        let target = EncodeTarget {
            model: ModelName::new("m"),
            wanted: wanted(seed),
            tower_name: Default::default(),
            origin,
        };
        let due = self.now + Duration::from_secs(30);
        let was = self.encodes.of_key(&wanted(seed).key, origin);
        let subscribed = self.encodes.subscribe(target, due, &mut self.budget, self.now);
        assert_eq!(subscribed.begun.is_none(), was.is_some(), "at most one leader for a key");
        self.subscriptions.push(subscribed.id);
        if let Some(actions) = subscribed.begun {
            let deadline = Some(self.now + EncodePolicy::default().max_time);
            self.accounts.insert(subscribed.id, Account { deadline, ..Account::default() });
            self.take(subscribed.id, actions);
        }
    }

    fn tell(&mut self, id: EncodeId, event: EncodeEvent) {
        let has_ended = self.accounts[&id].n_ends > 0 || self.encodes.get(id).is_none();
        let actions = self.encodes.on(id, event, &mut self.budget, self.now);
        if has_ended {
            assert!(actions.iter().all(|action| matches!(action, EncodeAction::GiveBack)), "{actions:?}");
        }
        self.take(id, actions);
        let account = &self.accounts[&id];
        if account.deadline.is_some_and(|deadline| deadline <= self.now) && !account.questions.is_empty() {
            // Its driver wakes it then.
            assert!(self.encodes.wake_at(id).is_none_or(|at| at <= self.now));
        }
    }

    /// Books what the machine asks for.
    fn take(&mut self, id: EncodeId, actions: Vec<EncodeAction>) {
        let account = self.accounts.get_mut(&id).unwrap();
        for action in actions {
            match action {
                EncodeAction::Probe => account.questions.push(Question::Probe),
                EncodeAction::Acquire { .. } => {
                    assert!(!account.holds_lease, "a lease is held already");
                    account.questions.push(Question::Lease);
                }
                EncodeAction::Wait { .. } => account.questions.push(Question::Wait),
                EncodeAction::Charge => account.questions.push(Question::Charge),
                EncodeAction::Admit { .. } => {
                    self.n_first += 1;
                    (account.n_hedges, account.n_sent) = (0, 0);
                    account.questions.push(Question::Admit);
                }
                EncodeAction::Choose { .. } => account.questions.push(Question::Choose),
                EncodeAction::ChooseSpare { .. } => account.questions.push(Question::Spare),
                EncodeAction::GiveBack => {
                    assert!(std::mem::replace(&mut account.has_worker, false), "no worker to give back");
                }
                EncodeAction::Send { attempt, until, why, .. } => {
                    assert!(std::mem::replace(&mut account.has_worker, false), "nobody to send it to");
                    assert!(until <= account.deadline.unwrap(), "an attempt ends in the encode's time");
                    assert!(account.running.insert(attempt) && account.running.len() <= 2);
                    if account.n_sent > 0 {
                        self.n_second += 1;
                    }
                    if why == SendReason::Hedge {
                        account.n_hedges += 1;
                        assert_eq!(account.n_hedges, 1, "a job is hedged once");
                        assert!(self.now >= account.sent.unwrap() + HEDGE_AT_LEAST, "not before its delay");
                    } else {
                        account.sent = Some(self.now);
                    }
                    account.n_sent += 1;
                    assert!(account.n_sent <= ATTEMPTS + 1, "{ATTEMPTS} attempts and a hedge");
                    account.questions.push(Question::Attempt(attempt));
                }
                EncodeAction::Cancel { attempt, .. } => {
                    assert!(account.running.remove(&attempt), "it is not under way");
                }
                EncodeAction::Release(_) => {
                    assert!(std::mem::replace(&mut account.holds_lease, false), "no lease to give back");
                }
                EncodeAction::Finish(_) => {
                    account.n_ends += 1;
                    assert_eq!(account.n_ends, 1, "an encode ends once");
                }
                EncodeAction::Announce(_) | EncodeAction::Count(_) => {}
            }
        }
        if self.encodes.get(id).is_none() {
            assert!(account.running.is_empty(), "attempts are left over");
            assert!(!account.holds_lease, "a lease is left over");
        }
        let passed = self.now.duration_since(self.began).as_secs_f64() + 10.0;
        let allowed = self.n_first as f64 * POLICY.share + POLICY.per_second * passed;
        assert!(self.n_second as f64 <= allowed, "{} second tries of {allowed}", self.n_second);
    }

    /// Answers one of an encode's questions, by lot.
    fn answer(&mut self, id: EncodeId, which: usize, how: u8) {
        let account = self.accounts.get_mut(&id).unwrap();
        if account.questions.is_empty() {
            return;
        }
        let question = account.questions.remove(which % account.questions.len());
        let worker = |n: u8| ChosenWorker {
            id: WorkerId::new(format!("w{}", n % 4)),
            is_last_resort: n % 4 == 3,
            expected: n.is_multiple_of(3).then(|| Duration::from_millis(u64::from(n) * 10)),
        };
        let failure = match how % 4 {
            0 => Failure::invalid("bad"),
            1 => Failure::unavailable("gone").with_param("fence"),
            _ => Failure::unavailable("gone"),
        };
        let is_live = self.encodes.get(id).is_some();
        let event = match question {
            Question::Probe => EncodeEvent::Probed(how.is_multiple_of(4).then(|| item(1))),
            Question::Lease => EncodeEvent::Leased(match how % 4 {
                0 => None,
                1 => Some(LeaseAnswer::Held { left: Duration::from_millis(u64::from(how)) }),
                _ => {
                    // One that is granted to an encode that has ended is given back by its driver.
                    account.holds_lease = is_live;
                    account.n_leases += 1;
                    Some(LeaseAnswer::Granted { token: account.n_leases.into() })
                }
            }),
            Question::Wait => EncodeEvent::Waited(match how % 4 {
                0 => None,
                1 => Some(Some(item(1))),
                _ => Some(None),
            }),
            Question::Charge => {
                EncodeEvent::Charged(if how.is_multiple_of(8) { Err(failure) } else { Ok(()) })
            }
            Question::Admit => {
                EncodeEvent::Admitted(if how.is_multiple_of(8) { Err(failure) } else { Ok(()) })
            }
            Question::Choose => {
                account.has_worker = true;
                EncodeEvent::Worker(worker(how))
            }
            Question::Spare => {
                let spare = (!how.is_multiple_of(4)).then(|| worker(how));
                account.has_worker |= spare.is_some();
                EncodeEvent::Spare(spare)
            }
            Question::Attempt(attempt) => {
                if how % 5 == 4 && account.running.contains(&attempt) {
                    account.questions.push(Question::Attempt(attempt));
                    let p95 = Some(Duration::from_millis(u64::from(how)));
                    EncodeEvent::Announced { attempt, item: item(1), peers: Vec::new(), p95 }
                } else {
                    account.running.remove(&attempt);
                    let result = if how.is_multiple_of(5) { Ok(made(1, self.now)) } else { Err(failure) };
                    EncodeEvent::Ended { attempt, result }
                }
            }
        };
        self.tell(id, event);
    }

    /// Moves the clock, to when an encode is woken at most.
    fn advance(&mut self, ms: u64) {
        let next = self.accounts.keys().filter_map(|id| self.encodes.wake_at(*id)).min();
        let to = self.now + Duration::from_millis(ms);
        self.now = next.map_or(to, |next| next.max(self.now).min(to));
        let ids: Vec<_> = self.accounts.keys().copied().collect();
        for id in ids {
            if self.encodes.wake_at(id).is_some_and(|at| at <= self.now) {
                self.tell(id, EncodeEvent::Woken);
            }
        }
    }

    fn leave(&mut self, which: usize, leave: Leave) {
        if !self.subscriptions.is_empty() {
            let id = self.subscriptions.remove(which % self.subscriptions.len());
            let actions = self.encodes.leave(id, leave);
            self.take(id, actions);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn encodes_end_once_and_leave_nothing_whatever_the_order_of_events(
        steps in prop::collection::vec((0..10_u8, any::<u8>(), any::<u8>()), 1..200),
    ) {
        let mut world = World::new();
        for (kind, a, b) in steps {
            let ids: Vec<_> = world.accounts.keys().copied().collect();
            let one = (!ids.is_empty()).then(|| ids[usize::from(a) % ids.len()]);
            match (kind, one) {
                (0, _) | (_, None) => {
                    world.subscribe(a % 3, if b % 4 == 0 { Origin::Fresh } else { Origin::Any });
                }
                (1, _) => world.leave(a.into(), if b % 2 == 0 { Leave::GoOn } else { Leave::GiveUp }),
                (2, Some(id)) => world.tell(id, EncodeEvent::LeaseLost),
                (3, Some(id)) => world.tell(id, EncodeEvent::Woken),
                (4, _) => world.advance(u64::from(b) * 20),
                (_, Some(id)) => world.answer(id, a.into(), b),
            }
        }
        // Nobody answers any more: time ends everything that somebody still waits for.
        for _ in 0..10_000 {
            if world.encodes.is_empty() {
                break;
            }
            world.advance(1_000_000);
        }
        prop_assert!(world.encodes.is_empty());
        for account in world.accounts.values() {
            prop_assert!(account.running.is_empty() && !account.holds_lease, "{:?}", account);
        }
    }

    #[test]
    fn requests_end_once_and_are_sent_a_bounded_number_of_times_whatever_the_order_of_events(
        n_items in 0..3_usize,
        is_resumable in any::<bool>(),
        steps in prop::collection::vec((0..8_u8, any::<u8>(), 0..400_u64), 1..120),
    ) {
        let began = Instant::now();
        let deadline = began + Duration::from_secs(20);
        let (id, fingerprint) = (RequestId::from_bits(1), RequestFingerprint::from_bytes([1; 32]));
        let facts = RequestFacts {
            id, fingerprint,
            model: ModelName::new("m"), n_items, placed: None, is_resumable, arrived: began, deadline,
        };
        let mut budget = RetryWindow::new(POLICY, began);
        let mut deaths = Deaths::new([0; 32]);
        let mut around = RequestSurroundings { now: began, budget: &mut budget, deaths: &mut deaths };
        let (mut machine, mut actions) = RequestMachine::new(facts, &mut around);
        // Deaths before it wrote and after, and since when it has been waiting for an idle worker.
        let (mut n_starting, mut n_answering, mut wrote, mut idle_since) = (0, 0, false, None);
        let (mut is_alone, mut died_alone) = (false, false);
        let (mut now, mut n_sent, mut n_ends, mut n_chosen) = (began, 0, 0, 0);
        let mut renewals = vec![0; n_items];
        let mut is_calling = false;
        for (kind, a, ms) in steps.into_iter().chain(std::iter::repeat_n((99, 0, 1000), 100)) {
            for action in actions.drain(..) {
                prop_assert_eq!(n_ends, 0, "nothing after the end");
                match action {
                    RequestAction::Choose { .. } | RequestAction::ChooseIdle { .. } => {
                        prop_assert!(!is_calling);
                        is_alone = matches!(action, RequestAction::ChooseIdle { .. });
                        let n_died = n_starting + n_answering;
                        prop_assert!(n_died <= 2 && !died_alone, "{n_died} workers died of it");
                        prop_assert!(!is_alone || n_died == 2, "{n_died} workers died of it");
                        if is_alone {
                            idle_since.get_or_insert(now);
                        }
                        let waited = idle_since.is_some_and(|since| now - since >= IDLE_WAIT);
                        prop_assert!(is_alone || n_died < 2 || waited, "an idle worker is waited for");
                        n_chosen += 1;
                    }
                    RequestAction::Send { .. } => {
                        (wrote, idle_since) = (false, None);
                        n_sent += 1;
                        prop_assert!(n_sent <= n_chosen && !is_calling, "one call at a time");
                        is_calling = true;
                    }
                    RequestAction::Renew { item, .. } => renewals[item.0 as usize] += 1,
                    RequestAction::Finish | RequestAction::Fail { .. } => n_ends += 1,
                    RequestAction::Supplied | RequestAction::Retry { .. } | RequestAction::GiveBack => {}
                }
            }
            prop_assert!(renewals.iter().all(|n| *n <= RENEWALS_PER_ITEM));
            prop_assert!(n_sent <= ATTEMPTS + RENEWALS_PER_ITEM * n_items as u32);
            let item = ItemIdx(u32::from(a) % (n_items as u32 + 1));
            let failure = if a % 3 == 0 { Failure::invalid("no") } else { Failure::unavailable("gone") };
            let event = match kind {
                0 => RequestEvent::ItemAnnounced(item),
                1 => RequestEvent::ItemReady { item, holders: Vec::new() },
                2 if a % 8 == 0 => RequestEvent::ItemFailed { item, failure },
                2 | 3 => RequestEvent::Worker(WorkerId::new(format!("w{}", a % 3))),
                4 => {
                    if is_calling {
                        (wrote, n_starting) = (true, 0);
                        n_answering *= i32::from(a % 2);
                    }
                    RequestEvent::Wrote { went_out: a % 2 == 0 }
                }
                5 if a % 4 == 0 => { is_calling = false; RequestEvent::Answered }
                5 | 6 if a % 8 == 7 => {
                    if std::mem::take(&mut is_calling) {
                        if wrote { n_answering += 1 } else { n_starting += 1 }
                        died_alone |= is_alone && !wrote;
                    }
                    RequestEvent::Broke(BrokenCall { failure, missing: None, lost: Some(Lost::Closed) })
                }
                5 | 6 => {
                    is_calling = false;
                    let missing = (a % 2 == 0).then_some(item);
                    RequestEvent::Broke(BrokenCall { failure, missing, lost: None })
                }
                _ => { now += Duration::from_millis(ms); RequestEvent::Woken }
            };
            actions = machine.on(event, &mut RequestSurroundings { now, budget: &mut budget, deaths: &mut deaths });
            // The successor says nothing.
            (0..3).for_each(|w| deaths.lives(&WorkerId::new(format!("w{w}")), Life::Other, &[], now));
            if now >= deadline && kind >= 7 {
                prop_assert!(machine.has_ended(), "the deadline is respected");
            }
        }
        prop_assert!(machine.has_ended() && n_ends + actions.len() >= 1);
    }
}
