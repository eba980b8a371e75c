//! The breaker on a clock that is moved by hand.

use super::*;

/// A breaker and the time.
struct Bench {
    breaker: Breaker,
    now: Instant,
}

impl Bench {
    fn new() -> Self {
        Self { breaker: Breaker::new(BreakerTuning::default()), now: Instant::now() }
    }

    fn advance(&mut self, ms: u64) {
        self.now += Duration::from_millis(ms);
    }

    fn call(&mut self) -> CallTicket {
        match self.breaker.admit(self.now) {
            Verdict::Call(call) => call,
            other => panic!("{other:?}"),
        }
    }

    fn probe(&mut self) -> ProbeTicket {
        match self.breaker.admit(self.now) {
            Verdict::Probe(probe) => probe,
            other => panic!("{other:?}"),
        }
    }

    fn end(&mut self, call: CallTicket, end: CallEnd) -> BreakerState {
        self.breaker.ended(call, end, self.now);
        self.breaker.state()
    }

    fn end_probe(&mut self, probe: ProbeTicket, end: CallEnd) -> BreakerState {
        self.breaker.probed(probe, end, self.now);
        self.breaker.state()
    }

    fn is_refused(&mut self) -> bool {
        self.breaker.admit(self.now) == Verdict::Refuse
    }

    /// Opens it by a timeout.
    fn hang(&mut self) {
        let call = self.call();
        self.advance(500);
        assert_eq!(self.end(call, CallEnd::TimedOut), BreakerState::Open);
    }
}

#[test]
fn the_first_timeout_of_a_silent_store_opens_it_for_all() {
    let mut bench = Bench::new();
    let before = bench.call();
    assert_eq!(bench.end(before, CallEnd::Answered), BreakerState::Closed);
    bench.advance(1);
    bench.hang();
    assert!((0..100).all(|_| bench.is_refused()));
}

#[test]
fn a_slow_call_among_answered_ones_counts_as_one_failure() {
    let mut bench = Bench::new();
    for n in 1..=3 {
        let slow = bench.call();
        bench.advance(100);
        let quick = bench.call();
        bench.advance(100);
        bench.end(quick, CallEnd::Answered);
        bench.advance(300);
        assert_eq!(bench.end(slow, CallEnd::TimedOut), BreakerState::Closed, "timeout {n}");
    }
}

#[test]
fn three_failures_in_a_row_open_it_and_an_answer_between_them_counts_anew() {
    let mut bench = Bench::new();
    let ends = [CallEnd::Failed, CallEnd::Failed, CallEnd::Answered, CallEnd::Failed, CallEnd::Failed];
    for end in ends {
        let call = bench.call();
        assert_eq!(bench.end(call, end), BreakerState::Closed);
    }
    let third = bench.call();
    assert_eq!(bench.end(third, CallEnd::Failed), BreakerState::Open);
}

#[test]
fn one_call_probes_and_the_others_are_refused_until_it_ends() {
    let mut bench = Bench::new();
    bench.hang();
    bench.advance(499);
    assert!(bench.is_refused());
    bench.advance(1);
    let probe = bench.probe();
    assert_eq!(bench.breaker.state(), BreakerState::HalfOpen);
    bench.advance(60_000);
    assert!((0..100).all(|_| bench.is_refused()), "however long the probe takes");
    assert_eq!(bench.end_probe(probe, CallEnd::Answered), BreakerState::Closed);
    bench.call();
}

#[test]
fn each_failed_probe_doubles_the_pause_up_to_five_seconds() {
    let mut bench = Bench::new();
    bench.hang();
    bench.advance(500);
    for pause in [1000, 2000, 4000, 5000, 5000] {
        let probe = bench.probe();
        bench.end_probe(probe, CallEnd::TimedOut);
        bench.advance(pause - 1);
        assert!(bench.is_refused(), "{pause} ms are not over");
        bench.advance(1);
    }
}

/// A store that answers probes and hangs in calls.
#[test]
fn the_pause_grows_until_a_call_is_answered_and_not_only_a_probe() {
    let mut bench = Bench::new();
    bench.hang();
    bench.advance(500);
    let probe = bench.probe();
    bench.end_probe(probe, CallEnd::Answered);
    bench.hang();
    bench.advance(999);
    assert!(bench.is_refused(), "the second time is twice as long");
    bench.advance(1);
    let probe = bench.probe();
    bench.end_probe(probe, CallEnd::Answered);
    let call = bench.call();
    bench.end(call, CallEnd::Answered);
    bench.advance(1);
    bench.hang();
    bench.advance(500);
    bench.probe();
}

#[test]
fn a_probe_whose_caller_went_away_leaves_the_next_call_to_probe() {
    let mut bench = Bench::new();
    bench.hang();
    bench.advance(500);
    let probe = bench.probe();
    assert_eq!(bench.end_probe(probe, CallEnd::Unknown), BreakerState::Open);
    bench.probe();
}

#[test]
fn ends_of_calls_from_before_it_opened_change_nothing() {
    let mut bench = Bench::new();
    let (early, late) = (bench.call(), bench.call());
    bench.hang();
    assert_eq!(bench.end(early, CallEnd::Answered), BreakerState::Open);
    bench.advance(500);
    let probe = bench.probe();
    bench.end_probe(probe, CallEnd::Answered);
    assert_eq!(bench.end(late, CallEnd::TimedOut), BreakerState::Closed);
}

#[test]
fn calls_that_were_given_up_count_for_nothing() {
    let mut bench = Bench::new();
    for _ in 0..10 {
        let call = bench.call();
        assert_eq!(bench.end(call, CallEnd::Unknown), BreakerState::Closed);
    }
}
