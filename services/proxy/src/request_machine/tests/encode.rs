//! Encodes over workers and a store of paper, on a hand-moved clock: who is asked when, and what it costs.

use super::{item, made, wanted};
use crate::request_machine::action::{
    AttemptId, CancelReason, Counted, EncodeAction, LeaseOutcome, Release, SendReason,
};
use crate::request_machine::encode::EncodeTarget;
use crate::request_machine::encodes::{EncodeId, Encodes, Leave, Renewal, holder_of_most};
use crate::request_machine::event::{ChosenWorker, EncodeEvent, LeaseAnswer};
use crate::request_machine::output::{Belief, Encoded, Origin, Outcome};
use crate::request_machine::policy::{ATTEMPTS, EncodePolicy, PAUSES, WORKER_WAIT};
use crate::request_machine::retry_budget::{RetryPolicy, RetryWindow};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};
use triptych_core::lifetime::ItemSource;
use triptych_core::{EncodedItem, Failure, FailureClass, ModelName, WorkerId};

const MS: Duration = Duration::from_millis(1);
/// The time after which a job is hedged.
const DELAY: Duration = Duration::from_millis(300);
const GENEROUS: RetryPolicy = RetryPolicy { share: 0.2, per_second: 5.0 };
const NOTHING: RetryPolicy = RetryPolicy { share: 0.0, per_second: 0.0 };

/// A worker's part in one job.
#[derive(Clone)]
enum Does {
    /// READY after so long.
    Ready(Duration),
    /// Fails after so long.
    Fails(Duration, Failure),
    /// Announces the output and the p95 of such jobs, then is READY.
    Announces(Duration, Duration, Duration),
}

/// Everything around one encode.
struct Paper {
    encodes: Encodes,
    budget: RetryWindow,
    began: Instant,
    now: Instant,
    workers: Vec<(WorkerId, VecDeque<Does>)>,
    /// The store's answers; then it has nothing.
    probes: VecDeque<Option<EncodedItem>>,
    /// The store's answers about the lease; then it is granted.
    leases: VecDeque<Option<LeaseAnswer>>,
    /// The results of waits, each after so long.
    waits: VecDeque<(Duration, Option<Option<EncodedItem>>)>,
    chosen: Option<ChosenWorker>,
    to_come: Vec<(Instant, EncodeEvent)>,
    /// Workers that were asked, and when.
    asked: Vec<(String, Duration)>,
    why: Vec<SendReason>,
    fences: Vec<u64>,
    cancelled: Vec<CancelReason>,
    released: Vec<Release>,
    counted: Vec<Counted>,
    announced: usize,
    end: Option<Outcome>,
}

impl Paper {
    fn new(workers: &[(&str, &[Does])], retries: RetryPolicy) -> Self {
        let policy = EncodePolicy {
            retries,
            hedge_after_unknown: DELAY,
            hedge_after_at_least: MS,
            ..EncodePolicy::default()
        };
        let began = Instant::now();
        let worker = |(name, does): &(&str, &[Does])| (WorkerId::new(*name), does.iter().cloned().collect());
        Self {
            encodes: Encodes::new(policy),
            budget: RetryWindow::new(retries, began),
            began,
            now: began,
            workers: workers.iter().map(worker).collect(),
            probes: VecDeque::new(),
            leases: VecDeque::new(),
            waits: VecDeque::new(),
            chosen: None,
            to_come: Vec::new(),
            asked: Vec::new(),
            why: Vec::new(),
            fences: Vec::new(),
            cancelled: Vec::new(),
            released: Vec::new(),
            counted: Vec::new(),
            announced: 0,
            end: None,
        }
    }

    fn target(origin: Origin) -> EncodeTarget {
        EncodeTarget { model: ModelName::new("m"), wanted: wanted(1), tower_name: Default::default(), origin }
    }

    /// Runs an encode to its end.
    fn run(&mut self) -> &mut Self {
        self.run_from(Origin::Any)
    }

    fn run_from(&mut self, origin: Origin) -> &mut Self {
        self.run_target(Self::target(origin))
    }

    fn run_target(&mut self, target: EncodeTarget) -> &mut Self {
        let due = self.now + Duration::from_secs(60);
        let subscribed = self.encodes.subscribe(target, due, &mut self.budget, self.now);
        let id = subscribed.id;
        self.perform(id, subscribed.begun.expect("nobody else has begun it"));
        while self.end.is_none() {
            self.step(id);
        }
        assert!(self.encodes.is_empty());
        self
    }

    /// The next event: of what is under way, before the time.
    fn step(&mut self, id: EncodeId) {
        let woken = self.encodes.wake_at(id).expect("an encode that has not ended is woken at last");
        let next =
            self.to_come.iter().enumerate().min_by_key(|(_, (at, _))| *at).map(|(i, (at, _))| (i, *at));
        let event = match next.filter(|(_, at)| *at <= woken) {
            Some((i, at)) => {
                self.now = at;
                self.to_come.remove(i).1
            }
            None => {
                // What was due before it was known is due now.
                self.now = woken.max(self.now);
                EncodeEvent::Woken
            }
        };
        let actions = self.encodes.on(id, event, &mut self.budget, self.now);
        self.perform(id, actions);
    }

    fn after(&mut self, pause: Duration, event: EncodeEvent) {
        self.to_come.push((self.now + pause, event));
    }

    fn choose(&mut self, tried: &[WorkerId], only_new: bool) -> Option<ChosenWorker> {
        let new = self.workers.iter().map(|(id, _)| id).find(|id| !tried.contains(id));
        let id = new.or(self.workers.first().map(|(id, _)| id).filter(|_| !only_new))?.clone();
        let is_last_resort = id.as_str().starts_with("pd");
        Some(ChosenWorker { id, is_last_resort, expected: None })
    }

    fn perform(&mut self, id: EncodeId, actions: Vec<EncodeAction>) {
        for action in actions {
            assert!(self.end.is_none(), "no action follows the end: {action:?}");
            let now = match action {
                EncodeAction::Probe => Some(EncodeEvent::Probed(self.probes.pop_front().flatten())),
                EncodeAction::Acquire { .. } => {
                    let granted = Some(LeaseAnswer::Granted { token: 7 });
                    Some(EncodeEvent::Leased(self.leases.pop_front().unwrap_or(granted)))
                }
                EncodeAction::Wait { patience } => {
                    let (after, found) = self.waits.pop_front().unwrap_or((patience, Some(None)));
                    self.after(after, EncodeEvent::Waited(found));
                    None
                }
                EncodeAction::Charge => Some(EncodeEvent::Charged(Ok(()))),
                EncodeAction::Admit { .. } => Some(EncodeEvent::Admitted(Ok(()))),
                EncodeAction::Choose { tried } => {
                    self.chosen = self.choose(&tried, false);
                    self.chosen.clone().map(EncodeEvent::Worker)
                }
                EncodeAction::ChooseSpare { tried } => {
                    self.chosen = self.choose(&tried, true);
                    Some(EncodeEvent::Spare(self.chosen.clone()))
                }
                EncodeAction::Send { attempt, fence, why, .. } => {
                    self.why.push(why);
                    self.fences.push(fence);
                    self.send(attempt);
                    None
                }
                EncodeAction::Cancel { attempt, why } => {
                    self.cancelled.push(why);
                    let is_its = |event: &EncodeEvent| matches!(event, EncodeEvent::Ended { attempt: a, .. } if *a == attempt);
                    self.to_come.retain(|(_, event)| !is_its(event));
                    None
                }
                EncodeAction::GiveBack => {
                    self.chosen = None;
                    None
                }
                EncodeAction::Release(release) => {
                    self.released.push(release);
                    None
                }
                EncodeAction::Announce(announced) => {
                    assert!(announced.pending);
                    self.announced += 1;
                    None
                }
                EncodeAction::Count(counted) => {
                    self.counted.push(counted);
                    None
                }
                EncodeAction::Finish(outcome) => {
                    self.end = Some(outcome);
                    None
                }
            };
            if let Some(event) = now {
                let more = self.encodes.on(id, event, &mut self.budget, self.now);
                self.perform(id, more);
            }
        }
    }

    /// The chosen worker's answers to an attempt.
    fn send(&mut self, attempt: AttemptId) {
        let worker = self.chosen.take().expect("it was chosen").id;
        self.asked.push((worker.to_string(), self.now - self.began));
        let (_, does) = self.workers.iter_mut().find(|(id, _)| *id == worker).unwrap();
        match does.pop_front().unwrap_or(Does::Ready(MS)) {
            Does::Ready(after) => {
                let result = Ok(made(1, self.now + after));
                self.after(after, EncodeEvent::Ended { attempt, result });
            }
            Does::Fails(after, failure) => {
                self.after(after, EncodeEvent::Ended { attempt, result: Err(failure) });
            }
            Does::Announces(after, p95, ready) => {
                let (item, peers) = (item(1), Vec::new());
                let p95 = Some(p95);
                self.after(after, EncodeEvent::Announced { attempt, item, peers, p95 });
                let result = Ok(made(1, self.now + ready));
                self.after(ready, EncodeEvent::Ended { attempt, result });
            }
        }
    }

    fn names(&self) -> Vec<&str> {
        self.asked.iter().map(|(name, _)| name.as_str()).collect()
    }

    fn took(&self) -> Duration {
        self.now - self.began
    }

    fn encoded(&self) -> &Encoded {
        self.end.as_ref().unwrap().as_ref().unwrap()
    }

    fn failure(&self) -> &Failure {
        self.end.as_ref().unwrap().as_ref().unwrap_err()
    }
}

fn unavailable() -> Failure {
    Failure::unavailable("not now")
}

fn fails(n: usize) -> Vec<Does> {
    vec![Does::Fails(MS, unavailable()); n]
}

#[test]
fn a_job_that_is_done_in_its_time_is_sent_once_and_its_lease_goes_back() {
    let mut paper = Paper::new(&[("a", &[Does::Ready(DELAY - MS)]), ("b", &[])], GENEROUS);
    paper.run();
    assert_eq!((paper.names(), paper.why.as_slice()), (vec!["a"], &[SendReason::First][..]));
    assert_eq!((paper.fences.as_slice(), paper.released.as_slice()), (&[7][..], &[Release::Now][..]));
    assert_eq!(paper.counted, [Counted::Lease(LeaseOutcome::Granted)]);
    assert_eq!(paper.encoded().source, ItemSource::Encoded);
}

#[test]
fn what_the_store_has_is_not_encoded_whenever_it_says_so() {
    for (probes, leases, waits, source) in [
        (vec![Some(item(1))], vec![], vec![], ItemSource::Cached),
        (vec![None, Some(item(1))], vec![], vec![], ItemSource::Shared),
        (
            vec![None],
            vec![Some(LeaseAnswer::Held { left: DELAY })],
            vec![(MS, Some(Some(item(1))))],
            ItemSource::Shared,
        ),
    ] {
        let mut paper = Paper::new(&[("a", &[])], GENEROUS);
        (paper.probes, paper.leases, paper.waits) = (probes.into(), leases.into(), waits.into());
        paper.run();
        assert_eq!((paper.encoded().source, paper.asked.len()), (source, 0));
        // It is remembered: the next request does not ask.
        let known = paper.encodes.known(&[wanted(1).key], |_| Vec::new(), paper.now);
        assert_eq!(known[0].as_ref().map(|one| one.belief), Some(Belief::Remembered));
    }
}

#[test]
fn a_lease_that_is_held_is_asked_for_again_not_in_a_tight_loop_and_taken_over() {
    let mut paper = Paper::new(&[("a", &[])], GENEROUS);
    let held = Some(LeaseAnswer::Held { left: DELAY });
    paper.leases = [held, held, held, Some(LeaseAnswer::Granted { token: 9 })].into();
    // Waits that end at once, one after the other.
    paper.waits = [(Duration::ZERO, Some(None)), (Duration::ZERO, Some(None)), (DELAY, Some(None))].into();
    paper.run();
    assert_eq!(paper.took(), PAUSES.0 + PAUSES.0 * 2 + DELAY + MS);
    assert_eq!(paper.counted, [Counted::Lease(LeaseOutcome::TakenOver)]);
    assert_eq!(paper.fences, [9]);
    // A store that does not answer stops nobody.
    let mut paper = Paper::new(&[("a", &[])], GENEROUS);
    paper.leases = [None].into();
    paper.run();
    assert_eq!((paper.fences.as_slice(), paper.released.len()), (&[0][..], 0));
    // What the store shows was found to be bad: only the lease tells when another has replaced it.
    let mut paper = Paper::new(&[("a", &[])], GENEROUS);
    (paper.leases, paper.probes) = ([held].into(), [Some(item(1))].into());
    paper.run_from(Origin::Fresh);
    assert_eq!((paper.took(), paper.asked.len()), (PAUSES.0, 0));
}

#[test]
fn the_hedge_goes_out_exactly_after_its_delay_and_the_first_ready_wins() {
    let slow = [Does::Ready(10 * DELAY)];
    let mut paper = Paper::new(&[("a", &slow), ("b", &[Does::Ready(20 * MS)]), ("c", &[])], GENEROUS);
    paper.run();
    assert_eq!(paper.asked, [("a".to_owned(), Duration::ZERO), ("b".to_owned(), DELAY)]);
    assert_eq!(paper.why, [SendReason::First, SendReason::Hedge]);
    assert_eq!((paper.took(), paper.cancelled.as_slice()), (DELAY + 20 * MS, &[CancelReason::Unneeded][..]));
    // The first may still win.
    let mut paper = Paper::new(&[("a", &[Does::Ready(DELAY + MS)]), ("b", &slow)], GENEROUS);
    paper.run();
    assert_eq!((paper.took(), paper.names().len(), paper.cancelled.len()), (DELAY + MS, 2, 1));
}

#[test]
fn a_job_is_hedged_once_and_only_to_a_worker_that_has_not_had_it() {
    let slow = [Does::Ready(10 * DELAY)];
    let mut paper = Paper::new(&[("a", &slow), ("b", &slow), ("c", &slow)], GENEROUS);
    assert_eq!(paper.run().names(), ["a", "b"]);
    let mut alone = Paper::new(&[("a", &slow)], GENEROUS);
    alone.run();
    assert_eq!((alone.names().len(), alone.took()), (1, 10 * DELAY));
}

#[test]
fn without_budget_there_is_neither_hedge_nor_retry() {
    let mut paper = Paper::new(&[("a", &[Does::Ready(10 * DELAY)]), ("b", &[])], NOTHING);
    paper.run();
    assert!(paper.counted.contains(&Counted::UnpaidHedge) && paper.chosen.is_none());
    assert_eq!((paper.took(), paper.names().len()), (10 * DELAY, 1));
    let mut paper = Paper::new(&[("a", &fails(1)), ("b", &[])], NOTHING);
    paper.run();
    assert!(paper.counted.contains(&Counted::UnpaidRetry));
    assert_eq!(*paper.failure(), unavailable());
}

#[test]
fn a_failed_job_goes_elsewhere_at_last_to_a_pd_worker_and_is_given_up_in_the_end() {
    let mut paper = Paper::new(&[("a", &fails(1)), ("b", &fails(1)), ("pd", &[])], GENEROUS);
    paper.run();
    assert_eq!(paper.names(), ["a", "b", "pd"]);
    assert_eq!(paper.why, [SendReason::First, SendReason::Retry, SendReason::Fallback]);
    let mut paper = Paper::new(&[("a", &fails(9)), ("b", &fails(9))], GENEROUS);
    assert_eq!(*paper.run().failure(), unavailable());
    assert_eq!(paper.names().len(), ATTEMPTS as usize);
    let mut nobody = Paper::new(&[], GENEROUS);
    assert_eq!(nobody.run().failure().class, FailureClass::Unavailable);
    assert_eq!(nobody.took(), WORKER_WAIT);
}

#[test]
fn a_hedge_that_fails_leaves_the_first_its_time_and_the_items_own_fault_ends_both() {
    let slow = [Does::Ready(2 * DELAY)];
    let mut paper = Paper::new(&[("a", &slow), ("b", &fails(1)), ("c", &[])], GENEROUS);
    paper.run();
    assert_eq!((paper.names(), paper.took()), (vec!["a", "b"], 2 * DELAY));
    let broken = Failure::invalid("the JPEG is cut off");
    let mut paper = Paper::new(&[("a", &slow), ("b", &[Does::Fails(MS, broken.clone())])], GENEROUS);
    assert_eq!(*paper.run().failure(), broken);
    assert_eq!(paper.cancelled, [CancelReason::Unneeded]);
}

#[test]
fn a_job_whose_lease_is_anothers_is_begun_anew_under_a_newer_one_and_without_one_in_the_end() {
    let refused = vec![Does::Fails(MS, unavailable().with_param("fence")); 9];
    let mut paper = Paper::new(&[("a", &refused)], GENEROUS);
    paper.run();
    assert_eq!(paper.failure().message, "the item is encoded by another part; try again");
    assert_eq!(paper.fences, [7, 7, 0, 0, 0, 0]);
    assert_eq!(paper.released.len(), 6, "each lease goes back");
}

#[test]
fn the_hedge_delay_follows_what_is_announced_of_the_job() {
    let slow = 20 * DELAY;
    for (learned, expect) in [(5 * DELAY, 5 * DELAY), (DELAY / 2, DELAY / 2), (MS, 10 * MS)] {
        let announces = [Does::Announces(10 * MS, learned, slow)];
        let mut paper = Paper::new(&[("a", &announces), ("b", &[Does::Ready(slow)])], GENEROUS);
        paper.run();
        assert_eq!(paper.asked[1], ("b".to_owned(), expect), "{learned:?}");
        assert_eq!(paper.announced, 1);
    }
}

#[test]
fn an_attempt_that_takes_far_too_long_is_cancelled_and_sent_elsewhere() {
    let never = [Does::Ready(Duration::from_secs(1000))];
    let mut paper = Paper::new(&[("a", &never), ("b", &never), ("c", &[])], GENEROUS);
    paper.run();
    assert_eq!(paper.names(), ["a", "b", "c"]);
    assert!(paper.cancelled.contains(&CancelReason::TimedOut));
    let mut paper = Paper::new(&[("a", &never), ("b", &never), ("c", &never), ("d", &never)], GENEROUS);
    assert_eq!(paper.run().failure().class, FailureClass::DeadlineExceeded);
    assert_eq!(paper.took(), EncodePolicy::default().max_time);
}

#[test]
fn requests_share_an_encode_until_the_last_one_leaves_and_one_that_failed_lets_it_go_on() {
    let mut paper = Paper::new(&[("a", &[])], GENEROUS);
    let (now, due) = (paper.now, paper.now + DELAY);
    let target = || Paper::target(Origin::Any);
    let first = paper.encodes.subscribe(target(), due, &mut paper.budget, now);
    let second = paper.encodes.subscribe(target(), due, &mut paper.budget, now);
    assert!(first.begun.is_some() && second.begun.is_none() && first.id == second.id);
    let fresh = paper.encodes.subscribe(Paper::target(Origin::Fresh), due, &mut paper.budget, now);
    assert_ne!(fresh.id, first.id, "the store may not answer for that one");
    paper.encodes.leave(fresh.id, Leave::GiveUp);
    assert!(paper.encodes.leave(first.id, Leave::GiveUp).is_empty());
    assert_eq!(paper.encodes.len(), 1);
    paper.encodes.leave(second.id, Leave::GoOn);
    assert_eq!(paper.encodes.len(), 1, "it goes on for the next request");
    assert_eq!(paper.encodes.stop_left_behind().len(), 1);
    assert!(paper.encodes.is_empty());
    let third = paper.encodes.subscribe(target(), due, &mut paper.budget, now);
    assert!(third.begun.is_some(), "what nobody waits for is joined by nobody");
    paper.encodes.leave(third.id, Leave::GoOn);
    assert!(paper.encodes.is_empty(), "the process stops");
}

#[test]
fn the_known_outputs_are_those_of_the_worker_that_holds_most() {
    let ids = |names: &[&str]| names.iter().map(|name| WorkerId::new(*name)).collect::<Vec<_>>();
    let cases: [(&[&[&str]], Option<&str>); 5] = [
        (&[], None),
        (&[&[], &[]], None),
        (&[&["b", "a"]], Some("a")),
        (&[&["a"], &["b"], &["b", "a"], &["b"]], Some("b")),
        (&[&["c"], &["b"]], Some("b")),
    ];
    for (held, expect) in cases {
        let held: Vec<_> = held.iter().map(|names| ids(names)).collect();
        let held: Vec<_> = held.iter().map(Vec::as_slice).collect();
        assert_eq!(holder_of_most(&held), expect.map(WorkerId::new), "{held:?}");
    }
    // Long after it was READY, an output is described and may be on a PD worker.
    let mut paper = Paper::new(&[("a", &[])], GENEROUS);
    paper.run();
    let later = paper.now + Duration::from_secs(60);
    let known = paper.encodes.known(&[wanted(1).key, wanted(2).key], |_| ids(&["pd"]), later);
    assert_eq!(
        known[0].as_ref().map(|one| (one.belief, one.holders.clone())),
        Some((Belief::Resident, ids(&["pd"])))
    );
    assert!(known[1].is_none(), "nobody knows what it is");
}

#[test]
fn an_output_that_was_lost_is_looked_for_as_far_as_the_store_was_not_asked() {
    let mut paper = Paper::new(&[("a", &[])], GENEROUS);
    paper.run();
    let lost = paper.encoded().clone();
    let is_origin = |renewal: Renewal, expect| matches!(renewal, Renewal::Encode(origin) if origin == expect);
    assert!(is_origin(paper.encodes.renewal(&lost, paper.now), Origin::Fresh));
    let remembered = Encoded { belief: Belief::Remembered, ..lost.clone() };
    assert!(is_origin(paper.encodes.renewal(&remembered, paper.now), Origin::Any));
    // Another request had it made again meanwhile.
    (paper.end, paper.now) = (None, paper.now + MS);
    paper.run();
    assert!(matches!(paper.encodes.renewal(&lost, paper.now), Renewal::Ready(_)));
}

#[test]
fn a_tenant_is_charged_once_and_a_refusal_ends_the_encode() {
    let refused = Failure::new(FailureClass::Overloaded, "later");
    let mut paper = Paper::new(&[("a", &[])], GENEROUS);
    let now = paper.now;
    for (origin, expect) in [(Origin::Any, true), (Origin::Fresh, false)] {
        let subscribed = paper.encodes.subscribe(Paper::target(origin), now, &mut paper.budget, now);
        let mut on = |event| paper.encodes.on(subscribed.id, event, &mut paper.budget, now);
        let mut actions = subscribed.begun.unwrap();
        let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
        while let Some(action) = actions.pop() {
            actions = match action {
                EncodeAction::Probe => on(EncodeEvent::Probed(None)),
                EncodeAction::Acquire { .. } => on(EncodeEvent::Leased(None)),
                EncodeAction::Charge => {
                    *seen.entry("charged").or_default() += 1;
                    on(EncodeEvent::Charged(Ok(())))
                }
                EncodeAction::Admit { .. } => on(EncodeEvent::Admitted(Err(refused.clone()))),
                EncodeAction::Finish(outcome) => {
                    assert_eq!(outcome.unwrap_err(), refused);
                    *seen.entry("ended").or_default() += 1;
                    Vec::new()
                }
                EncodeAction::Count(_) => continue,
                other => panic!("{other:?}"),
            };
        }
        assert_eq!(seen.contains_key("charged"), expect, "{origin:?}");
        assert_eq!(seen.get("ended"), Some(&1));
    }
}

#[test]
fn a_tower_that_nobody_holds_is_named_with_its_pool() {
    for (name, expect) in [
        ("", "no encoder that reads image for model \"m\" is there now"),
        ("high", "no worker of the encoder pool holds tower high of image for model \"m\" now"),
    ] {
        let mut paper = Paper::new(&[], GENEROUS);
        let target = EncodeTarget { tower_name: name.into(), ..Paper::target(Origin::Any) };
        let end = paper.run_target(target).end.take();
        let failure = end.expect("it ends").expect_err("nobody encodes it");
        assert!(failure.message.contains(expect), "{failure}");
    }
}
