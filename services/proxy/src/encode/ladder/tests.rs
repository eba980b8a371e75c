//! The ladder over workers of paper, on a paused clock: who is asked when, and what it costs.

use super::*;
use crate::budget::RetryPolicy;
use crate::encode::tests::encoded;
use futures::FutureExt;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use triptych_core::FailureClass;
use triptych_runtime::MetricsRegistry;

const MS: Duration = Duration::from_millis(1);
/// When a job is hedged.
const PATIENCE: Duration = Duration::from_millis(300);

/// What a worker does with the job.
#[derive(Clone)]
enum Does {
    /// READY after so long.
    Ready(Duration),
    /// Fails after so long.
    Fails(Duration, Failure),
}

/// Workers, each with what it does the next times.
struct Paper {
    workers: Vec<(WorkerId, Mutex<VecDeque<Does>>)>,
    began: Instant,
    /// Who was asked, and when.
    asked: Mutex<Vec<(String, Duration)>>,
    n_cancelled: AtomicUsize,
    /// When it is known better how long a job takes, and what.
    revised: Option<(Duration, Duration)>,
}

struct CountDrop<'a>(Option<&'a AtomicUsize>);

impl Drop for CountDrop<'_> {
    fn drop(&mut self) {
        if let Some(count) = self.0 {
            count.fetch_add(1, Ordering::SeqCst);
        }
    }
}

impl Paper {
    fn new(workers: &[(&str, &[Does])]) -> Self {
        let worker = |(name, does): &(&str, &[Does])| {
            (WorkerId::new(*name), Mutex::new(does.iter().cloned().collect()))
        };
        Self {
            workers: workers.iter().map(worker).collect(),
            began: Instant::now(),
            asked: Mutex::default(),
            n_cancelled: AtomicUsize::new(0),
            revised: None,
        }
    }

    fn asked(&self) -> Vec<(String, Duration)> {
        self.asked.lock().unwrap().clone()
    }

    fn names(&self) -> Vec<String> {
        self.asked().into_iter().map(|(name, _)| name).collect()
    }
}

impl Rungs for Paper {
    type Worker = WorkerId;

    async fn worker(&self, seen: &[WorkerId]) -> Result<WorkerId, Failure> {
        let first = self.workers.first().map(|(id, _)| id.clone());
        self.spare(seen).or(first).ok_or_else(|| Failure::unavailable("there is none"))
    }

    fn spare(&self, seen: &[WorkerId]) -> Option<WorkerId> {
        self.workers.iter().map(|(id, _)| id).find(|id| !seen.contains(id)).cloned()
    }

    fn id(worker: &WorkerId) -> &WorkerId {
        worker
    }

    fn is_last_resort(worker: &WorkerId) -> bool {
        worker.as_str().starts_with("pd")
    }

    fn patience(&self, _: &WorkerId) -> Duration {
        PATIENCE
    }

    async fn revised(&self) -> Duration {
        let Some((after, patience)) = self.revised else { return std::future::pending().await };
        sleep(after).await;
        patience
    }

    fn attempt(&self, worker: WorkerId) -> BoxFuture<'_, Result<Encoded, CallFailure>> {
        self.asked.lock().unwrap().push((worker.to_string(), self.began.elapsed()));
        let (_, does) = self.workers.iter().find(|(id, _)| *id == worker).unwrap();
        let does = does.lock().unwrap().pop_front().unwrap_or(Does::Ready(MS));
        async move {
            let mut counts = CountDrop(Some(&self.n_cancelled));
            let result = match does {
                Does::Ready(after) => {
                    sleep(after).await;
                    Ok(encoded(1))
                }
                Does::Fails(after, failure) => {
                    sleep(after).await;
                    Err(failure.into())
                }
            };
            counts.0 = None;
            result
        }
        .boxed()
    }
}

fn unavailable() -> Failure {
    Failure::unavailable("not now")
}

struct Climbed {
    result: Result<Encoded, Fell>,
    metrics: String,
    took: Duration,
}

impl Climbed {
    fn sent(&self, why: &str) -> bool {
        self.metrics.contains(&format!("triptych_encode_jobs_total{{why=\"{why}\"}} 1"))
    }

    fn failure(self) -> Failure {
        match self.result {
            Err(Fell::Failed(failure)) => failure,
            other => panic!("{other:?}"),
        }
    }
}

async fn climb(paper: &Paper, policy: RetryPolicy, outrun: bool) -> Climbed {
    let (registry, budget) = (MetricsRegistry::default(), RetryBudget::new(policy));
    let meters = EncodeMeters::new(&registry);
    let ladder = Ladder { rungs: paper, budget: &budget, meters: &meters, outrun: &|| outrun };
    let result = ladder.run().await;
    Climbed { result, metrics: registry.encode(), took: paper.began.elapsed() }
}

const GENEROUS: RetryPolicy = RetryPolicy { share: 0.2, per_second: 5.0 };
const NOTHING: RetryPolicy = RetryPolicy { share: 0.0, per_second: 0.0 };

#[tokio::test(start_paused = true)]
async fn a_job_that_is_done_in_its_time_is_sent_once() {
    let paper = Paper::new(&[("a", &[Does::Ready(PATIENCE - MS)]), ("b", &[])]);
    let climbed = climb(&paper, GENEROUS, false).await;
    assert!(climbed.result.is_ok() && climbed.sent("first") && !climbed.sent("hedge"));
    assert_eq!(paper.names(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn the_hedge_goes_out_exactly_when_patience_ends_and_the_first_ready_wins() {
    let slow = [Does::Ready(10 * PATIENCE)];
    let paper = Paper::new(&[("a", &slow), ("b", &[Does::Ready(20 * MS)]), ("c", &[])]);
    let climbed = climb(&paper, GENEROUS, false).await;
    assert!(climbed.result.is_ok() && climbed.sent("hedge"));
    assert_eq!(paper.asked(), [("a".to_owned(), Duration::ZERO), ("b".to_owned(), PATIENCE)]);
    assert_eq!(climbed.took, PATIENCE + 20 * MS);
    assert_eq!(paper.n_cancelled.load(Ordering::SeqCst), 1, "the slow one is told to stop");
    // The first may still win.
    let paper = Paper::new(&[("a", &[Does::Ready(PATIENCE + MS)]), ("b", &slow)]);
    let climbed = climb(&paper, GENEROUS, false).await;
    assert_eq!((climbed.result.is_ok(), climbed.took), (true, PATIENCE + MS));
    assert_eq!((paper.names().len(), paper.n_cancelled.load(Ordering::SeqCst)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_job_is_hedged_once_and_only_to_a_worker_that_has_not_had_it() {
    let slow = [Does::Ready(10 * PATIENCE)];
    let paper = Paper::new(&[("a", &slow), ("b", &slow), ("c", &slow)]);
    assert!(climb(&paper, GENEROUS, false).await.result.is_ok());
    assert_eq!(paper.names(), ["a", "b"]);
    let alone = Paper::new(&[("a", &slow)]);
    let climbed = climb(&alone, GENEROUS, false).await;
    assert_eq!((alone.names().len(), climbed.took), (1, 10 * PATIENCE));
}

#[tokio::test(start_paused = true)]
async fn without_budget_there_is_neither_hedge_nor_retry() {
    let paper = Paper::new(&[("a", &[Does::Ready(10 * PATIENCE)]), ("b", &[])]);
    let climbed = climb(&paper, NOTHING, false).await;
    assert!(climbed.metrics.contains("triptych_retry_budget_exhausted_total{for=\"hedge\"} 1"));
    assert_eq!((climbed.took, paper.names().len()), (10 * PATIENCE, 1));
    let paper = Paper::new(&[("a", &[Does::Fails(MS, unavailable())]), ("b", &[])]);
    let climbed = climb(&paper, NOTHING, false).await;
    assert!(climbed.metrics.contains("triptych_retry_budget_exhausted_total{for=\"retry\"} 1"));
    assert_eq!(climbed.failure(), unavailable());
}

#[tokio::test(start_paused = true)]
async fn a_failed_job_goes_elsewhere_at_last_to_a_pd_worker_and_is_given_up_in_the_end() {
    let fails = |n: usize| vec![Does::Fails(MS, unavailable()); n];
    let (all, one) = (fails(9), fails(1));
    let paper = Paper::new(&[("a", &one), ("b", &one), ("pd", &[])]);
    let climbed = climb(&paper, GENEROUS, false).await;
    assert!(climbed.result.is_ok() && climbed.sent("retry") && climbed.sent("fallback"));
    assert_eq!(paper.names(), ["a", "b", "pd"]);
    let paper = Paper::new(&[("a", &all), ("b", &all)]);
    assert_eq!(climb(&paper, GENEROUS, false).await.failure(), unavailable());
    assert_eq!(paper.names().len(), ATTEMPTS as usize);
}

#[tokio::test(start_paused = true)]
async fn a_hedge_that_fails_leaves_the_first_its_time_and_the_items_own_fault_ends_both() {
    let slow = [Does::Ready(2 * PATIENCE)];
    let paper = Paper::new(&[("a", &slow), ("b", &[Does::Fails(MS, unavailable())]), ("c", &[])]);
    let climbed = climb(&paper, GENEROUS, false).await;
    assert_eq!((climbed.result.is_ok(), climbed.took), (true, 2 * PATIENCE));
    assert_eq!(paper.names(), ["a", "b"]);
    let broken = Failure::invalid("the JPEG is cut off");
    let paper = Paper::new(&[("a", &slow), ("b", &[Does::Fails(MS, broken.clone())])]);
    let climbed = climb(&paper, GENEROUS, false).await;
    assert_eq!(climbed.failure(), broken);
    assert_eq!(paper.n_cancelled.load(Ordering::SeqCst), 1);
}

#[tokio::test(start_paused = true)]
async fn a_job_whose_lease_is_anothers_is_not_retried() {
    let paper = Paper::new(&[("a", &[Does::Fails(MS, unavailable())]), ("b", &[])]);
    assert!(matches!(climb(&paper, GENEROUS, true).await.result, Err(Fell::Outrun)));
    let refused = unavailable().with_param("fence");
    let paper = Paper::new(&[("a", &[Does::Fails(MS, refused)]), ("b", &[])]);
    assert!(matches!(climb(&paper, GENEROUS, false).await.result, Err(Fell::Outrun)));
    assert_eq!(paper.names(), ["a"]);
    let nobody = Paper::new(&[]);
    assert_eq!(climb(&nobody, GENEROUS, false).await.failure().class, FailureClass::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn patience_follows_what_is_learned_of_the_job() {
    let slow = [Does::Ready(20 * PATIENCE)];
    for (learned, expect) in [(5 * PATIENCE, 5 * PATIENCE), (PATIENCE / 2, PATIENCE / 2), (MS, 10 * MS)] {
        let mut paper = Paper::new(&[("a", &slow), ("b", &[])]);
        paper.revised = Some((10 * MS, learned));
        assert!(climb(&paper, GENEROUS, false).await.result.is_ok());
        assert_eq!(paper.asked()[1], ("b".to_owned(), expect), "{learned:?}");
    }
}
