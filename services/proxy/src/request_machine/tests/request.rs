//! A request's way to its answer, on a hand-moved clock.

use crate::request_machine::action::{LeftItems, RequestAction};
use crate::request_machine::deaths::{Aboard, Deaths, Life, REMEMBERED, RequestFingerprint, Stage, Verdict};
use crate::request_machine::event::{BrokenCall, RequestEvent};
use crate::request_machine::policy::{ATTEMPTS, IDLE_WAIT, LAST_REPORTS, WORKER_WAIT, backoff};
use crate::request_machine::request::{RequestFacts, RequestMachine};
use crate::request_machine::retry_budget::{RetryPolicy, RetryWindow};
use crate::request_machine::surroundings::RequestSurroundings;
use std::time::{Duration, Instant};
use triptych_core::{Failure, FailureClass, ItemIdx, ModelName, RequestId, WorkerId};

const LIMIT: Duration = Duration::from_secs(60);

struct Driven {
    machine: RequestMachine,
    budget: RetryWindow,
    deaths: Deaths,
    began: Instant,
    now: Instant,
    /// Everything that was asked of the driver, in words.
    log: Vec<String>,
}

fn words(action: &RequestAction) -> String {
    let ids = |ids: &[WorkerId]| ids.iter().map(|id| id.as_str()).collect::<Vec<_>>().join("+");
    match action {
        RequestAction::Supplied => "supplied".into(),
        RequestAction::Choose { tried, holders } => format!("choose -{} *{}", ids(tried), ids(holders)),
        RequestAction::ChooseIdle { tried } => format!("choose idle -{}", ids(tried)),
        RequestAction::Send { attempt } => format!("send {attempt}"),
        RequestAction::Retry { resumed, .. } => format!("retry resumed={resumed}"),
        RequestAction::Renew { item, was_ready } => format!("renew {} was_ready={was_ready}", item.0),
        RequestAction::Finish => "finish".into(),
        RequestAction::Fail { failure, item, items } => {
            format!("fail {} {:?} {items:?}", failure.class.as_str(), item.map(|item| item.0))
        }
    }
}

impl Driven {
    fn new(n_items: usize, is_resumable: bool) -> Self {
        Self::after(Deaths::new([7; 32]), Instant::now(), (1, 1), (n_items, is_resumable))
    }

    /// One that arrives when these deaths are known: of an id, and of what it asks for.
    fn after(
        mut deaths: Deaths,
        began: Instant,
        (id, what): (u128, u8),
        (n_items, is_resumable): (usize, bool),
    ) -> Self {
        let facts = RequestFacts {
            id: RequestId::from_bits(id),
            fingerprint: RequestFingerprint::from_bytes([what; 32]),
            model: ModelName::new("m"),
            n_items,
            placed: None,
            is_resumable,
            arrived: began,
            deadline: began + LIMIT,
        };
        let mut budget = RetryWindow::new(RetryPolicy { share: 0.2, per_second: 5.0 }, began);
        let mut around = RequestSurroundings { now: began, budget: &mut budget, deaths: &mut deaths };
        let (machine, actions) = RequestMachine::new(facts, &mut around);
        let log = actions.iter().map(words).collect();
        Self { machine, budget, deaths, began, now: began, log }
    }

    fn take(&mut self, event: RequestEvent) -> Vec<RequestAction> {
        let (budget, deaths) = (&mut self.budget, &mut self.deaths);
        self.machine.on(event, &mut RequestSurroundings { now: self.now, budget, deaths })
    }

    fn on(&mut self, event: RequestEvent) -> &mut Self {
        let actions = self.take(event);
        self.log.extend(actions.iter().map(words));
        self
    }

    /// Waits until it is to be woken.
    fn sleep(&mut self) -> &mut Self {
        self.now = self.machine.wake_at().expect("it has not ended");
        self.on(RequestEvent::Woken)
    }

    fn ready(&mut self, item: u32) -> &mut Self {
        self.on(RequestEvent::ItemReady { item: ItemIdx(item), holders: Vec::new() })
    }

    fn worker(&mut self, id: &str) -> &mut Self {
        self.on(RequestEvent::Worker(WorkerId::new(id)))
    }

    fn broke(&mut self, failure: Failure, missing: Option<u32>) -> &mut Self {
        self.on(RequestEvent::Broke(BrokenCall { failure, missing: missing.map(ItemIdx), is_gone: false }))
    }

    /// Its worker goes away, and nobody listens there any more.
    fn died(&mut self, worker: &str) -> &mut Self {
        self.on(RequestEvent::Broke(BrokenCall { failure: gone(), missing: None, is_gone: true }));
        self.deaths.died(&WorkerId::new(worker), self.now);
        self
    }

    fn log(&mut self) -> Vec<String> {
        std::mem::take(&mut self.log)
    }
}

fn gone() -> Failure {
    Failure::unavailable("gone")
}

#[test]
fn it_is_forwarded_when_all_items_are_announced_and_ends_when_their_ends_are_known() {
    let mut request = Driven::new(2, true);
    request.ready(1).on(RequestEvent::ItemAnnounced(ItemIdx(0)));
    assert_eq!(request.log(), ["supplied", "choose - *"]);
    request.worker("a").on(RequestEvent::Wrote { went_out: true }).on(RequestEvent::Answered);
    assert_eq!(request.log(), ["send 1"], "an encoder's answer is still to come");
    request.ready(0);
    assert_eq!(request.log(), ["finish"]);
    // It is not worth much waiting.
    let mut request = Driven::new(1, true);
    request.on(RequestEvent::ItemAnnounced(ItemIdx(0))).worker("a").on(RequestEvent::Answered).sleep();
    assert_eq!(request.log().last().unwrap(), "finish");
    assert_eq!(request.now - request.began, LAST_REPORTS);
}

#[test]
fn a_text_is_forwarded_at_once_and_goes_to_the_holder_of_its_items() {
    assert_eq!(Driven::new(0, true).log(), ["supplied", "choose - *"]);
    let mut request = Driven::new(2, true);
    request.ready(0).on(RequestEvent::ItemReady { item: ItemIdx(1), holders: vec![WorkerId::new("b")] });
    assert_eq!(request.log(), ["supplied", "choose - *b"]);
}

#[test]
fn a_worker_that_goes_away_is_followed_by_another_after_a_growing_pause() {
    let mut request = Driven::new(0, true);
    for attempt in 1..ATTEMPTS {
        request.worker(&attempt.to_string()).broke(gone(), None);
        let slept = request.now;
        request.sleep();
        assert_eq!(request.now - slept, backoff(attempt));
    }
    request.worker("last").broke(gone(), None);
    let log = request.log();
    assert_eq!(log.iter().filter(|line| line.starts_with("send")).count(), ATTEMPTS as usize);
    assert!(log.contains(&"choose -1+2+3+4 *".to_owned()), "{log:?}");
    assert_eq!(log.last().unwrap(), "fail unavailable None GoOn");
    assert!(request.machine.has_ended() && request.machine.wake_at().is_none());
}

#[test]
fn a_refusal_of_the_request_itself_is_not_sent_again() {
    let mut request = Driven::new(0, true);
    request.worker("a").broke(Failure::invalid("no"), None);
    assert_eq!(request.log()[2..], ["send 1", "fail invalid_argument None GoOn"]);
    // Nobody there at all.
    let mut request = Driven::new(0, true);
    request.sleep();
    assert_eq!(request.now - request.began, WORKER_WAIT);
    assert_eq!(request.log().last().unwrap(), "fail unavailable None GoOn");
}

#[test]
fn a_stream_that_broke_off_goes_on_unless_the_client_does_not_want_that() {
    let mut request = Driven::new(0, true);
    request.worker("a").on(RequestEvent::Wrote { went_out: true }).broke(gone(), None);
    assert_eq!(request.log().last().unwrap(), "retry resumed=true");
    let mut request = Driven::new(0, false);
    request.worker("a").on(RequestEvent::Wrote { went_out: true });
    let actions =
        request.take(RequestEvent::Broke(BrokenCall { failure: gone(), missing: None, is_gone: false }));
    let [RequestAction::Fail { failure, items: LeftItems::GoOn, .. }] = &actions[..] else {
        panic!("{actions:?}")
    };
    assert!(failure.message.contains("incomplete"), "{failure}");
    // Nothing has gone out of a held window.
    let mut request = Driven::new(0, false);
    request.worker("a").on(RequestEvent::Wrote { went_out: false }).broke(gone(), None);
    assert_eq!(request.log().last().unwrap(), "retry resumed=false");
}

#[test]
fn an_item_that_is_missing_is_encoded_again_twice_and_its_worker_is_as_good_as_any() {
    let mut request = Driven::new(1, true);
    request.ready(0);
    request.log();
    for _ in 0..2 {
        request.worker("a").broke(gone(), Some(0)).ready(0);
        assert_eq!(request.log(), ["send 1", "renew 0 was_ready=true", "choose - *"]);
    }
    request.worker("a").broke(gone(), Some(0));
    assert_eq!(request.log(), ["send 1", "fail unavailable None GoOn"]);
    // One that is still being encoded is waited for.
    let mut request = Driven::new(1, true);
    request.on(RequestEvent::ItemAnnounced(ItemIdx(0))).worker("a").broke(gone(), Some(0));
    assert_eq!(request.log().last().unwrap(), "renew 0 was_ready=false");
    request.worker("late");
    assert!(request.log().is_empty(), "nobody asked for a worker");
    request.broke(gone(), Some(7));
    assert!(request.log().is_empty(), "no call is under way");
    // An item that nobody sent is the worker's mistake.
    let mut request = Driven::new(1, true);
    request.ready(0).worker("a").broke(gone(), Some(7));
    assert_eq!(request.log().last().unwrap(), "fail internal None GoOn");
}

#[test]
fn an_item_that_fails_ends_the_request_unless_it_was_read() {
    let failure = Failure::invalid("cut off");
    let fails = || RequestEvent::ItemFailed { item: ItemIdx(0), failure: failure.clone() };
    let mut request = Driven::new(2, true);
    request.on(fails());
    assert_eq!(request.log(), ["fail invalid_argument Some(0) GoOn"]);
    let mut request = Driven::new(1, true);
    request.on(RequestEvent::ItemAnnounced(ItemIdx(0))).worker("a");
    request.on(RequestEvent::Wrote { went_out: true }).on(fails());
    assert_eq!(request.log().last().unwrap(), "send 1", "the writer has read it");
    // The next worker cannot.
    request.broke(gone(), None).sleep().worker("b");
    assert_eq!(request.log().last().unwrap(), "fail invalid_argument Some(0) GoOn");
}

#[test]
fn an_item_that_is_late_fails_a_little_before_the_deadline_and_the_deadline_ends_everything() {
    let mut request = Driven::new(1, true);
    request.sleep();
    assert_eq!(request.log(), ["fail unavailable Some(0) GoOn"]);
    assert!(request.now < request.began + LIMIT);
    let mut request = Driven::new(0, true);
    request.worker("a");
    assert_eq!(request.machine.wake_at(), Some(request.began + LIMIT));
    request.sleep();
    assert_eq!(request.log().last().unwrap(), "fail deadline_exceeded None Dropped");
    assert_eq!(FailureClass::DeadlineExceeded.as_str(), "deadline_exceeded");
}

/// A request of this id, which asks for this, after these deaths.
fn arrives(deaths: Deaths, now: Instant, of: (u128, u8)) -> Driven {
    Driven::after(deaths, now, of, (0, true))
}

#[test]
fn a_request_that_two_workers_died_of_is_tried_alone_and_then_refused_for_a_while() {
    let mut request = Driven::new(0, true);
    request.worker("a").died("a").sleep();
    request.worker("b").died("b");
    request.log();
    request.sleep();
    assert_eq!(request.log(), ["choose idle -a+b"], "the third attempt has a worker of its own");
    request.worker("c").died("c");
    assert_eq!(request.log(), ["send 3", "fail quarantined None GoOn"], "it is not sent again");
    let (deaths, now) = (request.deaths, request.now);
    let mut again = arrives(deaths, now + REMEMBERED / 2, (2, 1));
    assert_eq!(again.log(), ["supplied", "fail quarantined None GoOn"], "the same under another id");
    let mut other = arrives(again.deaths, again.now, (3, 2));
    assert_eq!(other.log(), ["supplied", "choose - *"]);
    let mut later = arrives(other.deaths, now + REMEMBERED, (4, 1));
    assert_eq!(later.log(), ["supplied", "choose - *"], "deaths are forgotten");
}

#[test]
fn a_request_for_which_no_worker_is_idle_is_sent_on_after_a_while_and_refused_at_the_next_death() {
    let mut request = Driven::new(0, true);
    request.worker("a").died("a").sleep();
    request.worker("b").died("b").sleep();
    let asked = request.now;
    request.sleep();
    assert_eq!(request.now - asked, IDLE_WAIT);
    assert_eq!(request.log().last().unwrap(), "choose -a+b *");
    let mut third = Driven::new(0, true);
    for worker in ["a", "b"] {
        third.worker(worker).died(worker).sleep();
    }
    third.sleep().worker("c");
    assert_eq!(third.log().last().unwrap(), "send 3");
    third.died("c").sleep();
    assert_eq!(third.log().last().unwrap(), "fail quarantined None GoOn");
    // The same under another id may be tried again, as long as there are two deaths.
    let mut again = arrives(request.deaths, request.now, (2, 1));
    assert_eq!(again.log(), ["supplied", "choose idle -"]);
    // While it is, the same waits; and it goes anywhere once the first was answered.
    let mut same = arrives(std::mem::replace(&mut again.deaths, Deaths::new([0; 32])), again.now, (3, 1));
    assert_eq!(same.sleep().log(), ["supplied"]);
    again.deaths = std::mem::replace(&mut same.deaths, Deaths::new([0; 32]));
    again.worker("c").on(RequestEvent::Answered);
    assert_eq!(again.log(), ["send 1", "finish"]);
    same.deaths = again.deaths;
    assert_eq!(same.sleep().log(), ["choose - *"]);
}

#[test]
fn streams_beside_a_request_that_kills_go_on_at_once() {
    let mut honest = arrives(Deaths::new([0; 32]), Instant::now(), (1, 1));
    for worker in ["a", "b", "c"] {
        honest.worker(worker).on(RequestEvent::Wrote { went_out: true });
        // A request that had not begun to answer dies with it.
        let mut bad = arrives(honest.deaths, honest.now, (2, 2));
        bad.worker(worker).on(RequestEvent::Broke(BrokenCall {
            failure: gone(),
            missing: None,
            is_gone: true,
        }));
        honest.deaths = bad.deaths;
        honest.died(worker).sleep();
        assert!(honest.log().last().unwrap().starts_with("choose -"), "{worker}");
    }
    let mut again = arrives(honest.deaths, honest.now, (3, 2));
    assert_eq!(again.log(), ["supplied", "fail quarantined None GoOn"], "the other one is known");
}

#[test]
fn a_death_that_the_successor_explains_is_enough_and_clears_the_others() {
    let mut bad = Driven::new(0, true);
    bad.worker("a").on(RequestEvent::Broke(BrokenCall { failure: gone(), missing: None, is_gone: true }));
    let mut other = arrives(bad.deaths, bad.now, (2, 2));
    other.worker("a").died("a");
    other.deaths.lives(&WorkerId::new("a"), Life::Other, &[RequestId::from_bits(1)]);
    let (deaths, now) = (other.deaths, other.now);
    let mut again = arrives(deaths, now, (3, 1));
    assert_eq!(again.log(), ["supplied", "choose idle -"]);
    let mut other = arrives(again.deaths, now, (4, 2));
    assert_eq!(other.log(), ["supplied", "choose - *"]);
    other.worker("b").died("b").sleep();
    assert_eq!(other.log().last().unwrap(), "choose -b *", "its second death is the first that counts");
}

#[test]
fn a_connection_that_breaks_is_no_death_and_an_answer_clears() {
    let mut request = Driven::new(0, true);
    for worker in ["a", "b", "c"] {
        request.worker(worker);
        request.on(RequestEvent::Broke(BrokenCall { failure: gone(), missing: None, is_gone: true }));
        request.deaths.lives(&WorkerId::new(worker), Life::Same, &[]);
        request.sleep();
        assert!(request.log().last().unwrap().starts_with("choose -"), "{worker}");
    }
    let mut request = Driven::new(0, true);
    for id in 1..10 {
        request.worker("a").died("a").sleep();
        request.worker("b").on(RequestEvent::Answered);
        assert_eq!(request.log().last().unwrap(), "finish");
        request = arrives(request.deaths, request.now, (id, 1));
    }
}

#[test]
fn a_request_that_is_isolated_explains_the_deaths_of_all_that_were_there() {
    let mut deaths = Deaths::new([0; 32]);
    let now = Instant::now();
    // Two deaths that both were at before they had begun to answer, and one at which only the bad one was.
    for (worker, ids) in [("a", [1, 2].as_slice()), ("b", &[2]), ("c", &[1, 2])] {
        for id in ids {
            let (request, stage) = (RequestId::from_bits(u128::from(*id)), Stage::Starting);
            let fingerprint = RequestFingerprint::from_bytes([*id; 32]);
            deaths.broke(&WorkerId::new(worker), Aboard { request, fingerprint, stage }, now);
        }
        deaths.died(&WorkerId::new(worker), now);
        if worker == "b" {
            let bad = RequestFingerprint::from_bytes([2; 32]);
            assert_eq!(deaths.verdict(&bad, now), Verdict::Alone);
        }
    }
    assert_eq!(
        deaths.verdict(&RequestFingerprint::from_bytes([1; 32]), now),
        Verdict::Free,
        "one unexplained"
    );
}

#[test]
fn requests_of_workers_that_died_are_sent_again_whatever_the_budget_says() {
    let mut deaths = Deaths::new([0; 32]);
    let mut budget = RetryWindow::new(RetryPolicy { share: 0.0, per_second: 0.0 }, Instant::now());
    for id in 1..100_u8 {
        let mut request = arrives(deaths, Instant::now(), (id.into(), id));
        std::mem::swap(&mut request.budget, &mut budget);
        request.worker("a").died("a");
        assert_eq!(request.log().last().unwrap(), "retry resumed=false");
        std::mem::swap(&mut request.budget, &mut budget);
        deaths = request.deaths;
    }
}

#[test]
fn what_the_successor_reports_counts_for_a_request_that_waits_for_it() {
    let mut request = Driven::new(0, true);
    request.worker("a").died("a").sleep();
    request.deaths.lives(&WorkerId::new("a"), Life::Other, &[RequestId::from_bits(1)]);
    request.log();
    request.worker("a");
    assert_eq!(request.log(), ["choose idle -a"], "one death is enough");
}
