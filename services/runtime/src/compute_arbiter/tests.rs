//! The arbiter between real threads, checked by counts, not by times.

use super::*;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Encoder tokens since the engine's last step, as the two threads count them.
#[derive(Default)]
struct TokenCounts {
    since: AtomicU64,
    most: AtomicU64,
    inside: AtomicU64,
}

impl TokenCounts {
    fn alone<T>(&self, work: impl FnOnce() -> T) -> T {
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two computed at once");
        let result = work();
        self.inside.fetch_sub(1, Ordering::SeqCst);
        result
    }
}

#[test]
fn threads_compute_one_at_a_time_and_keep_to_the_budget() {
    const FORWARDS: usize = 40;
    let arbiter = ComputeArbiter::new(EncoderBudget::Tokens(6));
    let (engine, encoder) = (arbiter.engine(), arbiter.encoder());
    let (seen, encoded) = (TokenCounts::default(), AtomicBool::new(false));
    engine.step().decodes(Duration::ZERO);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !encoded.load(Ordering::SeqCst) {
                let turn = engine.step();
                seen.alone(|| {
                    let since = seen.since.swap(0, Ordering::SeqCst);
                    seen.most.fetch_max(since, Ordering::SeqCst);
                });
                turn.decodes(Duration::ZERO);
            }
        });
        scope.spawn(|| {
            for _ in 0..FORWARDS {
                let mut forward = encoder.forward();
                for _ in 0..5 {
                    forward.part(2);
                    seen.alone(|| seen.since.fetch_add(2, Ordering::SeqCst));
                }
            }
            encoded.store(true, Ordering::SeqCst);
        });
    });
    let most = seen.most.load(Ordering::SeqCst);
    assert!((1..=6).contains(&most), "{most} tokens between two steps");
    assert!(arbiter.usage().most <= 6);
}

#[test]
fn a_step_that_may_wait_does_not_come_between_chunks() {
    let arbiter = ComputeArbiter::new(EncoderBudget::Automatic);
    let (engine, encoder) = (arbiter.engine(), arbiter.encoder());
    let (steps, within, encoded) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
    engine.step().decodes(Duration::MAX);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !encoded.load(Ordering::SeqCst) {
                let turn = engine.step();
                steps.fetch_add(1, Ordering::SeqCst);
                turn.decodes(Duration::MAX);
            }
        });
        scope.spawn(|| {
            for _ in 0..20 {
                let mut forward = encoder.forward();
                forward.part(1);
                let before = steps.load(Ordering::SeqCst);
                // Fewer tokens than the budget has before the first measurement; the engine waits by then.
                for _ in 0..20 {
                    thread::sleep(Duration::from_micros(200));
                    forward.part(1);
                }
                within.fetch_add(steps.load(Ordering::SeqCst) - before, Ordering::SeqCst);
            }
            encoded.store(true, Ordering::SeqCst);
        });
    });
    assert_eq!(within.into_inner(), 0, "steps within forwards");
}

#[test]
fn a_forward_that_panics_releases_its_permit() {
    let arbiter = ComputeArbiter::new(EncoderBudget::Automatic);
    let (engine, encoder) = (arbiter.engine(), arbiter.encoder());
    let died = thread::spawn(move || {
        let mut forward = encoder.forward();
        forward.part(1);
        panic!("our bug");
    });
    assert!(died.join().is_err());
    drop(engine.step());
}
