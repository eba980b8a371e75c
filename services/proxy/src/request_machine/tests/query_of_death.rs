//! One request that kills its workers before it begins to answer, among others that do not, in every order of events: few
//! workers die, nothing else is refused, and everything ends.

use crate::request_machine::action::RequestAction;
use crate::request_machine::deaths::{Deaths, Life, Lost, RequestFingerprint};
use crate::request_machine::event::{BrokenCall, RequestEvent};
use crate::request_machine::request::{RequestFacts, RequestMachine};
use crate::request_machine::retry_budget::{RetryPolicy, RetryWindow};
use crate::request_machine::surroundings::RequestSurroundings;
use proptest::prelude::*;
use std::time::{Duration, Instant};
use triptych_core::{Failure, FailureClass, ModelName, RequestId, WorkerId};

/// Workers that one request may end.
const MAX_DEATHS: usize = 3;
const N_WORKERS: usize = 4;
const N_REQUESTS: usize = 6;
/// The one that kills, and the same again.
const BAD: usize = 0;
const REPEATED: usize = N_REQUESTS;

/// The event that a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waits {
    /// To be woken.
    ForTime,
    ForWorker,
    ForIdleWorker,
    /// A worker has it.
    At {
        worker: usize,
        wrote: bool,
    },
    Nothing,
}

struct Asked {
    machine: RequestMachine,
    waits: Waits,
    is_tried_alone: bool,
    end: Option<Result<(), Failure>>,
}

#[derive(Clone, Default)]
struct Process {
    is_down: bool,
    /// Requests that it was starting when it died.
    journal: Vec<RequestId>,
}

struct World {
    now: Instant,
    deaths: Deaths,
    budget: RetryWindow,
    requests: Vec<Asked>,
    workers: Vec<Process>,
    n_deaths: usize,
}

fn worker_id(worker: usize) -> WorkerId {
    WorkerId::new(format!("w{worker}"))
}

fn request_id(request: usize) -> RequestId {
    RequestId::from_bits(request as u128 + 1)
}

impl World {
    fn new() -> Self {
        let now = Instant::now();
        let budget = RetryWindow::new(RetryPolicy { share: 0.0, per_second: 0.0 }, now);
        let (requests, workers) = (Vec::new(), vec![Process::default(); N_WORKERS]);
        Self { now, deaths: Deaths::new([0; 32]), budget, requests, workers, n_deaths: 0 }
    }

    fn ask(&mut self) {
        let r = self.requests.len();
        let what = if r == REPEATED { BAD } else { r };
        let facts = RequestFacts {
            id: request_id(r),
            fingerprint: RequestFingerprint::from_bytes([what as u8; 32]),
            model: ModelName::new("m"),
            n_items: 0,
            placed: None,
            is_resumable: true,
            arrived: self.now,
            deadline: self.now + Duration::from_secs(500),
        };
        let Self { now, budget, deaths, .. } = self;
        let (machine, actions) =
            RequestMachine::new(facts, &mut RequestSurroundings { now: *now, budget, deaths });
        self.requests.push(Asked { machine, waits: Waits::ForTime, is_tried_alone: false, end: None });
        self.take(r, actions, None);
    }

    fn tell(&mut self, r: usize, event: RequestEvent) {
        let chosen = match &event {
            RequestEvent::Worker(id) => (0..N_WORKERS).find(|w| worker_id(*w) == *id),
            _ => None,
        };
        let Self { now, budget, deaths, .. } = self;
        let actions =
            self.requests[r].machine.on(event, &mut RequestSurroundings { now: *now, budget, deaths });
        self.take(r, actions, chosen);
    }

    fn take(&mut self, r: usize, actions: Vec<RequestAction>, chosen: Option<usize>) {
        let request = &mut self.requests[r];
        for action in actions {
            match action {
                RequestAction::Choose { .. } => request.waits = Waits::ForWorker,
                RequestAction::ChooseIdle { .. } => request.waits = Waits::ForIdleWorker,
                RequestAction::GiveBack => request.waits = Waits::ForTime,
                RequestAction::Send { .. } => {
                    request.is_tried_alone = request.waits == Waits::ForIdleWorker;
                    request.waits = Waits::At { worker: chosen.expect("it was chosen"), wrote: false };
                }
                RequestAction::Retry { .. } => request.waits = Waits::ForTime,
                RequestAction::Finish => (request.end, request.waits) = (Some(Ok(())), Waits::Nothing),
                RequestAction::Fail { failure, .. } => {
                    (request.end, request.waits) = (Some(Err(failure)), Waits::Nothing);
                }
                RequestAction::Supplied | RequestAction::Renew { .. } => {}
            }
        }
    }

    fn at(&self, worker: usize) -> Vec<usize> {
        let is_at = |r: &usize| matches!(self.requests[*r].waits, Waits::At { worker: w, .. } if w == worker);
        (0..self.requests.len()).filter(is_at).collect()
    }

    /// A worker takes a request that waits for one, if it may.
    fn choose(&mut self, r: usize, worker: usize) {
        let there = self.at(worker);
        let is_isolated = there.iter().any(|other| self.requests[*other].is_tried_alone);
        let takes = match self.requests[r].waits {
            Waits::ForWorker => !is_isolated,
            Waits::ForIdleWorker => there.is_empty(),
            _ => false,
        };
        if takes && !self.workers[worker].is_down {
            self.tell(r, RequestEvent::Worker(worker_id(worker)));
        }
    }

    /// A worker goes on with a request: it dies, or writes, or has written.
    fn go_on(&mut self, r: usize, order: usize) {
        match self.requests[r].waits {
            Waits::At { worker, .. } if r == BAD || r == REPEATED => self.die(worker, order),
            Waits::At { worker, wrote: false } => {
                self.requests[r].waits = Waits::At { worker, wrote: true };
                self.requests[r].is_tried_alone = false;
                self.tell(r, RequestEvent::Wrote { went_out: true });
            }
            Waits::At { .. } => self.tell(r, RequestEvent::Answered),
            _ => {}
        }
    }

    fn die(&mut self, worker: usize, order: usize) {
        let mut there = self.at(worker);
        let by = there.len();
        there.rotate_left(order % by);
        let is_starting = |r: &&usize| matches!(self.requests[**r].waits, Waits::At { wrote: false, .. });
        let journal = there.iter().filter(is_starting).map(|r| request_id(*r)).collect();
        self.workers[worker] = Process { is_down: true, journal };
        self.n_deaths += 1;
        for r in there {
            let (failure, lost) = (Failure::unavailable("gone"), Some(Lost::Closed));
            self.tell(r, RequestEvent::Broke(BrokenCall { failure, missing: None, lost }));
        }
    }

    /// A successor answers, with what the one before was starting or without.
    fn come_back(&mut self, worker: usize, reports: bool) {
        if std::mem::take(&mut self.workers[worker].is_down) {
            let journal = if reports { &self.workers[worker].journal[..] } else { &[] };
            self.deaths.lives(&worker_id(worker), Life::Other, journal, self.now);
        }
    }

    /// Moves the clock; a little, where a worker is waited for: there is always one.
    fn advance(&mut self, ms: u64) {
        let waits_for_worker = self.requests.iter().any(|request| request.waits == Waits::ForWorker);
        let ms = if waits_for_worker { ms.min(20) } else { ms };
        self.now += Duration::from_millis(ms);
        for r in 0..self.requests.len() {
            if self.requests[r].machine.wake_at().is_some_and(|at| at <= self.now) {
                self.tell(r, RequestEvent::Woken);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn a_query_of_death_ends_few_workers_and_no_other_request(
        steps in prop::collection::vec((0..10_u8, any::<u8>(), any::<u8>()), 1..300),
    ) {
        let mut world = World::new();
        (0..N_REQUESTS).for_each(|_| world.ask());
        for (kind, a, b) in steps {
            let (r, worker) = (usize::from(a) % world.requests.len(), usize::from(b) % N_WORKERS);
            match kind {
                0..4 => world.choose(r, worker),
                4..6 => world.go_on(r, b.into()),
                6 => world.come_back(worker, a % 2 == 0),
                7 => world.advance(u64::from(b) * 20),
                _ => world.advance(u64::from(b)),
            }
        }
        // Everybody does what is waited for, and nobody has an idle worker for as long as others run.
        for round in 0..2000 {
            (0..N_WORKERS).for_each(|worker| world.come_back(worker, false));
            for r in 0..world.requests.len() {
                world.choose(r, round % N_WORKERS);
                world.go_on(r, round);
            }
            world.advance(20);
        }
        for (r, request) in world.requests.iter().enumerate() {
            let end = request.end.as_ref().expect("everything ends");
            let class = end.as_ref().err().map(|failure| failure.class);
            prop_assert_eq!(class, (r == BAD).then_some(FailureClass::Quarantined), "request {}", r);
        }
        prop_assert!(world.n_deaths <= MAX_DEATHS, "{} workers died", world.n_deaths);
        world.ask();
        let refused = world.requests[REPEATED].end.as_ref();
        prop_assert!(refused.is_some_and(|end| end.is_err()), "the same again: {:?}", refused);
    }
}
