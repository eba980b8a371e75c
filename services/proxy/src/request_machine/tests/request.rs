//! A request's way to its answer, on a hand-moved clock.

use crate::request_machine::action::{LeftItems, RequestAction};
use crate::request_machine::deaths::{
    Aboard, Deaths, Life, Lost, REMEMBERED, REPORTED, RequestFingerprint, SETTLED, Stage, Trial, Verdict,
};
use crate::request_machine::event::{BrokenCall, RequestEvent};
use crate::request_machine::policy::{
    ATTEMPTS, IDLE_WAIT, LAST_REPORTS, RENEWALS_PER_ITEM, WORKER_WAIT, backoff,
};
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
        RequestAction::GiveBack => "give back".into(),
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
        self.on(RequestEvent::Broke(BrokenCall { failure, missing: missing.map(ItemIdx), lost: None }))
    }

    fn lost(&mut self, lost: Lost) -> &mut Self {
        self.on(RequestEvent::Broke(BrokenCall { failure: gone(), missing: None, lost: Some(lost) }))
    }

    /// Its worker dies: the connection is closed.
    fn died(&mut self) -> &mut Self {
        self.lost(Lost::Closed)
    }

    /// Another process answers for a worker, and reports what the one before was starting.
    fn reports(&mut self, worker: &str, starting: &[u128]) -> &mut Self {
        let starting: Vec<_> = starting.iter().map(|id| RequestId::from_bits(*id)).collect();
        self.deaths.lives(&WorkerId::new(worker), Life::Other, &starting, self.now);
        self
    }

    /// Sleeps until it asks for something, or ends.
    fn sleep_on(&mut self) -> &mut Self {
        let before = self.log.len();
        while self.log.len() == before {
            self.sleep();
        }
        self
    }

    /// Goes on with what another request left.
    fn next(&mut self, of: (u128, u8)) -> Self {
        let deaths = std::mem::replace(&mut self.deaths, Deaths::new([0; 32]));
        arrives(deaths, self.now, of)
    }

    /// Lets another request act.
    fn meanwhile(&mut self, other: &mut Self, act: impl FnOnce(&mut Self)) -> &mut Self {
        std::mem::swap(&mut self.deaths, &mut other.deaths);
        other.now = other.now.max(self.now);
        act(other);
        std::mem::swap(&mut self.deaths, &mut other.deaths);
        self.now = other.now;
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
        request.take(RequestEvent::Broke(BrokenCall { failure: gone(), missing: None, lost: None }));
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
fn an_item_that_is_missing_is_encoded_again_and_its_worker_is_as_good_as_any() {
    let mut request = Driven::new(1, true);
    request.ready(0);
    request.log();
    for n in 1..=RENEWALS_PER_ITEM {
        request.worker("a").broke(gone(), Some(0)).ready(0);
        let mut expect = vec!["send 1", "renew 0 was_ready=true"];
        if n > 1 {
            assert_eq!(request.log(), expect, "a store that comes back is waited for");
            expect.clear();
            request.sleep();
        }
        expect.push("choose - *");
        assert_eq!(request.log(), expect);
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
    request.worker("a").died().sleep_on();
    assert_eq!(request.log().last().unwrap(), "choose -a *");
    request.worker("b").died();
    request.log();
    let died = request.now;
    request.sleep_on();
    assert_eq!(request.log(), ["choose idle -a+b"], "the third attempt has a worker of its own");
    assert!(request.now - died >= REPORTED, "a report might have cleared it");
    request.worker("c").died();
    assert_eq!(request.log(), ["send 3", "fail quarantined None GoOn"], "it is not sent again");
    let now = request.now;
    let mut again = arrives(request.deaths, now + REMEMBERED / 2, (2, 1));
    assert_eq!(again.log(), ["supplied", "fail quarantined None GoOn"], "the same under another id");
    let mut other = again.next((3, 2));
    assert_eq!(other.log(), ["supplied", "choose - *"]);
    let mut later = arrives(other.deaths, now + REMEMBERED, (4, 1));
    assert_eq!(later.log(), ["supplied", "choose - *"], "deaths are forgotten");
}

#[test]
fn a_suspect_waits_for_the_report_on_its_worker_and_not_for_ever() {
    // Whether or not anybody listens meanwhile: a successor listens before it has loaded.
    for listens in [true, false] {
        let mut request = Driven::new(0, true);
        request.worker("a").died();
        if !listens {
            request.deaths.died(&WorkerId::new("a"), request.now);
        }
        let died = request.now;
        request.sleep_on();
        let waited = request.now - died;
        assert!((SETTLED..SETTLED * 2).contains(&waited), "{waited:?}");
    }
    // A report that names others ends the wait, and so does one that names this one.
    let reports = [([7, 9].as_slice(), "choose -a *"), (&[1], "choose idle -a"), (&[1, 9], "choose -a *")];
    for (starting, expected) in reports {
        let mut request = Driven::new(0, true);
        request.worker("a").died().reports("a", starting).sleep_on();
        assert_eq!(request.log().last().unwrap(), expected);
        assert_eq!(request.now - request.began, backoff(1));
    }
}

#[test]
fn a_suspect_for_which_no_worker_is_idle_is_tried_beside_others_and_refused_at_the_next_death() {
    let mut request = Driven::new(0, true);
    for worker in ["a", "b"] {
        request.worker(worker).died().sleep_on();
    }
    let asked = request.now;
    request.sleep_on();
    assert_eq!(request.now - asked, IDLE_WAIT);
    assert_eq!(request.log().last().unwrap(), "choose -a+b *");
    request.worker("c").died().sleep_on();
    assert_eq!(request.log()[..], ["send 3", "retry resumed=false", "fail quarantined None GoOn"]);
    // The other one that was at both is as before the first.
    let mut other = Driven::new(0, true);
    for worker in ["a", "b"] {
        other.worker(worker).died().sleep_on();
    }
    other.log();
    let mut again = other.next((2, 1));
    other.deaths = std::mem::replace(&mut again.deaths, Deaths::new([0; 32]));
    other.meanwhile(&mut again, |again| assert_eq!(again.sleep().log(), ["supplied"], "the same is tried"));
    other.worker("c").on(RequestEvent::Answered);
    assert_eq!(other.log(), ["send 3", "finish"]);
    other.meanwhile(&mut again, |again| {
        assert_eq!(again.sleep().log(), ["choose - *"], "an answer clears it")
    });
}

/// Two requests that two workers died of, neither of which any report clears: the first has waited for an idle worker.
fn two_suspects() -> (Driven, Driven) {
    let mut honest = Driven::new(0, true);
    let mut bad = honest.next((2, 2));
    honest.deaths = std::mem::replace(&mut bad.deaths, Deaths::new([0; 32]));
    for worker in ["a", "b"] {
        honest.worker(worker).died();
        honest.meanwhile(&mut bad, |bad| _ = bad.worker(worker).died());
        honest.sleep_on();
        honest.meanwhile(&mut bad, |bad| _ = bad.sleep_on());
    }
    assert_eq!(
        (&honest.log().last().unwrap()[..], &bad.log().last().unwrap()[..]),
        ("choose idle -a+b", "choose idle -a+b")
    );
    honest.sleep_on();
    assert_eq!(honest.log(), ["choose -a+b *"]);
    (honest, bad)
}

#[test]
fn of_two_suspects_of_the_same_deaths_one_is_tried_after_the_other() {
    // The honest one first: it begins to answer, and the other one has its turn.
    let (mut honest, mut bad) = two_suspects();
    honest.worker("c").meanwhile(&mut bad, |bad| {
        (0..70).for_each(|_| _ = bad.sleep());
        assert!(bad.log().is_empty(), "one at a time");
    });
    honest.on(RequestEvent::Wrote { went_out: true });
    honest.meanwhile(&mut bad, |bad| {
        bad.sleep_on().worker("c").died().sleep_on();
        assert_eq!(bad.log().last().unwrap(), "fail quarantined None GoOn");
    });
    // It was being answered where that one was tried, and goes on at once.
    honest.log();
    honest.died().sleep();
    assert_eq!(honest.log(), ["retry resumed=true", "choose -a+b+c *"]);

    // The bad one first: the honest one is free.
    let (mut bad, mut honest) = two_suspects();
    bad.worker("c").died().sleep_on();
    assert_eq!(bad.log().last().unwrap(), "fail quarantined None GoOn");
    bad.meanwhile(&mut honest, |honest| {
        honest.sleep_on();
        assert_eq!(honest.log(), ["choose -a+b *"]);
    });
    // A client that goes away leaves the turn to the next.
    let (gone, mut other) = two_suspects();
    other.deaths = gone.deaths;
    other.deaths.end_trial(&RequestFingerprint::from_bytes([1; 32]), RequestId::from_bits(1));
    other.sleep_on();
    assert_eq!(other.log(), ["choose -a+b *"]);
}

#[test]
fn streams_beside_a_request_that_kills_go_on_at_once() {
    let mut honest = arrives(Deaths::new([0; 32]), Instant::now(), (1, 1));
    for worker in ["a", "b", "c"] {
        honest.worker(worker).on(RequestEvent::Wrote { went_out: true });
        // A request that had not begun to answer dies with it.
        let (request, fingerprint) = (RequestId::from_bits(2), RequestFingerprint::from_bytes([2; 32]));
        let bad = Aboard { request, fingerprint, stage: Stage::Starting };
        honest.deaths.broke(&WorkerId::new(worker), bad, Lost::Closed, honest.now);
        let now = honest.now;
        honest.died().sleep();
        assert!(honest.log().last().unwrap().starts_with("choose -"), "{worker}");
        assert!(honest.now - now <= backoff(3));
    }
    let mut again = arrives(honest.deaths, honest.now + REPORTED, (3, 2));
    assert_eq!(again.log(), ["supplied", "fail quarantined None GoOn"], "the other one is known");
}

#[test]
fn a_death_that_the_successor_explains_is_enough_and_clears_the_others() {
    let mut bad = Driven::new(0, true);
    bad.worker("a").died();
    let mut other = bad.next((2, 2));
    other.worker("a").died().reports("a", &[1]);
    let mut again = other.next((3, 1));
    assert_eq!(again.log(), ["supplied", "choose idle -"]);
    let mut other = again.next((4, 2));
    assert_eq!(other.log(), ["supplied", "choose - *"]);
    other.worker("b").died().sleep_on();
    assert_eq!(other.log().last().unwrap(), "choose -b *", "its second death is the first that counts");
}

#[test]
fn only_a_closed_connection_is_a_death_and_only_until_the_same_process_answers() {
    let check = |lost: Lost, life: Option<Life>, is_death: bool| {
        let mut request = Driven::new(0, true);
        for worker in ["a", "b"] {
            request.worker(worker).lost(lost);
            if let Some(life) = life {
                request.deaths.lives(&WorkerId::new(worker), life, &[], request.now);
            }
            request.sleep_on();
        }
        let expected = if is_death { "choose idle -a+b" } else { "choose -a+b *" };
        assert_eq!(request.log().last().unwrap(), expected, "{lost:?} {life:?}");
    };
    check(Lost::Closed, None, true);
    check(Lost::Closed, Some(Life::Other), true);
    check(Lost::Closed, Some(Life::Unknown), true);
    check(Lost::Closed, Some(Life::Same), false);
    check(Lost::Silent, None, false);
    check(Lost::Silent, Some(Life::Other), true);
    check(Lost::Silent, Some(Life::Unknown), false);
    check(Lost::Unreached, None, false);
    check(Lost::Unreached, Some(Life::Other), false);
}

#[test]
fn an_answer_to_what_was_asked_before_the_end_of_a_process_is_no_sign_of_life() {
    let mut request = Driven::new(0, true);
    for worker in ["a", "b"] {
        let asked = request.now;
        request.now += Duration::from_millis(1);
        request.worker(worker).died();
        request.deaths.lives(&WorkerId::new(worker), Life::Same, &[], asked);
        request.deaths.lives(&WorkerId::new(worker), Life::Other, &[], request.now);
        request.sleep_on();
    }
    assert_eq!(request.log().last().unwrap(), "choose idle -a+b");
}

#[test]
fn an_answer_clears_and_so_does_its_begin() {
    for event in [RequestEvent::Answered, RequestEvent::Wrote { went_out: true }] {
        let mut request = Driven::new(0, true);
        for id in 2..10 {
            request.worker("a").died().sleep_on();
            request.worker("b").on(event.clone());
            request = request.next((id, 1));
            assert_eq!(request.log(), ["supplied", "choose - *"]);
        }
    }
    // One that was tried alone and has begun is no suspect of what becomes of its worker.
    let mut request = Driven::new(0, true);
    request.worker("a").died().reports("a", &[1]).sleep_on();
    assert_eq!(request.log().last().unwrap(), "choose idle -a");
    request.worker("b").on(RequestEvent::Wrote { went_out: true }).died().sleep();
    assert_eq!(request.log()[..], ["send 2", "retry resumed=true", "choose -a+b *"]);
}

#[test]
fn a_request_that_is_refused_explains_the_deaths_of_all_that_were_there() {
    let mut deaths = Deaths::new([0; 32]);
    let now = Instant::now();
    let what = |id: u8| RequestFingerprint::from_bytes([id; 32]);
    // Two deaths that both were at before they had begun to answer, and one at which only the bad one was.
    for (worker, ids) in [("a", [1, 2].as_slice()), ("b", &[1, 2]), ("c", &[2])] {
        for id in ids {
            let request = RequestId::from_bits(u128::from(*id));
            let stage = if worker == "c" { Stage::Alone } else { Stage::Starting };
            let aboard = Aboard { request, fingerprint: what(*id), stage };
            deaths.broke(&WorkerId::new(worker), aboard, Lost::Closed, now);
        }
        if worker == "b" {
            let later = now + REPORTED;
            assert_eq!([1, 2].map(|id| deaths.verdict(&what(id), later)), [Verdict::Alone; 2]);
            let id = RequestId::from_bits;
            assert!(deaths.begin_trial(what(2), id(2), Trial::Beside, later));
            assert!(!deaths.begin_trial(what(1), id(1), Trial::Beside, later), "one beside others");
            assert_eq!(deaths.verdict(&what(2), later), Verdict::Later);
            deaths.end_trial(&what(2), id(3));
            assert_eq!(deaths.verdict(&what(2), later), Verdict::Later, "another's trial");
            deaths.end_trial(&what(2), id(2));
        }
    }
    assert_eq!(deaths.verdict(&what(1), now), Verdict::Free, "all are explained");
    assert_eq!(deaths.verdict(&what(2), now), Verdict::Refused);
}

#[test]
fn requests_of_workers_that_died_are_sent_again_whatever_the_budget_says() {
    let mut deaths = Deaths::new([0; 32]);
    let mut budget = RetryWindow::new(RetryPolicy { share: 0.0, per_second: 0.0 }, Instant::now());
    for id in 1..100_u8 {
        let mut request = arrives(deaths, Instant::now(), (id.into(), id));
        std::mem::swap(&mut request.budget, &mut budget);
        request.worker("a").died();
        assert_eq!(request.log().last().unwrap(), "retry resumed=false");
        std::mem::swap(&mut request.budget, &mut budget);
        deaths = request.deaths;
    }
}

#[test]
fn what_the_successor_reports_counts_for_a_request_that_waits_for_a_worker() {
    let mut request = Driven::new(0, true);
    request.worker("a").died().sleep_on();
    request.reports("a", &[1]);
    request.log();
    request.worker("a");
    assert_eq!(request.log(), ["give back", "choose idle -a"], "one death is enough");
}
