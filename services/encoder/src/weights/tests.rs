//! Weights that come and go, by a clock that is moved by hand.

use super::*;
use std::sync::atomic::{AtomicU64, Ordering};
use triptych_core::clock::ManualClock;
use triptych_runtime::MetricsRegistry;

const MIB: u64 = 1 << 20;
const S: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

fn torn() -> ModelError {
    ModelError::Format { path: "model".into(), message: "a torn file".into() }
}

/// Weights of 100 MiB, their clock, the MiB that the process has of 1024, and their metrics.
struct Bed {
    weights: Arc<LazyWeights>,
    clock: Arc<ManualClock>,
    taken_mib: Arc<AtomicU64>,
    metrics: MetricsRegistry,
}

impl Bed {
    fn new(idle: Option<Duration>) -> Self {
        let (clock, taken_mib) = (Arc::new(ManualClock::default()), Arc::new(AtomicU64::new(0)));
        let (metrics, taken) = (MetricsRegistry::default(), Arc::clone(&taken_mib));
        let memory =
            MemoryBudget::counted_by(Some(1024 * MIB), move || Some(taken.load(Ordering::SeqCst) * MIB));
        let rules = LazyRules { idle, memory, clock: clock.clone() };
        let labels = EncoderLabels { model: "vl".into(), encoder: "image".into() };
        let meters = Arc::new(EncoderMeters::new(&metrics));
        Self {
            weights: Arc::new(LazyWeights::new(rules, 100 * MIB, labels, meters)),
            clock,
            taken_mib,
            metrics,
        }
    }

    fn load(&self) -> Result<(), Failure> {
        self.weights.load(|| Ok(()))
    }

    fn fail(&self) -> Failure {
        self.weights.load::<()>(|| Err(torn())).unwrap_err()
    }

    /// True if they were dropped.
    fn look(&self) -> bool {
        let mut dropped = false;
        self.weights.drop_if_due(|| dropped = true);
        dropped
    }

    /// Sum of the series with these labels.
    fn shows(&self, name: &str, label: &str) -> f64 {
        let text = self.metrics.encode();
        let lines = text.lines().filter(|line| line.starts_with(&format!("triptych_{name}{{")));
        let found = lines.filter(|line| line.contains(label) && line.contains("model=\"vl\""));
        found.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }
}

#[test]
fn weights_are_dropped_when_they_were_idle_for_their_time_and_never_under_a_job() {
    let bed = Bed::new(Some(60 * S));
    bed.load().unwrap();
    let job = bed.weights.hold().unwrap();
    bed.clock.advance(600 * S);
    assert!(!bed.look(), "a job holds them, however long");
    let second = bed.weights.hold().unwrap();
    drop(job);
    bed.clock.advance(600 * S);
    assert!(!bed.look(), "and so does another");
    drop(second);
    bed.clock.advance(60 * S - MS);
    assert!(!bed.look(), "idle since the last job");
    bed.clock.advance(MS);
    assert!(bed.look());
    assert!(!bed.look(), "once");
    assert_eq!(bed.shows("encoder_weight_drops_total", "reason=\"idle\""), 1.0);
    assert_eq!(bed.shows("encoder_weights_loaded", "image"), 0.0);
    bed.load().unwrap();
    assert_eq!(bed.shows("encoder_weights_loaded", "image"), 1.0);
    assert_eq!(bed.shows("encoder_weight_loads_total", "outcome=\"ok\""), 2.0);
}

#[test]
fn idle_weights_go_where_memory_is_short_and_stay_without_a_limit_on_idleness_where_it_is_not() {
    let bed = Bed::new(None);
    bed.load().unwrap();
    bed.clock.advance(1_000_000 * S);
    assert!(!bed.look());
    bed.taken_mib.store(961, Ordering::SeqCst);
    let job = bed.weights.hold().unwrap();
    assert!(!bed.look(), "not under a job");
    drop(job);
    assert!(!bed.look(), "nor at once: the request's next item may be on its way");
    bed.clock.advance(2 * S);
    assert!(bed.look());
    assert_eq!(bed.shows("encoder_weight_drops_total", "reason=\"memory\""), 1.0);
}

#[test]
fn a_job_is_refused_as_by_a_full_worker_where_the_weights_would_not_fit() {
    let bed = Bed::new(None);
    bed.taken_mib.store(925, Ordering::SeqCst);
    let refused = bed.weights.hold().err().expect("no room");
    assert_eq!(refused.class, FailureClass::Overloaded, "the proxy asks another one and ejects nobody");
    assert!(refused.detail.as_deref().is_some_and(|why| why.contains("100 MiB are needed")), "{refused:?}");
    assert_eq!(refused.retry_after, Some(ROOM_PAUSE));
    assert!(bed.load().is_err());
    // There is room, and it is looked at again after the pause.
    bed.taken_mib.store(924, Ordering::SeqCst);
    assert!(bed.weights.hold().is_err());
    bed.clock.advance(ROOM_PAUSE);
    assert!(bed.weights.hold().is_ok() && bed.load().is_ok());
    // Weights that are there need no more room.
    bed.taken_mib.store(1024, Ordering::SeqCst);
    assert!(bed.weights.hold().is_ok());
    assert_eq!(bed.shows("encoder_weight_loads_total", "outcome=\"no_memory\""), 1.0);
}

#[test]
fn a_load_that_fails_is_tried_again_after_pauses_that_grow() {
    let bed = Bed::new(None);
    for pause in [1, 2, 4, 8, 16, 32, 60, 60] {
        let failed = bed.fail();
        assert_eq!(failed.class, FailureClass::Overloaded);
        assert!(failed.detail.as_deref().is_some_and(|why| why.contains("a torn file")), "{failed:?}");
        assert_eq!(failed.retry_after, Some(pause * S));
        bed.clock.advance(pause * S - MS);
        assert_eq!(bed.weights.hold().err().and_then(|refused| refused.retry_after), Some(MS));
        assert!(bed.load().is_err(), "nothing is read before its time");
        bed.clock.advance(MS);
        assert!(bed.weights.hold().is_ok());
    }
    bed.load().unwrap();
    assert_eq!(bed.shows("encoder_weight_loads_total", "outcome=\"failed\""), 8.0);
    // A success begins anew.
    bed.clock.advance(S);
    bed.weights.state.lock().dropped();
    assert_eq!(bed.fail().retry_after, Some(S));
    let panicked = Bed::new(None).weights.load::<()>(|| panic!("our bug")).unwrap_err();
    assert!(panicked.detail.as_deref().is_some_and(|why| why.contains("panicked")));
}

#[test]
fn the_time_of_a_load_is_predicted_from_the_last_one_and_counts_down() {
    let bed = Bed::new(None);
    let cold = || bed.weights.cold();
    assert_eq!(cold(), Some(Duration::from_secs_f64(100.0 / 256.0)), "by the bytes at first");
    let loaded = bed.weights.load(|| {
        bed.clock.advance(10 * S);
        Ok(())
    });
    loaded.unwrap();
    assert_eq!(cold(), None);
    bed.weights.state.lock().dropped();
    assert_eq!(cold(), Some(10 * S));
    let during = bed.weights.load(|| {
        bed.clock.advance(4 * S);
        let left = cold();
        bed.clock.advance(100 * S);
        Ok((left, cold()))
    });
    assert_eq!(during.unwrap(), (Some(6 * S), Some(S)), "never nothing before it is done");
    bed.weights.state.lock().dropped();
    bed.fail();
    assert_eq!(cold(), Some(S + 104 * S), "the pause is before it");
}
